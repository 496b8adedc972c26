"""Kimi K3's text model in plain PyTorch, written for training a miniature on a CPU.

Shapes are (batch B, time T, ...).  Parameter names are the released checkpoint's, except that the experts of a layer are
stacked (``experts_w1`` is [expert, out, in]).  The model has no cache: it is the reference for whole sequences.

Sources: the Kimi Linear paper (arXiv 2510.26692: gated delta rule with a decay per channel, its chunk form), the public
K3 configuration, and vLLM's ``kimi_k3.py`` for the order of operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp4 import fake_quantize

CHUNK = 32  # with the gate bounded at -5, |cumulative decay| from the chunk's middle is <= 80: exp(80) fits fp32


def kda(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Gated delta rule, exact chunk form.  q, k, v, log_decay: [B, T, H, D] (log_decay in [-5, 0]); beta: [B, T, H].

    Token form, S in R^{D x D}: S <- diag(exp g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(D).
    Decays inside a chunk are taken relative to its middle, so that no factor leaves fp32's normal range.
    """
    batch, time, heads, width = q.shape
    if -time % chunk:
        pad = (0, 0, 0, 0, 0, -time % chunk)
        q, k, v, log_decay = (F.pad(x, pad) for x in (q, k, v, log_decay))
        beta = F.pad(beta, pad[2:])
    count = q.shape[1] // chunk

    def split(x: Tensor) -> Tensor:  # -> [B, H, chunks, chunk, D]
        return x.reshape(batch, count, chunk, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v, beta = split(q * width ** -0.5), split(k), split(v), split(beta.unsqueeze(-1))
    decay = split(log_decay).cumsum(-2)
    middle, last = decay[..., chunk // 2:chunk // 2 + 1, :], decay[..., -1:, :]
    up, down, from_start = (decay - middle).exp(), (middle - decay).exp(), decay.exp()
    k_left, k_right = k * up, (k * down).transpose(-1, -2)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    inner = (k_left @ k_right).masked_fill(~lower.tril(-1), 0) * beta
    seen = ((q * up) @ k_right).masked_fill(~lower, 0)
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device)
    solved = torch.linalg.solve_triangular(eye + inner, torch.cat([beta * v, beta * k * from_start], -1),
                                           upper=False, unitriangular=True)
    new, erase = solved.split([v.shape[-1], width], -1)
    q_start = q * from_start
    k_end, keep = (k * (last - decay).exp()).transpose(-1, -2), last.exp().transpose(-1, -2)
    state, outputs = q.new_zeros(batch, heads, width, v.shape[-1]), []
    for i in range(count):
        value = new[:, :, i] - erase[:, :, i] @ state
        outputs.append(q_start[:, :, i] @ state + seen[:, :, i] @ value)
        state = state * keep[:, :, i] + k_end[:, :, i] @ value
    return torch.stack(outputs, 2).permute(0, 2, 3, 1, 4).reshape(batch, count * chunk, heads, -1)[:, :time]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def situ(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """K3's bounded activation: |result| < beta * linear_beta."""
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.eps)


class Weight(nn.Module):
    """A bare ``.weight``: released names have short convolutions and the router in this form."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.weight = nn.Parameter(value)


def linear(inputs: int, outputs: int, std: float | None = None) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std or inputs ** -0.5)
    return layer


class KimiDeltaAttention(nn.Module):
    """Recurrent attention: state of ``heads`` x D x D, forgetting per channel, bounded at exp(-5) a token."""

    def __init__(self, config: dict):
        super().__init__()
        kda_config, hidden = config["linear_attn_config"], config["hidden_size"]
        self.heads, self.width = kda_config["num_heads"], kda_config["head_dim"]
        self.taps, self.bound = kda_config["short_conv_kernel_size"], kda_config["gate_lower_bound"]
        inner = self.heads * self.width
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (linear(hidden, inner) for _ in range(4))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            taps = torch.randn(inner, 1, self.taps) * 0.3
            taps[:, 0, -1] += 0.5
            setattr(self, name, Weight(taps))
        self.A_log = nn.Parameter(torch.linspace(1, 4, self.heads).log())
        self.dt_bias = nn.Parameter(torch.linspace(-7, -2, inner))  # starts slow: most channels remember
        self.f_a_proj, self.f_b_proj = linear(hidden, self.width), linear(self.width, inner, 0.02)
        self.b_proj, self.o_norm = linear(hidden, self.heads), RMSNorm(self.width, config["rms_norm_eps"])
        self.o_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, self.width)
        # One product for all projections of x, and one convolution over q, k, v: on a CPU the calls are what costs.
        wide = F.linear(x, torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight, self.g_proj.weight,
                                      self.f_a_proj.weight, self.b_proj.weight]))
        inner = self.heads * self.width
        qkv, gate, low, beta = wide.split([3 * inner, inner, self.width, self.heads], -1)
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        qkv = F.pad(qkv.float(), (0, 0, self.taps - 1, 0))
        qkv = F.silu(sum(qkv[:, i:i + x.shape[1]] * taps[:, 0, i] for i in range(self.taps)))
        q, k, v = (part.reshape(shape) for part in qkv.split(inner, -1))
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        pace = (self.f_b_proj(low).float() + self.dt_bias).view(shape)
        log_decay = self.bound * torch.sigmoid(self.A_log.exp()[:, None] * pace)
        with torch.autocast("cpu", enabled=False):
            out = kda(q, k, v, log_decay, beta.float().sigmoid())
        out = self.o_norm(out) * gate.float().view(shape).sigmoid()
        return self.o_proj(out.flatten(2))


class GatedMLA(nn.Module):
    """Multi-head latent attention without positions (NoPE; the ``rope`` dims are plain shared key dims), gated output."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, self.heads, self.rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
        self.nope, self.rope, self.value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        self.q_a_proj, self.q_a_layernorm = linear(hidden, config["q_lora_rank"]), RMSNorm(config["q_lora_rank"], 1e-6)
        self.q_b_proj = linear(config["q_lora_rank"], self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(hidden, self.rank + self.rope), RMSNorm(self.rank, 1e-6)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.value))
        self.g_proj = linear(hidden, self.heads * self.value)
        self.o_proj = linear(self.heads * self.value, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, time, self.heads, -1).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, time, self.heads, -1).transpose(1, 2)
        k, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, self.heads, -1, -1).to(k.dtype)], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(self.nope + self.rope) ** -0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2) * self.g_proj(x).sigmoid())


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, width), linear(hidden, width), linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return self.down_proj(situ(gate, up))


class LatentMoE(nn.Module):
    """Routed experts in a latent space, sigmoid router with a balancing bias, plus shared experts.

    ``mxfp4`` makes the forward pass see MXFP4-rounded expert weights (straight-through gradient): K3 itself was trained so.
    """

    def __init__(self, config: dict):
        super().__init__()
        hidden, latent = config["hidden_size"], config["routed_expert_hidden_size"]
        width, self.experts, self.top = (config["moe_intermediate_size"], config["num_experts"],
                                         config["num_experts_per_token"])
        self.scale, self.mxfp4 = config["routed_scaling_factor"], False
        self.gate = Weight(torch.randn(self.experts, hidden) * hidden ** -0.5)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(self.experts))
        self.experts_w1 = nn.Parameter(torch.randn(self.experts, width, latent) * latent ** -0.5)
        self.experts_w3 = nn.Parameter(torch.randn(self.experts, width, latent) * latent ** -0.5)
        self.experts_w2 = nn.Parameter(torch.randn(self.experts, latent, width) * width ** -0.5)
        self.shared_experts = MLP(hidden, width * config["num_shared_experts"])
        self.routed_expert_down_proj, self.routed_expert_up_proj = linear(hidden, latent), linear(latent, hidden)
        self.routed_expert_norm = RMSNorm(latent, config["rms_norm_eps"])
        self.register_buffer("load", torch.zeros(self.experts), persistent=False)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """-> chosen experts [N, top] and their weights [N, top], in fp32: near-ties decide in bf16, and wrongly."""
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(flat.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.top, -1).indices
        weight = scores.gather(1, chosen)
        return chosen, weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weight = self.route(flat)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts)
        if self.training:  # loss-free balancing: the bias moves against the load, no gradient
            self.load.lerp_(counts / counts.sum(), 0.02)
            with torch.no_grad():
                self.gate.e_score_correction_bias += 1e-3 * (counts.float().mean() - counts).sign()
        order = chosen.flatten().argsort()  # (token, choice) pairs grouped by expert
        token = order // self.top
        latent = self.routed_expert_down_proj(flat)[token]
        w1, w3, w2 = self.experts_w1, self.experts_w3, self.experts_w2
        if self.mxfp4:
            w1, w3, w2 = fake_quantize(w1), fake_quantize(w3), fake_quantize(w2)
        w13 = torch.cat([w1, w3], 1)
        parts = []
        for expert, rows in enumerate(latent.split(counts.tolist())):
            gate, up = F.linear(rows, w13[expert]).chunk(2, -1)
            parts.append(F.linear(situ(gate, up), w2[expert]))
        routed = torch.cat(parts).float() * weight.flatten()[order].unsqueeze(-1)
        mixed = torch.zeros_like(flat[:, :routed.shape[1]], dtype=routed.dtype).index_add(0, token, routed)
        mixed = self.routed_expert_up_proj(self.routed_expert_norm(mixed))
        return mixed.view_as(x) + self.shared_experts(x)


def attention_residual(current: Tensor, blocks: list[Tensor], proj: nn.Linear, norm: RMSNorm) -> Tensor:
    """AttnRes: each token attends over the residual streams of the earlier blocks and the current one."""
    streams = torch.stack([*blocks, current], 2)
    scores = (rms(streams, norm.weight, norm.eps) * proj.weight[0]).sum(-1, keepdim=True)
    return (scores.softmax(2) * streams).sum(2)


class DecoderLayer(nn.Module):
    def __init__(self, config: dict, index: int):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.starts_block = index % config["attn_res_block_size"] == 0
        recurrent = index + 1 in config["linear_attn_config"]["kda_layers"]
        self.self_attn = KimiDeltaAttention(config) if recurrent else GatedMLA(config)
        if index >= config["first_k_dense_replace"]:
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = MLP(hidden, config["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attention_res_norm, self.mlp_res_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attention_res_proj, self.mlp_res_proj = linear(hidden, 1, 1e-3), linear(hidden, 1, 1e-3)

    def forward(self, current: Tensor, blocks: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = current
        if blocks:
            x = attention_residual(current, blocks, self.self_attention_res_proj, self.self_attention_res_norm)
        attended = self.self_attn(self.input_layernorm(x))
        if self.starts_block:
            blocks, current = [*blocks, current], attended
        else:
            current = current + attended
        x = attention_residual(current, blocks, self.mlp_res_proj, self.mlp_res_norm)
        feed_forward = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return current + feed_forward(self.post_attention_layernorm(x)), blocks


class TinyK3(nn.Module):
    """Token ids [B, T] -> logits [B, T, vocabulary], or [N, vocabulary] at the positions of the mask ``select``."""

    def __init__(self, config: dict):
        super().__init__()
        hidden = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        nn.init.normal_(self.embed_tokens.weight)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(hidden, config["rms_norm_eps"])
        self.output_attn_res_norm = RMSNorm(hidden, config["rms_norm_eps"])
        self.output_attn_res_proj, self.lm_head = linear(hidden, 1, 1e-3), linear(hidden, config["vocab_size"])

    def forward(self, ids: Tensor, select: Tensor | None = None) -> Tensor:
        current, blocks = self.embed_tokens(ids), []
        for layer in self.layers:
            current, blocks = layer(current, blocks)
        x = self.norm(attention_residual(current, blocks, self.output_attn_res_proj, self.output_attn_res_norm))
        return self.lm_head(x if select is None else x[select])

    def train_in_mxfp4(self, on: bool = True) -> None:
        """Let the forward pass see MXFP4 expert weights, or the master weights."""
        for layer in self.layers:
            if hasattr(layer, "block_sparse_moe"):
                layer.block_sparse_moe.mxfp4 = on
