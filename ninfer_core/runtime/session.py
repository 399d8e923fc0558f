"""The host side of one running request: tokens in, events out, with budget, limits and accounting. No torch.

The engine's loop feeds every burst of sampled tokens through `Session.deliver` and does what it says: how many tokens
were kept (the state must be cut there), which tokens to force next, whether the request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Protocol

from ..errors import RequestTimeoutError
from ..types import Event, Finish, FinishReason, PreparedMedium, Timings, TokenLogprob, Usage
from .handle import RequestHandle


class PlacedMedium(Protocol):
    """A medium and the token spans of its features: one for an image, one per pair of frames for a video."""

    @property
    def media(self) -> PreparedMedium:
        """The medium."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """`[start, stop)`, ascending."""


class Prompt(Protocol):
    """What a session needs of a prepared prompt."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""

    @property
    def thinking(self) -> bool:
        """The output begins inside a think block."""

    @property
    def media(self) -> Sequence[PlacedMedium]:
        """Images and videos in order of appearance."""

    @property
    def checkpoints(self) -> Sequence[int]:
        """Numbers of leading tokens after which a state is worth keeping, ascending."""

    @property
    def cuts(self) -> Sequence[int]:
        """Numbers of leading tokens at which a chunk may end besides, ascending; `checkpoints` are among them."""


class OutputMachine(Protocol):
    """What a session needs of the text machine (`frontend.output`)."""

    @property
    def stopped(self) -> bool:
        """A stop string, an end token or the like has ended the output."""

    @property
    def ends(self) -> Collection[int]:
        """Ids that end the output."""

    @property
    def kept(self) -> int:
        """How many ids of the last `feed` count."""

    @property
    def in_reasoning(self) -> bool:
        """The think block is open."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens inside the think block so far."""

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that matched."""

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> list[Event]:
        """Take tokens, give events."""

    def forced_close(self) -> list[int]:
        """The tokens that close the think block."""

    def finish(self, reason: FinishReason) -> list[Event]:
        """Flush what is held back."""

    def finish_reason(self, default: FinishReason) -> FinishReason:
        """The reason to report."""


class Session:
    """One request from submission to its last event.

    `limit` is the number of tokens it may emit (its `max_tokens`, clamped to the room in the context). `reserve` of
    them are kept for what must follow the think block, which is closed in time.
    `forced` holds token ids that must be fed next instead of sampled ones (the end of an exhausted think block).
    """

    def __init__(
        self,
        handle: RequestHandle,
        prompt: Prompt,
        machine: OutputMachine,
        *,
        limit: int,
        seed: int | None = None,
        reserve: int = 0,
    ) -> None:
        self.handle = handle
        self.request = handle.request
        self.prompt = prompt
        self.limit = limit
        self.seed = seed
        self.completion_tokens = 0
        self.cached_tokens = self.known_tokens = 0
        self.forced: list[int] = []
        self.outcome: FinishReason | None = None
        self._machine = machine
        budget = self.request.thinking_budget
        if reserve:
            budget = min(limit if budget is None else budget, max(1, limit - reserve))
        self._thinking_budget = budget
        self._drafted = self._accepted = self._rounds = 0
        self._by_position: list[int] = []
        self._submitted = time.monotonic()
        self._started = self._first = self._last = 0.0
        timeout = self.request.timeout
        self.deadline = None if timeout is None else self._submitted + timeout
        handle.prompt_tokens = len(prompt.token_ids)

    @property
    def room(self) -> int:
        """How many more tokens may be emitted."""
        return self.limit - self.completion_tokens

    @property
    def guided(self) -> bool:
        """Whether a thinking budget may force tokens."""
        return self._thinking_budget is not None

    @property
    def burst(self) -> int | None:
        """How many tokens may come at once before the think block must be closed; None: any number."""
        if self._thinking_budget is None or not self._machine.in_reasoning:
            return None
        return self._thinking_budget - self._machine.reasoning_tokens

    @property
    def end_ids(self) -> Sequence[int]:
        """Ids that end the output, ascending."""
        return sorted(self._machine.ends)

    @property
    def ended(self) -> bool:
        """Whether the last event, or the error, has been handed over; `outcome` says which ("error" for errors)."""
        return self.outcome is not None

    @property
    def started(self) -> bool:
        """Whether the request has left the queue."""
        return self._started > 0.0

    def start(self) -> None:
        """The request leaves the queue and its prompt is read."""
        self._started = time.monotonic()

    def deliver(
        self,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        *,
        drafted: int | None = None,
        accepted: int | None = None,
    ) -> int:
        """Take a burst of tokens; returns how many were kept. Fewer than given: the rest must be forgotten.

        `drafted` is the number of drafts judged in this round (None: not a decode round, e.g. forced tokens);
        the first `accepted` tokens of a round, by default all but the last, are accepted drafts. Events reach the
        handle before this returns.
        """
        events: list[Event] = []
        kept = self._feed(ids[: self.room], logprobs, events)
        self.completion_tokens += kept
        now = time.monotonic()
        self._first = self._first or now
        self._last = now
        if drafted is not None:
            self._count_round(drafted, min(len(ids) - 1 if accepted is None else accepted, kept))
        if self.ended:  # from outside, while the device worked
            return kept
        if self._machine.stopped:
            self._end("stop", events)
        elif self.completion_tokens >= self.limit:
            self._end("length", events)
        self.handle.push(events)
        return kept

    def _feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None, events: list[Event]) -> int:
        """Feed the machine, cutting where the thinking budget is used up; returns the number of tokens kept."""
        machine, budget = self._machine, self._thinking_budget
        head = len(ids)
        if budget is not None and machine.in_reasoning and not self.forced:
            head = min(head, budget - machine.reasoning_tokens)
        self.forced = []
        kept = 0
        if head:
            events += machine.feed(ids[:head], logprobs[:head] if logprobs else None)
            kept = machine.kept
        if machine.stopped or kept < head:
            return kept
        if budget is not None and machine.in_reasoning and machine.reasoning_tokens >= budget:
            self.forced = machine.forced_close()
        elif head < len(ids):
            events += machine.feed(ids[head:], logprobs[head:] if logprobs else None)
            kept += machine.kept
        return kept

    def _count_round(self, drafted: int, accepted: int) -> None:
        self._rounds += 1
        self._drafted += drafted
        self._accepted += accepted
        self._by_position += [0] * (drafted - len(self._by_position))
        for i in range(accepted):
            self._by_position[i] += 1

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            prompt_tokens=len(self.prompt.token_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            reasoning_tokens=self._machine.reasoning_tokens,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            rounds=self._rounds,
            accepted_by_position=tuple(self._by_position),
            media_tokens=sum(stop - start for item in self.prompt.media for start, stop in item.spans),
            known_tokens=self.known_tokens,
        )

    @property
    def timings(self) -> Timings:
        """The times so far."""
        started = self._started or time.monotonic()
        first = self._first or started
        return Timings(
            queue=started - self._submitted,
            prefill=first - started,
            decode=max(0.0, self._last - first),
            first_token=first - self._submitted if self._first else 0.0,
        )

    def finish(self, reason: FinishReason) -> None:
        """End the request with its text so far flushed, then `Finish`. Does nothing after the end."""
        if not self.ended:
            events: list[Event] = []
            self._end(reason, events)
            self.handle.push(events)

    def fail(self, error: BaseException) -> None:
        """End the request with an error. Does nothing after the end."""
        if not self.ended:
            self.outcome = "error"
            self.handle.fail(error)

    def expire(self) -> None:
        """End the request since its own deadline has passed."""
        timeout, tokens = self.request.timeout, self.completion_tokens
        self.fail(RequestTimeoutError(f"the request's timeout of {timeout} s passed after {tokens} tokens"))

    def expired(self, now: float) -> bool:
        """Whether the deadline lies before `now` (of `time.monotonic`)."""
        return self.deadline is not None and now >= self.deadline

    def _end(self, reason: FinishReason, events: list[Event]) -> None:
        machine = self._machine
        events += machine.finish(reason)
        final = self.outcome = reason if reason == "cancelled" else machine.finish_reason(reason)
        events.append(Finish(final, self.usage, self.timings, machine.stop_sequence, self.seed))
