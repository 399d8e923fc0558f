"""Triton kernels of the vision tower: residual sum with the next layer norm, rotation, attention inside segments.

A head of D columns is kept as two blocks, `vision.split_of(D)`: the largest power of two in it and a tail. The tail of
the values has a column of ones behind the head, so that the product with the softmax sums it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import _tiles_prefill as tiling
from .vision import split_of

LOG2E = 1.4426950408889634


@triton.jit
def sum_norm_kernel(x, y, weight, bias, u, eps, M: tl.constexpr, BM: tl.constexpr, ADD: tl.constexpr):
    """Programs (row): x [P, M] fp32 += y bf16 (with ADD); u bf16 = layer norm of x, times weight, plus bias."""
    t = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    inside = m < M
    row = tl.load(x + t * M + m, mask=inside, other=0.0)
    if ADD:
        row += tl.load(y + t * M + m, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + t * M + m, row, mask=inside)
    spread = tl.where(inside, row - tl.sum(row, 0) / M, 0.0)
    factor = 1.0 / tl.sqrt_rn(tl.sum(spread * spread, 0) / M + eps)
    scale = tl.load(weight + m, mask=inside, other=0.0)
    made = spread * factor * scale + tl.load(bias + m, mask=inside, other=0.0)
    tl.store(u + t * M + m, made.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def turn_kernel(
    qkv, cos, sin, out, rows, scale,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Programs (R rows, part: queries, keys, values): out bf16 [3, H, P, DP], queries and keys turned, queries scaled.

    Zeros behind a head, but for a one behind that of a value.
    """
    part = tl.program_id(1)
    t = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, BD)
    live, inside = (t < rows)[:, None], (d < D)[None, :]
    at = t.to(tl.int64)[:, None]
    turned = part < 2
    c = tl.load(cos + at * D + d[None, :], mask=live & inside & turned, other=1.0)
    s = tl.load(sin + at * D + d[None, :], mask=live & inside & turned, other=0.0)
    factor = tl.where(part == 0, scale, 1.0)
    swap = tl.where(d < D // 2, d + D // 2, d - D // 2)
    line = qkv + at * (3 * H * D) + part * (H * D)
    for head in tl.static_range(H):
        x = tl.load(line + head * D + d[None, :], mask=live & inside, other=0.0).to(tl.float32)
        other = tl.load(line + head * D + swap[None, :], mask=live & inside & turned, other=0.0).to(tl.float32)
        made = (x * c + other * s) * factor
        made = tl.where((d == D)[None, :] & (part == 2), 1.0, made)
        place = ((part * H + head).to(tl.int64) * rows + at) * DP + d[None, :]
        tl.store(out + place, made.to(tl.bfloat16), mask=live & (d < DP)[None, :])


@triton.jit
def product(a, b, acc, PTX: tl.constexpr):
    """acc + a b of bf16 tiles with fp32 sums; the interpreter multiplies bf16 only as fp32."""
    if PTX:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def attend(q0, q1, k0, k1, v0, v1, seen, best, acc0, acc1, MASKED: tl.constexpr, PTX: tl.constexpr):
    """One block of keys: scores in powers of two, the running maximum, the weighted values of both column blocks."""
    score = tl.zeros([q0.shape[0], k0.shape[1]], tl.float32)
    score = product(q1, k1, product(q0, k0, score, PTX), PTX)
    if MASKED:
        score = tl.where(seen, score, -1.0e30)
    top = tl.maximum(best, tl.max(score, 1))
    shrink = tl.exp2(best - top)[:, None]
    p = tl.exp2(score - top[:, None]).to(tl.bfloat16)
    return top, product(p, v0, acc0 * shrink, PTX), product(p, v1, acc1 * shrink, PTX)


@triton.jit(do_not_specialize=["first", "length", "rows"])
def attend_kernel(
    qkv, out, first, length, rows,
    H: tl.constexpr, D: tl.constexpr, DM: tl.constexpr, DT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Programs (BM rows, head, segment): softmax(q k) v of a segment; qkv as `turn_kernel` makes it, out [P, H D]."""
    DP: tl.constexpr = DM + DT
    head, start = tl.program_id(1), first + tl.program_id(2) * length
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    live = (m < length)[:, None]
    d0, d1, n = tl.arange(0, DM), tl.arange(0, DT), tl.arange(0, BN)
    plane = rows.to(tl.int64) * DP
    base = qkv + head * plane + start.to(tl.int64) * DP
    query = base + m[:, None] * DP
    q0 = tl.load(query + d0[None, :], mask=live, other=0.0)
    q1 = tl.load(query + DM + d1[None, :], mask=live, other=0.0)
    keys = base + H * plane + n[None, :] * DP
    values = base + 2 * H * plane + n[:, None] * DP
    best = tl.full([BM], -1.0e30, tl.float32)
    acc0 = tl.zeros([BM, DM], tl.float32)
    acc1 = tl.zeros([BM, DT], tl.float32)
    whole = length // BN * BN
    if PTX:  # the interpreter takes no range of tensors: there, every block is a masked one
        for j in range(0, whole, BN):
            k, v = keys + j * DP, values + j * DP
            best, acc0, acc1 = attend(
                q0, q1, tl.load(k + d0[:, None]), tl.load(k + DM + d1[:, None]), tl.load(v + d0[None, :]),
                tl.load(v + DM + d1[None, :]), live, best, acc0, acc1, False, PTX,
            )  # fmt: skip
    edge = whole if PTX else whole * 0
    while edge < length:
        seen = edge + n < length
        k, v = keys + edge * DP, values + edge * DP
        best, acc0, acc1 = attend(
            q0, q1, tl.load(k + d0[:, None], mask=seen[None, :], other=0.0),
            tl.load(k + DM + d1[:, None], mask=seen[None, :], other=0.0),
            tl.load(v + d0[None, :], mask=seen[:, None], other=0.0),
            tl.load(v + DM + d1[None, :], mask=seen[:, None], other=0.0), seen[None, :], best, acc0, acc1, True, PTX,
        )  # fmt: skip
        edge += BN
    mass = tl.sum(tl.where((d1 == D - DM)[None, :], acc1, 0.0), 1)[:, None]
    into = out + (start + m).to(tl.int64)[:, None] * (H * D) + head * D
    tl.store(into + d0[None, :], (acc0 / mass).to(tl.bfloat16), mask=live & (d0 < D)[None, :])
    tl.store(into + DM + d1[None, :], (acc1 / mass).to(tl.bfloat16), mask=live & (DM + d1 < D)[None, :])


def sum_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    u: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """x [P, M] fp32 += y bf16 (if any); u [P, M] bf16 := layer norm of x with `weight` and `bias` fp32."""
    rows, width = x.shape
    sum_norm_kernel[(rows,)](
        x, x if y is None else y, weight, bias, u, eps,
        M=width, BM=triton.next_power_of_2(width), ADD=y is not None, num_warps=4,
    )  # fmt: skip


def turn(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """`qkv` [P, 3 H D] bf16 in heads [3, H, P, padded D]: see `turn_kernel`."""
    rows, dim = qkv.shape[0], qkv.shape[1] // (3 * heads)
    padded = sum(split_of(dim))
    out = qkv.new_empty(3, heads, rows, padded)
    block = 8
    turn_kernel[(triton.cdiv(rows, block), 3)](
        qkv, cos, sin, out, rows, LOG2E * dim**-0.5,
        H=heads, D=dim, DP=padded, BD=triton.next_power_of_2(padded), R=block, num_warps=4,
    )  # fmt: skip
    return out


def segment_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    segments: Sequence[tuple[int, int]],
    heads: int,
    out: torch.Tensor,
) -> None:
    """`vision.segment_attention` of bf16 rows."""
    rows, dim = qkv.shape[0], qkv.shape[1] // (3 * heads)
    turned = turn(qkv, cos, sin, heads)
    main, tail = split_of(dim)
    block_m, block_n, warps, stages, registers = tiling.segment_tile_of(tiling.family(qkv))
    options = tiling.launch(qkv, warps, stages) | ({"maxnreg": registers} if registers and qkv.is_cuda else {})
    first = 0
    for count, length in segments:
        attend_kernel[(triton.cdiv(length, block_m), heads, count)](
            turned, out, first, length, rows,
            H=heads, D=dim, DM=main, DT=tail, BM=block_m, BN=block_n, **options,
        )  # fmt: skip
        first += count * length
