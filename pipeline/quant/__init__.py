"""Requantization: exact where the format allows it, llm-compressor's rounding bit for bit where it does not."""

from pipeline.quant.recipe import Recipe

__all__ = ["Recipe"]
