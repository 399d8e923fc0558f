"""Operations of the vision tower against direct formulas."""

from __future__ import annotations

import math

import torch

from ninfer_core.kernels.vision import (
    biased_linear,
    gelu_linear,
    merge_order,
    patch_angles,
    position_rows,
    segment_attention,
    sum_norm,
)
from tests.support import ONE_OP, error

torch.set_num_threads(1)
G = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=G)


def test_merge_order_lists_blocks_of_four():
    row, column = merge_order(4, 6, 2, torch.device("cpu"))
    places = list(zip(row.tolist(), column.tolist(), strict=True))
    assert places[:8] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert places[12:14] == [(2, 0), (2, 1)] and sorted(places) == [(r, c) for r in range(4) for c in range(6)]


def test_position_rows_are_bilinear_with_aligned_corners():
    side, height, width = 7, 4, 10
    table = rand(side * side, 5)
    grid = table.view(side, side, 5).double()
    got = position_rows(table, height, width, 2)
    for place, (r, c) in enumerate(
        zip(*(t.tolist() for t in merge_order(height, width, 2, table.device)), strict=True)
    ):
        y, x = r * (side - 1) / (height - 1), c * (side - 1) / (width - 1)
        y0, x0 = int(y), int(x)
        y1, x1 = min(y0 + 1, side - 1), min(x0 + 1, side - 1)
        fy, fx = y - y0, x - x0
        want = (grid[y0, x0] * (1 - fx) + grid[y0, x1] * fx) * (1 - fy) + (
            grid[y1, x0] * (1 - fx) + grid[y1, x1] * fx
        ) * fy
        assert float((got[place] - want).abs().max()) < 1e-5
    assert torch.equal(got[0], table[0])
    assert error(got[-1], table[-1]) < ONE_OP


def test_angles_use_rows_then_columns():
    cos, sin = patch_angles(4, 4, 2, 8, torch.device("cpu"))
    row, column = merge_order(4, 4, 2, torch.device("cpu"))
    place = 11
    angles = [row[place] * 1.0, row[place] * 0.01, column[place] * 1.0, column[place] * 0.01]
    for i, a in enumerate(angles):
        assert math.isclose(cos[place, i], math.cos(a), abs_tol=1e-6) and cos[place, i + 4] == cos[place, i]
        assert math.isclose(sin[place, i + 4], math.sin(a), abs_tol=1e-6) and sin[place, i] == -sin[place, i + 4]


def test_segment_attention():
    heads, dim, segments = 3, 8, [(1, 6), (2, 4)]
    qkv = rand(14, 3 * heads * dim)
    angle = rand(14, dim // 2).double()
    cos, sin = torch.cos(angle).repeat(1, 2), torch.cat((-torch.sin(angle), torch.sin(angle)), -1)
    got = torch.full((14, heads * dim), float("nan"))
    segment_attention(qkv, cos.float(), sin.float(), segments, heads, got)
    q, k, v = qkv.double().view(14, 3, heads, dim).unbind(1)
    want = torch.zeros(14, heads, dim, dtype=torch.float64)

    def turn(x, t):
        y = x.clone()
        for i in range(dim // 2):
            c, s = math.cos(angle[t, i]), math.sin(angle[t, i])
            y[i], y[i + dim // 2] = x[i] * c - x[i + dim // 2] * s, x[i + dim // 2] * c + x[i] * s
        return y

    for first, last in ((0, 6), (6, 10), (10, 14)):
        for h in range(heads):
            keys = torch.stack([turn(k[t, h], t) for t in range(first, last)])
            for t in range(first, last):
                weight = torch.softmax(keys @ turn(q[t, h], t) / math.sqrt(dim), 0)
                want[t, h] = weight @ v[first:last, h]
    assert error(got, want.flatten(1)) < ONE_OP


def test_sum_norm():
    x, y, weight, bias = rand(5, 24) * 3 + 1, rand(5, 24), rand(24), rand(24)
    for added in (None, y):
        total, u = x.clone(), torch.full_like(x, float("nan"))
        sum_norm(total, added, weight, bias, u)
        wide = x.double() + (0 if added is None else added.double())
        spread = wide - wide.mean(-1, keepdim=True)
        want = spread / (spread.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
        assert error(total, wide) < ONE_OP and error(u, want) < ONE_OP


def test_linear_and_gelu():
    x, dense, shift = rand(5, 24), rand(24, 40), rand(40)
    assert error(biased_linear(x, dense, shift), x.double() @ dense.double() + shift) < ONE_OP
    wide = x.double() @ dense.double() + shift
    want = wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) / 2
    assert error(gelu_linear(x, dense, shift), want) < ONE_OP
