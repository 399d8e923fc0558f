"""Triton decode kernel of the dense MLP's first half: gate and up products, SwiGLU, int8 rows for the down product.

Groups left over when all multiprocessors have the same number of them would make some take one more: they are shared
(`_parts.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import lane_factors, lane_squares, silu, sum_warps
from ._order import Activation, KernelMatrix
from ._parts import PartialSums, is_last, put_part, take_parts
from ._planes import GROUP_WORDS, store_lanes
from .linear_decode import of_block, part_products, tile_products


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
    w, wh, ws, xq, xs, ss, sums, arrived, q_out, s_out, rows, eps,
    INTER: tl.constexpr, U: tl.constexpr, K: tl.constexpr, SQUARES: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr, ROLLING: tl.constexpr = False,
):  # fmt: skip
    """Programs (group of 32 of the inner width, blocks of rows): int8 groups of silu(gate x) * up x.

    Groups from `WHOLE` on are shared by `PARTS` programs each, which come first: what one of them takes no
    multiprocessor then has more of than another.
    """
    SHARED: tl.constexpr = (INTER // 32 - WHOLE) * PARTS
    pid = tl.program_id(0)
    first = tl.program_id(1) * NB
    q = xq + first * (K // 32 * GROUP_WORDS)
    s = xs + first * (K // 32 * 8)
    squares = ss + first * (SQUARES * 8)
    if SHARED == 0:
        whole_group(w, wh, ws, q, s, squares, q_out, s_out, pid, first, rows, eps, INTER, U, K, SQUARES, FMT, S, X, NB,
                    R, PTX, PDL, ROLLING)  # fmt: skip
    elif pid < SHARED:
        shared_group(w, wh, ws, q, s, squares, sums, arrived, q_out, s_out, pid, first, rows, eps, INTER, U, K, SQUARES,
                     FMT, S, X, WHOLE, PARTS, NB, R, PTX, PDL)  # fmt: skip
    else:
        whole_group(w, wh, ws, q, s, squares, q_out, s_out, pid - SHARED, first, rows, eps, INTER, U, K, SQUARES, FMT,
                    S, X, NB, R, PTX, PDL, ROLLING)  # fmt: skip


@triton.jit
def whole_group(
    w, wh, ws, q, s, ss, q_out, s_out, group, first, rows, eps,
    INTER: tl.constexpr, U: tl.constexpr, K: tl.constexpr, SQUARES: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, ROLLING: tl.constexpr,
):  # fmt: skip
    """A group over all of K."""
    acc, squares = tile_products(
        w, wh, ws, group * 4, q, s, ss, K // 32, eps, 4, NB, U, S, FMT, False, SQUARES, X, R, PTX, PDL, 0, ROLLING
    )
    for b in tl.static_range(NB):
        h = swiglu(sum_warps(of_block(acc, b, 4, NB), R), lane_factors(squares[b], eps, K))
        store_lanes(h, q_out, s_out, group, first + b, rows, INTER // 32, R)


@triton.jit
def shared_group(
    w, wh, ws, q, s, ss, sums, arrived, q_out, s_out, pid, first, rows, eps,
    INTER: tl.constexpr, U: tl.constexpr, K: tl.constexpr, SQUARES: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A part of a group; the last program of it finishes the group."""
    place = pid // PARTS
    part = pid % PARTS
    STEPS: tl.constexpr = min(S, U // (PARTS * X))
    acc = part_products(
        w, wh, ws, (WHOLE + place) * 4, q, s, ss, part, K // 32, eps, 4, NB, U, STEPS, FMT, False, PARTS, X, R, PTX, PDL
    )
    index = tl.program_id(1) * (INTER // 32 - WHOLE) + place
    room = sums + index * (PARTS * NB * 512)
    for b in tl.static_range(NB):
        put_part(sum_warps(of_block(acc, b, 4, NB), R), room + (part * NB + b) * 512, 4, R)
    if is_last(arrived + index, PARTS):
        finish_group(room, ss, q_out, s_out, WHOLE + place, first, rows, eps, INTER, K, SQUARES, PARTS, NB, R, PTX)


@triton.jit
def finish_group(
    room, ss, q_out, s_out, group, first, rows, eps, INTER: tl.constexpr, K: tl.constexpr, SQUARES: tl.constexpr,
    PARTS: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The last program of a shared group: the sum of its parts as int8."""
    for b in tl.static_range(NB):
        squares = lane_squares(ss + b * (SQUARES * 8), SQUARES, PTX)
        y = take_parts(room + b * 512, NB * 512, PARTS, 4, R, PTX)
        h = swiglu(y, lane_factors(squares, eps, K))
        store_lanes(h, q_out, s_out, group, first + b, rows, INTER // 32, R)


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
    sums: PartialSums,
    *,
    eps: float = 1e-6,
    tile: _tiles.Tile | None = None,
    whole: int | None = None,
) -> None:
    """Int8 rows silu(gate) * up of `rows` normed rows `a` into `out` (read with norm="none").

    `matrix` [2 * inner, K] has its rows in the order of `interleave_gate_up`. `whole`: groups that one program has to
    itself, of the others the tile's parts one each, for which `sums` has room; None: as many as divide evenly among
    multiprocessors.

    Raises:
        ValueError: too little room in `sums`.
    """
    inner = matrix.rows // 2
    tile = tile or _tiles.mlp(matrix, rows)
    groups, blocks = inner // 32, _tiles.blocks(rows)
    if whole is None:
        whole = _tiles.whole(groups, tile, matrix.words)
    rest = groups - whole
    sums.check(64 * rest, rows, rest, tile.parts)
    gate_up_kernel[(whole + rest * tile.parts, triton.cdiv(rows, 8 * blocks))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, sums.values, sums.arrived, out.q.view(torch.int8),
        out.s, rows, eps,
        INTER=inner, U=matrix.groups, K=matrix.columns, SQUARES=a.ss.shape[1], FMT=matrix.code, S=tile.steps,
        X=tile.warps, WHOLE=whole, PARTS=tile.parts, NB=blocks, R=_tiles.window(rows),
        ROLLING=_tiles.family(out.q).rolling,
        **_tiles.launch(out.q, tile.warps, _tiles.mlp_registers(matrix, rows)),
    )  # fmt: skip
