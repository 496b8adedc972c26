"""What a re-encoding changed: counted weight by weight, summed per tensor kind and layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Damage:
    """``inexact`` of ``weights`` decode to another number than the source's; ``error`` and ``signal`` are sums of
    squares.

    ``spread`` is the largest difference of two MXFP4 group exponents under one output scale, all-zero groups left out;
    ``None`` for sources without group exponents.
    """

    weights: int
    inexact: int
    error: float
    signal: float
    spread: int | None

    def __add__(self, other: Damage) -> Damage:
        spreads = [spread for spread in (self.spread, other.spread) if spread is not None]
        return Damage(
            self.weights + other.weights,
            self.inexact + other.inexact,
            self.error + other.error,
            self.signal + other.signal,
            max(spreads) if spreads else None,
        )


NOTHING = Damage(0, 0, 0.0, 0.0, None)


def report(damage: Damage) -> dict[str, Any]:
    """``exact_fraction``, ``relative_rmse``, ``sqnr_db`` (``None`` where nothing changed: the ratio is infinite),
    ``spread``.
    """
    relative = math.sqrt(damage.error / damage.signal) if damage.error and damage.signal else 0.0
    return {
        "weights": damage.weights,
        "inexact_weights": damage.inexact,
        "exact_fraction": 1.0 - damage.inexact / damage.weights if damage.weights else 1.0,
        "relative_rmse": relative,
        "sqnr_db": -20 * math.log10(relative) if relative else None,
        "largest_exponent_spread": damage.spread,
    }


def summarize(rows: Iterable[tuple[str, int | None, Damage]]) -> dict[str, Any]:
    """The damage report: in total, and per (kind, layer).  ``rows`` are (tensor kind, layer or ``None``, damage)."""
    sums: dict[tuple[str, int], Damage] = defaultdict(lambda: NOTHING)
    for kind, layer, damage in rows:
        sums[kind, -1 if layer is None else layer] += damage
    total = sum(sums.values(), NOTHING)
    return {
        "total": report(total),
        "by_kind_and_layer": [
            {"kind": kind, "layer": None if layer < 0 else layer} | report(damage)
            for (kind, layer), damage in sorted(sums.items())
        ],
    }
