"""The modules of a checkpoint beside what its config says of each: what the lint rules look at."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pipeline.checkpoint.declared import Declared, Group
from pipeline.checkpoint.headers import Tensor
from pipeline.checkpoint.layout import ROUTER_GATE
from pipeline.checkpoint.reading import Checkpoint

QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")


@dataclass
class Table:
    """The modules of a checkpoint with their parameters, and what the config says of each."""

    checkpoint: Checkpoint
    config: Declared | None
    modules: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    group_of: dict[str, Group] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def shard(self, tensor: str) -> str:
        return self.checkpoint.weight_map.get(tensor, "")

    def weight(self, module: str) -> Tensor | None:
        """The stored weight, packed or not."""
        stored = self.modules[module]
        return stored.get("weight_packed") or stored.get("weight")


def is_packed(stored: dict[str, Tensor]) -> bool:
    """Whether a module's parameters are those of a quantized matrix."""
    weight = stored.get("weight")
    return "weight_packed" in stored or (
        weight is not None and (
            weight.dtype in QUANTIZED_DTYPES or "weight_scale" in stored or "weight_scale_inv" in stored
        )
    )


def is_linear(module: str, weight: Tensor, kimi: bool) -> bool:
    """Whether a float weight is one that the target ``Linear`` claims: a matrix that is no embedding, norm or
    convolution.

    K3's router gate is a bare parameter in its own module, not a Linear.
    """
    leaf = module.rpartition(".")[2]
    if weight.parameter != "weight" or len(weight.shape) != 2 or (kimi and ROUTER_GATE.search(module)):
        return False
    return not any(word in leaf for word in ("embed", "wte", "wpe", "norm", "conv", "pos_emb"))


def table_of(checkpoint: Checkpoint, config: Declared | None) -> Table:
    """Sort tensors by module and match each module against ignore and targets."""
    table = Table(checkpoint, config)
    for name, tensor in checkpoint.tensors().items():
        table.modules[tensor.module][tensor.parameter] = tensor
    return table
