"""llm-compressor's own Kimi K3 definition on a CPU: the second, independent opinion about what the weights compute.

That definition calls fla's Triton kernels, which need a GPU.  The stand-ins here are the plain token-by-token recurrence
and a plain convolution, so that nothing is shared with ``model.py``: not the chunk form, not the module structure.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export import PREFIX, read_tensors
from mxfp4 import unpack


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution over whole sequences [B, T, C], then SiLU."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str | None = None):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)
        if activation != "silu":
            raise ValueError(f"K3's short convolution ends in SiLU, not {activation!r}")

    def forward(self, x: Tensor, cache: None = None, output_final_state: bool = False, cu_seqlens: None = None):
        if cache is not None or cu_seqlens is not None:
            raise NotImplementedError("whole sequences only: no cache, no packing")
        return F.silu(super().forward(F.pad(x.mT, (self.kernel_size[0] - 1, 0)))).mT, None


class GatedNorm(nn.Module):
    """RMSNorm of the head, times the sigmoid of its gate."""

    def __init__(self, width: int, eps: float, activation: str):
        super().__init__()
        if activation != "sigmoid":
            raise ValueError(f"K3's output gate is a sigmoid, not {activation!r}")
        self.norm, self.weight = F.rms_norm, nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.norm(x, (x.shape[-1],), self.weight, self.eps) * torch.sigmoid(gate)


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,  # noqa: N803
                  lower_bound: float, initial_state: None = None, **flags) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention one token at a time; the flags say that norm, gate and sigmoid belong to the kernel."""
    wanted = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    if initial_state is not None or not all(flags[name] for name in wanted):
        raise NotImplementedError("whole sequences only, with norm and gates inside")
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    batch, time, heads, width = k.shape
    decay = torch.exp(lower_bound * torch.sigmoid(A_log.exp().view(-1, 1) * (g + dt_bias.view(heads, width))))
    beta, state, outputs = torch.sigmoid(beta), k.new_zeros(batch, heads, width, v.shape[-1]), []
    for t in range(time):
        state = decay[:, t].unsqueeze(-1) * state
        surprise = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", beta[:, t].unsqueeze(-1) * k[:, t], surprise)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * width ** -0.5)
    return torch.stack(outputs, 1), state


def _rearrange(x: Tensor, pattern: str, d: int | None = None) -> Tensor:
    """The two of einops' patterns that are met without padding."""
    if pattern == "... (h d) -> ... h d":
        return x.unflatten(-1, (-1, d))
    if pattern == "b t h d -> b t (h d)":
        return x.flatten(2)
    raise NotImplementedError(pattern)


def load(directory: Path) -> nn.Module:
    """llm-compressor's ``KimiLinearForCausalLM`` in fp32 with the checkpoint's dequantized text weights."""
    from llmcompressor.modeling.kimi_k3 import modeling_kimi_linear as definition
    from llmcompressor.modeling.kimi_k3.configuration_kimi_k3 import KimiLinearConfig

    definition.rearrange, definition.ShortConvolution = _rearrange, ShortConvolution
    definition.FusedRMSNormGated, definition.chunk_kda = GatedNorm, recurrent_kda
    config = json.loads((directory / "config.json").read_text())["text_config"]
    config.pop("quantization_config")
    config = KimiLinearConfig(**config)
    config._attn_implementation = "eager"
    model = definition.KimiLinearForCausalLM(config).float().eval()
    state, stored = {}, read_tensors(directory)
    for name, value in stored.items():
        if not name.startswith(PREFIX) or name.endswith("weight_scale"):
            continue
        if name.endswith("weight_packed"):
            value, name = unpack(value, stored[name.replace("_packed", "_scale")]), name.replace("_packed", "")
        state[name.removeprefix(PREFIX)] = value.float()
    model.load_state_dict(state)
    return model
