"""Sample sizes against the tabulated ones, and the two directions against each other."""

import pytest

from pipeline.stats.power import items_to_detect_unpaired, pairs_for_margin, pairs_to_detect, smallest_margin


def test_tabulated_sizes():
    assert [pairs_to_detect(0.01, pd) for pd in (0.02, 0.05, 0.10)] == pytest.approx([1235, 3090, 6181], abs=2)
    assert items_to_detect_unpaired(0.9, 0.01) == pytest.approx(11618, abs=2)
    assert [pairs_for_margin(margin, 0.10) for margin in (0.01, 0.02, 0.03)] == pytest.approx([6183, 1546, 687], abs=2)
    assert pairs_for_margin(0.05, 0.10) == 248


def test_smallest_margin_inverts_the_size():
    for margin, pd in ((0.02, 0.05), (0.05, 0.1), (0.1, 0.001)):
        n = pairs_for_margin(margin, pd)
        assert smallest_margin(n, pd) <= margin < smallest_margin(n - 1, pd)


def test_no_discordance_still_needs_pairs():
    assert pairs_for_margin(0.026, 0.0) == 102 and smallest_margin(100, 0.0) == pytest.approx(0.0263, abs=1e-4)


def test_a_loss_beyond_the_discordance_is_an_error():
    with pytest.raises(ValueError):
        pairs_to_detect(0.1, 0.05)
