"""One row of the comparison table: the few figures of a variant that people compare, flat, units in the keys."""

from __future__ import annotations

from typing import Any


KEY_CHARACTERS = 12


def short(key: str | None) -> str | None:
    """As much of a hash as tells two apart in a table."""
    return key and key[:KEY_CHARACTERS]


def build_row(
    evaluation: dict[str, Any], bench: dict[str, Any], kv: dict[str, Any], quantization: dict[str, Any], comparison: dict[str, Any]
) -> dict[str, Any]:
    """The content of ``metrics/variants/<variant>.json`` from what the stages before it wrote.

    ``status`` is the evaluation's: may accuracy be compared?  ``speed`` is ``measured``, ``emulated`` (kernels that stand
    in for missing ones: ranks nothing across quantizations), ``not_comparable`` (native's was measured under other
    conditions) or ``invalid``, the last two with ``speed_reason``: a disturbed bench spoils its own figures and neither
    accuracy nor memory.  Equal ``dataset_key``: the same questions; equal ``speed_key``: the same conditions.
    ``verdict`` is the gate's outcome against native, or ``reference`` for native itself.
    """
    fidelity, unlike = comparison.get("fidelity") or {}, (comparison.get("speed") or {}).get("unlike")
    memory, damage = bench["memory_summary"], quantization["damage"] or {}
    return {
        "status": evaluation["status"],
        "reason": evaluation["reason"],
        "verdict": comparison["verdict"],
        "accuracy": evaluation["accuracy"],
        "accuracy_stderr": evaluation["accuracy_stderr"],
        "items": evaluation["n"],
        "dataset_key": short(evaluation.get("dataset_key")),
        "tensor_parallel_size": (evaluation.get("conditions") or {}).get("tensor_parallel_size"),
        "kl_to_native": fidelity.get("kl_mean"),
        "top1_agreement": fidelity.get("top1_agreement"),
        "output_tok_s": bench["output_tok_s"],
        "ttft_ms_p50": bench["ttft_ms_p50"],
        "tpot_ms_p50": bench["tpot_ms_p50"],
        "speed": "invalid" if bench["status"] != "valid" else "not_comparable" if unlike else bench["speed_label"],
        "speed_reason": bench["reason"] or unlike,
        "speed_key": short(bench["comparability"]["key"]),
        "weight_bytes": memory["weight_bytes"],
        "kv_bytes_per_token": memory["kv_bytes_per_token"],
        "kv_capacity_tokens": memory["kv_capacity_tokens"],
        "kv_scales": kv["label"],
        "state_bytes_per_sequence": memory["state_bytes_per_sequence"],
        "activation_peak_bytes": memory["activation_peak_bytes"],
        "memory_findings": len(comparison["memory_findings"]),
        "load_s": bench["load"]["load_s"],
        "exact_fraction": damage.get("total", {}).get("exact_fraction"),
    } | _replay(bench.get("trace"))


TRACE = (
    "status",
    "goodput_requests_s",
    "goodput_fraction",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "e2el_ms_p50",
    "output_tok_s_per_device",
    "output_tok_s_per_user",
    "prefix_hit_rate",
)


def _replay(point: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of a replayed trace under ``trace_...``; nothing where none was replayed."""
    return {} if point is None else {f"trace_{name}": point[name] for name in TRACE}
