"""Reference kernels: stored values come back exactly, activations are rounded, grouped experts equal single ones."""

from types import SimpleNamespace

import formats
import pytest
import torch
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from vllm_k3_cpu import emulation, lookup, moe

EXPERTS, ROWS, COLUMNS = 4, 256, 128
FORMATS = {"mxfp4": emulation.Mxfp4(), "nvfp4": emulation.Nvfp4(), "fp8_block": emulation.Fp8Block()}


def layer_of(name: str, w: torch.Tensor):
    """A layer as the kernel sees it after loading, and the values it stands for."""
    tensors, values = formats.SCHEMES[name][0](w)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(tensors.get("weight_packed", tensors.get("weight")), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(tensors["weight_scale"], requires_grad=False)
    if "weight_global_scale" in tensors:  # vLLM inverts the stored divisor
        layer.weight_global_scale = torch.nn.Parameter(1 / tensors["weight_global_scale"][0], requires_grad=False)
    return layer, values


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


def test_weights_come_back_exactly(name):
    layer, values = layer_of(name, torch.randn(ROWS, COLUMNS))
    tensors = [getattr(layer, tensor) for tensor in FORMATS[name].tensors]
    got = FORMATS[name].weight(*tensors, dtype=torch.float32)
    if (scale := FORMATS[name].output_scale(*tensors)) is not None:
        got = got * scale
    torch.testing.assert_close(got, values, atol=0, rtol=2e-7 if name == "nvfp4" else 0)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"], indirect=True)
def test_bfloat16_copies_lose_nothing(name):
    layer, _ = layer_of(name, torch.randn(ROWS, COLUMNS))
    tensors = [getattr(layer, tensor) for tensor in FORMATS[name].tensors]
    low, high = (FORMATS[name].weight(*tensors, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(low.float(), high)


def test_every_code_of_a_packed_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    signed = torch.cat([formats.E2M1, -formats.E2M1])
    expected = torch.stack([signed[codes.long() & 15], signed[codes.long() >> 4]], -1)
    assert torch.equal(lookup.decode_e2m1(codes.view(-1, 1), torch.bfloat16).float(), expected)


def test_e8m0_255_is_not_a_number():
    layer, _ = layer_of("mxfp4", torch.randn(ROWS, COLUMNS))
    layer.weight_scale.data[3, 1] = 255
    got = emulation.Mxfp4().weight(layer.weight, layer.weight_scale, dtype=torch.float32)
    assert torch.isnan(got[3, 32:64]).all() and torch.isfinite(got[3, :32]).all()


def test_fp8_block_rounds_activations_as_vllm_does():
    x = torch.randn(5, 256) * torch.logspace(-3, 3, 5).unsqueeze(-1)
    x[4, 128:] = 0
    quantize = QuantFP8.__new__(QuantFP8)
    torch.nn.Module.__init__(quantize)
    quantize.__dict__ |= dict(
        group_shape=GroupShape(1, 128), group_size=128, use_ue8m0=False, column_major_scales=False, is_group_quant=True
    )
    codes, scales = quantize._quantize_group_native(x)
    expected = codes.float() * scales.repeat_interleave(128, -1)
    torch.testing.assert_close(emulation.Fp8Block().activations(x), expected, rtol=1e-6, atol=0)
    assert not torch.allclose(emulation.Fp8Block().activations(x), x, rtol=1e-3)


@pytest.mark.parametrize("pairs", [2, 40, 700])
def test_grouped_experts_equal_single_layers(name, pairs):
    """Two pairs leave experts idle, 40 pad every expert to equal rows, 700 are packed."""
    layers, _ = zip(*(layer_of(name, torch.randn(ROWS, COLUMNS)) for _ in range(EXPERTS)), strict=True)
    stacked = moe.StackedWeights(FORMATS[name], list(layers))
    chosen = torch.randint(0, EXPERTS - 1, (pairs,))
    chosen[0] = EXPERTS - 1
    x = torch.randn(pairs, COLUMNS)
    batch = moe.ExpertBatch.of(chosen, EXPERTS, pad=True)
    assert bool(batch.capacity) == (pairs < 700)
    rows = torch.zeros(batch.rows, COLUMNS).index_copy_(0, batch.position, x)
    got = stacked.product(rows, batch)[batch.position]
    expected = torch.stack([emulation.apply(FORMATS[name], layers[e], row) for e, row in zip(chosen, x, strict=True)])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert layers[1].weight.untyped_storage().data_ptr() == layers[2].weight.untyped_storage().data_ptr()


def test_fast_soft_clip_is_tanh():
    x = torch.linspace(-60, 60, 100_001)
    for bound in (4.0, 25.0):
        error = (moe._soft_clip(x, bound, exact=False) - moe._soft_clip(x, bound, exact=True)).abs().max()
        assert error < 5e-7 * bound


def test_router_keeps_to_the_best_groups():
    config = SimpleNamespace(num_expert_group=4, topk_group=1)
    choice = torch.tensor([[9.0, 0, 5, 5, 1, 1, 8, 0]])  # groups of two; the best pair sum is 10
    masked = moe.LatentMoE._within_best_groups(SimpleNamespace(config=config), choice)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [2, 3]
