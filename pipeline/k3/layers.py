"""Tensors of each kind of layer.  Names and shapes as in the released checkpoints; sharding as in vLLM 0.32.

Sources: vllm/models/kimi_k3/nvidia/{model,kda,mla}.py,
vllm/model_executor/models/{deepseek_v2,llama,qwen2,qwen3_next}.py, vllm/model_executor/models/kimi_k25_vit.py.
"""

from __future__ import annotations

from typing import Any

from pipeline.k3.tensors import Role, Shard, Tensor

C, R, REP = Shard.COLUMN, Shard.ROW, Shard.REPLICATED


def _norm(name: str, width: int, layer: int | None, dtype: str = "bfloat16") -> Tensor:
    return Tensor(name, Role.NORM, (width,), layer, linear=False, dtype=dtype)


def kda_layer(text: dict[str, Any], prefix: str, layer: int) -> list[Tensor]:
    """Kimi Delta Attention: q, k, v, two gates, three short convolutions; the conv, A_log and dt_bias stay F32."""
    linear, hidden = text["linear_attn_config"], text["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width, at = heads * dim, f"{prefix}.self_attn."

    def tensor(name: str, shape: tuple[int, ...], shard: Shard = C, fused: str | None = None, **kwargs: Any) -> Tensor:
        return Tensor(at + name, Role.KDA, shape, layer, shard=shard, fused=fused, **kwargs)

    fused = "in_proj_qkvgfab"
    tensors = [tensor(f"{name}_proj", (width, hidden), fused=fused) for name in "qkv"]
    tensors += [
        tensor("b_proj", (heads, hidden), fused=fused),
        tensor("f_a_proj", (dim, hidden), REP, fused=fused),
        tensor("f_b_proj", (width, dim)),
    ]
    if linear.get("use_full_rank_gate"):
        tensors.append(tensor("g_proj", (width, hidden), fused=fused))
    else:
        tensors += [tensor("g_a_proj", (dim, hidden), REP), tensor("g_b_proj", (width, dim))]
    conv = (width, 1, linear["short_conv_kernel_size"])
    tensors += [tensor(f"{name}_conv1d", conv, linear=False, dtype="float32") for name in "qkv"]
    tensors += [
        tensor("A_log", (heads,), linear=False, dtype="float32"),
        tensor("dt_bias", (width,), linear=False, dtype="float32"),
        tensor("o_norm", (dim,), REP, linear=False, dtype="float32"),
        tensor("o_proj", (hidden, width), R),
    ]
    return tensors


def mla_layer(text: dict[str, Any], prefix: str, layer: int) -> list[Tensor]:
    """Multi-head latent attention, with or without a query latent and an output gate."""
    hidden, heads, at = text["hidden_size"], text["num_attention_heads"], f"{prefix}.self_attn."
    nope, rope, value, latent = (
        text["qk_nope_head_dim"],
        text["qk_rope_head_dim"],
        text["v_head_dim"],
        text["kv_lora_rank"],
    )
    query_latent, gate = text.get("q_lora_rank"), text.get("mla_use_output_gate")

    def tensor(name: str, shape: tuple[int, ...], shard: Shard = C, fused: str | None = None) -> Tensor:
        return Tensor(at + name, Role.MLA, shape, layer, shard=shard, fused=fused)

    tensors = []
    fused = None
    if query_latent:
        fused = "fused_qkv_a_g_proj" if gate else "fused_qkv_a_proj"
        tensors += [
            tensor("q_a_proj", (query_latent, hidden), REP, fused),
            _norm(at + "q_a_layernorm", query_latent, layer),
            tensor("q_b_proj", (heads * (nope + rope), query_latent)),
        ]
    else:
        tensors.append(tensor("q_proj", (heads * (nope + rope), hidden)))
    tensors += [
        tensor("kv_a_proj_with_mqa", (latent + rope, hidden), REP, fused),
        _norm(at + "kv_a_layernorm", latent, layer),
        tensor("kv_b_proj", (heads * (nope + value), latent)),
        tensor("o_proj", (hidden, heads * value), R),
    ]
    if gate:
        tensors.append(tensor("g_proj", (heads * value, hidden), fused=fused))
    return tensors


def gqa_layer(text: dict[str, Any], prefix: str, layer: int, head_dim: int) -> list[Tensor]:
    """Grouped-query attention (Llama, Qwen).  Key-value heads are replicated where there are fewer than ranks."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    kv_heads, at = text.get("num_key_value_heads") or heads, f"{prefix}.self_attn."
    bias = text.get("attention_bias", text.get("model_type") == "qwen2")
    gate = 2 if text.get("model_type") in ("qwen3_next", "qwen3_5_text") else 1
    widths = {"q_proj": gate * heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    tensors = []
    for name, width in widths.items():
        kv = None if name == "q_proj" else kv_heads
        tensors.append(Tensor(at + name, Role.GQA, (width, hidden), layer, shard=C, fused="qkv_proj", kv_heads=kv))
        if bias:
            tensors.append(Tensor(f"{at}{name}.bias", Role.GQA, (width,), layer, shard=C, linear=False, kv_heads=kv))
    tensors.append(Tensor(at + "o_proj", Role.GQA, (hidden, heads * head_dim), layer, shard=R))
    if str(text.get("model_type", "")).startswith("qwen3"):
        tensors += [_norm(at + "q_norm", head_dim, layer), _norm(at + "k_norm", head_dim, layer)]
    return tensors


def gdn_layer(text: dict[str, Any], prefix: str, layer: int) -> list[Tensor]:
    """Gated DeltaNet (Qwen3-Next): fused q, k, v, z and b, a projections; one convolution over q, k, v."""
    hidden, at = text["hidden_size"], f"{prefix}.linear_attn."
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values, value_heads = text["linear_num_value_heads"] * text["linear_value_head_dim"], text["linear_num_value_heads"]

    def tensor(name: str, shape: tuple[int, ...], shard: Shard = C, **kwargs: Any) -> Tensor:
        return Tensor(at + name, Role.GDN, shape, layer, shard=shard, **kwargs)

    return [
        tensor("in_proj_qkvz", (2 * keys + 2 * values, hidden)),
        tensor("in_proj_ba", (2 * value_heads, hidden)),
        tensor("conv1d", (2 * keys + values, 1, text["linear_conv_kernel_dim"]), linear=False),
        tensor("A_log", (value_heads,), linear=False),
        tensor("dt_bias", (value_heads,), linear=False),
        tensor("norm", (text["linear_value_head_dim"],), REP, linear=False),
        tensor("out_proj", (hidden, values), R),
    ]


def mlp(prefix: str, role: Role, hidden: int, width: int, layer: int) -> list[Tensor]:
    """A gated MLP: gate and up are one fused module, down is row-parallel."""
    return [
        Tensor(f"{prefix}.gate_proj", role, (width, hidden), layer, shard=C, fused="gate_up_proj"),
        Tensor(f"{prefix}.up_proj", role, (width, hidden), layer, shard=C, fused="gate_up_proj"),
        Tensor(f"{prefix}.down_proj", role, (hidden, width), layer, shard=R),
    ]


def moe_layer(text: dict[str, Any], prefix: str, layer: int, names: tuple[str, str, str], block: str) -> list[Tensor]:
    """Routed experts (in latent space where ``routed_expert_hidden_size`` is given), router, shared experts.

    The router and its correction bias are never quantized: in bf16 instead of fp32 5.27 % of tokens change their
    expert set (https://github.com/sgl-project/sglang/pull/33764).
    """
    hidden, at = text["hidden_size"], f"{prefix}.{block}"
    experts = text.get("num_experts") or text.get("n_routed_experts") or text["num_local_experts"]
    width, latent = text["moe_intermediate_size"], text.get("routed_expert_hidden_size")
    inner = latent or hidden
    gate, down, up = names
    fused = "w13" if gate == "w1" else "gate_up_proj"
    tensors = [
        Tensor(f"{at}.experts.{{e}}.{gate}", Role.EXPERT, (width, inner), layer, experts, C, fused=fused),
        Tensor(f"{at}.experts.{{e}}.{down}", Role.EXPERT, (inner, width), layer, experts, R, fused=None),
        Tensor(f"{at}.experts.{{e}}.{up}", Role.EXPERT, (width, inner), layer, experts, C, fused=fused),
        Tensor(f"{at}.gate", Role.ROUTER, (experts, hidden), layer, linear=False),
    ]
    if text.get("topk_method") == "noaux_tc":
        tensors.append(
            Tensor(f"{at}.gate.e_score_correction_bias", Role.ROUTER, (experts,), layer, linear=False, dtype="float32")
        )
    if latent:
        tensors += [
            Tensor(f"{at}.routed_expert_down_proj", Role.LATENT, (latent, hidden), layer),
            Tensor(f"{at}.routed_expert_up_proj", Role.LATENT, (hidden, latent), layer),
        ]
        if text.get("latent_moe_use_norm"):
            tensors.append(_norm(f"{at}.routed_expert_norm", latent, layer))
    shared = (text.get("num_shared_experts") or text.get("n_shared_experts") or 0) * width
    shared = text.get("shared_expert_intermediate_size") or shared
    if shared:
        tensors += mlp(f"{at}.shared_experts", Role.SHARED_EXPERT, hidden, shared, layer)
    return tensors


# Defaults of KimiK3VisionConfig (vllm/transformers_utils/configs/kimi_k3.py), for configs that leave keys out.
VISION_DEFAULTS = {
    "merge_kernel_size": (2, 2),
    "qkv_hidden_size": 1536,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
}


def vision_tensors(vision: dict[str, Any], hidden_size: int) -> list[Tensor]:
    """MoonViT and the patch merger of K3.  Text-only serving loads none of it; the file holds all of it."""
    if "vt_hidden_size" not in vision:
        return []
    vision = VISION_DEFAULTS | vision
    hidden, wide, merge = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["merge_kernel_size"]
    qkv, layers, patch = vision["qkv_hidden_size"], vision["vt_num_hidden_layers"], vision["patch_size"]
    merged, out = hidden * merge[0] * merge[1], vision.get("text_hidden_size", hidden_size)
    tower: list[tuple[str, tuple[int, ...], int]] = [
        ("patch_embed.proj", (hidden, 3, patch, patch), 1),
        ("patch_embed.pos_emb", (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden), 1),
        ("encoder.blocks.*.wqkv", (3 * qkv, hidden), layers),
        ("encoder.blocks.*.wo", (hidden, qkv), layers),
        ("encoder.blocks.*.mlp.fc0", (wide, hidden), layers),
        ("encoder.blocks.*.mlp.fc1", (hidden, wide), layers),
        ("encoder.blocks.*.norm0", (hidden,), layers),
        ("encoder.blocks.*.norm1", (hidden,), layers),
        ("encoder.final_layernorm", (hidden,), 1),
    ]
    projector = [("linear_1", (merged, merged)), ("linear_2", (out, merged)), ("post_norm", (out,))]
    tensors = [Tensor(f"vision_tower.{name}", Role.VISION, shape, count=n, linear=False) for name, shape, n in tower]
    return tensors + [Tensor(f"mm_projector.{name}", Role.PROJECTOR, shape, linear=False) for name, shape in projector]
