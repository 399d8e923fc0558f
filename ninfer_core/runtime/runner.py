"""The device state of all running sequences, and the only place that moves a cursor.

Verbs: `open` a sequence (reserve its pages and slot), `prefill` one chunk of it, `round` over those that decode,
`close` it (give everything back). A sequence knows its tokens; the first `length` of them are in its state, of which
the last `commit` rows wait in the deferred window until the next call applies them. Tokens behind `length` are known
and emitted: the anchor, and forced tokens after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import EngineFailedError
from ..model.decoder import Decoder
from ..model.mtp import MTP
from ..state import State
from ..types import TokenLogprob
from .options import PAGE
from .pace import Pace, Pacer
from .pool import Pool
from .rounds import Rounds, Window
from .sampler import RawLogprob, Sampler
from .session import Session

Proposal = Callable[["Running", list[int]], list[int]]
"""For tests: given a sequence and the draft layer's drafts, the drafts to verify instead (any ids, equally many)."""


@dataclass(slots=True, eq=False)
class Running:
    """One sequence that holds a slot and pages. `target`: how many tokens prefill must put into the state."""

    session: Session
    sampler: Sampler
    slot: int
    pages: list[int]
    table: Tensor
    tokens: list[int]
    target: int
    length: int = 0
    commit: int = 0
    drafts: list[int] = field(default_factory=list)
    carry: Tensor | None = None
    behind: list[Tensor] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    alone: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.session.prompt.token_ids)

    @property
    def emitted(self) -> int:
        """Tokens of the answer so far: the output index of the next one."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be read."""
        return self.length < self.target

    def window(self, rows: int) -> Window:
        """The next `rows` input tokens: known ones, then drafts, then padding that is never kept."""
        known = self.tokens[self.length : self.length + rows]
        tokens = (known + self.drafts)[:rows]
        tokens += [0] * (rows - len(tokens))
        return Window(tokens, self.slot, self.length, self.commit, self.table)

    def place(self, length: int) -> Window:
        """A window without tokens: where rows of the draft layer from index `length` on go."""
        return Window([], self.slot, length, 0, self.table)


class Runner:
    """Runs sequences on one device. Not thread-safe: the engine's loop is its only caller.

    `decorate` turns a sampler's raw log-probabilities into the public form. `proposal` replaces drafts in tests.
    """

    def __init__(
        self,
        decoder: Decoder,
        mtp: MTP | None,
        state: State,
        *,
        slots: int,
        pages: int,
        draft_tokens: int,
        prefill_chunk: int,
        decorate: Callable[[Sequence[RawLogprob]], list[TokenLogprob]],
        device: torch.device | str = "cpu",
        adaptive: bool = True,
    ) -> None:
        if prefill_chunk % PAGE or prefill_chunk < PAGE:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be a multiple of {PAGE}")
        self._decoder = decoder
        self._state = state
        self._device = torch.device(device)
        self._rounds = Rounds(decoder, mtp, state, self._device)
        self._has_mtp = mtp is not None and draft_tokens > 0
        self._chunk = prefill_chunk
        self._decorate = decorate
        self.draft_tokens = draft_tokens if self._has_mtp else 0
        self.pages = Pool(pages, "page")
        self.slots = Pool(slots, "slot")
        self.proposal: Proposal | None = None
        self._pacer = Pacer(self.draft_tokens, enabled=adaptive)

    # opening and closing

    def pages_for(self, prompt_tokens: int, limit: int) -> int:
        """Pages that a sequence can need at most: prompt, answer without its last token, drafts of a window."""
        return -(-(prompt_tokens + limit - 1 + self.draft_tokens) // PAGE)

    def open(self, session: Session, sampler: Sampler) -> Running | None:
        """Reserve what the session can need and clear its slot; None if that is not free now."""
        prompt = session.prompt.token_ids
        pages = self.pages.take(self.pages_for(len(prompt), session.limit))
        if pages is None:
            return None
        slots = self.slots.take(1)
        if slots is None:
            self.pages.give(pages)
            return None
        self._state.clear_slot(slots[0])
        table = torch.tensor(pages, device=self._device)
        return Running(session, sampler, slots[0], pages, table, list(prompt), len(prompt))

    def close(self, sequence: Running) -> None:
        """Give the pages and the slot back. The caller ends the session."""
        self.pages.give(sequence.pages)
        self.slots.give([sequence.slot])
        sequence.pages, sequence.slot = [], -1

    def scrub(self, sequence: Running) -> None:
        """Overwrite the pages of a failed sequence: what is not a number must not wait there for the next owner."""
        self._clear_pages(sequence.pages)

    def _clear_pages(self, pages: Sequence[int]) -> None:
        index = torch.tensor(pages, dtype=torch.int64, device=self._device)
        for tensor in (self._state.kv_codes, self._state.kv_scales):
            if tensor is not None:
                tensor.index_fill_(3, index, 0)

    def probe(self) -> bool:
        """Make one token in a free slot, to see whether the device still works; False if no slot or page is free.

        Raises whatever the model raises; FloatingPointError if the logits are not finite.
        """
        slots = self.slots.take(1)
        pages = self.pages.take(1) if slots else None
        try:
            if not slots or not pages:
                return False
            self._state.clear_slot(slots[0])
            tokens = torch.zeros(2, dtype=torch.int64, device=self._device)
            table = torch.tensor(pages, dtype=torch.int64, device=self._device)
            hidden = self._decoder.prefill(self._state, tokens, slots[0], 0, table)
            if not self._decoder.logits(hidden[-1:]).isfinite().all():
                raise FloatingPointError("the logits of a test token are not finite")
            return True
        finally:
            self.slots.give(slots or ())
            self.pages.give(pages or ())

    def restart(self, sequence: Running) -> None:
        """Forget the device state and read all known tokens again: the way out when a shared call failed."""
        self._state.clear_slot(sequence.slot)
        sequence.length = sequence.commit = 0
        sequence.drafts, sequence.carry, sequence.behind = [], None, []
        sequence.target = max(sequence.prompt_tokens, len(sequence.tokens) - 1)
        sequence.alone = True

    # prefill

    def prefill(self, sequence: Running) -> None:
        """Read one chunk. Chunks start at multiples of the chunk size, so equal prompts give equal bits.

        Behind the last chunk the first token is sampled and delivered.
        """
        start = sequence.length
        end = min(start + self._chunk, sequence.target)
        hidden = self._decoder.prefill(
            self._state,
            torch.tensor(sequence.tokens[start:end], device=self._device),
            sequence.slot,
            start,
            sequence.table,
        )
        sequence.length = end
        if end == sequence.target and len(sequence.tokens) == end:
            logits = self._decoder.logits(hidden[-1:]).cpu()
            self._emit(sequence, logits, [], drafted=None)
        if self._has_mtp and not sequence.session.ended:
            self._prefill_drafts(sequence, hidden, start, end)

    def _prefill_drafts(self, sequence: Running, hidden: Tensor, start: int, end: int) -> None:
        """Draft-layer rows of the chunk: each needs the token after it, so one hidden row waits for the next chunk.

        The very last row, behind which the first token is known, is run as in decoding: drafts start from it.
        """
        if sequence.carry is not None:
            hidden = torch.cat([sequence.carry, hidden])
            start -= 1
        sequence.carry = hidden[-1:].clone()
        if end - 1 > start:
            self._rounds.fill(sequence.place(start), sequence.tokens[start + 1 : end], hidden[:-1])
        if not sequence.prefilling:
            carry, sequence.carry = sequence.carry, None
            place = sequence.place(end - 1)
            self._propose([sequence], self._rounds.realign([place], [[sequence.tokens[end]]], carry[None], [0]))

    # decoding

    def rows_for(self, sequence: Running) -> int:
        """Rows of this sequence's next window: 1 while drafts do not pay, with a budget of one, or at the last page."""
        return 1 + self.draft_tokens if sequence.pace.drafting and self._may_draft(sequence) else 1

    def _may_draft(self, sequence: Running) -> bool:
        end = sequence.length + 1 + self.draft_tokens
        return self._has_mtp and end <= len(sequence.pages) * PAGE and sequence.session.room > 1

    def round(self, sequences: Sequence[Running]) -> dict[Running, Exception]:
        """One round of all the given sequences, which need equal `rows_for`. Returns the faults of single ones.

        Raises whatever the shared model calls raise: then no cursor has moved, but the device state is undefined and
        the sequences must be restarted or closed.
        """
        began = time.perf_counter()
        rows = self.rows_for(sequences[0])
        windows = [s.window(rows) for s in sequences]
        before = [s.emitted for s in sequences]
        constrained = any(s.sampler.grammar is not None for s in sequences)
        hidden, logits = self._rounds.verify(windows, (lambda: _look_ahead(sequences, rows)) if constrained else None)
        faults: dict[Running, Exception] = {}
        for i, sequence in enumerate(sequences):
            try:
                self._advance(sequence, windows[i], logits[i])
            except Exception as error:
                faults[sequence] = error
        live = [i for i, s in enumerate(sequences) if s not in faults and not s.session.ended]
        if rows > 1:
            moved = [i for i in live if sequences[i].commit]
            if moved:
                self._redraft([sequences[i] for i in moved], [windows[i] for i in moved], hidden[moved])
        self._pacer.measured(rows > 1, len(sequences), time.perf_counter() - began)
        for i in live:
            self._follow(sequences[i], hidden[i], rows, sequences[i].emitted - before[i], len(sequences))
        return faults

    def _follow(self, sequence: Running, hidden: Tensor, rows: int, tokens: int, group: int) -> None:
        """Keep what the draft layer has not seen of a step without drafts; let it catch up when drafting resumes."""
        if not self._may_draft(sequence):
            return
        if rows == 1:
            sequence.behind.append(hidden[: sequence.commit].clone())
        if self._pacer.update(sequence.pace, tokens, group):
            rows_behind = torch.cat(sequence.behind)
            sequence.behind = []
            self._prefill_drafts(sequence, rows_behind, sequence.length - rows_behind.shape[0], sequence.length)

    def _advance(self, sequence: Running, window: Window, logits: Tensor) -> None:
        """Sample behind the known tokens of the window, deliver, and move the cursor to what was kept."""
        rows, known = len(window.tokens), len(sequence.tokens) - sequence.length
        if known > rows:
            consumed = rows
        else:
            drafts = window.tokens[known : known + len(sequence.drafts)]  # without the padding
            kept = self._emit(sequence, logits[known - 1 : known + len(drafts)], drafts, drafted=len(drafts))
            consumed = known + kept - 1
        sequence.length += consumed
        sequence.commit = consumed
        sequence.drafts = []

    def _emit(self, sequence: Running, logits: Tensor, drafts: list[int], *, drafted: int | None) -> int:
        """Sample, deliver, take over what was kept and what is forced; returns the number of sampled tokens kept."""
        session = sequence.session
        try:
            tokens, raw = sequence.sampler.sample(logits, drafts, sequence.emitted)
        except FloatingPointError as error:
            raise EngineFailedError(f"{error}; the request was ended, others go on") from error
        kept = session.deliver(tokens, self._decorate(raw) if raw is not None else None, drafted=drafted)
        self._take(sequence, tokens[:kept])
        while not session.ended and (forced := session.forced or sequence.sampler.forced()):
            certain = [(token, 0.0, [(token, 0.0)]) for token in forced]
            count = session.deliver(forced, self._decorate(certain) if raw is not None else None)
            self._take(sequence, forced[:count])
        return kept

    def _take(self, sequence: Running, tokens: Sequence[int]) -> None:
        sequence.tokens.extend(tokens)
        sequence.sampler.observe(tokens)

    def _redraft(self, sequences: list[Running], windows: list[Window], hidden: Tensor) -> None:
        """Realign the draft layer over the rows that count, then draft from the last of them."""
        following, last = [], []
        for sequence, window in zip(sequences, windows, strict=True):
            tokens = sequence.tokens[window.length + 1 : sequence.length + 1]
            following.append(tokens + [0] * (len(window.tokens) - len(tokens)))
            last.append(sequence.commit - 1)
        self._propose(sequences, self._rounds.realign(windows, following, hidden, last))

    def _propose(self, sequences: list[Running], hidden: Tensor) -> None:
        """Draft for the given sequences; not behind forced tokens, where the next tokens are known."""
        wanted = [i for i, s in enumerate(sequences) if len(s.tokens) == s.length + 1]
        if not wanted:
            return
        sequences, hidden = [sequences[i] for i in wanted], hidden[wanted]
        windows = [s.place(s.length) for s in sequences]
        drafts = self._rounds.draft(windows, hidden, [s.length for s in sequences], self.draft_tokens)
        for sequence, made in zip(sequences, drafts, strict=True):
            sequence.drafts = made if self.proposal is None else self.proposal(sequence, made)


def _look_ahead(sequences: Sequence[Running], rows: int) -> None:
    """Let grammars work out what they allow in the rows behind the known tokens of each window."""
    for sequence in sequences:
        known = len(sequence.tokens) - sequence.length
        if known <= rows:
            sequence.sampler.look_ahead(sequence.drafts[: rows - known])
