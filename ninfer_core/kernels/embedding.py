"""Rows of the token embedding."""

from __future__ import annotations

from torch import Tensor


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Embedding rows; no scale factor.

    Math: `y[t] = table[tokens[t]]`.
    Shapes: `tokens [T]` int64, `table [vocabulary rows, E]`, result `[T, E]` fp32.
    Domain: ids below the number of rows.
    Numeric: exact copies of the stored values.
    Effects: none.
    """
    return table.index_select(0, tokens).float()
