"""Medians over repeats, and the few figures of a memory report that go into the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.bench.guards import HITS, PREEMPTIONS, Run, spread

METRICS = {
    "output_tok_s": "output_throughput",
    "total_tok_s": "total_token_throughput",
    "request_throughput": "request_throughput",
    **{
        f"{name}_ms_{suffix}": f"{key}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for suffix, key in (("p50", "median"), ("p90", "p90"), ("p99", "p99"), ("mean", "mean"))
    },
}
"""Ours <- vllm's name.  Throughputs are per second, latencies in milliseconds."""
SUMMED = ("weight_bytes", "rss_bytes")
WORST = (
    "kv_bytes_per_token",
    "kv_bytes_allocated",
    "state_bytes_per_sequence",
    "state_block_bytes_per_sequence",
    "activation_peak_bytes",
)
INTERVALS = ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50", "e2el_ms_p50")
"""Metrics that are shown with lowest, highest and spread."""
LEAST = ("kv_capacity_tokens", "kv_num_blocks")


def interval_level(repeats: int) -> float:
    """How often [lowest, highest] of independent repeats covers their true median, whatever the distribution."""
    return 1 - 2.0 ** (1 - repeats)


def total(counts: Sequence[float | None]) -> float | None:
    """Their sum; ``None`` where one is not known, which is not the same as 0."""
    return None if None in counts else sum(counts)


def summarize(
    runs: Sequence[Run], devices: int = 1, price_usd_per_hour: float | None = None, no_energy: str | None = None
) -> dict[str, Any]:
    """One point: the median over its repeats of each metric, with lowest, highest and spread.

    ``[_min, _max]`` is an interval for the median at level ``interval_level``.  ``output_tok_s_per_user`` is what one
    reader sees while tokens stream, 1000 / ``tpot_ms_p50``.  ``price_usd_per_hour`` is that of all ``devices``
    together; ``no_energy`` says why the machine's energy could not be read.
    """
    summary: dict[str, Any] = {}
    for ours, theirs in METRICS.items():
        values = [run.raw[theirs] for run in runs]
        summary[ours] = statistics.median(values)
        if ours in INTERVALS:
            summary |= {f"{ours}_min": min(values), f"{ours}_max": max(values), f"{ours}_spread": spread(values)}
    summary["repeats"] = len(runs)
    summary["interval_level"] = interval_level(len(runs))
    told = {name: METRICS[name] for name in (*INTERVALS, "total_tok_s", "request_throughput")}
    summary["values"] = {ours: [run.raw[theirs] for run in runs] for ours, theirs in told.items()}
    if all(run.raw.get("request_goodput") is not None for run in runs):
        summary["values"]["goodput_requests_s"] = [run.raw["request_goodput"] for run in runs]
    for name in ("output_tok_s", "total_tok_s"):
        summary[f"{name}_per_device"] = summary[name] / devices
    summary["output_tok_s_per_user"] = 1000 / summary["tpot_ms_p50"] if summary["tpot_ms_p50"] else None
    summary |= _goodput(runs) | _energy(runs, no_energy) | _cost(summary, price_usd_per_hour)
    summary["retries"] = sum(run.retries for run in runs)
    summary["preemptions"], hits = (total([run.delta(name) for run in runs]) for name in (PREEMPTIONS, HITS))
    prompted = sum(sum(run.raw["input_lens"]) for run in runs)
    summary["prefix_hit_tokens"] = hits
    summary["prefix_hit_rate"] = None if hits is None or not prompted else hits / prompted
    summary["seeds"] = [run.seed for run in runs]
    accepted = [run.raw["spec_decode_acceptance_length"] for run in runs if "spec_decode_acceptance_length" in run.raw]
    summary["spec_decode_accept_length"] = statistics.median(accepted) if accepted else None
    return summary


def _goodput(runs: Sequence[Run]) -> dict[str, Any]:
    """Requests that kept every latency limit: a second, and of those sent; ``None`` without limits."""
    rates = [run.raw.get("request_goodput") for run in runs]
    if None in rates:
        return {"goodput_requests_s": None, "goodput_fraction": None}
    kept = [rate * run.raw["duration"] / run.prompts for rate, run in zip(rates, runs)]
    return {"goodput_requests_s": statistics.median(rates), "goodput_fraction": statistics.median(kept)}


def _energy(runs: Sequence[Run], reason: str | None) -> dict[str, Any]:
    joules, tokens = [run.energy_j for run in runs], [sum(run.raw["output_lens"]) for run in runs]
    if not joules or None in joules:
        reason = reason or "a counter could not be read, or did not move, in every run"
    elif not all(tokens):
        reason = "no token was generated"
    else:
        return {
            "energy_j_per_output_token": statistics.median(j / n for j, n in zip(joules, tokens)),
            "energy_reason": None,
        }
    return {"energy_j_per_output_token": None, "energy_reason": reason}


def _cost(summary: Mapping[str, Any], price_usd_per_hour: float | None) -> dict[str, Any]:
    if price_usd_per_hour is None:
        reason = "the hardware file has no price_usd_per_hour"
        return {"usd_per_million_output_tokens": None, "usd_per_million_tokens": None, "usd_reason": reason}
    per_million = {
        ours: price_usd_per_hour / 3600 / summary[rate] * 1e6 if summary[rate] else None
        for ours, rate in (("usd_per_million_output_tokens", "output_tok_s"), ("usd_per_million_tokens", "total_tok_s"))
    }
    return per_million | {"usd_reason": None if all(per_million.values()) else "no token was generated"}


def memory_summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Weights summed over ranks, per-token and per-sequence bytes of the worst rank, capacity of the least.

    A figure that any rank could not read is ``None``.
    """
    result: dict[str, Any] = {}
    for names, reduce in ((SUMMED, sum), (WORST, max), (LEAST, min)):
        for name in names:
            values = [rank.get(name) for rank in ranks]
            result[name] = None if not values or None in values else reduce(values)
    return result


def overhead(stage_s: float, server_start_s: float, client_s: float) -> dict[str, float]:
    """What a stage costs beyond what vllm itself takes: ``ratio`` = stage / (server start + bench client), in seconds.

    Beyond are the interpreter, settled counters, the memory report and the orderly end of the server.  Waiting for
    another measured run counts too, so that a ratio above 1.1 on a busy machine need not be ours.
    """
    return {
        "stage_s": stage_s,
        "server_start_s": server_start_s,
        "client_s": client_s,
        "ratio": stage_s / (server_start_s + client_s),
    }
