"""Recipes are checked values; scopes select from names alone and refuse what would not load."""

import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.errors import Refused
from pipeline.quant import scope
from pipeline.quant.recipe import Recipe
from tests.checkpoint import fixtures
from tests.checkpoint.fixtures import PREFIX, edit_json


def test_recipes_fill_in_what_their_format_implies():
    assert Recipe.from_params({"format": "w4a16"}) == Recipe("w4a16", "experts", 32, "amax")
    assert Recipe.from_params({"format": "fp8_block", "scope": "dense_too"}).scale == "pow2"
    assert Recipe("w4a16").sha256 != Recipe("w4a16", group_size=128).sha256
    assert Recipe("fp8_block").sha256 == Recipe.from_params({"format": "fp8_block", "scale": "pow2"}).sha256


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"format": "int3"}, "format 'int3' is unknown"),
        ({"scope": "experts"}, "has no format"),
        ({"format": "w4a16", "groupsize": 32}, "unknown keys groupsize"),
        ({"format": "w4a16", "group_size": 48}, "takes group_size"),
        ({"format": "int8_channel", "group_size": 32}, "takes no group_size"),
        ({"format": "fp8_block", "scale": "mse"}, "scale 'mse'"),
        ({"format": "fp8_block", "scope": "dense-too"}, "scope 'dense-too'"),
    ],
)
def test_wrong_recipes_are_refused(params, says):
    with pytest.raises(Refused, match=says):
        Recipe.from_params(params)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return fixtures.write_k3(tmp_path_factory.mktemp("k3") / "k3")


def selected(directory, recipe):
    checkpoint = Checkpoint.open(directory)
    modules = scope.modules_of(checkpoint)
    return modules, {module.name for module in scope.select(checkpoint, modules, recipe)}


def test_scopes_of_k3(k3):
    modules, experts = selected(k3, Recipe("fp8_block"))
    assert experts == {name for name in modules if ".experts." in name} and len(experts) == 36
    _, dense = selected(k3, Recipe("fp8_block", "dense_only"))
    kinds = {modules[name].kind for name in dense}
    assert kinds == {
        "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj",
        "block_sparse_moe.shared_experts.down_proj",
    }  # fmt: skip
    _, both = selected(k3, Recipe("fp8_block", "dense_too"))
    assert both == experts | dense


def test_a_gqa_model_has_no_experts_and_its_projections_are_dense(tmp_path):
    tensors = {}
    for name, shape in (
        (
            "self_attn.q_proj", (64, 64)
        ), ("self_attn.k_proj", (32, 64)), ("self_attn.v_proj", (32, 64)), ("self_attn.o_proj", (64, 64)),
        ("mlp.gate_proj", (128, 64)), ("mlp.up_proj", (128, 64)), ("mlp.down_proj", (64, 128)),
    ):  # fmt: skip
        tensors[f"model.layers.0.{name}.weight"] = fixtures.bf16(fixtures.np.ones(shape))
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = fixtures.bf16(fixtures.np.ones((8, 64)))
    directory = fixtures.write_checkpoint(tmp_path / "gqa", tensors, {"model_type": "qwen3", "num_hidden_layers": 1}, 1)
    modules, chosen = selected(directory, Recipe("fp8_channel"))
    assert selected(directory, Recipe("fp8_channel", "dense_too")) == (modules, chosen)
    assert set(modules) - chosen == {"model.embed_tokens", "lm_head"}
    assert scope.ignore_list(modules, chosen) == ["re:.*lm_head$", "re:.*embed_tokens$"]
    edit_json(directory, "config.json", lambda config: config.update(num_experts=8))
    with pytest.raises(Refused, match="scope experts matches none of 9 weight matrices; use scope dense_too"):
        selected(directory, Recipe("fp8_channel"))


def test_the_ignore_list_is_complete_and_every_pattern_matches(k3):
    modules, chosen = selected(k3, Recipe("fp8_block"))
    patterns = scope.ignore_list(modules, chosen)
    matcher = scope.declared.Matcher(patterns)
    assert {name for name in modules if matcher.first(name)} == set(modules) - chosen
    used = set().union(*(matcher.all(name) for name in modules))
    assert used == set(patterns)
    # An engine asks for its fused names too.
    for fused in ("self_attn.in_proj_qkvgfab", "self_attn.fused_qkv_a_g_proj", "mlp.gate_up_proj"):
        assert matcher.first(f"{PREFIX}layers.0.{fused}")


def test_dense_scopes_ignore_attention_inputs_by_fused_name_but_not_o_proj(k3):
    modules, chosen = selected(k3, Recipe("fp8_block", "dense_too"))
    matcher = scope.declared.Matcher(scope.ignore_list(modules, chosen))
    assert matcher.first(PREFIX + "layers.0.self_attn.in_proj_qkvgfab")
    assert not matcher.first(PREFIX + "layers.0.self_attn.o_proj")


def test_a_torn_fused_set_is_refused(k3, monkeypatch):
    monkeypatch.setattr(scope, "K3_DENSE", scope.re.compile(r"\.self_attn\.(o_proj|q_proj)$"))
    with pytest.raises(Refused, match=r"part of 3 fused sets.*\n.*k_proj \(left out\)"):
        selected(k3, Recipe("fp8_block", "dense_too"))


@pytest.mark.parametrize("form", ["fp8", "w4a16", "nvfp4", "int8"])
def test_a_source_in_another_format_is_refused_by_name(tmp_path, form):
    directory = fixtures.write_rough(tmp_path / form, form)
    name = {
        "fp8": "float-quantized", "w4a16": "pack-quantized", "nvfp4": "nvfp4-pack-quantized", "int8": "int-quantized"
    }[form]
    with pytest.raises(Refused, match=rf"already quantized at \$\.quantization_config \({name}\)"):
        selected(directory, Recipe("fp8_block"))


def test_other_methods_and_contradictions_are_refused(tmp_path):
    directory = fixtures.write_k3(tmp_path / "k3")
    edit_json(directory, "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(Refused, match=r"contradicting .*\$\.quantization_config.*\$\.text_config"):
        selected(directory, Recipe("fp8_block"))
    edit_json(directory, "config.json", lambda c: c["text_config"].pop("quantization_config"))
    with pytest.raises(Refused, match="method gptq"):
        selected(directory, Recipe("fp8_block"))


def test_float8_weights_without_a_config_are_refused(tmp_path):
    directory = fixtures.write_rough(tmp_path / "fp8", "fp8")
    edit_json(directory, "config.json", lambda c: c.pop("quantization_config"))
    with pytest.raises(Refused, match=r"36 weights in scope are neither MXFP4 nor floats.*\n.*is F8_E4M3"):
        selected(directory, Recipe("int8_channel"))


def test_packed_weights_without_scale_or_config_are_all_listed(tmp_path):
    directory = fixtures.write_k3(tmp_path / "k3")
    for expert in (0, 1):
        fixtures.drop(directory, fixtures.EXPERT.format(layer=2, expert=expert, name="w1") + ".weight_scale")
    with pytest.raises(Refused, match=r"2 weights cannot be read.*\n.*experts\.0\.w1.*\n.*experts\.1\.w1"):
        selected(directory, Recipe("fp8_block"))
    edit_json(directory, "config.json", lambda c: c["text_config"].pop("quantization_config"))
    with pytest.raises(Refused, match="is packed, but config.json has no quantization_config"):
        selected(directory, Recipe("fp8_block"))
