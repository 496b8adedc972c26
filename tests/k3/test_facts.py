"""Facts of real architectures, from their configs alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from pipeline.errors import Refused, Unreadable
from pipeline.k3 import (
    LayerKind,
    Role,
    ignore_patterns_without_match,
    kv_cache_scheme,
    model_facts,
    read_config,
    source_format,
)
from tests.plan import configs

KIMI_K3 = Path(__file__).resolve().parents[2] / "conf" / "model" / "kimi-k3"


@pytest.fixture(scope="module")
def config():
    return read_config(KIMI_K3)


@pytest.fixture(scope="module")
def facts(config):
    return model_facts(config)


def test_parameters_equal_the_published_count(facts):
    # 2,779,931,837,184 is what the model page counts.  The file stores A_log as 128 values a layer, of which the 96
    # heads use the first 96: 32 values x 69 layers are nobody's parameters.
    assert 2_779_931_837_184 - facts.parameters == 32 * 69


def test_experts_and_everything_else(facts):
    roles = facts.parameters_by_role()
    assert roles["expert"] == 2_722_740_830_208
    assert (facts.parameters - roles["expert"]) / 1e9 == pytest.approx(57.19, abs=0.005)
    text = facts.parameters - roles["expert"] - roles["vision"] - roles["projector"]
    assert text / 1e9 == pytest.approx(56.74, abs=0.01)


def test_only_the_24_mla_layers_bear_a_kv_cache(facts):
    # KDA layers have k_proj and v_proj too; counting by name would find 93.
    assert facts.kv_layers == tuple([*range(3, 92, 4), 92])
    assert len(facts.kv_layers) == 24 and len(facts.state_layers) == 69
    keys = {tensor.layer for tensor in facts.tensors if tensor.name.endswith("k_proj")}
    assert keys == set(facts.state_layers)


def test_fused_sets(facts):
    fused = {}
    for tensor in facts.tensors:
        if tensor.layer in (0, 3) and tensor.fused and not tensor.is_expert:
            fused.setdefault(tensor.fused, set()).add(tensor.name.rsplit(".", 1)[1])
    assert fused["in_proj_qkvgfab"] == {"q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"}
    assert fused["fused_qkv_a_g_proj"] == {"q_a_proj", "kv_a_proj_with_mqa", "g_proj"}
    assert fused["gate_up_proj"] == {"gate_proj", "up_proj"}


def test_float32_tensors_stay_float32(facts):
    single = {tensor.name.rsplit(".", 1)[1] for tensor in facts.tensors if tensor.dtype == "float32"}
    assert single == {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias"}


def test_the_router_is_never_quantizable(facts):
    routers = [tensor for tensor in facts.tensors if tensor.role is Role.ROUTER]
    assert len(routers) == 2 * 92 and not any(tensor.linear for tensor in routers)


def test_dense_layers_that_can_be_quantized(facts):
    able = sum(
        tensor.parameters
        for tensor in facts.tensors
        if tensor.role in (Role.SHARED_EXPERT, Role.DENSE_MLP) or tensor.name.endswith("self_attn.o_proj")
    )
    assert able / 1e9 == pytest.approx(21.1, abs=0.05)


@pytest.mark.parametrize(
    ("config", "billions", "kv_layers", "kinds"),
    [
        (configs.DEEPSEEK, 671.0, 61, {LayerKind.MLA}),
        (configs.QWEN3_NEXT, 79.7, 12, {LayerKind.GQA, LayerKind.GDN}),
        (configs.TINY_GQA, 0.00105, 4, {LayerKind.GQA}),
    ],
)
def test_other_families(config, billions, kv_layers, kinds):
    facts = model_facts(config)
    assert facts.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert len(facts.kv_layers) == kv_layers and set(facts.layer_kinds) == kinds


def test_kimi_linear_without_a_query_latent_or_full_rank_gate():
    config = copy.deepcopy(configs.TINY_K3["text_config"])
    config["q_lora_rank"] = None
    config["linear_attn_config"]["use_full_rank_gate"] = False
    del config["routed_expert_hidden_size"], config["attn_res_block_size"]
    names = {tensor.name.rpartition(".")[2] for tensor in model_facts(config).tensors}
    assert {"q_proj", "g_a_proj", "g_b_proj"} <= names
    assert not names & {"q_a_proj", "routed_expert_down_proj", "mlp_res_proj"}


def test_a_layer_in_both_lists_or_in_neither_is_named():
    config = copy.deepcopy(configs.TINY_K3)
    config["text_config"]["linear_attn_config"]["full_attn_layers"] = [3, 5]
    with pytest.raises(Unreadable, match=r"layers \[3, 4\]"):
        model_facts(config)


def test_a_missing_key_is_named():
    config = {key: value for key, value in configs.TINY_GQA.items() if key != "intermediate_size"}
    with pytest.raises(Unreadable, match="'intermediate_size'.*'llama'"):
        model_facts(config)


def test_sliding_windows_are_refused_rather_than_counted_as_full():
    with pytest.raises(Refused, match="sliding_attention"):
        model_facts(configs.TINY_GQA | {"layer_types": ["sliding_attention", "full_attention"] * 2})


def test_source_formats(config):
    source = source_format(config)
    assert (source.weights, source.where) == ("mxfp4", "text_config.quantization_config")
    assert not source_format(configs.TINY_GQA).is_quantized
    assert source_format(configs.k3("int8")).weights == "int8"


def test_an_unknown_format_is_refused_not_guessed(config):
    broken = copy.deepcopy(config)
    broken["text_config"]["quantization_config"]["format"] = "w5a3-pack"
    with pytest.raises(Refused, match="'w5a3-pack'"):
        source_format(broken)


def test_two_contradicting_quantization_configs_are_refused(config):
    both = copy.deepcopy(config) | {"quantization_config": configs.k3("fp8")["quantization_config"]}
    with pytest.raises(Refused, match="contradicting.*float-quantized.*mxfp4-pack-quantized"):
        source_format(both)


def test_an_ignore_pattern_without_a_match_is_found(config, facts):
    patterns = config["text_config"]["quantization_config"]["ignore"]
    assert ignore_patterns_without_match(patterns, facts) == []
    # A fused name: the engine has it, the checkpoint does not.
    assert ignore_patterns_without_match([*patterns, "re:.*qkv_proj.*", "lm_head"], facts) == ["re:.*qkv_proj.*"]


def test_kv_cache_scheme(config):
    assert kv_cache_scheme(config) is None
    with_scheme = copy.deepcopy(config)
    with_scheme["text_config"]["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    assert kv_cache_scheme(with_scheme) == {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"text_config": []}'])
def test_unreadable_configs(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Unreadable, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(Unreadable, match="no such file"):
        read_config(tmp_path / "nowhere")
