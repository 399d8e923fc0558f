"""The tensor work of one round: verify a window, realign the draft layer, draft again. No cursors, no requests.

A window is the tokens of one sequence that are known but not yet in its state, followed by drafts. Its rows are
computed together; afterwards the caller says how many of them count, and the state takes just these in the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..model.decoder import Decoder
from ..model.mtp import MTP
from ..state import FusedState, State
from .media import PromptMedia

if TYPE_CHECKING:
    from ..model.fused import FusedDecoder, FusedMTP


@dataclass(slots=True)
class Window:
    """What the device needs to know of one sequence for one call.

    `tokens`: R ids; `length`: index of the first; `commit`: rows of the previous window that count;
    `pages`: its KV pages in order; `rope_delta`: rotary position minus index.
    """

    tokens: list[int]
    slot: int
    length: int
    commit: int
    pages: Tensor
    rope_delta: int = 0


class Rounds:
    """Runs windows of B sequences x R rows through the trunk and the draft layer."""

    def __init__(
        self,
        decoder: Decoder | FusedDecoder,
        mtp: MTP | FusedMTP | None,
        state: State | FusedState,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._mtp = mtp
        self._state = state
        self._device = device

    def _tables(self, windows: Sequence[Window]) -> Tensor:
        if len(windows) == 1:
            return windows[0].pages[None]
        width = max(w.pages.numel() for w in windows)
        tables = windows[0].pages.new_zeros(len(windows), width)
        for table, window in zip(tables, windows, strict=True):
            table[: window.pages.numel()] = window.pages
        return tables

    def verify(self, windows: Sequence[Window], meanwhile: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """Hidden rows [B, R, hidden] on the device, logits [B, R, V] fp32 on the host, of all windows (equal R).

        `meanwhile` runs on the host while the device works.
        """
        hidden = self._decoder.verify(
            self._state,
            torch.tensor([w.tokens for w in windows], device=self._device),
            [w.slot for w in windows],
            [w.length for w in windows],
            [w.commit for w in windows],
            self._tables(windows),
            [w.rope_delta for w in windows],
        )
        logits = self._decoder.logits(hidden)
        if meanwhile is not None:
            meanwhile()
        return hidden, logits.cpu()

    def realign(self, windows: Sequence[Window], tokens: list[list[int]], hidden: Tensor, wanted: list[int]) -> Tensor:
        """Draft-layer rows under the trunk's own hidden rows [B, R, hidden], over what drafting left there.

        `tokens` [B, R]: for each row the token that follows it. Returns the `wanted` row of each sequence [B, hidden].
        """
        return self._rows(windows, tokens, hidden, [w.length for w in windows], wanted)

    def draft(self, windows: Sequence[Window], hidden: Tensor, starts: list[int], count: int) -> list[list[int]]:
        """`count` drafts for each sequence, from its last draft-layer row [B, hidden].

        `starts`: the length of each sequence now, where the first chained row goes.
        """
        assert self._mtp is not None
        steps = [self._mtp.draft(hidden).tolist()]
        for i in range(count - 1):
            rows = [[token] for token in steps[-1]]
            hidden = self._rows(windows, rows, hidden[:, None], [start + i for start in starts], None)
            steps.append(self._mtp.draft(hidden).tolist())
        return [list(column) for column in zip(*steps, strict=True)]

    def fill(self, window: Window, tokens: list[int], hidden: Tensor, media: PromptMedia | None = None) -> None:
        """Draft-layer rows of a prompt from `window.length` on, for later rows to look at; their results are unused.

        Row t takes token t + 1, so the features of `media` are those of the tokens one further on.
        """
        assert self._mtp is not None
        ids = torch.tensor(tokens, device=self._device)
        start, stop = window.length, window.length + len(tokens)
        positions = media.positions(start, stop) if media is not None else None
        embeddings = media.embeddings(start + 1, stop + 1) if media is not None else None
        self._mtp.prefill(self._state, ids, hidden, start, window.pages, positions, embeddings)

    def _rows(
        self,
        windows: Sequence[Window],
        tokens: list[list[int]],
        hidden: Tensor,
        starts: list[int],
        wanted: list[int] | None,
    ) -> Tensor:
        assert self._mtp is not None
        return self._mtp.rows(
            self._state,
            torch.tensor(tokens, device=self._device),
            hidden,
            [w.slot for w in windows],
            starts,
            self._tables(windows),
            [w.rope_delta for w in windows],
            wanted,
        )[:, 0]
