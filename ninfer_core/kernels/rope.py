"""Rotary position embedding: half-split pairs, interleaved three-axis positions, the first `rotary` dims of a head."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def _frequencies(
    rotary: int, theta: float, section: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    half = rotary // 2
    index = torch.arange(half, device=device)
    axis = torch.zeros(half, dtype=torch.int64, device=device)
    for number in (1, 2):
        axis[number : 3 * section[number] : 3] = number
    return theta ** (-index.double() / half), axis


def rope_tables(
    positions: Tensor, rotary: int, theta: float, section: tuple[int, int, int] = (11, 11, 10)
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every row, formed once per call and shared by all layers.

    Math: pair `i` of `rotary / 2` turns by `p[axis(i)] * theta^(-2i / rotary)`; `axis(i) = i mod 3` (temporal, height,
    width) inside `section`, temporal beyond it. The sine of the first half is negated, so that a rotation is
    `x * cos + swap_halves(x) * sin`.
    Shapes: `positions [T]` (text: one index for the three axes) or `[3, T]`; results `[T, 1, rotary]` fp32.
    Domain: integer positions below 2^53.
    Numeric: angles and functions in fp64, rounded once to fp32.
    Effects: none.
    """
    frequency, axis = _frequencies(rotary, float(theta), section, positions.device)
    if positions.dim() == 1:
        place = positions.double().unsqueeze(1)
    else:
        place = positions.double().t()[:, axis]
    angle = place * frequency
    cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `rotary` dims of every head in place.

    Math: `y[i] = x[i] cos - x[i + h] sin`, `y[i + h] = x[i + h] cos + x[i] sin`, `h = rotary / 2`; other dims
    unchanged.
    Shapes: `x [T, heads, D]`; `cos`, `sin` `[T, 1, rotary]` of `rope_tables`; returns `x`.
    Domain: finite fp32.
    Numeric: fp32.
    Effects: writes `x`.
    """
    rotary = cos.shape[-1]
    part = x[..., :rotary]
    swapped = part.unflatten(-1, (2, rotary // 2)).flip(-2).flatten(-2)
    part.copy_(part * cos + swapped * sin)
    return x
