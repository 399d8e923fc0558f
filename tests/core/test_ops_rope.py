"""Rotary embedding against the pairwise formula, three-axis positions, large angles."""

from __future__ import annotations

import math

import torch

from ninfer_core.kernels.rope import rope_, rope_tables
from tests.support import ONE_OP, error

torch.set_num_threads(1)


def turned(x, places, rotary=64, theta=1e7):
    """One head vector turned pair by pair; `places` are its three positions."""
    y = x.double().clone()
    half = rotary // 2
    for i in range(half):
        a = places[i % 3] * theta ** (-i / half)
        y[i] = x[i] * math.cos(a) - x[i + half] * math.sin(a)
        y[i + half] = x[i + half] * math.cos(a) + x[i] * math.sin(a)
    return y


def test_three_axes_interleave():
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor([[0, 7, 9, 262143], [0, 8, 9, 4], [0, 11, 9, 100000]])
    x = torch.randn(4, 3, 256, generator=generator)
    want = torch.stack(
        [torch.stack([turned(h, p) for h in row]) for row, p in zip(x, positions.t().tolist(), strict=True)]
    )
    got = rope_(x.clone(), *rope_tables(positions, 64, 1e7))
    assert error(got, want) < ONE_OP
    assert torch.equal(got[..., 64:], x[..., 64:])


def test_sections_are_interleaved_and_sized():
    """Only pairs 1, 4, .. follow height and 2, 5, .. width, 11, 11 and 10 of them."""
    base = torch.zeros(3, 1, dtype=torch.int64)
    for axis, count in ((0, 11), (1, 11), (2, 10)):
        moved = base.clone()
        moved[axis] = 5
        cos, _ = rope_tables(moved, 64, 1.0)  # theta 1: every pair turns alike
        pairs = torch.nonzero(cos[0, 0, :32] != 1).flatten().tolist()
        assert pairs == list(range(axis, 32, 3))[:count]


def test_text_positions_are_equal_on_all_axes():
    index = torch.tensor([0, 3, 77])
    for one, three in zip(rope_tables(index, 64, 1e7), rope_tables(index.expand(3, -1), 64, 1e7), strict=True):
        assert torch.equal(one, three)


def test_rotation_keeps_relative_scores():
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 256, generator=generator)
    scores = []
    for shift in (0, 1000):
        tables = [rope_tables(torch.tensor([p + shift]), 64, 1e7) for p in (9, 4)]
        scores.append(float((rope_(q.clone(), *tables[0]) * rope_(k.clone(), *tables[1])).sum()))
    assert abs(scores[0] - scores[1]) < 1e-4
