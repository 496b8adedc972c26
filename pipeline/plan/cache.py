"""The KV cache pool as vLLM 0.32 builds it: pages, groups, blocks, and what one sequence takes from it.

A hybrid model keeps two memories in one pool of equal pages: attention layers fill a page with tokens, recurrent layers
with one state.  The attention block grows until its page holds a state, the state is padded to the page, and the layers
are dealt into groups of equal size that draw blocks from the pool independently.  Formulas and their sources in vLLM:

- effective block, padded state: ``Platform._align_hybrid_block_size`` (vllm/platforms/interface.py)
- state shapes and dtypes: ``MambaStateShapeCalculator`` (vllm/model_executor/layers/mamba/mamba_utils.py)
- groups, bytes a block: ``_get_kv_cache_groups_uniform_page_size``, ``_get_kv_cache_bytes_per_block``
  (vllm/v1/core/kv_cache_utils.py)
- blocks a request: ``max_memory_usage_bytes`` of each spec (vllm/v1/kv_cache_interface.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeline.errors import Refused
from pipeline.k3 import LayerKind, ModelFacts
from pipeline.plan.layout import Layout, stages
from pipeline.plan.schemes import DTYPE_BYTES

KV_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_ds_mla": "uint8",
}
FP8_DS_MLA_BYTES = 656  # 512 fp8 latent + 4 fp32 scales + 64 bf16 rope, a token a layer
MLA_BLOCK_MULTIPLE = 128  # kernels split a manager block into kernel blocks; TRTLLM and FlashInfer MLA want 128
DEFAULT_BLOCK = {"cpu": 128}
DEFAULT_BLOCK_ELSEWHERE = 16
CALIBRATED = "_calibrated"


@dataclass(frozen=True)
class CacheSettings:
    """What the server is asked for.  ``state_dtype`` is ``--mamba-ssm-cache-dtype``."""

    kv: str = "auto"
    model_dtype: str = "bfloat16"
    state_dtype: str = "auto"
    block_size: int | None = None
    prefix_caching: bool = True
    max_model_len: int = 8192
    platform: str = "cpu"


def kv_key(key: str) -> tuple[str, str]:
    """A ``--kv`` key as (KV cache dtype, state dtype): a state dtype of its own is part of the key, ``fp8_state16``.

    Whether the cache's scales are calibrated is part of the key too (:func:`is_calibrated`) and changes neither.
    """
    cache, separator, state = key.partition("_state")
    cache = cache.removesuffix(CALIBRATED)
    if not separator:
        return cache, "auto"
    known = {"16": "bfloat16", "32": "float32"}
    if state not in known:
        raise Refused(f"kv={key}: no state dtype {state!r}; known: _state16 (bfloat16), _state32 (float32)")
    return cache, known[state]


def is_calibrated(key: str) -> bool:
    """Whether a ``--kv`` key stands for scales calibrated and stored in a checkpoint of its own: ``fp8_calibrated``."""
    return key.partition("_state")[0].endswith(CALIBRATED)


def _kv_dtype_bytes(settings: CacheSettings) -> int:
    dtype = settings.model_dtype if settings.kv == "auto" else KV_DTYPES.get(settings.kv)
    if dtype is None:
        raise Refused(f"kv={settings.kv}: not modelled; known: auto, {', '.join(KV_DTYPES)}")
    return DTYPE_BYTES[dtype]


def token_bytes(facts: ModelFacts, layout: Layout, settings: CacheSettings) -> int:
    """Bytes one token takes in one attention layer on one rank, before any sharding by position.

    MLA keeps one latent of ``kv_lora_rank + qk_rope_head_dim`` that every tensor-parallel rank holds in full; GQA keeps
    keys and values of its share of the heads, at least one.
    """
    text = facts.text
    if facts.uses_mla:
        if settings.kv == "fp8_ds_mla":
            return FP8_DS_MLA_BYTES
        return (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * _kv_dtype_bytes(settings)
    kv_heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    return 2 * max(1, kv_heads // layout.tensor) * facts.head_dim * _kv_dtype_bytes(settings)


def state_parts(facts: ModelFacts, layout: Layout, settings: CacheSettings) -> dict[str, int]:
    """Bytes of one recurrent layer's state for one sequence on one rank: ``recurrent`` and short ``convolution``.

    KDA keeps its recurrent state in fp32 unless told otherwise; the convolution keeps the last ``kernel - 1`` inputs of
    q, k and v in the model's dtype.  Both are cut by heads over tensor parallelism.
    """
    kinds = {facts.layer_kinds[i] for i in facts.state_layers}
    if not kinds:
        return {"recurrent": 0, "convolution": 0}
    text, ways, conv_bytes = facts.text, layout.tensor, DTYPE_BYTES[settings.model_dtype]
    if LayerKind.KDA in kinds:
        linear = text["linear_attn_config"]
        heads, width = linear["num_heads"], linear["head_dim"]
        elements, conv_width, kernel = heads * width * width, 3 * heads * width, linear["short_conv_kernel_size"]
        default = "float32"
    else:
        heads = text["linear_num_value_heads"]
        keys, values = text["linear_key_head_dim"], text["linear_value_head_dim"]
        elements = heads * keys * values
        conv_width = 2 * text["linear_num_key_heads"] * keys + heads * values
        kernel = text["linear_conv_kernel_dim"]
        # The CPU backend resets the state to float32 (vllm/platforms/cpu.py).
        default = "float32" if settings.platform == "cpu" else text.get("mamba_ssm_dtype", settings.model_dtype)
    dtype = default if settings.state_dtype == "auto" else settings.state_dtype
    return {
        "recurrent": elements // ways * DTYPE_BYTES[dtype],
        "convolution": conv_width // ways * (kernel - 1) * conv_bytes,
    }


def _groups(attention: int, recurrent: int) -> list[tuple[bool, int]]:
    """(is recurrent, layers) of each cache group.

    The smaller kind sets the group size, unless the larger is within half as many again: then that one does.  Layer
    ``i`` of a kind goes to group ``i mod n``.
    """
    if not recurrent or not attention:
        return [(bool(recurrent), attention or recurrent)]
    few, many = sorted((attention, recurrent))
    size = many if many < few * 1.5 else few
    groups = []
    for is_state, layers in ((False, attention), (True, recurrent)):
        count = -(-layers // size)
        groups += [(is_state, len(range(i, layers, count))) for i in range(count)]
    return groups


@dataclass(frozen=True)
class CachePlan:
    """The pool of one rank, ready to be divided by a budget.  Sizes in bytes."""

    token_bytes: int
    kv_layers: int
    state_layers: int
    state_recurrent_bytes: int
    state_convolution_bytes: int
    requested_block: int
    block: int
    page_bytes: int
    bytes_per_block: int
    attention_groups: int
    state_groups: int
    state_blocks_each: int
    decode_context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """All attention layers, unpadded; a rank's share under decode context parallelism."""
        return self.token_bytes * self.kv_layers // self.decode_context

    @property
    def state_page_nominal(self) -> int:
        return self.state_recurrent_bytes + self.state_convolution_bytes

    @property
    def state_bytes(self) -> int:
        """Nominal state of one sequence on one rank: every recurrent layer, no padding."""
        return self.state_page_nominal * self.state_layers

    @property
    def state_page_padded(self) -> int:
        return self.page_bytes if self.state_layers else 0

    @property
    def state_bytes_padded(self) -> int:
        return self.state_page_padded * self.state_layers

    @property
    def state_blocks(self) -> int:
        """Blocks of the pool that one sequence's state holds."""
        return self.state_groups * self.state_blocks_each

    @property
    def state_bytes_pool(self) -> int:
        """What the pool really gives up for one sequence's state: a block spans a whole group, its unused pages too."""
        return self.state_blocks * self.bytes_per_block

    def attention_blocks(self, length: int) -> int:
        own = -(-length // self.decode_context)
        return self.attention_groups * -(-own // self.block) if self.kv_layers else 0

    def blocks(self, length: int) -> int:
        """Blocks of the pool that one sequence of ``length`` tokens holds."""
        return self.attention_blocks(length) + self.state_blocks

    def pool_bytes(self, length: int) -> int:
        """What the pool gives up for one sequence of ``length`` tokens."""
        return self.blocks(length) * self.bytes_per_block

    def num_blocks(self, budget: int) -> int:
        return max(0, budget) // self.bytes_per_block if self.bytes_per_block else 0

    def concurrency(self, budget: int, length: int) -> int:
        """Whole sequences of ``length`` tokens that fit.  vLLM keeps one block of the pool back as the null block."""
        return max(0, self.num_blocks(budget) - 1) // max(1, self.blocks(length))

    def capacity_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """``kv_cache_size_tokens`` of vLLM: blocks / (blocks a request of max_model_len takes) x max_model_len,
        truncated."""
        return int(num_blocks / max(1, self.blocks(max_model_len)) * max_model_len)

    def longest(self, budget: int) -> int:
        """The longest single sequence that the budget holds, in tokens; 0 where none does."""
        left = self.num_blocks(budget) - 1 - self.state_blocks
        if not self.kv_layers or left <= 0:
            return 0
        return left // self.attention_groups * self.block * self.decode_context

    @cached_property
    def tie_tokens(self) -> float | None:
        """Length at which the cache of a sequence weighs as much as its state, on one rank, nominal."""
        return self.state_bytes / self.kv_bytes_per_token if self.kv_layers and self.state_layers else None


def plan_cache(facts: ModelFacts, layout: Layout, settings: CacheSettings) -> list[CachePlan]:
    """The pool of one rank of each pipeline stage.  Groups are made over the whole model, then cut to the stage's
    layers."""
    a_token = token_bytes(facts, layout, settings)
    state = state_parts(facts, layout, settings)
    page_needed = sum(state.values())
    requested = settings.block_size or DEFAULT_BLOCK.get(settings.platform, DEFAULT_BLOCK_ELSEWHERE)
    block = requested
    if facts.is_hybrid:
        # On CPU the plugin keeps vLLM's default of 16 for MLA; 128 is the smallest a hybrid MLA model ends up with
        # anyway.
        multiple = max(requested, MLA_BLOCK_MULTIPLE) if facts.uses_mla else max(requested, 16)
        block = max(requested, multiple * -(-page_needed // (multiple * a_token)))
    page = block * a_token if facts.kv_layers else page_needed
    each = (2 if settings.prefix_caching else 1) if facts.state_layers else 0
    groups = _groups(len(facts.kv_layers), len(facts.state_layers))
    dealt = [_members(facts, groups, number) for number in range(len(groups))]
    plans = []
    for layers in stages(facts.num_layers, layout.pipeline):
        widest = max(len([layer for layer in members if layer in layers]) for members in dealt)
        plans.append(
            CachePlan(
                token_bytes=a_token,
                kv_layers=len([i for i in facts.kv_layers if i in layers]),
                state_layers=len([i for i in facts.state_layers if i in layers]),
                state_recurrent_bytes=state["recurrent"],
                state_convolution_bytes=state["convolution"],
                requested_block=requested,
                block=block,
                page_bytes=page,
                bytes_per_block=widest * page,
                attention_groups=sum(not is_state for is_state, _ in groups) if facts.kv_layers else 0,
                state_groups=sum(is_state for is_state, _ in groups),
                state_blocks_each=each,
                decode_context=layout.decode_context,
            )
        )
    return plans


def _members(facts: ModelFacts, groups: list[tuple[bool, int]], number: int) -> list[int]:
    is_state = groups[number][0]
    same = [i for i, (kind, _) in enumerate(groups) if kind == is_state]
    layers = facts.state_layers if is_state else facts.kv_layers
    return list(layers[same.index(number) :: len(same)])


def kv_gain(bf16: CachePlan, small: CachePlan, length: int) -> float:
    """How many times more sequences of ``length`` tokens the smaller cache holds, by nominal bytes on one rank."""
    large, less = (plan.state_bytes + length * plan.kv_bytes_per_token for plan in (bf16, small))
    return large / less
