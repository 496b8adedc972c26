"""Pages, blocks and groups: K3's two memories, by the numbers that the engine prints."""

from __future__ import annotations

import pytest

from pipeline.errors import Refused
from pipeline.k3 import model_facts
from pipeline.plan.cache import CacheSettings, kv_gain, kv_key, plan_cache, state_parts
from pipeline.plan.layout import Layout
from pipeline.plan.request import load_model
from tests.plan import configs

MIB = 1 << 20


@pytest.fixture(scope="module")
def facts():
    return load_model("kimi-k3").facts


def pool(facts, kv="auto", layout=Layout(), **settings):
    return plan_cache(facts, layout, CacheSettings(kv=kv, platform="cuda", **settings))[0]


@pytest.mark.parametrize(
    ("kv", "size"), [("auto", 27_648), ("fp8", 13_824), ("fp8_e5m2", 13_824), ("fp8_ds_mla", 15_744)]
)
def test_bytes_a_token(facts, kv, size):
    assert pool(facts, kv).kv_bytes_per_token == size
    assert pool(facts, kv, Layout(8)).kv_bytes_per_token == size  # the latent is replicated
    assert pool(facts, kv, Layout(8, decode_context=8)).kv_bytes_per_token == size // 8


def test_state_of_a_sequence(facts):
    plan = pool(facts)
    assert plan.state_recurrent_bytes * 69 / 1e6 == pytest.approx(434.1, abs=0.05)
    assert plan.state_convolution_bytes * 69 / 1e6 == pytest.approx(15.3, abs=0.05)
    assert plan.state_bytes / 1e6 == pytest.approx(449.4, abs=0.05)
    assert plan.state_bytes / MIB == pytest.approx(428.6, abs=0.05)


def test_state_is_sharded_by_heads_and_blind_to_an_fp8_cache(facts):
    assert pool(facts, "auto", Layout(8)).state_bytes / MIB == pytest.approx(53.6, abs=0.05)
    assert pool(facts, "fp8", Layout(8)).state_bytes == pool(facts, "auto", Layout(8)).state_bytes


def test_three_sizes_of_a_state_at_tp8(facts):
    plan = pool(facts, "auto", Layout(8), prefix_caching=False)
    assert plan.state_page_nominal == 814_080 and plan.state_page_padded == 884_736 == 768 * 1152
    assert plan.state_bytes_padded / MIB == pytest.approx(58.2, abs=0.05)
    # 69 layers in 3 groups of the 24 that an attention group has: 72 pages.
    assert plan.state_bytes_pool / MIB == pytest.approx(60.75)
    # `align` mode keeps a second block a group while it copies the state.
    assert pool(facts, "auto", Layout(8)).state_bytes_pool == 2 * plan.state_bytes_pool


@pytest.mark.parametrize(
    ("kv", "tensor", "block"),
    [("auto", 8, 768), ("fp8", 8, 1536), ("auto", 16, 384), ("fp8", 16, 768), ("auto", 4, 1536)],
)
def test_effective_block(facts, kv, tensor, block):
    assert pool(facts, kv, Layout(tensor)).block == block


def test_fp8_doubles_the_tokens_of_a_page_not_the_blocks(facts):
    auto, fp8 = (pool(facts, kv, Layout(8)) for kv in ("auto", "fp8"))
    assert (auto.page_bytes, auto.num_blocks(60 << 30)) == (fp8.page_bytes, fp8.num_blocks(60 << 30))
    assert fp8.block == 2 * auto.block


@pytest.mark.parametrize(
    ("layout", "bf16", "fp8"),
    [(Layout(), 16_250, 32_500), (Layout(8), 2_032, 4_063), (Layout(8, decode_context=8), 16_250, 32_500)],
)
def test_length_at_which_cache_and_state_tie(facts, layout, bf16, fp8):
    assert pool(facts, "auto", layout).tie_tokens == pytest.approx(bf16, rel=0.0005)
    assert pool(facts, "fp8", layout).tie_tokens == pytest.approx(fp8, rel=0.0005)


def test_what_fp8_gains_at_32k(facts):
    def gain(layout):
        return kv_gain(pool(facts, "auto", layout), pool(facts, "fp8", layout), 32_768)

    assert gain(Layout(8)) == pytest.approx(1.89, abs=0.005)
    assert gain(Layout()) == pytest.approx(1.50, abs=0.005)


@pytest.mark.parametrize(("length", "gibibytes"), [(1_048_576, 27.0)])
def test_a_million_tokens(facts, length, gibibytes):
    assert length * pool(facts).kv_bytes_per_token / (1 << 30) == gibibytes
    assert length * pool(facts, "fp8").kv_bytes_per_token / (1 << 30) == gibibytes / 2


def test_only_attention_layers_count():
    """https://github.com/vllm-project/vllm/issues/28228: an estimate that multiplies by all layers is absurd for a
    hybrid."""
    config = configs.k3()
    config["text_config"] |= {"num_hidden_layers": 4}
    config["text_config"]["linear_attn_config"] |= {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    assert pool(model_facts(config)).kv_bytes_per_token == (128 + 16) * 2


def test_groups_of_a_model_with_nearly_as_many_of_each_kind():
    """3 KDA and 2 MLA: 3 < 2 x 1.5 is false, so the group size is 2 and the KDA layers take two groups."""
    plan = pool(model_facts(configs.TINY_K3), block_size=128)
    assert (plan.attention_groups, plan.state_groups, plan.bytes_per_block) == (1, 2, 2 * 256 * 288)
    config = configs.k3()
    config["text_config"] |= {"num_hidden_layers": 9}
    config["text_config"]["linear_attn_config"] |= {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": [6, 7, 8, 9]}
    plan = pool(model_facts(config), block_size=128)
    assert (plan.attention_groups, plan.state_groups, plan.bytes_per_block) == (1, 1, 5 * 256 * 288)


def test_pipeline_stages_share_the_groups_of_the_whole(facts):
    whole = plan_cache(facts, Layout(8), CacheSettings(platform="cuda"))[0]
    parts = plan_cache(facts, Layout(8, 2), CacheSettings(platform="cuda"))
    assert sum(part.kv_layers for part in parts) == 24 and sum(part.state_layers for part in parts) == 69
    assert {part.blocks(32_768) for part in parts} == {whole.blocks(32_768)}
    assert max(part.bytes_per_block for part in parts) < whole.bytes_per_block


def test_gqa_heads_are_sharded_until_there_is_one():
    facts = model_facts(configs.TINY_GQA)
    sizes = [pool(facts, "auto", Layout(tensor)).kv_bytes_per_token for tensor in (1, 2, 4)]
    assert sizes == [4 * 2 * 2 * 32 * 2, 4 * 2 * 32 * 2, 4 * 2 * 32 * 2]


def test_qwen3_next_state():
    facts = model_facts(configs.QWEN3_NEXT)
    state = state_parts(facts, Layout(), CacheSettings(platform="cuda"))
    assert state == {"recurrent": 32 * 128 * 128 * 2, "convolution": (2 * 16 * 128 + 32 * 128) * 3 * 2}
    assert len(facts.state_layers) == 36


def test_a_larger_requested_block_is_kept():
    facts = model_facts(configs.TINY_K3)
    assert [pool(facts, block_size=size).block for size in (16, 64, 128, 256, 1024)] == [256, 256, 256, 256, 1024]


def test_longest_and_concurrency_are_consistent(facts):
    plan = pool(facts, "fp8", Layout(8))
    budget = 60 << 30
    longest = plan.longest(budget)
    assert plan.concurrency(budget, longest) == 1
    assert plan.concurrency(budget, longest + 1) == 0
    assert plan.concurrency(0, 1) == 0 and plan.longest(0) == 0


def test_kv_keys():
    assert kv_key("fp8") == ("fp8", "auto")
    assert kv_key("fp8_state16") == ("fp8", "bfloat16")
    with pytest.raises(Refused, match="state dtype '8'"):
        kv_key("fp8_state8")
    with pytest.raises(Refused, match="int3"):
        pool(model_facts(configs.TINY_K3), "int3")


def test_a_bf16_state_halves_the_recurrent_part(facts):
    assert pool(facts, state_dtype="bfloat16").state_recurrent_bytes * 2 == pool(facts).state_recurrent_bytes
