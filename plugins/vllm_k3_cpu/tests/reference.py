"""An independent definition of K3's text model, as literally as it can be written: float32, one sequence, token loops.

Shares no code with the plugin.  KDA runs token by token, attention materializes its scores, every expert is evaluated.
Hooks stand for what a served variant changes: ``matmul`` (activation quantization), ``latent`` (a quantized KV cache).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Weights = dict[str, torch.Tensor]
Matmul = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_matmul(name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


class Reference:
    """``Reference(config, weights)(token_ids)`` -> logits [T, vocab], float32."""

    def __init__(self, config: dict, weights: Weights, matmul: Matmul = plain_matmul, latent=lambda layer, x: x):
        self.c = config
        self.w = {name: tensor.float() for name, tensor in weights.items()}
        self.matmul, self.latent = matmul, latent

    def __call__(self, ids: list[int]) -> torch.Tensor:
        c = self.c
        running, sealed = self.w["model.embed_tokens.weight"][ids], []
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}"
            starts = i % c["attn_res_block_size"] == 0
            x = self.residual(f"{p}.self_attention_res", running, sealed) if sealed else running
            if starts:
                sealed = [*sealed, running]
            attention = self.kda if i + 1 in c["linear_attn_config"]["kda_layers"] else self.mla
            attended = attention(f"{p}.self_attn", self.norm(f"{p}.input_layernorm", x))
            running = attended if starts else running + attended
            x = self.norm(f"{p}.post_attention_layernorm", self.residual(f"{p}.mlp_res", running, sealed))
            dense = i < c["first_k_dense_replace"]
            running = running + (self.mlp(f"{p}.mlp", x) if dense else self.moe(f"{p}.block_sparse_moe", x))
        x = self.residual("model.output_attn_res", running, sealed)
        return self.linear("lm_head", self.norm("model.norm", x))

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(name, x, self.w[f"{name}.weight"])

    def norm(self, name: str, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        eps = self.c["rms_norm_eps"] if eps is None else eps
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * self.w[f"{name}.weight"]

    def residual(self, name: str, running: torch.Tensor, sealed: list[torch.Tensor]) -> torch.Tensor:
        states = torch.stack([*sealed, running])  # [n, T, D]
        scores = (self.norm(f"{name}_norm", states) * self.w[f"{name}_proj.weight"][0]).sum(-1)
        return (torch.softmax(scores, 0).unsqueeze(-1) * states).sum(0)

    def situ(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        beta, linear_beta = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)

    def mlp(self, p: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(f"{p}.gate_proj", x), self.linear(f"{p}.up_proj", x)
        return self.linear(f"{p}.down_proj", self.situ(gate, up))

    def moe(self, p: str, x: torch.Tensor) -> torch.Tensor:
        c = self.c
        scores = torch.sigmoid(x @ self.w[f"{p}.gate.weight"].t())
        chosen = (scores + self.w[f"{p}.gate.e_score_correction_bias"]).topk(c["num_experts_per_token"], -1).indices
        kept = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        kept = kept / kept.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        hidden = self.linear(f"{p}.routed_expert_down_proj", x)
        mixed = torch.zeros_like(hidden)
        for e in range(c["num_experts"]):
            q = f"{p}.experts.{e}"
            out = self.linear(f"{q}.w2", self.situ(self.linear(f"{q}.w1", hidden), self.linear(f"{q}.w3", hidden)))
            mixed = mixed + kept[:, e : e + 1] * out
        routed = self.linear(f"{p}.routed_expert_up_proj", self.norm(f"{p}.routed_expert_norm", mixed))
        return routed + self.mlp(f"{p}.shared_experts", x)

    def mla(self, p: str, x: torch.Tensor) -> torch.Tensor:
        c = self.c
        heads, rank, nope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"]
        query = self.linear(f"{p}.q_b_proj", self.norm(f"{p}.q_a_layernorm", self.linear(f"{p}.q_a_proj", x), 1e-6))
        query = query.view(len(x), heads, -1)
        compressed, shared_key = self.linear(f"{p}.kv_a_proj_with_mqa", x).split([rank, c["qk_rope_head_dim"]], -1)
        cached = self.latent(p, torch.cat([self.norm(f"{p}.kv_a_layernorm", compressed, 1e-6), shared_key], -1))
        compressed, shared_key = cached.split([rank, c["qk_rope_head_dim"]], -1)
        up = plain_matmul("", compressed, self.w[f"{p}.kv_b_proj.weight"]).view(len(x), heads, -1)
        key = torch.cat([up[..., :nope], shared_key.unsqueeze(1).expand(-1, heads, -1)], -1)
        scores = torch.einsum("thd,shd->hts", query, key) * key.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), up[..., nope:]).flatten(1)
        return self.linear(f"{p}.o_proj", mixed * torch.sigmoid(self.linear(f"{p}.g_proj", x)))

    def kda(self, p: str, x: torch.Tensor) -> torch.Tensor:
        linear = self.c["linear_attn_config"]
        heads, width = linear["num_heads"], linear["head_dim"]
        q, k, v = (self.convolve(self.linear(f"{p}.{n}_proj", x), self.w[f"{p}.{n}_conv1d.weight"]) for n in "qkv")
        q, k, v = (t.view(len(x), heads, width) for t in (q, k, v))
        q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        gate = self.linear(f"{p}.f_b_proj", self.linear(f"{p}.f_a_proj", x)) + self.w[f"{p}.dt_bias"]
        rate = self.w[f"{p}.A_log"].exp().view(heads, 1)
        decay = torch.exp(linear["gate_lower_bound"] * torch.sigmoid(rate * gate.view(len(x), heads, width)))
        beta = torch.sigmoid(self.linear(f"{p}.b_proj", x))
        state, outputs = torch.zeros(heads, width, width), []
        for t in range(len(x)):
            state = state * decay[t].unsqueeze(-1)
            error = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t].unsqueeze(-1)
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
            outputs.append(torch.einsum("hk,hkv->hv", q[t] * width**-0.5, state))
        mixed = self.norm(f"{p}.o_norm", torch.stack(outputs)).flatten(1)
        return self.linear(f"{p}.o_proj", mixed * torch.sigmoid(self.linear(f"{p}.g_proj", x)))

    def convolve(self, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """Causal depthwise convolution then SiLU: x [T, P], taps [P, 1, W]."""
        width = taps.shape[-1]
        padded = torch.cat([torch.zeros(width - 1, x.shape[1]), x])
        y = sum(padded[i : i + len(x)] * taps[:, 0, i] for i in range(width))
        return y * torch.sigmoid(y)
