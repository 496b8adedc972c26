"""Plan a request and, where it is refused, find the nearest one that is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from pipeline.errors import Refused
from pipeline.plan import hardware as machines
from pipeline.plan.hardware import Hardware
from pipeline.plan.planner import evaluate
from pipeline.plan.request import Model, Overrides, Request, make_request, request_of
from pipeline.plan.result import PlanResult
from pipeline.plan.schemes import Scheme, scheme

# The scheme nearest to each: same arithmetic, finer or coarser scales, then the next format.
NEAREST = {
    "fp8": ("fp8_channel", "fp8_dense", "native"),
    "fp8_all": ("fp8_dense", "fp8_channel", "native"),
    "fp8_channel": ("fp8_dense", "w4a16", "native"),
    "fp8_dense": ("native",),
    "int8": ("fp8_channel", "w4a16", "native"),
    "int8_dense": ("fp8_dense", "native"),
    "int8_sq": ("int8", "w4a16", "native"),
    "w4a16_g128": ("w4a16", "native"),
    "w4a16": ("nvfp4", "native"),
    "w4a16_gptq": ("w4a16", "native"),
    "w4a16_awq": ("w4a16", "native"),
    "nvfp4": ("w4a16", "native"),
    "bf16": ("native",),
}


def plan(
    model_config: dict[str, Any] | str | Path | Model,
    hardware: Hardware | str,
    quant: str = "native",
    kv: str = "auto",
    *,
    recipe: dict[str, Any] | None = None,
    overrides: Overrides | None = None,
    name: str = "model",
    alternatives: bool = True,
) -> PlanResult:
    """Plan ``quant``-``kv`` of a model on a machine.

    ``recipe`` is the quantization recipe behind ``quant`` where it is not the one this module knows under that key.
    ``model_config`` is a parsed ``config.json``, a path or name of one, or a loaded :class:`Model`.  Refusals are
    part of the result; only what cannot be read raises (:class:`~pipeline.errors.Unreadable`), and a key that does
    not exist (:class:`~pipeline.errors.Refused`).
    """
    request = request_of(model_config, hardware, quant, kv, recipe, overrides, name)
    result = evaluate(request)
    if not result.refusals or not alternatives:
        return result
    nearest = "; or ".join(_nearest(request, result))
    return changed(result, refusals=[changed(refusal, alternative=nearest or None) for refusal in result.refusals])


def _works(model: Model, machine: Hardware, quant: Scheme | str, kv: str, overrides: Overrides) -> bool:
    chosen = scheme(quant) if isinstance(quant, str) else quant
    try:
        return not evaluate(make_request(model, machine, chosen, kv, overrides)).refusals
    except Refused:
        return False


def _nearest(request: Request, result: PlanResult) -> list[str]:
    """At most three requests that differ in one thing (else in two) and are not refused."""
    found = [text for text in _one_change(request, result)]
    return found[:3] or [text for text in _two_changes(request)][:2]


def _one_change(request: Request, result: PlanResult) -> Iterator[str]:
    model, machine, quant, kv, asked = request.model, request.hardware, request.scheme, request.kv, request.overrides
    longest = result.longest_sequence_tokens
    shorter = changed(asked, max_model_len=longest)
    if 0 < longest < request.cache.max_model_len and _works(model, machine, quant, kv, shorter):
        yield f"max_model_len {longest}"
    elif 0 < model.facts.max_model_len < request.cache.max_model_len:
        if _works(model, machine, quant, kv, changed(asked, max_model_len=model.facts.max_model_len)):
            yield f"max_model_len {model.facts.max_model_len}"
    for seqs in (result.sequences_with_state, result.num_blocks, request.max_num_batched_tokens):
        if 0 < seqs < request.max_num_seqs and _works(model, machine, quant, kv, changed(asked, max_num_seqs=seqs)):
            yield f"max_num_seqs {seqs}"
            break
    for tokens in (16384, 8192, 4096):
        if tokens < request.max_num_batched_tokens and _works(
            model, machine, quant, kv, changed(asked, max_num_batched_tokens=tokens)
        ):
            yield f"max_num_batched_tokens {tokens}"
            break
    if kv != "auto" and _works(model, machine, quant, "auto", asked):
        yield f"kv auto on {machine.name}"
    for other in NEAREST.get(request.quant, ()):
        if _works(model, machine, other, kv, asked):
            yield f"quant {other} on {machine.name}"
            break
    for other_machine in _other_machines(machine):
        if _works(model, other_machine, quant, kv, _portable(asked)):
            yield f"{request.quant}-{kv} on {other_machine.name}"
            break


def _two_changes(request: Request) -> Iterator[str]:
    model, machine, quant, asked = request.model, request.hardware, request.quant, request.overrides
    for other in NEAREST.get(request.quant, ()):
        if _works(model, machine, other, "auto", asked):
            yield f"{other}-auto on {machine.name}"
            break
    for other_machine in _other_machines(machine):
        for other in (quant, *NEAREST.get(request.quant, ())):
            if _works(model, other_machine, other, "auto", _portable(asked)):
                yield f"{other}-auto on {other_machine.name}"
                return


def _portable(asked: Overrides) -> Overrides:
    """The overrides that make sense on another machine: not the parallel layout."""
    return changed(
        asked,
        tensor_parallel=None,
        pipeline_parallel=None,
        data_parallel=None,
        decode_context_parallel=None,
        expert_parallel=None,
        gpu_memory_utilization=None,
        kv_cache_memory_bytes=None,
    )


def _other_machines(machine: Hardware) -> list[Hardware]:
    """Machines of the same kind, fewest devices first; a CPU is no alternative to a GPU, nor a GPU to a CPU."""
    others = [machines.load(name) for name in machines.available() if name != machine.name]
    same = [other for other in others if (other.platform == "cpu") == (machine.platform == "cpu")]
    return sorted(same, key=lambda other: (other.devices, other.platform != machine.platform, other.name))
