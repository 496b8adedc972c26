"""The planner: memory of one rank, what it holds, and every reason why a request cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed

from pipeline.errors import Refused
from pipeline.k3 import source_format
from pipeline.plan.activation import Activation, activation
from pipeline.plan.cache import KV_DTYPES, CachePlan, is_calibrated, kv_gain, kv_key, plan_cache
from pipeline.plan.checks import refusals_of, warnings_of
from pipeline.plan.compatibility import lookup
from pipeline.plan.request import Request
from pipeline.plan.result import PlanResult, Refusal
from pipeline.plan.schemes import storage_rule
from pipeline.plan.sites import Step
from pipeline.plan.weights import Weights, checkpoint_weights, rank_weights

LENGTHS = (1024, 4096, 8192, 32768, 131072, 262144, 524288, 1048576)
WEIGHT_DOUBT = 1.02  # the tolerance a measured run is held to
ACTIVATION_DOUBT = {True: 1.15, False: 1.5}


@dataclass(frozen=True)
class Memory:
    """The memory of every pipeline stage of one request.  Lists are per stage; a pool is at least zero."""

    checkpoint: Weights
    weights: list[Weights]
    caches: list[CachePlan]
    activation: Activation
    activation_worst: Activation
    budget: int
    workspace: int
    pools: list[int]

    @property
    def fullest(self) -> int:
        """The stage with the fewest blocks: the engine gives every stage as many as that one has."""
        return min(range(len(self.pools)), key=lambda i: self.caches[i].num_blocks(self.pools[i]))

    @property
    def num_blocks(self) -> int:
        return self.caches[self.fullest].num_blocks(self.pools[self.fullest])


def _steps(request: Request) -> tuple[Step, Step]:
    """The step that the memory report measures (the batch spread over all sequences), and the worst one (a whole
    chunk of one sequence at the end of the context)."""
    grouped = lookup(request.combination).verdict == "emulated"
    tokens, context = request.max_num_batched_tokens, request.cache.max_model_len
    gpu = request.hardware.platform != "cpu"
    spread = Step(tokens, request.max_num_seqs, context if gpu else 0, grouped)
    return spread, Step(tokens, request.max_num_seqs if gpu else 1, context, grouped)


def memory(request: Request, weight_factor: float = 1.0, activation_factor: float = 1.0) -> Memory:
    """Lay a request out in memory.

    GPU: budget = utilization x device; pool = budget - weights - activation peak - whatever workspace does not fit
    in the part left unreserved (vllm/v1/worker/gpu_worker.py, determine_available_memory).  CPU: the pool is the
    given budget.
    """
    facts, hardware = request.model.facts, request.hardware
    rule = storage_rule(request.model.config, facts, request.scheme)
    weights = rank_weights(facts, rule, request.layout, hardware.platform, request.text_only)
    caches = plan_cache(facts, request.layout, request.cache)
    spread, worst = _steps(request)
    peak = activation(facts, request.layout, spread, hardware.platform)
    whole = activation(facts, request.layout, worst, hardware.platform)
    largest = max(peak, whole, key=lambda each: each.peak_bytes)
    device = hardware.memory.usable_bytes
    workspace = sum(entry.bytes for entry in hardware.workspaces.values())
    budget = device if request.kv_budget is not None else int(device * request.utilization)
    overflow = max(0, workspace - (device - budget))
    pools = []
    for stage in weights:
        taken = int(stage.total * weight_factor) + int(largest.peak_bytes * activation_factor) + overflow
        left = budget - taken
        pools.append(left if request.kv_budget is None else min(request.kv_budget, left))
    pools = [max(0, pool) for pool in pools]
    return Memory(checkpoint_weights(facts, rule), weights, caches, peak, largest, budget, workspace, pools)


def _verdict(request: Request, laid: Memory) -> str:
    """fits: yes, no, or marginal where the answer turns within the model's own error."""
    length = request.cache.max_model_len

    def holds(candidate: Memory) -> bool:
        stage = candidate.fullest
        return candidate.num_blocks - 1 >= candidate.caches[stage].blocks(length)

    if not holds(laid):
        return "no"
    pessimistic = memory(request, WEIGHT_DOUBT, ACTIVATION_DOUBT[laid.activation.measured])
    return "yes" if holds(pessimistic) else "marginal"


def kv_label(request: Request) -> str:
    """How the KV cache is scaled: K3 and other MLA models always run at scale 1.0, calibrated scales would never be
    read."""
    cache, _ = kv_key(request.kv)
    if cache in ("auto", "bfloat16", "float16"):
        return "unquantized"
    if cache == "fp8_ds_mla" or "per_token" in cache:
        return "self_scaled"
    return "calibrated" if is_calibrated(request.kv) and not request.model.facts.uses_mla else "scale_1.0"


def requantization(request: Request) -> str:
    """How the source becomes the variant; raises :class:`Refused` where no sound way exists."""
    source, chosen = source_format(request.model.config), request.scheme
    if chosen.format == "native":
        return "none: served as published"
    if chosen.calibrated and not request.model.facts.is_k3:
        raise Refused(
            f"{request.quant}: calibrated recipes know Kimi K3's layout only, {request.model.name} is of another; use "
            "w4a16 or int8, which need no data"
        )
    if chosen.format == "nvfp4" and source.weights != "mxfp4":
        raise Refused(
            f"{request.quant}: NVFP4 is made by an exact cast of MXFP4, the source is {source.weights}; use w4a16"
        )
    if not source.is_quantized:
        return "llm-compressor oneshot, calibrated" if chosen.calibrated else "round to nearest from the source weights"
    if source.weights == "mxfp4":
        if chosen.calibrated:
            return "dequantize to bf16 (compressed-tensors converter), then llm-compressor oneshot, calibrated"
        return "table look-up from MXFP4 codes and exponents"
    raise Refused(
        f"the source is already {source.weights} ({source.where}.format = {source.name!r}): {request.quant} on top of "
        "it would round twice, and llm-compressor's oneshot fails on such weights; start from the native checkpoint or "
        "serve it as is"
    )


def evaluate(request: Request) -> PlanResult:
    """Plan one request.  Refusals are collected, not raised; they carry no alternative yet."""
    facts, hardware, layout = request.model.facts, request.hardware, request.layout
    found = lookup(request.combination)
    if request.cache.kv not in ("auto", *KV_DTYPES):
        why = f"{found.reason} ({found.source})" if found.verdict == "no" else "its bytes a token are not modelled"
        raise Refused(f"kv {request.cache.kv} on {hardware.name}: {why}; use auto, {', '.join(KV_DTYPES)}")
    laid = memory(request)
    stage, cache = laid.fullest, laid.caches[laid.fullest]
    weights = max(laid.weights, key=lambda each: each.total)
    pool, blocks = laid.pools[stage], laid.num_blocks
    fits = _verdict(request, laid)
    refusals = refusals_of(request, laid, fits)
    try:
        path = requantization(request)
    except Refused as error:
        path, refusals = "refused", [*refusals, Refusal("source_format", str(error))]
    auto, fp8 = (plan_cache(facts, layout, changed(request.cache, kv=kv))[stage] for kv in ("auto", "fp8"))
    lengths = [length for length in LENGTHS if length <= max(facts.max_model_len, request.cache.max_model_len)]
    return PlanResult(
        model=request.model.name,
        hardware=hardware.name,
        quant=request.quant,
        kv=request.kv,
        state_dtype=request.cache.state_dtype,
        layout=layout.label(),
        ranks=layout.ranks,
        engine=f"{hardware.engine} {request.engine_version}",
        fits=fits,
        verdict=found.verdict,
        kv_label=kv_label(request),
        requantization=path,
        parameters=facts.parameters,
        weight_bytes=laid.checkpoint.total,
        weight_bytes_per_rank=weights.total,
        weight_bytes_by_role=weights.by_role,
        weight_bytes_by_dtype=weights.by_dtype,
        kv_bytes_per_token=cache.kv_bytes_per_token,
        kv_layers=cache.kv_layers,
        kv_page_bytes=cache.page_bytes,
        requested_block_size=cache.requested_block,
        effective_block_size=cache.block,
        state_layers=cache.state_layers,
        state_recurrent_bytes_per_sequence=cache.state_recurrent_bytes * cache.state_layers,
        state_convolution_bytes_per_sequence=cache.state_convolution_bytes * cache.state_layers,
        state_bytes_per_sequence=cache.state_bytes,
        state_bytes_per_sequence_padded=cache.state_bytes_padded,
        state_bytes_per_sequence_pool=cache.state_bytes_pool,
        state_blocks_per_sequence=cache.state_blocks,
        bytes_per_block=cache.bytes_per_block,
        device_bytes=hardware.memory.usable_bytes,
        budget_bytes=laid.budget,
        activation_peak_bytes=laid.activation.peak_bytes,
        activation_largest_site=laid.activation.largest_site,
        activation_worst_bytes=laid.activation_worst.peak_bytes,
        activation_worst_site=laid.activation_worst.largest_site,
        activation_measured=laid.activation.measured,
        workspace_bytes=laid.workspace,
        kv_pool_bytes=pool,
        num_blocks=blocks,
        kv_capacity_tokens=cache.capacity_tokens(blocks, request.cache.max_model_len),
        max_model_len=request.cache.max_model_len,
        max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.max_num_batched_tokens,
        prefix_caching=request.cache.prefix_caching,
        longest_sequence_tokens=cache.longest(pool),
        sequences_with_state=max(0, blocks - 1) // cache.state_blocks if cache.state_blocks else 0,
        replicas=layout.data,
        max_concurrency={str(length): layout.data * cache.concurrency(pool, length) for length in lengths},
        tie_tokens=auto.tie_tokens,
        tie_tokens_fp8=fp8.tie_tokens,
        fp8_kv_gain={str(length): round(kv_gain(auto, fp8, length), 3) for length in lengths},
        fp8_kv_gain_pool={
            str(length): round(auto.pool_bytes(length) / fp8.pool_bytes(length), 3) for length in lengths
        },
        refusals=refusals,
        warnings=warnings_of(request, laid, found),
    )
