"""Latent mixture of experts: router, routed experts in a smaller hidden space, shared experts.

Experts are vLLM linear layers, so every scheme with a CPU linear kernel covers them (vLLM's fused CPU expert kernels
know neither SiTU nor, without AMX, any quantized format).  Formats emulated by `vllm_k3_cpu.emulation` run grouped: one
dequantization and one grouped product for all active experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from .emulation import WeightFormat, EmulatedKernel, kernel_of
from .norm import RMSNorm

PADDED_ROWS = 256  # largest padded expert batch


class Activation:
    """Gated activation of [..., 2 F] (gate, up) -> [..., F], computed in float32.

    ``situ``: ``beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)``; else SiLU.
    """

    def __init__(self, config):
        self.situ = config.hidden_act == "situ"
        self.beta = config.activation_situ_beta or 1.0
        self.linear_beta = config.activation_situ_linear_beta

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (part.float() for part in x.chunk(2, -1))
        if not self.situ:
            return (F.silu(gate) * up).to(x.dtype)
        exact = x.dtype == torch.float32
        out = _soft_clip(gate, self.beta, exact).mul_(torch.sigmoid(gate))
        if self.linear_beta is not None:
            up = _soft_clip(up, self.linear_beta, exact)
        return out.mul_(up).to(x.dtype)


def _soft_clip(x: torch.Tensor, bound: float, exact: bool) -> torch.Tensor:
    """``bound * tanh(x / bound)``.  torch's tanh takes ten times as long on CPU as its sigmoid: below float32 the
    identity ``tanh(y) = 2 sigmoid(2 y) - 1`` serves (absolute error 2e-7 before the factor ``bound``)."""
    if exact:
        return torch.tanh(x / bound).mul_(bound)
    return torch.mul(x, 2 / bound).sigmoid_().mul_(2 * bound).sub_(bound)


class DenseMLP(nn.Module):
    """Gated MLP of the first layer and of the shared experts: [T, D] -> [T, D]."""

    def __init__(self, config, hidden: int, intermediate: int, quant_config, prefix: str):
        super().__init__()
        options = {"bias": False, "quant_config": quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [intermediate] * 2, prefix=f"{prefix}.gate_up_proj", **options
        )
        self.down_proj = RowParallelLinear(intermediate, hidden, prefix=f"{prefix}.down_proj", **options)
        self.activation = Activation(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)[0]))[0]


class Expert(nn.Module):
    """One routed expert (checkpoint names w1, w3 -> w13, w2); its output is a partial sum over ranks."""

    def __init__(self, config, hidden: int, quant_config, prefix: str):
        super().__init__()
        options = {"bias": False, "quant_config": quant_config}
        self.w13 = MergedColumnParallelLinear(
            hidden, [config.moe_intermediate_size] * 2, prefix=f"{prefix}.w13", **options
        )
        self.w2 = RowParallelLinear(
            config.moe_intermediate_size, hidden, reduce_results=False, prefix=f"{prefix}.w2", **options
        )


@dataclass(frozen=True)
class ExpertBatch:
    """Where each (token, chosen expert) pair goes in a buffer sorted by expert.

    Small batches give every active expert ``capacity`` rows (zero rows fill up), so that one batched product serves;
    larger ones are packed (``capacity`` 0).
    """

    position: torch.Tensor  # [pairs] row of each pair
    experts: torch.Tensor  # [A] experts with at least one pair, ascending
    counts: torch.Tensor  # [A] their pairs
    capacity: int
    rows: int

    @classmethod
    def of(cls, pairs: torch.Tensor, num_experts: int, pad: bool) -> ExpertBatch:
        """``pairs`` [T * k]: the expert of every pair."""
        counts = torch.bincount(pairs, minlength=num_experts)
        experts = counts.nonzero().squeeze(-1)
        counts = counts.index_select(0, experts)
        capacity = int(counts.max()) if pad else 0
        if experts.numel() * capacity > PADDED_ROWS:
            capacity = 0
        place = torch.arange(pairs.numel())
        if capacity:
            shift = torch.arange(experts.numel()) * capacity - (counts.cumsum(0) - counts)
            place += shift.repeat_interleave(counts)
        position = torch.empty_like(place).index_copy_(0, pairs.argsort(stable=True), place)
        return cls(position, experts, counts, capacity, experts.numel() * capacity if capacity else pairs.numel())


class StackedWeights:
    """One emulated matrix of every expert, stacked: [E, N, K] packed.  The layers' parameters become views of it."""

    def __init__(self, weight_format: WeightFormat, layers: list[nn.Module]):
        self.format = weight_format
        self.tensors = []
        for name in weight_format.tensors:
            stacked = torch.stack([getattr(layer, name).data for layer in layers])
            for i, layer in enumerate(layers):
                getattr(layer, name).data = stacked[i]
            self.tensors.append(stacked)

    def product(self, x: torch.Tensor, batch: ExpertBatch) -> torch.Tensor:
        """x [rows, K] arranged as ``batch`` says -> [rows, N]."""
        tensors = self.tensors
        if batch.experts.numel() < tensors[0].shape[0]:
            tensors = [t.index_select(0, batch.experts) for t in tensors]
        rounded = self.format.activations(x)
        weight = self.format.weight(*tensors, dtype=rounded.dtype).transpose(-1, -2)
        scale = self.format.output_scale(*tensors)
        if batch.capacity:
            out = torch.bmm(rounded.view(len(batch.experts), batch.capacity, -1), weight)
            out = out if scale is None else out * scale.view(-1, 1, 1)
            return out.view(x.shape[0], -1).to(x.dtype)
        out = F.grouped_mm(rounded, weight, offs=batch.counts.cumsum(0, dtype=torch.int32))
        if scale is not None:
            out = out * scale.repeat_interleave(batch.counts).unsqueeze(-1)
        return out.to(x.dtype)


class RoutedExperts(nn.ModuleList):
    """The routed experts of a layer."""

    def __init__(self, config, hidden: int, quant_config, prefix: str):
        super().__init__(
            Expert(config, hidden, quant_config, f"{prefix}.{e}") for e in range(config.num_experts)
        )
        self.activation = Activation(config)
        self._stacked: tuple[StackedWeights, StackedWeights] | None = None
        self._looked = False

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, L], chosen experts [T, k], their weights float32 [T, k] -> float32 [T, L]."""
        grouped = self._stack()
        batch = ExpertBatch.of(chosen.flatten(), len(self), pad=grouped)
        rows = hidden.new_zeros(batch.rows, hidden.shape[1])
        rows.index_copy_(0, batch.position, hidden.repeat_interleave(chosen.shape[1], 0))
        out = self._grouped(rows, batch) if grouped else self._one_by_one(rows, batch)
        chosen_out = out.index_select(0, batch.position).view(*chosen.shape, -1)
        return torch.matmul(weights.unsqueeze(1), chosen_out.float()).squeeze(1)

    def _stack(self) -> bool:
        """Stack emulated weights on the first call, after loading is complete."""
        if not self._looked:
            self._looked = True
            kernel = kernel_of(self[0].w13)
            if isinstance(kernel, EmulatedKernel):
                self._stacked = tuple(
                    StackedWeights(kernel.format, [getattr(e, name) for e in self]) for name in ("w13", "w2")
                )
        return self._stacked is not None

    def _grouped(self, rows: torch.Tensor, batch: ExpertBatch) -> torch.Tensor:
        up, down = self._stacked
        return down.product(self.activation(up.product(rows, batch)), batch)

    def _one_by_one(self, rows: torch.Tensor, batch: ExpertBatch) -> torch.Tensor:
        parts = []
        for e, part in zip(batch.experts.tolist(), rows.split(batch.counts.tolist()), strict=True):
            expert = self[e]
            parts.append(expert.w2(self.activation(expert.w13(part)[0]))[0])
        return torch.cat(parts)


class LatentMoE(nn.Module):
    """Router, routed experts between a down- and an up-projection, shared experts: [T, D] -> [T, D]."""

    def __init__(self, config, quant_config, dense_quant_config, prefix: str):
        super().__init__()
        self.config = config
        self.tp_size = get_tensor_model_parallel_world_size()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = nn.Module()
        self.gate.weight = nn.Parameter(torch.empty(config.num_experts, hidden))
        self.gate.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32))
        self.experts = RoutedExperts(config, latent or hidden, quant_config, f"{prefix}.experts")
        self.shared_experts = None
        if config.num_shared_experts:
            self.shared_experts = DenseMLP(
                config, hidden, config.moe_intermediate_size * config.num_shared_experts, dense_quant_config,
                f"{prefix}.shared_experts",
            )  # fmt: skip
        self.latent = latent is not None
        if self.latent:
            options = {"bias": False, "quant_config": dense_quant_config}
            self.routed_expert_down_proj = ReplicatedLinear(
                hidden, latent, prefix=f"{prefix}.routed_expert_down_proj", **options
            )
            self.routed_expert_up_proj = ReplicatedLinear(
                latent, hidden, prefix=f"{prefix}.routed_expert_up_proj", **options
            )
            self.routed_expert_norm = RMSNorm(latent, eps=config.rms_norm_eps) if config.latent_moe_use_norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.route(x)
        hidden = self.routed_expert_down_proj(x)[0] if self.latent else x
        out = self.experts(hidden, chosen, weights).to(x.dtype)
        if self.tp_size > 1:
            out = tensor_model_parallel_all_reduce(out)
        if self.latent:
            if self.routed_expert_norm is not None:
                out = self.routed_expert_norm(out)
            out = self.routed_expert_up_proj(out)[0]
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, D] -> experts [T, k] and their weights, float32 [T, k].  The router is never quantized."""
        c = self.config
        logits = F.linear(x.float(), self.gate.weight.float())
        scores = logits.sigmoid() if c.moe_router_activation_func == "sigmoid" else logits.softmax(-1)
        choice = scores + self.gate.e_score_correction_bias
        if c.num_expert_group > c.topk_group:
            choice = self._within_best_groups(choice)
        chosen = choice.topk(c.num_experts_per_token, -1).indices
        weights = scores.gather(1, chosen)
        if c.moe_renormalize and c.num_experts_per_token > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * c.routed_scaling_factor

    def _within_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Hide experts outside the ``topk_group`` groups whose two best experts score highest."""
        groups = choice.view(choice.shape[0], self.config.num_expert_group, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(self.config.topk_group, -1).indices
        hidden = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
