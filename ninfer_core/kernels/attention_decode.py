"""Triton decode attention on INT8 or bf16 pages of 64 tokens: norm, rotation, append, split-KV softmax, the combine.

The length of a row's splits follows from its token index alone (`pages_per_split`), and every row is a block of columns
of its own (one per query head of the KV head), so a row's sums do not depend on the window, the batch or the reserved
length. A long context has as many programs as a card can hold at once, each of which reads a long run, and little to
combine. Scales stay out of the products: key scales multiply the fp32 scores of their group of 64, value scales the
probabilities.

Lane form throughout (`_dequant`), products by `mma.m16n8k16`. A program reads a page once for up to four rows. Of the
page, warp w scores tokens 16 w .. 16 w + 15 and turns them into probabilities, once all warps know the largest score;
behind a second barrier warp w adds up dims 64 w .. 64 w + 63 of the output, one scale group, over all tokens. Its room
in shared memory (`_room`) holds the queries and what the warps tell each other; codes go from memory to registers, the
keys of the next page while this one's values are added up, the next values while the next keys are scored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..footprint import SHORT, splits_of
from . import _tiles
from ._dequant import (
    FRESH4,
    WEIGHT4,
    from_partner,
    load_four,
    store_four,
    store_one,
    wait_for_inputs,
)
from ._halves import column_max, column_sum, half_product, pack_halves, power
from ._order import Activation
from ._pages import (
    PAGE_TOKENS,
    append_rows,
    half_values,
    key_halves,
    load_keys,
    load_values,
    no_page,
    page_steps,
    pair_values,
    value_halves,
)
from ._planes import store_groups
from ._room import put_four, put_one, put_two, room, room_of, take_floats, take_words

SHORT_PAGES = tl.constexpr(SHORT)
QUERY_BYTES = tl.constexpr(4096)
WEIGHT_BYTES = tl.constexpr(4096)
TOP_BYTES = tl.constexpr(128)
"""Of a row in the program's room: query operands; weights of a page's tokens, for every warp; maxima of every warp."""
ROOM1, ROOM2, ROOM4 = (room(rows * (4096 + 4096 + 128)) for rows in (1, 2, 4))


@triton.jit
def own_room(ROWS: tl.constexpr, PTX: tl.constexpr):
    """The room of a program with so many rows."""
    if ROWS == 1:
        return room_of(ROOM1, PTX)
    elif ROWS == 2:
        return room_of(ROOM2, PTX)
    else:
        tl.static_assert(ROWS == 4)
        return room_of(ROOM4, PTX)


@triton.jit
def put_queries(
    at, projected, gain, cos, sin, row, head, eps, H: tl.constexpr, KH: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """The query heads of one KV head in row `row`, normed, rotated, scaled for exp2, into the room from `at` on.

    Two heads a warp; a lane has 16 dims side by side, `gain` are two packed quadruples of words for them. As operand,
    lane 4 g + c holds head g's dims 64 j + 16 c + 0..15 for every j: eight words, in two quadruples.
    """
    RATIO: tl.constexpr = H // KH
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    own = lane % 16
    line = projected + row * ((H + KH) * 256) + (head * RATIO + tl.minimum(warp * 2 + lane // 16, RATIO - 1)) * 128
    x = pair_values(load_four(line + own * 8, FRESH4, PTX)) + pair_values(load_four(line + own * 8 + 4, FRESH4, PTX))
    turn = row * 64 + lane % 4 * 16 + warp * 0
    cosines = ()
    sines = ()
    for i in tl.static_range(4):
        cosines = cosines + load_four(cos + turn + 4 * i, FRESH4, PTX)
        sines = sines + load_four(sin + turn + 4 * i, FRESH4, PTX)
    square = x[0] * x[0]
    for j in tl.static_range(1, 16):
        square = tl.fma(x[j], x[j], square)
    square += from_partner(square, 1, PTX)
    square += from_partner(square, 2, PTX)
    square += from_partner(square, 4, PTX)
    square += from_partner(square, 8, PTX)
    factor = 1.0 / tl.sqrt_rn(square / 256 + eps)
    weight = pair_values(gain[0]) + pair_values(gain[1])
    y = ()
    for j in tl.static_range(16):  # the first group of 64 rotates: dim d with d + 32, two lanes further
        z = x[j] * factor * (1.0 + weight[j])
        z = tl.where(own < 4, z * cosines[j] + from_partner(z, 2, PTX) * sines[j], z)
        y = y + (z * 0.09016844005556021,)  # noqa: RUF005  # log2(e) / 16
    words = ()
    for j in tl.static_range(8):
        words = words + (pack_halves(y[2 * j], y[2 * j + 1], PTX),)  # noqa: RUF005
    if PTX:
        to = at + own // 4 * 1024 + (warp * 8 + lane // 16 * 4 + lane % 4) * 16
        put_four(to, words[0], words[1], words[2], words[3], PTX)
        put_four(to + 512, words[4], words[5], words[6], words[7], PTX)
        return ()
    else:
        turned = ()
        for j in tl.static_range(8):  # from (warp, head, group, c) to (group, lane)
            by_group = tl.permute(tl.reshape(words[j], [4, 2, 4, 4]), (2, 0, 1, 3))
            turned = turned + (tl.reshape(by_group, [4, 32]),)  # noqa: RUF005
        return turned


@triton.jit
def query_words(at, q, j: tl.constexpr, half: tl.constexpr, PTX: tl.constexpr):
    """Four operand words of dims 64 j + 16 c + 8 half + 0..7; `q`: what `put_queries` returned."""
    if PTX:
        return take_words(at + tl.arange(0, 32)[None, :] * 16 + (j * 1024 + half * 512))
    else:
        warp = tl.arange(0, 4)[:, None]
        found = ()
        for i in tl.static_range(4):
            one = tl.sum(tl.where(warp == j, q[4 * half + i], 0), 0)[None, :]
            found = found + (one + warp * 0,)  # noqa: RUF005
        return found


@triton.jit
def score_page(at, q, keys, steps, ROWS: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr):
    """For each row, scores of the warp's 16 tokens as a product lies: (token g, head 2c), (g, 2c + 1), (g + 8, ..), ..

    `keys`, `steps`: see `load_keys`.
    """
    z = tl.zeros([4, 32], tl.float32)
    total = ()
    for _ in tl.static_range(ROWS):
        total = total + ((z, z, z, z),)  # noqa: RUF005
    if INT8:
        upper = half_values(steps[0]) + half_values(steps[1])
        lower = half_values(steps[2]) + half_values(steps[3])
    for j in tl.static_range(4):
        part = ()
        for i in tl.static_range(ROWS):
            part = part + (((z, z, z, z) if INT8 else total[i]),)  # noqa: RUF005
        for half in tl.static_range(2):
            a = ()
            for m in tl.static_range(2):
                low = key_halves(keys[j][0], 2 * half + m, INT8, PTX)
                high = key_halves(keys[j][1], 2 * half + m, INT8, PTX)
                a = a + ((low[0], high[0], low[1], high[1]),)  # noqa: RUF005
            grown = ()
            for i in tl.static_range(ROWS):
                b = query_words(at + i * QUERY_BYTES, q[i], j, half, PTX)
                one = half_product(part[i], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1], 4, PTX)
                one = half_product(one, a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3], 4, PTX)
                grown = grown + (one,)  # noqa: RUF005
            part = grown
        if INT8:
            grown = ()
            for i in tl.static_range(ROWS):
                p, t = part[i], total[i]
                grown = grown + ((  # noqa: RUF005
                    tl.fma(p[0], upper[j], t[0]), tl.fma(p[1], upper[j], t[1]),
                    tl.fma(p[2], lower[j], t[2]), tl.fma(p[3], lower[j], t[3]),
                ),)  # fmt: skip
            total = grown
        else:
            total = part
    return total


@triton.jit
def mask_scores(scores, limit):
    """Scores of tokens before `limit` of the page; the others no weight can come from."""
    token = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 32)[None, :] // 4
    near = token < limit
    far = token < limit - 8
    return (
        tl.where(near, scores[0], -1.0e30), tl.where(near, scores[1], -1.0e30),
        tl.where(far, scores[2], -1.0e30), tl.where(far, scores[3], -1.0e30),
    )  # fmt: skip


@triton.jit
def put_pair(at, even, odd, PTX: tl.constexpr):
    """Into the room what each warp has of a lane's two columns, to be read by `take_pairs`: equal in lanes c, c + 4, ..

    Under the interpreter the pair itself.
    """
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    put_two(at + lane % 4 * 32 + warp * 8, even, odd, lane + warp * 0 < 4, PTX)
    return even, odd


@triton.jit
def take_pairs(at, pair, PTX: tl.constexpr):
    """The pairs of all four warps, even and odd in turn."""
    if PTX:
        near = at + tl.arange(0, 32)[None, :] % 4 * 32
        return take_floats(near) + take_floats(near + 16)
    else:
        warp = tl.arange(0, 4)[:, None]
        found = ()
        for w in tl.static_range(4):
            for e in tl.static_range(2):
                found = found + (tl.sum(tl.where(warp == w, pair[e], 0.0), 0)[None, :] + warp * 0.0,)  # noqa: RUF005
        return found


@triton.jit
def put_weights(at, p, steps, INT8: tl.constexpr, PTX: tl.constexpr):
    """Probabilities `p` of the warp's tokens times value scales into the room, for every warp in its group's scale.

    `steps`: four scales of token g, then of token g + 8 (INT8). Of each 16 tokens a word holds tokens t and t + 8, and
    lane 4 g + c takes those with t = c and t = c + 4 of head g. Returns what `take_weights` wants.
    """
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    g = lane // 4
    c = lane % 4
    # The lane's place swaps sides for every second c: stores then meet in two banks, not in four.
    to = at + warp // 2 * 512 + warp % 2 * 8 + g // 4 * 4 + (c * 8 + g % 4) * 16
    words = ()
    for u in tl.static_range(4 if INT8 else 1):
        near = steps[u] if INT8 else 1.0
        far = steps[4 + u] if INT8 else 1.0
        even = pack_halves(p[0] * near, p[2] * far, PTX)
        odd = pack_halves(p[1] * near, p[3] * far, PTX)
        put_one(to + c % 2 * 64 + u * 1024, even, PTX)
        put_one(to + (1 - c % 2) * 64 + u * 1024, odd, PTX)
        words = words + ((even, odd),)  # noqa: RUF005
    if PTX:
        return ()
    else:
        return words


@triton.jit
def take_weights(at, words, INT8: tl.constexpr, PTX: tl.constexpr):
    """Right operands for the page's tokens: two words for each 16."""
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    if PTX:
        near = at + (lane ^ (lane >> 1 & 4)) * 16 + (warp * 1024 if INT8 else warp * 0)
        return take_words(near) + take_words(near + 512)
    else:
        found = ()
        for s in tl.static_range(4):
            for b in tl.static_range(2):
                total = tl.zeros([4, 32], tl.int32)
                for u in tl.static_range(len(words)):
                    both = tl.reshape(tl.join(words[u][0], words[u][1]), [4, 2, 4, 4, 2])  # s, b, t, c, e
                    both = tl.reshape(tl.permute(both, (1, 0, 3, 4, 2)), [2, 4, 32])
                    own = (tl.arange(0, 2)[:, None, None] == b) & (tl.arange(0, 4)[None, :, None] == s)
                    one = tl.sum(tl.sum(tl.where(own, both, 0), 0), 0)[None, :]
                    total += tl.where((warp == u) | (len(words) == 1), one, 0)
                found = found + (total,)  # noqa: RUF005
        return found


@triton.jit
def add_values(acc, weights, shrink, values, ROWS: tl.constexpr, INT8: tl.constexpr, PTX: tl.constexpr):
    """For each row, acc (four tiles of 16 dims) times `shrink` plus the page's values weighed with `weights`."""
    total = ()
    for i in tl.static_range(ROWS):
        even, odd = shrink[i]
        scaled = ()
        for k in tl.static_range(4):
            a = acc[i][k]
            scaled = scaled + ((a[0] * even, a[1] * odd, a[2] * even, a[3] * odd),)  # noqa: RUF005
        total = total + (scaled,)  # noqa: RUF005
    for s in tl.static_range(4):
        for h in tl.static_range(2):
            left = value_halves(values[s], h, INT8, PTX)
            grown = ()
            for i in tl.static_range(ROWS):
                b0, b1 = weights[i][2 * s], weights[i][2 * s + 1]
                t = total[i]
                first = half_product(t[2 * h], left[0], left[1], left[2], left[3], b0, b1, 4, PTX)
                second = half_product(t[2 * h + 1], left[4], left[5], left[6], left[7], b0, b1, 4, PTX)
                if h == 0:
                    grown = grown + ((first, second, t[2], t[3]),)  # noqa: RUF005
                else:
                    grown = grown + ((t[0], t[1], first, second),)  # noqa: RUF005
            total = grown
    return total


@triton.jit
def pages_per_split(position, MOST: tl.constexpr):
    """Pages in a split of the row at this token index: the fewest that make at most `MOST` splits; from SHORT on 2."""
    page = position // PAGE_TOKENS
    return tl.maximum(page // MOST, tl.minimum(page // SHORT_PAGES, 1)) + 1


@triton.jit
def next_page(table, page, turn, later, stop):
    """The page behind `page`, and where it lies; of the last one itself.

    `turn`: the end of the first row's split, where the last row's begins at `later`.
    """
    after = page + 1
    after = tl.where(after == turn, tl.maximum(after, later), after)
    return after, tl.load(table + tl.minimum(after, stop - 1), cache_modifier=".cg").to(tl.int64) * 64


@triton.jit
def add_page(
    acc, best, mass, q, keys, key_steps, values, value_steps, page, soon, soon_place, stop, split, n, block,
    queries_at, keys_of, key_scales, values_of, value_scales, MOST: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    INT8: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum of every row with one page more; in place of its keys and values those of page `soon`."""
    weights_at = queries_at + ROWS * QUERY_BYTES
    tops_at = weights_at + ROWS * WEIGHT_BYTES
    scores = score_page(queries_at, q, keys, key_steps, ROWS, INT8, PTX)
    if soon < stop:
        keys, key_steps = load_keys(keys_of, key_scales, soon_place, INT8, PTX)
    masked = ()
    tops = ()
    for i in tl.static_range(ROWS):
        position = n + tl.minimum(block * ROWS + i, R - 1)
        own = pages_per_split(position, MOST)
        inside = (page >= split * own) & (page < split * own + own)
        one = mask_scores(scores[i], tl.where(inside, position + 1 - page * 64, 0))
        masked = masked + (one,)  # noqa: RUF005
        even = column_max(tl.maximum(one[0], one[2]), PTX)
        odd = column_max(tl.maximum(one[1], one[3]), PTX)
        tops = tops + (put_pair(tops_at + i * TOP_BYTES, even, odd, PTX),)  # noqa: RUF005
    tl.debug_barrier()
    if INT8:
        scales_of = page_steps(value_steps, n + R - page * 64)
    else:
        scales_of = ()
    words = ()
    shrink = ()
    new_best = ()
    new_mass = ()
    for i in tl.static_range(ROWS):
        t = take_pairs(tops_at + i * TOP_BYTES, tops[i], PTX)
        even = tl.maximum(tl.maximum(best[i][0], t[0]), tl.maximum(tl.maximum(t[2], t[4]), t[6]))
        odd = tl.maximum(tl.maximum(best[i][1], t[1]), tl.maximum(tl.maximum(t[3], t[5]), t[7]))
        less = (power(best[i][0] - even, PTX), power(best[i][1] - odd, PTX))
        s = masked[i]
        p = (power(s[0] - even, PTX), power(s[1] - odd, PTX), power(s[2] - even, PTX), power(s[3] - odd, PTX))
        words = words + (  # noqa: RUF005
            put_weights(weights_at + i * WEIGHT_BYTES, p, scales_of, INT8, PTX),
        )
        shrink = shrink + (less,)  # noqa: RUF005
        new_best = new_best + ((even, odd),)  # noqa: RUF005
        new_mass = new_mass + (  # noqa: RUF005
            (mass[i][0] * less[0] + (p[0] + p[2]), mass[i][1] * less[1] + (p[1] + p[3])),
        )
    best = new_best
    mass = new_mass
    tl.debug_barrier()
    weights = ()
    for i in tl.static_range(ROWS):
        weights = weights + (take_weights(weights_at + i * WEIGHT_BYTES, words[i], INT8, PTX),)  # noqa: RUF005
    acc = add_values(acc, weights, shrink, values, ROWS, INT8, PTX)
    if soon < stop:
        values, value_steps = load_values(values_of, value_scales, soon_place, n + R - soon * 64, INT8, PTX)
    return acc, best, mass, keys, key_steps, values, value_steps


@triton.jit(do_not_specialize=["pages", "table_stride", "splits"])
def attention_split_kernel(
    projected, q_gain, k_gain, cos, sin, codes, code_bytes, scales, scale_halves, tables, lengths, part_out, part_max,
    part_sum, pages, table_stride, splits, eps,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, INT8: tl.constexpr,
    DEPTH: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (split, KV head, sequence * blocks of ROWS rows): unnormalised output, maximum and sum of a row's heads.

    `projected`, gains: pairs of bf16 as int32; `codes`, `scales`: the same memory as `code_bytes`, `scale_halves`, in
    words (bf16 pages: `code_bytes` as fp32, no scales). Where a block's rows have splits of different length, it reads
    the pages of both; a page that is not a row's changes none of its bits.
    """
    RATIO: tl.constexpr = H // KH
    BLOCKS: tl.constexpr = (R + ROWS - 1) // ROWS
    WORDS: tl.constexpr = 64 if INT8 else 128  # of a token
    plane = pages.to(tl.int64) * (KH * 64)
    split = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2) // BLOCKS
    block = tl.program_id(2) % BLOCKS
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    n = tl.load(lengths + b, cache_modifier=".cg")
    last_row = n + tl.minimum(block * ROWS + ROWS - 1, R - 1)
    size = pages_per_split(n + block * ROWS, MOST)
    later_size = pages_per_split(last_row, MOST)
    page = split * size
    turn = page + size  # the end of the first row's split; the last's lies at `later`
    later = split * later_size
    stop = tl.minimum(later + later_size, last_row // PAGE_TOKENS + 1)
    if page < stop:
        table = tables + b * table_stride
        keys_at = head.to(tl.int64) * pages * 64
        keys_of = codes + keys_at * WORDS
        values_of = codes + (plane + keys_at) * WORDS
        key_scales = scales + keys_at * 2
        value_scales = scales + (plane + keys_at) * 2
        # All but this call's tokens is old: the first page is on its way before the kernel in front is done.
        place = tl.load(table + page, cache_modifier=".cg").to(tl.int64) * 64
        keys, key_steps = load_keys(keys_of, key_scales, place, INT8, PTX)
        values, value_steps = load_values(values_of, value_scales, place, n + R - page * 64, INT8, PTX)
        following, following_place = next_page(table, page, turn, later, stop)
        soon, soon_place = following, following_place
        next_keys, next_key_steps, next_values, next_value_steps = (), (), (), ()
        if DEPTH == 2:
            next_keys, next_key_steps, next_values, next_value_steps = no_page()
            if following < stop:
                last = n + R - following * 64
                next_keys, next_key_steps = load_keys(keys_of, key_scales, following_place, INT8, PTX)
                next_values, next_value_steps = load_values(values_of, value_scales, following_place, last, INT8, PTX)
            soon, soon_place = next_page(table, following, turn, later, stop)
        at = q_gain + lane % 16 * 8 + warp * 0
        gain = (load_four(at, WEIGHT4, PTX), load_four(at + 4, WEIGHT4, PTX))
        queries_at = own_room(ROWS, PTX)
        tops_at = queries_at + ROWS * (QUERY_BYTES + WEIGHT_BYTES)
        wait_for_inputs(PDL)
        if stop * 64 > n:
            append_rows(
                projected, k_gain, cos, sin, code_bytes + keys_at * (256 if INT8 else 128), scale_halves + keys_at * 4,
                table, n, page, stop, b, head, eps, plane, H, KH, R, INT8, PTX,
            )  # fmt: skip
            tl.debug_barrier()
            if page * 64 + 64 > n:
                keys, key_steps = load_keys(keys_of, key_scales, place, INT8, PTX)
                values, value_steps = load_values(values_of, value_scales, place, n + R - page * 64, INT8, PTX)
            if DEPTH == 2:  # noqa: SIM102  # known to the compiler
                if (following < stop) & (following * 64 + 64 > n):
                    last = n + R - following * 64
                    next_keys, next_key_steps = load_keys(keys_of, key_scales, following_place, INT8, PTX)
                    next_values, next_value_steps = load_values(
                        values_of, value_scales, following_place, last, INT8, PTX
                    )
        q = ()
        acc = ()
        best = ()
        mass = ()
        z = tl.zeros([4, 32], tl.float32)
        for i in tl.static_range(ROWS):
            row = b * R + tl.minimum(block * ROWS + i, R - 1)
            q = q + (  # noqa: RUF005
                put_queries(queries_at + i * QUERY_BYTES, projected, gain, cos, sin, row, head, eps, H, KH, PTX),
            )
            acc = acc + (((z, z, z, z), (z, z, z, z), (z, z, z, z), (z, z, z, z)),)  # noqa: RUF005
            best = best + ((z - 1.0e29, z - 1.0e29),)  # noqa: RUF005
            mass = mass + ((z, z),)  # noqa: RUF005
        tl.debug_barrier()
        while page < stop:
            after, after_place = next_page(table, soon, turn, later, stop)
            acc, best, mass, keys, key_steps, values, value_steps = add_page(
                acc, best, mass, q, keys, key_steps, values, value_steps, page, soon, soon_place, stop, split, n,
                block, queries_at, keys_of, key_scales, values_of, value_scales, MOST, R, ROWS, INT8, PTX,
            )  # fmt: skip
            page = following
            if DEPTH == 2:
                following = soon
                soon, soon_place = after, after_place
                if page < stop:
                    after, after_place = next_page(table, soon, turn, later, stop)
                    acc, best, mass, next_keys, next_key_steps, next_values, next_value_steps = add_page(
                        acc, best, mass, q, next_keys, next_key_steps, next_values, next_value_steps, page, soon,
                        soon_place, stop, split, n, block, queries_at, keys_of, key_scales, values_of, value_scales,
                        MOST, R, ROWS, INT8, PTX,
                    )  # fmt: skip
                    page = following
                    following = soon
                    soon, soon_place = after, after_place
            else:
                following = after
                soon, soon_place = after, after_place
        sums = ()
        for i in tl.static_range(ROWS):
            even, odd = column_sum(mass[i][0], PTX), column_sum(mass[i][1], PTX)
            sums = sums + (put_pair(tops_at + i * TOP_BYTES, even, odd, PTX),)  # noqa: RUF005
        tl.debug_barrier()
        for i in tl.static_range(ROWS):
            r = block * ROWS + i
            t = take_pairs(tops_at + i * TOP_BYTES, sums[i], PTX)
            for e in tl.static_range(2):
                column = lane % 4 * 2 + e
                live = (column + warp * 0 < RATIO) & (r < R)
                line = ((b * R + tl.minimum(r, R - 1)) * H + head * RATIO + column) * splits + split
                out = part_out + line.to(tl.int64) * 256 + warp * 64 + lane // 4 * 8
                a = acc[i]
                store_four(out, a[0][e], a[0][2 + e], a[1][e], a[1][2 + e], live, PTX)
                store_four(out + 4, a[2][e], a[2][2 + e], a[3][e], a[3][2 + e], live, PTX)
                one = live & (lane < 4) & (warp == 0)
                store_one(part_max + line + warp * 0, best[i][e], one, PTX)
                store_one(part_sum + line + warp * 0, t[e] + t[2 + e] + t[4 + e] + t[6 + e], one, PTX)


@triton.jit(do_not_specialize=["splits"])
def attention_combine_kernel(
    part_out, part_max, part_sum, projected, lengths, q_out, s_out, splits,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (head * 8 + group of 32 dims, row): join all splits at once, sigmoid gate, int8 group."""
    WIDTH: tl.constexpr = 2 * (H + KH) * 256
    head = tl.program_id(0) // 8
    group = tl.program_id(0) % 8
    t = tl.program_id(1)
    d = group * 32 + tl.arange(0, 32)
    i = tl.arange(0, BLOCK)
    position = tl.load(lengths + t // R) + t % R
    gate = tl.load(projected + t * WIDTH + (H + KH) * 256 + head * 256 + d, cache_modifier=".cg").to(tl.float32)
    wait_for_inputs(PDL)
    inside = i < position // PAGE_TOKENS // pages_per_split(position, MOST) + 1
    at = (t * H + head) * splits + i
    part = tl.load(part_out + at.to(tl.int64)[:, None] * 256 + d[None, :], mask=inside[:, None], other=0.0)
    best = tl.load(part_max + at, mask=inside, other=-1.0e30)
    weight = tl.where(inside, tl.exp2(best - tl.max(best, 0)), 0.0)
    mass = tl.sum(weight * tl.load(part_sum + at, mask=inside, other=0.0), 0)
    y = tl.sum(part * weight[:, None], 0) / mass / (1.0 + tl.exp(-gate))
    store_groups(tl.reshape(y, [1, 32]), q_out, s_out, t, head * 8 + group, H * 8, 1)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Partial results of the splits: `out` [T, H, splits, 256], `top` and `mass` [T, H, splits], fp32.

    `most` bounds the splits of a row and fixes, with its token index, their length, and so the order of its sums: keep
    it constant for the life of an engine. `splits`, what a call has programs for, only has to cover its rows.
    """

    out: torch.Tensor
    top: torch.Tensor
    mass: torch.Tensor
    most: int

    @staticmethod
    def empty(rows: int, context: int, heads: int, device: torch.device | str, most: int) -> AttentionWorkspace:
        """Workspace for `rows` rows of up to `context` tokens."""
        shape = (rows, heads, splits_of(context, most))
        return AttentionWorkspace(
            torch.empty(*shape, 256, device=device), torch.empty(shape, device=device),
            torch.empty(shape, device=device), most,
        )  # fmt: skip


def pages_of(splits: int) -> int:
    """Pages of the longest context that so many splits, fewer than the most, cover."""
    return splits if splits < SHORT else 2 * splits


def attend_splits(
    projected: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    workspace: AttentionWorkspace,
    *,
    heads: int,
    eps: float = 1e-6,
) -> None:
    """The first launch of `attention`: keys and values are appended, `workspace` holds the splits' results."""
    batch = tables.shape[0]
    rows = projected.shape[0] // batch
    kv_heads, pages = codes.shape[1], codes.shape[2]
    splits = workspace.out.shape[2]
    if heads // kv_heads > 8:
        raise ValueError(f"{heads // kv_heads} query heads share a KV head; a program takes at most 8")
    int8 = scales is not None
    block = _tiles.attention_rows(rows, codes)
    words = codes.view(torch.int32)
    grid = (splits, kv_heads, batch * triton.cdiv(rows, block))
    attention_split_kernel[grid](
        projected.view(torch.int32), q_gain.view(torch.int32), k_gain.view(torch.int32), cos, sin,
        words, codes if int8 else words.view(torch.float32), scales.view(torch.int32) if int8 else words,
        scales if int8 else words, tables, lengths, workspace.out, workspace.top, workspace.mass, pages,
        tables.stride(0), splits, eps,
        H=heads, KH=kv_heads, R=rows, MOST=workspace.most, ROWS=block, INT8=int8,
        DEPTH=_tiles.attention_depth(math.prod(grid), block, codes),
        **_tiles.launch(projected, 4),
    )  # fmt: skip


def combine_splits(
    projected: torch.Tensor, lengths: torch.Tensor, workspace: AttentionWorkspace, out: Activation, *, heads: int
) -> None:
    """The second launch of `attention`: `out` from what `attend_splits` left."""
    total = projected.shape[0]
    kv_heads = projected.shape[1] // 512 - heads
    attention_combine_kernel[(heads * 8, total)](
        workspace.out, workspace.top, workspace.mass, projected, lengths, out.q, out.s, workspace.out.shape[2],
        H=heads, KH=kv_heads, R=total // lengths.shape[0], MOST=workspace.most,
        BLOCK=triton.next_power_of_2(workspace.most), **_tiles.launch(projected, 4),
    )  # fmt: skip


def attention(
    projected: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    workspace: AttentionWorkspace,
    out: Activation,
    *,
    heads: int,
    eps: float = 1e-6,
) -> None:
    """Append the rows' keys and values and attend; `out` are int8 rows of the gated output (read with norm="none").

    Args:
        projected: bf16 [T, 2 (H + K) 256], query, key, gate, value; rows of a sequence together.
        q_gain, k_gain: bf16 [256]. cos, sin: fp32 [T, 64] (the sine carries the sign of its half).
        codes: int8 [2, K, pages, 64, 256] with scales fp16 [2, K, pages, 64, 4], or bf16 without.
        tables: int32 [B, P] page numbers. lengths: int32 [B], index of a sequence's first row.
    """
    attend_splits(projected, q_gain, k_gain, cos, sin, codes, scales, tables, lengths, workspace, heads=heads, eps=eps)
    combine_splits(projected, lengths, workspace, out, heads=heads)
