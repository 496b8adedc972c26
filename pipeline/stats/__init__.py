"""Paired statistics of two evaluation runs: what a difference means, and what a run of this size can show at all."""
