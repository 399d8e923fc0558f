"""Triton helpers on int8 activation rows of two planes (`_order.Activation`): fragments in, groups out."""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import FRESH1, FRESH2, FRESH4, load_four, load_one, load_two, rows_max

GROUP_WORDS = tl.constexpr(128)
"""Words of a group of 32 of eight activation rows, both planes (`_order.Activation`)."""


@triton.jit
def activation_pointers(q, s, unit, lane, FMT: tl.constexpr, R: tl.constexpr):
    """Pointers [X, 32] of the fragment words and column scales of units `unit` [X, 1] of a block of eight rows.

    Lanes of rows from `R` (1, 4 or 8) on read a live row again: what is not read need not come from memory.
    """
    halves: tl.constexpr = 1 if FMT == 8 else 2
    words = q + unit * (halves * GROUP_WORDS) + lane // 4 % R * 16 + lane % 4 * 4
    return words, s + unit * (halves * 8) + lane % 4 * 2 % R


@triton.jit
def load_activation(
    q, s, index, FMT: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, FINE: tl.constexpr = False
):  # fmt: skip
    """Fragment registers, with `FINE` of both planes, and column scales of the unit `index` behind the pointers."""
    b = ()
    scales = ()
    halves: tl.constexpr = 1 if FMT == 8 else 2
    for half in tl.static_range(halves):
        group = index * halves + half
        if FINE:
            b = b + load_four(q + group * GROUP_WORDS, FRESH4, PTX)
        else:
            b = b + load_two(q + group * GROUP_WORDS, FRESH2, PTX)
        if R == 1:
            one = load_one(s + group * 8, FRESH1, PTX)
            scales = scales + (one, one)  # noqa: RUF005
        else:
            scales = scales + load_two(s + group * 8, FRESH2, PTX)
    return b, scales


@triton.jit
def fine_steps(top):
    """Steps of both planes in one: 1016 for a group's largest magnitude `top`."""
    return tl.where(top > 0.0, 1016.0 / top, 0.0)


@triton.jit
def fine_bytes(u, inverse):
    """`u * inverse` rounded to nearest even, |u * inverse| <= 1016, as 8 first + second: two low bytes of int32."""
    code = (u * inverse + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return ((code + 4) >> 3) & 255, (((code + 4) & 7) - 4) & 255


@triton.jit
def activation_byte(unit, row, k):
    """Where the first byte of value `k` of row `row` of eight of group `unit` lies; the second lies 8 behind it."""
    return unit * (4 * GROUP_WORDS) + row * 64 + k // 4 % 4 * 16 + k // 16 * 4 + k % 4


@triton.jit
def pack_bytes(byte, GROUPS: tl.constexpr):
    """Low bytes [GROUPS, 32] as words [GROUPS, 8]."""
    return tl.sum(tl.reshape(byte, [GROUPS, 8, 4]) << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def store_lanes(u, q_out, s_out, group, block, rows, G32: tl.constexpr, R: tl.constexpr):
    """Int8 group of 32 rows in lane form: `u` is eight [32], value 2 i + e holds (row 8 i + g, column 2c + e)."""
    lane = tl.arange(0, 32)
    unit = block * G32 + group
    for e in tl.static_range(1 if R == 1 else 2):
        column = (lane % 4) * 2 + e
        live = block * 8 + column < rows
        top = tl.maximum(tl.maximum(tl.abs(u[e]), tl.abs(u[2 + e])), tl.maximum(tl.abs(u[4 + e]), tl.abs(u[6 + e])))
        top = rows_max(top)
        inverse = fine_steps(top)
        for i in tl.static_range(4):
            first, second = fine_bytes(u[2 * i + e], inverse)
            at = q_out + activation_byte(unit, column, i * 8 + lane // 4)
            tl.store(at, first.to(tl.int8), mask=live)
            tl.store(at + 8, second.to(tl.int8), mask=live)
        tl.store(s_out + unit * 8 + column, top / 127.0, mask=live & (lane < 4))


@triton.jit
def store_groups(u, q_out, s_out, t, first, G32: tl.constexpr, GROUPS: tl.constexpr):
    """Quantise `u` [GROUPS, 32] and store it as groups first.. of row `t` of an activation of `G32` groups."""
    top = tl.max(tl.abs(u), 1)
    one, two = fine_bytes(u, fine_steps(top)[:, None])
    group = (t // 8) * G32 + first + tl.arange(0, GROUPS)
    word = tl.arange(0, 8)
    at = q_out + group[:, None] * GROUP_WORDS + (t % 8) * 16 + (word % 4 * 4 + word // 4)[None, :]
    tl.store(at, pack_bytes(one, GROUPS))
    tl.store(at + 2, pack_bytes(two, GROUPS))
    tl.store(s_out + group * 8 + t % 8, top / 127.0)
