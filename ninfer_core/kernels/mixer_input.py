"""The input projection of a mixer: norm of the residual stream, then one fused product."""

from __future__ import annotations

from torch import Tensor

from ._op import Matrix
from .linear import product
from .norm import rms_norm


def mixer_input(x: Tensor, gain: Tensor, eps: float, weight: Matrix, chunk: bool = False) -> Tensor:
    """Input norm and the fused projection of a GDN or attention layer.

    Math: `y = W norm(x)`.
    Shapes: `x [T, E]`, `gain [E]`, result `[T, N padded]`. Columns of a GDN layer: query `G d`, key `G d`, value `V
    d`, z `V d`, a `V`, b `V`, padding. Columns of an attention layer: query `H D`, key `K D`, output gate `H D`,
    value `K D`.
    Domain: any T >= 1. Padding columns are zero.
    Numeric: fp32. Row call (`chunk` false): a row's bits depend on that row only.
    Effects: none.
    """
    return product(rms_norm(x, gain, eps), weight, chunk)
