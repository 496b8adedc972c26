"""The noise floor: the baseline against itself.  Greedy output depends on what shares a batch, so it is not zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.stats.paired import Flips, mcnemar_exact, tango_clustered


def noise_floor(
    first: Sequence[bool], second: Sequence[bool], clusters: Sequence[str], alpha: float = 0.05
) -> dict[str, Any]:
    """Two runs of the same model over the same prompts, in the same order.

    ``floor`` is the larger of the two one-sided bounds of the difference at level ``alpha``: what this A/A run cannot
    exclude as noise.  A difference within it is noise, and a margin below it would judge noise.
    """
    flips = Flips.of(first, second)
    lower, upper = tango_clustered(first, second, clusters, alpha)
    return {
        "n": flips.n,
        "difference": flips.difference,
        "flip_rate": flips.discordance,
        "right_to_wrong": flips.lost,
        "wrong_to_right": flips.won,
        "mcnemar_p": mcnemar_exact(flips) if len(set(clusters)) == flips.n else None,
        "floor": max(-lower, upper),
    }
