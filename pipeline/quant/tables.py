"""Look-up tables: with MXFP4 input, an output byte depends on the packed byte and one small exponent offset only.

A weight is ``code * 2^e`` (E2M1 code, one exponent per 32).  A *region* (a row, a block, a group) shares one output
scale.  Its largest magnitude is ``2^P`` or ``1.5 * 2^P``, for E2M1 has one mantissa bit; so the output scale is one
of two numbers times ``2^P``, and ``weight / scale`` is ``code / number * 2^-(P - e)``: a table of 256 bytes for each
offset ``P - e``. The tables are filled with the reference arithmetic of the target format, so the look-up equals it
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.checkpoint.numbers import E2M1, codes_of_bytes

SMALLEST_OFFSET = -1  # a group whose largest code is 0.5 lies one below its own exponent
EXACT, PEAK_1, PEAK_1_5 = range(3)
BY_TABLE, BY_E4M3, BY_INT8 = range(3)  # how the kernel fills exact regions

# One statistics word per table entry; a group of 32 weights (16 bytes) adds 16 of them without overflow.
INEXACT_BITS = 6
ERROR_FRACTION_BITS = 46  # sum of error^2 <= 32 * 36 < 2^11: 57 bits


@dataclass(frozen=True)
class Tables:
    """``out[class, offset + 1, byte]``, ``statistics`` alike, and ``unit_scale[class]`` (the scale where ``P = 0``).

    A region is of class EXACT where its largest offset is at most ``exact_offset``: no weight changes, and
    ``exact_rule`` says how the kernel may compute it without the table.  Else its class says whether its peak is
    ``2^P`` or ``1.5 * 2^P``.  ``zero_scale`` is the scale of an all-zero region.
    """

    out: np.ndarray
    statistics: np.ndarray
    unit_scale: np.ndarray
    exact_offset: int
    zero_scale: float
    exact_rule: int

    @property
    def largest_offset(self) -> int:
        return self.out.shape[1] + SMALLEST_OFFSET - 1


Quantizer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def build(
    unit_scales: tuple[float, float, float],
    quantizer: Quantizer,
    pack: Callable[[np.ndarray], np.ndarray],
    *,
    largest_offset: int,
    exact_offset: int,
    zero_scale: float,
    exact_rule: int = BY_TABLE,
) -> Tables:
    """Tables of one scheme.

    ``unit_scales``: scale of a region of each class with ``P = 0``; must be exact float32.
    ``quantizer``: maps float32 weights and their scale to (stored, decoded) arrays.
    ``pack``: maps stored values ``[..., 2]`` of the two weights of a byte to one output word.
    ``largest_offset``: beyond it every weight rounds to zero, so larger offsets share its entry.
    """
    offsets = np.arange(SMALLEST_OFFSET, largest_offset + 1)
    codes = E2M1[codes_of_bytes()]  # [256, 2]
    x = codes[None, :, :] * np.exp2(-offsets.astype(np.float32))[:, None, None]  # [offset, 256, 2]
    outs, words = [], []
    for scale in unit_scales:
        stored, decoded = quantizer(x.astype(np.float32), np.float32(scale))
        error = (decoded.astype(np.float64) * np.float64(np.float32(scale)) - x.astype(np.float64)) * np.exp2(
            offsets.astype(np.float64)
        )[:, None, None]
        inexact = (error != 0).sum(-1).astype(np.uint64)
        # An inexact weight never counts as error 0, however small the error.
        fixed = np.rint((error**2).sum(-1) * 2.0**ERROR_FRACTION_BITS).astype(np.uint64)
        fixed = np.maximum(fixed, (inexact > 0).astype(np.uint64))
        word = inexact | (fixed << np.uint64(INEXACT_BITS))
        outs.append(pack(stored))
        words.append(word)
    return Tables(
        np.ascontiguousarray(np.stack(outs)),
        np.ascontiguousarray(np.stack(words)),
        np.asarray(unit_scales, np.float64),
        exact_offset,
        zero_scale,
        exact_rule,
    )


def pack_pair_16(stored: np.ndarray) -> np.ndarray:
    """Two 8-bit values, the earlier weight in the low byte."""
    pairs = stored.view(np.uint8).astype(np.uint16)
    return pairs[..., 0] | (pairs[..., 1] << 8)


def pack_pair_8(stored: np.ndarray) -> np.ndarray:
    """Two 4-bit signed integers stored with offset 8, the earlier weight in the low nibble (compressed-tensors int32
    packing).
    """
    pairs = (stored.astype(np.int16) + 8).astype(np.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4)
