"""Native K3 served in float32: the definition's logits, however a request is batched, cut, cached or continued."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from conftest import prompt, running
from reference import Reference
from safetensors.torch import load_file

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(native):
    with running(native[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(native):
    return Reference(tiny.TEXT_CONFIG, native[1])


def assert_close(got, want, tolerance=TOLERANCE):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def test_logits_are_those_of_the_definition(engine, reference):
    ids = prompt(100)
    assert_close(engine.logits(ids)[0], reference(ids))


def test_decode_equals_prefill(engine):
    ids = prompt(70, seed=2)
    tokens, decoded, _ = engine.continuation(ids, new_tokens=12)[0]
    prefilled = engine.logits(ids + tokens)[0]
    assert_close(decoded, prefilled[len(ids) - 1 : -1])


def test_batch_equals_solo(engine):
    prompts = [prompt(length, seed=length) for length in (1, 5, 37, 130, 64, 16)]
    batch = engine.logits(*prompts, new_tokens=6)
    for ids, together in zip(prompts, batch, strict=True):
        assert_close(together, engine.logits(ids, new_tokens=6)[0])


def test_shared_prefix_cut_in_mid_block_answers_as_a_cold_cache(engine):
    """Blocks hold 256 tokens; the second request shares 600 of 700 and may reuse two blocks, no more."""
    first = prompt(700, seed=3)
    second = first[:600] + prompt(90, seed=4)
    engine.llm.reset_prefix_cache()
    cold = engine.continuation(second)[0]
    engine.llm.reset_prefix_cache()
    engine.continuation(first)
    warm = engine.continuation(second)[0]
    again = engine.continuation(first)[0]
    assert (cold[2], warm[2], again[2]) == (0, 512, 512)
    assert warm[0] == cold[0]
    assert_close(warm[1], cold[1])


def test_memory_report_leaves_cached_state_alone(engine):
    """A dummy batch of 512 tokens writes the state block of a 512-token prefix, which the finished request's row still
    names."""
    ids = prompt(600, seed=5)
    engine.llm.reset_prefix_cache()
    cold = engine.continuation(ids)[0]
    engine.llm.collective_rpc("memory_report", kwargs={"num_tokens": 512})
    warm = engine.continuation(ids)[0]
    assert warm[2] == 512
    assert_close(warm[1], cold[1])


# The tests below start engines of their own; one process holds one at a time, so the shared one is used above only.


def test_chunked_prefill_gives_the_same_logits(native, reference):
    ids = prompt(700, seed=6)
    with running(native[0], max_num_batched_tokens=300, max_num_seqs=4) as engine:
        assert_close(engine.logits(ids)[0], reference(ids), 2 * TOLERANCE)


def test_trained_model_gives_its_golden_logits():
    """Committed logits of the exported weights by a training-side definition and by llm-compressor's."""
    directory = Path(__file__).resolve().parents[3] / "models" / "tiny-k3"
    goldens = load_file(directory / "goldens" / "logits.safetensors")
    with running(directory) as engine:
        for number in range(sum(name.startswith("ids_") for name in goldens)):
            got = engine.logits(goldens[f"ids_{number}"].tolist())[0]
            assert_close(got, goldens[f"logits_{number}"])
            assert_close(got, goldens[f"second_logits_{number}"])


@pytest.mark.parametrize("extra", [True, False])
def test_a_tensor_without_a_place_stops_the_load_by_name(extra, native, tmp_path):
    """A cache scale for a layer that has no cache; packed experts that the config does not declare."""
    tensors = load_file(native[0] / "model.safetensors")
    stored = {n.removeprefix("language_model."): t for n, t in tensors.items() if n.startswith("language_model.")}
    config, message = None, r"w1\.weight_packed.*quantization_config"
    if extra:
        stored["model.layers.2.self_attn.k_scale"] = torch.tensor(0.5)
        config = json.loads((native[0] / "config.json").read_text())["text_config"]["quantization_config"]
        message = r"layers\.2\.self_attn.*not a KV cache"
    with pytest.raises(KeyError, match=message), running(tiny.write(tmp_path, stored, config)):
        pass
