"""KV cache and state types: FP8 with scales, what is refused, bfloat16 state; and the bytes each of them takes."""

import json

import pytest
import tiny
import torch
from conftest import divergence, prompt, running
from reference import Reference
from safetensors.torch import load_file

from vllm_k3_cpu import kv_cache, mla

LATENT = tiny.TEXT_CONFIG["kv_lora_rank"] + tiny.TEXT_CONFIG["qk_rope_head_dim"]
MLA_LAYERS = ("model.layers.3.self_attn", "model.layers.4.self_attn")


def reference(values, element: torch.dtype, scale: float) -> Reference:
    def stored(layer, x):
        return (x / scale).clamp(-torch.finfo(element).max, torch.finfo(element).max).to(element).float() * scale

    return Reference(tiny.TEXT_CONFIG, values, latent=stored)


def with_scales(native, directory, scale: float):
    """The native checkpoint with a calibrated scale for each MLA layer."""
    tensors = load_file(native[0] / "model.safetensors")
    stored = {n.removeprefix("language_model."): t for n, t in tensors.items() if n.startswith("language_model.")}
    stored |= {f"{layer}.{name}": torch.tensor([scale]) for layer in MLA_LAYERS for name in ("k_scale", "v_scale")}
    config = json.loads((native[0] / "config.json").read_text())["text_config"]["quantization_config"]
    return tiny.write(directory, stored, config)


@pytest.mark.parametrize(("cache", "element"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_cache_stores_rounded_latents_and_halves_the_bytes(cache, element, native):
    """Chunks of 512 of a 700-token prompt; the shared prefix is answered from the cache as from cold."""
    ids = prompt(700, seed=7)
    with running(native[0], kv_cache_dtype=cache, max_num_batched_tokens=600) as engine:
        got = engine.logits(ids)[0]
        memory, scales = engine.memory(), engine.kv_scales()
        engine.llm.reset_prefix_cache()
        cold = engine.continuation(ids)[0]
        warm = engine.continuation(ids)[0]
    assert divergence(got, reference(native[1], element, 1.0)(ids))[0] <= 1e-4
    assert divergence(got, Reference(tiny.TEXT_CONFIG, native[1])(ids))[0] > 1e-4  # the rounding is really there
    assert cold[2] == 0 and warm[2] >= 512
    torch.testing.assert_close(warm[1], cold[1], atol=1e-4, rtol=0)
    assert memory["kv_bytes_per_token"] == 2 * LATENT
    assert [s["k_scale"] for s in scales.values()] == [[1.0], [1.0]]
    assert all(s["source"] == "default" and s["applied"] for s in scales.values())


def test_calibrated_scales_are_used(native, tmp_path):
    """A scale eight times too small saturates the latents.  (Eight times larger barely shows: FP8 is a floating type,
    and a power of two only shifts its exponents.)"""
    ids, logits = prompt(100, seed=8), {}
    for scale in (0.02, 0.0025):
        with running(with_scales(native, tmp_path / str(scale), scale), kv_cache_dtype="fp8_e4m3") as engine:
            logits[scale] = engine.logits(ids)[0]
            scales = engine.kv_scales()
        assert {n.removeprefix("language_model.") for n in scales} == set(MLA_LAYERS)
        for layer in scales.values():
            assert layer["k_scale"] == pytest.approx([scale]) and layer["source"] == "checkpoint" and layer["applied"]
        assert divergence(logits[scale], reference(native[1], torch.float8_e4m3fn, scale)(ids))[0] <= 1e-4
    assert (logits[0.02] - logits[0.0025]).abs().max() > 0.1


def test_bfloat16_cache_and_state(native):
    """Both types under a float32 model: the reference with a rounded latent, and half the state."""
    ids = prompt(100, seed=9)
    with running(native[0], kv_cache_dtype="bfloat16", mamba_ssm_cache_dtype="bfloat16") as engine:
        got, memory = engine.logits(ids)[0], engine.memory()
        tokens, decoded, _ = engine.continuation(ids, new_tokens=8)[0]
        prefilled = engine.logits(ids + tokens)[0][len(ids) - 1 : -1]
    assert divergence(got, reference(native[1], torch.bfloat16, 1.0)(ids))[0] <= 1e-4
    assert divergence(decoded, prefilled)[0] < 1e-2  # every decoded token rounds the state once more
    assert not torch.equal(decoded, prefilled)
    assert memory["kv_bytes_per_token"] == 2 * 2 * LATENT
    recurrent, convolution = 4 * 64 * 64, 3 * 3 * 256
    assert memory["state_bytes_per_sequence"] == 3 * (2 * recurrent + 4 * convolution)


@pytest.mark.parametrize("cache", ["nvfp4", "fp8_inc", "fp8_ds_mla", "int8_per_token_head", "float16"])
def test_untested_cache_types_are_refused(cache, native):
    with pytest.raises(Exception, match=f"{cache} is not implemented by the MLA layer"):
        with running(native[0], kv_cache_dtype=cache):
            pass


def test_the_layer_refuses_by_itself():
    with pytest.raises(ValueError, match="nvfp4"):
        kv_cache.require_supported("nvfp4")
    with pytest.raises(ValueError, match="page size"):
        kv_cache.require_supported("fp8", skip_layers=["3"])


@pytest.mark.parametrize("bad", [torch.tensor(float("nan")), torch.tensor(0.0), torch.tensor([1.0, 2.0])])
def test_a_scale_that_is_no_scale_is_refused(bad):
    layer = mla.KimiMLAAttention.__new__(mla.KimiMLAAttention)
    torch.nn.Module.__init__(layer)
    layer.prefix, layer.loaded_scales = "layers.3.self_attn", set()
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.k_scale"):
        layer.load_scale("k_scale", bad)


@pytest.mark.parametrize(("options", "message"), [
    ({"dtype": "float16"}, "bfloat16 or float32"),
    ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "tensor and data parallelism only"),
])  # fmt: skip
def test_what_k3_on_cpu_cannot_do_is_refused(options, message, native):
    with pytest.raises(Exception, match=message):
        with running(native[0], **options):
            pass
