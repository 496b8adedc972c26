"""Why a measurement may not be quoted.  Pure functions; a finding is a reason code and a sentence with the numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.bench.settings import BenchSettings

GENERATED, PROMPTED = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
PREEMPTIONS = "vllm:num_preemptions_total"
BORN = "vllm:prompt_tokens_created"


@dataclass(frozen=True)
class Reason:
    """``code`` is stable and machine-readable; ``detail`` is for people."""

    code: str
    detail: str


@dataclass(frozen=True)
class Run:
    """One timed run: what the client saved, what was sent, and the server's counters before and after."""

    raw: Mapping[str, Any]
    prompt_tokens_sent: Sequence[int]
    before: Mapping[str, float]
    after: Mapping[str, float]
    server_before: tuple[int, ...]
    """Identity of the server: pid and the like."""
    server_after: tuple[int, ...]
    output_tokens_asked: Sequence[int] = ()
    """Of each request, in the order sent; empty: ``settings.output_len`` of all."""
    planned_s: Sequence[float] = ()
    """Arrival times of an open loop that has a plan (a trace), seconds after the first."""
    energy_j: float | None = None
    """Of the whole machine during the run; ``None`` where it has no counter."""
    retries: int = 0
    prompts: int = 0
    load: str = ""
    repeat: int = 0
    seed: int = 0

    def delta(self, name: str) -> float | None:
        """Growth of a counter during the run; ``None`` when the server has no such counter."""
        return self.after[name] - self.before.get(name, 0.0) if name in self.after else None


def check_run(run: Run, settings: BenchSettings) -> list[Reason]:
    """Everything that makes one timed run invalid."""
    return [
        *_server_restarted(run),
        *_failures(run),
        *_lengths(run, settings),
        *_token_counts(run, settings),
        *_prefix_hits(run, settings),
        *_itl(run, settings),
        *_late(run, settings),
    ]


def _server_restarted(run: Run) -> list[Reason]:
    reasons = []
    if run.server_before != run.server_after:
        reasons.append(f"its process was {run.server_before} and is {run.server_after}")
    if run.before.get(BORN) != run.after.get(BORN):
        reasons.append(f"its counters were made at {run.before.get(BORN)} and at {run.after.get(BORN)}")
    shrunk = [name for name in (GENERATED, PROMPTED, QUERIES) if (run.delta(name) or 0) < 0]
    if shrunk:
        reasons.append(f"its counters went back: {shrunk}")
    return [Reason("server_restarted", "the server was restarted meanwhile: " + "; ".join(reasons))] if reasons else []


def _failures(run: Run) -> list[Reason]:
    errors = [error for error in run.raw.get("errors", []) if error]
    in_band = [error for error in errors if "in-band stream error" in error]
    failed = max(int(run.raw.get("failed", 0)), len(errors), run.prompts - int(run.raw.get("completed", 0)))
    reasons = []
    if in_band:
        reasons.append(
            Reason(
                "stream_error",
                f"{len(in_band)} of {run.prompts} streams carried an error after a 200: {_last_line(in_band[0])}",
            )
        )
    if failed > len(in_band):
        others = [error for error in errors if error not in in_band]
        reasons.append(
            Reason(
                "requests_failed",
                f"{failed - len(in_band)} of {run.prompts} requests failed: "
                f"{_last_line(others[0]) if others else 'no error given'}",
            )
        )
    return reasons


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1][:300]


def _succeeded(run: Run, name: str) -> list:
    errors = run.raw.get("errors") or [""] * len(run.raw[name])
    return [value for value, error in zip(run.raw[name], errors) if not error]


def _lengths(run: Run, settings: BenchSettings) -> list[Reason]:
    asked = run.output_tokens_asked or [settings.output_len] * len(run.raw["output_lens"])
    errors = run.raw.get("errors") or [""] * len(asked)
    short = [
        (length, wanted)
        for length, wanted, error in zip(run.raw["output_lens"], asked, errors)
        if length < wanted and not error
    ]
    reasons = []
    if short:
        length, wanted = min(short, key=lambda pair: pair[0] / pair[1])
        reasons.append(
            Reason(
                "short_outputs",
                f"{len(short)} of {run.prompts} outputs are shorter than asked for, e.g. {length} of {wanted} tokens",
            )
        )
    counted = run.raw["input_lens"]
    unlike = [(sent, seen) for sent, seen in zip(run.prompt_tokens_sent, counted) if sent != seen]
    if unlike or len(run.prompt_tokens_sent) != len(counted):
        sent, seen = unlike[0] if unlike else (len(run.prompt_tokens_sent), len(counted))
        reasons.append(
            Reason(
                "prompt_tokens_disagree",
                f"{len(unlike)} prompts were sent with another token count than the "
                f"server reports, e.g. {sent} sent, {seen} reported: cut or "
                "another tokenizer",
            )
        )
    return reasons


def _token_counts(run: Run, settings: BenchSettings) -> list[Reason]:
    needed = [GENERATED, PROMPTED, *([HITS] if _cold(run, settings) else [])]
    absent = [name for name in needed if run.delta(name) is None]
    reasons = []
    if absent:
        reasons.append(
            Reason(
                "no_server_counters",
                f"the server does not export {', '.join(absent)}: nothing confirms the client's counts, or that a "
                "cold run was cold",
            )
        )
    for name, seen, what in (
        (GENERATED, sum(run.raw["output_lens"]), "output"),
        (PROMPTED, sum(run.raw["input_lens"]), "prompt"),
    ):
        counted = run.delta(name)
        if counted is not None and counted != seen and not run.raw.get("failed"):
            reasons.append(
                Reason(
                    "token_counts_disagree",
                    f"the client saw {seen} {what} tokens, the server counted "
                    f"{counted:.0f}: other traffic, or tokens lost on the way",
                )
            )
    return reasons


def _cold(run: Run, settings: BenchSettings) -> bool:
    """Must nothing of this run come from the prefix cache?"""
    return settings.cache != "warm" and settings.dataset != "shared_prefix" and run.load != "trace"


def _prefix_hits(run: Run, settings: BenchSettings) -> list[Reason]:
    hits = run.delta(HITS)
    if not _cold(run, settings) or not hits or hits < 0:
        return []
    return [
        Reason(
            "prefix_hits",
            f"{hits:.0f} of {run.delta(QUERIES) or 0:.0f} prompt tokens came from the prefix cache in a "
            "cold run: throughput and TTFT are those of a warm cache",
        )
    ]


def _itl(run: Run, settings: BenchSettings) -> list[Reason]:
    itls = [value for request in _succeeded(run, "itls") for value in request]
    lengths = _succeeded(run, "output_lens")
    reasons = []
    if itls and statistics.median(itls) * 1e3 < settings.min_itl_ms:
        reasons.append(
            Reason(
                "insane_itl",
                f"median inter-token latency {statistics.median(itls) * 1e3:.4f} ms is below "
                f"{settings.min_itl_ms} ms: chunks arrive in bursts",
            )
        )
    expected = sum(max(0, length - 1) for length in lengths)
    missing = 1 - len(itls) / expected if expected else 0.0
    if missing > settings.max_coalesced:
        reasons.append(
            Reason(
                "coalesced_chunks",
                f"{missing:.0%} of the tokens share a chunk with another (at most "
                f"{settings.max_coalesced:.0%} may): ITL is not per token",
            )
        )
    return reasons


def _late(run: Run, settings: BenchSettings) -> list[Reason]:
    """Was an open loop kept?  A client that sends late measures its own limit and flatters the server's queue."""
    starts = run.raw.get("start_times") or []
    if not run.planned_s:
        return []
    if len(starts) != len(run.planned_s):
        told = f"the client tells when it sent {len(starts)} of the trace's {len(run.planned_s)} requests"
        return [Reason("late_sends", told)]
    first = min(starts)
    late = [(start - first - planned) * 1e3 for start, planned in zip(starts, run.planned_s)]
    if statistics.median(late) <= settings.max_late_ms:
        return []
    return [
        Reason(
            "late_sends",
            f"the median request was sent {statistics.median(late):.0f} ms after its time in the trace, at most "
            f"{settings.max_late_ms:.0f} ms allowed: the client, not the server, set the pace",
        )
    ]


def spread(values: Sequence[float]) -> float | None:
    """Interquartile range / median (inclusive quartiles); ``None`` for fewer than two values or a median of 0.

    For three values it is half of (max - min) / median; with five, one outlier no longer moves it.
    """
    if len(values) < 2 or not statistics.median(values):
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / statistics.median(values)


def too_wide(throughputs: Sequence[float], settings: BenchSettings) -> bool:
    """Do the repeats disagree by more than is allowed?"""
    wide = spread(throughputs)
    return wide is not None and wide > settings.max_spread


def check_repeats(throughputs: Sequence[float], settings: BenchSettings) -> list[Reason]:
    """Too few repeats, or repeats that do not agree.  ``throughputs``: output tokens/s in the order measured."""
    if len(throughputs) < settings.min_repeats:
        return [Reason("too_few_repeats", f"{len(throughputs)} repeats, {settings.min_repeats} needed")]
    if not too_wide(throughputs, settings):
        return []
    told, rest = ", ".join(f"{value:.1f}" for value in throughputs), throughputs[1:]
    if not too_wide(rest, settings) and not min(rest) <= throughputs[0] <= max(rest):
        return [
            Reason("first_repeat_outlier", f"only the first repeat is off ({told} tok/s): the warm-up was too short")
        ]
    return [
        Reason(
            "spread_too_wide",
            f"interquartile range / median = {spread(throughputs):.2f} over {told} tok/s, at most "
            f"{settings.max_spread} allowed: something else used the machine",
        )
    ]
