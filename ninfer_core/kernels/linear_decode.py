"""Triton decode projections: packed weights times int8 activation rows, 1 to 64 rows, plain or residual epilogue.

One program owns some output rows over all of K and a block of eight activation rows, so each result is one fixed sum:
its bits depend neither on the other rows of the call nor on their number. The weights of the first units are requested
before the wait for the kernel in front.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    activation_pointers,
    add_unit,
    load_activation,
    load_unit,
    quantize_columns,
    row_factors,
    stack,
    tile_of,
    unit_pointers,
    unpack_scales,
    wait_for_inputs,
    zero_registers,
)
from ._order import Activation, KernelMatrix


@triton.jit
def unit_after(i: tl.constexpr, X: tl.constexpr, RUN: tl.constexpr):
    """How many units behind its first a warp's unit of step `i` lies: runs of `RUN` units, warp by warp."""
    return (i // RUN) * X * RUN + i % RUN


@triton.jit
def load_units(
    w, wh, ws, TILES: tl.constexpr, U: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr,
    RUN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`S` steps of `TILES` row tiles from pointers [X, 32]: a flat tuple of units, tile by tile within a step."""
    units = ()
    for i in tl.static_range(S):
        for r in tl.static_range(TILES):
            units = units + (load_unit(w, wh, ws, r * U + unit_after(i, X, RUN), FMT, PTX),)  # noqa: RUF005
    return units


@triton.jit
def add_units(
    acc, units, q, s, TILES: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr, RUN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Add `S` steps to the accumulators (a tuple of one per row tile); `q`, `s` are pointers [X, 32]."""
    for i in tl.static_range(S):
        b, scales = load_activation(q, s, unit_after(i, X, RUN), FMT)
        grown = ()
        for r in tl.static_range(TILES):
            unit = units[i * TILES + r]
            low, top = unpack_scales(unit[2], FMT)
            grown = grown + (add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX),)  # noqa: RUF005
        acc = grown
    return acc


@triton.jit
def fold_heads(acc, part, ss, head, lane, eps, TILES: tl.constexpr):
    """`acc` plus `part` (sums over one head of 128) times the head's RMS factors of the two columns of a lane."""
    at = head * 32 + (lane % 4) * 2
    even = tl.zeros_like(acc[0][0])
    odd = even
    for i in tl.static_range(4):
        even += tl.load(ss + tl.max_contiguous(at + 8 * i, [1, 2]))
        odd += tl.load(ss + tl.max_contiguous(at + 8 * i + 1, [1, 2]))
    even = 1.0 / tl.sqrt_rn(even / 128 + eps)
    odd = 1.0 / tl.sqrt_rn(odd / 128 + eps)
    grown = ()
    for r in tl.static_range(TILES):
        total = acc[r]
        head_sum = part[r]
        grown = grown + ((  # noqa: RUF005
            tl.fma(head_sum[0], even, total[0]), tl.fma(head_sum[1], odd, total[1]),
            tl.fma(head_sum[2], even, total[2]), tl.fma(head_sum[3], odd, total[3]),
        ),)  # fmt: skip
    return grown


@triton.jit
def fresh(TILES: tl.constexpr, X: tl.constexpr):
    """Zero accumulators of `TILES` row tiles."""
    acc = ()
    for _r in tl.static_range(TILES):
        acc = acc + (zero_registers(X),)  # noqa: RUF005
    return acc


@triton.jit
def tile_products(
    w, wh, ws, tile, q, s, ss, eps,
    TILES: tl.constexpr, U: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, HEADS: tl.constexpr, X: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums over K of row tiles tile..tile+TILES-1 with one activation block: a tuple of accumulators."""
    # With a factor per head a warp takes whole heads: 128 of K are four units of 32 or two of 64.
    RUN: tl.constexpr = (4 if FMT == 8 else 2) if HEADS else 1
    STAGES: tl.constexpr = U // (X * S)
    HIGH: tl.constexpr = 64 if FMT == 6 else 32
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    AHEAD: tl.constexpr = S * X  # units from one stage to the next
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    wp, hp, sp = unit_pointers(w, wh, ws, tile * U + warp * RUN, lane, FMT)
    qp, xp = activation_pointers(q, s, warp * RUN, lane, FMT)
    units = load_units(wp, hp, sp, TILES, U, S, FMT, X, RUN, PTX)
    wait_for_inputs(PDL)
    acc = fresh(TILES, X)
    if STAGES <= 2:
        for c in tl.static_range(STAGES):
            if c > 0:
                units = load_units(
                    wp + c * AHEAD * 128, hp + c * AHEAD * HIGH, sp + c * AHEAD * 8, TILES, U, S, FMT, X, RUN, PTX
                )
            acc = add_stage(
                acc, units, qp + c * AHEAD * HALVES * 64, xp + c * AHEAD * HALVES * 8, ss, c * S, lane, eps,
                TILES, S, FMT, HEADS, X, RUN, PTX,
            )  # fmt: skip
    else:
        for c in range(STAGES):
            # The next stage is on its way while this one is multiplied; the last turn asks for its own again.
            step = tl.where(c + 1 < STAGES, AHEAD, 0)
            wp += step * 128
            hp += step * HIGH
            sp += step * 8
            following = load_units(wp, hp, sp, TILES, U, S, FMT, X, RUN, PTX)
            acc = add_stage(acc, units, qp, xp, ss, c * S, lane, eps, TILES, S, FMT, HEADS, X, RUN, PTX)
            qp += AHEAD * HALVES * 64
            xp += AHEAD * HALVES * 8
            units = following
    return acc


@triton.jit
def add_stage(
    acc, units, q, s, ss, step, lane, eps, TILES: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr,
    HEADS: tl.constexpr, X: tl.constexpr, RUN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One stage of S steps; with HEADS every run is summed alone and folded with its factor."""
    if HEADS:
        HALVES: tl.constexpr = 1 if FMT == 8 else 2
        for h in tl.static_range(S // RUN):
            run = ()
            for i in tl.static_range(RUN * TILES):
                run = run + (units[h * RUN * TILES + i],)  # noqa: RUF005
            after = h * RUN * X * HALVES
            part = add_units(fresh(TILES, X), run, q + after * 64, s + after * 8, TILES, RUN, FMT, X, RUN, PTX)
            head = (step // RUN + h) * X + tl.arange(0, X)[:, None]
            acc = fold_heads(acc, part, ss, head, lane, eps, TILES)
        return acc
    else:
        return add_units(acc, units, q, s, TILES, S, FMT, X, RUN, PTX)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    w, wh, ws, xq, xs, ss, out, u, side_w, side_out, rows, side_rows, eps,
    N: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, ROWNORM: tl.constexpr, SIDE: tl.constexpr, SIDE_BN: tl.constexpr, FMT: tl.constexpr,
    TILES: tl.constexpr, S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t, n] = factor(t) * sum_k w[n, k] x[t, k]; with SIDE also fp32 `side_out` = bf16 `side_w` times `u` rows."""
    G32: tl.constexpr = K // 32
    pid = tl.program_id(0)
    block = tl.program_id(1)
    main: tl.constexpr = N // (16 * TILES)
    xq += block * (G32 * 64)
    xs += block * (G32 * 8)
    ss += block * (PARTS * 8)
    if pid < main:
        acc = tile_products(w, wh, ws, pid * TILES, xq, xs, ss, eps, TILES, U, S, FMT, HEADS, X, PTX, PDL)
        t = block * 8 + tl.arange(0, 8)
        if ROWNORM:
            factor = row_factors(ss, eps, PARTS, PARTS_BLOCK, K)
        for r in tl.static_range(TILES):
            y = tile_of(acc[r])
            if ROWNORM:
                y = y * factor[None, :]
            n = (pid * TILES + r) * 16 + tl.arange(0, 16)
            tl.store(out + t[None, :] * N + n[:, None], y.to(out.dtype.element_ty), mask=(t < rows)[None, :])
    elif SIDE:
        side_products(
            u, side_w, side_out, ss, (pid - main) * SIDE_BN, block * 8, rows, side_rows, eps,
            K, PARTS, PARTS_BLOCK, SIDE_BN, PDL,
        )  # fmt: skip


@triton.jit
def side_products(
    u, side_w, side_out, ss, first, t0, rows, side_rows, eps,
    K: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few bf16 rows (router, decay and update-rate inputs) times fp32 activations: logits keep their precision."""
    BK: tl.constexpr = K if K & (K - 1) == 0 else (1024 if K % 1024 == 0 else 64)
    row = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = row[:, None] < side_rows
    weight = tl.load(side_w + row[:, None] * K + k[None, :], mask=inside, other=0.0)
    wait_for_inputs(PDL)
    factor = row_factors(ss, eps, PARTS, PARTS_BLOCK, K)
    lane = tl.arange(0, 8)
    t = t0
    while t < tl.minimum(t0 + 8, rows):
        total = tl.zeros([BN, BK], tl.float32)
        for c in tl.static_range(K // BK):
            if c > 0:
                weight = tl.load(side_w + row[:, None] * K + c * BK + k[None, :], mask=inside, other=0.0)
            x = tl.load(u + t * K + c * BK + k)
            total = tl.fma(weight.to(tl.float32), tl.broadcast_to(x[None, :], [BN, BK]), total)
        if K > BK:
            weight = tl.load(side_w + row[:, None] * K + k[None, :], mask=inside, other=0.0)
        y = tl.sum(total, 1) * tl.sum(tl.where(lane == t - t0, factor, 0.0), 0)
        tl.store(side_out + t * side_rows + row, y, mask=row < side_rows)
        t += 1


@triton.jit
def finish_residual(x, norm, x_out, u_out, q_out, s_out, ss_out, t, rows, group, N: tl.constexpr):
    """Store new residual values `x` [32, 8] of rows `t` [8] and their int8 group, to be normalised by the reader."""
    n = group * 32 + tl.arange(0, 32)
    at = t[None, :] * N + n[:, None]
    live = (t < rows)[None, :]
    tl.store(x_out + at, x, mask=live)
    u = x * (1.0 + tl.load(norm + n).to(tl.float32))[:, None]
    tl.store(u_out + at, u, mask=live)
    words, scale = quantize_columns(u)
    column = t % 8
    unit = (t // 8) * (N // 32) + group
    tl.store(q_out + (unit * 64 + column * 8)[None, :] + tl.arange(0, 8)[:, None], words, mask=live)
    tl.store(s_out + unit * 8 + column, scale, mask=t < rows)
    tl.store(ss_out + unit * 8 + column, tl.sum(x * x, 0), mask=t < rows)


@triton.jit(do_not_specialize=["rows"])
def linear_residual_kernel(
    w, wh, ws, xq, xs, ss, x, norm, x_out, u_out, q_out, s_out, ss_out, rows, eps,
    N: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x_out = x + w @ a (fp32), and the int8 groups of x_out * (1 + norm): one program owns one group of 32."""
    G32: tl.constexpr = K // 32
    pid = tl.program_id(0)
    block = tl.program_id(1)
    acc = tile_products(
        w, wh, ws, pid * 2, xq + block * (G32 * 64), xs + block * (G32 * 8), ss + block * (PARTS * 8), eps,
        2, U, S, FMT, HEADS, X, PTX, PDL,
    )  # fmt: skip
    t = block * 8 + tl.arange(0, 8)
    n = pid * 32 + tl.arange(0, 32)
    value = tl.load(x + t[None, :] * N + n[:, None], mask=(t < rows)[None, :], other=0.0)
    value += stack(tile_of(acc[0]), tile_of(acc[1]))
    finish_residual(value, norm, x_out, u_out, q_out, s_out, ss_out, t, rows, pid, N)


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
    side_rows: int = 4,
    tile: _tiles.Tile | None = None,
) -> torch.Tensor:
    """out [T, N] = matrix times activation rows; see `linear_kernel`.

    Args:
        norm: "row" applies the RMS factor of the whole row, "head" that of each head of 128, "none" nothing.
        u: fp32 [T, K], `side`: bf16 [M, K], `side_out`: fp32 [T, M]: extra high-precision rows in the same launch,
            `side_rows` of them a program.
    """
    rows = out.shape[0]
    tile = tile or _tiles.projection(matrix)
    extra = side.shape[0] if side is not None else 0
    grid = (matrix.rows // (16 * tile.tiles) + triton.cdiv(extra, side_rows), triton.cdiv(rows, 8))
    parts = a.ss.shape[1]
    dummy = a.s
    linear_kernel[grid](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, out,
        u if u is not None else dummy, side if side is not None else dummy,
        side_out if side_out is not None else dummy, rows, extra, eps,
        N=matrix.rows, U=matrix.groups, K=matrix.columns, PARTS=parts, PARTS_BLOCK=triton.next_power_of_2(parts),
        HEADS=norm == "head", ROWNORM=norm == "row", SIDE=side is not None, SIDE_BN=side_rows, FMT=matrix.code,
        TILES=tile.tiles, S=tile.steps, X=tile.warps, **_tiles.launch(out, tile.warps),
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
    linear_residual_kernel[(matrix.rows // 32, triton.cdiv(rows, 8))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, x, next_norm, x_out, u_out,
        a_out.q, a_out.s, a_out.ss, rows, eps,
        N=matrix.rows, U=matrix.groups, K=matrix.columns, PARTS=a.ss.shape[1], HEADS=norm == "head", FMT=matrix.code,
        S=tile.steps, X=tile.warps, **_tiles.launch(x, tile.warps),
    )  # fmt: skip
