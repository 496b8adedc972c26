"""Where the format rounds, every byte, dtype and scale dtype equals what llm-compressor writes from the same input."""

import numpy as np
import pytest

from pipeline.quant import Recipe, engine
from tests.checkpoint import fixtures
from tests.quant import reference, stock

CASES = {
    "w4a16-g32": (Recipe("w4a16"), "W4A16", 32),
    "w4a16-g128": (Recipe("w4a16", group_size=128), "W4A16", 128),
    "fp8-channel-amax": (Recipe("fp8_channel", scale="amax"), "FP8_DYNAMIC", None),
    "fp8-block-amax": (Recipe("fp8_block", scale="amax"), "FP8_BLOCK", None),
    "int8-amax": (Recipe("int8_channel", scale="amax"), "W8A8", None),
}
STORED = {"BF16": fixtures.bf16, "F16": lambda x: ("F16", x.astype(np.float16)), "F32": lambda x: ("F32", x)}


def compare(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, (dtype, data) in theirs.items():
        assert ours[name][0] == dtype, name
        assert ours[name][1].shape == data.shape, name
        assert ours[name][1].tobytes() == data.tobytes(), name


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("spread", [2, 11, 30])
def test_from_mxfp4(tmp_path, case, spread):
    recipe, preset, group_size = CASES[case]
    source = fixtures.write_k3(tmp_path / "source", spread=spread, seed=spread)
    rng = np.random.default_rng(spread)
    for name in ("w1", "w2"):  # groups, rows and matrices of zeros, of one value, of the smallest code
        module = fixtures.EXPERT.format(layer=1, expert=1, name=name)
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v[rng.integers(0, 128, 40)].fill(0))
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v[:64, :16].fill(0x88))
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v[32:96, 16:32].fill(0x11))
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v[100].fill(0x1))
    fixtures.edit_values(
        source, fixtures.EXPERT.format(layer=3, expert=2, name="w3") + ".weight_packed", lambda v: v.fill(0)
    )
    engine.requantize(source, tmp_path / "ours", recipe)
    stock.quantize(source, tmp_path / "theirs", preset, group_size)
    compare(reference.tensors_of(tmp_path / "ours"), reference.tensors_of(tmp_path / "theirs"))


def compare_floats(tmp_path, case, tensors):
    """Ours against theirs from a checkpoint of ``tensors`` that declares no quantization."""
    recipe, preset, group_size = CASES[case]
    config = fixtures.model_config()
    del config["text_config"]["quantization_config"]
    source = fixtures.write_checkpoint(tmp_path / "source", tensors, config)
    engine.requantize(source, tmp_path / "ours", recipe)
    stock.quantize(source, tmp_path / "theirs", preset, group_size, packed=False)
    compare(reference.tensors_of(tmp_path / "ours"), reference.tensors_of(tmp_path / "theirs"))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_from_floats(tmp_path, case, dtype):
    tensors = fixtures.k3_tensors(packed=False)
    rng = np.random.default_rng(7)
    for name, (_, data) in list(tensors.items()):
        if ".experts." in name:
            values = (rng.standard_t(3, data.shape) * 0.02).astype(np.float32)
            values[5], values[9, :32] = 0, -0.0
            tensors[name] = STORED[dtype](values)
    compare_floats(tmp_path, case, tensors)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("lowest", "highest"), [(0, 12), (10, 40), (0, 254)])
def test_from_mxfp4_at_both_ends_of_the_exponents(tmp_path, case, lowest, highest):
    """Where bf16 is subnormal, and up to its largest powers."""
    recipe, preset, group_size = CASES[case]
    source = fixtures.write_k3(tmp_path / "source")
    rng = np.random.default_rng(highest)
    for name in ("w1", "w2", "w3"):
        module = fixtures.EXPERT.format(layer=1, expert=1, name=name)
        fixtures.edit_values(source, module + ".weight_packed", lambda v: v.__iand__(0xBB))  # at most 1.5: finite
        exponents = rng.integers(lowest, highest, (128, 4), dtype=np.uint8)
        fixtures.edit_values(source, module + ".weight_scale", lambda v, new=exponents: np.copyto(v, new))
    engine.requantize(source, tmp_path / "ours", recipe)
    stock.quantize(source, tmp_path / "theirs", preset, group_size)
    compare(reference.tensors_of(tmp_path / "ours"), reference.tensors_of(tmp_path / "theirs"))


EXTREMES = {"BF16": (1e-39, 1e36), "F16": (2e-7, 2e3), "F32": (1e-43, 1e36)}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in EXTREMES.items() for size in sizes])
def test_from_floats_at_both_ends(tmp_path, case, dtype, size):
    tensors, rng = fixtures.k3_tensors(packed=False), np.random.default_rng(3)
    for name, (_, data) in list(tensors.items()):
        if ".experts." in name:
            values = (np.clip(rng.standard_normal(data.shape), -9, 9) * size).astype(np.float32)
            tensors[name] = STORED[dtype](values)
    compare_floats(tmp_path, case, tensors)
