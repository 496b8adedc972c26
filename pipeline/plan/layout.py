"""How a model is spread over ranks, and what slice of a tensor one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import Refused
from pipeline.k3 import ModelFacts, Shard, Tensor

VOCAB_PADDING = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE
MIN_EXPERT_SLICE = 256  # vllm/models/kimi_k3/nvidia/model.py, min_moe_intermediate_per_partition


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism.  Ranks = tensor x pipeline x data; decode context parallelism reuses the tensor ranks."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    decode_context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "decode_context"):
            if getattr(self, name) < 1:
                raise Refused(f"{name} parallel size must be at least 1, not {getattr(self, name)}")
        if self.tensor % self.decode_context:
            raise Refused(
                f"decode context parallel size {self.decode_context} does not divide the tensor parallel size "
                f"{self.tensor}"
            )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """Ranks over which experts are spread: vLLM flattens data and tensor parallelism for the MoE layers."""
        return self.tensor * self.data

    def label(self) -> str:
        parts = [f"TP{self.tensor}"]
        parts += [f"PP{self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"DP{self.data}"] if self.data > 1 else []
        parts += ["EP"] if self.expert else []
        parts += [f"DCP{self.decode_context}"] if self.decode_context > 1 else []
        return "x".join(parts)


def degree(tensor: Tensor, layout: Layout) -> int:
    """In how many slices the tensor is cut."""
    if tensor.shard is Shard.REPLICATED:
        return 1
    if tensor.is_expert:
        return 1 if layout.expert else layout.expert_ranks
    if tensor.kv_heads is not None:
        return min(layout.tensor, tensor.kv_heads)
    return layout.tensor


def copies(tensor: Tensor, layout: Layout) -> int:
    """How many of ``tensor.count`` one rank holds: all of them, or its share of the experts under expert
    parallelism."""
    if tensor.is_expert and layout.expert:
        return -(-tensor.count // layout.expert_ranks)
    return tensor.count


def expert_width(facts: ModelFacts, width: int, layout: Layout, platform: str) -> int:
    """Expert width as the engine allocates it.

    vLLM's NVIDIA K3 pads a tensor-parallel slice of an expert to at least 256: at TP16 a rank holds 256 rows, not 192,
    and routed experts take a third more memory.
    """
    padded = platform == "cuda" and facts.is_k3 and not layout.expert and layout.tensor > 1
    if padded and width // layout.tensor < MIN_EXPERT_SLICE:
        return MIN_EXPERT_SLICE * layout.tensor
    return width


def local_shape(tensor: Tensor, layout: Layout, facts: ModelFacts, platform: str) -> tuple[int, ...]:
    """Shape of one rank's slice, rounded up where it does not divide (the divisibility check refuses that
    elsewhere)."""
    slices, shape = degree(tensor, layout), tensor.shape
    if tensor.shard is Shard.VOCAB:
        rows = -(-shape[0] // VOCAB_PADDING) * VOCAB_PADDING
        return (-(-rows // slices), *shape[1:])
    if tensor.shard is Shard.COLUMN:
        rows = expert_width(facts, shape[0], layout, platform) if tensor.is_expert else shape[0]
        return (-(-rows // slices), *shape[1:])
    if tensor.shard is Shard.ROW:
        columns = expert_width(facts, shape[-1], layout, platform) if tensor.is_expert else shape[-1]
        return (*shape[:-1], -(-columns // slices))
    return shape


def stages(num_layers: int, pipeline: int) -> list[range]:
    """Layers of each pipeline stage (vllm/distributed/utils.py, get_pp_indices): the remainder goes to late stages,
    not the last."""
    if pipeline > num_layers:
        raise Refused(f"pipeline parallel size {pipeline} is above the number of layers, {num_layers}")
    sizes = [num_layers // pipeline] * pipeline
    for i in range(2, num_layers % pipeline + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pipeline)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
