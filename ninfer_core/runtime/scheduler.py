"""Waiting and running requests: admission, fair prefill, rounds, cancellation, deadlines, and what to do with faults.

First in, first out within a priority. One `step` of the loop reads prompts for at most as long as a piece of a chunk
may take and does one round of all decoding sequences, so a long prompt never holds a running stream up for longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..errors import EngineBusyError, NinferError, NotFiniteError
from .faults import public
from .handle import RequestHandle
from .runner import Runner
from .running import Running
from .sampler import Sampler
from .session import Session

log = logging.getLogger("ninfer.engine")


@dataclass(slots=True)
class Totals:
    """Counters since the engine was made."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    chunks: int = 0

    def count(self, session: Session) -> None:
        """Add a request that has ended."""
        usage = session.usage
        self.prompt_tokens += usage.prompt_tokens if session.started else 0
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.drafted_tokens += usage.drafted_tokens
        self.accepted_tokens += usage.accepted_tokens
        if session.outcome == "error":
            self.failed += 1
        elif session.outcome == "cancelled":
            self.cancelled += 1
        else:
            self.finished += 1


class Scheduler:
    """Owns every request between `enqueue` and its last event. `step` is called by one thread, the rest by any."""

    def __init__(self, runner: Runner, *, max_sequences: int, max_queue: int) -> None:
        self._runner = runner
        self._max_sequences = max_sequences
        self._max_queue = max_queue
        self._lock = threading.Condition()
        self._waiting: list[tuple[Session, Sampler]] = []
        self._prefilling: deque[Running] = deque()
        self._decoding: list[Running] = []
        self._changed = False
        self._closed: NinferError | None = None
        self._refusing: NinferError | None = None
        self._seconds_per_request = 1.0
        self.totals = Totals()
        self.suspect = False
        """Set when a call into the model failed; the engine then checks that a token can still be made."""

    # any thread

    def enqueue(self, session: Session, sampler: Sampler) -> None:
        """Put a request into the queue.

        Raises:
            EngineBusyError: the queue is full.
            EngineClosedError, EngineFailedError: the engine takes no more requests.
            DeviceFaultError: it takes none now.
        """
        with self._lock:
            if refusal := self._closed or self._refusing:
                raise type(refusal)(str(refusal))
            if len(self._waiting) >= self._max_queue:
                self.totals.refused += 1
                wait = self._seconds_per_request * (1 + len(self._waiting) / self._max_sequences)
                raise EngineBusyError(
                    f"{len(self._waiting)} requests are waiting and the queue limit is {self._max_queue}; "
                    f"try again in about {wait:.0f} s or raise max_queue",
                    retry_after=max(1.0, round(wait, 1)),
                )
            self._waiting.append((session, sampler))
            self._waiting.sort(key=lambda entry: entry[0].request.priority)  # stable: arrival order within a priority
            self.totals.requests += 1
            self._wake()

    def notify(self, _handle: RequestHandle | None = None) -> None:
        """Something outside changed (a cancellation): look at once."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        self._changed = True
        self._lock.notify()

    def position(self, handle: RequestHandle) -> int | None:
        """How many requests wait before this one; None if it does not wait."""
        with self._lock:
            return next((i for i, (session, _) in enumerate(self._waiting) if session.handle is handle), None)

    def stop(self, error: NinferError) -> None:
        """Take no more requests; the loop ends those it has with this error at its next step."""
        with self._lock:
            self._closed = self._closed or error
            self._wake()

    def refuse(self, error: NinferError) -> None:
        """The loop hangs: end all requests with this error, without it, and take none until `accept`."""
        with self._lock:
            self._refusing = error
            waiting, self._waiting = self._waiting, []
            running = [*self._prefilling, *self._decoding]
        for session, _ in waiting:
            self._fail(session, type(error)(str(error)))
            self._account(session)
        for sequence in running:  # the loop gives back what they hold, if it ever comes to it
            self._fail(sequence.session, type(error)(str(error)))

    def accept(self) -> None:
        """The loop goes on: take requests again."""
        with self._lock:
            self._refusing = None

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters. A request counts as ended from its last event on, though the loop frees it later."""
        with self._lock:
            sequences = [*self._prefilling, *self._decoding]
            ended = [sequence for sequence in sequences if sequence.session.ended]
            totals = replace(self.totals)
            for sequence in ended:
                totals.count(sequence.session)
            reuse = self._runner.reuse.stats([page for sequence in ended for page in sequence.pages])
            reuse["slots_free"] += len(ended)
            return {
                "running": len(sequences) - len(ended),
                "waiting": len(self._waiting),
                **reuse,
                "draft_depth": self._runner.depth,
                "kv_cache_usage": 1 - reuse["pages_free"] / reuse["pages_total"],
                **asdict(totals),
            }

    # the loop's thread

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until there is something to do, or for so many seconds; whether there is."""
        with self._lock:
            return self._lock.wait_for(lambda: self._changed or self._closed is not None, seconds)

    def pause(self, seconds: float) -> None:
        """Sleep for so long, or until `stop` is called."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed is not None, seconds)

    @property
    def idle(self) -> bool:
        """Whether no request runs; some may wait."""
        return not (self._prefilling or self._decoding)

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._closed is not None

    def step(self) -> bool:
        """End what must end, admit, read a chunk or a piece, run one round. False if there was nothing to do."""
        with self._lock:
            self._changed = False
            closed = self._closed
        if closed is not None:
            self.end_all()
            return False
        self._sweep()
        self._admit()
        if self._prefilling:
            self._read()
        if self._decoding:
            self._round()
        return bool(self._prefilling or self._decoding or self._waiting)

    def _sweep(self) -> None:
        """Cancelled and overdue requests leave, wherever they are."""
        now = time.monotonic()
        with self._lock:
            gone = [entry for entry in self._waiting if _over(entry[0], now)]
            if gone:
                self._waiting = [entry for entry in self._waiting if not _over(entry[0], now)]
        for session, _ in gone:
            self._close(session, now)
            self._account(session)
        for sequence in [*self._prefilling, *self._decoding]:
            if _over(sequence.session, now):
                self._close(sequence.session, now)
                self._release(sequence)

    def _close(self, session: Session, now: float) -> None:
        """End a session whose owner left or whose deadline passed."""
        try:
            if session.handle.cancelled:
                session.finish("cancelled")
            elif session.expired(now):
                session.expire()
        except Exception as error:
            self._fail(session, error)

    def _admit(self) -> None:
        """Start waiting requests in order while a slot and their pages are free; none overtakes the first.

        One whose prompt is just being read for another waits until that state is kept.
        """
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._max_sequences:
            session, sampler = self._waiting[0]
            if self._runner.awaits(session, self._prefilling):
                return
            try:
                sequence = self._runner.open(session, sampler)
            except Exception as error:
                self._drop(session)
                self._fail(session, error)
                self._account(session)
                continue
            if sequence is None and (self._prefilling or self._decoding):
                return
            self._drop(session)
            if sequence is None:
                self._fail(session, RuntimeError("nothing runs, and the pages of one request are not free"))
                self._account(session)
                continue
            session.start()
            with self._lock:
                self._prefilling.append(sequence)

    def _drop(self, session: Session) -> None:
        with self._lock:
            self._waiting = [entry for entry in self._waiting if entry[0] is not session]

    def _read(self) -> None:
        """The prompt whose turn it is: a whole chunk, or where sequences decode no more than a piece of one.

        Where the chunk ends early, others follow that fit into the rest of the time as a whole. The time is that of the
        device. No more than one piece is launched beyond the one that runs, since a round follows each, and reads the
        one before.
        """
        sequence = self._prefilling[0]
        if not self._decoding:
            self._chunk(sequence, None)
            return
        left = self._runner.piece_seconds(len(self._decoding))
        while True:
            cost = self._runner.chunk_seconds(sequence)
            if not self._chunk(sequence, left) or cost is None:
                return
            left -= cost
            costs = ((other, self._runner.chunk_seconds(other)) for other in self._prefilling)
            found = next((other for other, cost in costs if cost is not None and cost <= left), None)
            if found is None:
                return
            sequence = found

    def _chunk(self, sequence: Running, room: float | None) -> bool:
        """One chunk of a prompt, which then is the last in turn; False if there was room for a piece of it alone."""
        with self._lock:
            self._prefilling.remove(sequence)
            self._prefilling.appendleft(sequence)
        try:
            over = self._runner.prefill(sequence, room)
        except Exception as error:
            self.totals.chunks += 1
            self._fault(sequence, error)
            return True
        if not over:
            return False
        self.totals.chunks += 1
        if sequence.session.ended:
            self._retire(sequence)
            return True
        with self._lock:
            self._prefilling.popleft()
            (self._prefilling if sequence.prefilling else self._decoding).append(sequence)
        return True

    def _round(self) -> None:
        """One round of everything that decodes, in groups of equal shape."""
        self._runner.choose_depth(self._decoding)
        groups: dict[tuple[int, int], list[Running]] = {}
        for i, sequence in enumerate(self._decoding):
            key = (self._runner.rows_for(sequence), i + 1 if sequence.alone else 0)
            groups.setdefault(key, []).append(sequence)
        self.totals.rounds += 1
        for group in groups.values():
            try:
                faults = self._runner.round(group)
            except Exception as error:
                self._shared_fault(group, error)
                continue
            for sequence in group:
                if sequence in faults:
                    self._fault(sequence, faults[sequence])
                elif sequence.session.ended:
                    self._retire(sequence)

    def _shared_fault(self, group: Sequence[Running], error: Exception) -> None:
        """A call for several sequences failed: read each again and run it alone, so that only the guilty one fails.

        What was emitted stands. What follows is sampled from a state that prefill made instead of decoding: the same
        within rounding, not always the same bits.
        """
        if len(group) == 1:
            self._fault(group[0], error)
            return
        self.suspect = True
        log.error("a round of %d requests failed; each is resumed alone", len(group), exc_info=error)
        for sequence in group:
            if sequence.session.ended:
                self._release(sequence)
                continue
            try:
                self._runner.restart(sequence)
            except NinferError as lost:
                self._fail(sequence.session, lost)
                self._release(sequence)
                continue
            with self._lock:
                self._decoding.remove(sequence)
                self._prefilling.append(sequence)

    def _retire(self, sequence: Running) -> None:
        """A sequence has ended by itself. Its events are out; keeping its state must not undo that."""
        try:
            self._runner.retire(sequence)
        except Exception as error:
            self.suspect = True
            log.error("the state of request %s could not be kept", sequence.session.handle.id, exc_info=error)
            self._runner.scrub(sequence)
        self._release(sequence)

    def _fault(self, sequence: Running, error: Exception) -> None:
        # Many rows that are not finite are the model's fault, not their requests'.
        self.suspect = self.suspect or isinstance(error, NotFiniteError) or not isinstance(error, NinferError)
        self._fail(sequence.session, error)
        try:
            self._runner.scrub(sequence)
        finally:
            self._release(sequence)

    def _fail(self, session: Session, error: BaseException) -> None:
        """End a session with an error of ours; anything else is logged in full and reported without internals."""
        if not isinstance(error, NinferError):
            log.error("request %s failed", session.handle.id, exc_info=error)
        session.fail(public(error))

    def _release(self, sequence: Running) -> None:
        """A running sequence has ended: its pages and slot are free again, its tokens counted."""
        with self._lock:
            if sequence in self._decoding:
                self._decoding.remove(sequence)
            elif sequence in self._prefilling:
                self._prefilling.remove(sequence)
            self._runner.close(sequence)
            self._account(sequence.session)

    def _account(self, session: Session) -> None:
        self.totals.count(session)
        if session.outcome not in ("error", "cancelled"):
            times = session.timings
            self._seconds_per_request += 0.2 * (times.prefill + times.decode - self._seconds_per_request)

    def end_all(self) -> None:
        """End what is left with the error that `stop` was given."""
        with self._lock:
            error = self._closed
            waiting, self._waiting = self._waiting, []
        assert error is not None
        for session, _ in waiting:
            self._fail(session, type(error)(str(error)))
            self._account(session)
        for sequence in [*self._prefilling, *self._decoding]:
            self._fail(sequence.session, type(error)(str(error)))
            try:
                self._release(sequence)
            except Exception:  # the books are wrong, and nobody will read them any more
                log.exception("what request %s held could not be given back", sequence.session.handle.id)

    def abandon(self, error: NinferError) -> None:
        """The engine begins anew: end all running requests, keep the waiting ones. What they held is not given back."""
        with self._lock:
            running = [*self._prefilling, *self._decoding]
            self._prefilling.clear()
            self._decoding.clear()
        for sequence in running:
            self._fail(sequence.session, error)
            self._account(sequence.session)


def _over(session: Session, now: float) -> bool:
    return session.ended or session.handle.cancelled or session.expired(now)
