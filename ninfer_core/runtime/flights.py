"""Rounds on the device, seen from the host: launched before the one in front is read, landed one round later.

A sequence whose tokens the device can draw by itself gets a lane (`graphs`). From then on the host only launches rounds
and lands them: it delivers what they emitted and moves the cursor. The device ends a sequence by its stop tokens and
its limit; what the host alone can see (a stop string, a cancellation) ends it one round late, which costs that round.
Log-probabilities, penalties, logit bias and a top-k of 0 or above 64 need the host between rounds: such sequences do
not come here.

Under a grammar or a thinking budget a round has two parts. The first, up to the logits, is launched like any other.
While the device computes it, the host reads the round before, and from its tokens and drafts makes the `orders` by
which the second part draws. Such sequences have launches of their own, so that others need not wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..errors import NotFiniteError
from .orders import VOID, Order, held, order
from .pace import Pacer

if TYPE_CHECKING:
    from .running import Running
    from .validation import SamplingParams

KEPT = 576
"""Hidden rows that the device remembers of a sequence: more than the longest rest of the draft layer (`pace`)."""


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence as a lane begins with it.

    `anchor`: the token that is emitted but not in the state; `length`: tokens in the state, of which the last `commit`
    rows wait; `index`: tokens emitted; `remaining`: tokens that may still be; `stops`: ids that end it (the first eight
    count; the host sees the others one round later).
    """

    anchor: int
    length: int
    commit: int
    index: int
    remaining: int
    params: SamplingParams
    drafts: Sequence[int] = ()
    stops: Sequence[int] = ()
    rope_delta: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What a round emitted for one sequence; `finite` False: a row was not, and the sequence has ended.

    `drafts`: those of the next round, where the round had orders. `cut`: all tokens are accepted drafts, since a stop
    token or the limit came before the draw.
    """

    tokens: list[int]
    finite: bool = True
    drafts: Sequence[int] = ()
    cut: bool = False


class Launched(Protocol):
    """A round under way."""

    def read(self) -> list[Result]:
        """Wait for it; what it emitted, sequence by sequence."""

    def seconds(self) -> float | None:
        """Device time, once it was read."""


class Begun(Protocol):
    """A round whose first part is under way. Until it is finished nothing else may run."""

    def finish(self, orders: Sequence[Order]) -> Launched:
        """Start the second part; an order for each sequence."""


class LaneRounds(Protocol):
    """What flights need of the device; `graphs.DeviceRounds`."""

    def draws(self, params: SamplingParams) -> bool:
        """Whether tokens can be drawn there by these parameters."""

    def seat(self, slot: int, pages: Sequence[int], start: Start) -> None:
        """Give a slot's lane to a sequence."""

    def launch(self, slots: Sequence[int], rows: int, drafts: int, tokens: int) -> Launched:
        """Start a round."""

    def begin(self, slots: Sequence[int], rows: int, drafts: int, tokens: int) -> Begun:
        """Start the part of a round that needs no orders."""

    def hidden(self, slot: int, start: int, stop: int) -> Tensor:
        """Final hidden rows of the last tokens of a slot."""

    def rows_within(self, tokens: int) -> int:
        """Most rows of one launch over so many tokens."""

    def clear(self) -> None:
        """Forget all lanes and graphs: after a fault of the device."""


class Host(Protocol):
    """What flights need of the runner."""

    def deliver(self, sequence: Running, tokens: list[int], drafted: int, accepted: int) -> int:
        """Hand over the tokens of a round that judged `drafted` drafts and took `accepted`; how many were kept."""

    def fill(self, sequence: Running, start: int, stop: int, hidden: Tensor) -> None:
        """Draft-layer rows `start .. stop - 1` from their hidden rows."""


@dataclass(slots=True, eq=False)
class Seated:
    """A sequence on the device. `ahead`: rows launched and not landed; `drafted`: drafts that its lane will hold.

    `seen`: tokens whose rows the draft layer has; `torn`: the host cut tokens that the device's state has taken.
    Under orders: `drafts`: those that its lane holds; `replaced`: its anchor is not the token that stands.
    """

    ahead: int = 0
    flying: int = 0
    drafted: int = 0
    seen: int = 0
    torn: bool = False
    resuming: bool = False
    drafts: Sequence[int] = ()
    replaced: bool = False


@dataclass(slots=True)
class Group:
    """Sequences whose rounds have one shape, in one launch or several: `left` of them are not read yet.

    `drafts`: verified of each and made for the next round. `seconds`: of those read; None where there is no clock.
    """

    size: int
    drafts: int
    left: int
    seconds: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched round and whose it is. `orders`: as many as sequences, or none."""

    launched: Launched
    crew: tuple[tuple[Running, Seated], ...]
    rows: int
    drafts: int
    group: Group
    orders: tuple[Order, ...] = ()


class Flights:
    """Launches and lands rounds of the sequences it serves. `draft_tokens`: drafts per round."""

    def __init__(self, rounds: LaneRounds, pacer: Pacer, draft_tokens: int, host: Host) -> None:
        self.rounds = rounds
        self._pacer, self._draft_tokens, self._host = pacer, draft_tokens, host
        self._flying: list[Flight] = []
        self._late: dict[Running, Exception] = {}

    def serves(self, sequence: Running) -> bool:
        """Whether the device draws the next round of a sequence."""
        if sequence.seated is not None:
            return True
        sampler = sequence.sampler
        drawn = sampler.logprobs is None and self.rounds.draws(sampler.params)
        return drawn and (held(sequence) or not sequence.owed)

    def rows_for(self, sequence: Running) -> int:
        """Rows of the next round: 1, and the drafts of the lane while drafting pays."""
        if not sequence.pace.drafting:
            return 1
        return 1 + (len(self._first_drafts(sequence)) if sequence.seated is None else sequence.seated.drafted)

    def round(self, sequences: Sequence[Running]) -> dict[Running, Exception]:
        """Launch a round of sequences with equal `rows_for`, and land those launched before that hold any of them."""
        faults = {s: self._late.pop(s) for s in sequences if s in self._late}
        groups: dict[tuple[bool, int, int], list[Running]] = {}
        for sequence in sequences:
            if sequence.session.ended or sequence in faults:
                continue
            seated = sequence.seated or self._seat(sequence)
            if seated.resuming and seated.flying:
                faults |= self._land(sequences, seated)
                if sequence.session.ended or sequence in faults:
                    continue
            if seated.resuming:
                self._resume(sequence, seated)
            rows, drafts = self.rows_for(sequence), self._pacer.depth if sequence.pace.drafting else 0
            groups.setdefault((held(sequence), rows, drafts), []).append(sequence)
        launched = []
        for (ordered, rows, drafts), members in sorted(groups.items(), key=lambda item: item[0][0]):
            parts = self._parts(members, rows)
            group = Group(len(members), drafts, len(parts))
            for part in parts:
                launched += self._steer(part, rows, group, faults) if ordered else [self._launch(part, rows, group)]
        faults |= self._land(sequences, None)
        self._flying += launched
        return faults

    def leave(self, sequence: Running) -> None:
        """A sequence is given up or ends: whatever is under way for it counts no more."""
        sequence.seated = None
        self._late.pop(sequence, None)

    def clear(self) -> None:
        """Forget all rounds under way and everything on the device: after a fault of the device."""
        self._flying, self._late = [], {}
        self.rounds.clear()

    def _parts(self, members: list[Running], rows: int) -> list[list[Running]]:
        """Launches that fit into the workspace."""
        most = max(1, self.rounds.rows_within(max(_reach(s, rows) for s in members)) // rows)
        return [members[i : i + most] for i in range(0, len(members), most)]

    def _first_drafts(self, sequence: Running) -> list[int]:
        """The drafts of a sequence that gets a lane. Under orders as many as rounds have now, so that it joins others.

        Tokens that are owed come first, and ids that need not be right fill up.
        """
        if not held(sequence):
            return sequence.drafts
        count = self._pacer.depth if sequence.pace.drafting else 0
        return (sequence.owed + sequence.drafts + [0] * count)[:count]

    def _seat(self, sequence: Running) -> Seated:
        drafts = self._first_drafts(sequence)
        seated = Seated(drafted=len(drafts), seen=sequence.length)
        self._fill_lane(sequence, seated, drafts)
        sequence.seated = seated
        sequence.drafts = []
        return seated

    def _fill_lane(self, sequence: Running, seated: Seated, drafts: Sequence[int]) -> None:
        session, owed = sequence.session, len(sequence.owed)
        start = Start(
            anchor=sequence.tokens[sequence.length],
            length=sequence.length,
            commit=sequence.commit,
            index=sequence.emitted - owed,
            remaining=session.room + owed,
            params=sequence.sampler.params,
            drafts=drafts,
            stops=session.end_ids,
            rope_delta=sequence.rope_delta,
        )
        self.rounds.seat(sequence.slot, sequence.pages, start)
        seated.drafts = drafts

    def _launch(self, members: list[Running], rows: int, group: Group) -> Flight:
        reach = max(_reach(s, rows) for s in members)
        launched = self.rounds.launch([s.slot for s in members], rows, group.drafts, reach)
        return Flight(launched, _board(members, rows, group.drafts), rows, group.drafts, group)

    def _steer(self, members: list[Running], rows: int, group: Group, faults: dict[Running, Exception]) -> list[Flight]:
        """Launch a round of sequences that need orders; the rounds before are read while the device computes its rows.

        Sequences that have ended are left out; `faults` takes those of single ones.
        """
        members = [s for s in members if not s.session.ended and s not in faults]
        if not members:
            return []
        reach = max(_reach(s, rows) for s in members)
        begun = self.rounds.begin([s.slot for s in members], rows, group.drafts, reach)
        crew = _board(members, rows, group.drafts)
        faults |= self._land(members, None)
        orders = tuple(self._order(sequence, seated, rows, faults) for sequence, seated in crew)
        launched = begun.finish(orders)
        for sequence, seated in crew:
            if seated.replaced and not sequence.session.ended and sequence not in faults:
                self._replace(sequence, seated)
        return [Flight(launched, crew, rows, group.drafts, group, orders)]

    def _order(self, sequence: Running, seated: Seated, rows: int, faults: dict[Running, Exception]) -> Order:
        if sequence.session.ended or sequence in faults or seated.replaced:
            return VOID
        try:
            return order(sequence, seated.drafts[: rows - 1])
        except Exception as error:
            faults[sequence] = error
            return VOID

    def _replace(self, sequence: Running, seated: Seated) -> None:
        """The lane's last token does not stand: begin it anew behind the rows that the device has applied."""
        seated.replaced = False
        sequence.commit = 0
        if self._draft_tokens and seated.seen == sequence.length:
            seated.seen -= 1  # the draft layer's last row looked at the wrong token
            self.catch_up(sequence, seated, sequence.length)
        self._fill_lane(sequence, seated, (sequence.owed + [0] * seated.drafted)[: seated.drafted])

    def _land(self, sequences: Sequence[Running], only: Seated | None) -> dict[Running, Exception]:
        """Read flights in order up to the last that holds one of `sequences` (or `only`); faults of `sequences`."""
        held = [
            i
            for i, flight in enumerate(self._flying)
            if any(seated is only if only is not None else s in sequences for s, seated in flight.crew)
        ]
        count = held[-1] + 1 if held else 0
        landed, self._flying = self._flying[:count], self._flying[count:]
        for number, flight in enumerate(landed):
            try:
                self._read(flight)
            except Exception as error:
                self._lose(landed[number:], sequences, error)
                raise
        return {s: self._late.pop(s) for s in sequences if s in self._late}

    def _lose(self, flights: Sequence[Flight], callers: Sequence[Running], error: Exception) -> None:
        """Results that cannot be read: without them the host no longer follows any sequence that they hold.

        The callers learn it now, the others at their own next round.
        """
        for sequence, seated in (member for flight in flights for member in flight.crew):
            if sequence.seated is seated and sequence not in callers:
                self._late.setdefault(sequence, error)

    def _read(self, flight: Flight) -> None:
        if all(sequence.seated is not seated for sequence, seated in flight.crew):
            return  # nobody waits for it
        results = flight.launched.read()
        self._time(flight, flight.launched.seconds())
        for i, ((sequence, seated), result) in enumerate(zip(flight.crew, results, strict=True)):
            seated.flying, seated.ahead = seated.flying - 1, seated.ahead - flight.rows
            if sequence.seated is not seated or sequence.session.ended or sequence in self._late:
                continue
            ordered = flight.orders[i] if flight.orders else None
            if ordered is VOID:
                continue
            try:
                self._take(sequence, seated, result, flight, ordered)
            except Exception as error:
                self._late[sequence] = error

    def _time(self, flight: Flight, seconds: float | None) -> None:
        """Count what a launch took; a round is all launches of its group."""
        group = flight.group
        group.left -= 1
        group.seconds = None if seconds is None or group.seconds is None else group.seconds + seconds
        if group.left == 0 and group.seconds is not None and flight.rows == 1 + group.drafts:
            self._pacer.measured(group.drafts, group.size, group.seconds)

    def _take(self, sequence: Running, seated: Seated, result: Result, flight: Flight, ordered: Order | None) -> None:
        """Deliver what a round emitted and move the cursor."""
        if not result.finite:
            raise NotFiniteError(
                f"the logits for output token {sequence.emitted} are not finite; the request "
                f"{sequence.session.handle.id} was ended, others go on"
            )
        if not result.tokens:
            raise RuntimeError("the device has ended a sequence that the host still runs")
        tokens = result.tokens
        owed = min(len(sequence.owed), len(tokens))
        kept = owed
        if ordered is not None:
            if tokens[:owed] != sequence.owed[:owed]:
                raise RuntimeError("the device has drawn other tokens than those that were certain")
            tokens = [*tokens[:owed], *sequence.sampler.stand(tokens[owed:], ordered.rows[owed:])]
            seated.drafts, seated.replaced = result.drafts, tokens[-1] != result.tokens[-1]
        if owed < len(tokens):
            accepted = len(tokens) - owed - (not result.cut or tokens != result.tokens)
            kept += self._host.deliver(sequence, tokens[owed:], flight.rows - 1 - owed, accepted)
        sequence.length += kept
        # A round that is under way has applied the rows of this one, those that the host cut included.
        seated.torn = kept < len(tokens) and seated.flying > 0
        sequence.commit = 0 if seated.flying else kept
        if ordered is not None and kept < len(tokens) and not sequence.session.ended:
            raise RuntimeError("tokens were cut of a sequence that goes on")
        if flight.drafts:
            seated.seen = sequence.length
        if not sequence.session.ended and self._draft_tokens:
            seated.resuming |= self._pacer.update(sequence.pace, len(result.tokens), flight.group.size, flight.rows - 1)

    def _resume(self, sequence: Running, seated: Seated) -> None:
        """Drafting begins again: show the draft layer what it has missed. The next round drafts behind its one row."""
        seated.resuming = False
        if not self.catch_up(sequence, seated, sequence.length):
            sequence.pace.drafting = False

    def carry(self, sequence: Running, seated: Seated) -> Tensor | None:
        """The draft layer has all rows but the last; the hidden row `[1, E]` of that one, which waits. None: lost."""
        if not self.catch_up(sequence, seated, sequence.length - 1):
            return None
        return self.rounds.hidden(sequence.slot, sequence.length - 1, sequence.length)

    def catch_up(self, sequence: Running, seated: Seated, stop: int) -> bool:
        """Give the draft layer its rows up to `stop`; False if they are no longer known."""
        if seated.seen >= stop:
            return True
        if stop - seated.seen > KEPT:
            return False
        hidden = self.rounds.hidden(sequence.slot, seated.seen, stop)
        self._host.fill(sequence, seated.seen, stop, hidden)
        seated.seen = stop
        return True


def _board(members: Sequence[Running], rows: int, drafts: int) -> tuple[tuple[Running, Seated], ...]:
    """The members of a round that is under way now."""
    crew = []
    for sequence in members:
        seated = sequence.seated
        assert seated is not None
        seated.flying, seated.ahead, seated.drafted = seated.flying + 1, seated.ahead + rows, drafts
        crew.append((sequence, seated))
    return tuple(crew)


def _reach(sequence: Running, rows: int) -> int:
    """No row of the next round sees more tokens than this."""
    assert sequence.seated is not None
    return sequence.length + sequence.seated.ahead + rows
