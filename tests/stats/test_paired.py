"""Paired tests against published numbers, an independent maximization, and exact enumeration of what can happen."""

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats.proportion import proportions_ztest

from pipeline.stats.multiplicity import holm
from pipeline.stats.noise import noise_floor
from pipeline.stats.paired import (
    Flips,
    bootstrap_interval,
    cluster_alpha,
    cluster_freedom,
    effective_flips,
    inferiority_p,
    mcnemar_exact,
    no_flip_bound,
    noninferiority_p,
    scaled,
    score_statistic,
    tango_clustered,
    tango_interval,
)

# Fagerland, Lydersen, Laake: Recommended tests and confidence intervals for paired binomial proportions, Statistics in
# Medicine 33 (2014) 2850-2875, and the same authors' R package `contingencytables` (chapter 8).
CHEMOTHERAPY = Flips(n=161, lost=16, won=6, both_right=59)
AIRWAY = Flips(n=21, lost=7, won=1, both_right=1)


def test_published_intervals_and_p():
    assert tango_interval(CHEMOTHERAPY, 0.025) == pytest.approx((-0.1240, -0.0054), abs=5e-5)
    assert mcnemar_exact(CHEMOTHERAPY) == pytest.approx(0.052479, abs=1e-6)
    assert tango_interval(AIRWAY, 0.025) == pytest.approx((-0.517, -0.026), abs=5e-4)


@pytest.mark.parametrize(
    "lost, won, n, delta", [(16, 6, 161, -0.05), (3, 0, 40, -0.1), (0, 5, 60, 0.02), (9, 9, 50, -0.3)]
)
def test_the_constrained_estimate_is_the_maximum_of_the_likelihood(lost, won, n, delta):
    """The closed form against a search over P(lost) that knows only the trinomial likelihood."""

    def minus_log_likelihood(q):
        p_won, same = q + delta, 1 - 2 * q - delta
        terms = [(lost, q), (won, p_won), (n - lost - won, same)]
        return -sum(count * np.log(share) for count, share in terms if count)

    low, high = max(0, -delta) + 1e-9, (1 - delta) / 2 - 1e-9
    q = optimize.minimize_scalar(minus_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    expected = (won - lost - n * delta) / np.sqrt(n * (2 * q + delta - delta**2))
    assert float(score_statistic(lost, won, n, delta)) == pytest.approx(expected, abs=1e-4)


def test_equal_pairs_prove_little_and_their_p_is_one():
    flips = Flips.of([True] * 100, [True] * 100)
    assert mcnemar_exact(flips) == 1.0
    lower, upper = tango_interval(flips, 0.05)
    assert lower == pytest.approx(-0.0263, abs=1e-4) == -upper
    assert no_flip_bound(100, 0.05) == pytest.approx(-lower)
    # The bootstrap alone would call that proof.
    assert bootstrap_interval([0.0] * 100, range(100), 0.05) == (0.0, 0.0)


def test_interval_and_p_values_agree():
    for flips in (CHEMOTHERAPY, AIRWAY, Flips(85, 4, 1, 70), Flips(30, 30, 0, 0), Flips(30, 0, 30, 0)):
        lower, upper = tango_interval(flips, 0.05)
        assert lower <= flips.difference <= upper
        for margin in (0.01, 0.05, 0.10, 0.2):
            assert (noninferiority_p(flips, margin) < 0.05) == (lower > -margin)
            assert (inferiority_p(flips, margin) < 0.05) == (upper < -margin)


def test_paired_sees_what_unpaired_does_not():
    n, lost, won = 400, 14, 2
    before = 340
    flips = Flips(n, lost, won, before - lost)
    after = before - lost + won
    unpaired = proportions_ztest([before, after], [n, n])[1]
    assert mcnemar_exact(flips) < 0.05 < unpaired


def test_flips_are_counted_both_ways():
    flips = Flips.of([1, 1, 1, 0, 0], [1, 0, 0, 1, 0])
    assert (flips.n, flips.lost, flips.won, flips.both_right) == (5, 2, 1, 1)
    assert flips.difference == pytest.approx(-0.2) and flips.discordance == pytest.approx(0.6)
    assert flips.recovery == pytest.approx(2 / 3)
    assert Flips.of([0, 0], [1, 0]).recovery is None
    for wrong in ([1], []):
        with pytest.raises(ValueError):
            Flips.of(wrong, [])


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


# --- exact enumeration ---


def pass_probability(n: int, discordance: float, loss: float, margin: float, alpha: float = 0.05) -> float:
    """P(the score test says: loss below the margin), summed over every possible pair of counts."""
    p_lost, p_won = (discordance + loss) / 2, (discordance - loss) / 2
    assert p_won >= 0
    center, spread = n * discordance, 9 * np.sqrt(n * discordance * (1 - discordance)) + 9
    totals = np.arange(max(0, int(center - spread)), min(n, int(center + spread)) + 1)
    lost = np.arange(totals[-1] + 1)
    grid_lost, grid_total = np.meshgrid(lost, totals)
    possible = grid_lost <= grid_total
    weight = stats.binom.pmf(grid_total, n, discordance) * stats.binom.pmf(grid_lost, grid_total, p_lost / discordance)
    z = score_statistic(np.where(possible, grid_lost, 0), np.where(possible, grid_total - grid_lost, 0), n, -margin)
    total = weight[possible].sum()
    assert total == pytest.approx(1, abs=1e-9)
    return float(weight[possible & (z > stats.norm.isf(alpha))].sum())


@pytest.mark.parametrize(
    "n, discordance, margin",
    [
        (246, 0.06, 0.05),
        (246, 0.10, 0.05),
        (246, 0.20, 0.05),
        (78, 0.12, 0.10),
        (78, 0.20, 0.10),
        (78, 0.30, 0.10),
        (1500, 0.05, 0.02),
        (1500, 0.10, 0.03),
        (6181, 0.10, 0.01),
    ],
)
def test_false_pass_rate_at_the_margin_is_at_most_five_and_a_half_percent(n, discordance, margin):
    assert pass_probability(n, discordance, loss=margin, margin=margin) <= 0.055


@pytest.mark.parametrize("n, margin", [(6185, 0.01), (1546, 0.02), (687, 0.03), (247, 0.05)])
def test_an_equally_good_variant_passes_with_the_tabulated_power(n, margin):
    """n = 6.18 x discordance / margin^2 at a discordance of 10 %: the gate passes four of five variants without loss."""
    assert pass_probability(n, 0.10, loss=0.0, margin=margin) == pytest.approx(0.80, abs=0.03)


def detection_probability(n: int, discordance: float, loss: float) -> float:
    """P(one-sided score test finds the loss), exactly."""
    p_lost = (discordance + loss) / 2 / discordance
    totals = np.arange(0, n + 1)
    weight = stats.binom.pmf(totals, n, discordance)
    totals = totals[weight > 1e-12]
    power = 0.0
    for total in totals:
        lost = np.arange(total + 1)
        z = score_statistic(lost, total - lost, n, 0.0)
        found = z < -stats.norm.isf(0.05)
        power += stats.binom.pmf(total, n, discordance) * stats.binom.pmf(lost[found], total, p_lost).sum()
    return float(power)


@pytest.mark.parametrize("n, discordance", [(1235, 0.02), (3090, 0.05), (6181, 0.10)])
def test_power_is_as_tabulated(n, discordance):
    """A one-point drop is seen with power .8 at these n (one-sided .05)."""
    assert detection_probability(n, discordance, 0.01) == pytest.approx(0.80, abs=0.03)


# --- clusters ---


def test_independent_pairs_have_no_design_effect():
    before, after = [True] * 60, [True] * 55 + [False] * 5
    assert effective_flips(before, after, range(60)) == (1.0, 60.0)
    assert tango_clustered(before, after, range(60), 0.05) == tango_interval(Flips.of(before, after), 0.05)


def test_errors_that_come_in_clusters_count_as_fewer():
    before = [True] * 200
    after = [cluster not in (3, 7) for cluster in range(20) for _ in range(10)]  # two documents lost whole
    clusters = [cluster for cluster in range(20) for _ in range(10)]
    effect, n = effective_flips(before, after, clusters)
    assert cluster_alpha(clusters, 0.05) < 0.05 == cluster_alpha(range(60), 0.05)
    assert effect == pytest.approx(10.5, abs=0.6) and n == pytest.approx(200 / effect)
    independent = tango_interval(Flips.of(before, after), 0.05)[0]
    assert tango_clustered(before, after, clusters, 0.05)[0] < independent - 0.08
    scaled_pairs, bound = scaled(Flips.of(before, after), effect), tango_clustered(before, after, clusters, 0.05)[0]
    assert noninferiority_p(scaled_pairs, -bound, cluster_freedom(clusters)) == pytest.approx(0.05, abs=1e-6)
    # Few flips in scattered documents: still 20 documents.
    scattered = [place != 5 for place in range(200)]
    assert effective_flips(before, scattered, clusters)[1] == pytest.approx(20)
    # No flip at all in 20 documents proves no more than 20 answers would.
    assert tango_clustered(before, before, clusters, 0.05)[0] == pytest.approx(
        -no_flip_bound(20, cluster_alpha(clusters, 0.05))
    )


def test_bootstrap_resamples_clusters():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.choice([0.0, -1.0], 30, p=[0.8, 0.2]), 10)
    alone = bootstrap_interval(values, range(300), 0.05)
    together = bootstrap_interval(values, np.repeat(np.arange(30), 10), 0.05)
    assert together[1] - together[0] > 2.5 * (alone[1] - alone[0])
    assert bootstrap_interval(values, range(300), 0.05) == alone  # seeded
    assert bootstrap_interval([0.0, -1.0], ["a", "a"], 0.05) == (-1.0, 1.0)  # one document decides nothing


def test_false_pass_rate_with_clusters_by_simulation():
    """40 documents of 4 questions that share their fate half the time; true loss at the margin.  Fixed seed, 20,000
    runs.

    Counting questions as independent passes too often; counting documents does not.
    """
    rng = np.random.default_rng(11)
    margin, runs, passes, naive = 0.10, 20_000, 0, 0
    clusters = np.repeat(np.arange(40), 4)
    z = stats.norm.isf(cluster_alpha(clusters, 0.05))
    for _ in range(runs):
        draw = np.where(rng.random(160) < 0.5, np.repeat(rng.random(40), 4), rng.random(160))
        lost, won = draw < 0.14, (draw >= 0.14) & (draw < 0.18)
        effect, n = effective_flips(~won, ~lost, clusters)
        passes += float(score_statistic(lost.sum() / effect, won.sum() / effect, n, -margin)) > z
        naive += float(score_statistic(lost.sum(), won.sum(), 160, -margin)) > stats.norm.isf(0.05)
    assert passes / runs <= 0.055 < naive / runs


def test_noise_floor():
    first = [True] * 95 + [False] * 5
    second = [True] * 93 + [False] * 2 + [True] * 2 + [False] * 3
    floor = noise_floor(first, second, range(100))
    assert floor["difference"] == 0 and floor["flip_rate"] == 0.04 and floor["mcnemar_p"] == 1.0
    assert 0.02 < floor["floor"] < 0.05
