"""Fixed tile shapes per matrix role and device family, and the launch options every decode kernel shares.

A tile never depends on the number of rows in the call: the order of a sum, and so its bits, follow from the tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ._order import KernelMatrix


class Tile(NamedTuple):
    """Weight rows of a program, scale groups of K taken at once, warps."""

    rows: int
    groups: int
    warps: int


def chunk(groups: int, most: int) -> int:
    """Largest power of two that divides `groups`, at most `most`."""
    size = 1
    while size < most and groups % (size * 2) == 0:
        size *= 2
    return size


def projection(matrix: KernelMatrix, residual: bool = False) -> Tile:
    """Tile of one dense projection (`residual`: 32 rows, the group of the epilogue)."""
    most = chunk(matrix.groups, 64)
    if residual:
        return Tile(32, most, 8)
    return Tile(16 if matrix.rows < 100_000 else 32, most, 4)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def launch(tensor: torch.Tensor, warps: int) -> dict[str, Any]:
    """Launch options for the device of `tensor`; the interpreter (CPU tensors) takes the plain-Triton branches."""
    if not tensor.is_cuda:
        return {"PTX": False, "PDL": False}
    dependent = _capability(tensor.device.index or 0) >= (9, 0)
    options: dict[str, Any] = {"PTX": True, "PDL": dependent, "num_warps": warps, "enable_fp_fusion": True}
    if dependent:
        options["launch_pdl"] = True
    return options
