"""What a speed figure may be compared with: two results with unlike keys never give a percentage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.bench.settings import BenchSettings
from pipeline.files import sha256_json
from pipeline.serve.settings import ServerSettings

VARIANT_AXES = ("kv_cache_dtype", "state_dtype")
"""Server settings under test in the main table (the checkpoint is the other axis).  A tuning run names its own."""
COMPARED = ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p50", "e2el_ms_p50", "request_throughput")
ACCEPT_LENGTH = "spec_decode_accept_length"


def comparability(
    settings: BenchSettings,
    server: ServerSettings,
    hardware: Mapping | None,
    software: Mapping | None,
    under_test: tuple[str, ...] = VARIANT_AXES,
) -> dict[str, Any]:
    """``{"key", "parts"}``: hash of workload, machine, software, cache policy and every server setting not under test.

    ``key`` is ``None`` without fingerprints: a figure from an unknown machine compares with nothing.
    """
    held = {name: value for name, value in server.requested().items() if name not in (*under_test, "served_name")}
    parts = {
        "workload": settings.workload_key(),
        "server": held,
        "under_test": sorted(under_test),
        "hardware": None if hardware is None else sha256_json(hardware),
        "software": None if software is None else sha256_json(software),
    }
    unknown = hardware is None or software is None
    return {"key": None if unknown else sha256_json(parts), "parts": parts}


def compare(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios ``other / base`` of two bench results, or ``not_comparable`` and why.

    Refused: an invalid result, unlike keys, emulated kernels on either side when the quantization differs, another
    accept length under speculative decoding (the speed then depends on what the drafter guesses).
    """
    reason = _refusal(base, other)
    if reason:
        return {"status": "not_comparable", "reason": reason, "ratios": None, "break_even_concurrency": None}
    ratios = {name: other[name] / base[name] for name in COMPARED if base.get(name) and other.get(name)}
    return {"status": "valid", "reason": None, "ratios": ratios, "break_even_concurrency": break_even(base, other)}


def _refusal(base: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, result in (("base", base), ("other", other)):
        if result.get("status") != "valid":
            return f"the {name} result is {result.get('status')}: {result.get('reason')}"
    keys = [result["comparability"]["key"] for result in (base, other)]
    if None in keys:
        return "a result has no machine or software fingerprint"
    if keys[0] != keys[1]:
        parts = [result["comparability"]["parts"] for result in (base, other)]
        unlike = sorted(name for name in parts[0] if parts[0][name] != parts[1].get(name))
        return f"measured under other conditions: {', '.join(unlike)} differ"
    if base.get("checkpoint_id") != other.get("checkpoint_id") and (base.get("emulated") or other.get("emulated")):
        formats = sorted({*base.get("emulated", []), *other.get("emulated", [])})
        return f"kernels of {', '.join(formats)} are emulated: speeds of two quantizations cannot be ranked"
    accepted = [result.get(ACCEPT_LENGTH) for result in (base, other)]
    if accepted[0] != accepted[1]:
        return f"accept length of speculative decoding differs: {accepted[0]} and {accepted[1]}"
    return None


def break_even(base: Mapping[str, Any], other: Mapping[str, Any]) -> int | None:
    """The smallest concurrency from which on ``other`` gives at least ``base``'s output tokens/s; ``None`` if never.

    Weights of 8 bits can be slower at small batches and faster at large ones: one number would hide it.
    """
    mine, theirs = base["per_concurrency"], other["per_concurrency"]
    shared = sorted(map(int, mine.keys() & theirs.keys()))
    faster = None
    for concurrency in reversed(shared):
        if theirs[str(concurrency)]["output_tok_s"] < mine[str(concurrency)]["output_tok_s"]:
            break
        faster = concurrency
    return faster
