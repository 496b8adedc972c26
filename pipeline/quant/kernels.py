"""The inner loops, compiled by numba: one table look-up for two weights, and exact counting of what changed.

All loops release the GIL and write into buffers of the caller, so memory stays flat.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.checkpoint.numbers import E8M0_BIAS
from pipeline.quant.tables import ERROR_FRACTION_BITS, EXACT, INEXACT_BITS, PEAK_1, PEAK_1_5, SMALLEST_OFFSET

EMPTY = -(1 << 20)  # "no non-zero weight here"; far below every exponent
INEXACT_MASK = np.uint64((1 << INEXACT_BITS) - 1)
ERROR_SHIFT = np.uint64(INEXACT_BITS)
ONES = np.uint64(0x1111111111111111)
ONE, TWO = np.uint64(1), np.uint64(2)
POWER_OF_4 = 4.0 ** (np.arange(256) - float(E8M0_BIAS))
ERROR_UNIT = 2.0**-ERROR_FRACTION_BITS


@njit(inline="always")
def largest_code(first, second):
    """Largest E2M1 magnitude code (0..7) among the 32 weights of two 64-bit words, by bit tests."""
    bit0 = first
    bit1 = first >> ONE
    bit2 = first >> TWO
    high = bit2 & ONES
    seven, six, five = high & bit1 & bit0, high & bit1, high & bit0
    three, two, one = bit1 & bit0 & ONES, bit1 & ONES, bit0 & ONES
    bit0 = second
    bit1 = second >> ONE
    bit2 = second >> TWO
    high2 = bit2 & ONES
    seven |= high2 & bit1 & bit0
    six |= high2 & bit1
    five |= high2 & bit0
    high |= high2
    three |= bit1 & bit0 & ONES
    two |= bit1 & ONES
    one |= bit0 & ONES
    if six:
        return 7 if seven else 6
    if high:
        return 5 if five else 4
    if two:
        return 3 if three else 2
    return 1 if one else 0


@njit(nogil=True, cache=True)
def regions(words, exponents, region_rows, region_groups, peak, lowest, highest):
    """Per region: the peak as ``2 * P + (1 if 1.5 * 2^P)``, the lowest and highest group exponent, zero groups left
    out.

    words [rows, columns/16] uint64, exponents [rows, columns/32] uint8 (biased by 127); outputs
    [rows/region_rows, columns/32/region_groups] int32, EMPTY in ``peak`` where every weight is zero.
    """
    rows, groups = exponents.shape
    for r in range(peak.shape[0]):
        for c in range(peak.shape[1]):
            peak[r, c] = EMPTY
            lowest[r, c] = -EMPTY
            highest[r, c] = EMPTY
    for row in range(rows):
        r = row // region_rows
        for group in range(groups):
            code = largest_code(words[row, 2 * group], words[row, 2 * group + 1])
            if code == 0:
                continue
            c = group // region_groups
            exponent = np.int32(exponents[row, group]) - E8M0_BIAS
            # codes 2..7 are 1, 1.5, 2, 3, 4, 6; code 1 is 0.5
            key = 2 * exponent + (code - 2 if code > 1 else -2)
            peak[r, c] = max(peak[r, c], key)
            lowest[r, c] = min(lowest[r, c], exponent)
            highest[r, c] = max(highest[r, c], exponent)


@njit(nogil=True, cache=True)
def look_up(packed, exponents, region_rows, region_groups, peak, lowest, out_table, statistics, exact_offset, out):
    """Fill ``out`` [rows, columns/2] and return (inexact weights, squared error in units of the weights squared)."""
    rows, groups = exponents.shape
    last = out_table.shape[1] - 1
    inexact = np.int64(0)
    error = 0.0
    for row in range(rows):
        r = row // region_rows
        for group in range(groups):
            c = group // region_groups
            key = peak[r, c]
            exponent = np.int32(exponents[row, group]) - E8M0_BIAS
            top = key >> 1
            offset = min(max(top - exponent - SMALLEST_OFFSET, 0), last)
            start = 16 * group
            if top - lowest[r, c] <= exact_offset:
                table = out_table[EXACT, offset]
                for j in range(start, start + 16):
                    out[row, j] = table[packed[row, j]]
                continue
            which = PEAK_1_5 if key & 1 else PEAK_1
            table = out_table[which, offset]
            words = statistics[which, offset]
            total = np.uint64(0)
            for j in range(start, start + 16):
                byte = packed[row, j]
                out[row, j] = table[byte]
                total += words[byte]
            inexact += np.int64(total & INEXACT_MASK)
            error += np.float64(total >> ERROR_SHIFT) * ERROR_UNIT * POWER_OF_4[exponents[row, group]]
    return inexact, error


@njit(nogil=True, cache=True)
def signal_power(packed, exponents, squares):
    """Sum of squared weights; ``squares[byte]`` is four times the two codes' squares."""
    total = 0.0
    rows, groups = exponents.shape
    for row in range(rows):
        for group in range(groups):
            partial = np.int64(0)
            for j in range(16 * group, 16 * group + 16):
                partial += squares[packed[row, j]]
            total += partial * 0.25 * POWER_OF_4[exponents[row, group]]
    return total
