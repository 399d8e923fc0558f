"""Products, norms, embedding and heads against direct formulas in fp64; the choice of a route."""

from __future__ import annotations

import pytest
import torch

from ninfer_core.kernels.embedding import embedding
from ninfer_core.kernels.head import draft_head, head
from ninfer_core.kernels.linear import linear, mlp
from ninfer_core.kernels.mixer_input import mixer_input
from ninfer_core.kernels.norm import l2_norm, rms_norm
from ninfer_core.weights import Matrix
from tests.support import ONE_OP, error, same_bits

torch.set_num_threads(1)
G = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=G)


def matrix(rows, columns, dtype=torch.float32):
    """A weight `[rows, columns]` and its padded, transposed form with poisoned padding."""
    weight = rand(rows, columns) / columns**0.5
    dense = torch.full((columns, -(-rows // 32) * 32), float("nan"), dtype=dtype)
    dense[:, :rows] = weight.t()
    return weight.to(dtype).double(), Matrix(dense, rows)


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 24])
def test_linear(rows, chunk):
    weight, packed = matrix(70, 96)
    x, residual = rand(rows, 96), rand(rows, 70)
    want = x.double() @ weight.t()
    assert error(linear(x, packed, None, chunk), want) < ONE_OP
    assert error(linear(x, packed, residual, chunk), want + residual) < ONE_OP


def test_linear_in_bf16_keeps_fp32_results():
    weight, packed = matrix(64, 96, torch.bfloat16)
    x = rand(4, 96).bfloat16().float()
    got = linear(x, packed)
    assert got.dtype == torch.float32
    assert error(got, x.double() @ weight.t()) < 2**-7


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_norms(rows):
    x, gain = rand(rows, 96) * 3, rand(96)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    assert error(rms_norm(x, gain, 1e-6), want) < ONE_OP
    want = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt() * 0.25
    assert error(l2_norm(x, torch.tensor([0.25])), want) < ONE_OP


def test_norms_use_the_floor_as_a_sum_under_the_root():
    """Tiny rows tell x / sqrt(sum + eps) from x / max(norm, eps), and a mean from a sum."""
    x = torch.full((1, 64), 1e-4)
    assert error(l2_norm(x, torch.ones(1)), torch.full((1, 64), 1e-4 / (64e-8 + 1e-6) ** 0.5)) < ONE_OP
    assert error(rms_norm(x, torch.ones(64), 1e-6), torch.full((1, 64), 1e-4 / (1e-8 + 1e-6) ** 0.5)) < ONE_OP


@pytest.mark.parametrize("chunk", [False, True])
def test_mixer_input(chunk):
    weight, packed = matrix(64, 96)
    x, gain = rand(5, 96), 1 + rand(96) * 0.3
    wide = x.double()
    u = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    assert error(mixer_input(x, gain, 1e-6, packed, chunk), u @ weight.t()) < ONE_OP


@pytest.mark.parametrize("chunk", [False, True])
def test_mlp(chunk):
    up, packed_up = matrix(192, 96)
    down, packed_down = matrix(96, 96)
    x, gain = rand(5, 96), 1 + rand(96) * 0.3
    wide = x.double()
    u = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    both = u @ up.t()
    hidden = both[:, :96] * torch.sigmoid(both[:, :96]) * both[:, 96:]
    assert error(mlp(x, gain, 1e-6, packed_up, packed_down, chunk), wide + hidden @ down.t()) < ONE_OP


def test_embedding_copies_rows():
    table = rand(50, 96)
    ids = torch.tensor([3, 49, 0, 3])
    assert same_bits(embedding(ids, table), table[ids])
    assert embedding(ids, table.bfloat16()).dtype == torch.float32


def test_heads():
    weight, packed = matrix(70, 96)
    h = rand(6, 96)
    logits = h.double() @ weight.t()
    assert error(head(h, packed), logits) < ONE_OP
    ids = torch.randperm(1000, generator=G)[:70]
    assert torch.equal(draft_head(h, packed, None, 70), logits.argmax(-1))
    assert torch.equal(draft_head(h, packed, ids, 70), ids[logits.argmax(-1)])
    assert torch.equal(draft_head(h, packed, ids, 20), ids[logits[:, :20].argmax(-1)])


def test_draft_head_takes_the_first_of_equal_rows():
    dense = torch.zeros(8, 32)
    dense[:, 5] = dense[:, 9] = 1.0
    assert draft_head(torch.ones(1, 8), Matrix(dense, 20), None, 20).tolist() == [5]
