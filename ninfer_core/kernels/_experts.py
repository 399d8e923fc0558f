"""Triton helpers of the sparse MLP in decode: the top-k choice, rows grouped by expert, products of gathered rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import (
    FRESH1,
    add_unit,
    lane_factors,
    load_one,
    load_unit,
    round_bytes,
    rows_max,
    silu,
    sum_warps,
    unit_pointers,
    unpack_scales,
)
from .linear_decode import fresh, load_units
from .mlp_decode import swiglu

LIST = tl.constexpr(64)
"""Most rows of a row call."""
ITEM = tl.constexpr(16)
"""Words of a work item: up to eight pairs, their expert, how many they are."""


@triton.jit
def sort_neighbours(ranks, ids, FIRST: tl.constexpr):
    """One pass of a stable sort, larger ranks first: places FIRST and FIRST + 1, and so on, change where they must."""
    N: tl.constexpr = len(ranks)
    found = ()
    names = ()
    for j in tl.static_range(N):
        if j >= FIRST and (j - FIRST) % 2 == 0 and j + 1 < N:
            change = ranks[j] < ranks[j + 1]
            found = found + (tl.maximum(ranks[j], ranks[j + 1]),)  # noqa: RUF005
            names = names + (tl.where(change, ids[j + 1], ids[j]),)  # noqa: RUF005
        elif j > FIRST and (j - FIRST) % 2 == 1:
            change = ranks[j - 1] < ranks[j]
            found = found + (tl.minimum(ranks[j - 1], ranks[j]),)  # noqa: RUF005
            names = names + (tl.where(change, ids[j - 1], ids[j]),)  # noqa: RUF005
        else:
            found = found + (ranks[j],)  # noqa: RUF005
            names = names + (ids[j],)  # noqa: RUF005
    return found, names


@triton.jit
def sorted_experts(logits, t, rows, OP: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr):
    """Logits of rows `t` [L] as order-keeping int32 and their ids: [L, 32] a lane's E / 32 of them, the best first.

    Order: logit descending, then id ascending. Rows from `rows` on repeat the last.
    """
    lane = tl.arange(0, 32)[None, :]
    line = logits + tl.minimum(t, rows - 1)[:, None] * (E + 1) + lane
    N: tl.constexpr = (E + 31) // 32
    ranks = ()
    ids = ()
    for j in tl.static_range(N):
        if E % 32 == 0:
            bits = load_one(line + j * 32, OP, PTX).to(tl.int32, bitcast=True)
        else:  # lanes past the last expert read the shared expert's gate, and drop it
            bits = load_one(line + tl.minimum(j * 32, E - lane), OP, PTX).to(tl.int32, bitcast=True)
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        ranks = ranks + (tl.where(j * 32 + lane < E, rank, -2147483648),)  # noqa: RUF005
        ids = ids + (tl.minimum(j * 32 + lane, E - 1) + tl.zeros_like(rank),)  # noqa: RUF005
    for n in tl.static_range(N):
        if N > 1:
            ranks, ids = sort_neighbours(ranks, ids, n % 2)
    return ranks, ids


@triton.jit
def best_expert(ranks, ids, E: tl.constexpr):
    """The best of all lanes' first: its rank and id, [L] each."""
    best = tl.max(ranks[0], 1)
    return best, tl.min(tl.where(ranks[0] == best[:, None], ids[0], E - 1), 1)


@triton.jit
def without_expert(ranks, ids, at, E: tl.constexpr):
    """`ranks`, `ids` where expert `at` [L] is gone: its lane's others move up."""
    gone = ids[0] == at[:, None]
    N: tl.constexpr = len(ranks)
    left = ()
    names = ()
    for j in tl.static_range(N):
        if j + 1 < N:
            left = left + (tl.where(gone, ranks[j + 1], ranks[j]),)  # noqa: RUF005
            names = names + (tl.where(gone, ids[j + 1], ids[j]),)  # noqa: RUF005
        else:
            left = left + (tl.where(gone, -2147483648, ranks[j]),)  # noqa: RUF005
            names = names + (tl.where(gone, E - 1, ids[j]),)  # noqa: RUF005
    return left, names


@triton.jit
def top_experts(logits, t, rows, OP: tl.constexpr, E: tl.constexpr, TOPK: tl.constexpr, PTX: tl.constexpr):
    """Top `TOPK` of `E` logits of rows `t` [L], each within its warp: tuples of [L] vectors (ids int32, raw logits)."""
    ranks, ids = sorted_experts(logits, t, rows, OP, E, PTX)
    found = ()
    chosen = ()
    for s in tl.static_range(TOPK):
        best, at = best_expert(ranks, ids, E)
        if s + 1 < TOPK:
            ranks, ids = without_expert(ranks, ids, at, E)
        found = found + (at,)  # noqa: RUF005
        chosen = chosen + ((best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True),)  # noqa: RUF005
    return found, chosen


@triton.jit
def expert_of(logits, t, rows, slot, OP: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr):
    """`top_experts(..)[0][slot]` of rows `t` [L], with no more turns than `slot` (a number) needs."""
    ranks, ids = sorted_experts(logits, t, rows, OP, E, PTX)
    turn = 0
    while turn < slot:
        _best, at = best_expert(ranks, ids, E)
        ranks, ids = without_expert(ranks, ids, at, E)
        turn += 1
    _best, at = best_expert(ranks, ids, E)
    return at


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
def columns(q, even, odd, index, WORDS: tl.constexpr, SCALES: tl.constexpr, FMT: tl.constexpr, OP: tl.constexpr,
            R: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Fragment registers and column scales of the unit `index` units behind the pointers; distances between groups.

    With one live row (`R`) a lane's second column is its first.
    """
    b = ()
    scales = ()
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    for half in tl.static_range(HALVES):
        group = index * HALVES + half
        words = q + group * WORDS
        b = b + (load_one(words, OP, PTX), load_one(words + 4, OP, PTX))  # noqa: RUF005
        low = load_one(even + group * SCALES, OP, PTX)
        top = low
        if R > 1:
            top = load_one(odd + group * SCALES, OP, PTX)
        scales = scales + (low, top)  # noqa: RUF005
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
              OP: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Two accumulators plus those units times expert rows, one unit after the other."""
    RUN: tl.constexpr = 4 if S % 4 == 0 else S  # columns that are under way at once
    for c in tl.static_range(S // RUN):
        loaded = ()
        for i in tl.static_range(RUN):
            loaded = loaded + (columns(q, even, odd, (c * RUN + i) * STEP, 8, 1, FMT, OP, R, PTX),)  # noqa: RUF005
        for i in tl.static_range(RUN):
            b, scales = loaded[i]
            grown = ()
            for r in tl.static_range(2):
                unit = units[(c * RUN + i) * 2 + r]
                low, top = unpack_scales(unit[2], FMT)
                grown = grown + (add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX, R),)  # noqa: RUF005
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
def store_pair(h, hq, hs, pair, group, G32: tl.constexpr):
    """The same for one pair: four [32], value i holds row 8 i + g in every column."""
    lane = tl.arange(0, 32)
    top = rows_max(tl.maximum(tl.maximum(tl.abs(h[0]), tl.abs(h[1])), tl.maximum(tl.abs(h[2]), tl.abs(h[3]))))
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    own = tl.where(lane % 4 < 2, tl.where(lane % 4 == 0, h[0], h[1]), tl.where(lane % 4 == 2, h[2], h[3]))
    at = pair * G32 + group
    tl.store(hq + at * 32 + lane % 4 * 8 + lane // 4, round_bytes(own, inverse).to(tl.int8))
    tl.store(hs + at + lane * 0, top / 127.0, mask=lane == 0)


@triton.jit
def row_squares(ss, row, PARTS: tl.constexpr, OP: tl.constexpr, PTX: tl.constexpr):
    """`lane_squares` of one row of an activation, the same for every column: [32]."""
    lane = tl.arange(0, 32)
    line = ss + (row // 8) * (PARTS * 8) + row % 8
    total = tl.zeros([32], tl.float32)
    for i in tl.static_range((PARTS + 7) // 8):
        part = i * 8 + lane // 4
        total += tl.where(part < PARTS, load_one(line + tl.minimum(part, PARTS - 1) * 8, OP, PTX), 0.0)
    return total


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


@triton.jit
def slots_of(ids, t, rows, expert, TOPK: tl.constexpr):
    """[experts, rows]: the slot in which a row chose an expert, or -1."""
    slot = tl.full([expert.shape[0], t.shape[0]], -1, tl.int32)
    for s in tl.static_range(TOPK):
        chosen = tl.load(ids + t * TOPK + s, mask=t < rows, other=-1)
        slot = tl.where(chosen[None, :] == expert[:, None], s, slot)
    return slot


@triton.jit
def row_columns(q, s, ss, row, OP: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr,
                FMT: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """A warp's share of one activation row, unit by unit, and the row's `row_squares`."""
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    words, scales, _odd = gathered_pointers(q, s, warp, lane, row, row + lane * 0, row, K // 32, FMT)
    loaded = ()
    for i in tl.static_range(U // X):
        loaded = loaded + (columns(words, scales, scales, i * X, 64, 8, FMT, OP, 1, PTX),)  # noqa: RUF005
    return loaded, row_squares(ss, row, PARTS, OP, PTX)


@triton.jit
def pair_tile(
    w, wh, ws, hq, hs, expert, tile, loaded, squares, pair, eps,
    INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr, X: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """32 gate rows and the matching 32 up rows of `expert` (a number or [X, 1]) for one row, stored as `pair`."""
    y = sum_warps(tile_sums(w, wh, ws, expert, tile, loaded, 0, 0, 0, INTER, U, FMT, S, X, 1, PTX), 1)
    factor = lane_factors((squares, squares), eps, K)[0]
    h = ()
    for i in tl.static_range(4):
        gate = y[i // 2][i % 2 * 2] * factor
        up = y[2 + i // 2][i % 2 * 2] * factor
        h = h + (silu(gate) * up,)  # noqa: RUF005
    store_pair(h, hq, hs, pair, tile, INTER // 32)


@triton.jit
def item_tile(
    w, wh, ws, xq, xs, ss, hq, hs, line, expert, live, tile, eps,
    TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`pair_tile` for the `live` pairs of an item."""
    lane = tl.arange(0, 32)
    column = lane % 4 * 2
    even = load_one(line + tl.minimum(column, live - 1), FRESH1, PTX)
    odd = load_one(line + tl.minimum(column + 1, live - 1), FRESH1, PTX)
    own = load_one(line + tl.minimum(lane // 4, live - 1), FRESH1, PTX)
    q, low, top = gathered_pointers(
        xq, xs, tl.arange(0, X)[:, None], lane[None, :], (own // TOPK)[None, :], (even // TOPK)[None, :],
        (odd // TOPK)[None, :], K // 32, FMT,
    )  # fmt: skip
    squares = gathered_squares(ss, even // TOPK, odd // TOPK, PARTS, PTX)
    acc = tile_sums(w, wh, ws, expert, tile, (), q, low, top, INTER, U, FMT, S, X, 8, PTX)
    h = swiglu(sum_warps(acc), lane_factors(squares, eps, K))
    store_pairs(h, hq, hs, even, odd, column < live, column + 1 < live, tile, INTER // 32)


@triton.jit
def tile_sums(
    w, wh, ws, expert, tile, loaded, q, even, odd,
    INTER: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr, X: tl.constexpr, R: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Each warp's sums of two row tiles of gate and two of up; `loaded` columns of one row (`R`), or their pointers."""
    HIGH: tl.constexpr = 64 if FMT == 6 else 32
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    gate_at = (expert * (INTER // 8) + tile * 2) * U + warp
    gate_w, gate_h, gate_s = unit_pointers(w, wh, ws, gate_at, lane, FMT)
    up_w, up_h, up_s = unit_pointers(w, wh, ws, gate_at + (INTER // 16) * U, lane, FMT)
    acc = fresh(4, X)
    for c in tl.static_range(U // (X * S)):
        n = c * S * X
        gates = load_units(gate_w + n * 128, gate_h + n * HIGH, gate_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        ups = load_units(up_w + n * 128, up_h + n * HIGH, up_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        for i in tl.static_range(S):
            if R == 1:
                b, scales = loaded[c * S + i]
            else:
                b, scales = columns(q, even, odd, n + i * X, 64, 8, FMT, FRESH1, R, PTX)
            grown = ()
            for r in tl.static_range(4):
                unit = gates[i * 2 + r] if r < 2 else ups[i * 2 + r - 2]
                low, top = unpack_scales(unit[2], FMT)
                grown = grown + (add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX, R),)  # noqa: RUF005
            acc = grown
    return acc


@triton.jit
def shared_rows(shared_gate_up, hq, hs, group, rows, TOPK: tl.constexpr, INTER: tl.constexpr):
    """The shared expert's int8 group `group` of all rows, eight rows at a time in lane form."""
    lane = tl.arange(0, 32)
    first = 0
    while first < rows:
        h = ()
        t = first + lane % 4 * 2
        for i in tl.static_range(4):
            for e in tl.static_range(2):
                at = (t + e) * (2 * INTER) + group * 32 + i * 8 + lane // 4
                gate = tl.load(shared_gate_up + at, mask=t + e < rows, other=0.0)
                up = tl.load(shared_gate_up + at + INTER, mask=t + e < rows, other=0.0)
                h = h + (silu(gate) * up,)  # noqa: RUF005
        pair = rows * TOPK + t
        store_pairs(h, hq, hs, pair, pair + 1, t < rows, t + 1 < rows, group, INTER // 32)
        first += 8
