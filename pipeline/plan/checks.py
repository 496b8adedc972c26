"""Every reason to refuse or to warn, from config alone.  A warning never changes the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.k3 import declared_quantizations, ignore_patterns_without_match, kv_cache_scheme
from pipeline.plan.cache import is_calibrated
from pipeline.plan.compatibility import Verdict, engine_too_old, lookup
from pipeline.plan.request import Request
from pipeline.plan.result import Refusal
from pipeline.plan.schemes import SCHEMES, storage_rule
from pipeline.plan.weights import bad_cuts, fused_conflicts

if TYPE_CHECKING:
    from pipeline.plan.planner import Memory


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def refusals_of(request: Request, laid: Memory, fits: str) -> list[Refusal]:
    """Refusals in the order an engine would meet them: combination, cuts, checkpoint, memory, settings."""
    found = [*_combination(request), *_cuts(request), *_checkpoint(request), *_memory(request, laid, fits)]
    return [*found, *_settings(request, laid)]


def _combination(request: Request) -> list[Refusal]:
    refusals, verdict = [], lookup(request.combination)
    if verdict.verdict == "no":
        message = f"{request.quant}-{request.kv} on {request.hardware.name}: {verdict.reason} ({verdict.source})"
        refusals.append(Refusal("compatibility", message))
    if is_calibrated(request.kv) and request.model.facts.uses_mla:
        message = (
            f"kv {request.kv}: {request.model.name} caches a latent, for which the engine reads no k or v scale: calibrated ones "
            "would be stored and never used. kv fp8 runs at scale 1.0"
        )
        refusals.append(Refusal("kv_scales", message))
    too_old = engine_too_old(request.combination, request.engine_version)
    if too_old:
        refusals.append(Refusal("engine_version", too_old))
    return refusals


def _cuts(request: Request) -> list[Refusal]:
    facts, config, chosen = request.model.facts, request.model.config, request.scheme
    rule = storage_rule(config, facts, chosen)
    wider = storage_rule(config, facts, SCHEMES["fp8_all"]) if chosen.format == "fp8_block" else None
    cuts = bad_cuts(facts, rule, request.layout, wider)
    refusals = []
    broken = [cut for cut in cuts if cut.in_scope]
    if broken:
        listed = "; ".join(str(cut) for cut in broken)
        message = f"{request.quant} at {request.layout.label()} cannot be cut: {listed}"
        outside = [str(cut) for cut in cuts if not cut.in_scope]
        if outside:
            message += f". Dense layers, if quantized too, break as well: {'; '.join(outside)}"
        if request.layout.data > 1 and not request.layout.expert:
            message += f". Experts are cut over data x tensor = {request.layout.expert_ranks} ranks"
        refusals.append(Refusal("divisibility", message))
    conflicts = fused_conflicts(facts, rule)
    if conflicts:
        refusals.append(Refusal("fused_set", "fused modules would hold two formats: " + "; ".join(conflicts)))
    return refusals


def _checkpoint(request: Request) -> list[Refusal]:
    facts, refusals = request.model.facts, []
    declared = kv_cache_scheme(request.model.config)
    if declared and (declared.get("num_bits") != 8 or declared.get("type") != "float"):
        layers = ", ".join(str(layer) for layer in facts.kv_layers)
        refusals.append(
            Refusal(
                "kv_cache_scheme",
                f"kv_cache_scheme is {declared.get('num_bits')}-bit {declared.get('type')}: the engine reads 8-bit "
                f"float only. It would apply to the {len(facts.kv_layers)} layers that have a KV cache: {layers}",
            )
        )
    for where, quantization in declared_quantizations(request.model.config):
        missing = ignore_patterns_without_match(quantization.get("ignore") or (), facts)
        if missing:
            refusals.append(
                Refusal(
                    "ignore_pattern",
                    f"{where}.ignore: {', '.join(missing)} matches no tensor; names in a checkpoint are unfused",
                )
            )
    return refusals


def _memory(request: Request, laid: Memory, fits: str) -> list[Refusal]:
    weights = max(stage.total for stage in laid.weights)
    where = f"{request.hardware.name} ({request.layout.label()})"
    if weights > laid.budget:
        return [
            Refusal(
                "weights",
                f"{request.quant} weights take {_gb(weights)} a rank, {_gb(laid.checkpoint.total)} in all; {where} "
                f"offers {_gb(laid.budget)} of {_gb(request.hardware.memory.usable_bytes)} a device",
            )
        ]
    if fits != "no":
        return []
    cache, pool, length = laid.caches[laid.fullest], laid.pools[laid.fullest], request.cache.max_model_len
    longest = cache.longest(pool)
    peak = laid.activation_worst
    need = (cache.blocks(length) + 1) * cache.bytes_per_block
    if request.kv_budget is None and peak.peak_bytes + weights > laid.budget:
        return [
            Refusal(
                "activation",
                f"a step of {request.max_num_batched_tokens} tokens peaks at {_gb(peak.peak_bytes)} (largest site: "
                f"{peak.largest_site}); with {_gb(weights)} of weights that exceeds the {_gb(laid.budget)} of {where}; "
                "lower max_num_batched_tokens",
            )
        ]
    return [
        Refusal(
            "max_model_len",
            f"one sequence of max_model_len {length} needs {_gb(need)} of cache ({cache.blocks(length)} blocks and the "
            f"null block); the pool has {_gb(pool)} after {_gb(weights)} of weights and {_gb(peak.peak_bytes)} of "
            f"activations. Longest that fits: {longest} tokens",
        )
    ]


def _settings(request: Request, laid: Memory) -> list[Refusal]:
    facts, cache, refusals = request.model.facts, laid.caches[laid.fullest], []
    if facts.max_model_len and request.cache.max_model_len > facts.max_model_len:
        refusals.append(
            Refusal(
                "context",
                f"max_model_len {request.cache.max_model_len} is above the model's {facts.max_model_len} positions",
            )
        )
    if cache.state_layers and laid.num_blocks and request.max_num_seqs > laid.num_blocks:
        refusals.append(
            Refusal(
                "max_num_seqs",
                f"max_num_seqs {request.max_num_seqs} exceeds the {laid.num_blocks} blocks that can hold a state; the "
                "engine stops at start-up. State for "
                f"{max(0, laid.num_blocks - 1) // max(1, cache.state_blocks)} sequences fits",
            )
        )
    if request.max_num_batched_tokens < request.max_num_seqs:
        refusals.append(
            Refusal(
                "max_num_batched_tokens",
                f"max_num_batched_tokens {request.max_num_batched_tokens} is below max_num_seqs "
                f"{request.max_num_seqs}: a decode step could not hold one token of each",
            )
        )
    return refusals


def warnings_of(request: Request, laid: Memory, verdict: Verdict) -> list[str]:
    """Things that work and are not what they seem."""
    facts, cache = request.model.facts, laid.caches[laid.fullest]
    settings, warnings = request.cache, []
    if verdict.verdict == "untested":
        variant = f"{request.quant}-{request.kv} on {request.hardware.name}"
        warnings.append(f"untested: {variant}: {verdict.reason} ({verdict.source})")
    if verdict.verdict == "emulated":
        warnings.append(f"emulated: {verdict.reason}; speed means nothing, accuracy and memory hold")
    if settings.prefix_caching and cache.block > settings.max_model_len:
        warnings.append(
            f"prefix caching is on but inert: the effective block of {cache.block} tokens is longer than max_model_len "
            f"{settings.max_model_len}, so no block is ever full (https://github.com/vllm-project/vllm/pull/48402)"
        )
    if cache.block != cache.requested_block and request.overrides.block_size:
        warnings.append(
            f"block size {cache.requested_block} becomes {cache.block}: an attention page must hold a state of "
            f"{cache.state_page_nominal} B"
        )
    states = max(0, laid.num_blocks - 1) // cache.state_blocks if cache.state_blocks else None
    if states is not None and laid.num_blocks >= request.max_num_seqs > states:
        warnings.append(
            f"max_num_seqs {request.max_num_seqs} is never reached: the pool holds the state of {states} sequences "
            f"({cache.state_blocks} blocks each)"
        )
    if request.kv.startswith("fp8") and facts.uses_mla:
        warnings.append(
            "fp8 KV runs at scale 1.0: the engine caches the latent and reads no calibrated k/v scale for MLA"
        )
    elif request.kv.startswith("fp8") and not is_calibrated(request.kv):
        warnings.append("fp8 KV runs at scale 1.0 unless the checkpoint holds k and v scales; kv fp8_calibrated makes them")
    if request.kv.startswith("fp8") and cache.tie_tokens and cache.tie_tokens > settings.max_model_len:
        warnings.append(
            f"fp8 KV gains little here: below {cache.tie_tokens:.0f} tokens a sequence's state outweighs its cache, "
            f"and max_model_len is {settings.max_model_len}"
        )
    return warnings
