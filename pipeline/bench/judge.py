"""From finished runs to a result: which points may be quoted, their figures, the headline.  Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.bench import guards, summary
from pipeline.bench.settings import BenchSettings, Load, headline

HEADLINE = (
    "output_tok_s_per_device",
    "total_tok_s_per_device",
    "output_tok_s_per_user",
    "interval_level",
    "goodput_requests_s",
    "goodput_fraction",
    "energy_j_per_output_token",
    "energy_reason",
    "usd_per_million_output_tokens",
    "usd_per_million_tokens",
    "usd_reason",
    "prefix_hit_rate",
    "output_tok_s_min",
    "output_tok_s_max",
    "values",
)
"""Figures of the headline point that stand at the top of the result, besides vllm's own."""


def judge(
    runs: Mapping[Load, list[guards.Run]],
    settings: BenchSettings,
    devices: int = 1,
    price_usd_per_hour: float | None = None,
    no_energy: str | None = None,
) -> dict[str, Any]:
    """Status, reasons, figures of each point and headline of finished runs.  Figures of invalid runs stay visible."""
    reasons: list[dict[str, str]] = []
    points: dict[Load, dict[str, Any]] = {}
    for load, repeats in runs.items():
        found = [
            (f"{load.name} r{run.repeat}", reason) for run in repeats for reason in guards.check_run(run, settings)
        ]
        throughputs = [run.raw["output_throughput"] for run in repeats]
        found += [(load.name, reason) for reason in guards.check_repeats(throughputs, settings)]
        reasons += [{"where": where, "code": reason.code, "detail": reason.detail} for where, reason in found]
        points[load] = summary.summarize(repeats, devices, price_usd_per_hour, no_energy) | {
            "status": "invalid" if found else "valid",
            "reason": found[0][1].detail if found else None,
        }
    chosen = headline(points)
    closed = [load.value for load in points if load.kind == "concurrency"]
    return {
        "status": "invalid" if reasons else "valid",
        "reason": "; ".join(f"{reason['where']}: {reason['code']}: {reason['detail']}" for reason in reasons) or None,
        "reasons": reasons,
        "reason_codes": sorted({reason["code"] for reason in reasons}),
        "headline": chosen.name,
        "concurrency": int(max(closed)) if closed else None,
        **{name: points[chosen][name] for name in (*summary.METRICS, *HEADLINE)},
        "spec_decode_accept_length": points[chosen]["spec_decode_accept_length"],
        "preemptions": summary.total([point["preemptions"] for point in points.values()]),
        "per_concurrency": _of_kind(points, "concurrency"),
        "per_request_rate": _of_kind(points, "request_rate"),
        "trace": next((point for load, point in points.items() if load.kind == "trace"), None),
    }


def _of_kind(points: Mapping[Load, dict], kind: str) -> dict[str, dict]:
    return {f"{load.value:g}": point for load, point in points.items() if load.kind == kind}
