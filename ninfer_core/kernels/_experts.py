"""Triton helpers of the sparse MLP in decode: the top-k choice, rows grouped by expert, products of gathered rows."""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import (
    EARLY1,
    EARLY2,
    FRESH1,
    FRESH2,
    FRESH4,
    WEIGHT1,
    add_unit,
    code_factor,
    load_four,
    load_high,
    load_one,
    load_two,
    load_unit,
    loads_under_way,
    round_bytes,
    rows_max,
    rows_sum,
    silu,
    store_one,
    sum_warps,
    unit_pointers,
    unpack_scales,
)
from ._planes import GROUP_WORDS, activation_byte, fine_bytes, fine_steps
from ._room import ask_words, own_words, wait_for_copies
from .linear_decode import fresh, load_units

LIST = tl.constexpr(64)
"""Most rows of a row call."""
PAIRS = tl.constexpr(4)
"""Most pairs of a work item: one for each lane of a row of results, so that no lane computes a column nobody reads."""
ITEM = tl.constexpr(8)
"""Words of a work item: four pairs, the last of fewer repeated, and their expert."""


@triton.jit
def merge_keys(keys, P: tl.constexpr, K: tl.constexpr):
    """One pass of Batcher's sort by merges of runs of `P`, larger keys first: of two places `K` apart in a run of 2 P
    the first gets the larger.
    """
    N: tl.constexpr = len(keys)
    F: tl.constexpr = K % P  # the first place compared
    found = ()
    for i in tl.static_range(N):
        if i >= F and (i - F) % (2 * K) < K and i // (2 * P) == (i + K) // (2 * P) and i + K < N:
            found = found + (tl.maximum(keys[i], keys[i + K]),)  # noqa: RUF005
        elif i >= F + K and (i - K - F) % (2 * K) < K and (i - K) // (2 * P) == i // (2 * P):
            found = found + (tl.minimum(keys[i - K], keys[i]),)  # noqa: RUF005
        else:
            found = found + (keys[i],)  # noqa: RUF005
    return found


@triton.jit
def expert_keys(logits, t, rows, OP: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr):
    """Order-keeping int32 keys of the logits of rows `t` [L]: [L, 32] a lane's E / 32 of them, the best first.

    A key ends in its expert's number, so that no two are equal and one maximum finds value and expert: order is by the
    logit without as many of its last bits as the number takes (8 for 256 experts: 2^-16 of the value), the lower expert
    before the higher; `moe_prefill.choose_kernel` chooses alike. Rows from `rows` on repeat the last.
    """
    WHOLE: tl.constexpr = triton.next_power_of_2(E)
    N: tl.constexpr = (E + 31) // 32
    lane = tl.arange(0, 32)[None, :]
    line = logits + tl.minimum(t, rows - 1)[:, None] * (E + 1) + lane
    keys = ()
    for j in tl.static_range(N):
        if E % 32 == 0:
            bits = load_one(line + j * 32, OP, PTX).to(tl.int32, bitcast=True)
        else:  # lanes past the last expert read the shared expert's gate, and drop it
            bits = load_one(line + tl.minimum(j * 32, E - lane), OP, PTX).to(tl.int32, bitcast=True)
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = (rank & -WHOLE) | (WHOLE - 1 - j * 32 - lane)
        keys = keys + (tl.where(j * 32 + lane < E, key, -2147483648),)  # noqa: RUF005
    for p in tl.static_range(5):
        for k in tl.static_range(p + 1):
            if 2**p < N:
                keys = merge_keys(keys, 2**p, 2 ** (p - k))
    return keys


@triton.jit
def expert_in(key, E: tl.constexpr):
    """The expert that a key ends in."""
    WHOLE: tl.constexpr = triton.next_power_of_2(E)
    return WHOLE - 1 - (key & (WHOLE - 1))


@triton.jit
def without_key(keys, best):
    """`keys` where the largest of a line, `best` [L], is gone: its lane's others move up."""
    gone = keys[0] == best[:, None]
    N: tl.constexpr = len(keys)
    left = ()
    for j in tl.static_range(N):
        if j + 1 < N:
            left = left + (tl.where(gone, keys[j + 1], keys[j]),)  # noqa: RUF005
        else:
            left = left + (tl.where(gone, -2147483648, keys[j]),)  # noqa: RUF005
    return left


@triton.jit
def top_experts(logits, t, rows, OP: tl.constexpr, E: tl.constexpr, TOPK: tl.constexpr, PTX: tl.constexpr):
    """Top `TOPK` of `E` logits of rows `t` [L], each within its warp: tuples of ids [L], logits [L, 32] (all one)."""
    keys = expert_keys(logits, t, rows, OP, E, PTX)
    line = logits + (tl.minimum(t, rows - 1) * (E + 1))[:, None] + tl.arange(0, 32)[None, :] * 0
    found = ()
    chosen = ()
    for s in tl.static_range(TOPK):
        best = tl.max(keys[0], 1)
        if s + 1 < TOPK:
            keys = without_key(keys, best)
        at = expert_in(best, E)
        found = found + (at,)  # noqa: RUF005
        chosen = chosen + (load_one(line + at[:, None], OP, PTX),)  # noqa: RUF005
    return found, chosen


@triton.jit
def expert_of(logits, t, rows, slot, OP: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr):
    """`top_experts(..)[0][slot]` of rows `t` [L], with no more turns than `slot` (a number) needs."""
    keys = expert_keys(logits, t, rows, OP, E, PTX)
    turn = 0
    while turn < slot:
        keys = without_key(keys, tl.max(keys[0], 1))
        turn += 1
    return expert_in(tl.max(keys[0], 1), E)


@triton.jit
def shares_of(chosen, TOPK: tl.constexpr):
    """Softmax over the chosen logits, largest first: a tuple like theirs."""
    total = tl.zeros_like(chosen[0])
    for s in tl.static_range(TOPK):
        total += tl.exp(chosen[s] - chosen[0])
    shares = ()
    for s in tl.static_range(TOPK):
        shares = shares + (tl.exp(chosen[s] - chosen[0]) / total,)  # noqa: RUF005
    return shares


@triton.jit
def of_slot(values, slot, TOPK: tl.constexpr):
    """values[slot] of a tuple, elementwise by `slot`."""
    found = values[0]
    for s in tl.static_range(1, TOPK):
        found = tl.where(slot == s, values[s], found)
    return found


@triton.jit
def expert_of_slot(found, slot, TOPK: tl.constexpr):
    """found[slot] of a tuple of ids [L], elementwise by `slot` [L, 32]."""
    own = found[0][:, None] + slot * 0
    for s in tl.static_range(1, TOPK):
        own = tl.where(slot == s, found[s][:, None], own)
    return own


@triton.jit
def store_choice(ids, weights, found, shares, t, live, TOPK: tl.constexpr, PTX: tl.constexpr):
    """Ids and weights of rows `t` [L] where `live`: lane s stores those of slot s."""
    lane = tl.arange(0, 32)[None, :]
    names = expert_of_slot(found, lane + t[:, None] * 0, TOPK)
    inside = live[:, None] & (lane < TOPK)
    at = t[:, None] * TOPK + tl.minimum(lane, TOPK - 1)
    numbers = ids.to(tl.pointer_type(tl.float32), bitcast=True)
    store_one(numbers + at, names.to(tl.float32, bitcast=True), inside, PTX)
    store_one(weights + at, of_slot(shares, lane + t[:, None] * 0, TOPK), inside, PTX)


@triton.jit
def gathered_pointers(q, s, unit, lane, row, own, G32: tl.constexpr, FMT: tl.constexpr):
    """Pointers [X, 32] into an activation whose columns are any of its rows, in pairs of equal ones.

    `row` [X, 32]: the row of column lane // 4; `own`: that of columns 2 (lane % 4) and the next.
    """
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    first = unit * HALVES
    words = q + ((row // 8) * G32 + first) * GROUP_WORDS + (row % 8) * 16 + lane % 4 * 4
    return words, s + (own // 8) * (G32 * 8) + own % 8 + first * 8


@triton.jit
def columns(q, s, index, FMT: tl.constexpr, OP: tl.constexpr, PTX: tl.constexpr):
    """Fragment registers and column scales of the unit `index` units behind the pointers.

    The scales hold the format's factor: here it is one product for all row tiles, and exact.
    """
    b = ()
    scales = ()
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    for half in tl.static_range(HALVES):
        group = index * HALVES + half
        b = b + load_two(q + group * GROUP_WORDS, EARLY2 if OP == EARLY1 else FRESH2, PTX)
        one = load_one(s + group * 8, OP, PTX) * code_factor(FMT)
        scales = scales + (one, one)  # noqa: RUF005
    return b, scales


# Expert rows lie pair by pair, two groups of 32 after two groups: a lane's words of both (c, c + 4 of one, then of the
# other) side by side, so that it reads a unit's at once.


@triton.jit
def inner_byte(pair, group, value, G32: tl.constexpr):
    """Where value `value` of 32 of a group of an expert row lies, in bytes."""
    word = value // 4
    return ((pair * G32 + group // 2 * 2) * 8 + word % 4 * 4 + group % 2 * 2 + word // 4) * 4 + value % 4


@triton.jit
def inner_columns(
    hq, hs, row, even, odd, first, lane, G32: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, FMT: tl.constexpr,
    R: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`columns` of units first, first + STEP, .. (`S` of them) of expert rows.

    `row` [X, 32]: the pair of column lane // 4; `even`, `odd`: those of a lane's results, with `R` = 1 the same.
    """
    words = hq + row * (G32 * 8) + lane % 4 * 4
    low = hs + even * G32
    top = hs + odd * G32
    loaded = ()
    for i in tl.static_range(S):
        unit = first + i * STEP
        if FMT == 8:
            b = load_two(words + unit // 2 * 16 + unit % 2 * 2, FRESH2, PTX)
            left = load_one(low + unit, FRESH1, PTX)
            right = left
            if R > 1:
                right = load_one(top + unit, FRESH1, PTX)
            loaded = loaded + ((b, (left, right)),)  # noqa: RUF005
        else:
            tl.static_assert(R == 1)
            b = load_four(words + unit * 16, FRESH4, PTX)
            left, right = load_two(low + unit * 2, FRESH2, PTX)
            left *= code_factor(FMT)
            right *= code_factor(FMT)
            loaded = loaded + ((b, (left, left, right, right)),)  # noqa: RUF005
    return loaded


@triton.jit
def inner_units(w, wh, ws, tile, first, lane, U: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, FMT: tl.constexpr,
               PTX: tl.constexpr):  # fmt: skip
    """Units first, first + STEP, .. (`S` of them) of two row tiles: a flat tuple, tile by tile within a step."""
    wp, hp, sp = unit_pointers(w, wh, ws, tile * U + first, lane, FMT)
    units = ()
    for i in tl.static_range(S):
        for r in tl.static_range(2):
            units = units + (load_unit(wp, hp, sp, r * U + i * STEP, FMT, PTX),)  # noqa: RUF005
    return units


@triton.jit
def ask_inner_units(at, w, wh, ws, tile, lane, U: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr,
                    PTX: tl.constexpr):  # fmt: skip
    """`inner_units` from the first on, words on their way into the room at `at`, the rest in registers."""
    wp, hp, sp = unit_pointers(w, wh, ws, tile * U, lane, FMT)
    units = ()
    for i in tl.static_range(S):
        for r in tl.static_range(2):
            index = r * U + i
            words = ask_words(at + (i * 2 + r) * (X * 512), wp + index * 128, PTX)
            high = load_high(hp, index, FMT, PTX)
            units = units + ((words, high, load_one(sp + index * 8, WEIGHT1, PTX)),)  # noqa: RUF005
    return units


@triton.jit
def held_sums(
    acc, at, asked, loaded, FIRST: tl.constexpr, S: tl.constexpr, X: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Two accumulators plus `S` steps from `FIRST` of those in the room at `at`, times `loaded`."""
    if S > 0:
        wait_for_copies(PTX)
        start = loads_under_way(X, PTX)
        for i in tl.static_range(S):
            b, scales = loaded[i]
            grown = ()
            for r in tl.static_range(2):
                words, high, pair = asked[(FIRST + i) * 2 + r]
                words = own_words(at + ((FIRST + i) * 2 + r) * (X * 512), words, PTX)
                low, top = unpack_scales(pair, 8)
                grown = grown + (add_unit(acc[r], words, high, low, top, b, scales, X, FMT, PTX, 1, start),)  # noqa: RUF005
            acc = grown
    return acc


@triton.jit
def outer_sums(
    acc, at, asked, units, w, wh, ws, tile, hq, hs, row, pair, lane, G32: tl.constexpr, U: tl.constexpr,
    HELD: tl.constexpr, S: tl.constexpr, X: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Two accumulators plus all units of K: `HELD` wait in the room, `S` in registers, others are asked for in turn."""
    P: tl.constexpr = S if HELD % S == 0 else HELD
    for c in tl.static_range(HELD // P if HELD > 0 else 0):
        loaded = inner_columns(hq, hs, row, pair, pair, c * P, lane, G32, P, 1, FMT, 1, PTX)
        acc = held_sums(acc, at, asked, loaded, c * P, P, X, FMT, PTX)
    for c in tl.static_range((U - HELD) // S):
        if c > 0:
            units = inner_units(w, wh, ws, tile, HELD + c * S, lane, U, S, 1, FMT, PTX)
        loaded = inner_columns(hq, hs, row, pair, pair, HELD + c * S, lane, G32, S, 1, FMT, 1, PTX)
        acc = inner_sums(acc, units, loaded, S, X, FMT, 1, PTX)
    return acc


@triton.jit
def inner_sums(
    acc, units, loaded, S: tl.constexpr, X: tl.constexpr, FMT: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr
):
    """Two accumulators plus `S` steps of `inner_units` times the columns `loaded`, one unit after the other."""
    start = loads_under_way(X, PTX)
    for i in tl.static_range(S):
        b, scales = loaded[i]
        grown = ()
        for r in tl.static_range(2):
            words, high, pair = units[i * 2 + r]
            low, top = unpack_scales(pair, 8)
            grown = grown + (add_unit(acc[r], words, high, low, top, b, scales, X, FMT, PTX, R, start),)  # noqa: RUF005
        acc = grown
    return acc


@triton.jit
def store_inner(h, hq, hs, pair, live, group, G32: tl.constexpr):
    """Int8 group of expert rows in lane form: four [32], row 8 i + g of a lane's pair."""
    lane = tl.arange(0, 32)
    top = rows_max(tl.maximum(tl.maximum(tl.abs(h[0]), tl.abs(h[1])), tl.maximum(tl.abs(h[2]), tl.abs(h[3]))))
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    for i in tl.static_range(4):
        at = inner_byte(pair, group, i * 8 + lane // 4, G32)
        tl.store(hq + at, round_bytes(h[i], inverse).to(tl.int8), mask=live)
    tl.store(hs + pair * G32 + group, top / 127.0, mask=live & (lane < 4))


@triton.jit
def row_squares(ss, row, PARTS: tl.constexpr, OP: tl.constexpr, PTX: tl.constexpr):
    """`lane_squares` of row `row` [32] of an activation, that of a lane's results: [32]."""
    lane = tl.arange(0, 32)
    line = ss + (row // 8) * (PARTS * 8) + row % 8
    total = tl.zeros([32], tl.float32)
    for i in tl.static_range((PARTS + 7) // 8):
        part = i * 8 + lane // 4
        total += tl.where(part < PARTS, load_one(line + tl.minimum(part, PARTS - 1) * 8, OP, PTX), 0.0)
    return total


@triton.jit
def row_columns(q, s, first, S: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr, OP: tl.constexpr, PTX: tl.constexpr):
    """Columns of `S` units of a warp's share, `first` units behind the pointers of `gathered_pointers` and on."""
    loaded = ()
    for i in tl.static_range(S):
        loaded = loaded + (columns(q, s, first + i * X, FMT, OP, PTX),)  # noqa: RUF005
    return loaded


@triton.jit
def store_pair(acc, hq, hs, squares, pair, tile, eps, INTER: tl.constexpr, K: tl.constexpr):
    """Int8 group `tile` of `pair` from `tile_sums` of one row: all columns are the same.

    Lane 4 g + c takes row 8 c + g.
    """
    y = sum_warps(acc, 1)
    factor = tl.rsqrt(rows_sum(squares) / K + eps)
    lane = tl.arange(0, 32)
    c = lane % 4
    gate = tl.where(c < 2, tl.where(c == 0, y[0][0], y[0][2]), tl.where(c == 2, y[1][0], y[1][2])) * factor
    up = tl.where(c < 2, tl.where(c == 0, y[2][0], y[2][2]), tl.where(c == 2, y[3][0], y[3][2])) * factor
    h = silu(gate) * up
    top = tl.max(tl.abs(h), 0)
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    tl.store(hq + inner_byte(pair, tile, c * 8 + lane // 4, INTER // 32), round_bytes(h, inverse).to(tl.int8))
    tl.store(hs + pair * (INTER // 32) + tile, top / 127.0)


@triton.jit
def item_tile(
    w, wh, ws, xq, xs, ss, hq, hs, expert, own, pair, tile, eps,
    TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """An int8 group of the pairs of an item: `own` [32] that of column lane // 4, `pair` that of a lane's results."""
    lane = tl.arange(0, 32)
    row = pair // TOPK
    q, s = gathered_pointers(
        xq, xs, tl.arange(0, X)[:, None], lane[None, :], (own // TOPK)[None, :], row[None, :], K // 32, FMT
    )  # fmt: skip
    squares = row_squares(ss, row, PARTS, FRESH1, PTX)
    y = sum_warps(tile_sums(w, wh, ws, expert, tile, (), q, s, INTER, U, FMT, S, X, PTX), 1)
    factor = tl.rsqrt(rows_sum(squares) / K + eps)
    h = ()
    for i in tl.static_range(4):
        gate = y[i // 2][i % 2 * 2] * factor
        up = y[2 + i // 2][i % 2 * 2] * factor
        h = h + (silu(gate) * up,)  # noqa: RUF005
    store_inner(h, hq, hs, pair, lane >= 0, tile, INTER // 32)


@triton.jit
def tile_sums(
    w, wh, ws, expert, tile, loaded, q, s, INTER: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Each warp's sums of two row tiles of gate and two of up, times the columns `loaded` of all its units.

    Without these columns come from the pointers `q`, `s`, asked for behind the weights they meet.
    """
    HIGH: tl.constexpr = 64 if FMT == 6 else 32
    lane = tl.arange(0, 32)[None, :]
    gate_at = (expert * (INTER // 8) + tile * 2) * U + tl.arange(0, X)[:, None]
    gate_w, gate_h, gate_s = unit_pointers(w, wh, ws, gate_at, lane, FMT)
    up_w, up_h, up_s = unit_pointers(w, wh, ws, gate_at + (INTER // 16) * U, lane, FMT)
    acc = fresh(4, X)
    for c in tl.static_range(U // (X * S)):
        n = c * S * X
        gates = load_units(gate_w + n * 128, gate_h + n * HIGH, gate_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        ups = load_units(up_w + n * 128, up_h + n * HIGH, up_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        if len(loaded) > 0:
            acc = gate_up_sums(acc, gates, ups, loaded, c * S, S, X, FMT, PTX)
        else:
            acc = gate_up_sums(acc, gates, ups, row_columns(q, s, n, S, FMT, X, FRESH1, PTX), 0, S, X, FMT, PTX)
    return acc


@triton.jit
def gate_up_sums(
    acc, gates, ups, loaded, FIRST: tl.constexpr, S: tl.constexpr, X: tl.constexpr, FMT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Accumulators of two row tiles of gate and two of up plus `S` steps times columns, from `FIRST` of `loaded`."""
    start = loads_under_way(X, PTX)
    for i in tl.static_range(S):
        b, scales = loaded[FIRST + i]
        grown = ()
        for r in tl.static_range(4):
            words, high, pair = gates[i * 2 + r] if r < 2 else ups[i * 2 + r - 2]
            low, top = unpack_scales(pair, 8)
            grown = grown + (add_unit(acc[r], words, high, low, top, b, scales, X, FMT, PTX, 1, start),)  # noqa: RUF005
        acc = grown
    return acc


@triton.jit
def shared_rows(shared_gate_up, hq, hs, group, rows, TOPK: tl.constexpr, INTER: tl.constexpr):
    """The shared expert's int8 group `group` of all rows, four rows at a time in lane form."""
    lane = tl.arange(0, 32)
    first = 0
    while first < rows:
        t = first + lane % 4
        h = ()
        for i in tl.static_range(4):
            at = t * (2 * INTER) + group * 32 + i * 8 + lane // 4
            gate = tl.load(shared_gate_up + at, mask=t < rows, other=0.0)
            up = tl.load(shared_gate_up + at + INTER, mask=t < rows, other=0.0)
            h = h + (silu(gate) * up,)  # noqa: RUF005
        store_inner(h, hq, hs, rows * TOPK + t, t < rows, group, INTER // 32)
        first += 4


@triton.jit
def finish_row(routed, shared, gate, gains, old, x_out, u_out, q_out, s_out, ss_out, t, group, N: tl.constexpr):
    """New residual of row `t`, 32 values in lane form (four [32], the same in all columns), and its int8 group."""
    lane = tl.arange(0, 32)
    one = lane % 4 == 0
    n = group * 32 + lane // 4
    u = ()
    square = tl.zeros([32], tl.float32)
    top = tl.zeros([32], tl.float32)
    values = ()
    for i in tl.static_range(4):
        value = old[i] + (routed[i] + gate * shared[i])
        values = values + (value,)  # noqa: RUF005
        u = u + (value * gains[i],)  # noqa: RUF005
        square = tl.fma(value, value, square)
        top = tl.maximum(top, tl.abs(u[i]))
    for i in tl.static_range(4):
        tl.store(x_out + t * N + n + i * 8, values[i], mask=one)
        tl.store(u_out + t * N + n + i * 8, u[i], mask=one)
    top = rows_max(top)
    inverse = fine_steps(top)
    unit = (t // 8) * (N // 32) + group
    for i in tl.static_range(4):
        first, second = fine_bytes(u[i], inverse)
        at = q_out + activation_byte(unit, t % 8, i * 8 + lane // 4)
        tl.store(at, first.to(tl.int8), mask=one)
        tl.store(at + 8, second.to(tl.int8), mask=one)
    tl.store(s_out + unit * 8 + t % 8 + lane * 0, top / 127.0, mask=lane == 0)
    tl.store(ss_out + unit * 8 + t % 8 + lane * 0, rows_sum(square), mask=lane == 0)
