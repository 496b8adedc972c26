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
LEAST = ("kv_capacity_tokens", "kv_num_blocks")


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """One concurrency: the median over its repeats of each metric, with lowest, highest and spread."""
    summary: dict[str, Any] = {}
    for ours, theirs in METRICS.items():
        values = [run.raw[theirs] for run in runs]
        summary[ours] = statistics.median(values)
        if ours in ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50"):
            summary |= {f"{ours}_min": min(values), f"{ours}_max": max(values), f"{ours}_spread": spread(values)}
    summary["repeats"] = len(runs)
    summary["retries"] = sum(run.retries for run in runs)
    summary["preemptions"] = sum(run.delta(PREEMPTIONS) or 0 for run in runs)
    summary["prefix_hit_tokens"] = sum(run.delta(HITS) or 0 for run in runs)
    summary["seeds"] = [run.seed for run in runs]
    accepted = [run.raw["spec_decode_acceptance_length"] for run in runs if "spec_decode_acceptance_length" in run.raw]
    summary["spec_decode_accept_length"] = statistics.median(accepted) if accepted else None
    return summary


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
