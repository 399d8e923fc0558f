"""Triton decode projections: packed weights times int8 activation rows, 1 to 64 rows, plain or residual epilogue.

One program owns some output rows over all of K and at most eight activation rows, so each result is one fixed sum:
its bits depend neither on the other rows of the call nor on their number. Weights of the first K chunk are requested
before the wait for the kernel in front.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    code_factor,
    emit_group,
    load_high,
    load_words,
    row_dot,
    row_factor,
    wait_for_inputs,
)
from ._order import Activation, KernelMatrix


@triton.jit
def weight_offsets(row, G: tl.constexpr, PLANES: tl.constexpr):
    """Element offset of rows `row` [BN] in a plane-tiled tensor with `PLANES` planes."""
    return (row >> 5) * (PLANES * 32 * G) + (row & 31) * G


@triton.jit
def add_products(
    accumulators, words, high, scale, xq, xs, ss, t0, rows, g, eps,
    G32: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, FMT: tl.constexpr, HEADS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add one chunk of K to the T accumulators [BN, BG]."""
    factor = scale.to(tl.float32) * code_factor(FMT)
    grown = ()
    for t in tl.static_range(T):
        i = tl.minimum(t0 + t, rows - 1)
        dot = row_dot(words, high, xq + i * (8 * G32), xs + i * G32, ss + i * PARTS, g, eps, G32, FMT, HEADS, PTX)
        grown = grown + (accumulators[t] + dot * factor,)  # noqa: RUF005
    return grown


@triton.jit
def tile_products(
    w, wh, ws, row, xq, xs, ss, t0, rows, eps,
    G: tl.constexpr, BG: tl.constexpr, G32: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, FMT: tl.constexpr,
    HEADS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums over K of weight rows `row` [BN] with activation rows t0..t0+T-1: a tuple of T vectors [BN]."""
    high_planes: tl.constexpr = 2 if FMT == 5 else (4 if FMT == 6 else 0)
    chunks: tl.constexpr = G // BG
    g = tl.arange(0, BG)
    offset = weight_offsets(row, G, 8)[:, None] + g[None, :]
    high_offset = weight_offsets(row, G, high_planes)[:, None] + g[None, :]
    scale_offset = row[:, None] * G + g[None, :]
    words = load_words(w, offset, 32 * G, None)
    high = load_high(wh, high_offset, 32 * G, None, FMT)
    scale = tl.load(ws + scale_offset, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    accumulators = ()
    for _t in tl.static_range(T):
        accumulators = accumulators + (tl.zeros(words[0].shape, tl.float32),)  # noqa: RUF005
    if chunks <= 4:
        for c in tl.static_range(chunks):
            if c > 0:
                words = load_words(w, offset + c * BG, 32 * G, None)
                high = load_high(wh, high_offset + c * BG, 32 * G, None, FMT)
                scale = tl.load(ws + scale_offset + c * BG, eviction_policy="evict_first")
            accumulators = add_products(
                accumulators, words, high, scale, xq, xs, ss, t0, rows, c * BG + g, eps, G32, PARTS, T, FMT, HEADS, PTX
            )
    else:
        for c in range(chunks):
            # The next chunk is on its way while this one is multiplied; the last turn asks for nothing.
            ahead = c * BG + BG
            inside = (ahead + g)[None, :] < G
            next_words = load_words(w, offset + ahead, 32 * G, inside)
            next_high = load_high(wh, high_offset + ahead, 32 * G, inside, FMT)
            next_scale = tl.load(ws + scale_offset + ahead, mask=inside, eviction_policy="evict_first")
            accumulators = add_products(
                accumulators, words, high, scale, xq, xs, ss, t0, rows, c * BG + g, eps, G32, PARTS, T, FMT, HEADS, PTX
            )
            words = next_words
            high = next_high
            scale = next_scale
    sums = ()
    for t in tl.static_range(T):
        sums = sums + (tl.sum(accumulators[t], 1),)  # noqa: RUF005
    return sums


@triton.jit
def linear_kernel(
    w, wh, ws, xq, xs, ss, out, u, side_w, side_out, rows, side_rows, eps,
    N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, ROWNORM: tl.constexpr, SIDE: tl.constexpr, SIDE_BN: tl.constexpr, FMT: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t, n] = factor(t) * sum_k w[n, k] x[t, k]; with SIDE also fp32 `side_out` = bf16 `side_w` times `u` rows."""
    pid = tl.program_id(0)
    t0 = tl.program_id(1) * T
    if pid < N // BN:
        row = pid * BN + tl.arange(0, BN)
        sums = tile_products(
            w, wh, ws, row, xq, xs, ss, t0, rows, eps, G, BG, K // 32, PARTS, T, FMT, HEADS, PTX, PDL
        )
        for t in tl.static_range(T):
            y = sums[t]
            if ROWNORM:
                i = tl.minimum(t0 + t, rows - 1)
                y = y * row_factor(ss + i * PARTS, eps, PARTS, PARTS_BLOCK, K)
            tl.store(out + (t0 + t) * N + row, y.to(out.dtype.element_ty), mask=(row < N) & (t0 + t < rows))
    elif SIDE:
        side_products(
            u, side_w, side_out, ss, (pid - N // BN) * SIDE_BN, t0, rows, side_rows, eps,
            K, PARTS, PARTS_BLOCK, SIDE_BN, T, PDL,
        )  # fmt: skip


@triton.jit
def side_products(
    u, side_w, side_out, ss, first, t0, rows, side_rows, eps,
    K: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, BN: tl.constexpr, T: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A few bf16 rows (router, decay and update-rate inputs) times fp32 activations: logits keep their precision."""
    row = first + tl.arange(0, BN)
    BK: tl.constexpr = 1024 if K % 1024 == 0 else 64
    k = tl.arange(0, BK)
    inside = row[:, None] < side_rows
    weight = tl.load(side_w + row[:, None] * K + k[None, :], mask=inside, other=0.0)
    wait_for_inputs(PDL)
    totals = ()
    for t in tl.static_range(T):
        totals = totals + (tl.zeros([BN, BK], tl.float32),)  # noqa: RUF005
    for c in tl.static_range(K // BK):
        if c > 0:
            weight = tl.load(side_w + row[:, None] * K + c * BK + k[None, :], mask=inside, other=0.0)
        grown = ()
        for t in tl.static_range(T):
            i = tl.minimum(t0 + t, rows - 1)
            x = tl.load(u + i * K + c * BK + k)
            grown = grown + (totals[t] + weight.to(tl.float32) * x[None, :],)  # noqa: RUF005
        totals = grown
    for t in tl.static_range(T):
        i = tl.minimum(t0 + t, rows - 1)
        y = tl.sum(totals[t], 1) * row_factor(ss + i * PARTS, eps, PARTS, PARTS_BLOCK, K)
        tl.store(side_out + (t0 + t) * side_rows + row, y, mask=(row < side_rows) & (t0 + t < rows))


@triton.jit
def finish_residual(x, norm, x_out, u_out, q_out, s_out, ss_out, i, pid, row, N: tl.constexpr):
    """Store 32 residual values of row `i` and their normalised-later int8 group for the next reader."""
    tl.store(x_out + i * N + row, x)
    u = x * (1.0 + tl.load(norm + row).to(tl.float32))
    tl.store(u_out + i * N + row, u)
    emit_group(u, q_out + i * (N // 4), s_out + i * (N // 32), pid, N // 32)
    tl.store(ss_out + i * (N // 32) + pid, tl.sum(x * x, 0))


@triton.jit
def linear_residual_kernel(
    w, wh, ws, xq, xs, ss, x, norm, x_out, u_out, q_out, s_out, ss_out, rows, eps,
    N: tl.constexpr, G: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, FMT: tl.constexpr,
    T: tl.constexpr, BG: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x_out = x + w @ a (fp32), and the int8 groups of x_out * (1 + norm): one program owns one group of 32."""
    pid = tl.program_id(0)
    t0 = tl.program_id(1) * T
    row = pid * 32 + tl.arange(0, 32)
    sums = tile_products(w, wh, ws, row, xq, xs, ss, t0, rows, eps, G, BG, K // 32, PARTS, T, FMT, HEADS, PTX, PDL)
    for t in tl.static_range(T):
        if t0 + t < rows:
            value = sums[t] + tl.load(x + (t0 + t) * N + row)
            finish_residual(value, norm, x_out, u_out, q_out, s_out, ss_out, t0 + t, pid, row, N)


def row_block(rows: int) -> int:
    """Activation rows that one program takes: all of a small call, eight of a larger one."""
    return min(rows, 8)


def project(
    matrix: KernelMatrix,
    a: Activation,
    out: torch.Tensor,
    *,
    eps: float = 1e-6,
    norm: str = "row",
    u: torch.Tensor | None = None,
    side: torch.Tensor | None = None,
    side_out: torch.Tensor | None = None,
    tile: _tiles.Tile | None = None,
) -> torch.Tensor:
    """out [T, N] = matrix times activation rows; see `linear_kernel`.

    Args:
        norm: "row" applies the RMS factor of the whole row, "head" that of each head of 128, "none" nothing.
        u: fp32 [T, K], `side`: bf16 [M, K], `side_out`: fp32 [T, M]: extra high-precision rows in the same launch.
    """
    rows = out.shape[0]
    tile = tile or _tiles.projection(matrix)
    block = row_block(rows)
    side_rows = side.shape[0] if side is not None else 0
    side_bn = 4
    grid = (matrix.rows // tile.rows + triton.cdiv(side_rows, side_bn), triton.cdiv(rows, block))
    parts = a.ss.shape[1]
    dummy = a.s
    linear_kernel[grid](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, out,
        u if u is not None else dummy, side if side is not None else dummy,
        side_out if side_out is not None else dummy, rows, side_rows, eps,
        N=matrix.rows, G=matrix.groups, K=matrix.columns, PARTS=parts, PARTS_BLOCK=triton.next_power_of_2(parts),
        HEADS=norm == "head", ROWNORM=norm == "row", SIDE=side is not None, SIDE_BN=side_bn, FMT=matrix.code,
        T=block, BN=tile.rows, BG=tile.groups, **_tiles.launch(out, tile.warps),
    )  # fmt: skip
    return out


def project_residual(
    matrix: KernelMatrix,
    a: Activation,
    x: torch.Tensor,
    next_norm: torch.Tensor,
    x_out: torch.Tensor,
    u_out: torch.Tensor,
    a_out: Activation,
    *,
    eps: float = 1e-6,
    norm: str = "none",
    tile: _tiles.Tile | None = None,
) -> None:
    """x_out [T, N] = x + matrix times `a`; u_out = x_out * (1 + next_norm) and its int8 form in `a_out`."""
    rows = x.shape[0]
    tile = tile or _tiles.projection(matrix, residual=True)
    block = row_block(rows)
    linear_residual_kernel[(matrix.rows // 32, triton.cdiv(rows, block))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, x, next_norm, x_out, u_out,
        a_out.q, a_out.s, a_out.ss, rows, eps,
        N=matrix.rows, G=matrix.groups, K=matrix.columns, PARTS=a.ss.shape[1], HEADS=norm == "head", FMT=matrix.code,
        T=block, BG=tile.groups, **_tiles.launch(x, tile.warps),
    )  # fmt: skip
