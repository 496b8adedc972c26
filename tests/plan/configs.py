"""Small model configs and the quantization configs that go with them.  No file of the repository's own models is
needed."""

from __future__ import annotations

import copy
from typing import Any

TINY_K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "intermediate_size": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4, 5],
        },
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 256,
        "routed_expert_hidden_size": 128,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "attn_res_block_size": 2,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 16384,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "vt_hidden_size": 64,
        "vt_intermediate_size": 128,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 1,
    },
}

TINY_GQA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# models/tiny-gqa, as far as memory goes; tests/test_tiny_gqa.py compares the two.
TINY_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

QWEN3 = TINY_GQA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 64,
    "intermediate_size": 512,
}

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}

NATIVE_IGNORE = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
]
EXPERTS_IGNORE = [
    *NATIVE_IGNORE,
    "re:.*_res_proj",
    "re:.*routed_expert_(down|up)_proj",
    "re:.*block_sparse_moe\\.gate$",
]
DENSE_IGNORE = [
    "re:.*self_attn\\.(?!o_proj).*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
    "re:.*_res_proj",
    "re:.*routed_expert_(down|up)_proj",
    "re:.*block_sparse_moe\\.gate$",
]
DENSE_TARGETS = [
    "re:.*self_attn\\.o_proj$",
    "re:.*shared_experts\\.(gate_up|gate|up|down)_proj$",
    "re:.*mlp\\.(gate_up|gate|up|down)_proj$",
]


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _activations(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": True, **more}


MXFP4 = ("mxfp4-pack-quantized", _weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8"), None)
FP8_BLOCK = (
    "float-quantized",
    _weights(8, "float", "block", block_structure=[128, 128]),
    _activations("float", "group", group_size=128),
)
FORMATS = {
    "native": MXFP4,
    "fp8": FP8_BLOCK,
    "fp8_all": FP8_BLOCK,
    "fp8_channel": ("float-quantized", _weights(8, "float", "channel"), _activations("float", "token")),
    "int8": ("int-quantized", _weights(8, "int", "channel"), _activations("int", "token")),
    "w4a16": ("pack-quantized", _weights(4, "int", "group", group_size=32), None),
    "w4a16_g128": ("pack-quantized", _weights(4, "int", "group", group_size=128), None),
    "nvfp4": (
        "nvfp4-pack-quantized",
        _weights(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
        None,
    ),
}


def _group(form: tuple[str, dict, dict | None], targets: list[str]) -> dict[str, Any]:
    name, weights, activations = form
    return {
        "targets": targets,
        "format": name,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def dense(quant: str, base: dict[str, Any]) -> dict[str, Any]:
    """A config of a model without experts whose checkpoint would hold ``quant`` in every linear layer but the head."""
    config = copy.deepcopy(base)
    if quant not in ("native", "bf16"):
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": FORMATS[quant][0],
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": ["lm_head"],
            "config_groups": {"group_0": _group(FORMATS[quant], ["Linear"])},
        }
    return config


def k3(quant: str = "native", base: dict[str, Any] = TINY_K3) -> dict[str, Any]:
    """A K3 config whose checkpoint would hold ``quant``: nested for native as released, at the top for the rest."""
    config = copy.deepcopy(base)
    if quant == "bf16":
        return config
    if quant in ("fp8_dense", "int8_dense"):
        dense = FP8_BLOCK if quant == "fp8_dense" else FORMATS["int8"]
        groups = [_group(MXFP4, ["re:.*experts\\.\\d+\\..*"]), _group(dense, DENSE_TARGETS)]
        name, ignore = "mixed-precision", DENSE_IGNORE
    else:
        groups, name = [_group(FORMATS[quant], ["Linear"])], FORMATS[quant][0]
        ignore = {"native": NATIVE_IGNORE, "fp8_all": DENSE_IGNORE}.get(quant, EXPERTS_IGNORE)
    quantization = {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
    }
    (config["text_config"] if quant == "native" else config)["quantization_config"] = quantization
    return config
