"""Products with a weight matrix, and the dense SwiGLU MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from ._op import Matrix
from .norm import rms_norm


def linear(x: Tensor, weight: Matrix, residual: Tensor | None = None, chunk: bool = False) -> Tensor:
    """Product with a weight, and the residual sum that follows an output projection.

    Math: `y = W x (+ residual)`.
    Shapes: `x [T, K]`, `weight` `W [N, K]`, `residual [T, N]`, result `[T, N]`.
    Domain: any T >= 1.
    Numeric: fp32 accumulation; fp32 result. Row call (`chunk` false): a row's bits depend on that row only.
    Effects: none.
    """
    y = trim(product(x, weight, chunk), weight.rows)
    return y if residual is None else residual + y


def trim(y: Tensor, rows: int) -> Tensor:
    """The first `rows` columns: without the padding."""
    return y if y.shape[1] == rows else y[:, :rows]


def product(x: Tensor, weight: Matrix, chunk: bool) -> Tensor:
    """`W x` of `x [T, K]`, padding included: `[T, N padded]` in fp32.

    A row call makes one vector-matrix product per row. Matrix libraries choose other kernels, with another order of
    sums, for 1, 2 or 4 rows; the same call on the same shape for every row cannot differ. It is also faster up to some
    eight rows: a matrix product first repacks the whole weight.
    """
    w = weight.weight
    if x.dtype != w.dtype:
        x = x.to(w.dtype)
    if chunk:
        return torch.mm(x, weight.dense).float()
    y = x.new_empty(x.shape[0], w.shape[0])
    if x.shape[0] == 1:
        torch.mv(w, x[0], out=y[0])
    else:
        for row, out in zip(x.unbind(0), y.unbind(0), strict=True):
            torch.mv(w, row, out=out)
    return y.float()


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2I]` with the gate half first."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def mlp(x: Tensor, gain: Tensor, eps: float, gate_up: Matrix, down: Matrix, chunk: bool = False) -> Tensor:
    """Post-attention norm, dense SwiGLU MLP and residual sum.

    Math: `y = x + down(silu(gate u) * (up u))`, `u = norm(x)`.
    Shapes: `x [T, E]`, `gain [E]`, `gate_up` `[2I, E]` (gate rows first), `down` `[E, I]`, result `[T, E]`.
    Domain: any T >= 1; I a multiple of 16.
    Numeric: fp32. Row call: a row's bits depend on that row only.
    Effects: none.
    """
    hidden = trim(product(rms_norm(x, gain, eps), gate_up, chunk), gate_up.rows)
    return x + trim(product(swiglu(hidden), down, chunk), down.rows)
