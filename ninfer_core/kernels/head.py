"""The output head, and the drafter's choice of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ._op import Matrix
from .linear import product, trim


def head(h: Tensor, weight: Matrix, chunk: bool = False) -> Tensor:
    """Logits of final-normed hidden rows.

    Math: `logits = W h`.
    Shapes: `h [T, E]`, `weight` `[vocabulary rows, E]`, result `[T, vocabulary rows]` fp32.
    Domain: any T >= 1. Rows of the vocabulary without a token are computed too; the sampler masks them.
    Numeric: fp32. Row call: a row's bits depend on that row only.
    Effects: none.
    """
    return trim(product(h, weight, chunk), weight.rows)


def draft_head(h: Tensor, weight: Matrix, ids: Tensor | None, limit: int) -> Tensor:
    """The drafter's token: argmax over a reduced head, or over the first `limit` rows of the full one.

    Math: `ids[argmax_i (W h)_i]`, the first row on ties.
    Shapes: `h [T, E]`, `weight` `[M, E]`, `ids [M]` or None, result `[T]` int64.
    Domain: `limit <= M`.
    Numeric: fp32. Row call.
    Effects: none.
    """
    best = torch.argmax(trim(product(h, weight, False), limit), -1)
    return best if ids is None else ids.index_select(0, best)
