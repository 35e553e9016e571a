"""The k largest of every row of a tile on the chip, ties to the lowest column; `topk_gate` and `topk` share it.

Values become int32 keys in the same order, so that every value a float can have, infinities and NaN too, lies above the
key of what is out of the race. A choice is a maximum over the row and the first column that has it. Keys of 16-bit
values have room for the column, which makes them distinct and spares the search for it.
"""

import triton
import triton.language as tl

MOST_COLUMNS = 1024
MOST_CHOICES = 8
_COLUMN_BITS = tl.constexpr(10)
_LAST_COLUMN = tl.constexpr(1023)
_OUT = tl.constexpr(-(2**31))  # the key of no value: in fp32 its bits would be those of a NaN
_NAN = tl.constexpr(2**31 - 1)
_NARROW_NAN = tl.constexpr(2**15 - 1)


def rows_and_warps(columns: int) -> tuple[int, int, int]:
    """(rows of a program, columns rounded up to a power of two, warps): about 32 values a thread, a row in one warp."""
    block = triton.next_power_of_2(columns)
    return (min(128, 4096 // block), block, 4) if block <= 128 else (max(1, 1024 // block), block, 1)


@triton.jit
def first_maxima(
    values_TE, column_E, is_real_E, BLOCK_T: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr
):  # fmt: skip
    """The TOP_K largest real values of every row, largest first, and their columns, both [BLOCK_T, CHOICES].

    NaN is the largest; -0 and 0 are equal, and come out as 0. Columns past TOP_K hold anything.
    """
    keys_TE = _keys(values_TE, column_E, is_real_E)
    choice_C = tl.arange(0, CHOICES)
    key_TC = tl.full((BLOCK_T, CHOICES), 0, tl.int32)
    place_TC = tl.full((BLOCK_T, CHOICES), 0, tl.int32)
    for choice in tl.static_range(TOP_K):
        best_T = tl.max(keys_TE, 1)
        key_TC = tl.where(choice_C[None, :] == choice, best_T[:, None], key_TC)
        is_taken_TE = keys_TE == best_T[:, None]
        if values_TE.dtype == tl.float32:
            place_T = tl.min(tl.where(is_taken_TE, column_E[None, :], _LAST_COLUMN), 1)
            place_TC = tl.where(choice_C[None, :] == choice, place_T[:, None], place_TC)
            is_taken_TE = column_E[None, :] == place_T[:, None]
        keys_TE = tl.where(is_taken_TE, _OUT, keys_TE)
    if values_TE.dtype == tl.float32:
        bits_TC = tl.where(key_TC < 0, key_TC ^ _NAN, key_TC)
    else:
        place_TC = (key_TC & _LAST_COLUMN) ^ _LAST_COLUMN
        key_TC = key_TC >> _COLUMN_BITS
        bits_TC = tl.where(key_TC < 0, key_TC ^ _NARROW_NAN, key_TC).to(tl.int16)
    return bits_TC.to(values_TE.dtype, bitcast=True), place_TC


@triton.jit
def _keys(values_TE, column_E, is_real_E):
    wide_TE = values_TE.to(tl.float32)
    if values_TE.dtype == tl.float32:
        bits_TE = values_TE.to(tl.int32, bitcast=True)
        keys_TE = tl.where(bits_TE < 0, bits_TE ^ _NAN, bits_TE)
        keys_TE = tl.where(wide_TE == wide_TE, tl.where(wide_TE == 0.0, 0, keys_TE), _NAN)
    else:
        bits_TE = values_TE.to(tl.int16, bitcast=True).to(tl.int32)
        keys_TE = tl.where(bits_TE < 0, bits_TE ^ _NARROW_NAN, bits_TE)
        keys_TE = tl.where(wide_TE == wide_TE, tl.where(wide_TE == 0.0, 0, keys_TE), _NARROW_NAN)
        keys_TE = (keys_TE << _COLUMN_BITS) | (column_E ^ _LAST_COLUMN)[None, :]
    return tl.where(is_real_E[None, :], keys_TE, _OUT)
