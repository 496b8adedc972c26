"""NVFP4 from MXFP4 by an exact cast, weight-only.

Both formats store E2M1 codes.  MXFP4 has a power of two per 32 weights; NVFP4 an E4M3 scale per 16 and one F32 scale
a tensor, shared by matrices that are multiplied together (w1 and w3).  E4M3 holds the powers of two from 2^-9 to 2^8,
so the codes stay as they are while the group exponents of the tensor and its mates differ by at most 17.  Below that
a group keeps scale 2^-9 and its codes are rounded, and counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.errors import Refused
from pipeline.quant import kernels
from pipeline.quant.damage import Damage
from pipeline.checkpoint.numbers import E2M1, E8M0_BIAS, codes_of_bytes
from pipeline.quant.scheme import SQUARES, Converted

GROUP = 16
TOP = 8  # the highest group's scale: 2^8
EXACT_SPREAD = 17
# The global scale is 2^(TOP - base), and kernels multiply by its inverse: both are normal F32 numbers from here on.
LOWEST_BASE = TOP - 126
# At a shift of 4 the largest code, 6, is 0.375 and still rounds to 0.5; at 5 all are zero.
LARGEST_SHIFT = 5


def _shifted_bytes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each shift: the packed byte with both codes divided by ``2^shift`` and rounded, how many changed, squared
    error.
    """
    codes = codes_of_bytes()
    wanted = np.abs(E2M1[codes])[None] * 0.5 ** np.arange(LARGEST_SHIFT + 1)[:, None, None]
    distance = np.abs(wanted[..., None] - E2M1[:8])
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # ties go to the even code
    chosen = even_first[np.argmin(distance[..., even_first], axis=-1)]
    error = (E2M1[chosen] - wanted) * 2.0 ** np.arange(LARGEST_SHIFT + 1)[:, None, None]
    signed = (chosen | (codes & 8)[None]).astype(np.uint8)
    return signed[..., 0] | (signed[..., 1] << 4), (error != 0).sum(-1), (error**2).sum(-1)


SHIFTED, CHANGED, ERROR = _shifted_bytes()


class Nvfp4Scheme:
    """The scheme protocol of :class:`pipeline.quant.scheme.RegionScheme` for NVFP4; ``base`` is the set's highest
    exponent.
    """

    name = "nvfp4"
    region_rows = 1
    packed = True

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """Raise :class:`Refused` where the columns do not divide by 16."""
        if len(shape) != 2 or shape[1] % GROUP:
            raise Refused(
                f"{module}: {list(shape)} does not divide into groups of {GROUP} for nvfp4; leave it out of the scope"
            )

    def outputs(self, module: str, shape: tuple[int, int], dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """The tensors that a weight becomes, weight first."""
        rows, columns = shape
        return [
            (f"{module}.weight_packed", "U8", (rows, columns // 2)),
            (f"{module}.weight_scale", "F8_E4M3", (rows, columns // GROUP)),
            (f"{module}.weight_global_scale", "F32", (1,)),
        ]

    def config_group(self, targets: list[str]) -> dict[str, Any]:
        """The compressed-tensors config group (``NVFP4A16``)."""
        weights = {
            "num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor_group",
            "group_size": GROUP, "block_structure": None, "actorder": None, "observer": "static_minmax",
            "observer_kwargs": {}, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
        }  # fmt: skip
        group = {"format": "nvfp4-pack-quantized", "weights": weights, "input_activations": None}
        return {"targets": targets, "output_activations": None} | group

    def from_mxfp4(self, packed: np.ndarray, exponents: np.ndarray, base: int) -> Converted:
        """Cast rows; the scale is returned as E4M3 bytes ``[rows, columns/16]``."""
        rows, groups = exponents.shape
        peak, lowest, highest = (np.empty((rows, groups), np.int32) for _ in range(3))
        kernels.regions(packed.view(np.uint64), exponents, 1, 1, peak, lowest, highest)
        full = peak != kernels.EMPTY
        power = exponents.astype(np.int32) - E8M0_BIAS - base + TOP  # of the group's scale
        power = np.where(full, power, TOP)
        shift = np.clip(-9 - power, 0, LARGEST_SHIFT)
        out = packed
        inexact, error = 0, 0.0
        if shift.any():
            per_byte = np.repeat(shift, 16, axis=1)
            out = SHIFTED[per_byte, packed]
            inexact = int(CHANGED[per_byte, packed].sum())
            per_group = ERROR[per_byte, packed].reshape(rows, groups, 16).sum(-1)
            error = float((per_group * 4.0 ** (exponents.astype(np.float64) - E8M0_BIAS)).sum())
        signal = kernels.signal_power(packed, exponents, SQUARES)
        power = np.maximum(power, -9)
        scale = np.where(power >= -6, (power + 7) << 3, 1 << np.maximum(power + 9, 0)).astype(np.uint8)
        spread = int(highest[full].max() - lowest[full].min()) if full.any() else 0
        return Converted(out, np.repeat(scale, 2, axis=1), Damage(rows * groups * 32, inexact, error, signal, spread))

    def global_scale(self, base: int) -> np.ndarray:
        """``weight = code * scale / global``: global = 2^(8 - base)."""
        return np.array([2.0 ** (TOP - base)], np.float32)

    def extras(self, shape: tuple[int, int], scale: np.ndarray, dtype: str, base: int) -> list[np.ndarray]:
        """The bytes of all outputs but the weight."""
        return [scale, self.global_scale(base)]

    def from_float(self, x: np.ndarray, dtype: str) -> Converted:
        """Not offered: NVFP4 is here an exact cast of MXFP4, not a rounding."""
        raise Refused(f"nvfp4 takes MXFP4 weights only, this one is stored as {dtype}; use w4a16, or scope experts")
