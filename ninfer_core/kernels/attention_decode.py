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
    WEIGHT4,
    load_four,
    store_four,
    store_one,
    wait_for_inputs,
)
from ._halves import column_max, column_sum, power
from ._order import Activation
from ._page_sums import (
    QUERY_BYTES,
    TOP_BYTES,
    WEIGHT_BYTES,
    add_values,
    mask_scores,
    own_room,
    put_pair,
    put_queries,
    put_weights,
    score_page,
    take_pairs,
    take_weights,
)
from ._pages import (
    PAGE_TOKENS,
    append_rows,
    load_keys,
    load_values,
    no_page,
    page_steps,
)
from ._planes import store_groups

SHORT_PAGES = tl.constexpr(SHORT)


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
