"""llm-compressor finds one k and one v scale a layer, the extremes of what the documents made, in whatever order they came."""

from pathlib import Path

import pytest

from pipeline import kv_calibration

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-gqa"
E4M3_MAX = 448.0


@pytest.fixture(scope="module")
def documents():
    return kv_calibration.texts(MODEL, kv_calibration.Calibration(documents=None, count=4, tokens=256, seed=1000))


def test_scales_are_the_largest_key_and_value_over_the_formats_largest(documents):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scales = kv_calibration.calibrate(MODEL, documents, 256)
    assert scales == kv_calibration.calibrate(MODEL, documents[::-1], 256)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    assert len(scales) == 2 * model.config.num_hidden_layers
    largest = dict.fromkeys(scales, 0.0)
    with torch.inference_mode():
        for text in documents:
            cache = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).past_key_values
            for number, layer in enumerate(cache.layers):
                for part, tensor in (("k_scale", layer.keys), ("v_scale", layer.values)):
                    name = f"model.layers.{number}.self_attn.{part}"
                    largest[name] = max(largest[name], tensor.abs().max().item())
    for name, scale in scales.items():
        assert scale == pytest.approx(largest[name] / E4M3_MAX, rel=0.02), name
