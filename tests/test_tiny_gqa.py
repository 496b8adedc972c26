"""models/tiny-gqa is an ordinary Hugging Face Qwen3 with grouped queries on tiny-k3's tokenizer, small and safe."""

import json
import struct
from pathlib import Path

import pytest

from pipeline.k3 import LayerKind, model_facts, read_config
from tests.plan import configs

MODELS = Path(__file__).resolve().parents[1] / "models"
MODEL = MODELS / "tiny-gqa"


@pytest.fixture(scope="module")
def config():
    return read_config(MODEL)


@pytest.fixture(scope="module")
def header():
    with open(MODEL / "model.safetensors", "rb") as stream:
        entries = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    entries.pop("__metadata__", None)
    return entries


def test_it_is_a_plain_model_with_grouped_queries(config):
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["model_type"] == "qwen3"
    assert "auto_map" not in config and "quantization_config" not in config
    facts = model_facts(config)
    assert set(facts.layer_kinds) == {LayerKind.GQA} and facts.num_experts == 0
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]


def test_memory_is_recorded_for_this_very_shape(config):
    assert {key: config[key] for key in configs.TINY_QWEN3} == configs.TINY_QWEN3


def test_the_facts_name_every_tensor_and_its_shape(config, header):
    facts = {f"{tensor.name}.weight": tensor.shape for tensor in model_facts(config).tensors}
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == facts
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}


def test_blocks_and_groups_of_128_apply_on_one_rank_and_on_two(config):
    for tensor in model_facts(config).tensors:
        if tensor.linear:
            assert all(size % 128 == 0 for size in tensor.shape), tensor
    assert config["num_key_value_heads"] % 2 == 0 and config["intermediate_size"] % 256 == 0


def test_it_is_small_and_holds_no_pickle():
    files = [path for path in MODEL.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 6 * 2**20
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja", ".py", ".md", ".png", ""}


def test_tokenizer_and_lexicon_are_tiny_k3s():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "lexicon.json", "LICENSE"):
        assert (MODEL / name).read_bytes() == (MODELS / "tiny-k3" / name).read_bytes(), name


@pytest.mark.parametrize("length", ["512", "1024"])
def test_the_reference_scores_reach_their_bound(length):
    cell = json.loads((MODEL / "reference_scores.json").read_text())["families"]["single"][length]
    assert cell["accuracy"] >= 0.9 and cell["n"] >= 100
