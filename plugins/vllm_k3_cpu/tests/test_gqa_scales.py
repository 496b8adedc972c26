"""Calibrated KV scales of a stock model (models/tiny-gqa): loaded, told by the worker extension, and really used by the cache."""

import json
from pathlib import Path

import pytest
import torch
from conftest import prompt, running
from safetensors import safe_open
from safetensors.torch import save_file

MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny-gqa"
E4M3_MAX = 448.0
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
QUANTIZATION = {
    "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed", "ignore": [],
    "config_groups": {}, "kv_cache_scheme": SCHEME,
}  # fmt: skip


@pytest.fixture(scope="module")
def extremes() -> dict[str, float]:
    """``{layers.0.self_attn.k_scale: ...}``: largest key and value of the model on the test's prompt, over E4M3's largest number."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model(torch.tensor([prompt(600)])).past_key_values
    return {
        f"model.layers.{number}.self_attn.{part}": tensor.abs().max().item() / E4M3_MAX
        for number, layer in enumerate(cache.layers)
        for part, tensor in (("k_scale", layer.keys), ("v_scale", layer.values))
    }


def with_scales(folder: Path, scales: dict[str, float]) -> Path:
    """The model with ``scales`` in a shard of their own; links, no copy."""
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text()) | {"quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.tensor([scale]) for name, scale in scales.items()}, folder / "kv_scales.safetensors")
    with safe_open(MODEL / "model.safetensors", "pt") as stream:
        index = dict.fromkeys(stream.keys(), "model.safetensors")
    index |= dict.fromkeys(scales, "kv_scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def served(checkpoint: Path, cache: str) -> tuple[torch.Tensor, dict]:
    """(logits after every prompt token, what the worker says of its scales); chunks of 256, so that attention reads the cache."""
    with running(checkpoint, dtype="bfloat16", kv_cache_dtype=cache, max_num_batched_tokens=256, enforce_eager=True) as engine:
        return engine.logits(prompt(600))[0], engine.kv_scales()


def test_scales_are_loaded_and_used(extremes, tmp_path):
    told, logits = {}, {}
    logits["auto"], told["auto"] = served(MODEL, "auto")
    logits["1.0"], told["1.0"] = served(MODEL, "fp8")
    for name, factor in (("calibrated", 1.0), ("x8", 8.0), ("/8", 0.125)):
        folder = with_scales(tmp_path / str(factor), {key: scale * factor for key, scale in extremes.items()})
        logits[name], told[name] = served(folder, "fp8")
        for layer, seen in told[name].items():
            number = layer.split(".")[2]
            for part in ("k_scale", "v_scale"):
                wanted = extremes[f"model.layers.{number}.self_attn.{part}"] * factor
                assert seen[part] == [pytest.approx(wanted, rel=1e-6)] and seen[part] != [1.0], (name, layer)
            assert seen["source"] == "checkpoint" and seen["applied"]
    assert len(told["calibrated"]) == len(extremes) // 2
    assert all(seen["source"] == "default" and seen["applied"] for seen in told["1.0"].values())
    assert all(not seen["applied"] for seen in told["auto"].values())

    def distance(name: str, other: str = "auto") -> float:
        return (logits[name] - logits[other]).abs().mean().item()

    # E4M3 is a floating-point format: eight times the scale costs its smallest numbers, an eighth cuts off its largest.
    assert distance("x8", "calibrated") > 0
    assert distance("/8") > 4 * distance("calibrated") > 0
    assert distance("calibrated") < 0.5 * logits["auto"].std().item()
