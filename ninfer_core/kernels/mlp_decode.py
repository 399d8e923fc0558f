"""Triton decode kernel of the dense MLP's first half: gate and up products, SwiGLU, int8 rows for the down product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import quantize_columns, row_factors, silu, stack, tile_of
from ._order import Activation, KernelMatrix
from .linear_decode import tile_products


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
    INTER: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    FMT: tl.constexpr, S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 of the inner width, block of rows): int8 groups of silu(gate x) * up x."""
    G32: tl.constexpr = K // 32
    pid = tl.program_id(0)
    block = tl.program_id(1)
    ss += block * (PARTS * 8)
    acc = tile_products(
        w, wh, ws, pid * 4, xq + block * (G32 * 64), xs + block * (G32 * 8), ss, eps, 4, U, S, FMT, False, X, PTX, PDL
    )
    factor = row_factors(ss, eps, PARTS, PARTS_BLOCK, K)[None, :]
    h = silu(stack(tile_of(acc[0]), tile_of(acc[1])) * factor) * (stack(tile_of(acc[2]), tile_of(acc[3])) * factor)
    words, scale = quantize_columns(h)
    column = tl.arange(0, 8)
    live = block * 8 + column < rows
    unit = block * (INTER // 32) + pid
    tl.store(q_out + (unit * 64 + column * 8)[None, :] + tl.arange(0, 8)[:, None], words, mask=live[None, :])
    tl.store(s_out + unit * 8 + column, scale, mask=live)


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
    if tile is None:
        warps = _tiles.warps(matrix.groups, 8)
        tile = _tiles.Tile(4, _tiles.steps(matrix.groups, warps, 2), warps)
    parts = a.ss.shape[1]
    gate_up_kernel[(inner // 32, triton.cdiv(rows, 8))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, out.q, out.s, rows, eps,
        INTER=inner, U=matrix.groups, K=matrix.columns, PARTS=parts, PARTS_BLOCK=triton.next_power_of_2(parts),
        FMT=matrix.code, S=tile.steps, X=tile.warps, **_tiles.launch(out.q, tile.warps),
    )  # fmt: skip
