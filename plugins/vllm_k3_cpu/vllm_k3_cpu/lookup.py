"""Decoding 8-bit and packed 4-bit codes through 256-entry tables: on CPU several times faster than torch's casts."""

from __future__ import annotations

import functools

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_INTEGER_OF_BYTES = {4: torch.int32, 8: torch.int64}


def decode(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """``table[codes]`` for a [256] table and 8-bit codes of any shape and type."""
    flat = codes.view(torch.uint8).flatten().int()
    return table.index_select(0, flat).view(codes.shape)


@functools.lru_cache(maxsize=64)
def fp8_table(fp8_type: torch.dtype, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """[256]: value of every FP8 code, times ``scale``."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8_type)
    return (codes.float() * scale).to(dtype)


@functools.lru_cache(maxsize=8)
def e8m0_table(dtype: torch.dtype) -> torch.Tensor:
    """[256]: 2^(code - 127); code 255 is not a number (OCP MX specification)."""
    table = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
    table[255] = float("nan")
    return table.to(dtype)


@functools.lru_cache(maxsize=8)
def _e2m1_pair_table(dtype: torch.dtype) -> torch.Tensor:
    """[256] integers, each the bits of the two values packed in a byte, low nibble first."""
    values = torch.tensor(_E2M1, dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], -1)
    return pairs.view(_INTEGER_OF_BYTES[2 * dtype.itemsize]).squeeze(-1)


def decode_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packed FP4 E2M1 [..., K / 2] uint8 -> [..., K]."""
    return decode(_e2m1_pair_table(dtype), packed).view(dtype)
