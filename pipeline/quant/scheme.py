"""The one protocol of all schemes: what a module's tensors become, from MXFP4 by look-up or from floats by rounding.

A scheme divides a weight ``[rows, columns]`` into regions of ``region_rows x region_columns`` that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipeline.checkpoint import numbers
from pipeline.errors import Refused
from pipeline.quant import kernels
from pipeline.quant.damage import NOTHING, Damage
from pipeline.quant.tables import Tables

# Group exponents outside are decoded and rounded as floats: there bf16 arithmetic meets subnormals and infinity, and
# the
# tables, which rest on exact scaling by powers of two, do not hold.
SAFE_EXPONENT = 100

FLOAT_DTYPES = {
    "BF16": (numbers.round_bf16, numbers.BF16_EPS),
    "F16": (numbers.round_fp16, numbers.FP16_EPS),
    "F32": (lambda x: np.asarray(x, np.float32), numbers.F32_EPS),
}


@dataclass(frozen=True)
class Converted:
    """The result for some rows: output words and one float32 scale a region, with what it cost."""

    weight: np.ndarray
    scale: np.ndarray
    damage: Damage


@dataclass(frozen=True)
class RegionScheme:
    """One scale a region; subclasses in fp8.py, int8.py and w4a16.py fill in the numbers.

    ``region_columns`` 0 means the whole row.  ``bits`` is 8 or 4.  ``scale_rule(amax, dtype)`` gives a region's float32
    scale from its largest magnitude, ``quantizer(x, scale, round)`` maps floats to (stored, decoded) values, where
    ``round`` rounds the quotient to the dtype that the reference computes in.
    """

    name: str
    region_rows: int
    region_columns: int
    bits: int
    weight_dtype: str
    tables: Tables
    scale_rule: Callable[[np.ndarray, str], np.ndarray]
    quantizer: Callable[..., tuple[np.ndarray, np.ndarray]]
    keeps_source_dtype: bool
    group: dict[str, Any]

    @property
    def packed(self) -> bool:
        return self.bits == 4

    def columns_of_region(self, columns: int) -> int:
        return self.region_columns or columns

    def check(self, module: str, shape: tuple[int, ...]) -> None:
        """Raise :class:`Refused` where a weight's shape does not divide."""
        if len(shape) != 2:
            raise Refused(
                f"{module}: {self.name} needs a matrix, the weight is {list(shape)}; leave it out of the scope"
            )
        rows, columns = shape
        for what, size, part in (("rows", rows, self.region_rows), ("columns", columns, self.region_columns or 1)):
            if size % part:
                raise Refused(
                    f"{module}: {size} {what} do not divide by {part} ({size} % {part} = {size % part}) "
                    f"for {self.name}; use fp8_channel, int8_channel or a smaller group_size"
                )
        if self.packed and columns % 8:
            raise Refused(
                f"{module}: {columns} columns do not fill 32-bit words of 4-bit values; leave it out of the scope"
            )

    def outputs(self, module: str, shape: tuple[int, int], dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """The tensors that a weight of ``shape`` and source ``dtype`` becomes, ``(name, dtype, shape)``, weight
        first.
        """
        rows, columns = shape
        scale = (rows // self.region_rows, columns // self.columns_of_region(columns))
        scale_dtype = dtype if self.keeps_source_dtype else "F32"
        if self.packed:
            return [
                (f"{module}.weight_packed", "I32", (rows, columns // 8)),
                (f"{module}.weight_scale", scale_dtype, scale),
                (f"{module}.weight_shape", "I64", (2,)),
            ]
        return [(f"{module}.weight", self.weight_dtype, shape), (f"{module}.weight_scale", scale_dtype, scale)]

    def extras(self, shape: tuple[int, int], scale: np.ndarray, dtype: str) -> list[np.ndarray]:
        """The bytes of all outputs but the weight, from the float32 scales of the whole weight."""
        scale_dtype = dtype if self.keeps_source_dtype else "F32"
        stored = {
            "BF16": numbers.bf16_bits,
            "F16": lambda x: x.astype(np.float16),
            "F32": lambda x: np.ascontiguousarray(x, np.float32),
        }[scale_dtype](scale)
        return [stored, np.array(shape, np.int64)] if self.packed else [stored]

    def config_group(self, targets: list[str]) -> dict[str, Any]:
        """The compressed-tensors config group for ``targets``."""
        return {"targets": targets, "output_activations": None} | self.group

    def from_mxfp4(self, packed: np.ndarray, exponents: np.ndarray, out: np.ndarray | None = None) -> Converted:
        """Re-encode whole regions.

        packed [rows, columns/2] uint8 (8-byte aligned), exponents [rows, columns/32] uint8; ``out`` is an optional
        buffer of at least ``rows * columns`` bytes that the returned weight may lie in.
        """
        rows, groups = exponents.shape
        peak, lowest, highest = self._peaks(packed, exponents)
        tables = self.tables
        region_class, scale = np.empty(peak.shape, np.uint8), np.empty(peak.shape, np.float32)
        low, high, spread = kernels.settle(
            peak, lowest, highest, tables.exact_offset, tables.unit_scale, tables.zero_scale, region_class, scale
        )
        if low <= high and (low < -SAFE_EXPONENT or high > SAFE_EXPONENT):
            far = (peak != kernels.EMPTY) & ((lowest < -SAFE_EXPONENT) | (highest > SAFE_EXPONENT))
            converted = self._in_parts(packed, exponents, far.any(axis=1))
            return replace(converted, damage=replace(converted.damage, spread=spread))
        offset = np.empty((rows, groups), np.int8)
        kernels.offsets(exponents, self.region_rows, peak, tables.largest_offset, offset)
        shape = (rows, groups * 16)
        out = np.empty(shape, tables.out.dtype) if out is None else _view(out, shape, tables.out.dtype)
        inexact, error = kernels.convert(
            packed, exponents, self.region_rows, offset, region_class, tables.out, tables.statistics, tables.exact_rule,
            out, out.view(np.uint64),
        )  # fmt: skip
        signal = kernels.signal_power(packed, exponents, SQUARES)
        return Converted(out, scale, Damage(rows * groups * 32, inexact, error, signal, spread))

    def spread_of(self, packed: np.ndarray, exponents: np.ndarray) -> int:
        """The largest difference of two group exponents in one region, all-zero groups left out."""
        peak, lowest, highest = self._peaks(packed, exponents)
        full = peak != kernels.EMPTY
        return int((highest - lowest)[full].max()) if full.any() else 0

    def _peaks(self, packed: np.ndarray, exponents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Peak, lowest and highest exponent of each region, as :func:`pipeline.quant.kernels.regions` tells them."""
        rows, groups = exponents.shape
        region_groups = self.columns_of_region(groups * 32) // 32
        shape = (rows // self.region_rows, groups // region_groups)
        peak, lowest, highest = (np.empty(shape, np.int32) for _ in range(3))
        kernels.regions(packed.view(np.uint64), exponents, self.region_rows, region_groups, peak, lowest, highest)
        return peak, lowest, highest

    def _in_parts(self, packed: np.ndarray, exponents: np.ndarray, far: np.ndarray) -> Converted:
        """Rows of regions that are ``far`` out (one flag each) as floats, the rows between them as ever."""
        edges = [0, *(np.flatnonzero(far[1:] != far[:-1]) + 1).tolist(), len(far)]
        parts = []
        for start, end in pairwise(edges):
            rows = slice(start * self.region_rows, end * self.region_rows)
            if far[start]:
                parts.append(self.from_float(numbers.mxfp4_values(packed[rows], exponents[rows]), "BF16"))
            else:
                parts.append(self.from_mxfp4(packed[rows], exponents[rows]))
        weight = np.concatenate([part.weight.view(np.uint8) for part in parts])
        return Converted(weight, np.concatenate([p.scale for p in parts]), sum((p.damage for p in parts), NOTHING))

    def from_float(self, x: np.ndarray, dtype: str) -> Converted:
        """Round float32 values ``x [rows, columns]`` that were stored as ``dtype`` (BF16, F16 or F32), whole regions.
        """
        if not np.isfinite(x).all():
            raise Refused(f"{int((~np.isfinite(x)).sum())} weights are NaN or infinite; fix the source")
        blocks = self._regions(x)
        scale = self.scale_rule(np.abs(blocks).max(axis=(1, 3)), dtype)
        stored, decoded = self.with_scale(x, scale, dtype)
        error = decoded.astype(np.float64) - x
        signal = float(np.square(x, dtype=np.float64).sum())
        damage = Damage(x.size, int(np.count_nonzero(error)), float(np.square(error).sum()), signal, None)
        return Converted(stored, scale, damage)

    def with_scale(self, x: np.ndarray, scale: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Round ``x [rows, columns]`` by given scales, one a region: stored bytes, and what they decode to (float64).
        """
        per_weight = scale[:, None, :, None]
        stored, decoded = self.quantizer(self._regions(x), per_weight, FLOAT_DTYPES[dtype][0])
        stored = stored.reshape(x.shape)
        if self.packed:
            nibbles = (stored + np.int8(8)).view(np.uint8)
            stored = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return np.ascontiguousarray(stored), (decoded.astype(np.float64) * per_weight).reshape(x.shape)

    def _regions(self, x: np.ndarray) -> np.ndarray:
        """``[row blocks, rows of one, column blocks, columns of one]``."""
        width = self.columns_of_region(x.shape[1])
        return x.reshape(x.shape[0] // self.region_rows, self.region_rows, x.shape[1] // width, width)


def _view(buffer: np.ndarray, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    return buffer[: shape[0] * shape[1] * dtype.itemsize].view(dtype).reshape(shape)


SQUARES = np.rint((2 * numbers.E2M1[numbers.codes_of_bytes()].astype(np.float64)) ** 2).sum(-1).astype(np.int64)


def amax_rule(divisor: float) -> Callable[[np.ndarray, str], np.ndarray]:
    """llm-compressor's scale: ``amax / divisor`` in the weight's dtype; a zero scale becomes that dtype's epsilon."""

    def rule(amax: np.ndarray, dtype: str) -> np.ndarray:
        round_to, epsilon = FLOAT_DTYPES[dtype]
        scale = round_to(amax.astype(np.float32) / np.float32(divisor))
        return np.where(scale == 0, np.float32(epsilon), scale).astype(np.float32)

    return rule


def integers(low: int, high: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Quantizer to integers in [low, high]: divide, round the quotient to the compute dtype, clamp, round to integer.
    """

    def quantizer(x: np.ndarray, scale: np.ndarray, round_quotient: Callable) -> tuple[np.ndarray, np.ndarray]:
        stored = np.rint(np.clip(round_quotient(x / scale), low, high)).astype(np.int8)
        return stored, stored

    return quantizer


def e4m3(x: np.ndarray, scale: np.ndarray, round_quotient: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Quantizer to E4M3 bytes: divide, round the quotient to the compute dtype, clamp to +-448, round."""
    stored = numbers.e4m3_bytes(np.clip(round_quotient(x / scale), -numbers.E4M3_MAX, numbers.E4M3_MAX))
    return stored, numbers.e4m3_values(stored)
