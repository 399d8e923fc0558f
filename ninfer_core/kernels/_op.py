"""What the torch ops take: the description of a row call, and the shapes of the weights they accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Matrix(Protocol):
    """A weight `W [N, K]` of `y = W x`; `rows` is `N`.

    `dense` is its transpose `[K, N padded to 32]`, contiguous; `weight` is the view `dense.t()`.
    """

    @property
    def dense(self) -> Tensor: ...

    @property
    def weight(self) -> Tensor: ...

    @property
    def rows(self) -> int: ...


class GdnWeights(Protocol):
    """What the GDN mixer needs beside its input projection.

    `conv [4, C]` (tap 3 multiplies the current token); `gate_scale`, `gate_bias` `[W]` with `W` = 2V padded to 32:
    `-exp(A_log)` and `dt_bias` in the first V columns, zero elsewhere; `qk_scale [2G, 1]`: d**-0.5 for query heads,
    1 for key heads; `norm [d]`: the plain gain of the output norm.
    """

    @property
    def conv(self) -> Tensor: ...

    @property
    def gate_scale(self) -> Tensor: ...

    @property
    def gate_bias(self) -> Tensor: ...

    @property
    def qk_scale(self) -> Tensor: ...

    @property
    def norm(self) -> Tensor: ...


class MoeWeights(Protocol):
    """Router and experts. `router`: rows 0..X-1 the experts, row X the gate of the shared expert.

    `gate_up`: `[2I, E]` of every expert, gate rows first; `down`: `[E, I]` of every expert.
    """

    @property
    def router(self) -> Matrix: ...

    @property
    def gate_up(self) -> Sequence[Matrix]: ...

    @property
    def down(self) -> Sequence[Matrix]: ...

    @property
    def shared_gate_up(self) -> Matrix: ...

    @property
    def shared_down(self) -> Matrix: ...


@dataclass(frozen=True)
class RowCall:
    """Who the rows of a row call belong to. Row `b * R + r` is row `r` of sequence `b`.

    Shapes: `slots`, `starts` (token index of row 0), `commit` (rows of the previous window to apply first) `[B]`;
    `page_tables [B, P]`; `cos`, `sin` `[B * R, 1, rotary]`, see `rope.rope_tables`. All on the device; `host` copies
    what the ops need as numbers, once per call. With `only [B]` the result of
    just that row of every sequence is wanted: attention stores all rows and returns `[B, ..]`.
    """

    slots: Tensor
    starts: Tensor
    commit: Tensor
    page_tables: Tensor
    cos: Tensor
    sin: Tensor
    rows: int
    only: Tensor | None = None

    @cached_property
    def host(self) -> tuple[tuple[int, int, int], ...]:
        """`(slot, start, commit)` of every sequence as integers."""
        return tuple(zip(self.slots.tolist(), self.starts.tolist(), self.commit.tolist(), strict=True))

    @cached_property
    def wanted(self) -> Tensor:
        """Flat indices `[B]` of the rows named by `only`."""
        assert self.only is not None
        return torch.arange(len(self.only), device=self.only.device) * self.rows + self.only


def as_index(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """An int64 tensor on `device` from a tensor or a list."""
    return torch.as_tensor(values, dtype=torch.int64, device=device)
