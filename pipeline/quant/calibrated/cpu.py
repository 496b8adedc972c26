"""Plain PyTorch in place of fla's Triton kernels, which llm-compressor's Kimi K3 calls and which need a GPU.

Whole sequences of equal length without a cache: that is all that calibration runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution [batch, time, channels], then SiLU."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str | None = None) -> None:
        if activation != "silu":
            raise NotImplementedError(f"short convolution with activation {activation!r}")
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)

    def forward(
        self, x: Tensor, cache: None = None, output_final_state: bool = False, cu_seqlens: None = None
    ) -> tuple[Tensor, None]:
        _whole_sequences(cache, cu_seqlens)
        padded = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        out = F.conv1d(padded, self.weight.to(x.dtype), groups=self.groups)
        return F.silu(out).transpose(1, 2), None


class GatedRMSNorm(nn.Module):
    """RMSNorm of each head times the sigmoid of a gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "sigmoid") -> None:
        if activation != "sigmoid":
            raise NotImplementedError(f"output gate {activation!r}")
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return (normed * gate.float().sigmoid()).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,  # noqa: N803
    lower_bound: float | None = None, initial_state: None = None, cu_seqlens: None = None, **flags: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Kimi delta attention in fp32, token by token.  q, k, v, g [B, T, H, D], beta [B, T, H]; norms and gates inside.

    S <- diag(decay) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(D).
    """
    _whole_sequences(initial_state, cu_seqlens)
    inside = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    if not all(flags.get(name) for name in inside):
        raise NotImplementedError("delta rule with its norms or gates outside the kernel")
    dtype, heads, width = v.dtype, *k.shape[-2:]
    q, k = (F.normalize(x.float(), dim=-1, eps=1e-6) for x in (q, k))
    q, v, pace = q * width**-0.5, v.float(), g.float() + dt_bias.float().view(heads, width)
    rate = A_log.float().exp().view(heads, 1)
    log_decay = -rate * F.softplus(pace) if lower_bound is None else lower_bound * torch.sigmoid(rate * pace)
    decay, strength = log_decay.exp(), beta.float().sigmoid()
    state = k.new_zeros(k.shape[0], heads, width, v.shape[-1])
    out = torch.empty_like(v)
    for t in range(k.shape[1]):
        state = state * decay[:, t].unsqueeze(-1)
        surprise = v[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + (strength[:, t].unsqueeze(-1) * k[:, t]).unsqueeze(-1) * surprise.unsqueeze(-2)
        out[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return out.to(dtype), None


def _whole_sequences(*given: object) -> None:
    if any(thing is not None for thing in given):
        raise NotImplementedError("caches and packed sequences: calibration rows are whole and equally long")


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Put the stand-ins where fla is missing, in llm-compressor's definition, for the time of the context."""
    import einops
    from llmcompressor.modeling.kimi_k3 import modeling_kimi_linear as definition
    from llmcompressor.pipelines.cache import IntermediatesCache

    changed = []

    def put(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    if definition.chunk_kda is None:
        put(definition, "rearrange", einops.rearrange)
        put(definition, "ShortConvolution", ShortConvolution)
        put(definition, "FusedRMSNormGated", GatedRMSNorm)
        put(definition, "chunk_kda", delta_rule)
    if not torch.accelerator.is_available():
        put(IntermediatesCache, "pin_memory", lambda self, *_: None)  # pinning needs an accelerator, and would raise
    try:
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)
