"""The device state of all running sequences, and the only place that moves a cursor.

Verbs: `open` a sequence (reserve its pages and slot), `prefill` one chunk of it or a piece of one, `round` over those
that decode, `close` it (give everything back).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import EngineFailedError, NotFiniteError
from ..model.decoder import Decoder
from ..model.mtp import MTP
from ..model.vision import VisionTower
from ..state import FusedState, State
from ..types import TokenLogprob
from .budget import ROUNDS
from .flights import Flights, LaneRounds
from .media import PromptMedia
from .options import PAGE
from .pace import Pacer
from .pieces import Pieces, Reading
from .prefix import Kind
from .reuse import Reuse, Seat, chunk_ends, prompt_keys, worth
from .rounds import Rounds, Window
from .running import Running
from .sampler import RawLogprob, Sampler
from .session import Session

if TYPE_CHECKING:
    from ..model.fused import FusedDecoder, FusedMTP

Proposal = Callable[["Running", list[int]], list[int]]
"""For tests: given a sequence and the draft layer's drafts, the drafts to verify instead (any ids, equally many)."""


class Runner:
    """Runs sequences on one device. Not thread-safe: the engine's loop is its only caller.

    `decorate` turns a sampler's raw log-probabilities into the public form. `reuse` holds pages, slots and what was
    kept of earlier prompts. `tower` reads images. `lanes` decodes what needs no host between rounds. `clock` tells
    seconds: how long chunks and rounds take decides how many run, never what comes out. For tests and
    measurements: `proposal` replaces drafts, `after_chunk` sees every sequence behind each chunk of its prompt.
    """

    def __init__(
        self,
        decoder: Decoder | FusedDecoder,
        mtp: MTP | FusedMTP | None,
        state: State | FusedState,
        *,
        reuse: Reuse,
        draft_tokens: int,
        prefill_chunk: int,
        decorate: Callable[[Sequence[RawLogprob]], list[TokenLogprob]],
        device: torch.device | str = "cpu",
        adaptive: bool = True,
        tower: VisionTower | None = None,
        lanes: LaneRounds | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if prefill_chunk % PAGE or prefill_chunk < PAGE:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be a multiple of {PAGE}")
        self._decoder = decoder
        self._state = state
        self._device = torch.device(device)
        self._rounds = Rounds(decoder, mtp, state, self._device)
        self._has_mtp = mtp is not None and draft_tokens > 0
        self.chunk = prefill_chunk
        self._decorate = decorate
        self.draft_tokens = draft_tokens if self._has_mtp else 0
        self.reuse = reuse
        self.pages, self.slots = reuse.pages, reuse.slots
        self.proposal: Proposal | None = None
        self.after_chunk: Callable[[Running], None] | None = None
        # What the loop's thread does, step by step, while nothing runs; None once all is done.
        self.warming: Iterator[None] | None = None
        self._tower = tower
        self._clock = clock
        self.pieces = Pieces(decoder, state, self._device, clock)
        self._pacer = Pacer(self.draft_tokens, enabled=adaptive)
        self._flights = Flights(lanes, self._pacer, self.draft_tokens, self) if lanes is not None else None

    # opening and closing

    def pages_for(self, prompt_tokens: int, limit: int) -> int:
        """Pages that a sequence can need at most: prompt, answer without its last token, drafts of a window.

        On the device a round may follow the last: it has the last token as its anchor.
        """
        rows = prompt_tokens + limit - 1 + self.draft_tokens
        return -(-(rows + (self._flights is not None)) // PAGE)

    def open(self, session: Session, sampler: Sampler) -> Running | None:
        """Reserve what the session can need, resumed where its prompt is known; None if that is not free now."""
        prompt = session.prompt
        tokens = list(prompt.token_ids)
        keys = prompt_keys(prompt)
        count = self.pages_for(len(tokens), session.limit)
        seat = self.reuse.seat(keys, len(tokens) - 1, count, session.handle.id)
        if seat is None:
            return None
        session.cached_tokens, session.known_tokens = seat.length, seat.known
        sequence = Running(session, sampler, seat.slot, seat.pages, torch.empty(0), tokens, len(tokens), keys=keys)
        try:
            sequence.ends = chunk_ends(prompt.cuts, len(tokens), self.chunk)
            sequence.wanted = self.reuse.wanted(prompt, sequence.ends)
            if prompt.media:
                assert self._tower is not None
                sequence.media = PromptMedia(self._tower, len(tokens), prompt.media)
            self._sit(sequence, seat)
        except BaseException:
            self.close(sequence)
            raise
        return sequence

    def awaits(self, session: Session, others: Collection[Running]) -> bool:
        """Whether one of these is about to keep a state that this session can resume from: its prompt begins the same.

        Waiting for that costs no time, as prompts are read one chunk after the other, and saves the reading.
        """
        keys = prompt_keys(session.prompt) if self.reuse.enabled and others else []
        return any(
            other.length < end < len(keys) and keys[:end] == other.keys[:end]
            for other in others
            for end in other.wanted
        )

    def _sit(self, sequence: Running, seat: Seat) -> None:
        sequence.pages, sequence.slot = seat.pages, seat.slot
        sequence.table = torch.tensor(seat.pages, device=self._device)
        sequence.length = sequence.base = seat.length
        sequence.carry = seat.carry
        sequence.exact = seat.exact and (not seat.length or seat.length in sequence.ends)

    def close(self, sequence: Running) -> None:
        """Give the pages and the slot back. The caller ends the session.

        A round under way may still write to them: whatever the next owner does comes behind it on the device.
        """
        if self._flights is not None:
            self._flights.leave(sequence)
        self.pieces.leave(sequence)
        self.pages.give(sequence.pages)
        if sequence.slot >= 0:
            self.slots.give([sequence.slot])
        sequence.pages, sequence.slot = [], -1

    def scrub(self, sequence: Running) -> None:
        """After a fault: offer nothing that was made of this sequence, and overwrite the pages that are its own.

        What is not a number must not wait there for the next owner. Nor is anything offered that the sequence resumed
        from, or else one bad state would end every request that begins the same.
        """
        self._disown(sequence)
        self.reuse.forget_prompt(sequence.keys)
        self._state.clear_pages([page for page in sequence.pages if self.pages.owners(page) == 1])

    def _disown(self, sequence: Running) -> None:
        for checkpoint in sequence.kept:
            self.reuse.forget(checkpoint)
        sequence.kept = []

    def renew(self) -> None:
        """Begin anew on the same device: no sequences, nothing kept, no rounds under way. Raises what the device does.

        The sequences of before have ended and must not be closed after this.
        """
        held = self.pages.held
        self.pieces.reading = None
        self.reuse.clear()
        if self._flights is not None:
            self._flights.clear()
        self._state.clear_pages(held)

    def probe(self) -> bool:
        """Make one token in a free slot, to see whether the device still works.

        False if that cannot be tried now: no slot or page is free, or a chunk waits between its layers. Raises whatever
        the model raises; FloatingPointError if the logits are not finite.
        """
        slots = self.slots.take(1) if self.pieces.reading is None else None
        pages = self.reuse.take_pages(1) if slots else None
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
        """Forget the device state and read all known tokens again: the way out when a shared call failed.

        Raises:
            EngineFailedError: pages that others share with it must not be written again, and no others are free.
        """
        self._disown(sequence)
        count = len(sequence.pages)
        self.close(sequence)
        limit = max(sequence.prompt_tokens, len(sequence.tokens) - 1) - 1
        seat = self.reuse.seat(sequence.keys, limit, count, sequence.session.handle.id)
        if seat is None:
            raise EngineFailedError("a call for several requests failed, and there is no room to read this one again")
        sequence.target = max(sequence.prompt_tokens, len(sequence.tokens) - 1)
        sequence.ends = chunk_ends(sequence.session.prompt.cuts, sequence.target, self.chunk)
        self._sit(sequence, seat)
        sequence.commit = 0
        sequence.drafts, sequence.behind = [], []
        sequence.alone = True

    # prefill

    def prefill(self, sequence: Running, room: float | None = None) -> bool:
        """Read one chunk. Where chunks end follows from the prompt alone, so equal prompts give equal bits.

        While the chunk needs features that are not there, one step of the vision tower instead. Behind the last chunk
        the first token is sampled and delivered.

        With `room` the chunk stops before the layer that would take it beyond so many seconds, at the first at the
        earliest, and once more in front of what follows its last layer: that waits for the device, and a round that was
        launched before is read sooner if it need not. False: it has stopped, and no other chunk may begin until it is
        over or its sequence is closed.
        """
        start, end = self._next_chunk(sequence)
        before = self.pieces.reading
        if before is None and sequence.media is not None and sequence.media.work(start, end):
            return True
        reading = self.pieces.begin(sequence, start, end)
        waited = before is not None and not reading.chunk.left
        if not self.pieces.advance(room) or not (room is None or before is None or waited):
            return False
        self.pieces.leave(sequence)
        self._finish(reading)
        return True

    def _finish(self, reading: Reading) -> None:
        """What follows the last layer of a chunk: the cursor, the draft layer, checkpoints, the first token."""
        sequence, end, hidden = reading.sequence, reading.end, reading.hidden
        sequence.length = end
        if end == sequence.target and len(sequence.tokens) == end:
            logits = self._decoder.logits(hidden[-1:]).cpu()
            self._emit(sequence, logits, [], drafted=None)
        if self._has_mtp:
            self._fill_drafts(sequence, hidden)
        if sequence.media is not None:
            sequence.media.drop(end)
        if end in sequence.wanted and bool(hidden[-1].isfinite().all()):
            self._keep(sequence, sequence.keys, *sequence.wanted[end])
        if self._has_mtp and not sequence.prefilling and not sequence.session.ended:
            self._resume_drafts(sequence)
        if self.after_chunk is not None:
            self.after_chunk(sequence)

    def _next_chunk(self, sequence: Running) -> tuple[int, int]:
        start = sequence.length
        return start, sequence.ends[bisect_right(sequence.ends, start)]

    def chunk_seconds(self, sequence: Running) -> float | None:
        """What the layers of the next chunk will take, or what is left of this one; None if that is not known."""
        start, end = self._next_chunk(sequence)
        if sequence.media is not None and not sequence.media.ready(start, end):
            return None
        return self.pieces.seconds(sequence, start, end)

    def piece_seconds(self, decoding: int) -> float:
        """For how long prompts may be read between two rounds of so many sequences."""
        return max(self.pieces.times.piece, ROUNDS * self._pacer.expected(decoding))

    def _fill_drafts(self, sequence: Running, hidden: Tensor) -> None:
        """Draft-layer rows under the last `hidden` rows of the state: each needs the token after it, so one waits."""
        if sequence.carry is not None:
            hidden = torch.cat([sequence.carry, hidden])
        sequence.carry = hidden[-1:].clone()
        start, end = sequence.length - hidden.shape[0], sequence.length
        if end - 1 > start:
            tokens = sequence.tokens[start + 1 : end]
            self._rounds.fill(sequence.place(start), tokens, hidden[:-1], sequence.media)

    def _resume_drafts(self, sequence: Running) -> None:
        """The row that waited, now that the token after it is known: run as in decoding, and drafts start from it."""
        carry, sequence.carry = sequence.carry, None
        assert carry is not None
        place = sequence.place(sequence.length - 1)
        following = [[sequence.tokens[sequence.length]]]
        self._propose([sequence], self._rounds.realign([place], following, carry[None], [0]))

    # keeping

    def _keep(self, sequence: Running, keys: Sequence[Hashable], kind: Kind, spare: bool = False) -> None:
        seat = Seat(sequence.pages, sequence.slot, sequence.length, sequence.carry, sequence.exact)
        made = self.reuse.keep(keys, seat, kind, spare)
        if made is not None:
            sequence.kept.append(made)

    def retire(self, sequence: Running) -> None:
        """A sequence has ended well: keep the state behind its answer, where a tool result may follow."""
        enough = sequence.length - max([sequence.base, *(c.length for c in sequence.kept)]) >= worth(self.chunk)
        if not (self.reuse.answers and enough) or sequence.prefilling:
            return
        seated = sequence.seated
        if seated is not None and seated.torn:
            return  # the state has taken tokens that do not count
        if sequence.commit:
            self._decoder.flush(self._state, [sequence.slot], [sequence.commit], [sequence.length])
            sequence.commit = 0
        if self._has_mtp:
            if seated is not None and self._flights is not None:
                sequence.carry = self._flights.carry(sequence, seated)
            elif sequence.behind:
                rows, sequence.behind = torch.cat(sequence.behind), []
                self._fill_drafts(sequence, rows)
            if sequence.carry is None or not bool(sequence.carry.isfinite().all()):
                return
        sequence.exact = sequence.exact and sequence.length == sequence.prompt_tokens
        keys = [*sequence.keys, *sequence.tokens[sequence.prompt_tokens : sequence.length]]
        self._keep(sequence, keys[: sequence.length], "answer")

    # decoding

    def rows_for(self, sequence: Running) -> int:
        """Rows of this sequence's next window: 1 while drafts do not pay, with a budget of one, or at the last page."""
        if self._flights is not None and self._alone_on_device(sequence):
            return self._flights.rows_for(sequence)
        drafts = len(sequence.drafts) or self.draft_tokens
        return 1 + drafts if sequence.pace.drafting and self._may_draft(sequence) else 1

    def choose_depth(self, sequences: Sequence[Running]) -> None:
        """Before the round of all that decode: how many drafts they make in it for the next."""
        self._pacer.look([sequence.pace for sequence in sequences])

    @property
    def depth(self) -> int:
        """Drafts of the rounds that are launched now, for sequences that draft."""
        return self._pacer.depth

    def _alone_on_device(self, sequence: Running) -> bool:
        """Whether the device decodes this sequence without the host."""
        return self._flights is not None and self.proposal is None and self._flights.serves(sequence)

    def _may_draft(self, sequence: Running) -> bool:
        end = sequence.length + 1 + self.draft_tokens
        return self._has_mtp and end <= len(sequence.pages) * PAGE and sequence.session.room > 1

    def round(self, sequences: Sequence[Running]) -> dict[Running, Exception]:
        """One round of all the given sequences, which need equal `rows_for`. Returns the faults of single ones.

        Sequences that the device decodes alone get the tokens of the round that was launched before. Raises whatever
        the shared model calls raise: then the device state is undefined and the sequences must be restarted or closed.
        """
        if self._flights is None:
            return self._round(sequences)
        seated = [s for s in sequences if self._alone_on_device(s)]
        hosted = [s for s in sequences if s not in seated]
        faults = self._flights.round(seated) if seated else {}
        if hosted:
            rows = self.rows_for(hosted[0])
            most = max(1, self._flights.rounds.rows_within(max(len(s.pages) for s in hosted) * PAGE) // rows)
            for i in range(0, len(hosted), most):
                faults |= self._round(hosted[i : i + most])
        return faults

    def deliver(self, sequence: Running, tokens: list[int], drafted: int, accepted: int) -> int:
        """Hand over what the device emitted, and what is certain behind it; how many were kept (`flights.Host`)."""
        kept = sequence.session.deliver(tokens, None, drafted=drafted, accepted=accepted)
        self._take(sequence, tokens[:kept])
        self._force(sequence)
        return kept

    def fill(self, sequence: Running, start: int, stop: int, hidden: Tensor) -> None:
        """Draft-layer rows `start .. stop - 1` from their hidden rows (`flights.Host`)."""
        self._rounds.fill(sequence.place(start), sequence.tokens[start + 1 : stop + 1], hidden, sequence.media)

    def _round(self, sequences: Sequence[Running]) -> dict[Running, Exception]:
        """A round with the host in it: logits come here, tokens are drawn here. No cursor has moved if it raises."""
        began = self._clock()
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
        if rows == 1 or rows == 1 + self.depth:
            self._pacer.measured(rows - 1, len(sequences), self._clock() - began)
        for i, sequence in enumerate(sequences):
            if sequence not in faults:
                self._follow(sequence, hidden[i], rows, sequence.emitted - before[i], len(sequences))
        return faults

    def _follow(self, sequence: Running, hidden: Tensor, rows: int, tokens: int, group: int) -> None:
        """Keep what the draft layer has not seen: of a step without drafts, and of the last one.

        It catches up when drafting resumes, or when the state is kept.
        """
        if not self._has_mtp:
            return
        if sequence.commit and (rows == 1 or sequence.session.ended):
            sequence.behind.append(hidden[: sequence.commit].clone())
        if sequence.session.ended or not self._may_draft(sequence):
            return
        if self._pacer.update(sequence.pace, tokens, group, rows - 1):
            rows_behind, sequence.behind = torch.cat(sequence.behind), []
            self._fill_drafts(sequence, rows_behind)
            self._resume_drafts(sequence)

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
            name = session.handle.id
            raise NotFiniteError(f"{error}; the request {name} was ended, others go on") from error
        kept = session.deliver(tokens, self._decorate(raw) if raw is not None else None, drafted=drafted)
        self._take(sequence, tokens[:kept])
        self._force(sequence)
        return kept

    def _force(self, sequence: Running) -> None:
        """Deliver the tokens that are certain now, and take them over."""
        session, sampler = sequence.session, sequence.sampler
        while not session.ended and (forced := session.forced or sampler.forced()):
            certain = [(token, 0.0, [(token, 0.0)]) for token in forced]
            count = session.deliver(forced, self._decorate(certain) if sampler.logprobs is not None else None)
            self._take(sequence, forced[:count])

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
        drafts = self._rounds.draft(windows, hidden, [s.length for s in sequences], self.depth)
        for sequence, made in zip(sequences, drafts, strict=True):
            sequence.drafts = made if self.proposal is None else self.proposal(sequence, made)


def _look_ahead(sequences: Sequence[Running], rows: int) -> None:
    """Let grammars work out what they allow in the rows behind the known tokens of each window."""
    for sequence in sequences:
        known = len(sequence.tokens) - sequence.length
        if known <= rows:
            sequence.sampler.look_ahead(sequence.drafts[: rows - known])
