"""The mixture of experts against loops over rows and experts in fp64; ties; independence of rows."""

from __future__ import annotations

import pytest
import torch

from ninfer_core.kernels.moe import moe
from ninfer_core.weights import Matrix, Moe
from tests.support import ONE_OP, error, same_bits

torch.set_num_threads(1)
E, X, WIDTH, S = 64, 10, 48, 32
GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def padded(weight):
    dense = torch.zeros(weight.shape[1], -(-weight.shape[0] // 32) * 32)
    dense[:, : weight.shape[0]] = weight.t()
    return Matrix(dense, weight.shape[0])


RAW = {
    "router": rand(X + 1, E) / 4,
    "gate_up": rand(X, 2 * WIDTH, E) / E**0.5,
    "down": rand(X, E, WIDTH) / WIDTH**0.5,
    "shared_gate_up": rand(2 * S, E) / E**0.5,
    "shared_down": rand(E, S) / S**0.5,
}


def build(raw=RAW):
    return Moe(
        router=padded(raw["router"]),
        gate_up=tuple(padded(w) for w in raw["gate_up"]),
        down=tuple(padded(w) for w in raw["down"]),
        shared_gate_up=padded(raw["shared_gate_up"]),
        shared_down=padded(raw["shared_down"]),
    )


def oracle(x, gain, active, raw=RAW):
    raw = {name: t.double() for name, t in raw.items()}
    silu = torch.nn.functional.silu
    out = []
    for row in x.double():
        u = row / (row.square().mean() + 1e-6).sqrt() * gain.double()
        p = torch.softmax(raw["router"][:X] @ u, 0)
        chosen = sorted(range(X), key=lambda e: (-float(p[e]), e))[:active]
        routed = torch.zeros(E, dtype=torch.float64)
        for e in chosen:
            both = raw["gate_up"][e] @ u
            routed += p[e] / p[chosen].sum() * (raw["down"][e] @ (silu(both[:WIDTH]) * both[WIDTH:]))
        both = raw["shared_gate_up"] @ u
        shared = raw["shared_down"] @ (silu(both[:S]) * both[S:])
        out.append(row + routed + torch.sigmoid(raw["router"][X] @ u) * shared)
    return torch.stack(out)


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("active", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_moe(rows, active, chunk):
    x, gain = rand(rows, E), 1 + rand(E) * 0.3
    assert error(moe(x, gain, 1e-6, build(), active, chunk), oracle(x, gain, active)) < ONE_OP


@pytest.mark.parametrize("chunk", [False, True])
def test_ties_take_the_lower_expert(chunk):
    raw = dict(RAW)
    raw["router"] = RAW["router"].clone()
    raw["router"][:X] = 0  # all equal: experts 0 and 1 are chosen, half each
    x, gain = rand(4, E), torch.ones(E)
    weights = build(raw)
    assert error(moe(x, gain, 1e-6, weights, 2, chunk), oracle(x, gain, 2, raw)) < ONE_OP
    raw["down"] = RAW["down"].clone()
    raw["down"][2:] = float("nan")
    assert torch.isfinite(moe(x, gain, 1e-6, build(raw), 2, False)).all()


def test_a_row_does_not_see_how_many_rows_chose_its_experts():
    x, gain, weights = rand(24, E), torch.ones(E), build()
    whole = moe(x, gain, 1e-6, weights, 4)
    for order in (list(range(24)), list(range(23, -1, -1))):
        for size in (1, 2, 3, 4, 6, 24):
            for first in range(0, 24, size):
                some = order[first : first + size]
                assert same_bits(moe(x[some], gain, 1e-6, weights, 4), whole[some])


def test_bf16_experts_keep_the_router_in_fp32():
    raw = {name: t.bfloat16() if name != "router" else t for name, t in RAW.items()}
    weights = build()
    low = Moe(
        router=weights.router,
        gate_up=tuple(Matrix(w.dense.bfloat16(), w.rows) for w in weights.gate_up),
        down=tuple(Matrix(w.dense.bfloat16(), w.rows) for w in weights.down),
        shared_gate_up=Matrix(weights.shared_gate_up.dense.bfloat16(), 2 * S),
        shared_down=Matrix(weights.shared_down.dense.bfloat16(), E),
    )
    x, gain = rand(6, E), torch.ones(E)
    for chunk in (False, True):
        assert error(moe(x, gain, 1e-6, low, 2, chunk), oracle(x, gain, 2, raw)) < 0.02
