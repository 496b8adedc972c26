"""The same with the compressed-tensors that the server pins, and what vLLM's own matching makes of each config."""

import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer

from pipeline.quant import Recipe, engine
from tests.checkpoint import fixtures
from tests.checkpoint.fixtures import EXPERT, PREFIX
from tests.quant.test_roundtrip_quant import RECIPES, test_decompression  # noqa: F401 - collected here again

# models/kimi_k3/nvidia/model.py of vLLM 0.32; w13 is the plugin's.
FUSED = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvgfab": ["q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"],
    "conv1d": ["q_conv1d", "k_conv1d", "v_conv1d"],
    "fused_qkv_a_g_proj": ["q_a_proj", "kv_a_proj_with_mqa", "g_proj"],
    "w13": ["w1", "w3"],
}
LAYER = PREFIX + "layers.{}."
ALWAYS_PLAIN = [
    LAYER.format(1) + "self_attn.in_proj_qkvgfab",
    LAYER.format(1) + "self_attn.conv1d",
    LAYER.format(1) + "self_attn.f_b_proj",
    LAYER.format(3) + "self_attn.fused_qkv_a_g_proj",
    LAYER.format(3) + "self_attn.q_b_proj",
    LAYER.format(3) + "self_attn.kv_b_proj",
    LAYER.format(1) + "block_sparse_moe.gate",
    LAYER.format(1) + "block_sparse_moe.routed_expert_down_proj",
    LAYER.format(1) + "block_sparse_moe.routed_expert_up_proj",
    LAYER.format(1) + "mlp_res_proj",
    "language_model.lm_head",
]
DENSE = [
    LAYER.format(1) + "self_attn.o_proj",
    LAYER.format(0) + "mlp.gate_up_proj",
    LAYER.format(0) + "mlp.down_proj",
    LAYER.format(1) + "block_sparse_moe.shared_experts.gate_up_proj",
    LAYER.format(1) + "block_sparse_moe.shared_experts.down_proj",
]
EXPERTS = [EXPERT.format(layer=2, expert=3, name=name) for name in ("w13", "w2", "w1", "w3")]


class ColumnParallelLinear(SimpleNamespace):
    """vLLM asks for the module's class name only."""


def test_the_pinned_library_is_another_than_the_one_that_quantizes():
    assert version("compressed-tensors") == "0.17.0"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.format}-{r.scope}-{r.group_size}")
def test_vllm_matches_every_fused_layer_as_stored(tmp_path, recipe):
    source = fixtures.write_k3(tmp_path / "source")
    engine.requantize(source, tmp_path / "out", recipe)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    format_of = {target: group["format"] for group in config["config_groups"].values() for target in group["targets"]}

    def found(layer):
        if should_ignore_layer(layer, config["ignore"], FUSED):
            return None
        return format_of.get(find_matched_target(layer, ColumnParallelLinear(), format_of, FUSED))

    target = {"fp8_block": "float-quantized", "fp8_channel": "float-quantized", "int8_channel": "int-quantized",
              "nvfp4": "nvfp4-pack-quantized"}.get(recipe.format, "pack-quantized")  # fmt: skip
    for layer in ALWAYS_PLAIN:
        assert found(layer) is None, layer
    for layer in DENSE:
        assert found(layer) == (None if recipe.scope == "experts" else target), layer
    for layer in EXPERTS:
        assert found(layer) == ("mxfp4-pack-quantized" if recipe.scope == "dense_only" else target), layer


def test_a_torn_ignore_list_would_be_refused_by_vllm():
    """What the check above rests on: vLLM raises where a fused layer's parts disagree."""
    with pytest.raises(ValueError, match="different quantization schemes"):
        should_ignore_layer("x.gate_up_proj", ["re:.*gate_proj$"], FUSED)


def test_recipes_cover_every_format():
    assert {recipe.format for recipe in RECIPES} >= {"fp8_block", "fp8_channel", "int8_channel", "w4a16", "nvfp4"}
    assert Recipe("fp8_block", "dense_only") in RECIPES
