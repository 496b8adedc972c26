"""One pass of the unquantized model over the calibration set: who gets how many tokens, and what inputs look like."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import Invalid
from pipeline.quant.scope import Module

BATCH_ROWS = 8
HESSIAN_BUDGET_BYTES = 4 << 30
ROUTER = re.compile(r"\.block_sparse_moe\.gate$")


@dataclass(frozen=True)
class Observed:
    """``tokens``: expert (``...experts.7``) -> calibration tokens routed to it.

    ``hessians``: matrix -> X^T X of its routed inputs, float32 [in, in]; empty where they would take more memory than
    the budget.  w1 and w3 share theirs.
    """

    tokens: dict[str, int]
    hessians: dict[str, Tensor]


def batches(ids: np.ndarray) -> Iterator[Tensor]:
    for start in range(0, len(ids), BATCH_ROWS):
        yield torch.from_numpy(ids[start : start + BATCH_ROWS])


@torch.no_grad()
def run(model: nn.Module, modules: Iterable[Module], ids: np.ndarray) -> Observed:
    """Count and accumulate.  Raises :class:`Invalid` where the model's output is not finite."""
    modules = list(modules)
    tokens = {module.name.rpartition(".")[0]: 0 for module in modules}
    first = [module for module in modules if module.name.endswith((".w1", ".w2"))]
    hessians: dict[str, Tensor] = {}
    if sum(4 * module.shape[1] ** 2 for module in first) <= HESSIAN_BUDGET_BYTES:
        hessians = {module.name: torch.zeros(module.shape[1], module.shape[1]) for module in first}

    def count(name: str):
        prefix = name.removesuffix(".gate") + ".experts."

        def hook(_: nn.Module, __: object, output: tuple[Tensor, Tensor]) -> None:
            for expert, number in zip(*(x.tolist() for x in output[0].unique(return_counts=True)), strict=True):
                tokens[f"{prefix}{expert}"] += number

        return hook

    def accumulate(name: str):
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            hessians[name] += (x.T @ x).to(hessians[name].device)

        return hook

    routers = {name: module for name, module in model.named_modules() if ROUTER.search(name)}
    handles = [module.register_forward_hook(count(name)) for name, module in routers.items()]
    handles += [model.get_submodule(name).register_forward_pre_hook(accumulate(name)) for name in hessians]
    try:
        for batch in batches(ids):
            logits = model(input_ids=batch.to(model.device), use_cache=False).logits
            if not torch.isfinite(logits).all():
                raise Invalid("the unquantized model's logits are NaN or infinite on the calibration set; verify it")
    finally:
        for handle in handles:
            handle.remove()
    hessians |= {name[:-1] + "3": value for name, value in hessians.items() if name.endswith(".w1")}
    return Observed(tokens, hessians)
