"""Kimi K3's configuration in miniature: the same fields and nesting as the public ``config.json``, small numbers."""

from __future__ import annotations

from vocabulary import VOCAB_SIZE

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# K3's own list.  It names neither `*_res_proj` nor `routed_expert_{down,up}_proj`, which are bf16 all the same: whoever
# requantizes must not believe it, so the miniature carries the same gap.
IGNORE = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
          "re:.*vision_tower.*", "re:.*mm_projector.*"]

QUANTIZATION = {
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group",
                    "symmetric": True, "type": "float", "zp_dtype": None}}},
    "format": "mxfp4-pack-quantized", "global_compression_ratio": None, "ignore": IGNORE, "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
}

TEXT = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_hidden_layers": 5, "intermediate_size": 512,
    "rms_norm_eps": 1e-5, "initializer_range": 0.02, "use_cache": True, "tie_word_embeddings": False,
    "max_position_embeddings": 16384, "attn_res_block_size": 2, "num_nextn_predict_layers": 0,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4, 5], "num_heads": 4, "head_dim": 64,
                           "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "mla_use_nope": True,
    "mla_use_output_gate": True, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 2,
    "moe_intermediate_size": 256, "routed_expert_hidden_size": 128, "latent_moe_use_norm": True,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "routed_scaling_factor": 1.0,
    "use_grouped_topk": True, **TOKEN_IDS,
}

VISION = {
    "_attn_implementation": "flash_attention_2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False,
    "init_pos_emb_height": 8, "init_pos_emb_time": 4, "init_pos_emb_width": 8, "linear_bias": False,
    "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mlp_type": "mlp2", "mm_hidden_size": 32,
    "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm", "patch_embed_proj_bias": False, "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear", "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5, "qkv_hidden_size": 48, "text_hidden_size": TEXT["hidden_size"], "vt_hidden_size": 32,
    "vt_intermediate_size": 64, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2,
}


def released_config() -> dict:
    """``config.json``: quantization sits in ``text_config`` only, as in the released file; no ``auto_map`` (no remote code)."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>", "media_placeholder_token_id": 3,
        "tie_word_embeddings": False, **TOKEN_IDS,
        "text_config": {**TEXT, "quantization_config": QUANTIZATION}, "vision_config": VISION,
    }
