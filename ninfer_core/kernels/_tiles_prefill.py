"""Fixed tile shapes of the prefill kernels per device family, and their launch options.

Tiles follow from the device and from the number of rows in the call, never from a measurement at run time: the same
chunk takes the same route every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class Grouped(NamedTuple):
    """A grouped product: outputs and tokens of a tile, warps, pipeline stages.

    `widths`: how many widths there are for the last tile of an expert: `tokens`, half of it, and so on.
    """

    outputs: int
    tokens: int
    warps: int
    stages: int
    widths: int = 1


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of CUDA device `index`."""
    return torch.cuda.get_device_capability(index)


def family(tensor: torch.Tensor) -> int:
    """10 * major + minor of the device of `tensor`; 90 stands for the interpreter."""
    if not tensor.is_cuda:
        return 90
    major, minor = capability(tensor.device.index or 0)
    return 10 * major + minor


def launch(tensor: torch.Tensor, warps: int, stages: int | None = None) -> dict[str, Any]:
    """Launch options for the device of `tensor`; the interpreter (CPU tensors) takes the plain-Triton branches."""
    if not tensor.is_cuda:
        return {"PTX": False}
    return {"PTX": True, "num_warps": warps} | ({} if stages is None else {"num_stages": stages})


def fused_attention(tensor: torch.Tensor) -> bool:
    """Whether cuDNN serves attention heads of 256 on the device of `tensor`: Hopper cards from cuDNN 9.10.

    It plans anew, 70 ms, for every shape: callers ask for few.
    """
    return tensor.is_cuda and family(tensor) == 90 and (torch.backends.cudnn.version() or 0) >= 91000


def loops(tensor: torch.Tensor, count: int) -> int:
    """A loop count as a constant for the interpreter, which takes no range of tensors; 0 on a device: read it there."""
    return 0 if tensor.is_cuda else count


def grouped_tokens(pairs: int, experts: int) -> int:
    """Rows of a tile of a grouped product over `experts` experts that share `pairs` rows."""
    mean = pairs / experts
    return 16 if mean < 12 else 32 if mean < 24 else 64 if mean < 96 else 128


def expert_tiles_of(card: int, pairs: int, experts: int) -> tuple[Grouped, Grouped]:
    """Tiles of the grouped gate/up (outputs: features, twice as many rows) and down products on a family of cards."""
    tokens = grouped_tokens(pairs, experts)
    if card in (90, 100):
        if tokens == 128:
            return Grouped(64, 128, 4, 4, 3), Grouped(128, 128, 4, 4, 3)
        return Grouped(128, tokens, 4, 3, tokens // 32 or 1), Grouped(128, tokens, 4, 4, tokens // 32 or 1)
    tokens = min(tokens, 64)
    return Grouped(64, tokens, 4, 2, tokens // 32 or 1), Grouped(128, tokens, 4, 2, tokens // 32 or 1)


def expert_tiles(tensor: torch.Tensor, pairs: int, experts: int) -> tuple[Grouped, Grouped]:
    """`expert_tiles_of` the device of `tensor`."""
    if not tensor.is_cuda:
        return Grouped(64, 16, 4, 1), Grouped(64, 16, 4, 1)
    return expert_tiles_of(family(tensor), pairs, experts)


def scan_tile_of(card: int) -> tuple[int, int, int]:
    """Columns of the state in a program of the Gated DeltaNet scan, warps, stages."""
    return (32, 4, 3) if card in (80, 90, 100) else (32, 4, 2)


def flash_tile_of(card: int) -> tuple[int, int, int, int]:
    """Query rows and keys of a block of prefill attention, warps, stages."""
    if card in (90, 100):
        return 128, 64, 8, 2
    return (128, 32, 8, 2) if card == 80 else (64, 32, 4, 1)


def segment_tile_of(card: int) -> tuple[int, int, int, int, int | None]:
    """Query rows and keys of a block of the vision tower's attention, warps, stages, registers a thread.

    On one H200 two programs a multiprocessor, which 128 registers allow, take 725 us where one, with 130, takes 1,005.
    """
    if card in (90, 100):
        return 128, 64, 8, 3, 128 if card == 90 else None
    return (128, 64, 8, 2, None) if card == 80 else (64, 64, 4, 2, None)
