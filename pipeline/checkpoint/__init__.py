"""Checkpoints on disk: read from headers, linted, and listed with hashes.  Needs no torch."""

from pipeline.checkpoint.finding import Finding
from pipeline.checkpoint.reading import Checkpoint

__all__ = ["Checkpoint", "Finding"]
