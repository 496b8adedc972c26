"""FP8 E4M3, one scale per 128x128 block or per output channel, activations quantized at run time.

``pow2``: scale ``2^(P - 8)`` puts the region's peak just below 448.  Every MXFP4 value is then exact while the
region's group exponents differ by at most 14, subnormals included (0.5 * 2^-8 = 2^-9 is E4M3's smallest number).
Power-of-two scales also survive UE8M0 rounding of block scales on Blackwell.  ``amax``: llm-compressor's
``FP8_BLOCK`` and ``FP8_DYNAMIC``.
"""

from __future__ import annotations

import numpy as np

from pipeline.quant import tables
from pipeline.checkpoint.numbers import E4M3_MAX, round_bf16
from pipeline.quant.scheme import RegionScheme, amax_rule, e4m3

BLOCK = 128
# Up to here all are normal numbers and computed without a table; the table is exact up to 16: 0.5 * 2^(8 - 16) = 2^-9.
NORMAL_OFFSET = 13
SMALLEST_SCALE_EXPONENT = -126  # a subnormal scale may be flushed to zero by the kernel that reads it


def pow2_rule(amax: np.ndarray, dtype: str) -> np.ndarray:
    """The smallest power of two that brings ``amax`` to at most 448; 1.0 for an all-zero region."""
    mantissa, exponent = np.frexp(amax)
    exponent = exponent - 9 + (mantissa > 0.875)  # 448 = 0.875 * 2^9
    return np.where(amax == 0, 1.0, np.ldexp(1.0, np.maximum(exponent, SMALLEST_SCALE_EXPONENT))).astype(np.float32)


def _tables(scale: str) -> tables.Tables:
    if scale == "pow2":
        units, round_quotient, exact, zero = (2.0**-8,) * 3, np.float32, NORMAL_OFFSET, 1.0
    else:
        peak, peak_1_5 = (float(round_bf16(np.float32(p) / np.float32(E4M3_MAX))) for p in (1, 1.5))
        units, round_quotient, exact, zero = (peak, peak, peak_1_5), round_bf16, -100, 2.0**-7
    return tables.build(
        units,
        lambda x, s: e4m3(x, s, round_quotient),
        tables.pack_pair_16,
        largest_offset=24,
        exact_offset=exact,
        zero_scale=zero,
        exact_rule=tables.BY_E4M3,
    )


def scheme(block: bool, scale: str) -> RegionScheme:
    """FP8 with 128x128 blocks or per channel, ``scale`` pow2 or amax."""
    weights = {
        "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
        "strategy": "block" if block else "channel",
        "block_structure": [BLOCK, BLOCK] if block else None, "group_size": None, "actorder": None,
        "observer": "static_minmax", "observer_kwargs": {},
    }  # fmt: skip
    activations = {
        "num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "group" if block else "token",
        "group_size": BLOCK if block else None, "block_structure": None, "actorder": None, "observer": None,
        "observer_kwargs": {},
    }  # fmt: skip
    return RegionScheme(
        name="fp8_block" if block else "fp8_channel",
        region_rows=BLOCK if block else 1,
        region_columns=BLOCK if block else 0,
        bits=8,
        weight_dtype="F8_E4M3",
        tables=_tables(scale),
        scale_rule=pow2_rule if scale == "pow2" else amax_rule(E4M3_MAX),
        quantizer=e4m3,
        keeps_source_dtype=scale == "amax",
        group={"format": "float-quantized", "weights": weights, "input_activations": activations},
    )
