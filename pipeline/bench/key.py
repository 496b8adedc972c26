"""What a speed figure may be compared with: two results with unlike keys never give a percentage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.bench.settings import BenchSettings
from pipeline.checkpoint.declared import CONFIG_KEYS
from pipeline.files import read_json, sha256_json
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
    """``{"key", "parts"}``: hash of workload, machine, software, cache policy, model and every server setting not under
    test.

    ``key`` is ``None`` without fingerprints: a figure from an unknown machine compares with nothing.
    """
    held = {name: value for name, value in server.requested().items() if name not in (*under_test, "served_name")}
    parts = {
        "workload": settings.workload_key(),
        "server": held,
        "model": model_identity(server.model),
        "under_test": sorted(under_test),
        "hardware": None if hardware is None else sha256_json(hardware),
        "software": None if software is None else sha256_json(software),
    }
    unknown = hardware is None or software is None
    return {"key": None if unknown else sha256_json(parts), "parts": parts}


def model_identity(checkpoint: Path | str) -> str | None:
    """Hash of config.json without its quantization: equal for all variants of one model; ``None`` without the file.

    A narrowed run of another model would else be set against the committed speeds of this one.
    """
    path = Path(checkpoint) / "config.json"
    return sha256_json(_without_quantization(read_json(path))) if path.is_file() else None


def _without_quantization(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: _without_quantization(value) for name, value in config.items() if name not in CONFIG_KEYS}


def compare(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios ``other / base`` of two bench results, or ``not_comparable`` and why.

    ``ranges``: the lowest and highest ratio of any two repeats, where they are kept: what a ratio of medians is worth.

    Refused: an invalid result, unlike keys, emulated kernels on either side when the quantization differs, another
    accept length under speculative decoding (the speed then depends on what the drafter guesses).
    """
    reason = _refusal(base, other)
    if reason:
        nothing = dict.fromkeys(("ratios", "ranges", "break_even_concurrency"))
        return {"status": "not_comparable", "reason": reason} | nothing
    ratios = {name: other[name] / base[name] for name in COMPARED if base.get(name) and other.get(name)}
    return {
        "status": "valid",
        "reason": None,
        "ratios": ratios,
        "ranges": {name: found for name in ratios if (found := _range(name, base, other))},
        "break_even_concurrency": break_even(base, other),
        "emulated": bool(base.get("emulated") or other.get("emulated")),
    }


def _range(name: str, base: Mapping[str, Any], other: Mapping[str, Any]) -> list[float] | None:
    before, after = (result.get("values", {}).get(name) or [0] for result in (base, other))
    return [min(after) / max(before), max(after) / min(before)] if min(*before, *after) > 0 else None


def _refusal(base: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, result in (("base", base), ("other", other)):
        if result.get("status") != "valid":
            return f"the {name} result is {result.get('status')}: {result.get('reason')}"
    if (conditions := unlike(base, other)) is not None:
        return conditions
    if base.get("checkpoint_id") != other.get("checkpoint_id") and (base.get("emulated") or other.get("emulated")):
        formats = sorted({*base.get("emulated", []), *other.get("emulated", [])})
        return f"kernels of {', '.join(formats)} are emulated: speeds of two quantizations cannot be ranked"
    accepted = [result.get(ACCEPT_LENGTH) for result in (base, other)]
    if accepted[0] != accepted[1]:
        return f"accept length of speculative decoding differs: {accepted[0]} and {accepted[1]}"
    return None


def unlike(base: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Why the two were not measured under the same conditions, whatever they are worth; ``None`` when they were."""
    keys = [result["comparability"]["key"] for result in (base, other)]
    if None in keys:
        return "a result has no machine or software fingerprint"
    if keys[0] == keys[1]:
        return None
    parts = [result["comparability"]["parts"] for result in (base, other)]
    names = sorted(name for name in parts[0] | parts[1] if parts[0].get(name) != parts[1].get(name))
    return f"measured under other conditions: {', '.join(names)} differ"


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
