"""Triton decode kernels of the output head: fp32 logits with each program's best candidate, and the greedy choice.

The draft head is the same on its shortlist, with a row-to-token map and no logits stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import lane_factors, spread, sum_warps, wait_for_inputs
from ._order import Activation, KernelMatrix
from ._planes import GROUP_WORDS
from .linear_decode import of_block, tile_products


@triton.jit(do_not_specialize=["rows", "addressable"])
def head_kernel(
    w, wh, ws, xq, xs, ss, logits, best, best_row, rows, addressable, eps,
    N: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, LOGITS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (blocks, 32 rows): logits [T, N], largest value and its lowest row per program [T, N / 32]."""
    G32: tl.constexpr = K // 32
    pid = tl.program_id(1)
    first = tl.program_id(0) * NB
    parts = ss + first * (PARTS * 8)
    acc, squares = tile_products(
        w, wh, ws, pid * 2, xq + first * (G32 * GROUP_WORDS), xs + first * (G32 * 8), parts, G32, eps, 2, NB, U, S, FMT,
        False, PARTS, X, R, PTX, PDL,
    )  # fmt: skip
    lane = tl.arange(0, 32)
    for b in tl.static_range(NB):
        y = sum_warps(of_block(acc, b, 2, NB), R)
        factor = lane_factors(squares[b], eps, K)
        for e in tl.static_range(1 if R == 1 else 2):
            t = (first + b) * 8 + (lane % 4) * 2 + e
            live = t < rows
            top = tl.full([32], float("-inf"), tl.float32)
            row = tl.full([32], 2147483647, tl.int32)
            for i in tl.static_range(4):
                n = pid * 32 + i * 8 + lane // 4
                value = y[i // 2][(i % 2) * 2 + e] * factor[e]
                if LOGITS:
                    tl.store(logits + t.to(tl.int64) * N + n, value, mask=live)
                value = tl.where(n < addressable, value, float("-inf"))
                row = tl.where(value > top, n, row)  # n grows with i: an equal value keeps the lower row
                top = tl.maximum(top, value)
            best_top = tl.max(tl.reshape(top, [8, 4]), 0)
            row = tl.where(top == spread(best_top), row, 2147483647)
            row = tl.min(tl.reshape(row, [8, 4]), 0)
            at = ((first + b) * 8 + tl.arange(0, 4) * 2 + e) * (N // 32) + pid
            inside = (first + b) * 8 + tl.arange(0, 4) * 2 + e < rows
            tl.store(best + at, best_top, mask=inside)
            tl.store(best_row + at, row, mask=inside)


@triton.jit(do_not_specialize=["count"])
def greedy_kernel(
    best, best_row, token_of, token, count, MAPPED: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The row with the largest value, lowest row on ties: one program per activation row."""
    t = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    value = tl.full([BLOCK], float("-inf"), tl.float32)
    row = tl.full([BLOCK], 2147483647, tl.int32)
    i = 0
    while i < count:
        inside = i + lane < count
        other = tl.load(best + t * count + i + lane, mask=inside, other=float("-inf"))
        at = tl.load(best_row + t * count + i + lane, mask=inside, other=2147483647)
        row = tl.where(other > value, at, row)  # rows grow with i, so an equal value keeps the lower row
        value = tl.maximum(value, other)
        i += BLOCK
    top = tl.max(value, 0)
    # Of a row that is not finite no candidate has a row of its own: any will do, as long as it exists.
    chosen = tl.minimum(tl.min(tl.where(value == top, row, 2147483647), 0), count * 32 - 1)
    if MAPPED:
        chosen = tl.load(token_of + chosen)
    tl.store(token + t, chosen)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Each program's best: `value` [T, N / 32] fp32 and `row` [T, N / 32] int32."""

    value: torch.Tensor
    row: torch.Tensor

    @staticmethod
    def empty(rows: int, vocabulary: int, device: torch.device | str) -> Candidates:
        """Buffers for `rows` rows of a head with `vocabulary` rows."""
        shape = (rows, vocabulary // 32)
        return Candidates(torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device))


def head(
    matrix: KernelMatrix,
    a: Activation,
    candidates: Candidates,
    logits: torch.Tensor | None,
    *,
    addressable: int,
    eps: float = 1e-6,
    tile: _tiles.Tile | None = None,
) -> None:
    """Logits [T, N] fp32 (unless None) of normed rows `a`, and `candidates` among the rows below `addressable`."""
    rows = candidates.value.shape[0]
    tile = tile or _tiles.head(matrix, rows)
    blocks = _tiles.blocks(rows, _tiles.family(a.q).blocks)
    head_kernel[(triton.cdiv(rows, 8 * blocks), matrix.rows // 32)](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits if logits is not None else a.s,
        candidates.value, candidates.row, rows, addressable, eps,
        N=matrix.rows, U=matrix.groups, K=matrix.columns, PARTS=a.ss.shape[1], LOGITS=logits is not None,
        FMT=matrix.code, S=tile.steps, X=tile.warps, NB=blocks, R=_tiles.window(rows),
        **_tiles.launch(a.q, tile.warps, _tiles.head_registers(matrix, tile, blocks), leads=True),
    )  # fmt: skip


def greedy(candidates: Candidates, token: torch.Tensor, token_of: torch.Tensor | None = None) -> None:
    """token [T] int32 = the best candidate's row, through `token_of` [N] int32 if given (the draft shortlist)."""
    rows, count = candidates.value.shape
    greedy_kernel[(rows,)](
        candidates.value, candidates.row, token_of if token_of is not None else candidates.row, token, count,
        MAPPED=token_of is not None, BLOCK=min(4096, triton.next_power_of_2(count)), **_tiles.launch(token, 8),
    )  # fmt: skip
