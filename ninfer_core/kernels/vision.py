"""Operations of the vision tower: patches, residual sum and layer norm, products, segment attention, positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 8192
"""Patch rows that the torch path turns at a time."""


def sum_norm(x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, u: Tensor, eps: float = 1e-6) -> None:
    """Residual sum and the layer norm of what it comes to.

    Math: `x += y`; `u = (x - mean) / sqrt(var + eps) * weight + bias`, the variance without Bessel's correction.
    Shapes: `x`, `u`, `y` (None: nothing is added) `[P, M]`, `weight`, `bias` `[M]`.
    Domain: `x`, `weight`, `bias` finite fp32; `y` and `u` of one type, on a GPU bf16.
    Numeric: fp32, `u` rounded once.
    Effects: `x` and `u` are written.
    """
    if x.is_cuda:
        from . import vision_prefill

        return vision_prefill.sum_norm(x, y, weight, bias, u, eps)
    if y is not None:
        x += y
    u.copy_(torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps))
    return None


def biased_linear(x: Tensor, dense: Tensor, bias: Tensor) -> Tensor:
    """Product with a weight and a bias.

    Math: `y = x dense + bias`, `dense` being the transposed weight.
    Shapes: `x [P, K]`, `dense [K, N]`, `bias [N]`, result `[P, N]`.
    Domain: any P >= 1; all of one type.
    Numeric: fp32 accumulation; the result has the type of the weight.
    Effects: none.
    """
    return torch.addmm(bias, x, dense)


def gelu_linear(x: Tensor, dense: Tensor, bias: Tensor) -> Tensor:
    """`biased_linear`, then the Gaussian error unit in the tangent's form.

    Math: `z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2` of `z = x dense + bias`.
    Shapes, Domain: as `biased_linear`.
    Numeric: fp32 accumulation; on a GPU `z` is not rounded before the unit.
    Effects: none.
    """
    if x.is_cuda:  # the product writes what it has put through the unit: 131 us instead of 123 and 39
        return torch._addmm_activation(bias, x, dense, use_gelu=True)
    return torch.nn.functional.gelu(torch.addmm(bias, x, dense), approximate="tanh")


def segment_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, segments: list[tuple[int, int]], heads: int, out: Tensor
) -> None:
    """Rotary attention without a mask inside runs of equal segments.

    Math: pair `(i, i + D / 2)` of queries and keys turns by its angle; `softmax(q k / sqrt(D)) v` inside a segment.
    Shapes: `qkv [P, 3 heads D]` (query, key, value, each head-major), `cos`, `sin` `[P, D]` with the sine of the
    first half negated, `segments`: (number, length) of consecutive segments, their products add up to P; `out [P,
    heads D]`.
    Domain: every length >= 1; fp32 or bf16, on a GPU bf16.
    Numeric: angles applied in fp32, scores and sums in fp32; `out` has the type of `qkv`.
    Effects: `out` is written.
    """
    if qkv.is_cuda:
        from . import vision_prefill

        return vision_prefill.segment_attention(qkv, cos, sin, segments, heads, out)
    return segment_attention_ref(qkv, cos, sin, segments, heads, out)


def segment_attention_ref(
    qkv: Tensor, cos: Tensor, sin: Tensor, segments: list[tuple[int, int]], heads: int, out: Tensor
) -> None:
    """`segment_attention` in torch."""
    rows = qkv.shape[0]
    q, k, v = qkv.view(rows, 3, heads, -1).unbind(1)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    into = out.view(rows, heads, -1)
    first = 0
    for count, length in segments:
        own = slice(first, first + count * length)
        parts = (t[own].unflatten(0, (count, length)).transpose(1, 2) for t in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts)
        into[own] = mixed.transpose(1, 2).flatten(0, 1)
        first = own.stop


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [P, heads, D]` turned in fp32, some rows at a time to keep what that takes small."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, made, c, s in zip(*(t.split(ROWS) for t in (x, out, cos, sin)), strict=True):
        swapped = torch.cat(part.chunk(2, -1)[::-1], -1)
        made.copy_(part * c.unsqueeze(1) + swapped * s.unsqueeze(1))
    return out


def split_of(dim: int) -> tuple[int, int]:
    """Columns of the two blocks a head is kept in by the kernels: powers of two from 16, together more than `dim`."""
    main = max(16, 1 << (dim.bit_length() - 1))
    return main, max(16, 1 << max(0, dim - main).bit_length())


def patch_rows(
    frames: Tensor,
    patch: int,
    temporal: int,
    merge: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Patches of the frames of one medium.

    Math: `(v - 255 mean) / (255 std)` per channel. A row holds one patch of `temporal` frames: channel, frame, row,
    column. Rows go slice by slice, inside a slice in merge-block order. The last frame is repeated to fill a slice.
    Shapes: `frames [F, H, W, C]` uint8; result `[ceil(F / temporal) * H / patch * W / patch, C * temporal * patch^2]`.
    Domain: `H`, `W` multiples of `patch * merge`.
    Numeric: fp32, rounded once to `dtype`.
    Effects: none.
    """
    count, height, width, channels = frames.shape
    shift, scale = (torch.tensor(values, device=frames.device).mul(255) for values in (mean, std))
    x = ((frames.float() - shift) / scale).to(dtype)
    if count % temporal:
        x = torch.cat((x, x[-1:].expand(temporal - count % temporal, -1, -1, -1)))
    slices, side = x.shape[0] // temporal, patch * merge
    x = x.view(slices, temporal, height // side, merge, patch, width // side, merge, patch, channels)
    return x.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, channels * temporal * patch**2)


def merge_order(height: int, width: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column `[height * width]` of every patch of a slice, `merge x merge` blocks in raster order."""
    shape = (height // merge, merge, width // merge, merge)
    grid = torch.arange(height * width, device=device).view(shape).transpose(1, 2).reshape(-1)
    return grid // width, grid % width


def position_rows(table: Tensor, height: int, width: int, merge: int) -> Tensor:
    """The learned position table resized to a grid, bilinear with aligned corners, in merge-block order.

    Math: source coordinate `i (side - 1) / max(g - 1, 1)` per axis; taps at its floor and the next cell (clamped).
    Shapes: `table [side * side, M]`, result `[height * width, M]`.
    Domain: `height`, `width` multiples of `merge`.
    Numeric: fp32 weights and sum.
    Effects: none.
    """
    side = round(table.shape[0] ** 0.5)
    row, column = merge_order(height, width, merge, table.device)
    taps = []
    for index, size in ((row, height), (column, width)):
        place = torch.linspace(0, side - 1, size, device=table.device)[index] if size > 1 else index.float()
        low = place.long()
        taps.append((low, (low + 1).clamp_(max=side - 1), place - low))
    (top, bottom, down), (left, right, across) = taps
    down, across = down.unsqueeze(1), across.unsqueeze(1)
    made = table[top * side + left].mul_((1 - down) * (1 - across))
    made.addcmul_(table[top * side + right], (1 - down) * across)  # one tap at a time: large images have many rows
    made.addcmul_(table[bottom * side + left], down * (1 - across))
    return made.addcmul_(table[bottom * side + right], down * across)


def patch_angles(height: int, width: int, merge: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine `[height * width, dim]` of the two-axis rotation of a slice, in merge-block order.

    Math: frequencies `f_i = 10000^(-4 i / dim)`, `i < dim / 4`; pair i turns by `row f_i`, pair `dim / 4 + i` by
    `column f_i`.
    """
    frequency = 10000.0 ** (-torch.arange(dim // 4, device=device).double() * 4 / dim)
    places = merge_order(height, width, merge, device)
    angle = torch.cat([place.double().unsqueeze(1) * frequency for place in places], -1)
    cos, sin = torch.cos(angle).float(), torch.sin(angle).float()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
