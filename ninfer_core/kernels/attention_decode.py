"""Triton decode attention on INT8 or bf16 pages of 64 tokens: norm, rotation, append, split-KV softmax, the combine.

The length of a row's splits follows from its token index alone (the fewest pages that make at most `most` splits), and
every row is a block of columns of its own (one per query head of the KV head), so a row's sums do not depend on the
window, the batch or the reserved length. A long context has as many programs as a card can hold at once, each of which
reads a long run, and little to combine. Scales stay out of the products: key scales multiply the fp32 scores of their
group of 64, value scales the probabilities.

Lane form throughout (`_dequant`), products by `mma.m16n8k16`. Of a page, warp w scores tokens 16 w .. 16 w + 15, all
warps then learn all scores in one pass through shared memory, and warp w adds up dims 64 w .. 64 w + 63 of the output,
one scale group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    FRESH4,
    WEIGHT4,
    add_sixteen,
    from_partner,
    load_four,
    store_four,
    store_groups,
    store_one,
    wait_for_inputs,
)
from ._halves import column_max, column_sum, half_product, pack_halves, transpose_halves
from ._order import Activation
from ._pages import (
    PAGE,
    PAGE_TOKENS,
    append_rows,
    key_halves,
    load_keys,
    load_values,
    pair_values,
    value_halves,
)


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
def score_page(q, keys, steps, INT8: tl.constexpr, PTX: tl.constexpr):
    """Scores of the warp's 16 tokens and one row's heads, as a product lies: (token g, head 2c), (g, 2c + 1), ..

    `keys`, `steps`: see `load_keys`.
    """
    z = tl.zeros([4, 32], tl.float32)
    total = (z, z, z, z)
    for j in tl.static_range(4):
        part = (z, z, z, z)
        if not INT8:
            part = total
        for m in tl.static_range(4):
            low = key_halves(keys[j][0], m, INT8, PTX)
            high = key_halves(keys[j][1], m, INT8, PTX)
            first = q[(j * 4 + m) * 2]
            part = half_product(part, low[0], high[0], low[1], high[1], first, q[(j * 4 + m) * 2 + 1], 4, PTX)
        if INT8:
            upper, lower = steps[j]
            total = (
                tl.fma(part[0], upper, total[0]), tl.fma(part[1], upper, total[1]),
                tl.fma(part[2], lower, total[2]), tl.fma(part[3], lower, total[3]),
            )  # fmt: skip
        else:
            total = part
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
def add_values(acc, p, shrink, values, steps, INT8: tl.constexpr, PTX: tl.constexpr):
    """acc (four tiles of 16 dims) times `shrink` plus the page's values weighed with `p`."""
    even, odd = shrink
    scaled = ()
    for i in tl.static_range(4):
        a = acc[i]
        scaled = scaled + ((a[0] * even, a[1] * odd, a[2] * even, a[3] * odd),)  # noqa: RUF005
    for s in tl.static_range(4):
        p0, p1, p2, p3 = p[4 * s], p[4 * s + 1], p[4 * s + 2], p[4 * s + 3]
        if INT8:
            low, high = steps[s]
            p0, p1, p2, p3 = p0 * low, p1 * low, p2 * high, p3 * high
        b0 = transpose_halves(pack_halves(p0, p1, PTX), 4, PTX)
        b1 = transpose_halves(pack_halves(p2, p3, PTX), 4, PTX)
        grown = ()
        for h in tl.static_range(2):
            left = value_halves(values[s], h, INT8, PTX)
            for i in tl.static_range(2):
                grown = grown + (  # noqa: RUF005
                    half_product(
                        scaled[2 * h + i], left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3], b0, b1,
                        4, PTX,
                    ),
                )  # fmt: skip
        scaled = grown
    return scaled


@triton.jit
def pages_per_split(position, MOST: tl.constexpr):
    """Pages in a split of the row at this token index: the fewest that make at most `MOST` splits."""
    return (position // PAGE_TOKENS + MOST) // MOST


@triton.jit(do_not_specialize=["pages", "table_stride", "splits"])
def attention_split_kernel(
    projected, q_gain, k_gain, cos, sin, codes, code_bytes, scales, scale_halves, tables, lengths, part_out, part_max,
    part_sum, pages, table_stride, splits, eps,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    INT8: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (split, KV head, sequence * blocks of ROWS rows): unnormalised output, maximum and sum of a row's heads.

    `projected`, gains: pairs of bf16 as int32; `codes`, `scales`: the same memory as `code_bytes`, `scale_halves`, in
    words (bf16 pages: `code_bytes` as fp32, no scales). Where a block's two rows have splits of different length, it
    reads the pages of both; a page that is not a row's changes none of its bits. AHEAD: the next page's keys are asked
    for before this page's values are added up.
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
    gain = ()
    for i in tl.static_range(8):
        at = q_gain + i // 2 * 32 + i % 2 * 4 + lane % 4 * 8 + warp * 0
        gain = gain + (load_four(at, WEIGHT4, PTX),)  # noqa: RUF005
    wait_for_inputs(PDL)
    n = tl.load(lengths + b)
    last_row = n + tl.minimum(block * ROWS + ROWS - 1, R - 1)
    size = pages_per_split(n + block * ROWS, MOST)
    later_size = pages_per_split(last_row, MOST)
    page = split * size
    turn = page + size  # the end of the first row's split; the second's lies at `later`
    later = split * later_size
    stop = tl.minimum(later + later_size, last_row // PAGE_TOKENS + 1)
    if page < stop:
        table = tables + b * table_stride
        keys_at = head.to(tl.int64) * pages * 64
        if stop * 64 > n:
            append_rows(
                projected, k_gain, cos, sin, code_bytes + keys_at * (256 if INT8 else 128), scale_halves + keys_at * 4,
                table, n, page, stop, b, head, eps, plane, H, KH, R, INT8, PTX,
            )  # fmt: skip
            tl.debug_barrier()
        keys_of = codes + keys_at * WORDS
        values_of = codes + (plane + keys_at) * WORDS
        key_scales = scales + keys_at * 2
        value_scales = scales + (plane + keys_at) * 2
        place = tl.load(table + page).to(tl.int64) * 64
        if AHEAD:
            keys, key_steps = load_keys(keys_of, key_scales, place, n + R - page * 64, INT8, PTX)
        q = ()
        acc = ()
        best = ()
        mass = ()
        z = tl.zeros([4, 32], tl.float32)
        for i in tl.static_range(ROWS):
            row = b * R + tl.minimum(block * ROWS + i, R - 1)
            q = q + (query_halves(projected, gain, cos, sin, row, head, eps, H, KH, PTX),)  # noqa: RUF005
            acc = acc + (((z, z, z, z), (z, z, z, z), (z, z, z, z), (z, z, z, z)),)  # noqa: RUF005
            best = best + ((z - 1.0e30, z - 1.0e30),)  # noqa: RUF005
            mass = mass + ((z, z),)  # noqa: RUF005
        while page < stop:
            first = page * 64
            last = n + R - first
            following = page + 1
            following = tl.where(following == turn, tl.maximum(following, later), following)
            next_place = tl.load(table + tl.minimum(following, stop - 1)).to(tl.int64) * 64
            if not AHEAD:
                keys, key_steps = load_keys(keys_of, key_scales, place, last, INT8, PTX)
            values, value_steps = load_values(values_of, value_scales, place, last, INT8, PTX)
            scores = ()
            for i in tl.static_range(ROWS):
                scores = scores + (score_page(q[i], keys, key_steps, INT8, PTX),)  # noqa: RUF005
            if AHEAD:  # noqa: SIM102
                if following < stop:
                    keys, key_steps = load_keys(keys_of, key_scales, next_place, n + R - following * 64, INT8, PTX)
            new_acc = ()
            new_best = ()
            new_mass = ()
            for i in tl.static_range(ROWS):
                own = (page < turn) if i == 0 else (page >= later)
                position = tl.where(own, n + tl.minimum(block * ROWS + i, R - 1), -1)
                p, shrink, top, total = soften(all_warps(scores[i]), best[i], mass[i], position, first, last, PTX)
                new_acc = new_acc + (add_values(acc[i], p, shrink, values, value_steps, INT8, PTX),)  # noqa: RUF005
                new_best = new_best + (top,)  # noqa: RUF005
                new_mass = new_mass + (total,)  # noqa: RUF005
            acc = new_acc
            best = new_best
            mass = new_mass
            page = following
            place = next_place
        for i in tl.static_range(ROWS):
            r = block * ROWS + i
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
                store_one(part_sum + line + warp * 0, mass[i][e], one, PTX)


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


def splits_of(tokens: int, most: int) -> int:
    """Programs along a sequence that cover every row which sees at most `tokens` tokens."""
    return min(most, -(-tokens // PAGE))


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
    tile: _tiles.Attention | None = None,
) -> None:
    """Append the rows' keys and values and attend; `out` are int8 rows of the gated output (read with norm="none").

    Args:
        projected: bf16 [T, 2 (H + K) 256], query, key, gate, value; rows of a sequence together.
        q_gain, k_gain: bf16 [256]. cos, sin: fp32 [T, 64] (the sine carries the sign of its half).
        codes: int8 [2, K, pages, 64, 256] with scales fp16 [2, K, pages, 64, 4], or bf16 without.
        tables: int32 [B, P] page numbers. lengths: int32 [B], index of a sequence's first row.
        tile: how programs take rows and pages; no bit depends on it.
    """
    batch = tables.shape[0]
    total = projected.shape[0]
    rows = total // batch
    kv_heads, pages = codes.shape[1], codes.shape[2]
    splits = workspace.out.shape[2]
    if heads // kv_heads > 8:
        raise ValueError(f"{heads // kv_heads} query heads share a KV head; a program takes at most 8")
    int8 = scales is not None
    tile = tile or _tiles.attention(codes)
    block = min(rows, tile.rows)
    words = codes.view(torch.int32)
    attention_split_kernel[(splits, kv_heads, batch * triton.cdiv(rows, block))](
        projected.view(torch.int32), q_gain.view(torch.int32), k_gain.view(torch.int32), cos, sin,
        words, codes if int8 else words.view(torch.float32), scales.view(torch.int32) if int8 else words,
        scales if int8 else words, tables, lengths, workspace.out, workspace.top, workspace.mass, pages,
        tables.stride(0), splits, eps,
        H=heads, KH=kv_heads, R=rows, MOST=workspace.most, ROWS=block, AHEAD=tile.ahead, INT8=int8,
        **_tiles.launch(projected, 4),
    )  # fmt: skip
    attention_combine_kernel[(heads * 8, total)](
        workspace.out, workspace.top, workspace.mass, projected, lengths, out.q, out.s, splits,
        H=heads, KH=kv_heads, R=rows, MOST=workspace.most, BLOCK=triton.next_power_of_2(workspace.most),
        **_tiles.launch(projected, 4),
    )  # fmt: skip
