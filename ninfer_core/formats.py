"""The weight formats by name: bits, groups, planes, stored sizes. No torch; the values are the business of `quant`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import GeometryError, UnknownIdentityError

Q4, Q5, Q6, W8 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"
BF16, FP32, I32 = "BF16", "FP32", "I32"
K_ALIGN, PLANE_ALIGN = 128, 256


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format. Direct formats have `group` 0 and hold one word an element."""

    name: str
    bits: int
    group: int = 0
    qmin: int = 0
    qmax: int = 0  # largest code of the max-abs encoder

    @property
    def grouped(self) -> bool:
        """Whether codes share a scale per group of columns."""
        return self.group > 0

    @property
    def high_bits(self) -> int:
        """Bits of a code kept in the high plane."""
        return self.bits - 4 if self.grouped and self.bits < 8 else 0


FORMATS = {
    f.name: f
    for f in (
        Format(Q4, 4, 64, -8, 7),
        Format(Q5, 5, 64, -16, 15),
        Format(Q6, 6, 64, -32, 31),
        Format(W8, 8, 32, -127, 127),
        Format(BF16, 16),
        Format(FP32, 32),
        Format(I32, 32),
    )
}


@dataclass(frozen=True, slots=True)
class Planes:
    """Where the planes of a grouped `[rows, columns]` object lie. Offsets and sizes in bytes; `*_row` are per row."""

    rows: int
    columns: int
    k_pad: int
    groups: int
    base_row: int
    high_row: int
    scale_row: int
    high_offset: int
    scale_offset: int
    nbytes: int

    def spans(self, start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Byte ranges of rows `start:stop` in the base, high and scale plane."""
        h, s = self.high_offset, self.scale_offset
        return (
            (start * self.base_row, stop * self.base_row),
            (h + start * self.high_row, h + stop * self.high_row),
            (s + start * self.scale_row, s + stop * self.scale_row),
        )


def up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def format_of(name: str) -> Format:
    """Look a format up by its registered name.

    Raises:
        UnknownIdentityError: the name is not one of `FORMATS`.
    """
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnknownIdentityError(f"unknown weight format {name!r}; known formats: {', '.join(FORMATS)}")
    return found


def planes(fmt: str, shape: Sequence[int]) -> Planes:
    """Plane offsets and sizes of a grouped object.

    Raises:
        GeometryError: the shape is not a matrix, or the format has no planes.
        UnknownIdentityError: unknown format name.
    """
    f = format_of(fmt)
    if not f.grouped:
        raise GeometryError(f"{fmt} is stored element by element and has no planes")
    if len(shape) != 2:
        raise GeometryError(f"{fmt} stores matrices [rows, columns]; the shape is {list(shape)}")
    n, k = int(shape[0]), int(shape[1])
    k_pad = up(k, K_ALIGN)
    groups = k_pad // f.group
    base, high, scale = k_pad if f.bits == 8 else k_pad // 2, k_pad * f.high_bits // 8, 2 * groups
    high_offset = up(n * base, PLANE_ALIGN)
    scale_offset = high_offset + up(n * high, PLANE_ALIGN)
    return Planes(n, k, k_pad, groups, base, high, scale, high_offset, scale_offset, scale_offset + n * scale)


def payload_bytes(fmt: str, shape: Sequence[int]) -> int:
    """Stored size in bytes of an object of this format and logical shape.

    Raises:
        GeometryError: a grouped format with a shape that is not a matrix.
        UnknownIdentityError: unknown format name.
    """
    f = format_of(fmt)
    return planes(fmt, shape).nbytes if f.grouped else math.prod(shape) * f.bits // 8
