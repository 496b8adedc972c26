"""models/tiny-k3 is what it claims: Kimi K3's released layout in miniature, small, safe, with a lossless tokenizer.

Everything is read with the standard library and ``tokenizers``, not with the code that wrote it.
"""

import json
import math
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "models" / "tiny-k3"
BYTES = {"U8": 1, "BF16": 2, "F32": 4}
F32 = re.compile(r"(A_log|dt_bias|[qkv]_conv1d\.weight|o_norm\.weight|e_score_correction_bias)$")
EXPERT = re.compile(r"language_model\.model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight_(packed|scale)$")


def header(path: Path) -> dict:
    with open(path, "rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(size))


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((MODEL / "config.json").read_text())


@pytest.fixture(scope="module")
def lexicon() -> dict:
    return json.loads((MODEL / "lexicon.json").read_text())


@pytest.fixture(scope="module")
def tensors() -> dict[str, dict]:
    """{tensor name: safetensors entry} over all shards."""
    entries = {}
    for path in sorted(MODEL.glob("*.safetensors")):
        for name, entry in header(path).items():
            if name != "__metadata__":
                assert name not in entries, f"{name} is in two shards"
                entries[name] = entry | {"file": path.name}
    return entries


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_it_is_small_and_holds_no_pickle():
    files = [path for path in MODEL.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 12 * 2**20
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja", ".py", ".md", ".png", ""}
    assert [path.name for path in files if not path.suffix] == ["LICENSE"]
    for path in files:
        if path.suffix != ".py":
            assert not path.read_bytes()[:2].startswith((b"\x80\x02", b"\x80\x04", b"PK")), path


def test_the_index_names_each_tensor_once_and_in_the_right_shard(tensors):
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: entry["file"] for name, entry in tensors.items()}
    sizes = {}
    for entry in tensors.values():
        begin, end = entry["data_offsets"]
        assert end - begin == math.prod(entry["shape"]) * BYTES[entry["dtype"]]
        sizes[entry["file"]] = sizes.get(entry["file"], 0) + end - begin
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert len(sizes) >= 4
    for name, size in sizes.items():
        path = MODEL / name
        with open(path, "rb") as stream:
            (head,) = struct.unpack("<Q", stream.read(8))
        assert path.stat().st_size == 8 + head + size


def test_the_config_nests_as_the_released_one(config):
    text = config["text_config"]
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"] and config["model_type"] == "kimi_k3"
    assert text["architectures"] == ["KimiLinearForCausalLM"] and text["model_type"] == "kimi_linear"
    assert "quantization_config" not in config and "auto_map" not in config
    quantization = text["quantization_config"]
    assert quantization["format"] == "mxfp4-pack-quantized" and quantization["kv_cache_scheme"] is None
    # The released list's own gap: these are bf16 in the files and not named.
    assert not any("res_proj" in pattern or "routed_expert" in pattern for pattern in quantization["ignore"])
    assert text["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 5]


def test_the_config_has_the_public_configs_fields_and_no_others(config):
    public = json.loads((REPOSITORY / "conf" / "model" / "kimi-k3" / "config.json").read_text())

    def paths(value, prefix=""):
        if not isinstance(value, dict):
            return {prefix}
        return set().union(*(paths(inner, f"{prefix}/{key}") for key, inner in value.items())) if value else {prefix}

    code = {path for path in paths(public) if path.startswith("/auto_map")}
    written_by = {path for path in paths(public) if path.endswith("transformers_version")}
    assert paths(public) - paths(config) - code - written_by == set()
    assert paths(config) - paths(public) == set()


def test_experts_are_packed_and_only_they_are(config, tensors):
    text = config["text_config"]
    width, latent, group = text["moe_intermediate_size"], text["routed_expert_hidden_size"], 32
    seen = set()
    for name, entry in tensors.items():
        match = EXPERT.match(name)
        assert bool(match) == (entry["dtype"] == "U8"), name
        if match:
            out, inner = (latent, width) if match[3] == "w2" else (width, latent)
            assert entry["shape"] == [out, inner // 2 if match[4] == "packed" else inner // group], name
            seen.add((int(match[1]), int(match[2]), match[3], match[4]))
    layers = range(text["first_k_dense_replace"], text["num_hidden_layers"])
    assert seen == {(layer, expert, weight, part) for layer in layers for expert in range(text["num_experts"])
                    for weight in ("w1", "w2", "w3") for part in ("packed", "scale")}


def test_f32_is_where_k3_has_it(tensors):
    for name, entry in tensors.items():
        if entry["dtype"] != "U8":
            wanted = "F32" if name.startswith("language_model.") and F32.search(name) else "BF16"
            assert entry["dtype"] == wanted, f"{name} is {entry['dtype']}"


def test_all_three_parts_are_there(tensors):
    parts = {name.split(".")[0] for name in tensors}
    assert parts == {"language_model", "vision_tower", "mm_projector"}
    for name in ("model.layers.4.self_attention_res_proj.weight", "model.output_attn_res_proj.weight", "lm_head.weight",
                 "model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", "model.layers.0.mlp.down_proj.weight",
                 "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers.2.self_attn.f_b_proj.weight"):
        assert f"language_model.{name}" in tensors


def test_mlp_dimensions_suit_every_quantization_also_on_two_ranks(config):
    text = config["text_config"]
    assert text["intermediate_size"] % (2 * 128) == 0 and text["moe_intermediate_size"] % (2 * 128) == 0
    assert text["moe_intermediate_size"] * text["num_shared_experts"] % (2 * 128) == 0
    assert text["routed_expert_hidden_size"] % 128 == 0 and text["hidden_size"] % 128 == 0


def test_no_value_is_nan_or_infinite(tensors):
    import ml_dtypes
    import numpy as np

    kinds = {"U8": np.uint8, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    for name, entry in tensors.items():
        data = (MODEL / entry["file"]).read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[start + begin:start + end], kinds[entry["dtype"]])
        if entry["dtype"] != "U8":
            assert np.isfinite(values.astype(np.float32)).all(), name
        elif name.endswith("weight_scale"):
            assert ((0 < values) & (values < 255)).all(), f"{name}: an E8M0 scale is NaN (255) or 2^-127"


def test_every_task_word_is_one_token_in_any_order(tokenizer, lexicon):
    words = [*lexicon["marks"].values(), *lexicon["filler"], *lexicon["keys"], *lexicon["values"]]
    assert len(set(words)) == len(words) == 9 + 160 + 128 + 128
    ids = tokenizer.encode("".join(f" {word}" for word in words)).ids
    assert ids[0] == tokenizer.token_to_id("<bos>") and len(ids) == 1 + len(words)
    assert len(set(ids[1:])) == len(words)
    backwards = tokenizer.encode("".join(f" {word}" for word in reversed(words)), add_special_tokens=False).ids
    assert backwards == ids[:0:-1]


def test_the_lexicon_is_as_the_grammar_needs_it(lexicon):
    latin, cyrillic = lexicon["keys"][:64], lexicon["keys"][64:]
    assert all(re.fullmatch("[a-z]{4}", word) for word in latin + lexicon["filler"])
    assert all(re.fullmatch("[а-я]{4}", word) for word in cyrillic)
    assert all(re.fullmatch("[0-9]{3}", word) for word in lexicon["values"])
    assert len(lexicon["filler_successors"]) == 160
    assert all(len(set(row)) == 4 and max(row) < 160 for row in lexicon["filler_successors"])


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_words_survive_among_other_text(data):
    lexicon = json.loads((MODEL / "lexicon.json").read_text())
    words = data.draw(st.lists(st.sampled_from(lexicon["keys"] + lexicon["values"] + lexicon["filler"]), min_size=1))
    text = data.draw(st.text()) + "\n" + "".join(f" {word}" for word in words)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.decode([index]).strip() for index in ids[-len(words):]] == words


def test_ids_agree_between_config_and_tokenizer(config, tokenizer):
    generation = json.loads((MODEL / "generation_config.json").read_text())
    for name in ("bos", "eos", "pad"):
        number = tokenizer.token_to_id(f"<{name}>")
        assert number == config[f"{name}_token_id"] == config["text_config"][f"{name}_token_id"]
        assert number == generation[f"{name}_token_id"]
    assert tokenizer.token_to_id(config["image_placeholder"]) == config["media_placeholder_token_id"]
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"] == 1024


def test_loads_as_users_load_it():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    assert tokenizer(" ? = ;")["input_ids"][0] == 1 and len(tokenizer(" ? = ;")["input_ids"]) == 4
    messages = [{"role": "user", "content": " ? ="}, {"role": "user", "content": [{"type": "text", "text": " ;"}]}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos> ? = ;"
    assert tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"].count(1) == 1


def test_the_reference_scores_cover_every_family_and_short_answers_reach_their_bounds():
    reference = json.loads((MODEL / "reference_scores.json").read_text())
    scores = reference["families"]
    # Teacher-forced items say nothing about generation: the generated share must stand beside them.
    assert all(reference["ordered_generated"][length]["n"] >= 8 for length in ("512", "1024"))
    assert set(scores) == {"single", "multi_key", "tracking", "multi_value", "multi_query", "ordered", "frequent"}
    for family, cells in scores.items():
        assert set(cells) == {"512", "1024", "2048", "4096"}, family
        assert all(cell["n"] >= 32 and 0 <= cell["accuracy"] <= 1 for cell in cells.values()), family
    for family in ("single", "multi_key"):
        assert min(scores[family][length]["accuracy"] for length in ("512", "1024", "2048")) >= 0.95
        assert scores[family]["4096"]["accuracy"] >= 0.85
