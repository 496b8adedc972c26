"""Every lint rule has a checkpoint that is broken on purpose; the unbroken one shows that the rule is what finds it."""

import ast
import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import numbers, rules_base
from pipeline.checkpoint.lint import lint
from pipeline.errors import Unreadable
from tests.checkpoint import fixtures
from tests.checkpoint.fixtures import EXPERT, PREFIX, drop, edit_json, edit_tensors, edit_values, put, shard_of

W1 = EXPERT.format(layer=2, expert=3, name="w1")
W3 = EXPERT.format(layer=2, expert=3, name="w3")
ATTENTION = PREFIX + "layers.1.self_attn."
INDEX = "model.safetensors.index.json"
FORMS = ("native", "fp8", "fp8_block", "int8", "w4a16", "nvfp4")


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    for form in FORMS:
        fixtures.write_k3(folder / form) if form == "native" else fixtures.write_rough(folder / form, form)
    return folder


@pytest.fixture
def checkpoint(originals, tmp_path):
    return lambda form: shutil.copytree(originals / form, tmp_path / "checkpoint")


def errors(findings):
    return [finding for finding in findings if finding.severity == "error"]


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_checkpoint_has_no_errors(originals, form):
    found = lint(originals / form)
    assert errors(found) == []
    if form != "native":
        assert found == []


def truncate(directory):
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-5])


def config(change):
    return lambda directory: edit_json(directory, "config.json", change)


def quantization(change):
    return lambda directory: edit_json(directory, "config.json", lambda c: change(c["quantization_config"]))


def index(change):
    return lambda directory: edit_json(directory, INDEX, change)


def static_activations(q):
    q["config_groups"]["group_0"]["input_activations"]["dynamic"] = False


def static_but_one(directory):
    """Every expert has its input scale, expert 3's w1 in layer 2 has none."""
    quantization(static_activations)(directory)
    for path in directory.glob("*.safetensors"):
        tensors = fixtures.load(path)
        for name in [name for name in tensors if name.endswith(".weight_scale") and not name.startswith(W1 + ".")]:
            tensors[name.replace("weight_scale", "input_scale")] = ("F32", np.ones(1, np.float32))
        fixtures.save(path, tensors)
    fixtures.write_index(directory)


def quantize_b_proj_alone(directory):
    def change(tensors):
        tensors[ATTENTION + "b_proj.weight"] = ("F8_E4M3", np.zeros((2, 128), np.uint8))
        tensors[ATTENTION + "b_proj.weight_scale"] = ("F32", np.ones((2, 1), np.float32))

    edit_tensors(directory, ATTENTION + "b_proj.weight", change)
    quantization(lambda q: q["ignore"].__setitem__(7, r"re:.*self_attn\.(?!b_proj).*"))(directory)


def kv_scales_in_some_layers(directory):
    config(lambda c: c["text_config"]["linear_attn_config"].update(full_attn_layers=[3, 4]))(directory)
    kv_scheme()(directory)
    for name in ("k_scale", "v_scale"):
        put(
            directory,
            f"{PREFIX}layers.3.self_attn.{name}",
            "F32",
            np.ones(1, np.float32),
            beside=PREFIX + "norm.weight",
        )


def kv_scale_nan(directory):
    put(directory, ATTENTION + "k_scale", "F32", np.full(1, np.nan, np.float32), beside=ATTENTION + "o_norm.weight")


def kv_scheme(**changes):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True} | changes
    return quantization(lambda q: q.update(kv_cache_scheme=scheme))


def unquantize_one_expert(directory):
    def change(tensors):
        for name in ("w1", "w2", "w3"):
            module = EXPERT.format(layer=2, expert=3, name=name)
            del tensors[module + ".weight_scale"]
            tensors[module + ".weight"] = ("BF16", np.zeros((128, 128), np.uint16))

    edit_tensors(directory, W1 + ".weight", change)
    quantization(lambda q: q["ignore"].append(r"re:.*layers\.2\..*experts\.3\..*"))(directory)


def shard_in_a_folder(directory):
    """A shard moved into a folder, and the index with it: some readers follow, vLLM does not look there."""
    (directory / "weights").mkdir()
    name = sorted(directory.glob("*.safetensors"))[1].name
    (directory / name).rename(directory / "weights" / name)
    moved = {name: f"weights/{name}"}
    index(lambda i: i.update(weight_map={t: moved.get(s, s) for t, s in i["weight_map"].items()}))(directory)


def name_another_shard(name):
    return index(lambda i: i["weight_map"].__setitem__(W1 + ".weight", name))


def drop_all(*words):
    """Remove every tensor whose name holds all of the words, from the shards and from the index."""

    def damage(directory):
        for path in directory.glob("*.safetensors"):
            tensors = fixtures.load(path)
            fixtures.save(path, {name: t for name, t in tensors.items() if not all(word in name for word in words)})
        fixtures.write_index(directory)

    return damage


def pointer(name):
    """What a clone without Git LFS leaves."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4986211280\n"
    return lambda directory: (directory / name).write_text(text)


def group(change):
    return quantization(lambda q: change(q["config_groups"]["group_0"]))


def weights(**changes):
    return group(lambda g: g["weights"].update(changes))


def sidecar(name, value):
    return lambda directory: (directory / name).write_text(json.dumps(value))


def both(*damages):
    return lambda directory: [damage(directory) for damage in damages]


def nan(values):
    values.reshape(-1)[5] = np.nan


def first(value):
    return lambda values: values.reshape(-1).__setitem__(0, value)


# rule, form of the checkpoint, damage, what the finding must name (part of its tensor, file or message)
CASES = [
    ("shard-unreadable", "fp8", truncate, "truncated"),
    ("shard-missing", "fp8", lambda d: shard_of(d, W1 + ".weight").unlink(), "not on disk"),
    (
        "shard-extra",
        "fp8",
        lambda d: fixtures.save(d / "model-extra.safetensors", {"a.weight": ("F32", np.ones(2, np.float32))}),
        "model-extra",
    ),
    ("shard-unreadable", "fp8", pointer("model-00002-of-000003.safetensors"), "a Git LFS pointer"),
    ("shard-missing", "fp8", name_another_shard("model-ß.safetensors"), "model-ß.safetensors: in the index for 1"),
    ("shard-outside", "fp8", shard_in_a_folder, "weights/model-00002-of-000003.safetensors"),
    ("shard-outside", "fp8", name_another_shard("../other/model.safetensors"), "../other/model.safetensors"),
    ("shard-outside", "fp8", name_another_shard("/etc/passwd"), "/etc/passwd"),
    ("index-absent", "fp8", lambda d: (d / INDEX).unlink(), "no index"),
    ("tensor-missing", "fp8", lambda d: drop(d, W1 + ".weight", reindex=False), W1),
    (
        "tensor-misplaced",
        "fp8",
        index(lambda i: i["weight_map"].__setitem__(W1 + ".weight", "model-00001-of-000003.safetensors")),
        W1,
    ),
    ("tensor-unindexed", "fp8", index(lambda i: i["weight_map"].__delitem__(W1 + ".weight")), W1),
    (
        "tensor-duplicate",
        "fp8",
        lambda d: put(d, W1 + ".weight", "F8_E4M3", np.ones((128, 128), np.uint8), beside=ATTENTION + "b_proj.weight"),
        W1,
    ),
    ("total-size", "fp8", index(lambda i: i["metadata"].update(total_size=1)), "total_size is 1"),
    ("total-size", "fp8", index(lambda i: i["metadata"].update(total_size="all")), "total_size is 'all'"),
    ("total-size", "fp8", index(lambda i: i["metadata"].update(total_size=float("nan"))), "total_size is nan"),
    (
        "layer-missing",
        "fp8",
        config(lambda c: c["text_config"].update(num_nextn_predict_layers=1)),
        "1 prediction layers are configured, none is stored",
    ),
    (
        "layer-extra",
        "fp8",
        lambda d: put(d, "mtp.layers.0.eh_proj.weight", *fixtures.bf16(np.ones((4, 4))), beside=PREFIX + "norm.weight"),
        "mtp.layers.0.eh_proj.weight: 1 tensors of prediction layers",
    ),
    ("expert-missing", "fp8", drop_all("layers.2.", ".experts."), "layer 2 has a router and no experts"),
    ("expert-missing", "fp8", drop_all("layers.2.", ".experts.3.w2."), "expert 3 of layer 2 has no w2"),
    ("weight-missing", "fp8", lambda d: drop(d, W1 + ".weight"), W1 + ".weight_scale"),
    ("weight-missing", "nvfp4", lambda d: drop(d, W1 + ".weight_packed"), "the weight that it belongs to is not"),
    (
        "weight-twice",
        "w4a16",
        lambda d: put(d, W1 + ".weight", *fixtures.bf16(np.ones((128, 128))), beside=W1 + ".weight_packed"),
        W1 + ".weight: stored beside",
    ),
    ("layer-missing", "fp8", config(lambda c: c["text_config"].update(num_hidden_layers=5)), "layers.4"),
    (
        "layer-extra",
        "fp8",
        lambda d: put(
            d, PREFIX + "layers.4.input_layernorm.weight", *fixtures.bf16(np.ones(128)), beside=PREFIX + "norm.weight"
        ),
        "layers.4",
    ),
    ("expert-missing", "fp8", config(lambda c: c["text_config"].update(num_experts=5)), "experts.4"),
    ("expert-extra", "fp8", config(lambda c: c["text_config"].update(num_experts=3)), "experts.3"),
    ("f32-lost", "fp8", lambda d: put(d, ATTENTION + "dt_bias", *fixtures.bf16(np.ones(64))), "dt_bias"),
    (
        "f32-lost",
        "fp8",
        lambda d: put(d, PREFIX + "layers.1.block_sparse_moe.gate.e_score_correction_bias", *fixtures.bf16(np.ones(4))),
        "e_score",
    ),
    (
        "head-missing",
        "fp8",
        both(config(lambda c: c["text_config"].update(tie_word_embeddings=False)), drop_all("lm_head")),
        "tie_word_embeddings is false",
    ),
    ("aux-missing", "fp8", lambda d: (d / "configuration_kimi_k3.py").unlink(), "configuration_kimi_k3.py"),
    ("aux-missing", "fp8", lambda d: (d / "helpers_kimi_k3.py").unlink(), "imports it"),
    ("aux-unreadable", "fp8", pointer("tokenizer.json"), "a Git LFS pointer, not the file itself"),
    ("aux-unreadable", "fp8", config(lambda c: c.update(auto_map=["configuration_kimi_k3.K3"])), "config.json"),
    ("other-weights", "fp8", lambda d: (d / "pytorch_model.bin").write_bytes(b"\x80\x02"), "pytorch_model.bin"),
    ("aux-unreadable", "fp8", lambda d: (d / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json"),
    ("tokenizer-missing", "fp8", lambda d: (d / "tokenizer.json").unlink(), "tiktoken.model"),
    ("config-missing", "fp8", config(lambda c: c.pop("quantization_config")), "no quantization_config"),
    (
        "config-duplicate",
        "fp8",
        config(lambda c: c["text_config"].update(quantization_config=fixtures.NATIVE_CONFIG)),
        "$.text_config.quantization_config",
    ),
    (
        "config-duplicate",
        "fp8",
        config(lambda c: c["text_config"].update(compression_config=fixtures.NATIVE_CONFIG)),
        "$.text_config.compression_config says compressed-tensors/mxfp4-pack-quantized",
    ),
    ("config-duplicate", "fp8", sidecar("quantize_config.json", {"bits": 4}), "a second quantization config (gptq)"),
    ("config-malformed", "fp8", lambda d: (d / "hf_quant_config.json").write_text("{"), "hf_quant_config.json"),
    ("config-malformed", "fp8", config(lambda c: c.update(quantization_config=["fp8"])), "config.quant_method"),
    ("config-malformed", "fp8", quantization(lambda q: q.update(ignore="lm_head")), "ignore: 'lm_head', expected list"),
    ("config-malformed", "fp8", quantization(lambda q: q["ignore"].append(7)), "ignore: 7, expected str"),
    ("config-malformed", "fp8", quantization(lambda q: q.update(config_groups=[])), "config_groups"),
    ("config-malformed", "fp8", quantization(lambda q: q.update(format=["float-quantized"])), "format"),
    ("config-malformed", "fp8", quantization(lambda q: q.update(kv_cache_scheme="fp8")), "kv_cache_scheme"),
    ("config-malformed", "fp8", group(lambda g: g.update(targets="Linear")), "targets: 'Linear', expected list"),
    ("config-malformed", "fp8", group(lambda g: g.update(input_activations=8)), "input_activations"),
    ("config-malformed", "w4a16", weights(group_size="32"), "group_size: '32', expected int"),
    ("config-malformed", "w4a16", weights(group_size=0), "group_size: 0"),
    ("config-malformed", "w4a16", weights(num_bits=64), "num_bits: 64"),
    ("config-malformed", "fp8_block", weights(block_structure=[128]), "block_structure"),
    ("config-malformed", "fp8_block", weights(block_structure="128"), "block_structure"),
    ("pattern-invalid", "fp8", quantization(lambda q: q["ignore"].append("re:.*[")), "ignore: pattern 're:.*['"),
    ("pattern-invalid", "fp8", group(lambda g: g["targets"].append("re:(")), "group_0.targets: pattern 're:('"),
    ("config-malformed", "fp8", quantization(lambda q: q["config_groups"]["group_0"].pop("targets")), "group_0"),
    ("method-unknown", "fp8", quantization(lambda q: q.update(quant_method="mystery")), "mystery"),
    ("method-not-linted", "fp8", quantization(lambda q: q.update(quant_method="gptq")), "gptq"),
    (
        "method-not-linted",
        "fp8",
        both(config(lambda c: c.pop("quantization_config")), sidecar("hf_quant_config.json", {"quantization": {}})),
        "hf_quant_config.json",
    ),
    (
        "format-unknown",
        "fp8",
        both(quantization(lambda q: q.update(format="mixed-precision")), group(lambda g: g.pop("format"))),
        "group_0 has no format of its own, the config says mixed-precision",
    ),
    ("format-unknown", "fp8", both(quantization(lambda q: q.pop("format")), group(lambda g: g.pop("format"))), "None"),
    (
        "format-mismatch",
        "w4a16",
        lambda d: put(d, W1 + ".weight_zero_point", "I32", np.ones((16, 4), np.int32), beside=W1 + ".weight_packed"),
        W1 + ".weight_zero_point: a zero point is stored",
    ),
    ("format-unknown", "fp8", quantization(lambda q: q.update(format="int3-float")), "int3-float"),
    ("format-conflict", "fp8", quantization(lambda q: q.update(format="int-quantized")), "int-quantized"),
    (
        "format-mismatch",
        "fp8",
        quantization(
            lambda q: (q.update(format="int-quantized"), q["config_groups"]["group_0"].update(format="int-quantized"))
        ),
        W1,
    ),
    ("ignore-unmatched", "fp8", quantization(lambda q: q["ignore"].append("re:.*qkv_proj.*")), "qkv_proj"),
    (
        "target-unmatched",
        "fp8",
        quantization(lambda q: q["config_groups"]["group_0"]["targets"].append("re:.*gate_up_proj$")),
        "gate_up_proj",
    ),
    ("declared-not-quantized", "fp8", quantization(lambda q: q["ignore"].pop()), "routed_expert_down_proj"),
    (
        "quantized-not-declared",
        "fp8",
        quantization(lambda q: q["config_groups"]["group_0"].update(targets=[r"re:.*\.w[12]$"])),
        W3,
    ),
    ("ignored-but-quantized", "fp8", quantization(lambda q: q["ignore"].append(r"re:.*experts\.3\.w1$")), W1),
    (
        "router-quantized",
        "fp8",
        lambda d: put(d, PREFIX + "layers.1.block_sparse_moe.gate.weight", "F8_E4M3", np.ones((4, 128), np.uint8)),
        "gate.weight",
    ),
    ("scale-missing", "fp8", lambda d: drop(d, W1 + ".weight_scale"), W1 + ".weight_scale"),
    ("scale-missing", "w4a16", lambda d: drop(d, W1 + ".weight_shape"), W1 + ".weight_shape"),
    ("scale-missing", "nvfp4", lambda d: drop(d, W1 + ".weight_global_scale"), W1 + ".weight_global_scale"),
    ("scale-missing", "native", lambda d: drop(d, W1 + ".weight_scale"), W1 + ".weight_scale"),
    ("scale-missing", "w4a16", weights(symmetric=False), W1 + ".weight_zero_point"),
    ("scale-missing", "w4a16", weights(actorder="group"), W1 + ".weight_g_idx"),
    ("scale-missing", "fp8", group(lambda g: g["input_activations"].pop("dynamic")), W1 + ".input_scale"),
    (
        "scale-missing",
        "nvfp4",
        group(lambda g: g.update(input_activations={"num_bits": 4, "type": "float", "dynamic": "local"})),
        "activations are declared static, no input scale",
    ),
    ("scale-missing", "fp8", static_but_one, W1 + ".input_scale"),
    ("scale-shape", "fp8", lambda d: put(d, W1 + ".weight_scale", "F32", np.ones((64, 1), np.float32)), W1),
    ("scale-shape", "fp8_block", lambda d: put(d, W1 + ".weight_scale", "F32", np.ones((2, 1), np.float32)), W1),
    ("scale-shape", "w4a16", lambda d: put(d, W1 + ".weight_scale", *fixtures.bf16(np.ones((128, 1)))), W1),
    ("scale-shape", "native", lambda d: put(d, W1 + ".weight_scale", "U8", np.ones((4, 128), np.uint8)), "[4, 128]"),
    ("scale-shape", "fp8", weights(strategy="tensor"), "needs [1]"),
    ("scale-shape", "nvfp4", lambda d: put(d, W1 + ".weight_global_scale", "F32", np.ones(2, np.float32)), "F32 [2]"),
    ("scale-shape", "nvfp4", lambda d: put(d, W1 + ".weight_global_scale", *fixtures.bf16(np.ones(1))), "BF16 [1]"),
    ("not-a-matrix", "fp8", lambda d: put(d, W1 + ".weight", "F8_E4M3", np.ones(128, np.uint8)), "shape [128]"),
    ("not-a-matrix", "fp8", lambda d: put(d, W1 + ".weight", "F8_E4M3", np.ones((0, 128), np.uint8)), "shape [0, 128]"),
    ("scale-dtype", "native", lambda d: put(d, W1 + ".weight_scale", "F32", np.ones((128, 4), np.float32)), W1),
    ("scale-dtype", "nvfp4", lambda d: put(d, W1 + ".weight_scale", "F32", np.ones((128, 8), np.float32)), W1),
    ("weight-shape", "w4a16", lambda d: put(d, W1 + ".weight_shape", "I64", np.array([128, 256])), W1),
    ("weight-shape", "w4a16", lambda d: put(d, W1 + ".weight_shape", "I64", np.array([], np.int64)), "I64 [0]"),
    ("weight-shape", "w4a16", lambda d: put(d, W1 + ".weight_shape", "I32", np.array([128, 128], np.int32)), "I32 [2]"),
    ("indivisible", "fp8_block", lambda d: put(d, W1 + ".weight", "F8_E4M3", np.ones((192, 128), np.uint8)), "192x128"),
    (
        "indivisible",
        "w4a16",
        quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=96)),
        "128 columns % group 96",
    ),
    ("fused-torn", "fp8", quantize_b_proj_alone, "b_proj"),
    (
        "fused-torn",
        "fp8",
        lambda d: put(d, W3 + ".weight", *fixtures.bf16(np.ones((128, 128)))) or drop(d, W3 + ".weight_scale"),
        W3,
    ),
    ("experts-differ", "fp8", unquantize_one_expert, W1),
    (
        "global-scale-differs",
        "nvfp4",
        lambda d: put(d, W3 + ".weight_global_scale", "F32", np.full(1, 2, np.float32)),
        W3,
    ),
    (
        "global-scale-differs",
        "nvfp4",
        lambda d: [
            put(d, f"{m}.weight_scale_2", "F32", np.full(1, n, np.float32), beside=m + ".weight_packed")
            for n, m in ((1, W1), (2, W3))
        ],
        W3 + ".weight_scale_2",
    ),
    ("kv-uncalibrated", "fp8", kv_scheme(), "scale=1.0"),
    ("kv-scheme-unsupported", "fp8", kv_scheme(num_bits=4), "4-bit"),
    ("kv-scale-missing", "fp8", kv_scales_in_some_layers, "layers.2"),
    ("e8m0-nan", "native", lambda d: edit_values(d, W1 + ".weight_scale", first(255)), W1),
    ("scale-not-finite", "fp8", lambda d: edit_values(d, W1 + ".weight_scale", nan), W1),
    ("scale-not-finite", "fp8", lambda d: edit_values(d, W1 + ".weight_scale", first(np.inf)), "infinite"),
    ("scale-not-finite", "nvfp4", lambda d: edit_values(d, W1 + ".weight_scale", first(0x7F)), W1),
    ("scale-zero", "fp8", lambda d: edit_values(d, W1 + ".weight_scale", first(0)), "1 of 128"),
    ("scale-zero", "fp8", lambda d: edit_values(d, W1 + ".weight_scale", first(-0.0)), "1 of 128"),
    (
        "scale-zero",
        "fp8",
        lambda d: put(d, W1 + ".weight_scale_2", "F32", np.zeros(1, np.float32), beside=W1 + ".weight"),
        "1 of 1 scales are 0",
    ),
    ("scale-subnormal", "fp8", lambda d: edit_values(d, W1 + ".weight_scale", first(1e-40)), "1 of 128 scales"),
    ("scale-not-finite", "fp8", kv_scale_nan, "k_scale: 1 of 1 values are NaN"),
    ("scale-negative", "fp8", lambda d: edit_values(d, W1 + ".weight_scale", first(-1)), W1),
    ("not-finite", "fp8", lambda d: edit_values(d, W1 + ".weight", first(0x7F)), "1 of 16384 values are NaN"),
    (
        "not-finite",
        "fp8",
        lambda d: edit_values(d, PREFIX + "layers.1.mlp_res_proj.weight", first(0x7FC0)),
        "mlp_res_proj",
    ),
    ("not-finite", "fp8", lambda d: put(d, W1 + ".weight", "F8_E5M2", np.full((128, 128), 0x7C, np.uint8)), "infinite"),
    ("not-finite", "fp8", lambda d: edit_values(d, ATTENTION + "A_log", first(-np.inf)), "A_log"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "form", "damage", "names"), CASES, ids=[f"{c[0]}-{c[1]}-{n}" for n, c in enumerate(CASES)]
)
def test_rule_finds_its_damage(checkpoint, rule, form, damage, names):
    directory = checkpoint(form)
    assert rule not in {finding.rule for finding in lint(directory)}
    damage(directory)
    found = [finding for finding in lint(directory) if finding.rule == rule]
    assert found, f"{rule} not found"
    assert any(names in str(finding) for finding in found), "\n".join(map(str, found))
    assert all(finding.remedy for finding in found)


def test_power_of_two_scales_are_checked_where_a_recipe_promised_them(checkpoint):
    directory = checkpoint("fp8")
    edit_values(directory, W1 + ".weight_scale", first(0.3))
    assert "scale-not-pow2" not in {finding.rule for finding in lint(directory)}
    (directory / "requantization.json").write_text('{"recipe": {"format": "fp8_channel", "scale": "pow2"}}')
    (found,) = [finding for finding in lint(directory) if finding.rule == "scale-not-pow2"]
    assert found.tensor == W1 + ".weight_scale" and "1 of 128" in found.message


def test_modules_may_be_named_exactly_instead_of_by_pattern(checkpoint):
    directory = checkpoint("fp8")
    up = [PREFIX + f"layers.{layer}.block_sparse_moe.routed_expert_up_proj" for layer in (1, 2, 3)]
    experts = [EXPERT.format(layer=l, expert=e, name=n) for l in (1, 2, 3) for e in range(4) for n in ("w1", "w2", "w3")]
    quantization(lambda q: q["config_groups"]["group_0"].update(targets=experts))(directory)
    quantization(lambda q: q["ignore"].append(up[0]))(directory)
    assert lint(directory) == []
    quantization(lambda q: q["ignore"].append("layers.9.nothing"))(directory)
    quantization(lambda q: q["config_groups"]["group_0"].update(targets=experts[1:]))(directory)
    assert {finding.rule for finding in lint(directory)} >= {"ignore-unmatched", "quantized-not-declared"}


def test_all_findings_are_listed_not_the_first(checkpoint):
    directory = checkpoint("fp8")
    for expert in range(fixtures.EXPERTS):
        edit_values(directory, EXPERT.format(layer=1, expert=expert, name="w2") + ".weight_scale", first(0))
    drop(directory, W1 + ".weight_scale")
    (directory / "tokenizer.json").unlink()
    rules = [finding.rule for finding in lint(directory)]
    assert rules.count("scale-zero") == 4
    assert {"scale-missing", "tokenizer-missing"} <= set(rules)


def test_k3s_own_incomplete_ignore_list_is_a_warning_and_an_error_elsewhere(originals, checkpoint):
    """vLLM quantizes only the routed experts of K3's mxfp4 files, whatever the ignore list says."""
    found = [finding for finding in lint(originals / "native") if finding.rule == "declared-not-quantized"]
    stored_bf16 = {finding.tensor for finding in found}
    assert PREFIX + "layers.1.block_sparse_moe.routed_expert_up_proj.weight" in stored_bf16
    assert PREFIX + "layers.0.mlp_res_proj.weight" in stored_bf16
    assert not any("block_sparse_moe.gate" in name for name in stored_bf16)
    assert {finding.severity for finding in found} == {"warning"}
    directory = checkpoint("native")
    edit_json(directory, "config.json", lambda c: c["text_config"].update(model_type="other"))
    assert {f.severity for f in lint(directory) if f.rule == "declared-not-quantized"} == {"error"}


def test_kv_layers_are_the_attention_layers_only(checkpoint):
    directory = checkpoint("fp8")
    kv_scheme()(directory)
    (found,) = [finding for finding in lint(directory) if finding.rule == "kv-uncalibrated"]
    assert "none of the 1 layers that hold a KV cache (3)" in found.message


def test_headers_only_reads_no_tensor_bytes(checkpoint):
    directory = checkpoint("fp8")
    edit_values(directory, W1 + ".weight_scale", nan)
    assert errors(lint(directory)) and not errors(lint(directory, headers_only=True))


ODD = (None, -1, True, "x", ["x", 7], {"a": 7}, float("nan"))


def places_in(value, path=()):
    """Every place in a JSON value, as keys to follow."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places_in(inner, (*path, key))


@pytest.mark.parametrize("form", ["native", "nvfp4", "w4a16"])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_no_value_in_a_strangers_json_crashes_the_lint(checkpoint, form, name):
    """Whatever stands there is a finding or is said to be unreadable, never a traceback."""
    directory = checkpoint(form)
    original = json.loads((directory / name).read_text())
    if name == INDEX:
        original["weight_map"] = dict(list(original["weight_map"].items())[:3])
    for path in places_in(original):
        for odd in ODD:
            content = copy.deepcopy(original)
            place = content
            for key in path[:-1]:
                place = place[key]
            if path:
                place[path[-1]] = odd
            (directory / name).write_text(json.dumps(content if path else odd))
            try:
                found = lint(directory, headers_only=True)
            except Unreadable as error:
                assert name in str(error)
            else:
                assert all(finding.message and finding.remedy for finding in found)


BASE_CASES = [
    ("base-missing", lambda d: drop(d, PREFIX + "norm.weight"), "norm.weight"),
    (
        "base-extra",
        lambda d: put(d, PREFIX + "new.weight", "F32", np.ones(1, np.float32), beside=PREFIX + "norm.weight"),
        "new.weight",
    ),
    ("dtype-drift", lambda d: put(d, PREFIX + "norm.weight", "F32", np.ones(128, np.float32)), "BF16"),
    (
        "dtype-drift",
        lambda d: put(d, PREFIX + "layers.1.block_sparse_moe.gate.e_score_correction_bias", *fixtures.bf16(np.ones(4))),
        "e_score",
    ),
    ("shape-drift", lambda d: put(d, PREFIX + "norm.weight", *fixtures.bf16(np.ones(64))), "norm.weight"),
    ("shape-drift", lambda d: put(d, W1 + ".weight", "F8_E4M3", np.ones((64, 128), np.uint8)), W1),
    ("dtype-drift", lambda d: put(d, ATTENTION + "A_log", *fixtures.bf16(np.ones(2))), "A_log"),
    (
        "dtype-drift",
        lambda d: put(d, PREFIX + "layers.1.block_sparse_moe.gate.weight", "F16", np.ones((4, 128), np.float16)),
        "gate.weight: stored as F16, in the base BF16",
    ),
    ("base-extra", lambda d: put(d, W1 + ".bias", "F32", np.ones(1, np.float32), beside=W1 + ".weight"), W1 + ".bias"),
    ("aux-missing", lambda d: (d / "tokenizer_config.json").unlink(), "tokenizer_config.json: in the base, not here"),
    ("bytes-drift", lambda d: edit_values(d, ATTENTION + "dt_bias", first(7)), "dt_bias"),
    ("bytes-drift", lambda d: edit_values(d, PREFIX + "norm.weight", first(7)), "norm.weight"),
    ("config-drift", config(lambda c: c["text_config"].update(hidden_size=1)), "$.text_config"),
    ("aux-missing", lambda d: (d / "chat_template.jinja").unlink(), "chat_template.jinja"),
    ("aux-changed", lambda d: (d / "LICENSE").write_text("mine\n"), "LICENSE"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "damage", "names"), BASE_CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(BASE_CASES)])
def test_base_comparison(originals, checkpoint, rule, damage, names):
    directory = checkpoint("fp8")
    assert errors(lint(directory, base=originals / "native")) == []
    damage(directory)
    found = [finding for finding in lint(directory, base=originals / "native") if finding.rule == rule]
    assert any(names in str(finding) for finding in found), found


def test_a_router_that_was_rounded_is_told_with_what_that_moves():
    """https://github.com/sgl-project/sglang/pull/33764: of near-tied scores, bf16 keeps no order."""
    rng = np.random.default_rng(1)
    shared = rng.standard_normal((1, 64)) / 8
    weight = (shared + rng.standard_normal((896, 64)) * 1e-3).astype(np.float32)  # scores within about 1e-3
    bias = np.zeros(896, np.float32)
    rounded = numbers.round_bf16(weight), bias
    assert rules_base.other_choices((weight, bias), (weight.copy(), bias), 16) == 0
    assert rules_base.other_choices((weight, bias), rounded, 16) > rules_base.ROUTED_TOKENS // 2
    apart = (rng.standard_normal((896, 64)) / 8).astype(np.float32)
    moved = rules_base.other_choices((apart, bias), (numbers.round_bf16(apart), bias), 16)
    assert 0 < moved < rules_base.ROUTED_TOKENS // 4


@pytest.mark.parametrize("parameter", ["weight", "e_score_correction_bias"])
def test_a_drifted_router_is_a_finding_of_its_own(originals, checkpoint, parameter):
    directory, base = checkpoint("fp8"), originals / "native"
    gate = PREFIX + "layers.1.block_sparse_moe.gate"
    assert "router-drift" not in {finding.rule for finding in lint(directory, base=base)}
    edit_values(directory, f"{gate}.{parameter}", lambda values: np.copyto(values, values[::-1].copy()))
    (found,) = [finding for finding in lint(directory, base=base) if finding.rule == "router-drift"]
    assert found.tensor == gate + ".weight" and "go to another set of 2 experts" in found.message


def test_what_stands_beside_a_quantized_weight_is_compared_too(tmp_path):
    """The bias of a projection, as Qwen2 has it."""
    base = fixtures.write_k3(tmp_path / "base")
    fixtures.put(base, W1 + ".bias", *fixtures.bf16(np.ones(128)), beside=W1 + ".weight_packed")
    tensors, changed = fixtures.requantize_roughly(reread(base), fixtures.model_config(), "fp8")
    directory = fixtures.write_checkpoint(tmp_path / "fp8", tensors, changed)
    assert errors(lint(directory, base=base)) == []
    edit_values(directory, W1 + ".bias", first(7))
    assert [(f.rule, f.tensor) for f in errors(lint(directory, base=base))] == [("bytes-drift", W1 + ".bias")]
    put(directory, W1 + ".bias", "F32", np.ones(128, np.float32))
    assert [(f.rule, f.tensor) for f in errors(lint(directory, base=base))] == [("dtype-drift", W1 + ".bias")]
    drop(directory, W1 + ".bias")
    assert [(f.rule, f.tensor) for f in errors(lint(directory, base=base))] == [("base-missing", W1 + ".bias")]


def reread(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in fixtures.load(path).items()}


def test_experts_that_are_left_as_they_were_hold_the_same_bytes(originals, checkpoint):
    directory, base = checkpoint("native"), originals / "native"
    assert errors(lint(directory, base=base)) == []
    edit_values(directory, W1 + ".weight_packed", lambda codes: np.bitwise_xor(codes, 1, out=codes))
    edit_values(directory, W3 + ".weight_scale", first(100))
    drifted = [(f.rule, f.tensor) for f in errors(lint(directory, base=base))]
    assert drifted == [("bytes-drift", W1 + ".weight_packed"), ("bytes-drift", W3 + ".weight_scale")]


def test_a_pattern_that_does_not_compile_hides_no_other_finding(checkpoint):
    directory = checkpoint("fp8")
    quantization(lambda q: q["ignore"].extend(["re:.*(", "re:.*qkv_proj.*"]))(directory)
    drop(directory, W1 + ".weight_scale")
    assert {f.rule for f in lint(directory)} == {"pattern-invalid", "ignore-unmatched", "scale-missing"}


def test_modelopt_may_say_it_twice(checkpoint):
    directory = checkpoint("fp8")
    config(lambda c: c.update(quantization_config={"quant_method": "modelopt_fp4"}))(directory)
    sidecar("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})(directory)
    assert {f.rule for f in lint(directory)} == {"method-not-linted"}


DOWN = PREFIX + "layers.1.block_sparse_moe.routed_expert_down_proj.weight"


def smooth(directory, factors, declared=(DOWN,)):
    """Divide the rows of a bf16 matrix and declare it, as a calibrated recipe does."""

    def divide(bits):
        bits[:] = fixtures.bf16(numbers.bf16_values(bits) / factors[: len(bits), None])[1]

    edit_values(directory, DOWN, divide)
    (directory / "requantization.json").write_text(json.dumps({"calibration": {"changed_tensors": list(declared)}}))


def drift(directory, base):
    return {(finding.rule, finding.tensor) for finding in lint(directory, base=base) if finding.rule.endswith("-drift")}


def test_a_declared_smoothing_is_checked_row_by_row(originals, checkpoint):
    directory, base = checkpoint("fp8"), originals / "native"
    factors = np.exp(np.random.default_rng(0).standard_normal(1024)).astype(np.float32)
    smooth(directory, factors)
    assert drift(directory, base) == set()
    edit_values(directory, DOWN, lambda bits: bits.__setitem__((3, 5), bits[3, 5] ^ 0x8000))
    assert drift(directory, base) == {("smoothing-drift", DOWN)}


def test_a_smoothing_that_flips_signs_is_none(originals, checkpoint):
    directory = checkpoint("fp8")
    factors = np.ones(1024, np.float32)
    factors[2] = -1
    smooth(directory, factors)
    assert drift(directory, originals / "native") == {("smoothing-drift", DOWN)}


def test_a_smoothing_that_is_not_declared_or_not_allowed_is_a_drift(originals, checkpoint):
    directory, base = checkpoint("fp8"), originals / "native"
    smooth(directory, np.full(1024, 2, np.float32), declared=())
    assert drift(directory, base) == {("bytes-drift", DOWN)}
    norm = PREFIX + "norm.weight"
    edit_values(directory, norm, first(7))
    (directory / "requantization.json").write_text(json.dumps({"calibration": {"changed_tensors": [norm, DOWN, 7]}}))
    assert drift(directory, base) == {("bytes-drift", norm)}


def test_every_rule_has_a_checkpoint_broken_on_purpose():
    """The names of all findings, from the source of the lint, against those that the cases above break."""
    folder = Path(lint.__code__.co_filename).parent
    rules = set()
    for path in folder.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding" and call.args:
                constants = [node.value for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
                rules |= {value for value in constants if isinstance(value, str)}
    assert len(rules) > 50
    tested = {
        node.value
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert rules <= tested, f"never seen failing: {sorted(rules - tested)}"
