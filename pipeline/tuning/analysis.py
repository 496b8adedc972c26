"""From measured points to statements: differences with intervals, a knee an axis, a recommendation.  Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from pipeline.bench.key import compare

KNEE_METHOD = (
    "smallest setting whose median is within {tolerance:.0%} of the best median on its axis; `flat` when that is the "
    "smallest tried, `still_rising` when it is the largest; beside it Kneedle's point, farthest above the "
    "chord over log2(setting)"
)


def difference(base: Sequence[float], other: Sequence[float], confidence: float) -> dict[str, float | None]:
    """``other / base - 1`` in %, with Welch's interval on the logarithms of independent repeats."""
    if min(len(base), len(other)) < 2 or min(*base, *other) <= 0:
        return {"difference_pct": None, "low_pct": None, "high_pct": None}
    a, b = [math.log(value) for value in base], [math.log(value) for value in other]
    middle = statistics.mean(b) - statistics.mean(a)
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b))) if error else math.inf
    return _percent(middle, error, freedom, confidence)


def paired_difference(ratios: Sequence[float], confidence: float) -> dict[str, float | None]:
    """Mean of paired ratios - 1 in %, with Student's interval on their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return {"difference_pct": None, "low_pct": None, "high_pct": None}
    return _percent(statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1, confidence)


def _percent(middle: float, error: float, freedom: float, confidence: float) -> dict[str, float | None]:
    reach = float(stats.t.ppf((1 + confidence) / 2, freedom)) * error if error else 0.0
    percent = [100 * math.expm1(value) for value in (middle, middle - reach, middle + reach)]
    return dict(zip(("difference_pct", "low_pct", "high_pct"), percent))


def against_baseline(baseline: Mapping[str, Any], point: Mapping[str, Any], objective: str, confidence: float) -> dict:
    """``status``, ``reason`` and the difference of one point; not comparable results never give a percentage."""
    nothing = {"difference_pct": None, "low_pct": None, "high_pct": None}
    if point["bench"] is None:
        return {"status": "invalid", "reason": point["reason"]} | nothing
    found = compare(baseline["bench"], point["bench"])
    if found["status"] != "valid":
        status = "invalid" if point["bench"]["status"] != "valid" else found["status"]
        return {"status": status, "reason": found["reason"]} | nothing
    values = [result["bench"]["values"][objective] for result in (baseline, point)]
    return {"status": "valid", "reason": None} | difference(*values, confidence)


def knee(curve: Sequence[tuple[float, float]], tolerance: float) -> dict[str, Any]:
    """The knee of (setting, median) pairs in ascending order of setting; see ``KNEE_METHOD``."""
    if len(curve) < 3:
        return {"status": "too_few_points", "knee": None, "best": None, "kneedle": None}
    best = max(curve, key=lambda pair: pair[1])
    chosen = next(setting for setting, median in curve if median >= (1 - tolerance) * best[1])
    status = {curve[0][0]: "flat", curve[-1][0]: "still_rising"}.get(chosen, "knee")
    return {
        "status": status,
        "knee": chosen if status != "still_rising" else None,
        "best": best[0],
        "kneedle": kneedle(curve),
    }


def kneedle(curve: Sequence[tuple[float, float]]) -> float | None:
    """The setting farthest above the chord of a rising curve, on a log2 scale; ``None`` when none is above it."""
    xs = [math.log2(max(setting, 1)) for setting, _ in curve]
    ys = [median for _, median in curve]
    if xs[-1] == xs[0] or max(ys) == min(ys) or ys[-1] <= ys[0]:
        return None
    above = [
        (y - ys[0]) / (max(ys) - min(ys)) - (x - xs[0]) / (xs[-1] - xs[0]) * (ys[-1] - ys[0]) / (max(ys) - min(ys))
        for x, y in zip(xs, ys)
    ]
    highest = max(range(len(above)), key=above.__getitem__)
    return curve[highest][0] if above[highest] > 1e-9 else None


def candidates(
    rows: Sequence[Mapping[str, Any]], knees: Mapping[str, Mapping], max_accuracy_loss: float, tolerance: float
) -> list[dict[str, Any]]:
    """At most two settings (axis -> value) that are worth a paired run against the default, the more promising first.

    A point is promising when its probe is no worse and its whole interval is above 0, or its median gains more than
    ``tolerance``: the paired run decides, so that few noisy repeats must not decide here.  Promising points on several
    axes are combined, each axis at its knee if that is promising too, else at its best; the best single point comes
    second.  Where none is promising the best median is tried all the same: "nothing beats the default" then rests on a
    fresh run.
    """
    usable = [row for row in rows if row["axis"] and row["status"] == "valid" and not row["coincides_with"]]
    usable = [row for row in usable if not row["accuracy_lost"] or row["accuracy_lost"] <= max_accuracy_loss]
    usable.sort(key=lambda row: -row["difference_pct"])
    better = [row for row in usable if row["low_pct"] > 0 or row["difference_pct"] > 100 * tolerance]
    combined: dict[str, Any] = {}
    for row in better:
        at_knee = knees.get(row["axis"], {}).get("knee")
        same = [other for other in better if other["axis"] == row["axis"]]
        wanted = next((other for other in same if other["value"] == at_knee), same[0])
        combined.setdefault(row["axis"], wanted["value"])
    singles = [{row["axis"]: row["value"]} for row in (better or usable[:1])]
    ordered = ([combined] if len(combined) > 1 else []) + singles
    return [chosen for index, chosen in enumerate(ordered) if chosen not in ordered[:index]][:2]


def verdict(difference: Mapping[str, float | None]) -> str:
    """``beats``, ``nothing_beats_the_default`` or ``untested``, by the interval of the paired run."""
    if difference["low_pct"] is None:
        return "untested"
    return "beats" if difference["low_pct"] > 0 else "nothing_beats_the_default"
