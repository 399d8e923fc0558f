"""Triton helpers of decode attention on one page: queries, scores, probabilities, the sums of values.

Warps hand each other queries, maxima and weights through a room in shared memory; `attention_decode` has the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._dequant import FRESH4, from_partner, load_four
from ._halves import half_product, pack_halves
from ._pages import half_values, key_halves, pair_values, value_halves
from ._room import put_four, put_one, put_two, room, room_of, take_floats, take_words

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
