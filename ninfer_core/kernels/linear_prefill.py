"""Triton prefill kernels around dense products: packed weights to a bf16 scratch for the matrix library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from . import _tiles_prefill as tiling
from ._dequant_prefill import tile_lanes, unit_operand
from ._order import KernelMatrix


@triton.jit
def dequantize_kernel(
    w, wh, ws, out, units, stride,
    B: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, SLOTS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (S units of K, block of B row tiles): `out` [N, K] bf16, `stride` elements a row."""
    WIDTH: tl.constexpr = 32 if FMT == 8 else 64
    first = tl.program_id(1) * B
    u = tl.program_id(0) * S
    wp, hp, sp = tile_lanes(w, wh, ws, first + tl.arange(0, B * 8) // 8, units, FMT, B * 8)
    row = (first * 16 + tl.arange(0, B * 16)).to(tl.int64)
    at = out + row[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    for i in tl.static_range(S):
        tl.store(at + (u + i) * WIDTH, unit_operand(wp, hp, sp, u + i, B, FMT, SLOTS, PTX, True))


def dequantize(weight: KernelMatrix, out: torch.Tensor, slots: bool = False) -> None:
    """`out` [N, K] bf16 (rows may be strided) := the weight, rounded once; `slots`: K in operand order (`slot_of`)."""
    tiles, units = weight.rows // 16, weight.groups
    block = min(tiles & -tiles, 4 if out.is_cuda else 64)  # the interpreter is slow by the program, not by the value
    step = 4 if units % 4 == 0 else (2 if units % 2 == 0 else 1)
    dequantize_kernel[(units // step, tiles // block)](
        weight.words, weight.high, weight.scales, out, units, out.stride(0),
        B=block, S=step, FMT=weight.code, SLOTS=slots, **tiling.launch(out, 4),
    )  # fmt: skip


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`out` [T, N] (bf16 or fp32, rows may be strided) := x W^T of bf16 `x` [T, K], `weight` [N, K]; fp32 sums."""
    if out.dtype == torch.bfloat16:
        torch.mm(x, weight.t(), out=out)
    elif x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weight.float().t(), out=out)


def packed_product(
    x: torch.Tensor, weight: KernelMatrix, scratch: torch.Tensor, out: torch.Tensor, slots: bool = False
) -> None:
    """`out` [T, N] := x W^T with the weight opened into `scratch` (bf16, as much as fits at once).

    `slots`: the columns of `x` are in operand order.
    """
    width = weight.columns
    step = min(weight.rows, scratch.numel() // width // 16 * 16)
    if step == 0:
        raise ValueError(f"the scratch holds {scratch.numel()} values; 16 rows of this weight take {16 * width}")
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        opened = scratch[: (last - first) * width].view(last - first, width)
        dequantize(rows_of(weight, first, last), opened, slots)
        product(x, opened, out[:, first:last])


def open_all(weights: Sequence[KernelMatrix], scratch: torch.Tensor) -> list[torch.Tensor] | None:
    """The weights opened one behind the other in `scratch` (bf16), for several products with each; None: no room."""
    if sum(weight.rows * weight.columns for weight in weights) > scratch.numel():
        return None
    found, first = [], 0
    for weight in weights:
        last = first + weight.rows * weight.columns
        found.append(scratch[first:last].view(weight.rows, weight.columns))
        dequantize(weight, found[-1])
        first = last
    return found


def rows_of(weight: KernelMatrix, first: int, last: int) -> KernelMatrix:
    """Rows first .. last - 1 of a matrix, both multiples of 16: views."""
    tiles = slice(first // 16, last // 16)
    return KernelMatrix(
        weight.words[tiles], weight.high[tiles], weight.scales[tiles], weight.format, last - first, weight.columns
    )
