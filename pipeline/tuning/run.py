"""One tuning run from parameters to the result: points, differences, knees, recommendation, paired verification."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.bench.client import BenchClient
from pipeline.env_facts import python_of
from pipeline.evals.dataset import Item
from pipeline.tuning import analysis
from pipeline.tuning.measure import RESOLVED, Machine, Measurer, check_comparable, log
from pipeline.tuning.probe import agreement
from pipeline.tuning.settings import AXES, ENGINE_DEFAULTS, TuningSettings, expand

FIGURES = (
    "output_tok_s",
    "output_tok_s_min",
    "output_tok_s_max",
    "total_tok_s",
    "request_throughput",
    "output_tok_s_per_device",
    "output_tok_s_per_user",
    "total_tok_s_per_device",
    "ttft_ms_p50",
    "tpot_ms_p50",
    "e2el_ms_p50",
    "goodput_requests_s",
    "preemptions",
    "kv_cache_usage_max",
    "usd_per_million_output_tokens",
    "energy_j_per_output_token",
)
MEMORY = ("weight_bytes", "kv_bytes_allocated", "activation_peak_bytes", "kv_bytes_per_token", "kv_capacity_tokens")


def tune(settings: TuningSettings, machine: Machine, items: Sequence[Item], folder: Path) -> dict[str, Any]:
    """Measure what is not measured yet under ``folder``, and judge.  JSON-able; see :mod:`pipeline.tuning.report`.

    Raises :class:`~pipeline.errors.Invalid` when the baseline is not valid, and what a dying server raises; finished
    points are kept.
    """
    from tqdm import tqdm

    (folder / "logs").mkdir(parents=True, exist_ok=True)
    env = machine.server(*settings.variant.rsplit("-", 1)).env
    with BenchClient(python_of(env), folder / "client.log") as client:
        measurer = Measurer(settings, machine, items, folder, client)
        points = expand(settings, measurer.baseline_values())
        results: list[dict[str, Any]] = []
        with tqdm(total=len(points) + 2 * settings.pairs, desc="tune", unit="point", smoothing=0) as bar:
            for point in points:
                bar.set_postfix_str(point.name)
                results.append(measurer.measure(point, results))
                bar.update()
                if point.axis is None:
                    check_comparable(results)
            summary = judge(settings, measurer.baseline_values(), results)
            bar.set_postfix_str("paired runs")
            tested = [(moved, measurer.pairs(moved, bar.update)) for moved in summary["candidates"]]
    summary["recommendation"] = recommend(settings, tested)
    log(f"tune: {summary['recommendation']['statement']}")
    return summary


def judge(settings: TuningSettings, baseline: Mapping[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows with differences, knees and what to verify, from measured points (the baseline first)."""
    check_comparable(results)
    rows = [row_of(result, results[0], settings) for result in results]
    knees = {}
    for axis in AXES:
        curve = _curve(axis, baseline, rows, settings.objective)
        if curve:
            knees[axis] = analysis.knee(curve, settings.knee_tolerance) | {"points": len(curve)}
    return {
        "variant": settings.variant,
        "baseline": {"name": settings.baseline_name} | dict(baseline),
        "objective": settings.objective,
        "confidence": settings.confidence,
        "knee_method": analysis.KNEE_METHOD.format(tolerance=settings.knee_tolerance),
        "workload": settings.bench.workload_key(),
        "comparability": results[0]["bench"]["comparability"],
        "speed_label": results[0]["bench"]["speed_label"],
        "devices": results[0]["bench"]["devices"],
        "rows": rows,
        "knees": knees,
        "candidates": analysis.candidates(rows, knees, settings.max_accuracy_loss, settings.knee_tolerance),
    }


def row_of(result: Mapping[str, Any], baseline: Mapping[str, Any], settings: TuningSettings) -> dict[str, Any]:
    """One line of the ablation: figures, what the engine made of the setting, difference against the baseline."""
    row: dict[str, Any] = {name: result[name] for name in ("axis", "value", "name", "coincides_with")}
    row["effective"] = result["resolved"]
    row["also_moved"] = _also_moved(result, baseline)
    row |= {"prefix_hits": result["prefix"], "parallel_hits": result["parallel"]}
    if result["coincides_with"]:
        nothing = {"difference_pct": None, "low_pct": None, "high_pct": None}
        return row | {"status": "valid", "reason": None, "accuracy": None, "accuracy_lost": None} | nothing
    row |= analysis.against_baseline(baseline, result, settings.objective, settings.confidence)
    measured = result["bench"]
    if measured is None:
        return row | {"accuracy": None, "accuracy_lost": None}
    values = measured["values"].get(settings.objective)
    row |= {name: measured.get(name) for name in FIGURES} | {"values": values, "emulated": measured["emulated"]}
    memory = measured["memory_summary"]
    row |= {name: memory.get(name) for name in MEMORY} | blocks(measured, settings)
    probed, reference = result["probe"], baseline["probe"]
    row |= {
        "accuracy": probed["accuracy"] if probed else None,
        "accuracy_lost": reference["accuracy"] - probed["accuracy"] if probed and reference else None,
        "degenerate": probed["degenerate"] if probed else None,
        "same_answers_as_baseline": agreement(probed, reference),
    }
    return row


def blocks(measured: Mapping[str, Any], settings: TuningSettings) -> dict[str, Any]:
    """What the effective block size costs one request of this workload: tokens and bytes of its last, partly filled
    block.

    Fragmentation is of the attention cache (``waste_fraction``: of the blocks held); ``kv_share`` is the cache's
    share of weights, cache and activation peak.
    """
    memory, size = measured["memory_summary"], measured["effective"].get("block_size")
    tokens = settings.bench.prefix_len + settings.bench.input_len + settings.bench.output_len
    parts = [memory.get(name) for name in ("weight_bytes", "kv_bytes_allocated", "activation_peak_bytes")]
    share = None if None in parts else parts[1] / sum(parts)
    if not size:
        return dict.fromkeys(("block_size", "waste_tokens", "waste_bytes", "waste_fraction")) | {"kv_share": share}
    held = -(-tokens // size) * size
    per_token = memory.get("kv_bytes_per_token")
    return {
        "block_size": size,
        "num_blocks": measured["effective"].get("num_blocks"),
        "waste_tokens": held - tokens,
        "waste_bytes": None if per_token is None else (held - tokens) * per_token,
        "waste_fraction": (held - tokens) / held,
        "kv_share": share,
    }


def _also_moved(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Effective settings that the engine changed along with the axis: one request may move several things inside."""
    if not result["resolved"] or result["axis"] is None:
        return {}
    own = RESOLVED.get(result["axis"], result["axis"])
    base = baseline["resolved"]
    return {name: value for name, value in result["resolved"].items() if name != own and base.get(name) != value}


def _curve(
    axis: str, baseline: Mapping[str, Any], rows: Sequence[Mapping], objective: str
) -> list[tuple[float, float]]:
    """(setting, median) of the comparable numeric points of an axis, the baseline's among them."""
    own = baseline.get(axis)
    if own is None:
        own = (rows[0]["effective"] or {}).get(axis, ENGINE_DEFAULTS.get(axis))
    points = {row["value"]: row for row in rows if row["axis"] == axis and row["status"] == "valid"}
    if not points or not all(isinstance(value, (int, float)) for value in points):
        return []
    if isinstance(own, (int, float)):
        points[own] = rows[0]
    return sorted((value, row[objective]) for value, row in points.items() if row.get(objective) is not None)


def recommend(settings: TuningSettings, tested: Sequence[tuple[dict, Sequence[Mapping]]]) -> dict[str, Any]:
    """The best of the candidates by their paired runs, its verdict, and the other one as runner-up."""
    verified = [{"moved": moved} | verify(settings, pairs) for moved, pairs in tested]
    verified.sort(key=lambda one: -math.inf if one["difference_pct"] is None else -one["difference_pct"])
    best = verified[0] if verified else {"moved": {}} | verify(settings, [])
    return best | {"runner_up": verified[1] if len(verified) > 1 else None}


def verify(settings: TuningSettings, pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict of the paired run, in words and numbers."""
    good = [
        pair["recommended"]["value"] / pair["default"]["value"]
        for pair in pairs
        if pair["default"]["status"] == pair["recommended"]["status"] == "valid"
        and min(pair["default"]["value"], pair["recommended"]["value"]) > 0
    ]
    difference = analysis.paired_difference(good if len(good) >= 3 else [], settings.confidence)
    outcome = analysis.verdict(difference)
    level = f"{settings.confidence:.0%}"
    if outcome == "untested":
        statement = f"nothing was verified: {len(good)} of {len(pairs)} pairs are valid, 3 needed"
    else:
        told = "{difference_pct:+.1f} % [{low_pct:+.1f}, {high_pct:+.1f}]".format(**difference)
        what = f"{settings.objective}, {len(good)} pairs, {level} interval"
        statement = (
            f"beats the default by {told} ({what})"
            if outcome == "beats"
            else f"nothing beats the default: the best candidate differs by {told} ({what})"
        )
    return {"verdict": outcome, "statement": statement, "ratios": good, "pairs": list(pairs)} | difference
