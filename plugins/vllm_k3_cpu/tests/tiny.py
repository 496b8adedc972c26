"""A random-weight K3 of the tiny shape, in the released layout, and its quantized forms: checkpoints written by the
tests.

Everything is torch and safetensors; the formats are written from their definitions, not by the libraries that read
them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

TEXT_CONFIG = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
    "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 5, "intermediate_size": 512, "rms_norm_eps": 1e-5,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "mla_use_nope": True, "mla_use_output_gate": True,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
        "use_full_rank_gate": True, "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5],
    },
    "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 2, "moe_intermediate_size": 256,
    "routed_expert_hidden_size": 128, "latent_moe_use_norm": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
    "attn_res_block_size": 2, "num_nextn_predict_layers": 0, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION_CONFIG = {
    "vt_hidden_size": 64, "vt_intermediate_size": 128, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    "mm_hidden_size": 64, "text_hidden_size": 128,
}  # fmt: skip
NATIVE_IGNORE = [
    "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
    "re:.*vision_tower.*", "re:.*mm_projector.*",
]  # fmt: skip
NOT_EXPERTS = [*NATIVE_IGNORE, "re:.*_res_proj", "re:.*routed_expert_(down|up)_proj", "re:.*block_sparse_moe\\.gate$"]
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def shapes(config: dict = TEXT_CONFIG) -> dict[str, tuple[int, ...]]:
    """Name (without the ``language_model.`` prefix) -> shape of every text tensor, unquantized."""
    c, linear = config, config["linear_attn_config"]
    hidden, latent, expert = c["hidden_size"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    projected, width, heads = linear["num_heads"] * linear["head_dim"], linear["head_dim"], c["num_attention_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    out = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "lm_head.weight": (c["vocab_size"], hidden),
           "model.norm.weight": (hidden,), "model.output_attn_res_norm.weight": (hidden,),
           "model.output_attn_res_proj.weight": (1, hidden)}  # fmt: skip

    def mlp(prefix, inner):
        for name in ("gate_proj", "up_proj"):
            out[f"{prefix}.{name}.weight"] = (inner, hidden)
        out[f"{prefix}.down_proj.weight"] = (hidden, inner)

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            out[f"{p}.{name}.weight"] = (hidden,)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            out[f"{p}.{name}.weight"] = (1, hidden)
        a = f"{p}.self_attn"
        if i + 1 in linear["kda_layers"]:
            for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
                out[f"{a}.{name}.weight"] = (projected, hidden)
            for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
                out[f"{a}.{name}.weight"] = (projected, 1, linear["short_conv_kernel_size"])
            out |= {f"{a}.f_a_proj.weight": (width, hidden), f"{a}.f_b_proj.weight": (projected, width),
                    f"{a}.b_proj.weight": (linear["num_heads"], hidden), f"{a}.o_proj.weight": (hidden, projected),
                    f"{a}.A_log": (linear["num_heads"],), f"{a}.dt_bias": (projected,),
                    f"{a}.o_norm.weight": (width,)}  # fmt: skip
        else:
            out |= {f"{a}.q_a_proj.weight": (c["q_lora_rank"], hidden),
                    f"{a}.q_a_layernorm.weight": (c["q_lora_rank"],),
                    f"{a}.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
                    f"{a}.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden),
                    f"{a}.kv_a_layernorm.weight": (c["kv_lora_rank"],),
                    f"{a}.kv_b_proj.weight": (heads * (nope + v), c["kv_lora_rank"]),
                    f"{a}.g_proj.weight": (heads * v, hidden), f"{a}.o_proj.weight": (hidden, heads * v)}  # fmt: skip
        if i < c["first_k_dense_replace"]:
            mlp(f"{p}.mlp", c["intermediate_size"])
            continue
        m = f"{p}.block_sparse_moe"
        out |= {f"{m}.gate.weight": (c["num_experts"], hidden),
                f"{m}.gate.e_score_correction_bias": (c["num_experts"],),
                f"{m}.routed_expert_down_proj.weight": (latent, hidden),
                f"{m}.routed_expert_up_proj.weight": (hidden, latent),
                f"{m}.routed_expert_norm.weight": (latent,)}  # fmt: skip
        mlp(f"{m}.shared_experts", expert * c["num_shared_experts"])
        for e in range(c["num_experts"]):
            out |= {f"{m}.experts.{e}.w1.weight": (expert, latent), f"{m}.experts.{e}.w3.weight": (expert, latent),
                    f"{m}.experts.{e}.w2.weight": (latent, expert)}  # fmt: skip
    return out


def random_weights(seed: int = 0, config: dict = TEXT_CONFIG) -> dict[str, torch.Tensor]:
    """Weights of sensible scale: bfloat16, float32 where K3 has float32; experts unquantized."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            value = torch.empty(shape).uniform_(1, 8, generator=generator).log()
        elif name.endswith("dt_bias"):
            value = noise - 2
        elif "conv1d" in name:
            value = noise * 0.5
        elif name.endswith("e_score_correction_bias"):
            value = noise * 0.1
        elif len(shape) == 1:
            value = 1 + 0.1 * noise
        elif "embed" in name:
            value = noise
        else:
            value = noise * (1.0 if "lm_head" in name else 1.5) / math.sqrt(shape[1])
        weights[name] = value if name.endswith(FLOAT32) else value.bfloat16()
    return weights


def write(directory: Path, weights: dict[str, torch.Tensor], quantization: dict | None) -> Path:
    """Checkpoint directory in the released layout: nested text config, ``language_model.`` prefix, a vision tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"language_model.{name}": value.contiguous() for name, value in weights.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(64, 3, 14, 14, dtype=torch.bfloat16)
    tensors["mm_projector.linear.weight"] = torch.zeros(128, 64, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = TEXT_CONFIG | ({"quantization_config": quantization} if quantization else {})
    top = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
           "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
           "text_config": text, "vision_config": VISION_CONFIG}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(top, indent=1))
    write_tokenizer(directory, TEXT_CONFIG["vocab_size"])
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<r{i}>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)


def is_expert(name: str) -> bool:
    return ".experts." in name
