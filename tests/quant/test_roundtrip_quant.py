"""compressed-tensors parses each output's config and decompresses its weights to the values of the float64 reference.
"""

import pytest
import torch

from pipeline.quant import Recipe, engine
from tests.checkpoint import fixtures
from tests.quant import decompression, reference

RECIPES = [
    Recipe("fp8_block"), Recipe("fp8_channel"), Recipe("int8_channel"), Recipe("w4a16"), Recipe(
        "w4a16", group_size=128
    ),
    Recipe("nvfp4"), Recipe("fp8_block", "dense_too"), Recipe("fp8_block", "dense_only"), Recipe(
        "int8_channel", "dense_only"
    ),
    Recipe("w2_control"),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.format}-{r.scope}-{r.group_size}")
def test_decompression(tmp_path, recipe):
    source = fixtures.write_k3(tmp_path / "source")
    engine.requantize(source, tmp_path / "out", recipe)
    stored = reference.tensors_of(tmp_path / "out")
    weights = decompression.decompressed(tmp_path / "out")
    assert sorted(weights) == reference.modules_of(stored)
    for module, weight in weights.items():
        # The product of a stored value and its scale is exact in float64; the library rounds it once, to the scale's
        # dtype.
        ours = torch.from_numpy(reference.matrix(stored, module))
        assert torch.equal(weight, ours.to(weight.dtype)), module
