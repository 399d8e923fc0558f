"""Fixed tile shapes per matrix role and device family, and the launch options every decode kernel shares.

A tile never depends on the number of rows in the call: the order of a sum, and so its bits, follow from the tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ._order import KernelMatrix


class Tile(NamedTuple):
    """Row tiles of 16 in a program, steps (units of K) a warp has in flight, warps that share K."""

    tiles: int
    steps: int
    warps: int


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


def projection(matrix: KernelMatrix, residual: bool = False) -> Tile:
    """Tile of one dense projection (`residual`: 32 rows, the group of the epilogue)."""
    multiple = 4 if matrix.format == "W8" else 2
    units = matrix.groups
    if residual:
        count = warps(units // multiple, 8)
        return Tile(2, steps(units, count, 8, multiple), count)
    count = warps(units, 4)
    tiles = 2 if matrix.rows % 32 == 0 else 1
    return Tile(tiles, steps(units, count, 8), count)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def launch(tensor: torch.Tensor, warps: int) -> dict[str, Any]:
    """Launch options for the device of `tensor`; the interpreter (CPU tensors) takes the plain-Triton branches.

    Fusion of products and sums is off: where a kernel wants it, it says so, and a row's bits cannot depend on what the
    compiler found around it.
    """
    if not tensor.is_cuda:
        return {"PTX": False, "PDL": False}
    dependent = _capability(tensor.device.index or 0) >= (9, 0)
    options: dict[str, Any] = {"PTX": True, "PDL": dependent, "num_warps": warps, "enable_fp_fusion": False}
    if dependent:
        options["launch_pdl"] = True
    return options
