"""What a run of this size can show: the smallest margin, the n needed, the power.

For a paired difference, n = (z_alpha sqrt(pd) + z_beta sqrt(pd - delta^2))^2 / delta^2 with pd the share of
discordant pairs (Connor, Biometrics 43 (1987) 207-211, after Miettinen 1968).  For non-inferiority with no true loss
the same with ``pd - delta^2`` replaced by pd: n = (z_alpha + z_beta)^2 pd / margin^2, 6.18 pd / margin^2 at one-sided
.05 and power .8.
"""

from __future__ import annotations

import math

from scipy import stats as scipy_stats


def _z(tail: float) -> float:
    return float(scipy_stats.norm.isf(tail))


def pairs_to_detect(loss: float, discordance: float, alpha: float = 0.05, power: float = 0.80) -> int:
    """Pairs for a one-sided test to find a true ``loss``.  Raises ``ValueError`` when the loss exceeds the
    discordance.
    """
    if not 0 < loss <= discordance <= 1:
        raise ValueError(f"a loss of {loss} needs a discordance of at least as much, got {discordance}")
    root = _z(alpha) * math.sqrt(discordance) + _z(1 - power) * math.sqrt(discordance - loss**2)
    return math.ceil(root**2 / loss**2)


def items_to_detect_unpaired(accuracy: float, loss: float, alpha: float = 0.05, power: float = 0.80) -> int:
    """Items an arm when the two runs share none: what pairing saves."""
    other = accuracy - loss
    spread = accuracy * (1 - accuracy) + other * (1 - other)
    return math.ceil((_z(alpha) + _z(1 - power)) ** 2 * spread / loss**2)


def pairs_for_margin(margin: float, discordance: float, alpha: float = 0.05, power: float = 0.80) -> int:
    """Pairs to show, with ``power``, that an equally good variant loses less than ``margin``.

    At least what equal pairs alone need: z^2 (1 - margin) / margin.
    """
    needed = (_z(alpha) + _z(1 - power)) ** 2 * discordance / margin**2
    return math.ceil(max(needed, _z(alpha) ** 2 * (1 - margin) / margin))


def smallest_margin(n: float, discordance: float, alpha: float = 0.05, power: float = 0.80) -> float:
    """The smallest margin that n pairs at this discordance can support; the inverse of :func:`pairs_for_margin`."""
    z2 = _z(alpha) ** 2
    return max((_z(alpha) + _z(1 - power)) * math.sqrt(discordance / n), z2 / (n + z2))
