"""Triton helpers of the sparse MLP in decode: the top-k choice, rows grouped by expert, products of gathered rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import (
    FRESH1,
    add_unit,
    load_one,
    load_unit,
    round_bytes,
    rows_max,
    unit_pointers,
    unpack_scales,
)

LIST = tl.constexpr(64)
"""Room in an expert's list of rows: most rows of a row call."""


@triton.jit
def top_experts(logits, t, rows, OP: tl.constexpr, E: tl.constexpr, TOPK: tl.constexpr, PTX: tl.constexpr):
    """Top `TOPK` of `E` logits of rows `t` [L], each within its warp: tuples of [L] vectors (ids int32, raw logits).

    Order: logit descending, then id ascending. Rows from `rows` on repeat the last.
    """
    lane = tl.arange(0, 32)[None, :]
    line = logits + tl.minimum(t, rows - 1)[:, None] * (E + 1) + lane
    ranks = ()
    for j in tl.static_range((E + 31) // 32):
        if E % 32 == 0:
            bits = load_one(line + j * 32, OP, PTX).to(tl.int32, bitcast=True)
        else:  # lanes past the last expert read the shared expert's gate, and drop it
            bits = load_one(line + tl.minimum(j * 32, E - lane), OP, PTX).to(tl.int32, bitcast=True)
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ranks = ranks + (tl.where(j * 32 + lane < E, rank, -2147483648),)  # noqa: RUF005
    ids = ()
    chosen = ()
    for _s in tl.static_range(TOPK):
        most = ranks[0]
        for j in tl.static_range(1, (E + 31) // 32):
            most = tl.maximum(most, ranks[j])
        best = tl.max(most, 1)
        place = tl.where(ranks[0] == best[:, None], lane, E)
        for j in tl.static_range(1, (E + 31) // 32):
            place = tl.minimum(place, tl.where(ranks[j] == best[:, None], j * 32 + lane, E))
        at = tl.min(place, 1)
        left = ()
        for j in tl.static_range((E + 31) // 32):
            left = left + (tl.where(j * 32 + lane == at[:, None], -2147483648, ranks[j]),)  # noqa: RUF005
        ranks = left
        ids = ids + (at,)  # noqa: RUF005
        chosen = chosen + ((best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True),)  # noqa: RUF005
    return ids, chosen


@triton.jit
def shares_of(chosen, TOPK: tl.constexpr):
    """Softmax over the chosen logits, largest first: a tuple of [L]."""
    total = tl.zeros_like(chosen[0])
    for s in tl.static_range(TOPK):
        total += tl.exp(chosen[s] - chosen[0])
    shares = ()
    for s in tl.static_range(TOPK):
        shares = shares + (tl.exp(chosen[s] - chosen[0]) / total,)  # noqa: RUF005
    return shares


@triton.jit
def element(values, slot, TOPK: tl.constexpr):
    """values[slot] of a tuple of vectors, `slot` known only at run time (a number or a vector)."""
    found = values[0]
    for s in tl.static_range(1, TOPK):
        found = tl.where(slot == s, values[s], found)
    return found


@triton.jit
def gathered_pointers(q, s, unit, lane, row, even, odd, G32: tl.constexpr, FMT: tl.constexpr):
    """Pointers [X, 32] into an activation whose columns are any of its rows.

    `row` [X, 32]: the row of column lane // 4; `even`, `odd`: the rows of columns 2 (lane % 4) and the next.
    """
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    first = unit * HALVES
    words = q + (row // 8) * (G32 * 64) + (row % 8) * 8 + first * 64 + lane % 4
    low = s + (even // 8) * (G32 * 8) + even % 8 + first * 8
    return words, low, s + (odd // 8) * (G32 * 8) + odd % 8 + first * 8


@triton.jit
def pair_pointers(q, s, unit, lane, row, even, odd, G32: tl.constexpr, FMT: tl.constexpr):
    """The same into expert rows [pair, G32, 8 words]: `row`, `even`, `odd` are pairs."""
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    first = unit * HALVES
    return q + (row * G32 + first) * 8 + lane % 4, s + even * G32 + first, s + odd * G32 + first


@triton.jit
def columns(q, even, odd, index, WORDS: tl.constexpr, SCALES: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Fragment registers and column scales of the unit `index` units behind the pointers; distances between groups."""
    b = ()
    scales = ()
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    for half in tl.static_range(HALVES):
        group = index * HALVES + half
        words = q + group * WORDS
        b = b + (load_one(words, FRESH1, PTX), load_one(words + 4, FRESH1, PTX))  # noqa: RUF005
        low = load_one(even + group * SCALES, FRESH1, PTX)
        scales = scales + (low, load_one(odd + group * SCALES, FRESH1, PTX))  # noqa: RUF005
    return b, scales


@triton.jit
def pair_units(w, wh, ws, tile, first, lane, U: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, FMT: tl.constexpr,
               PTX: tl.constexpr):  # fmt: skip
    """Units first, first + STEP, .. (`S` of them) of two row tiles: a flat tuple, tile by tile within a step."""
    wp, hp, sp = unit_pointers(w, wh, ws, tile * U + first, lane, FMT)
    units = ()
    for i in tl.static_range(S):
        for r in tl.static_range(2):
            units = units + (load_unit(wp, hp, sp, r * U + i * STEP, FMT, PTX),)  # noqa: RUF005
    return units


@triton.jit
def pair_sums(acc, units, q, even, odd, S: tl.constexpr, STEP: tl.constexpr, X: tl.constexpr, FMT: tl.constexpr,
              PTX: tl.constexpr):  # fmt: skip
    """Two accumulators plus those units times expert rows, one unit after the other."""
    for i in tl.static_range(S):
        b, scales = columns(q, even, odd, i * STEP, 8, 1, FMT, PTX)
        grown = ()
        for r in tl.static_range(2):
            unit = units[i * 2 + r]
            low, top = unpack_scales(unit[2], FMT)
            grown = grown + (add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX),)  # noqa: RUF005
        acc = grown
    return acc


@triton.jit
def store_pairs(h, hq, hs, even, odd, live_even, live_odd, group, G32: tl.constexpr):
    """Int8 group of expert rows in lane form: eight [32] as in `store_lanes`; pairs of a lane's two columns."""
    lane = tl.arange(0, 32)
    for e in tl.static_range(2):
        pair = odd if e == 1 else even
        live = live_odd if e == 1 else live_even
        top = tl.maximum(tl.maximum(tl.abs(h[e]), tl.abs(h[2 + e])), tl.maximum(tl.abs(h[4 + e]), tl.abs(h[6 + e])))
        top = rows_max(top)
        inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
        at = pair * G32 + group
        for i in tl.static_range(4):
            byte = round_bytes(h[2 * i + e], inverse).to(tl.int8)
            tl.store(hq + at * 32 + i * 8 + lane // 4, byte, mask=live)
        tl.store(hs + at, top / 127.0, mask=live & (lane < 4))


@triton.jit
def gathered_squares(ss, even, odd, PARTS: tl.constexpr, PTX: tl.constexpr):
    """`lane_squares` of rows `even`, `odd` [32] of an activation."""
    lane = tl.arange(0, 32)
    at_even = (even // 8) * (PARTS * 8) + even % 8
    at_odd = (odd // 8) * (PARTS * 8) + odd % 8
    a = tl.zeros([32], tl.float32)
    b = tl.zeros([32], tl.float32)
    for i in tl.static_range((PARTS + 7) // 8):
        part = i * 8 + lane // 4
        place = tl.minimum(part, PARTS - 1) * 8
        a += tl.where(part < PARTS, load_one(ss + at_even + place, FRESH1, PTX), 0.0)
        b += tl.where(part < PARTS, load_one(ss + at_odd + place, FRESH1, PTX), 0.0)
    return a, b
