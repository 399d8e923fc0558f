"""Triton prefill attention on INT8 or bf16 pages: norm, rotation, append, pages to fp16, causal softmax, output gate.

The keys and values of a chunk go into the pages first, so that a row sees the same rounded values whenever it is
computed. The pages of the sequence are then opened once into fp16, which every tile of queries reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles_prefill as tiling
from ._dequant import round_bytes

PART = 1024
"""Keys before a chunk are cut into parts of 32, 16, 8, 4, 2 and 1 times this."""
FINE, COARSE = 512, 1024
"""The fused attention of cuDNN takes rows in multiples of these, in the first part of a prompt and behind it.

What is padded costs as much as any row, most behind a long prompt: finer steps cost less, and more plans.
"""
FEWEST = 2048
"""Rows from which it is asked."""
LARGEST = 65504.0
"""The largest value of fp16: what a bf16 page holds beyond it is cut there."""


@triton.jit
def encode_groups(x, R: tl.constexpr):
    """Rows [R, 256] fp32 as INT8 codes [R, 256] and fp16 scales [R, 4] of groups of 64: absmax / 127, half to even."""
    groups = tl.reshape(x, [R, 4, 64])
    scale = tl.div_rn(tl.max(tl.abs(groups), 2), 127.0).to(tl.float16)
    step = scale.to(tl.float32)[:, :, None]
    ratio = tl.div_rn(groups, tl.broadcast_to(tl.where(step > 0.0, step, 1.0), [R, 4, 64]))
    ratio = tl.where(step > 0.0, tl.minimum(tl.maximum(ratio, -127.0), 127.0), 0.0)
    return tl.reshape(round_bytes(ratio, 1.0).to(tl.int8), [R, 256]), scale


@triton.jit(do_not_specialize=["start", "rows"])
def append_kernel(
    projected, q_gain, k_gain, cos, sin, q_out, codes, scales, table, start, rows, pages, eps, first_head,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Programs (head from `first_head`, R rows): queries fp16 [T, H, 256], normed and rotated; keys, values into pages.

    Heads 0 .. H - 1 are queries, then KH keys, then KH values. Queries carry the softmax scale.
    """
    WIDTH: tl.constexpr = 2 * (H + KH) * 256
    head = tl.program_id(0) + first_head
    t = tl.program_id(1) * R + tl.arange(0, R)
    live = t < rows
    at = t.to(tl.int64)
    d = tl.arange(0, 256)
    column = tl.where(head < H + KH, head * 256, (head + H) * 256)
    line = projected + at[:, None] * WIDTH + column
    x = tl.load(line + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    if head < H + KH:
        turned = d < 64
        swap = tl.where(turned, d ^ 32, d)
        gain = 1.0 + tl.where(head < H, tl.load(q_gain + d), tl.load(k_gain + d)).to(tl.float32)
        turn = 1.0 + tl.where(head < H, tl.load(q_gain + swap), tl.load(k_gain + swap)).to(tl.float32)
        factor = (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / 256 + eps))[:, None]
        x = x * factor * gain[None, :]
        other = tl.load(line + swap[None, :], mask=live[:, None] & turned[None, :], other=0.0).to(tl.float32)
        other = other * factor * turn[None, :]
        angle = at[:, None] * 64 + d[None, :]
        c = tl.load(cos + angle, mask=live[:, None] & turned[None, :], other=1.0)
        s = tl.load(sin + angle, mask=live[:, None] & turned[None, :], other=0.0)
        x = x * c + other * s
    if head < H:
        into = q_out + at[:, None] * (H * 256) + head * 256 + d[None, :]
        tl.store(into, (x * 0.0625).to(tl.float16), mask=live[:, None])
    else:
        token = start + t
        page = tl.load(table + token // 64, mask=live, other=0).to(tl.int64)
        place = ((head - H).to(tl.int64) * pages + page) * 64 + token % 64  # planes of keys, then of values
        line_of = codes + place[:, None] * 256 + d[None, :]
        if INT8:
            code, scale = encode_groups(x, R)
            tl.store(line_of, code, mask=live[:, None])
            tl.store(scales + place[:, None] * 4 + tl.arange(0, 4)[None, :], scale, mask=live[:, None])
        else:
            tl.store(line_of, x.to(tl.bfloat16), mask=live[:, None])


@triton.jit(do_not_specialize=["length", "room"])
def open_pages_kernel(
    codes, scales, table, out, length, room, pages, R: tl.constexpr, INT8: tl.constexpr, MOST: tl.constexpr
):
    """Programs (R tokens, plane): tokens of the sequence in order as fp16 [2 KH, room, 256]; zeros from `length`."""
    plane = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * R + tl.arange(0, R)
    live = (token < length)[:, None]
    d = tl.arange(0, 256)
    page = tl.load(table + token // 64, mask=token < length, other=0).to(tl.int64)
    place = (plane * pages + page) * 64 + token % 64
    value = tl.load(codes + place[:, None] * 256 + d[None, :], mask=live, other=0).to(tl.float32)
    if INT8:
        value *= tl.load(scales + place[:, None] * 4 + (d // 64)[None, :], mask=live, other=0.0).to(tl.float32)
    else:
        value = tl.minimum(tl.maximum(value, -MOST), MOST)
    tl.store(
        out + (plane * room + token)[:, None] * 256 + d[None, :], value.to(tl.float16), mask=(token < room)[:, None]
    )


@triton.jit
def softmax_step(query, key, value, seen, best, mass, acc, MASKED: tl.constexpr):
    """One block of keys [256, BN] and values [BN, 256]; `seen` [BM, BN] says which a row sees."""
    score = tl.dot(query, key) * 1.4426950408889634
    if MASKED:
        score = tl.where(seen, score, -1.0e30)
    top = tl.maximum(best, tl.max(score, 1))
    shrink = tl.exp2(best - top)
    p = tl.exp2(score - top[:, None])
    return top, mass * shrink + tl.sum(p, 1), tl.dot(p.to(tl.float16), value, acc * shrink[:, None])


@triton.jit(do_not_specialize=["start", "rows", "room"])
def flash_kernel(
    q, kv, out, sums, start, rows, room,
    H: tl.constexpr, KH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (BM rows of (token, query head of a KV head), KV head): causal softmax over fp16 keys and values.

    `kv` [2 KH, room, 256], zeros beyond the last token; a row of token t sees tokens 0 .. start + t. `out` fp16
    [T, H * 256] and `sums` fp32 [H, T], the logarithms of the softmax sums.
    """
    RATIO: tl.constexpr = H // KH
    head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    m = tile * BM + tl.arange(0, BM)
    t = m // RATIO
    live = t < rows
    mine = head * RATIO + m % RATIO
    d = tl.arange(0, 256)
    n = tl.arange(0, BN)
    at = (t.to(tl.int64) * (H * 256) + mine * 256)[:, None] + d[None, :]
    query = tl.load(q + at, mask=live[:, None], other=0.0)
    keys = kv + (head.to(tl.int64) * room + n)[None, :] * 256 + d[:, None]
    values = kv + ((KH + head).to(tl.int64) * room + n)[:, None] * 256 + d[None, :]
    best = tl.full([BM], -1.0e30, tl.float32)
    mass = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, 256], tl.float32)
    whole = (start + (tile * BM) // RATIO + 1) // BN  # blocks of which every row sees all keys
    last = start + tl.minimum((tile * BM + BM - 1) // RATIO + 1, rows)
    if PTX:  # the interpreter takes no range of tensors: there, every block is a masked one
        for j in range(0, whole):
            step = j.to(tl.int64) * (BN * 256)
            best, mass, acc = softmax_step(
                query, tl.load(keys + step), tl.load(values + step), live[:, None], best, mass, acc, False
            )  # fmt: skip
    edge = whole * BN if PTX else whole * 0
    while edge < last:
        step = edge.to(tl.int64) * 256
        seen = (edge + n)[None, :] <= (start + t)[:, None]
        best, mass, acc = softmax_step(
            query, tl.load(keys + step), tl.load(values + step), seen, best, mass, acc, True
        )  # fmt: skip
        edge += BN
    tl.store(out + at, (acc / mass[:, None]).to(tl.float16), mask=live[:, None])
    tl.store(sums + mine.to(tl.int64) * rows + t, (best + tl.log2(mass)) * 0.6931471805599453, mask=live)


@triton.jit(do_not_specialize=["rows", "part_rows"])
def join_kernel(
    part, part_sums, first, first_sums, acc, sums, projected, out, rows, part_rows, head_stride, row_stride,
    H: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, BEFORE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Programs (query head, R rows): join the attention over one part of the keys to the parts before.

    `part` fp16 (strides `head_stride`, `row_stride`) and `part_sums` [H, part_rows] of this part. BEFORE: how many lie
    before; one is in `first` and `first_sums`, like this one, and of more `acc` fp32 [T, H * 256] and `sums` [H, T]
    have what they come to. With LAST `out` bf16 [T, H * 256] takes the result times the sigmoid gate, else `acc` and
    `sums` do.
    """
    WIDTH: tl.constexpr = 2 * (H + KH) * 256
    head = tl.program_id(0)
    t = tl.program_id(1) * R + tl.arange(0, R)
    live = t < rows
    d = tl.arange(0, 256)
    row = t.to(tl.int64)
    line = (row * (H * 256) + head * 256)[:, None] + d[None, :]
    here = (head.to(tl.int64) * head_stride + row * row_stride)[:, None] + d[None, :]
    y = tl.load(part + here, mask=live[:, None], other=0.0).to(tl.float32)
    new = tl.load(part_sums + head.to(tl.int64) * part_rows + t, mask=live, other=0.0)
    if BEFORE > 0:
        if BEFORE == 1:  # not by way of `acc`, which is as wide as four reads of a part
            old = tl.load(first_sums + head.to(tl.int64) * part_rows + t, mask=live, other=0.0)
            before = tl.load(first + here, mask=live[:, None], other=0.0).to(tl.float32)
        else:
            old = tl.load(sums + head.to(tl.int64) * rows + t, mask=live, other=0.0)
            before = tl.load(acc + line, mask=live[:, None], other=0.0)
        share = 1.0 / (1.0 + tl.exp(old - new))  # of this part; exp may overflow to a share of 0
        y = before + (y - before) * share[:, None]
        top = tl.maximum(old, new)
        new = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    if LAST:
        gate = tl.load(
            projected + (row * WIDTH + (H + KH) * 256 + head * 256)[:, None] + d[None, :], mask=live[:, None], other=0.0
        ).to(tl.float32)  # fmt: skip
        tl.store(out + line, (y / (1.0 + tl.exp(-gate))).to(tl.bfloat16), mask=live[:, None])
    else:
        tl.store(acc + line, y, mask=live[:, None])
        tl.store(sums + head.to(tl.int64) * rows + t, new, mask=live)


def append(
    projected: torch.Tensor,
    q_gain: torch.Tensor,
    k_gain: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    table: torch.Tensor,
    start: int,
    q: torch.Tensor | None,
    *,
    heads: int,
    eps: float = 1e-6,
) -> None:
    """Store the keys and values of a chunk; `q` [T, H, 256] fp16: its queries, normed, rotated and scaled, or None.

    Args:
        projected: bf16 [T, 2 (H + K) 256], query, key, gate, value.
        q_gain, k_gain: bf16 [256]. cos, sin: fp32 [T, 64] (the sine carries the sign of its half).
        codes: int8 [2, K, pages, 64, 256] with scales fp16 [2, K, pages, 64, 4], or bf16 without.
        table: int32 [P] page numbers. start: token index of the first row.
    """
    rows, kv_heads = projected.shape[0], codes.shape[1]
    first = heads if q is None else 0
    block = 16
    append_kernel[(heads + 2 * kv_heads - first, triton.cdiv(rows, block))](
        projected, q_gain, k_gain, cos, sin, projected if q is None else q, codes, codes if scales is None else scales,
        table, start, rows, codes.shape[2], eps, first,
        H=heads, KH=kv_heads, R=block, INT8=scales is not None, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Buffers for chunks of up to T rows that end within `room` tokens, the same for every chunk.

    `q` fp16 [at least T, H, 256], `kv` fp16 [2 K, room, 256], `acc` fp32 [T, H * 256], `sums` fp32 [H * T].
    """

    q: torch.Tensor
    kv: torch.Tensor
    acc: torch.Tensor
    sums: torch.Tensor


def query_rows(rows: int) -> int:
    """Rows of `AttentionWorkspace.q` for chunks of up to `rows` rows: what they are padded to."""
    return -(-rows // COARSE) * COARSE if rows >= FEWEST else rows


def room_for(tokens: int) -> int:
    """Tokens of `AttentionWorkspace.kv` for sequences of up to `tokens` tokens: padded rows see so many keys."""
    return -(-(tokens + COARSE) // 128) * 128


@dataclass(frozen=True, slots=True)
class Route:
    """How a chunk is computed. `lead`: place of its first row in the buffer of queries; `padded`: rows of the fused
    attention, which begin at a multiple of `PART`; 0: one Triton kernel, without padding.

    cuDNN makes a plan for every shape and stride, 70 ms each and anew in every thread: so there are few, whatever the
    lengths of prompts, and `planned` lists them.
    """

    lead: int = 0
    padded: int = 0

    @staticmethod
    def of(start: int, rows: int, capacity: int, fused: bool) -> Route:
        """Of rows `start .. start + rows - 1`, given the rows of the buffer of queries and whether cuDNN serves it."""
        if not fused or rows < FEWEST:
            return Route()
        lead = start % PART
        step = COARSE if start >= PART else FINE
        padded = -(-(lead + rows) // step) * step
        return Route(lead, padded) if padded <= capacity else Route()


def part_lengths(start: int) -> list[int]:
    """Lengths that the keys before a chunk, a multiple of `PART`, are cut into: of few values, so that plans repeat."""
    found = []
    for length in (PART << n for n in range(5, -1, -1)):
        while start >= length:
            found.append(length)
            start -= length
    return found


def planned(capacity: int, room: int) -> list[tuple[int, int, bool]]:
    """Every (rows, keys, causal) that the fused attention is asked for, the likeliest first.

    `capacity` and `room`: of the workspace's queries and keys.
    """
    later = range(capacity // COARSE * COARSE, FEWEST - 1, -COARSE)
    found = [(rows, rows, True) for rows in later]
    for rows in later:
        found += [(rows, PART << n, False) for n in range(5, -1, -1) if (PART << n) <= room]
    first = range(capacity // FINE * FINE, FEWEST - 1, -FINE)
    return found + [(rows, rows, True) for rows in first if rows % COARSE]


def fused_part(
    work: AttentionWorkspace, padded: int, first: int, length: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's attention of the first `padded` queries over keys first .. first + length - 1.

    Returns:
        Outputs fp16 [H, padded, 256] (strided) and logarithms of the softmax sums fp32 [H, padded].
    """
    kv_heads = work.kv.shape[0] // 2
    key, value = (work.kv[i : i + kv_heads, first : first + length][None] for i in (0, kv_heads))
    query = work.q[:padded].transpose(0, 1)[None]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=1.0
    )
    return found[0][0], found[1].view(work.q.shape[1], padded)


def _fused_parts(
    work: AttentionWorkspace, start: int, rows: int, route: Route
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Attention of the chunk over itself, then over the parts before it: outputs [H, T, 256] and log sums [H, T]."""
    first, own = start - route.lead, slice(route.lead, route.lead + rows)
    for number, length in enumerate([route.padded, *part_lengths(first)]):
        if number:
            first -= length
        part, sums = fused_part(work, route.padded, first, length, number == 0)
        yield part[:, own], sums[:, own]
        del part, sums


def _flash(
    work: AttentionWorkspace, start: int, rows: int, heads: int, kv_heads: int, tile: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the chunk over all tokens up to its own, by the Triton kernel."""
    block_m, block_n, warps, stages = tile
    part, sums = work.q.new_empty(rows, heads, 256), work.sums.new_empty(heads, rows)
    flash_kernel[(triton.cdiv(rows * (heads // kv_heads), block_m), kv_heads)](
        work.q, work.kv, part, sums, start, rows, work.kv.shape[1],
        H=heads, KH=kv_heads, BM=block_m, BN=block_n, **tiling.launch(work.q, warps, stages),
    )  # fmt: skip
    return part.transpose(0, 1), sums


def attention_chunk(
    projected: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    table: torch.Tensor,
    start: int,
    work: AttentionWorkspace,
    out: torch.Tensor,
    *,
    heads: int,
    route: Route,
) -> None:
    """Gated attention of a chunk whose keys and values are in the pages and whose queries are in `work.q` (`append`).

    Args:
        projected, codes, scales, table, start: as `append`.
        work: buffers for at least T rows; the queries begin at row `route.lead`.
        out: bf16 [T, H * 256].
        route: `Route.of` these rows. Padded rows are computed and left out; no other row sees theirs.
    """
    rows, kv_heads, room = projected.shape[0], codes.shape[1], work.kv.shape[1]
    end = start - route.lead + route.padded if route.padded else -(-(start + rows) // 128) * 128
    open_pages_kernel[(triton.cdiv(end, 64), 2 * kv_heads)](
        codes, codes if scales is None else scales, table, work.kv, start + rows, room, codes.shape[2],
        R=64, INT8=scales is not None, MOST=LARGEST, num_warps=8,
    )  # fmt: skip
    if route.padded:
        count, parts = 1 + len(part_lengths(start - route.lead)), _fused_parts(work, start, rows, route)
    else:
        tile = tiling.flash_tile_of(tiling.family(projected))
        count, parts = 1, iter((_flash(work, start, rows, heads, kv_heads, tile),))
    first, first_sums = next(parts)
    for number in range(min(count - 1, 1), count):
        part, part_sums = next(parts) if number else (first, first_sums)
        join_kernel[(heads, triton.cdiv(rows, 16))](
            part, part_sums, first, first_sums, work.acc, work.sums, projected, out, rows, part_sums.stride(0),
            part.stride(0), part.stride(1),
            H=heads, KH=kv_heads, R=16, BEFORE=min(number, 2), LAST=number + 1 == count, num_warps=4,
        )  # fmt: skip
        first, first_sums = part, part_sums  # which is read no more, or is this one: the next part takes as much
        del part, part_sums
