"""The planner's figures under the keys of the server's memory report, and the two compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.plan.compatibility import lookup
from pipeline.plan.hardware import Hardware
from pipeline.plan.planner import memory
from pipeline.plan.request import Model, Overrides, request_of

TOLERANCE = 0.02
ACTIVATION_TOLERANCE = 0.15
COMPARED = {
    "weight_bytes": TOLERANCE,
    "kv_bytes_allocated": TOLERANCE,
    "kv_bytes_per_token": TOLERANCE,
    "kv_num_blocks": TOLERANCE,
    "kv_block_size": TOLERANCE,
    "kv_page_bytes": TOLERANCE,
    "kv_capacity_tokens": TOLERANCE,
    "state_bytes_per_sequence": TOLERANCE,
    "state_page_bytes_padded": TOLERANCE,
    "state_block_bytes_per_sequence": TOLERANCE,
    "activation_peak_bytes": ACTIVATION_TOLERANCE,
}


@dataclass(frozen=True)
class Comparison:
    """One figure of one rank.  ``measured`` is None where the server could not read it; ``reason`` then says why."""

    rank: int
    key: str
    predicted: float
    measured: float | None
    tolerance: float
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    @property
    def beyond(self) -> bool:
        if self.measured is None:
            return False
        return abs(self.measured - self.predicted) > self.tolerance * max(abs(self.predicted), abs(self.measured))

    def __str__(self) -> str:
        if self.measured is None:
            why = self.reason or "no reason given"
            return f"rank {self.rank} {self.key}: predicted {self.predicted:,.0f}, not measured ({why})"
        ratio = f"{self.ratio:.3f}" if self.ratio is not None else "-"
        return (
            f"rank {self.rank} {self.key}: predicted {self.predicted:,.0f}, measured {self.measured:,.0f} "
            f"(ratio {ratio}, tolerance {self.tolerance:.0%})"
        )


def predicted(
    model_config: dict[str, Any] | str | Path | Model,
    hardware: Hardware | str,
    quant: str = "native",
    kv: str = "auto",
    *,
    recipe: dict[str, Any] | None = None,
    overrides: Overrides | None = None,
) -> list[dict[str, Any]]:
    """What the memory report of a server for this variant should say: one dict a rank, the report's own keys.

    Tensor-parallel ranks are alike; pipeline stages follow one another.  ``rss_bytes`` and ``kernels`` are None:
    they are measured only.
    """
    request = request_of(model_config, hardware, quant, kv, recipe, overrides)
    laid = memory(request)
    blocks, emulated = laid.num_blocks, lookup(request.combination).verdict == "emulated"
    reports = []
    for stage, (weights, cache) in enumerate(zip(laid.weights, laid.caches, strict=True)):
        for rank in range(request.layout.tensor):
            reports.append(
                {
                    "rank": stage * request.layout.tensor + rank,
                    "weight_bytes": weights.total,
                    "weight_bytes_by_dtype": weights.by_dtype,
                    "kv_bytes_allocated": blocks * cache.bytes_per_block,
                    "kv_bytes_per_token": cache.kv_bytes_per_token,
                    "kv_num_blocks": blocks,
                    "kv_block_size": cache.block,
                    "kv_page_bytes": cache.page_bytes,
                    "kv_capacity_tokens": cache.capacity_tokens(blocks, request.cache.max_model_len),
                    "state_bytes_per_sequence": cache.state_bytes,
                    "state_page_bytes_padded": cache.state_page_padded,
                    "state_block_bytes_per_sequence": cache.state_bytes_padded,
                    "activation_peak_bytes": laid.activation.peak_bytes,
                    "activation_num_tokens": request.max_num_batched_tokens,
                    "activation_largest_site": laid.activation.largest_site,
                    "max_num_seqs": request.max_num_seqs,
                    "rss_bytes": None,
                    "kv_cache_dtype": request.cache.kv,
                    "kernels": None,
                    "emulated": [request.scheme.format] if emulated else [],
                }
            )
    return reports


def compare(predictions: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[Comparison]:
    """Every figure that both sides tell, rank by rank.

    A figure the server could not read is None, and the report's ``unavailable`` says why; a state figure is skipped
    for a model without state.
    """
    by_rank = {report["rank"]: report for report in predictions}
    rows = []
    for report in sorted(measured, key=lambda each: each["rank"]):
        expected = by_rank.get(report["rank"])
        if expected is None:
            counts = len(predictions), len(measured)
            rows.append(Comparison(report["rank"], "rank", *counts, 0.0, "a rank nobody planned"))
            continue
        for key, tolerance in COMPARED.items():
            told = report.get(key)
            if key.startswith("state_") and not expected[key] and not told:
                continue
            reason = (report.get("unavailable") or {}).get(key)
            rows.append(Comparison(report["rank"], key, expected[key], told, tolerance, reason))
    missing = sorted(set(by_rank) - {report["rank"] for report in measured})
    rows += [Comparison(rank, "rank", 1, None, 0.0, "the server reported nothing for it") for rank in missing]
    return rows


def compare_predicted(predictions: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[Comparison]:
    """The disagreements beyond tolerance (2 %, activation peak 15 %), and ranks that only one side knows."""
    rows = compare(predictions, measured)
    return [row for row in rows if row.beyond or row.key == "rank"]
