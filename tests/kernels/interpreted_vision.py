"""Kernels of the vision tower under Triton's interpreter against torch twins. A program: one JSON line a case.

As `interpreted_prefill.py`: with TRITON_INTERPRET=1, and bf16 is cut off instead of rounded.
"""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

import torch

from ninfer_core.config import VisionConfig
from ninfer_core.kernels import _tiles_prefill, vision, vision_prefill
from ninfer_core.model import vision as model
from tests.bench.vision import random_weights
from tests.kernels.interpreter import run

NAN = float("nan")
EXACT = 1e-6
"""fp32 sums in another order."""
BF16 = 8e-3
"""One value cut off to bf16."""
PRODUCTS = 2e-2
"""A chain of products of bf16 values, each cut off."""


def near(out, ref, limit, what):
    error = ((out.double() - ref.double()).norm() / ref.double().norm()).item()
    assert error < limit, f"{what}: relative error {error:.2e}, allowed {limit:.0e}"


def angles(rows, dim):
    angle = torch.randn(rows, dim // 2)
    return torch.cos(angle).repeat(1, 2), torch.cat((-torch.sin(angle), torch.sin(angle)), -1)


def turned(heads, dim, rows):
    """Heads of their own, padded; the column of ones."""
    qkv, (cos, sin) = torch.randn(rows, 3 * heads * dim).bfloat16(), angles(rows, dim)
    main, tail = vision.split_of(dim)
    assert main + tail > dim and main & (main - 1) == 0 == tail & (tail - 1)
    made = vision_prefill.turn(qkv, cos, sin, heads).float()
    q, k, v = qkv.float().view(rows, 3, heads, dim).permute(1, 2, 0, 3)
    swap = torch.arange(dim).roll(dim // 2)
    scale = vision_prefill.LOG2E * dim**-0.5
    near(made[0, ..., :dim], (q * cos + q[..., swap] * sin) * scale, BF16, "queries")
    near(made[1, ..., :dim], k * cos + k[..., swap] * sin, BF16, "keys")
    assert torch.equal(made[2, ..., :dim], v) and bool((made[2, ..., dim] == 1).all()), "values"
    assert not made[:2, ..., dim:].any() and not made[2, ..., dim + 1 :].any(), "zeros behind a head"


def attention(heads, dim, *segments, spread=1.0):
    """Segments of any length: shorter than a block of keys, a whole number of them, one more."""
    rows = sum(count * length for count, length in segments)
    qkv, (cos, sin) = (torch.randn(rows, 3 * heads * dim) * spread).bfloat16(), angles(rows, dim)
    out = torch.full((rows, heads * dim), NAN).bfloat16()
    want = torch.full((rows, heads * dim), NAN)
    with mock.patch.object(_tiles_prefill, "segment_tile_of", lambda card: (16, 32, 4, 1, None)):
        vision_prefill.segment_attention(qkv, cos, sin, segments, heads, out)
    vision.segment_attention_ref(qkv.float(), cos, sin, segments, heads, want)
    near(out, want, PRODUCTS if spread > 1 else 1.5 * BF16, "attention")


def rows(width):
    x, weight, bias = torch.randn(7, width) * 3 + 1, torch.randn(width), torch.randn(width)
    for y in (None, torch.randn(7, width).bfloat16()):
        mine, want = x.clone(), x.clone()
        u, norm = torch.full((7, width), NAN).bfloat16(), torch.full((7, width), NAN)
        vision_prefill.sum_norm(mine, y, weight, bias, u)
        vision.sum_norm(want, y if y is None else y.float(), weight, bias, norm)
        assert torch.equal(mine, want), "the sum"
        near(u, norm, BF16, "the norm")


def tower():
    """Two media at once, in tiles, by the kernels in bf16, against the torch path in fp32."""
    config = VisionConfig(depth=2, hidden_size=144, num_heads=2, intermediate_size=200, out_hidden_size=64)
    grids, patches = [(1, 4, 6), (2, 8, 2)], torch.randn(56, config.patch_dim)
    want = model.VisionTower(random_weights(config, "cpu", torch.float32), config).features(patches, grids)
    kernels = {
        "sum_norm": vision_prefill.sum_norm,
        "segment_attention": vision_prefill.segment_attention,
        "TILE": 32,
    }
    with (
        mock.patch.multiple(model, **kernels),
        mock.patch.object(_tiles_prefill, "segment_tile_of", lambda card: (16, 32, 4, 1, None)),
    ):
        got = model.VisionTower(random_weights(config, "cpu", torch.bfloat16), config).features(patches, grids)
    near(got, want, PRODUCTS, "features")


CASES = {
    "turned 72": (turned, 3, 72, 11),
    "turned 64": (turned, 1, 64, 3),
    "attention 72": (attention, 2, 72, (1, 41), (2, 32), (1, 1)),
    "attention 64": (attention, 1, 64, (3, 33)),
    "attention 16": (attention, 1, 16, (2, 5), (1, 64)),
    "attention, large scores": (partial(attention, spread=8.0), 1, 72, (1, 70)),
    "rows": (rows, 144),
    "tower": (tower,),
}


if __name__ == "__main__":
    run({name: partial(*case) for name, case in CASES.items()}, sys.argv[1:])
