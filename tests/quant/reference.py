"""Independent decoding of checkpoints in float64, value by value: what the tests compare the engine with.

Nothing here is shared with the engine: bytes come through the fixtures' own reader, numbers through torch or plain
formulas.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.checkpoint import fixtures

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def tensors_of(directory: Path) -> fixtures.Tensors:
    """All tensors of a checkpoint."""
    found: fixtures.Tensors = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        found |= fixtures.load(path)
    return found


def floats(dtype: str, data: np.ndarray) -> np.ndarray:
    """Stored numbers as float64."""
    if dtype == "BF16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).double().numpy()
    if dtype == "F8_E4M3":
        return torch.from_numpy(data).view(torch.float8_e4m3fn).double().numpy()
    return data.astype(np.float64)


def fp4(packed: np.ndarray) -> np.ndarray:
    """Two E2M1 values a byte, low nibble first."""
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return np.where(nibbles & 8, -1.0, 1.0) * E2M1[nibbles & 7]


def int4(words: np.ndarray) -> np.ndarray:
    """Eight values an int32, offset by 8, the first in the lowest bits."""
    shifts = np.arange(8) * 4
    values = (words.view(np.uint32)[..., None].astype(np.int64) >> shifts) & 15
    return (values - 8).reshape(words.shape[0], -1).astype(np.float64)


def matrix(tensors: fixtures.Tensors, module: str) -> np.ndarray:
    """A module's weight in float64, whatever it is stored as."""
    scale_dtype, scale = tensors.get(f"{module}.weight_scale", ("", None))
    if f"{module}.weight_packed" in tensors:
        dtype, packed = tensors[f"{module}.weight_packed"]
        if dtype == "I32":
            values, scales = int4(packed), floats(scale_dtype, scale)
        else:
            values = fp4(packed)
            if f"{module}.weight_global_scale" in tensors:
                scales = floats(scale_dtype, scale) / float(tensors[f"{module}.weight_global_scale"][1][0])
            else:
                scales = 2.0 ** (scale.astype(np.float64) - 127)
        return values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    dtype, weight = tensors[f"{module}.weight"]
    values = floats(dtype, weight)
    if scale is None:
        return values
    scales = floats(scale_dtype, scale)
    rows, columns = (values.shape[axis] // scales.shape[axis] for axis in (0, 1))
    return values * np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)


def modules_of(tensors: fixtures.Tensors) -> list[str]:
    """Modules stored with a scale."""
    return sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))


def damage(source: fixtures.Tensors, target: fixtures.Tensors, modules: list[str]) -> tuple[int, int, float, float]:
    """(weights, inexact weights, sum of squared errors, sum of squared weights)."""
    total = np.zeros(4)
    for module in modules:
        before, after = matrix(source, module), matrix(target, module)
        total += [before.size, (before != after).sum(), ((after - before) ** 2).sum(), (before**2).sum()]
    return int(total[0]), int(total[1]), float(total[2]), float(total[3])
