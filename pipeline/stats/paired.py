"""Tests and bounds for paired right/wrong answers.

Notation: of n pairs, ``lost`` are right before and wrong after, ``won`` the reverse; the difference is (won - lost) /
n, so a loss is negative.  scipy and statsmodels do what they have; Tango's score interval they lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize
from scipy import stats as scipy_stats
from statsmodels.stats.contingency_tables import mcnemar


@dataclass(frozen=True)
class Flips:
    """Counts of n pairs."""

    n: int
    lost: int
    won: int
    both_right: int

    @classmethod
    def of(cls, before: Sequence[bool], after: Sequence[bool]) -> Flips:
        """Count flips both ways.  Raises ``ValueError`` for sequences of different length or none."""
        if len(before) != len(after) or not len(before):
            raise ValueError(f"{len(before)} and {len(after)} answers are no pairs")
        pairs = list(zip(map(bool, before), map(bool, after), strict=True))
        return cls(len(pairs), pairs.count((True, False)), pairs.count((False, True)), pairs.count((True, True)))

    @property
    def difference(self) -> float:
        """Accuracy after minus before."""
        return (self.won - self.lost) / self.n

    @property
    def discordance(self) -> float:
        """Share of pairs that differ."""
        return (self.won + self.lost) / self.n

    @property
    def recovery(self) -> float | None:
        """Accuracy after as a share of that before; ``None`` where nothing was right before."""
        right = self.both_right + self.lost
        return (self.both_right + self.won) / right if right else None


def mcnemar_exact(flips: Flips) -> float:
    """Two-sided exact McNemar p (binomial over the discordant pairs); 1 when there are none."""
    if flips.lost + flips.won == 0:
        return 1.0
    neither = flips.n - flips.both_right - flips.lost - flips.won
    return float(mcnemar([[flips.both_right, flips.lost], [flips.won, neither]], exact=True).pvalue)


def score_statistic(lost: np.ndarray | int, won: np.ndarray | int, n: int, delta: float) -> np.ndarray:
    """Tango's z for H0: difference = ``delta``; positive when the observed difference lies above.

    T. Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17 (1998) 891-908: z = (won - lost - n delta) / sqrt(n (2 q + delta (1 - delta))) in the
    direction won - lost, where q is the constrained maximum-likelihood estimate of P(lost), the larger root of 2n q^2
    + (-won - lost + (2n - won + lost) delta) q - lost delta (1 - delta) = 0.  Vectorized over ``lost`` and ``won``.
    """
    lost, won = np.asarray(lost, float), np.asarray(won, float)
    linear = -won - lost + (2 * n - won + lost) * delta
    constant = -lost * delta * (1 - delta)
    q = (np.sqrt(np.maximum(linear**2 - 8 * n * constant, 0)) - linear) / (4 * n)
    variance = n * (2 * q + delta * (1 - delta))
    numerator = won - lost - n * delta
    with np.errstate(divide="ignore", invalid="ignore"):
        z = numerator / np.sqrt(np.maximum(variance, 0))
    certain = np.select([numerator > 1e-9, numerator < -1e-9], [np.inf, -np.inf], 0.0)
    return np.where(variance > 1e-12, z, certain)


def tango_interval(flips: Flips, alpha: float) -> tuple[float, float]:
    """Score interval of the difference; each end is a one-sided bound at level ``alpha``.

    Works where nothing is discordant: n equal pairs bound the loss at z^2 / (n + z^2), not at 0.
    """
    z = float(scipy_stats.norm.isf(alpha))

    def excess(delta: float, sign: int) -> float:
        value = float(score_statistic(flips.lost, flips.won, flips.n, delta))
        return float(np.clip(sign * value, -1e9, 1e9)) - z

    edge = 1 - 1e-12
    seen = float(np.clip(flips.difference, -edge, edge))
    lower = -1.0 if excess(-edge, 1) <= 0 else optimize.brentq(excess, -edge, seen, args=(1,), xtol=1e-12)
    upper = 1.0 if excess(edge, -1) <= 0 else optimize.brentq(excess, seen, edge, args=(-1,), xtol=1e-12)
    return lower, upper


def noninferiority_p(flips: Flips, margin: float, freedom: int | None = None) -> float:
    """One-sided score p of H0: the loss is ``margin`` or more.  Small: the loss is smaller than the margin.

    ``freedom``: clusters - 1 where a design effect was estimated (Student's t), ``None`` for independent pairs.
    """
    return _tail(score_statistic(flips.lost, flips.won, flips.n, -margin), freedom)


def inferiority_p(flips: Flips, margin: float, freedom: int | None = None) -> float:
    """One-sided score p of H0: the loss is ``margin`` or less.  Small: the loss is larger than the margin."""
    return _tail(-score_statistic(flips.lost, flips.won, flips.n, -margin), freedom)


def _tail(z: np.ndarray, freedom: int | None) -> float:
    return float(scipy_stats.norm.sf(z) if freedom is None else scipy_stats.t.sf(z, freedom))


def bootstrap_interval(
    differences: Sequence[float], clusters: Sequence[str], alpha: float, *, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean difference, clusters resampled whole; each end one-sided at level ``alpha``.

    ``differences`` are per pair (after - before), in [-1, 1].  With equal pairs only, it collapses to a point: never
    use it without :func:`tango_interval` or :func:`no_flip_bound`.
    """
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(differences, float), minlength=len(names))
    sizes = np.bincount(index, minlength=len(names)).astype(float)
    if len(names) < 2:
        return -1.0, 1.0
    draws = scipy_stats.bootstrap(
        (sums, sizes),
        lambda s, m, axis: s.sum(axis) / m.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        method="percentile",
        confidence_level=1 - 2 * alpha,
        rng=np.random.default_rng(seed),
    )
    return float(draws.confidence_interval.low), float(draws.confidence_interval.high)


def effective_flips(before: Sequence[bool], after: Sequence[bool], clusters: Sequence[str]) -> tuple[float, float]:
    """(design effect, effective n) of clustered pairs.

    A cluster never counts for more than one pair: flips that are few and scattered say nothing about a document that
    derails as a whole, which the sample may just not hold.  Where the variance between clusters (of a ratio of means)
    asks for a larger effect, as with clusters of unequal size, that is taken.
    """
    difference = np.asarray(after, float) - np.asarray(before, float)
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    n, count = len(difference), len(names)
    effect = n / count
    if 1 < count < n and (independent := float(difference.var()) / n) > 0:
        residual = np.bincount(index, weights=difference - difference.mean(), minlength=count)
        effect = max(effect, count / (count - 1) * float(residual @ residual) / n**2 / independent)
    return effect, n / effect


def tango_clustered(
    before: Sequence[bool], after: Sequence[bool], clusters: Sequence[str], alpha: float
) -> tuple[float, float]:
    """:func:`tango_interval` on counts divided by the design effect (Rao and Scott 1992, for clustered binary data)."""
    effect, _ = effective_flips(before, after, clusters)
    return tango_interval(scaled(Flips.of(before, after), effect), cluster_alpha(clusters, alpha))


def cluster_alpha(clusters: Sequence[str], alpha: float) -> float:
    """The normal tail to use at level ``alpha`` when the design effect itself was estimated: Student's t, clusters -
    1.
    """
    freedom = cluster_freedom(clusters)
    return alpha if freedom is None else float(scipy_stats.norm.sf(scipy_stats.t.isf(alpha, freedom)))


def cluster_freedom(clusters: Sequence[str]) -> int | None:
    """Clusters - 1; ``None`` when every pair is a cluster of its own.  One cluster has none to speak of and counts as
    1.
    """
    count = len(set(clusters))
    return None if count == len(clusters) else max(1, count - 1)


def scaled(flips: Flips, effect: float) -> Flips:
    """Counts divided by a design effect: fractional on purpose, the score statistic is defined for them."""
    return (
        flips
        if effect == 1
        else Flips(flips.n / effect, flips.lost / effect, flips.won / effect, flips.both_right / effect)
    )


def no_flip_bound(n: float, alpha: float) -> float:
    """The loss that n equal pairs cannot exclude: z^2 / (n + z^2), the score bound at no discordance."""
    z2 = float(scipy_stats.norm.isf(alpha)) ** 2
    return z2 / (n + z2)
