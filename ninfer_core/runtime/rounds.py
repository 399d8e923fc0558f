"""The tensor work of one round: verify a window, realign the draft layer, draft again. No cursors, no requests.

A window is the tokens of one sequence that are known but not yet in its state, followed by drafts. Its rows are
computed together; afterwards the caller says how many of them count, and the state takes just these in the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.decoder import Decoder
from ..model.mtp import MTP
from ..state import State


@dataclass(slots=True)
class Window:
    """What the device needs to know of one sequence for one round.

    `tokens`: R ids; `length`: index of the first; `commit`: rows of the previous window that count;
    `pages`: its KV pages in order; `rope_delta`: rotary position minus index.
    """

    tokens: list[int]
    slot: int
    length: int
    commit: int
    pages: Sequence[int]
    rope_delta: int = 0


class Rounds:
    """Runs windows of B sequences x R rows through the trunk and the draft layer."""

    def __init__(self, decoder: Decoder, mtp: MTP | None, state: State, device: torch.device) -> None:
        self._decoder = decoder
        self._mtp = mtp
        self._state = state
        self._device = device

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _tables(self, windows: Sequence[Window]) -> Tensor:
        width = max(len(w.pages) for w in windows)
        return self._tensor([[*w.pages, *[w.pages[0]] * (width - len(w.pages))] for w in windows])

    def verify(self, windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
        """Hidden rows [B, R, hidden] and logits [B, R, V] fp32 on the host of all windows (equal R)."""
        hidden = self._decoder.verify(
            self._state,
            self._tensor([w.tokens for w in windows]),
            self._tensor([w.slot for w in windows]),
            self._tensor([w.length for w in windows]),
            self._tensor([w.commit for w in windows]),
            self._tables(windows),
            self._tensor([w.rope_delta for w in windows]),
        )
        return hidden, self._decoder.logits(hidden).float().cpu()

    def realign(self, windows: Sequence[Window], tokens: list[list[int]], hidden: Tensor) -> Tensor:
        """Draft-layer rows under the trunk's own hidden rows, over whatever drafting left there: m' [B, R, hidden].

        `tokens` [B, R]: for each row the token that follows it.
        """
        return self._rows(windows, tokens, hidden, [w.length for w in windows])

    def draft(self, windows: Sequence[Window], hidden: Tensor, starts: list[int], count: int) -> list[list[int]]:
        """`count` drafts for each sequence, from the last draft-layer row [B, hidden].

        `starts`: the length of each sequence now, where the first chained row goes.
        """
        if self._mtp is None:
            return [[] for _ in windows]
        steps: list[list[int]] = []
        for i in range(count):
            if i:
                rows = [[token] for token in steps[-1]]
                hidden = self._rows(windows, rows, hidden[:, None], [s + i - 1 for s in starts])[:, 0]
            steps.append(self._mtp.draft(hidden).tolist())
        return [list(column) for column in zip(*steps, strict=True)]

    def _rows(self, windows: Sequence[Window], tokens: list[list[int]], hidden: Tensor, starts: list[int]) -> Tensor:
        if self._mtp is None:
            raise ValueError("this model has no draft layer")
        return self._mtp.rows(
            self._state,
            self._tensor(tokens),
            hidden,
            self._tensor([w.slot for w in windows]),
            self._tensor(starts),
            self._tables(windows),
            self._tensor([w.rope_delta for w in windows]),
        )
