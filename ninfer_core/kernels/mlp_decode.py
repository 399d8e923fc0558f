"""Triton decode kernel of the dense MLP's first half: gate and up products, SwiGLU, int8 rows for the down product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import lane_factors, silu, store_lanes, sum_warps
from ._order import Activation, KernelMatrix
from .linear_decode import of_block, tile_products


def interleave_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """Rows [gate | up] of a fused matrix (codes or scales) in the order the kernel reads: 32 gate, 32 up, and so on.

    Raises:
        ValueError: the inner width is not a multiple of 32.
    """
    if rows.shape[0] % 64:
        raise ValueError(f"gate and up have {rows.shape[0] // 2} rows each; the kernel takes multiples of 32")
    return rows.view(2, -1, 32, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


@triton.jit(do_not_specialize=["rows"])
def gate_up_kernel(
    w, wh, ws, xq, xs, ss, q_out, s_out, rows, eps,
    INTER: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 of the inner width, blocks of rows): int8 groups of silu(gate x) * up x."""
    G32: tl.constexpr = K // 32
    pid = tl.program_id(0)
    first = tl.program_id(1) * NB
    parts = ss + first * (PARTS * 8)
    acc, squares = tile_products(
        w, wh, ws, pid * 4, xq + first * (G32 * 64), xs + first * (G32 * 8), parts, G32, eps, 4, NB, U, S, FMT, False,
        PARTS, X, R, PTX, PDL,
    )  # fmt: skip
    for b in tl.static_range(NB):
        y = sum_warps(of_block(acc, b, 4, NB), R)
        h = swiglu(y, lane_factors(squares[b], eps, K))
        store_lanes(h, q_out, s_out, pid, first + b, rows, INTER // 32, R)


@triton.jit
def swiglu(y, factor):
    """silu(gate) * up of two gate tiles and two up tiles in lane form times the column factors: eight [32]."""
    h = ()
    for i in tl.static_range(4):
        for e in tl.static_range(2):
            gate = y[i // 2][(i % 2) * 2 + e] * factor[e]
            up = y[2 + i // 2][(i % 2) * 2 + e] * factor[e]
            h = h + (silu(gate) * up,)  # noqa: RUF005
    return h


def gate_up(
    matrix: KernelMatrix,
    a: Activation,
    rows: int,
    out: Activation,
    *,
    eps: float = 1e-6,
    tile: _tiles.Tile | None = None,
) -> None:
    """Int8 rows silu(gate) * up of `rows` normed rows `a` into `out` (read with norm="none").

    `matrix` [2 * inner, K] has its rows in the order of `interleave_gate_up`.
    """
    inner = matrix.rows // 2
    tile = tile or _tiles.mlp(matrix, rows)
    blocks = _tiles.blocks(rows)
    gate_up_kernel[(inner // 32, triton.cdiv(rows, 8 * blocks))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, out.q.view(torch.int8), out.s, rows, eps,
        INTER=inner, U=matrix.groups, K=matrix.columns, PARTS=a.ss.shape[1], FMT=matrix.code, S=tile.steps,
        X=tile.warps, NB=blocks, R=_tiles.window(rows),
        **_tiles.launch(out.q, tile.warps, _tiles.mlp_registers(matrix, rows)),
    )  # fmt: skip
