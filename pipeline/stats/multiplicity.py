"""Many questions at once."""

from __future__ import annotations

from statsmodels.stats.multitest import multipletests


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]] if p_values else []
