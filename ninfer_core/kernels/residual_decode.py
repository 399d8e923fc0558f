"""Triton decode projections into the residual stream: 32 of its values a group, with the int8 group of the next layer.

Where groups do not divide evenly among multiprocessors, several programs share K of each (`_parts.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import EARLY1, load_one, rows_sum, sum_warps
from ._order import Activation, KernelMatrix
from ._parts import PartialSums, is_last, put_part, take_parts
from ._planes import GROUP_WORDS, store_lanes
from .linear_decode import norm_gains, of_block, part_products, tile_products


@triton.jit
def early_rows(x, block, rows, group, N: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr):
    """The residual of a group of 32 values and a block of rows in lane form: eight [32], before the wait."""
    lane = tl.arange(0, 32)
    t0 = block * 8 + (lane % 4) * 2
    values = ()
    for i in tl.static_range(4):
        for e in tl.static_range(2):
            if e == 1 and R == 1:
                values = values + (values[2 * i],)  # noqa: RUF005
            else:
                at = tl.minimum(t0 + e, rows - 1) * N + group * 32 + i * 8 + lane // 4
                values = values + (load_one(x + at, EARLY1, PTX),)  # noqa: RUF005
    return values


@triton.jit
def finish_residual(
    y, old, gains, x_out, u_out, q_out, s_out, ss_out, block, rows, group, N: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Add two row tiles (lane form) to the residual `old`; store it and its int8 group, unnormalised."""
    lane = tl.arange(0, 32)
    t0 = block * 8 + (lane % 4) * 2
    u = ()
    even = tl.zeros([32], tl.float32)
    odd = tl.zeros([32], tl.float32)
    for i in tl.static_range(4):
        n = group * 32 + i * 8 + lane // 4
        for e in tl.static_range(2):
            value = old[2 * i + e] + y[i // 2][(i % 2) * 2 + e]
            if e < R:
                live = t0 + e < rows
                tl.store(x_out + (t0 + e) * N + n, value, mask=live)
                tl.store(u_out + (t0 + e) * N + n, value * gains[i], mask=live)
            u = u + (value * gains[i],)  # noqa: RUF005
            if e == 0:
                even = tl.fma(value, value, even)
            else:
                odd = tl.fma(value, value, odd)
    store_lanes(u, q_out, s_out, group, block, rows, N // 32, R)
    at = (block * (N // 32) + group) * 8 + (lane % 4) * 2
    tl.store(ss_out + at, rows_sum(even), mask=(t0 < rows) & (lane < 4))
    if R > 1:
        tl.store(ss_out + at + 1, rows_sum(odd), mask=(t0 + 1 < rows) & (lane < 4))


@triton.jit(do_not_specialize=["rows"])
def linear_residual_kernel(
    w, wh, ws, xq, xs, ss, x, norm, sums, arrived, x_out, u_out, q_out, s_out, ss_out, rows, eps,
    N: tl.constexpr, U: tl.constexpr, K: tl.constexpr, SQUARES: tl.constexpr, HEADS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, PARTS: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, FINE: tl.constexpr = False,
):  # fmt: skip
    """x_out = x + w @ a (fp32), and the int8 groups of x_out * (1 + norm): `PARTS` programs for each group of 32.

    The parts of a group are neighbours: most groups are finished while others are still read.
    """
    G32: tl.constexpr = K // 32
    group = tl.program_id(0) // PARTS
    first = tl.program_id(1) * NB
    q = xq + first * (G32 * GROUP_WORDS)
    s = xs + first * (G32 * 8)
    heads = ss + first * (SQUARES * 8)
    if PARTS == 1:
        gains = norm_gains(norm, group)
        old = ()
        for b in tl.static_range(NB):
            old = old + (early_rows(x, first + b, rows, group, N, R, PTX),)  # noqa: RUF005
        acc, _squares = tile_products(
            w, wh, ws, group * 2, q, s, heads, G32, eps, 2, NB, U, S, FMT, HEADS, 0, X, R, PTX, PDL, 0, False, FINE
        )
        for b in tl.static_range(NB):
            y = sum_warps(of_block(acc, b, 2, NB), R)
            finish_residual(y, old[b], gains, x_out, u_out, q_out, s_out, ss_out, first + b, rows, group, N, R)
    else:
        part = tl.program_id(0) % PARTS
        acc = part_products(w, wh, ws, group * 2, q, s, heads, part, G32, eps, 2, NB, U, S, FMT, HEADS, PARTS, X, R,
                            PTX, PDL, FINE)  # fmt: skip
        index = tl.program_id(1) * (N // 32) + group
        room = sums + index * (PARTS * NB * 256)
        for b in tl.static_range(NB):
            put_part(sum_warps(of_block(acc, b, 2, NB), R), room + (part * NB + b) * 256, 2, R)
        if is_last(arrived + index, PARTS):
            finish_parts(
                room, x, norm, x_out, u_out, q_out, s_out, ss_out, first, rows, group, N, PARTS, NB, R, PTX
            )  # fmt: skip


@triton.jit
def finish_parts(
    room, x, norm, x_out, u_out, q_out, s_out, ss_out, first, rows, group, N: tl.constexpr, PARTS: tl.constexpr,
    NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The last program of a group: `finish_residual` of the sum of all parts."""
    gains = norm_gains(norm, group)
    for b in tl.static_range(NB):
        old = early_rows(x, first + b, rows, group, N, R, PTX)
        y = take_parts(room + b * 256, NB * 256, PARTS, 2, R, PTX)
        finish_residual(y, old, gains, x_out, u_out, q_out, s_out, ss_out, first + b, rows, group, N, R)


def project_residual(
    matrix: KernelMatrix,
    a: Activation,
    x: torch.Tensor,
    next_norm: torch.Tensor,
    x_out: torch.Tensor,
    u_out: torch.Tensor,
    a_out: Activation,
    sums: PartialSums,
    *,
    eps: float = 1e-6,
    norm: str = "none",
    fine: bool = True,
    tile: _tiles.Tile | None = None,
) -> None:
    """x_out [T, N] = x + matrix times `a`; u_out = x_out * (1 + next_norm) and its int8 form in `a_out`.

    `x` is read while the launch in front still runs: it must be the work of an earlier one. `norm`: as of
    `linear_decode.project`, "head" or "none". `fine`: of both planes of `a`, or of the first. `sums`: room for parts,
    where the tile has several.

    Raises:
        ValueError: too little room in `sums`.
    """
    rows = x.shape[0]
    tile = tile or _tiles.residual(matrix, rows, norm == "head")
    blocks, groups = _tiles.blocks(rows), matrix.rows // 32
    if tile.parts > 1:
        sums.check(matrix.rows, rows, groups, tile.parts)
    linear_residual_kernel[(groups * tile.parts, triton.cdiv(rows, 8 * blocks))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, x, next_norm, sums.values, sums.arrived, x_out, u_out,
        a_out.q.view(torch.int8), a_out.s, a_out.ss, rows, eps,
        N=matrix.rows, U=matrix.groups, K=matrix.columns, SQUARES=a.ss.shape[1], HEADS=norm == "head", FMT=matrix.code,
        S=tile.steps, X=tile.warps, PARTS=tile.parts, NB=blocks, R=_tiles.window(rows), FINE=fine,
        **_tiles.launch(x, tile.warps, _tiles.residual_registers(matrix, tile, rows), leads=rows == 1),
    )  # fmt: skip
