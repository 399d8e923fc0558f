"""Fixed tile shapes per matrix role and device family, and the launch options every decode kernel shares.

A tile never depends on the number of rows in the call: the order of a sum, and so its bits, follow from the tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ..footprint import MULTIPROCESSORS
from ._order import KernelMatrix


class Tile(NamedTuple):
    """Row tiles of 16 in a program, steps (units of K) a warp has in flight, warps that share K."""

    tiles: int
    steps: int
    warps: int


class Attention(NamedTuple):
    """Rows of a sequence that an attention program serves with one read of a page; whether it asks for keys ahead."""

    rows: int
    ahead: bool


def steps(units: int, warps: int, most: int, multiple: int = 1) -> int:
    """Most steps, at most `most`, that divide a warp's share of `units` and are a multiple of `multiple`."""
    share = units // warps
    fits = [n for n in range(multiple, most + 1, multiple) if share % n == 0]
    if units % warps or not fits:
        raise ValueError(f"{units} units of K do not divide among {warps} warps in steps of {multiple}")
    return max(fits)


def warps(units: int, most: int) -> int:
    """Largest power of two, at most `most`, that divides `units`."""
    count = 1
    while count < most and units % (count * 2) == 0:
        count *= 2
    return count


def blocks(rows: int) -> int:
    """Blocks of eight rows that a program serves with one read of its weights: 4, 2 or 1, whole programs only."""
    count = -(-rows // 8)
    return next(n for n in (4, 2, 1) if count % n == 0)


def window(rows: int) -> int:
    """Rows of a block as a compiled-in bound: 1, 2, 4 or 8."""
    return next(n for n in (1, 2, 4, 8) if n >= min(rows, 8))


def projection(matrix: KernelMatrix, residual: bool = False) -> Tile:
    """Tile of one dense projection (`residual`: 32 rows, the group of the epilogue)."""
    multiple = 4 if matrix.format == "W8" else 2
    units = matrix.groups
    if residual:
        count = warps(units // multiple, 8)
        return Tile(2, steps(units, count, 16, multiple), count)
    count = warps(units, 4)
    tiles = 2 if matrix.rows % 32 == 0 else 1
    return Tile(tiles, steps(units, count, 8), count)


def router(matrix: KernelMatrix) -> Tile:
    """Tile of the shared expert's gate/up, which shares a launch with the router."""
    count = warps(matrix.groups, 4)
    return Tile(1, steps(matrix.groups, count, 16), count)


def experts(matrix: KernelMatrix) -> Tile:
    """Tile of the routed gate/up: 32 gate and 32 up rows."""
    count = warps(matrix.groups, 8)
    return Tile(2, steps(matrix.groups, count, 4), count)


def attention(int8: bool) -> Attention:
    """Two rows read a page once; with bf16 pages the registers hold one."""
    return Attention(2 if int8 else 1, False)


def most_splits(device: torch.device, kv_heads: int) -> int:
    """Most splits of a row's context: as many attention programs as the card holds at once, three a multiprocessor.

    Three of 168 registers a thread fit.
    """
    processors = _processors(device.index or 0) if device.type == "cuda" else MULTIPROCESSORS
    return min(256, 3 * processors // kv_heads)


@cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def launch(tensor: torch.Tensor, warps: int, registers: int | None = None) -> dict[str, Any]:
    """Launch options for the device of `tensor`; the interpreter (CPU tensors) takes the plain-Triton branches.

    `registers` bounds those of a thread, so that programs of the next launch find room beside these.
    Fusion of products and sums is off: where a kernel wants it, it says so, and a row's bits cannot depend on what the
    compiler found around it.
    """
    if not tensor.is_cuda:
        return {"PTX": False, "PDL": False}
    dependent = _capability(tensor.device.index or 0) >= (9, 0)
    options: dict[str, Any] = {"PTX": True, "PDL": dependent, "num_warps": warps, "enable_fp_fusion": False}
    if dependent:
        options["launch_pdl"] = True
    if registers is not None:
        options["maxnreg"] = registers
    return options
