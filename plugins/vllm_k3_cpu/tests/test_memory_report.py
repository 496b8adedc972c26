"""The memory report's figures are those of arithmetic: K3 as it is served (bfloat16), and another model."""

import json

import pytest
import tiny
import torch
from conftest import prompt, running
from safetensors.torch import save_file

LINEAR = tiny.TEXT_CONFIG["linear_attn_config"]
HEADS, WIDTH, TAPS = LINEAR["num_heads"], LINEAR["head_dim"], LINEAR["short_conv_kernel_size"]
STATE_PAGE = HEADS * WIDTH * WIDTH * 4 + (TAPS - 1) * 3 * HEADS * WIDTH * 2
LATENT = tiny.TEXT_CONFIG["kv_lora_rank"] + tiny.TEXT_CONFIG["qk_rope_head_dim"]
KEYS = {
    "rank", "weight_bytes", "weight_bytes_by_dtype", "kv_bytes_allocated", "kv_bytes_per_token", "kv_num_blocks",
    "kv_block_size", "kv_page_bytes", "kv_capacity_tokens", "state_bytes_per_sequence", "state_page_bytes_padded",
    "state_block_bytes_per_sequence", "activation_peak_bytes", "activation_num_tokens", "max_num_seqs", "rss_bytes",
    "kv_cache_dtype", "kernels", "emulated",
}  # fmt: skip


@pytest.mark.parametrize(("cache", "element_bytes", "block"), [("auto", 2, 256), ("fp8", 1, 512)])
def test_k3_in_bfloat16(cache, element_bytes, block, native):
    pool = 48 << 20
    with running(native[0], dtype="bfloat16", kv_cache_dtype=cache, kv_cache_memory_bytes=pool) as engine:
        engine.continuation(prompt(300))
        report = engine.memory()
        assert engine.memory()["activation_peak_bytes"] == report["activation_peak_bytes"]
        smaller = engine.llm.collective_rpc("memory_report", kwargs={"num_tokens": 512})[0]
    assert KEYS <= report.keys() and report["unavailable"] == {}
    assert STATE_PAGE == 70_144
    page = block * LATENT * element_bytes
    assert report["kv_block_size"] == block
    assert report["kv_page_bytes"] == report["state_page_bytes_padded"] == page
    assert report["kv_bytes_per_token"] == 2 * LATENT * element_bytes
    # Three layer groups of two places each (2 MLA, 2 KDA, 1 KDA and a filler) share blocks of two pages.
    assert report["kv_num_blocks"] == pool // (2 * page)
    assert report["kv_bytes_allocated"] == report["kv_num_blocks"] * 2 * page
    assert report["state_bytes_per_sequence"] == 3 * STATE_PAGE
    assert report["state_block_bytes_per_sequence"] == 3 * page
    # A sequence of the longest length takes its tokens' blocks, and two state blocks in each KDA group (align mode).
    blocks = -(-4096 // block) + 2 * 2
    assert report["kv_capacity_tokens"] == pytest.approx(report["kv_num_blocks"] / blocks * 4096, abs=1)
    assert report["activation_num_tokens"] == 2048 and report["max_num_seqs"] == 8
    assert 0 < smaller["activation_peak_bytes"] < report["activation_peak_bytes"] < 256 << 20
    assert report["rss_bytes"] > report["kv_bytes_allocated"]


def write_llama(directory):
    """A one-layer Llama, random weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    p = "model.layers.0"
    shapes = {
        "model.embed_tokens": (512, 128), "lm_head": (512, 128), "model.norm": (128,), f"{p}.input_layernorm": (128,),
        f"{p}.post_attention_layernorm": (128,), f"{p}.self_attn.q_proj": (128, 128),
        f"{p}.self_attn.k_proj": (64, 128), f"{p}.self_attn.v_proj": (64, 128), f"{p}.self_attn.o_proj": (128, 128),
        f"{p}.mlp.gate_proj": (256, 128), f"{p}.mlp.up_proj": (256, 128), f"{p}.mlp.down_proj": (128, 256),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape).bfloat16() * 0.05 for name, shape in shapes.items()}
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(directory, 512)
    return directory, sum(w.numel() * 2 for w in weights.values())


def test_a_llama_has_no_state_and_its_own_kernels(tmp_path):
    checkpoint, weight_bytes = write_llama(tmp_path)
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "max_model_len": 1024, "max_num_batched_tokens": 256}
    with running(checkpoint, **options) as engine:
        report, scales = engine.memory(), engine.kv_scales()
    assert KEYS <= report.keys() and report["unavailable"] == {}
    # Buffers of the model that are no weights of the file: the rotary table, and four scales of the attention layer.
    assert report["weight_bytes"] - weight_bytes == 2048 * 32 * 2 + 4 * 4
    assert report["kv_bytes_per_token"] == 2 * 2 * 32
    assert report["state_bytes_per_sequence"] == report["state_page_bytes_padded"] == 0
    assert report["kv_bytes_allocated"] == report["kv_num_blocks"] * report["kv_page_bytes"]
    assert report["activation_peak_bytes"] > 0 and report["emulated"] == []
    assert [layer["k_scale"] for layer in scales.values()] == [[1.0]]
