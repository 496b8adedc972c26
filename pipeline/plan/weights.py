"""Weight bytes of a checkpoint and of one rank, and the cuts that a format cannot bear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.k3 import ModelFacts, Role, Shard, Tensor
from pipeline.plan.layout import Layout, copies, degree, local_shape, stages
from pipeline.plan.schemes import DTYPE_BYTES, Storage, matrix_parts

Rule = Callable[[Tensor], Storage | None]
NOT_SERVED = (Role.VISION, Role.PROJECTOR)


@dataclass(frozen=True)
class Weights:
    """Bytes by role and by dtype.  Both sum to ``total``."""

    total: int = 0
    by_role: dict[str, int] = field(default_factory=dict)
    by_dtype: dict[str, int] = field(default_factory=dict)


def _sum(entries: Counter[tuple[str, str]]) -> Weights:
    by_role: Counter[str] = Counter()
    by_dtype: Counter[str] = Counter()
    for (role, dtype), count in entries.items():
        by_role[role] += count
        by_dtype[dtype] += count
    return Weights(sum(by_role.values()), dict(by_role), dict(by_dtype))


def checkpoint_weights(facts: ModelFacts, rule: Rule) -> Weights:
    """Bytes of the checkpoint's tensors on disk, vision tower included."""
    entries: Counter[tuple[str, str]] = Counter()
    for tensor, times in facts.distinct().items():
        for dtype, elements in matrix_parts(tensor, rule(tensor), tensor.shape):
            entries[tensor.role.value, dtype] += times * tensor.count * elements * DTYPE_BYTES[dtype]
    return _sum(entries)


def rank_weights(facts: ModelFacts, rule: Rule, layout: Layout, platform: str, text_only: bool = True) -> list[Weights]:
    """Weight bytes of one rank, one entry a pipeline stage, as loaded and before any kernel repacks them.

    The first stage holds the embedding, the last the head and the final norms; the vision tower loads on the first,
    replicated, unless served text-only.
    """
    result = []
    parts = stages(facts.num_layers, layout.pipeline)
    for stage, layers in enumerate(parts):
        entries: Counter[tuple[str, str]] = Counter()
        for tensor, times in facts.distinct(layers).items():
            if tensor.role in NOT_SERVED:
                if text_only or stage:
                    continue
            elif tensor.layer is None:
                first = tensor.role is Role.EMBEDDING
                if stage != (0 if first else len(parts) - 1):
                    continue
            shape = local_shape(tensor, layout, facts, platform)
            for dtype, elements in matrix_parts(tensor, rule(tensor), shape):
                entries[tensor.role.value, dtype] += times * copies(tensor, layout) * elements * DTYPE_BYTES[dtype]
        if any(layer in layers for layer in facts.kv_layers):
            dtype, rotary = rotary_cache(facts)
            entries.update({("rotary_cache", dtype): rotary} if rotary else {})
        result.append(_sum(entries))
    return result


def rotary_cache(facts: ModelFacts) -> tuple[str, int]:
    """(dtype, bytes) of the cos/sin table that vLLM keeps as a buffer, one for all layers, on every rank.

    vllm/model_executor/layers/rotary_embedding/base.py: [max positions, rotary width] in the model's dtype.  NoPE
    has none.
    """
    text = facts.text
    if text.get("mla_use_nope"):
        return "bfloat16", 0
    width = text["qk_rope_head_dim"] if facts.uses_mla else int(facts.head_dim * text.get("partial_rotary_factor", 1.0))
    dtype = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    return dtype, facts.max_model_len * width * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class BadCut:
    """A tensor that does not divide: ``size / ways`` is not a multiple of ``multiple``."""

    tensor: str
    size: int
    ways: int
    multiple: int
    in_scope: bool = True

    def __str__(self) -> str:
        piece = f"{self.size}/{self.ways} = {self.size / self.ways:g}"
        reason = f", not a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{self.tensor}: {piece}{reason}"


def bad_cuts(facts: ModelFacts, rule: Rule, layout: Layout, wider: Rule | None = None) -> list[BadCut]:
    """Tensors whose slice is not whole, or straddles a scale block or group.

    Each role is tested on its own degree: experts are cut DP x TP ways when expert parallelism is off.  ``wider`` is
    the rule of a larger scope: tensors that only it would break are listed too, marked ``in_scope=False``.
    The engine may pad a slice (192 rows to 256), but the scales in the file stay where they are: a 128-row block
    that belongs to two ranks has no owner.
    """
    found: dict[tuple[str, int, int], BadCut] = {}
    for tensor in facts.distinct():
        if tensor.shard in (Shard.REPLICATED, Shard.VOCAB):
            continue
        axis = 0 if tensor.shard is Shard.COLUMN else len(tensor.shape) - 1
        size, ways = tensor.shape[axis], degree(tensor, layout)
        stored, in_scope = rule(tensor), True
        if stored is None and wider is not None and wider(tensor) is not None:
            stored, in_scope = wider(tensor), False
        multiple = stored.block[0 if axis == 0 else 1] if stored else 1
        whole = size % ways == 0 and size // ways % multiple == 0
        if not whole and ways > 1:
            found.setdefault((tensor.name, size, multiple), BadCut(tensor.name, size, ways, multiple, in_scope))
    return list(found.values())


def fused_conflicts(facts: ModelFacts, rule: Rule) -> list[str]:
    """Fused modules whose members are not all stored alike: vLLM loads a fused module in one format or not at all."""
    sets: dict[tuple[str, str], dict[str, str]] = {}
    for tensor in facts.distinct():
        if tensor.fused:
            parent, name = tensor.name.rsplit(".", 1)
            stored = rule(tensor)
            sets.setdefault((parent, tensor.fused), {})[name] = stored.name if stored else "bf16"
    return [
        f"{parent}.{fused}: " + ", ".join(f"{name} {kind}" for name, kind in members.items())
        for (parent, fused), members in sets.items()
        if len(set(members.values())) > 1
    ]
