"""Triton decode kernels of the output head: fp32 logits with each program's best candidate, and the greedy choice.

The draft head is the same on its shortlist, with a row-to-token map and no logits stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import row_factors, stack, tile_of, wait_for_inputs
from ._order import Activation, KernelMatrix
from .linear_decode import tile_products


@triton.jit(do_not_specialize=["rows", "addressable"])
def head_kernel(
    w, wh, ws, xq, xs, ss, logits, best, best_row, rows, addressable, eps,
    N: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
    LOGITS: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (32 vocabulary rows, block): logits [T, N], largest value and its lowest row per program [T, N / 32]."""
    G32: tl.constexpr = K // 32
    pid = tl.program_id(0)
    block = tl.program_id(1)
    ss += block * (PARTS * 8)
    acc = tile_products(
        w, wh, ws, pid * 2, xq + block * (G32 * 64), xs + block * (G32 * 8), ss, eps, 2, U, S, FMT, False, X, PTX, PDL
    )
    y = stack(tile_of(acc[0]), tile_of(acc[1])) * row_factors(ss, eps, PARTS, PARTS_BLOCK, K)[None, :]
    t = block * 8 + tl.arange(0, 8)
    n = pid * 32 + tl.arange(0, 32)
    live = t < rows
    if LOGITS:
        tl.store(logits + t[None, :] * N + n[:, None], y, mask=live[None, :])
    y = tl.where((n < addressable)[:, None], y, float("-inf"))
    top = tl.max(y, 0)
    row = tl.min(tl.where(y == top[None, :], n[:, None], N), 0)
    tl.store(best + t * (N // 32) + pid, top, mask=live)
    tl.store(best_row + t * (N // 32) + pid, row, mask=live)


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
    chosen = tl.min(tl.where(value == top, row, 2147483647), 0)
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
    tile = tile or _tiles.projection(matrix)
    parts = a.ss.shape[1]
    head_kernel[(matrix.rows // 32, triton.cdiv(rows, 8))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits if logits is not None else a.s,
        candidates.value, candidates.row, rows, addressable, eps,
        N=matrix.rows, U=matrix.groups, K=matrix.columns, PARTS=parts, PARTS_BLOCK=triton.next_power_of_2(parts),
        LOGITS=logits is not None, FMT=matrix.code, S=tile.steps, X=tile.warps, **_tiles.launch(a.q, tile.warps),
    )  # fmt: skip


def greedy(candidates: Candidates, token: torch.Tensor, token_of: torch.Tensor | None = None) -> None:
    """token [T] int32 = the best candidate's row, through `token_of` [N] int32 if given (the draft shortlist)."""
    rows, count = candidates.value.shape
    greedy_kernel[(rows,)](
        candidates.value, candidates.row, token_of if token_of is not None else candidates.row, token, count,
        MAPPED=token_of is not None, BLOCK=1024, **_tiles.launch(token, 8),
    )  # fmt: skip
