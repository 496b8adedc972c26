"""The number formats, in numpy: E2M1 codes, rounding to bf16, fp16 and E4M3.  Every rounding is to nearest, ties to
even.
"""

from __future__ import annotations

import numpy as np

# OCP Microscaling Formats 1.0: 4-bit codes (bit 3 is the sign), E8M0 exponents with bias 127 (255 is NaN).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
E8M0_BIAS = 127
E8M0_NAN = 255
E4M3_MAX = 448.0
BF16_EPS = 2.0**-7
FP16_EPS = 2.0**-10
F32_EPS = 2.0**-23


def codes_of_bytes() -> np.ndarray:
    """The two codes in each byte value, ``[256, 2]``: the low nibble is the earlier weight."""
    values = np.arange(256)
    return np.stack([values & 15, values >> 4], axis=1)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16 value, kept as float32.  NaN stays NaN."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)
    rounded = np.where(np.isnan(x), np.float32("nan"), rounded.view(np.float32))
    return rounded.astype(np.float32, copy=False)


def round_fp16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest float16 value, kept as float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits (uint16), rounded."""
    return (round_bf16(x).view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_bytes(x: np.ndarray) -> np.ndarray:
    """Round finite float32 in [-448, 448] to E4M3 (``float8_e4m3fn``) bytes; the sign of zero is kept."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Normal numbers (>= 2^-6): round at the third mantissa bit, then move the exponent's bias from 127 to 7.
    normal = (magnitude + (0x7FFFF + ((magnitude >> 20) & 1)).astype(np.uint32)) >> 20
    normal = normal.astype(np.int64) - ((127 - 7) << 3)
    subnormal = np.rint(np.abs(x) * np.float32(512)).astype(np.int64)
    return np.where(magnitude >= 0x3C800000, normal, subnormal).astype(np.uint8) | sign


def e4m3_values(data: np.ndarray) -> np.ndarray:
    """E4M3 bytes -> float32, exactly (0x7F and 0xFF are NaN)."""
    return _E4M3[data]


def _decode_e4m3() -> np.ndarray:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(byte & 0x80, -values, values)
    values[[0x7F, 0xFF]] = np.nan
    return values.astype(np.float32)


_E4M3 = _decode_e4m3()


def mxfp4_values(packed: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Decode ``packed [rows, columns/2]`` and E8M0 ``exponents [rows, columns/32]`` to float32 ``[rows, columns]``.

    6 * 2^127 overflows to infinity; what rounds the result refuses it.
    """
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - E8M0_BIAS).astype(np.float32)
    with np.errstate(over="ignore"):
        return E2M1[codes] * np.repeat(scale, 32, axis=1)
