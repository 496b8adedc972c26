"""Every refusal names its offenders and a request that works; a refusal that never fires would be worse than none."""

from __future__ import annotations

import copy

import pytest

from pipeline.errors import Refused, Unreadable
from pipeline.plan import hardware as machines
from pipeline.plan.alternatives import plan
from pipeline.plan.request import Overrides
from pipeline.plan.request import load_model
from tests.plan import configs


@pytest.fixture(scope="module")
def k3():
    return load_model("kimi-k3")


def only(result, rule):
    """The message of the refusal under ``rule``; fails where it is missing."""
    found = [refusal for refusal in result.refusals if refusal.rule == rule]
    assert found, [refusal.rule for refusal in result.refusals]
    return found[0]


def works(model, text, quant, kv):
    """Follow a printed alternative: it must plan without a refusal."""
    first = text.split("; or ")[0]
    if first.startswith("quant "):
        other, machine = first.removeprefix("quant ").split(" on ")
        return not plan(model, machine, other, kv).refusals
    if first.startswith("kv auto on "):
        return not plan(model, first.removeprefix("kv auto on "), quant, "auto").refusals
    variant, machine = first.split(" on ")
    return not plan(model, machine, *variant.rsplit("-", 1)).refusals


def test_fp8_blocks_at_tp16(k3):
    refusal = only(plan(k3, "gb200x16", "fp8", "fp8"), "divisibility")
    assert "experts.{e}.w1: 3072/16 = 192, not a multiple of 128" in refusal.message
    # Out of this scheme's scope, and named all the same.
    assert "mlp.down_proj: 33792/16 = 2112, not a multiple of 128" in refusal.message
    assert "'" not in refusal.alternative and works(k3, refusal.alternative, "fp8", "fp8")


def test_w4a16_g128_at_tp16(k3):
    refusal = only(plan(k3, "gb200x16", "w4a16_g128", "fp8"), "divisibility")
    assert "experts.{e}.w2: 3072/16 = 192, not a multiple of 128" in refusal.message
    assert refusal.alternative.startswith("quant w4a16 on gb200x16")
    assert works(k3, refusal.alternative, "w4a16_g128", "fp8")


def test_experts_cut_over_data_parallel_ranks_are_told(k3):
    refusal = only(plan(k3, "h200x16", "fp8"), "divisibility")
    assert "data x tensor = 16 ranks" in refusal.message


def test_fp8_kv_on_hopper(k3):
    refusal = only(plan(k3, "h200x16", "native", "fp8"), "compatibility")
    assert "Blackwell only" in refusal.message and "/issues/51313" in refusal.message
    assert refusal.alternative.startswith("kv auto on h200x16") and works(k3, refusal.alternative, "native", "fp8")
    assert plan(k3, "h200x16", "native", "auto").refusals == []


def test_fp8_kv_on_hopper_is_fine_for_a_gqa_model():
    assert not [r for r in plan(configs.TINY_GQA, "h200x16", "native", "fp8").refusals if r.rule == "compatibility"]


@pytest.mark.parametrize(("quant", "gigabytes"), [("fp8", "365.6 GB"), ("fp8_all", "362.9 GB"), ("int8", "366.9 GB")])
def test_fp8_or_int8_of_the_whole_model_on_8_b300(k3, quant, gigabytes):
    refusal = only(plan(k3, "b300x8", quant, "fp8"), "weights")
    assert gigabytes in refusal.message and "274.0 GB of 288.4 GB" in refusal.message
    assert "b300x16" in refusal.alternative and works(k3, refusal.alternative, quant, "fp8")


def test_every_scheme_fits_some_machine(k3):
    for quant in ("native", "fp8", "fp8_channel", "fp8_dense", "fp8_all", "int8", "w4a16", "w4a16_g128", "nvfp4"):
        results = [plan(k3, name, quant, "auto", alternatives=False) for name in machines.available()]
        assert any(not result.refusals for result in results if result.hardware != "cpu"), quant


def test_max_num_seqs_above_the_state_blocks(k3):
    blocks = plan(k3, "b300x8", "native", "fp8").num_blocks
    overrides = Overrides(max_num_seqs=blocks + 200, max_num_batched_tokens=16384)
    refusal = only(plan(k3, "b300x8", "native", "fp8", overrides=overrides), "max_num_seqs")
    assert f"max_num_seqs {blocks + 200} exceeds the" in refusal.message and "max_num_seqs" in refusal.alternative
    assert plan(k3, "b300x8", "native", "fp8", overrides=Overrides(max_num_seqs=blocks - 200)).refusals == []


def test_max_num_seqs_that_start_but_are_never_reached_are_a_warning(k3):
    result = plan(k3, "b300x8", "native", "fp8")
    assert result.refusals == [] and result.max_num_seqs == 1024
    assert any("max_num_seqs 1024 is never reached" in warning for warning in result.warnings)


def test_max_model_len_above_what_fits():
    overrides = Overrides(kv_cache_memory_bytes=4 << 20)
    result = plan(configs.TINY_K3, "cpu", "native", "auto", overrides=overrides)
    refusal = only(result, "max_model_len")
    longest = result.longest_sequence_tokens
    assert f"Longest that fits: {longest} tokens" in refusal.message and "8192" in refusal.message
    assert f"max_model_len {longest}" in refusal.alternative
    fitting = Overrides(kv_cache_memory_bytes=4 << 20, max_model_len=longest)
    assert plan(configs.TINY_K3, "cpu", "native", "auto", overrides=fitting).refusals == []
    above = Overrides(kv_cache_memory_bytes=4 << 20, max_model_len=longest + 1)
    assert only(plan(configs.TINY_K3, "cpu", "native", "auto", overrides=above), "max_model_len")


def test_max_model_len_above_the_models_positions():
    result = plan(configs.TINY_K3, "cpu", overrides=Overrides(max_model_len=16385))
    refusal = only(result, "context")
    assert "16385 is above the model's 16384" in refusal.message and refusal.alternative == "max_model_len 16384"


def test_a_prefill_of_half_a_million_tokens_in_one_step(k3):
    # https://github.com/MoonshotAI/Kimi-K3/issues/26: the KV pool fits and the activations do not.
    assert plan(k3, "b300x8", "native", "fp8").refusals == []
    overrides = Overrides(max_num_batched_tokens=524_288)
    refusal = only(plan(k3, "b300x8", "native", "fp8", overrides=overrides), "activation")
    assert "524288 tokens" in refusal.message and "routed experts" in refusal.message
    assert "max_num_batched_tokens 16384" in refusal.alternative


def test_a_long_prefill_is_part_of_the_budget(k3):
    small, large = (
        plan(k3, "b300x8", "native", "fp8", overrides=Overrides(max_num_batched_tokens=tokens))
        for tokens in (8192, 65_536)
    )
    lost = small.kv_pool_bytes - large.kv_pool_bytes
    assert lost == large.activation_worst_bytes - small.activation_worst_bytes > 10e9


def test_prefix_caching_that_can_never_hit_is_a_warning(k3):
    # https://github.com/vllm-project/vllm/pull/48402: 0 hits of 10 608 queries, and no word about it.
    def inert(length, kv, **settings):
        result = plan(k3, "b300x8", "native", kv, overrides=Overrides(max_model_len=length, **settings))
        assert result.refusals == []
        return [warning for warning in result.warnings if "inert" in warning]

    assert "effective block of 1536 tokens is longer than max_model_len 1535" in inert(1535, "fp8")[0]
    assert inert(1536, "fp8") == [] and inert(1535, "auto") == [] and len(inert(767, "auto")) == 1
    assert inert(1535, "fp8", prefix_caching=False) == []


@pytest.mark.parametrize("kv", ["nvfp4", "nvfp4_4over6"])
def test_an_accepted_but_garbage_combination_is_refused(kv):
    with pytest.raises(Refused, match=f"kv {kv} on cpu: .*decodes garbage.*use auto"):
        plan(configs.TINY_GQA, "cpu", "native", kv)


def test_mla_of_others_has_no_fp8_cache_on_cpu():
    refusal = only(plan(configs.DEEPSEEK, "cpu", "bf16", "fp8"), "compatibility")
    assert "Float8_e4m3fn" in refusal.message


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pipeline_parallel": 2}, "pipeline stages"),
        ({"tensor_parallel": 2, "decode_context_parallel": 2}, "by position"),
        ({"expert_parallel": True}, "expert parallelism"),
    ],
)
def test_what_the_cpu_plugin_cannot_do(layout, said):
    assert said in only(plan(configs.TINY_K3, "cpu", overrides=Overrides(**layout)), "compatibility").message


def test_an_engine_that_is_too_old(k3):
    def versions(version, quant):
        return [r for r in plan(k3, "b300x16", quant, overrides=Overrides(engine_version=version)).refusals]

    assert "first release with Kimi K3" in versions("0.26.3", "native")[0].message
    assert versions("0.27.1", "native") == []
    # https://github.com/vllm-project/vllm/pull/50500: ignored modules are treated as quantized.
    assert "pull/50500" in versions("0.27.1", "nvfp4")[0].message
    assert versions("0.32.0", "nvfp4") == []


@pytest.mark.parametrize("quant", ["fp8", "int8", "w4a16_gptq"])
def test_an_already_quantized_source_is_not_quantized_again(quant):
    result = plan(configs.k3("fp8_channel"), "cpu", quant)
    message = only(result, "source_format").message
    assert "already float8" in message and "float-quantized" in message and "oneshot" in message
    assert result.requantization == "refused"
    assert plan(configs.k3("fp8_channel"), "cpu", "native").refusals == []


def test_how_the_source_becomes_the_variant(k3):
    assert plan(k3, "b300x16", "native").requantization == "none: served as published"
    assert "look-up" in plan(k3, "b300x16", "fp8").requantization
    assert "dequantize" in plan(k3, "b300x16", "w4a16_gptq").requantization
    assert "round to nearest" in plan(configs.TINY_GQA, "cpu", "w4a16").requantization


@pytest.mark.parametrize("quant", ["w4a16_gptq", "w4a16_awq", "int8_sq", "nvfp4"])
def test_what_the_engine_cannot_make_of_another_architecture_is_refused_here(quant):
    result = plan(configs.TINY_GQA, "cpu", quant)
    refusal = only(result, "source_format")
    assert quant in refusal.message and result.requantization == "refused"
    assert ("Kimi K3's layout only" in refusal.message) == (quant != "nvfp4")
    assert refusal.alternative.startswith("quant ")


def test_a_recipe_is_calibrated_by_what_it_says_not_by_its_key():
    recipe = {"format": "w4a16", "group_size": 32, "calibration": {"method": "gptq"}}
    assert "calibrated" in plan(configs.TINY_K3, "cpu", "mine", recipe=recipe).requantization


def test_a_kv_cache_scheme_that_no_engine_reads(k3):
    config = copy.deepcopy(k3.config)
    config["text_config"]["quantization_config"]["kv_cache_scheme"] = {"num_bits": 4, "type": "float"}
    message = only(plan(config, "b300x8"), "kv_cache_scheme").message
    assert "4-bit float" in message and "the 24 layers" in message and "3, 7, 11" in message and "88" not in message


def test_an_ignore_pattern_that_matches_nothing(k3):
    config = copy.deepcopy(k3.config)
    config["text_config"]["quantization_config"]["ignore"].append("re:.*qkv_proj.*")
    assert "re:.*qkv_proj.*" in only(plan(config, "b300x8"), "ignore_pattern").message


def test_an_ignore_pattern_that_does_not_compile(k3):
    config = copy.deepcopy(k3.config)
    config["text_config"]["quantization_config"]["ignore"].append("re:.*(")
    assert "re:.*(" in only(plan(config, "b300x8"), "ignore_pattern").message


@pytest.mark.parametrize("value", ["fp8", ["fp8"], 8])
def test_a_quantization_config_that_is_none(k3, value):
    config = copy.deepcopy(k3.config) | {"quantization_config": value}
    with pytest.raises(Unreadable, match="quantization_config is .*expected a JSON object"):
        plan(config, "b300x8")


def places_in(value, path=()):
    """Every place inside a JSON value, as keys to follow."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places_in(inner, (*path, key))


@pytest.mark.parametrize("name", ["native", "fp8", "gqa"])
def test_no_value_in_a_strangers_config_crashes_the_plan(name):
    """Whatever stands there is planned, refused or said to be unreadable, never a traceback."""
    original = configs.TINY_GQA if name == "gqa" else configs.k3(name)
    for path in places_in(original):
        for odd in (None, -1, "re:(", ["x", 7], {"a": 7}, float("nan")):
            config = copy.deepcopy(original)
            place = config
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = odd
            try:
                assert plan(config, "cpu", "native", alternatives=False).verdict
            except (Refused, Unreadable) as error:
                assert str(error)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "7168"}, "text_config.hidden_size is '7168'"),
        ({"num_attention_heads": 0}, "text_config.num_attention_heads is 0"),
        ({"linear_attn_config": [3]}, r"linear_attn_config is \[3\], expected a JSON object"),
        ({"quantization_config": {"ignore": "lm_head"}}, "ignore is 'lm_head', expected list"),
    ],
)
def test_a_malformed_config_is_named(change, says):
    config = configs.k3()
    config["text_config"] |= change
    with pytest.raises(Unreadable, match=says):
        plan(config, "cpu")


def test_a_batch_smaller_than_its_sequences():
    result = plan(configs.TINY_K3, "cpu", overrides=Overrides(max_num_seqs=64, max_num_batched_tokens=32))
    assert "below max_num_seqs 64" in only(result, "max_num_batched_tokens").message


def test_keys_that_do_not_exist():
    with pytest.raises(Refused, match="fp9.*fp8_channel"):
        plan(configs.TINY_K3, "cpu", "fp9")
    with pytest.raises(Unreadable, match="b3000x8.*b300x8"):
        plan(configs.TINY_K3, "b3000x8")
    with pytest.raises(Refused, match="decode context parallel size 3 does not divide"):
        plan(configs.TINY_K3, "cpu", overrides=Overrides(decode_context_parallel=3))


def test_marginal_is_told_apart_from_yes_and_no():
    """Where the answer turns within the model's own error, neither yes nor no is honest."""
    verdicts = []
    for mebibytes in range(30, 200, 2):
        machine = copy.copy(machines.load("cpu"))
        memory = machines.Memory(mebibytes << 20, "test", mebibytes << 20, "test")
        machine = machines.Hardware(**{**machine.__dict__, "memory": memory, "flags": {}})
        verdicts.append(plan(configs.TINY_K3, machine, overrides=Overrides(max_model_len=8192)).fits)
    assert verdicts == sorted(verdicts, key=["no", "marginal", "yes"].index)
    assert set(verdicts) == {"no", "marginal", "yes"}


def test_labels_of_a_quantized_cache(k3):
    assert plan(k3, "b300x8", kv="fp8").kv_label == "scale_1.0"
    assert plan(k3, "b300x8", kv="auto").kv_label == "unquantized"
    assert any("scale 1.0" in warning for warning in plan(k3, "b300x8", kv="fp8").warnings)


def test_fp8_kv_below_the_tie_is_told():
    result = plan("kimi-k3", "b300x8", kv="fp8", overrides=Overrides(max_model_len=2048))
    assert any("gains little" in warning for warning in result.warnings)


def test_a_machine_whose_recipe_is_longer_than_the_model_is_told_the_models_length():
    refused = plan("tiny-gqa", "b300x8").refusals
    assert [refusal.rule for refusal in refused] == ["context"]
    assert refused[0].alternative.startswith("max_model_len 8192")
