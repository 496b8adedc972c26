"""W4A16: 4-bit symmetric integers in groups of 32 (or 64, 128), 16-bit activations; llm-compressor's RTN, bit for bit.

scale = ``amax / 7.5`` in the weight's dtype, value = round(clamp(weight / scale, -8, 7)) with the quotient rounded to
that dtype too.  Packed as compressed-tensors does: eight values an int32, offset by 8, the earliest in the lowest
bits.

:func:`control` is the same container with four values only, -2..1: damage on purpose.
"""

from __future__ import annotations

import numpy as np

from pipeline.quant import tables
from pipeline.checkpoint.numbers import round_bf16
from pipeline.quant.scheme import RegionScheme, amax_rule, integers


def _scheme(name: str, group_size: int, low: int, high: int) -> RegionScheme:
    divisor = (high - low) / 2
    quantize = integers(low, high)
    peak, peak_1_5 = (float(round_bf16(np.float32(p) / np.float32(divisor))) for p in (1, 1.5))
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group",
        "group_size": group_size, "block_structure": None, "actorder": None,
        "observer": "static_minmax", "observer_kwargs": {},
    }  # fmt: skip
    return RegionScheme(
        name=f"{name} group {group_size}",
        region_rows=1,
        region_columns=group_size,
        bits=4,
        weight_dtype="I32",
        tables=tables.build(
            (peak, peak, peak_1_5),
            lambda x, s: quantize(x, s, round_bf16),
            tables.pack_pair_8,
            largest_offset=8,
            exact_offset=-100,
            zero_scale=2.0**-7,
        ),
        scale_rule=amax_rule(divisor),
        quantizer=quantize,
        keeps_source_dtype=True,
        group={"format": "pack-quantized", "weights": weights, "input_activations": None},
    )


def scheme(group_size: int) -> RegionScheme:
    """W4A16 with groups of ``group_size`` weights."""
    return _scheme("w4a16", group_size, -8, 7)


def control(group_size: int) -> RegionScheme:
    """2-bit values in a 4-bit container, for tests that the evaluation sees damage."""
    return _scheme("w2_control", group_size, -2, 1)
