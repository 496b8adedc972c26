"""A tensor of a checkpoint as a fact: its name, shape, role, and how vLLM shards it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a tensor is for.  The value is the key used in tables and JSON."""

    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    LATENT = "latent_projection"
    ROUTER = "router"
    DENSE_MLP = "dense_mlp"
    MLA = "mla"
    KDA = "kda"
    GDN = "gdn"
    GQA = "gqa"
    NORM = "norm"
    RESIDUAL = "attention_residual"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    VISION = "vision"
    PROJECTOR = "projector"


class Shard(Enum):
    """How tensor parallelism cuts a tensor (vllm/model_executor/layers/linear.py)."""

    REPLICATED = "replicated"
    COLUMN = "column"  # the output dimension (first axis) is split
    ROW = "row"  # the input dimension (last axis) is split
    VOCAB = "vocab"  # first axis, padded to a multiple of 64


@dataclass(frozen=True)
class Tensor:
    """``count`` equal tensors (the experts of one layer are one entry).

    ``name`` is the checkpoint name without ``.weight``, ``{e}`` standing for the expert.  ``shape`` is ``[out, in]``
    for a linear layer.  ``fused`` names vLLM's fused module: its members are quantized all together or not at all.
    ``heads`` is the number of key-value heads where fewer heads than ranks means replication.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    layer: int | None = None
    count: int = 1
    shard: Shard = Shard.REPLICATED
    linear: bool = True
    fused: str | None = None
    dtype: str = "bfloat16"
    kv_heads: int | None = None

    @property
    def parameters(self) -> int:
        return self.count * math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        return self.role is Role.EXPERT
