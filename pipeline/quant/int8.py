"""INT8 W8A8, one scale an output channel, activations quantized per token at run time.

``pow2``: scale ``2^(P - 6)`` where that makes the whole row exact (group exponents differ by at most 3: 6 * 2^3 * 2 =
96), else ``amax / 127`` in float32, rounded.  ``amax``: llm-compressor's ``W8A8`` (``amax / 127.5`` in the weight's
dtype).
"""

from __future__ import annotations

import numpy as np

from pipeline.quant import tables
from pipeline.checkpoint.numbers import round_bf16
from pipeline.quant.scheme import RegionScheme, amax_rule, integers

EXACT_OFFSET = 5  # 0.5 * 2^(6 - 5) = 1, the smallest integer
LOW, HIGH = -128, 127
_quantize = integers(LOW, HIGH)


def own_rule(amax: np.ndarray, dtype: str) -> np.ndarray:
    """``amax / 127`` in float32, whatever the weight's dtype; 1.0 for an all-zero row."""
    return np.where(amax == 0, np.float32(1), amax.astype(np.float32) / np.float32(HIGH)).astype(np.float32)


def _quantize_in_float32(x: np.ndarray, scale: np.ndarray, round_quotient: object) -> tuple[np.ndarray, np.ndarray]:
    return _quantize(x, scale, np.float32)


def _tables(scale: str) -> tables.Tables:
    if scale == "pow2":
        peak, peak_1_5 = (float(np.float32(p) / np.float32(HIGH)) for p in (1, 1.5))
        units, round_quotient, exact, zero = (2.0**-6, peak, peak_1_5), np.float32, EXACT_OFFSET, 1.0
    else:
        peak, peak_1_5 = (float(round_bf16(np.float32(p) / np.float32(127.5))) for p in (1, 1.5))
        units, round_quotient, exact, zero = (peak, peak, peak_1_5), round_bf16, -100, 2.0**-7
    return tables.build(
        units,
        lambda x, s: _quantize(x, s, round_quotient),
        tables.pack_pair_16,
        largest_offset=12,
        exact_offset=exact,
        zero_scale=zero,
        exact_rule=tables.BY_INT8,
    )


def scheme(scale: str) -> RegionScheme:
    """INT8 per channel, ``scale`` pow2 or amax."""
    common = {
        "num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None, "actorder": None
    }
    weights = common | {"dynamic": False, "strategy": "channel", "observer": "static_minmax", "observer_kwargs": {}}
    activations = common | {"dynamic": True, "strategy": "token", "observer": None, "observer_kwargs": {}}
    return RegionScheme(
        name="int8_channel",
        region_rows=1,
        region_columns=0,
        bits=8,
        weight_dtype="I8",
        tables=_tables(scale),
        scale_rule=own_rule if scale == "pow2" else amax_rule(127.5),
        quantizer=_quantize_in_float32 if scale == "pow2" else _quantize,
        keeps_source_dtype=scale == "amax",
        group={"format": "int-quantized", "weights": weights, "input_activations": activations},
    )
