"""How many bytes a model takes on a device, from its inventory and configuration alone. No torch.

These are the sizes that `packed`, `state.FusedState` and the planner allocate; a test holds them equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import GeometryError
from .formats import format_of, up
from .inventory import Inventory

ALIGN = 256
"""Every packed tensor starts at a multiple of this many bytes."""

WIDER = ("Q4", "Q5", "Q6", "W8")
"""A format's values are exact in every later one."""

_ALLOWED = {"token_embedding": ("Q6", "W8"), "shared_down": ("W8",)}
_FUSED = {
    "gate_value": "query_key",
    "value_z": "query_key",
    "b_projection": "a_projection",
}
"""Last words of objects that are stored below another one of the same layer, as one tensor."""


def kernel_format(names: Sequence[str], formats: Sequence[str]) -> str:
    """The format in which the kernels read these objects as one matrix: the widest of theirs, or the next allowed.

    Raises:
        GeometryError: an object is not quantized.
    """
    for name, fmt in zip(names, formats, strict=True):
        if not format_of(fmt).grouped:
            raise GeometryError(f"{name} is stored as {fmt}; the kernels read matrices in {', '.join(WIDER)} only")
    widest = max(WIDER.index(fmt[:2]) for fmt in formats)
    allowed = _ALLOWED.get(names[0].rsplit("/", 1)[1], WIDER)
    return next(fmt for fmt in WIDER[widest:] if fmt in allowed)


def packed_bytes(objects: Inventory, *, mtp: bool = True) -> int:
    """Device bytes of the text model in kernel order.

    Args:
        objects: name -> (shape, format) of the artifact.
        mtp: count the draft layer and the reduced draft head.

    Raises:
        GeometryError: a matrix that the kernels do not take.
    """
    total = 0
    for name, (shape, fmt) in objects.items():
        prefix, last = name.rsplit("/", 1)
        skipped = not mtp and (name.startswith("mtp/") or last.startswith("draft_head"))
        if skipped or not name.startswith(("text/", "mtp/")) or last in _FUSED:
            continue
        parts = [name] + [f"{prefix}/{other}" for other, first in _FUSED.items() if first == last]
        parts = [part for part in parts if part in objects]
        rows = sum(objects[part][0][0] for part in parts)
        if not format_of(fmt).grouped and len(shape) == 2 and last not in _DIRECT:
            kernel_format(parts, [objects[part][1] for part in parts])
        if format_of(fmt).grouped:
            short = kernel_format(parts, [objects[part][1] for part in parts])
            total += sum(up(size, ALIGN) for size in _plane_bytes(short, rows, shape[1]))
        else:
            total += up(rows * math.prod(shape[1:]) * format_of(fmt).bits // 8, ALIGN)
    return total


_DIRECT = ("convolution", "a_b_projection", "a_projection", "router_shared_gate")


def _plane_bytes(short: str, rows: int, columns: int) -> tuple[int, int, int]:
    """Words, high words and scales of a matrix in kernel order: what the file's planes hold, without padding."""
    bits, group = {"Q4": (4, 64), "Q5": (5, 64), "Q6": (6, 64), "W8": (8, 32)}[short]
    count = rows * columns
    return count * (8 if bits == 8 else 4) // 8, count * (0 if bits == 8 else bits - 4) // 8, count // group * 2
