"""Roundings, exhaustively against torch."""

import numpy as np
import pytest
import torch

from pipeline.checkpoint import numbers
from pipeline.quant import nvfp4

ALL_BF16 = numbers.bf16_values(np.arange(65536, dtype=np.uint16))


def test_e4m3_of_every_bf16_and_fp16_value_in_range():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    for values in (ALL_BF16, halves):
        values = values[np.isfinite(values) & (np.abs(values) <= 448)]
        expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(numbers.e4m3_bytes(values), expected)


def test_e4m3_of_float32_near_ties():
    rng = np.random.default_rng(0)
    exact = numbers.e4m3_values(np.arange(0x7F, dtype=np.uint8))
    middle = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9)),
                             rng.standard_normal(10000).astype(np.float32) * 50]).astype(np.float32)  # fmt: skip
    values = np.concatenate([values, -values])
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(numbers.e4m3_bytes(values), expected)


def test_e4m3_decodes_every_byte():
    data = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(data).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(numbers.e4m3_values(data), expected)


@pytest.mark.parametrize(("ours", "dtype"), [(numbers.round_bf16, torch.bfloat16), (numbers.round_fp16, torch.float16)])
def test_rounding_to_16_bits(ours, dtype):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], ALL_BF16[np.isfinite(ALL_BF16)] * np.float32(1.00390625)])
    np.testing.assert_array_equal(ours(values), torch.from_numpy(values).to(dtype).float().numpy())


def test_nvfp4_shifts_round_to_nearest_even_code():
    """Against a search over all codes in float64."""
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for shift in range(nvfp4.LARGEST_SHIFT + 1):
        for code, value in enumerate(grid):
            wanted = value / 2**shift
            best = min(range(8), key=lambda c: (abs(grid[c] - wanted), c % 2))
            byte = nvfp4.SHIFTED[shift, code | (code + 8) << 4]
            assert (byte & 15, byte >> 4) == (best, best + 8)
            assert nvfp4.CHANGED[shift, code] == (grid[best] != wanted)
            assert nvfp4.ERROR[shift, code] == (grid[best] * 2**shift - value) ** 2
    assert not nvfp4.SHIFTED[nvfp4.LARGEST_SHIFT].astype(int).__and__(0x77).any()
