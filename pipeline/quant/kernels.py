"""The inner loops, compiled by numba: one table look-up for two weights, and exact counting of what changed.

Where a region is exact, E4M3 and INT8 need no table: eight weights at a time by integer arithmetic on 64-bit words,
which compilers vectorize.

All loops release the GIL and write into buffers of the caller, so memory stays flat.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pipeline.checkpoint.numbers import E8M0_BIAS
from pipeline.quant.tables import BY_E4M3, BY_TABLE, ERROR_FRACTION_BITS, EXACT, INEXACT_BITS, PEAK_1, PEAK_1_5, SMALLEST_OFFSET

EMPTY = -(1 << 20)  # "no non-zero weight here"; far below every exponent
INEXACT_MASK = np.uint64((1 << INEXACT_BITS) - 1)
ERROR_SHIFT = np.uint64(INEXACT_BITS)
ONES = np.uint64(0x1111111111111111)
BYTES = np.uint64(0x0101010101010101)
ONE, TWO = np.uint64(1), np.uint64(2)
POWER_OF_2 = 2.0 ** (np.arange(256) - float(E8M0_BIAS))
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


@njit(inline="always")
def spread_nibbles(word):
    """The eight 4-bit codes of a 32-bit word, one a byte, in order."""
    word = (word | (word << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    word = (word | (word << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    return (word | (word << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)


@njit(nogil=True, cache=True)
def settle(peak, lowest, highest, exact_offset, unit_scale, zero_scale, region_class, scale):
    """Per region: its class and its scale.  Returns (lowest exponent, highest exponent, largest spread) of all that
    are not zero.

    peak, lowest, highest int32 as :func:`regions` left them; region_class uint8, scale float32, all of one shape.
    """
    low, high, spread = -EMPTY, EMPTY, 0
    for r in range(peak.shape[0]):
        for c in range(peak.shape[1]):
            key = peak[r, c]
            if key == EMPTY:
                region_class[r, c], scale[r, c] = EXACT, zero_scale
                continue
            low, high = min(low, lowest[r, c]), max(high, highest[r, c])
            spread = max(spread, highest[r, c] - lowest[r, c])
            top = key >> 1
            if top - lowest[r, c] <= exact_offset:
                which = EXACT
            else:
                which = PEAK_1_5 if key & 1 else PEAK_1
            region_class[r, c] = which
            scale[r, c] = unit_scale[which] * POWER_OF_2[min(max(top + E8M0_BIAS, 0), 255)]
    return low, high, spread


@njit(nogil=True, cache=True)
def offsets(exponents, region_rows, peak, largest_offset, offset):
    """Per group: its exponent's distance from its region's peak, clamped to the tables' range; offset int8, like
    exponents.
    """
    rows, columns = exponents.shape[0], peak.shape[1]
    width = exponents.shape[1] // columns
    for row in range(rows):
        for c in range(columns):
            top = np.int64(peak[row // region_rows, c] >> 1) + E8M0_BIAS
            for group in range(c * width, (c + 1) * width):
                offset[row, group] = min(max(top - exponents[row, group], SMALLEST_OFFSET), largest_offset)


@njit(nogil=True, cache=True)
def exact_e4m3(words, offset, out):
    """One row of E2M1 codes as E4M3 bytes of ``code * 2^(8 - offset)``; offsets of at most 13 (of groups that are not
    zero).

    There all results are normal numbers (an all-zero group may have any offset).  An E2M1 code c >= 2 has its
    exponent and mantissa bits where E4M3 wants them, two places lower: the byte is ``4 * c`` plus the difference of
    the exponents.  0.5 (code 1) is subnormal in E2M1 and normal here; 0 is 0 in both.  words [columns/8] uint32,
    offset [columns/32] int8, out [columns/8] uint64 (eight bytes each).
    """
    for group in range(offset.shape[0]):
        bias = BYTES * (np.uint64(14 - np.int64(offset[group])) << np.uint64(3))
        for j in range(4 * group, 4 * group + 4):
            codes = spread_nibbles(np.uint64(words[j]))
            magnitude = codes & (BYTES * np.uint64(7))
            some = ((magnitude + BYTES * np.uint64(0x7F)) >> np.uint64(7)) & BYTES
            normal = ((magnitude + BYTES * np.uint64(0x7E)) >> np.uint64(7)) & BYTES
            exponent = ((some << np.uint64(8)) - some) & bias
            sign = (codes & (BYTES * np.uint64(8))) << np.uint64(4)
            out[j] = ((magnitude << TWO) + exponent - ((some ^ normal) << TWO)) | sign


@njit(nogil=True, cache=True)
def exact_int8(words, offset, out):
    """One row of E2M1 codes as INT8 bytes of ``code * 2^(6 - offset)``; offsets of at most 5, where all are integers.
    """
    for group in range(offset.shape[0]):
        shift = np.uint64(5 - min(np.int64(offset[group]), 5))  # an all-zero group may lie anywhere
        for j in range(4 * group, 4 * group + 4):
            codes = spread_nibbles(np.uint64(words[j]))
            magnitude = codes & (BYTES * np.uint64(7))
            bit0, bit1, bit2 = magnitude & BYTES, (magnitude >> ONE) & BYTES, (magnitude >> TWO) & BYTES
            # twice the codes' values: 0, 1, 2, 3, 4, 6, 8, 12
            value = magnitude + (bit2 & bit0) + ((bit2 & bit1) << ONE) + ((bit2 & bit1 & bit0) << ONE)
            value = value << shift
            negative = (codes >> np.uint64(3)) & ((magnitude + BYTES * np.uint64(0x7F)) >> np.uint64(7)) & BYTES
            # two's complement byte by byte; never of 0, which would carry into the next
            out[j] = (value ^ ((negative << np.uint64(8)) - negative)) + negative


@njit(nogil=True, cache=True)
def all_exact(region_class):
    """Whether all regions of a row are exact."""
    for c in range(region_class.shape[0]):
        if region_class[c] != EXACT:
            return False
    return True


@njit(nogil=True, cache=True)
def convert(packed, exponents, region_rows, offset, region_class, out_table, statistics, rule, out, out_words):
    """Fill ``out`` [rows, columns/2] and return (inexact weights, squared error in units of the weights squared).

    ``rule`` BY_E4M3 or BY_INT8 computes exact rows eight weights at a time instead of looking them up, into
    ``out_words`` [rows, columns/8] uint64, the same memory as ``out``.
    """
    words = packed.view(np.uint32)
    columns = region_class.shape[1]
    width = offset.shape[1] // columns
    inexact = np.int64(0)
    error = 0.0
    for row in range(packed.shape[0]):
        r = row // region_rows
        if rule != BY_TABLE and all_exact(region_class[r]):
            if rule == BY_E4M3:
                exact_e4m3(words[row], offset[row], out_words[row])
            else:
                exact_int8(words[row], offset[row], out_words[row])
            continue
        for c in range(columns):
            for group in range(c * width, (c + 1) * width):
                table = out_table[region_class[r, c], offset[row, group] - SMALLEST_OFFSET]
                counts = statistics[region_class[r, c], offset[row, group] - SMALLEST_OFFSET]
                total = np.uint64(0)
                for j in range(16 * group, 16 * group + 16):
                    byte = packed[row, j]
                    out[row, j] = table[byte]
                    total += counts[byte]
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
