"""Weight bytes of the released model, per scheme, per rank, and the cuts that do not hold."""

from __future__ import annotations

import pytest

from pipeline.k3 import model_facts
from pipeline.plan.layout import Layout, stages
from pipeline.plan.request import load_model
from pipeline.plan.schemes import SCHEMES, scheme_of_recipe, storage_rule
from pipeline.plan.weights import bad_cuts, checkpoint_weights, fused_conflicts, rank_weights
from tests.plan import configs


@pytest.fixture(scope="module")
def k3():
    return load_model("kimi-k3")


def rule(model, quant):
    return storage_rule(model.config, model.facts, SCHEMES[quant])


@pytest.mark.parametrize(
    ("quant", "terabytes"),
    [
        ("native", 1.561),
        ("fp8", 2.837),
        ("fp8_channel", 2.840),
        ("int8", 2.837),
        ("w4a16_g128", 1.52),
        ("w4a16", 1.645),
        ("nvfp4", 1.645),
        ("fp8_all", 2.82),
        ("bf16", 5.56),
    ],
)
def test_checkpoint_sizes(k3, quant, terabytes):
    assert checkpoint_weights(k3.facts, rule(k3, quant)).total / 1e12 == pytest.approx(terabytes, rel=0.005)


def test_quantizing_the_dense_layers_saves_at_most_1_35_percent(k3):
    native, dense = (checkpoint_weights(k3.facts, rule(k3, quant)).total for quant in ("native", "fp8_dense"))
    assert 0.0130 < 1 - dense / native < 0.0136


def test_sums_by_role_and_by_dtype_agree(k3):
    for quant in SCHEMES:
        weights = checkpoint_weights(k3.facts, rule(k3, quant))
        assert weights.total == sum(weights.by_role.values()) == sum(weights.by_dtype.values())


def test_ranks_add_up_to_the_checkpoint_where_nothing_is_replicated(k3):
    whole = rank_weights(k3.facts, rule(k3, "native"), Layout(), "cuda", text_only=False)[0].total
    assert whole == checkpoint_weights(k3.facts, rule(k3, "native")).total


def test_pipeline_stages_add_up_to_one(k3):
    one = rank_weights(k3.facts, rule(k3, "native"), Layout(8), "cuda")[0].total
    assert sum(stage.total for stage in rank_weights(k3.facts, rule(k3, "native"), Layout(8, 4), "cuda")) == one


def test_pipeline_stages_as_the_engine_cuts_them():
    assert [len(part) for part in stages(93, 4)] == [23, 23, 24, 23]
    assert [len(part) for part in stages(93, 2)] == [47, 46]
    assert [len(part) for part in stages(10, 4)] == [2, 3, 3, 2]


def test_experts_are_cut_over_data_and_tensor_ranks(k3):
    def experts(layout):
        return rank_weights(k3.facts, rule(k3, "native"), layout, "cuda")[0].by_role["expert"]

    whole = experts(Layout())
    assert experts(Layout(8)) == whole / 8
    assert experts(Layout(8, data=2)) == whole / 16
    assert experts(Layout(4, data=4)) == whole / 16
    assert experts(Layout(1, data=16, expert=True)) == whole / 16  # 56 of 896 experts


def test_plain_tp8_does_not_fit_an_h200_and_tp8_dp2_does(k3):
    device = 143771 << 20
    plain, spread = (
        rank_weights(k3.facts, rule(k3, "native"), layout, "cuda")[0].total for layout in (Layout(8), Layout(8, data=2))
    )
    assert spread < device * 0.97 < plain


def test_the_engine_pads_a_192_wide_slice_of_an_expert_to_256(k3):
    def experts(platform, layout=Layout(16)):
        return rank_weights(k3.facts, rule(k3, "native"), layout, platform)[0].by_role["expert"]

    assert experts("cuda") == experts("cpu") * 256 // 192
    assert experts("cuda", Layout(16, expert=True)) == experts("cpu", Layout(16, expert=True))
    assert experts("cuda", Layout(8)) == experts("cpu", Layout(8))


def cuts(model, quant, layout):
    return {cut.tensor.split(".layers.*.")[1]: cut for cut in bad_cuts(model.facts, rule(model, quant), layout)}


def test_fp8_blocks_at_tp16_name_every_offender(k3):
    found = cuts(k3, "fp8_all", Layout(16))
    expert, dense = "block_sparse_moe.experts.{e}", "mlp"
    names = {f"{expert}.w1", f"{expert}.w2", f"{expert}.w3"} | {f"{dense}.{x}_proj" for x in ("gate", "up", "down")}
    assert set(found) == names
    assert "3072/16 = 192" in str(found[f"{expert}.w1"]) and "33792/16 = 2112" in str(found[f"{dense}.down_proj"])
    assert cuts(k3, "fp8_all", Layout(8)) == {}


@pytest.mark.parametrize(
    ("quant", "layout", "breaks"),
    [
        ("fp8", Layout(16), True),
        ("fp8", Layout(8, data=2), True),
        ("fp8", Layout(4, data=4), True),
        ("fp8", Layout(8, data=2, expert=True), False),
        ("fp8", Layout(16, expert=True), False),
        ("fp8_channel", Layout(16), False),
        ("int8", Layout(16), False),
        ("w4a16_g128", Layout(16), True),
        ("w4a16_g128", Layout(8), False),
        ("w4a16", Layout(16), False),
        ("native", Layout(16), False),
        ("nvfp4", Layout(16), False),
        ("native", Layout(64), True),  # 96 heads
    ],
)
def test_each_role_is_tested_on_its_own_degree(k3, quant, layout, breaks):
    assert bool(cuts(k3, quant, layout)) is breaks


@pytest.mark.parametrize(("group", "breaks"), [(128, True), (32, False)])
def test_a_group_that_straddles_a_rank(group, breaks):
    # https://github.com/vllm-project/vllm/pull/57792: a bare AssertionError in the engine.
    config = configs.QWEN3_NEXT | {"moe_intermediate_size": 640}
    facts = model_facts(config)
    chosen = scheme_of_recipe("w4a16", {"format": "w4a16", "group_size": group})
    cuts = bad_cuts(facts, storage_rule(config, facts, chosen), Layout(2))
    found = [str(cut) for cut in cuts if ".experts." in cut.tensor]
    said = "model.layers.*.mlp.experts.{e}.down_proj: 640/2 = 320, not a multiple of 128"
    assert found == ([said] if breaks else [])


def test_fp8_blocks_fall_back_to_channels_for_odd_dimensions():
    config = configs.k3()
    config["text_config"]["moe_intermediate_size"] = 192
    facts = model_facts(config)
    kinds = {stored.name for t in facts.distinct() if (stored := storage_rule(config, facts, SCHEMES["fp8"])(t))}
    assert kinds == {"fp8_channel"}


def test_a_torn_fused_set_is_found(k3):
    channel = rule(k3, "fp8_channel")
    torn = lambda tensor: channel(tensor) if tensor.name.endswith("w1") else None  # noqa: E731
    assert "w1 fp8_channel, w3 bf16" in fused_conflicts(k3.facts, torn)[0]
    assert fused_conflicts(k3.facts, channel) == []


@pytest.mark.parametrize("quant", ["native", "fp8", "fp8_channel", "int8", "w4a16", "nvfp4"])
def test_a_checkpoint_of_ours_weighs_the_same_as_the_plan_for_it(quant):
    """Planning a variant from the source, and planning the variant's own config as it is, agree."""

    def one_rank(config, key):
        facts = model_facts(config)
        return rank_weights(facts, storage_rule(config, facts, SCHEMES[key]), Layout(), "cpu")

    assert one_rank(configs.k3(), quant) == one_rank(configs.k3(quant), "native")
