"""Triton decode attention on INT8 pages of 64 tokens: norm, rotation, append and split-KV softmax; then the combine.

The splits of a sequence have a fixed length in tokens and start at multiples of it, and every row is a block of columns
of its own (one per query head of the KV head), so a row's sums do not depend on the window, the batch or the reserved
length. Scales stay out of the products: codes are exact in fp16, key scales multiply the fp32 scores of their group
of 64, value scales the probabilities.

Lane form throughout (`_dequant`), products by `mma.m16n8k16`. Of a page, warp w scores tokens 16 w .. 16 w + 15, all
warps then learn all scores in one pass through shared memory, and warp w adds up dims 64 w .. 64 w + 63 of the output,
one scale group. Codes go from memory into operand registers without changing lanes: the order of the dims in a product
over dims, and of output rows, is free, so a lane takes dims that lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    FRESH1,
    FRESH2,
    FRESH4,
    WEIGHT4,
    add_sixteen,
    from_partner,
    load_four,
    load_one,
    load_two,
    round_bytes,
    store_byte,
    store_four,
    store_groups,
    store_half,
    store_one,
    wait_for_inputs,
)
from ._halves import (
    bytes_to_halves,
    column_max,
    column_sum,
    half_product,
    pack_halves,
    pairs_to_halves,
    transpose_halves,
)
from ._order import Activation

PAGE = 64
"""Tokens in a page."""
PAGE_TOKENS = tl.constexpr(PAGE)


@triton.jit
def pair_values(words):
    """Four words of bf16 pairs as eight fp32."""
    found = ()
    for i in tl.static_range(4):
        low = (words[i] << 16).to(tl.float32, bitcast=True)
        found = found + (low, (words[i] & -65536).to(tl.float32, bitcast=True))  # noqa: RUF005
    return found


@triton.jit
def append_rows(
    projected, k_gain, cos, sin, codes, scales, table, n, first, b, head, eps, plane,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store keys and values of the new tokens in this split: a warp takes a key or a value.

    A lane holds eight dims side by side; eight lanes are a scale group. INT8 groups of 64: scale = fp16(absmax / 127),
    codes = round half even of x / scale.
    """
    WIDTH: tl.constexpr = (H + KH) * 256  # words of a row
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    gain = pair_values(load_four(k_gain + lane * 4 + warp * 0, WEIGHT4, PTX))
    value = warp % 2
    for i in tl.static_range((R + 1) // 2):
        r = tl.minimum(i * 2 + warp // 2, R - 1)
        token = n + r
        live = (i * 2 + warp // 2 < R) & (token >= first) & (token < first + SPLIT)
        row = b * R + r
        start = tl.where(value == 1, (2 * H + KH) * 128, H * 128) + head * 128
        x = pair_values(load_four(projected + row * WIDTH + start + lane * 4, FRESH4, PTX))
        square = x[0] * x[0]
        for j in tl.static_range(1, 8):
            square = tl.fma(x[j], x[j], square)
        factor = (1.0 / tl.sqrt_rn(tl.sum(square, 1) / 256 + eps))[:, None]
        at = row * 64 + tl.minimum(lane, 7) * 8
        cosines = load_four(cos + at, FRESH4, PTX) + load_four(cos + at + 4, FRESH4, PTX)
        sines = load_four(sin + at, FRESH4, PTX) + load_four(sin + at + 4, FRESH4, PTX)
        normed = ()
        top = tl.zeros([4, 32], tl.float32)
        for j in tl.static_range(8):
            y = x[j] * factor * (1.0 + gain[j])
            turned = y * cosines[j] + from_partner(y, 4, PTX) * sines[j]
            y = tl.where(value == 1, x[j], tl.where(lane < 8, turned, y))
            normed = normed + (y,)  # noqa: RUF005
            top = tl.maximum(top, tl.abs(y))
        top = tl.maximum(top, from_partner(top, 1, PTX))
        top = tl.maximum(top, from_partner(top, 2, PTX))
        top = tl.maximum(top, from_partner(top, 4, PTX))
        step = tl.div_rn(top, 127.0).to(tl.float16).to(tl.float32)
        page = tl.load(table + tl.minimum(n + i * 2, n + R - 1) // PAGE_TOKENS)
        later = tl.load(table + tl.minimum(n + i * 2 + 1, n + R - 1) // PAGE_TOKENS)
        place = tl.where(warp // 2 == 0, page, later).to(tl.int64) * 64 + token % 64 + value * plane
        for j in tl.static_range(8):
            ratio = tl.div_rn(normed[j], tl.where(step > 0.0, step, 1.0))
            ratio = tl.where(step > 0.0, tl.minimum(tl.maximum(ratio, -127.0), 127.0), 0.0)
            store_byte(codes + place * 256 + lane * 8 + j, round_bytes(ratio, 1.0), live & (lane >= 0), PTX)
        store_half(scales + place * 4 + lane // 8, step, live & (lane % 8 == 0), PTX)


@triton.jit
def query_halves(projected, gain, cos, sin, row, head, eps, H: tl.constexpr, KH: tl.constexpr, PTX: tl.constexpr):
    """The query heads of one KV head in row `row`, normed, rotated, scaled for exp2, as operand registers.

    Lane 4 g + c holds head g's dims 64 j + 16 c + 0..15: for each j four pairs of words, those of products 4 j + 0..3.
    `gain` are eight packed quadruples of words.
    """
    RATIO: tl.constexpr = H // KH
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    line = projected + row * ((H + KH) * 256) + (head * RATIO + tl.minimum(lane // 4, RATIO - 1)) * 128
    at = lane % 4 * 8 + warp * 0
    words = ()
    square = tl.zeros([4, 32], tl.float32)
    for i in tl.static_range(8):
        four = load_four(line + i // 2 * 32 + i % 2 * 4 + at, FRESH4, PTX)
        words = words + (four,)  # noqa: RUF005
        x = pair_values(four)
        for j in tl.static_range(8):
            square = tl.fma(x[j], x[j], square)
    square += from_partner(square, 1, PTX)
    square += from_partner(square, 2, PTX)
    factor = 1.0 / tl.sqrt_rn(square / 256 + eps)
    found = ()
    for i in tl.static_range(8):
        x = pair_values(words[i])
        weight = pair_values(gain[i])
        y = ()
        for j in tl.static_range(8):
            y = y + (x[j] * factor * (1.0 + weight[j]),)  # noqa: RUF005
        if i < 2:  # the first group of 64 rotates: dim d with d + 32, two lanes further
            turn = row * 64 + lane % 4 * 16 + i * 8 + warp * 0
            cosines = load_four(cos + turn, FRESH4, PTX) + load_four(cos + turn + 4, FRESH4, PTX)
            sines = load_four(sin + turn, FRESH4, PTX) + load_four(sin + turn + 4, FRESH4, PTX)
            turned = ()
            for j in tl.static_range(8):
                turned = turned + (y[j] * cosines[j] + from_partner(y[j], 2, PTX) * sines[j],)  # noqa: RUF005
            y = turned
        for j in tl.static_range(4):  # 0.0901.. = log2(e) / 16
            low = y[2 * j] * 0.09016844005556021
            found = found + (pack_halves(low, y[2 * j + 1] * 0.09016844005556021, PTX),)  # noqa: RUF005
    return found


@triton.jit
def score_page(q, keys, steps, PTX: tl.constexpr):
    """Scores of the warp's 16 tokens and one row's heads, as a product lies: (token g, head 2c), (g, 2c + 1), ..

    `keys`: for each group of 64 dims, four words of token g and four of token g + 8; `steps`: their scales.
    """
    z = tl.zeros([4, 32], tl.float32)
    total = (z, z, z, z)
    for j in tl.static_range(4):
        part = (z, z, z, z)
        for m in tl.static_range(4):
            low = bytes_to_halves(keys[j][0][m], PTX)
            high = bytes_to_halves(keys[j][1][m], PTX)
            first = q[(j * 4 + m) * 2]
            part = half_product(part, low[0], high[0], low[1], high[1], first, q[(j * 4 + m) * 2 + 1], 4, PTX)
        upper, lower = steps[j]
        total = (
            tl.fma(part[0], upper, total[0]), tl.fma(part[1], upper, total[1]),
            tl.fma(part[2], lower, total[2]), tl.fma(part[3], lower, total[3]),
        )  # fmt: skip
    return total


@triton.jit
def all_warps(scores):
    """Every warp's four registers in all warps: sixteen [4, 32] of equal rows, those of warp w from 4 w on.

    Two dimensions again at once: vectors [32] have a layout of their own, and where one meets a [4, 32] later on, the
    compiler computes all that led to it a second time in that layout, loads and products too.
    """
    warp = tl.arange(0, 4)[:, None]
    own = ()
    for w in tl.static_range(4):
        for i in tl.static_range(4):
            own = own + (tl.where(warp == w, scores[i], 0.0),)  # noqa: RUF005
    z = tl.zeros([4, 32], tl.float32)
    total = tl.reduce(own, 0, add_sixteen)
    found = ()
    for i in tl.static_range(16):
        found = found + (total[i][None, :] + z,)  # noqa: RUF005
    return found


@triton.jit
def half_words(word, upper):
    """One of two fp16 in a word, as fp32."""
    bits = tl.where(upper, word >> 16, word) & 0xFFFF
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_keys(codes, scales, place, last, PTX: tl.constexpr):
    """Codes and scales of the warp's tokens g and g + 8 of a page whose first token is at `place`."""
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    token = warp * 16 + lane // 4
    keys = ()
    for j in tl.static_range(4):
        at = codes + (place + token) * 64 + j * 16 + lane % 4 * 4
        keys = keys + ((load_four(at, FRESH4, PTX), load_four(at + 8 * 64, FRESH4, PTX)),)  # noqa: RUF005
    low = load_two(scales + (place + token) * 2, FRESH2, PTX)
    high = load_two(scales + (place + token + 8) * 2, FRESH2, PTX)
    steps = ()
    for j in tl.static_range(4):
        # What stands behind the last token may be anything, NaN too.
        upper = tl.where(token < last, half_words(low[j // 2], j % 2 == 1), 0.0)
        lower = tl.where(token + 8 < last, half_words(high[j // 2], j % 2 == 1), 0.0)
        steps = steps + ((upper, lower),)  # noqa: RUF005
    return keys, steps


@triton.jit
def load_values(codes, scales, place, last, PTX: tl.constexpr):
    """Codes of the warp's group of dims, for each 16 tokens those of tokens 2c, 2c + 1, 2c + 8, 2c + 9; and scales.

    The scales are those of tokens g and g + 8, which is how the probabilities lie.
    """
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    values = ()
    steps = ()
    for s in tl.static_range(4):
        at = codes + (place + s * 16 + lane % 4 * 2) * 64 + warp * 16 + lane // 4 * 2
        values = values + ((  # noqa: RUF005
            load_two(at, FRESH2, PTX), load_two(at + 64, FRESH2, PTX),
            load_two(at + 8 * 64, FRESH2, PTX), load_two(at + 9 * 64, FRESH2, PTX),
        ),)  # fmt: skip
        token = s * 16 + lane // 4
        low = load_one(scales + (place + token) * 2 + warp // 2, FRESH1, PTX)
        high = load_one(scales + (place + token + 8) * 2 + warp // 2, FRESH1, PTX)
        steps = steps + ((  # noqa: RUF005
            tl.where(token < last, half_words(low, warp % 2 == 1), 0.0),
            tl.where(token + 8 < last, half_words(high, warp % 2 == 1), 0.0),
        ),)  # fmt: skip
    return values, steps


@triton.jit
def soften(all_scores, best, mass, position, first, last, PTX: tl.constexpr):
    """Online softmax step over a page: probabilities (sixteen [4, 32]), the factor of what was before, best and mass.

    `best`, `mass`: pairs of [4, 32] for a lane's two heads. `position`: the row's token index, as `first`, the page's.
    """
    token = tl.arange(0, 32)[None, :] // 4
    tops = ()
    for e in tl.static_range(2):
        top = best[e]
        for i in tl.static_range(8):
            seen = i * 8 + token
            allowed = (seen < last) & (first + seen <= position)
            top = tl.maximum(top, tl.where(allowed, all_scores[2 * i + e], -1.0e30))
        tops = tops + (column_max(top, PTX),)  # noqa: RUF005
    shrink = (tl.exp2(best[0] - tops[0]), tl.exp2(best[1] - tops[1]))
    p = ()
    even = tl.zeros([4, 32], tl.float32)
    odd = tl.zeros([4, 32], tl.float32)
    for i in tl.static_range(8):
        seen = i * 8 + token
        allowed = (seen < last) & (first + seen <= position)
        a = tl.where(allowed, tl.exp2(all_scores[2 * i] - tops[0]), 0.0)
        b = tl.where(allowed, tl.exp2(all_scores[2 * i + 1] - tops[1]), 0.0)
        even += a
        odd += b
        p = p + (a, b)  # noqa: RUF005
    added = (column_sum(even, PTX), column_sum(odd, PTX))
    return p, shrink, tops, (mass[0] * shrink[0] + added[0], mass[1] * shrink[1] + added[1])


@triton.jit
def add_values(acc, p, shrink, values, steps, PTX: tl.constexpr):
    """acc (four tiles of 16 dims) times `shrink` plus the page's values weighed with `p`."""
    even, odd = shrink
    scaled = ()
    for i in tl.static_range(4):
        a = acc[i]
        scaled = scaled + ((a[0] * even, a[1] * odd, a[2] * even, a[3] * odd),)  # noqa: RUF005
    for s in tl.static_range(4):
        low, high = steps[s]
        b0 = transpose_halves(pack_halves(p[4 * s] * low, p[4 * s + 1] * low, PTX), 4, PTX)
        b1 = transpose_halves(pack_halves(p[4 * s + 2] * high, p[4 * s + 3] * high, PTX), 4, PTX)
        grown = ()
        for h in tl.static_range(2):
            # Bytes 2 i, 2 i + 1 of the lane's eight dims are rows g and g + 8 of tile i.
            near = pairs_to_halves(values[s][0][h], values[s][1][h], PTX)
            far = pairs_to_halves(values[s][2][h], values[s][3][h], PTX)
            for i in tl.static_range(2):
                grown = grown + (  # noqa: RUF005
                    half_product(
                        scaled[2 * h + i], near[2 * i], near[2 * i + 1], far[2 * i], far[2 * i + 1], b0, b1, 4, PTX
                    ),
                )
        scaled = grown
    return scaled


@triton.jit(do_not_specialize=["pages", "table_stride", "splits"])
def attention_split_kernel(
    projected, q_gain, k_gain, cos, sin, codes, code_bytes, scales, scale_halves, tables, lengths, part_out, part_max,
    part_sum, pages, table_stride, splits, eps,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (split, KV head, sequence * pairs of rows): unnormalised output, maximum and sum of a row's heads.

    `projected`, gains: pairs of bf16 as int32; `codes`, `scales`: the same memory as `code_bytes`, `scale_halves`, in
    words.
    """
    RATIO: tl.constexpr = H // KH
    BLOCKS: tl.constexpr = (R + 1) // 2
    ROWS: tl.constexpr = 1 if R == 1 else 2
    plane = pages.to(tl.int64) * (KH * 64)
    split = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2) // BLOCKS
    block = tl.program_id(2) % BLOCKS
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, 4)[:, None]
    gain = ()
    for i in tl.static_range(8):
        at = q_gain + i // 2 * 32 + i % 2 * 4 + lane % 4 * 8 + warp * 0
        gain = gain + (load_four(at, WEIGHT4, PTX),)  # noqa: RUF005
    wait_for_inputs(PDL)
    n = tl.load(lengths + b)
    first = split * SPLIT
    if first < n + R:
        table = tables + b * table_stride
        keys_at = head.to(tl.int64) * pages * 64
        if (first + SPLIT > n) & (first < n + R):
            append_rows(
                projected, k_gain, cos, sin, code_bytes + keys_at * 256, scale_halves + keys_at * 4, table, n, first, b,
                head, eps, plane, H, KH, R, SPLIT, PTX,
            )  # fmt: skip
            tl.debug_barrier()
        q = ()
        acc = ()
        best = ()
        mass = ()
        z = tl.zeros([4, 32], tl.float32)
        for i in tl.static_range(ROWS):
            row = b * R + tl.minimum(block * 2 + i, R - 1)
            q = q + (query_halves(projected, gain, cos, sin, row, head, eps, H, KH, PTX),)  # noqa: RUF005
            acc = acc + (((z, z, z, z), (z, z, z, z), (z, z, z, z), (z, z, z, z)),)  # noqa: RUF005
            best = best + ((z - 1.0e30, z - 1.0e30),)  # noqa: RUF005
            mass = mass + ((z, z),)  # noqa: RUF005
        page_first = first
        end = tl.minimum(first + SPLIT, n + R)
        while page_first < end:
            place = tl.load(table + page_first // 64).to(tl.int64) * 64
            last = end - page_first
            keys, key_steps = load_keys(codes + keys_at * 64, scales + keys_at * 2, place, last, PTX)
            values, value_steps = load_values(
                codes + (plane + keys_at) * 64, scales + (plane + keys_at) * 2, place, last, PTX
            )
            new_acc = ()
            new_best = ()
            new_mass = ()
            for i in tl.static_range(ROWS):
                position = n + tl.minimum(block * 2 + i, R - 1)
                scores = all_warps(score_page(q[i], keys, key_steps, PTX))
                p, shrink, top, total = soften(scores, best[i], mass[i], position, page_first, last, PTX)
                new_acc = new_acc + (add_values(acc[i], p, shrink, values, value_steps, PTX),)  # noqa: RUF005
                new_best = new_best + (top,)  # noqa: RUF005
                new_mass = new_mass + (total,)  # noqa: RUF005
            acc = new_acc
            best = new_best
            mass = new_mass
            page_first += 64
        for i in tl.static_range(ROWS):
            r = block * 2 + i
            for e in tl.static_range(2):
                column = lane % 4 * 2 + e
                live = (column + warp * 0 < RATIO) & (r < R)
                line = ((b * R + tl.minimum(r, R - 1)) * splits + split) * H + head * RATIO + column
                out = part_out + line * 256 + warp * 64 + lane // 4 * 8
                a = acc[i]
                store_four(out, a[0][e], a[0][2 + e], a[1][e], a[1][2 + e], live, PTX)
                store_four(out + 4, a[2][e], a[2][2 + e], a[3][e], a[3][2 + e], live, PTX)
                one = live & (lane < 4) & (warp == 0)
                store_one(part_max + line + warp * 0, best[i][e], one, PTX)
                store_one(part_sum + line + warp * 0, mass[i][e], one, PTX)


@triton.jit(do_not_specialize=["splits"])
def attention_combine_kernel(
    part_out, part_max, part_sum, projected, lengths, q_out, s_out, splits,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (head * 4 + group of 64 dims, row): join the splits in order, sigmoid gate, int8 groups."""
    WIDTH: tl.constexpr = 2 * (H + KH) * 256
    head = tl.program_id(0) // 4
    group = tl.program_id(0) % 4
    t = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    d = group * 64 + tl.arange(0, 64)
    # Splits this row sees: all later ones would add exact zeros.
    used = (tl.load(lengths + t // R) + t % R) // SPLIT + 1
    gate = tl.load(projected + t * WIDTH + (H + KH) * 256 + head * 256 + d, cache_modifier=".cg").to(tl.float32)
    wait_for_inputs(PDL)
    best = tl.full([BLOCK], -1.0e30, tl.float32)
    i = 0
    while i < used:
        at = (t * splits + i + lane) * H + head
        best = tl.maximum(best, tl.load(part_max + at, mask=i + lane < used, other=-1.0e30))
        i += BLOCK
    top = tl.max(best, 0)
    total = tl.zeros([64], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    i = 0
    while i < used:
        at = (t * splits + i + lane) * H + head
        inside = i + lane < used
        weight = tl.exp2(tl.load(part_max + at, mask=inside, other=-1.0e30) - top)
        weight = tl.where(inside, weight, 0.0)
        mass += weight * tl.load(part_sum + at, mask=inside, other=0.0)
        part = tl.load(part_out + at[:, None] * 256 + d[None, :], mask=inside[:, None], other=0.0)
        total += tl.sum(part * weight[:, None], 0)
        i += BLOCK
    y = total / tl.sum(mass, 0) / (1.0 + tl.exp(-gate))
    store_groups(tl.reshape(y, [2, 32]), q_out, s_out, t, head * 8 + group * 2, H * 8, 2)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Partial results of the splits: `out` [T, splits, H, 256], `top` and `mass` [T, splits, H], fp32."""

    out: torch.Tensor
    top: torch.Tensor
    mass: torch.Tensor
    split: int

    @staticmethod
    def empty(rows: int, context: int, heads: int, device: torch.device | str, split: int = 128) -> AttentionWorkspace:
        """Workspace for `rows` rows of up to `context` tokens; `split` tokens a program, a multiple of 64.

        `split` fixes the order of the sums: keep it constant for the life of an engine.
        """
        if split % PAGE:
            raise ValueError(f"split is {split}; it must be a multiple of the page size {PAGE}")
        splits = -(-context // split)
        shape = (rows, splits, heads)
        return AttentionWorkspace(
            torch.empty(*shape, 256, device=device), torch.empty(shape, device=device),
            torch.empty(shape, device=device), split,
        )  # fmt: skip


def attention(
    projected: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
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
        codes: int8 [2, K, pages, 64, 256], scales: fp16 [2, K, pages, 64, 4].
        tables: int32 [B, P] page numbers. lengths: int32 [B], index of a sequence's first row.
    """
    batch = tables.shape[0]
    total = projected.shape[0]
    rows = total // batch
    kv_heads, pages = codes.shape[1], codes.shape[2]
    splits = workspace.out.shape[1]
    if heads // kv_heads > 8:
        raise ValueError(f"{heads // kv_heads} query heads share a KV head; a program takes at most 8")
    attention_split_kernel[(splits, kv_heads, batch * ((rows + 1) // 2))](
        projected.view(torch.int32), q_gain.view(torch.int32), k_gain.view(torch.int32), cos, sin,
        codes.view(torch.int32), codes, scales.view(torch.int32), scales, tables, lengths, workspace.out, workspace.top,
        workspace.mass, pages, tables.stride(0), splits, eps,
        H=heads, KH=kv_heads, R=rows, SPLIT=workspace.split, **_tiles.launch(projected, 4),
    )  # fmt: skip
    attention_combine_kernel[(heads * 4, total)](
        workspace.out, workspace.top, workspace.mass, projected, lengths, out.q, out.s, splits,
        H=heads, KH=kv_heads, R=rows, SPLIT=workspace.split, BLOCK=64, **_tiles.launch(projected, 4),
    )  # fmt: skip
