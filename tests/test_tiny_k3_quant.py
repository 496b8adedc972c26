"""The tiny K3's weights compute what its goldens and its reference scores say, through the training code's definition."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-k3"
sys.path.insert(0, str(MODEL / "training"))

import evaluate  # noqa: E402
import export  # noqa: E402
import mxfp4  # noqa: E402
import tasks  # noqa: E402
from model import kda  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return export.load(MODEL)


@pytest.fixture(scope="module")
def goldens() -> dict:
    return load_file(MODEL / "goldens" / "logits.safetensors")


@torch.inference_mode()
def test_the_weights_reproduce_the_goldens(model, goldens):
    for number in (0, 1):
        logits = model(goldens[f"ids_{number}"][None])[0]
        assert logits.shape == goldens[f"logits_{number}"].shape and logits.shape[1] == 1024
        assert (logits - goldens[f"logits_{number}"]).abs().max() <= 1e-4


def test_two_independent_definitions_agreed(goldens):
    agreement = json.loads((MODEL / "goldens" / "agreement.json").read_text())
    for number, prompt in enumerate(agreement["prompts"]):
        difference = (goldens[f"logits_{number}"] - goldens[f"second_logits_{number}"]).abs().max().item()
        assert difference == pytest.approx(prompt["max_abs_difference"]) and difference <= 1e-4


@torch.inference_mode()
def test_the_second_definition_still_agrees(goldens):
    second_definition = pytest.importorskip("second_definition")
    logits = second_definition.load(MODEL)(input_ids=goldens["ids_0"][None], use_cache=False).logits[0]
    assert (logits - goldens["logits_0"]).abs().max() <= 1e-4


@torch.inference_mode()
def test_the_goldens_would_notice_one_wrong_scale(model, goldens):
    weight = model.layers[2].block_sparse_moe.experts_w2
    kept = weight.clone()
    weight[:, 0, :32] *= 2  # one group of one row, in each expert
    difference = (model(goldens["ids_0"][None])[0] - goldens["logits_0"]).abs().max()
    weight.copy_(kept)
    assert difference > 1e-3


@pytest.mark.parametrize(("family", "count"), [("single", 32), ("multi_key", 32), ("ordered", 16)])
def test_it_retrieves(model, family, count):
    result = evaluate.score(model, family, 512, count, seed=5)
    assert result["forced_item_accuracy" if family == "ordered" else "accuracy"] >= 0.9


def test_it_knows_its_language_not_just_the_answers(model):
    """Filler follows the Markov chain: about ln 4 = 1.386 nats a word is all that can be known."""
    source = tasks.Source(tasks.Words.load(), seed=11)
    ids = torch.from_numpy(source.stream[1000:1256].copy())[None]
    with torch.inference_mode():
        entropy = torch.nn.functional.cross_entropy(model(ids)[0, 16:-1], ids[0, 17:])
    assert 1.3 < entropy < 1.75


def naive_kda(q, k, v, log_decay, beta):
    """The recurrence, token by token in fp64."""
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    state, outputs = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=torch.double), []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp().unsqueeze(-1)
        error = v[:, t] - (state * k[:, t].unsqueeze(-1)).sum(-2)
        state = state + (beta[:, t].unsqueeze(-1) * k[:, t]).unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("gate", ["all at the bound of -5", "slow", "mixed"])
@pytest.mark.parametrize("chunk", [16, 32])
def test_the_chunk_form_is_the_recurrence_also_at_the_gates_bound(gate, chunk):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 64, generator=draw) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    uniform, beta = torch.rand(1, 70, 2, 64, generator=draw), torch.rand(1, 70, 2, generator=draw)
    log_decay = {"all at the bound of -5": torch.full_like(uniform, -5.0), "slow": -0.01 * uniform,
                 "mixed": -5 * uniform**4}[gate]
    difference = (kda(q, k, v, log_decay, beta, chunk) - naive_kda(q, k, v, log_decay, beta)).abs().max()
    assert difference < 1e-6


def test_packing_is_compressed_tensors_mxfp4():
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)) * 0.1
    packed, scale = mxfp4.pack(weight)
    values = unpack_fp4_from_uint8(packed, 16, 128, dtype=torch.float32)
    theirs = (values.view(16, 4, 32) * torch.exp2(scale.float() - 127).unsqueeze(-1)).view(16, 128)
    assert torch.equal(theirs, mxfp4.unpack(packed, scale))
    assert torch.equal(mxfp4.unpack(packed, scale), mxfp4.fake_quantize(weight))


def test_packing_rounds_each_weight_to_a_nearest_code():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1, 40, 1e3]).repeat(2)[:, None]
    packed, scale = mxfp4.pack(weight)
    steps = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    nearest = (weight.unsqueeze(-1) - mxfp4.E2M1 * steps.unsqueeze(-1)).abs().amin(-1)
    assert torch.equal((mxfp4.unpack(packed, scale) - weight).abs(), nearest)
    assert torch.equal(mxfp4.pack(mxfp4.unpack(packed, scale))[0] & 0x77, packed & 0x77)


def test_training_documents_ask_only_what_was_told():
    """Each answer of a pair question is the value stated for its key (through one alias), and told before."""
    words = tasks.Words.load()
    source, mark, checked = tasks.Source(words, seed=2), words.mark, 0
    for _ in range(60):
        ids, classes, _ = source.training_document(256)
        assert len(ids) == 256 and ids[0] == words.bos
        known, row = {}, ids.tolist()
        for at in range(1, len(row) - 3):
            if row[at + 1] == mark["statement"] and row[at - 1] != mark["query"]:
                known[row[at]] = known[row[at + 3]] if row[at + 2] == mark["alias"] else row[at + 2]
            elif row[at] == mark["query"] and row[at + 2] == mark["statement"]:
                assert classes[at + 3] == tasks.ANSWER and known[row[at + 1]] == row[at + 3]
                checked += 1
    assert checked > 300
