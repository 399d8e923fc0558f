"""One HTTP request's generations: submitted off the event loop, merged into one stream, cancelled with the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.requests import Request as HttpRequest

from ninfer_core.errors import EngineBusyError, RequestCancelledError
from ninfer_core.types import Completion, Event, Finish, FinishReason, Request, TextDelta, Usage, completion_from_events

from .body import ClientGoneError
from .context import RequestRecord, Server, Ticket
from .wire import wait_for_disconnect

_BATCH = 256
"""Events that are handed on before others get their turn."""


class Handle(Protocol):
    """The part of an engine's request handle that the server uses."""

    prompt_tokens: int

    @property
    def queue_position(self) -> int | None:
        """How many requests are ahead; None once it runs."""

    def abatches(self) -> AsyncGenerator[list[Event], None]:
        """All events of the request, as many at a time as have come; left early, it cancels the request."""

    def cancel(self) -> None:
        """End the request early."""


@dataclass(slots=True, eq=False)
class Generation:
    """Running requests of one HTTP call; `handles[i]` is choice i, `choices` of them share one prompt."""

    server: Server
    record: RequestRecord
    handles: list[Handle]
    ticket: Ticket
    choices: int | None = None
    finishes: dict[int, Finish] = field(default_factory=dict)
    closed: bool = False
    overdue: EngineBusyError | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; choices of one prompt share it and count it once."""
        return self.handles[0].prompt_tokens

    async def batches(self) -> AsyncGenerator[list[tuple[int, Event]], None]:
        """Events of all choices as they come, in batches; ends when every choice has ended.

        Raises:
            NinferError: whatever ended one of the choices; the others are cancelled.
        """
        limit = self.server.settings.queue_timeout
        timer = None if limit is None else asyncio.get_running_loop().call_later(limit, self._end_waiting, limit)
        source = _batches(0, self.handles[0]) if len(self.handles) == 1 else _merged(self.handles)
        try:
            async with contextlib.aclosing(source) as batches:
                async for batch in batches:
                    if self.overdue is not None:
                        raise self.overdue
                    for index, event in batch:
                        if isinstance(event, Finish):
                            self.finishes[index] = event
                    self.record.output_seen(self.server.metrics)
                    yield batch
        finally:
            if timer is not None:
                timer.cancel()

    def _end_waiting(self, limit: float) -> None:
        """The queue-time limit has passed: whoever still waits is withdrawn, and so are its fellow choices."""
        if any(handle.queue_position is not None for handle in self.handles):
            self.overdue = EngineBusyError(f"the request waited {limit:g} s in the queue, which is the limit")
            self.cancel()

    def cancel(self) -> None:
        """Ask the engine to end all choices."""
        for handle in self.handles:
            handle.cancel()

    def close(self, reason: str) -> None:
        """Cancel what still runs and account for the request; the first call counts."""
        if self.closed:
            return
        self.closed = True
        self.cancel()
        self.server.active.discard(self)
        self.server.fairness.leave(self.ticket)
        self.record.outcome = reason
        ends = in_order(self.finishes)
        self.record.usage = merged_usage(ends, self.choices)
        self.record.finish_reasons = [end.reason for end in ends]
        self.server.metrics.generation_ended(self.record, ends, reason)


async def _batches(index: int, handle: Handle) -> AsyncGenerator[list[tuple[int, Event]], None]:
    """The events of choice `index`. A backlog never makes this wait, so others get their turn between batches."""
    taken = 0
    async with contextlib.aclosing(handle.abatches()) as groups:
        async for events in groups:
            for at in range(0, len(events), _BATCH):
                batch = [(index, event) for event in events[at : at + _BATCH]]
                taken += len(batch)
                if taken >= _BATCH:
                    taken = 0
                    await asyncio.sleep(0)
                yield batch


async def _merged(handles: Sequence[Handle]) -> AsyncGenerator[list[tuple[int, Event]], None]:
    """The events of several choices as they come."""
    queue: asyncio.Queue[list[tuple[int, Event]] | Exception | None] = asyncio.Queue()

    async def pump(index: int, handle: Handle) -> None:
        try:
            async for batch in _batches(index, handle):
                queue.put_nowait(batch)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(i, handle)) for i, handle in enumerate(handles)]
    left = len(tasks)
    try:
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def merged_usage(finished: Iterable[Finish | Completion], choices: int | None = None) -> Usage:
    """Usage over several generations in index order: everything made is summed, a prompt counts once for its choices.

    `choices` is the number of generations per prompt; None means that all share one prompt.
    """
    items = [item.usage for item in finished]
    prompts = items[:: choices or max(1, len(items))]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in items),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in items),
        drafted_tokens=sum(usage.drafted_tokens for usage in items),
        accepted_tokens=sum(usage.accepted_tokens for usage in items),
        rounds=sum(usage.rounds for usage in items),
        media_tokens=sum(usage.media_tokens for usage in prompts),
        known_tokens=sum(usage.known_tokens for usage in prompts),
    )


def in_order(finishes: dict[int, Finish]) -> list[Finish]:
    """The ends of all choices by index."""
    return [finishes[index] for index in sorted(finishes)]


async def start(
    server: Server, http: HttpRequest, requests: Sequence[Request], choices: int | None = None
) -> Generation:
    """Validate and queue requests; nothing has been sent to the client yet, so errors keep their own status.

    Templating and tokenising run in a thread: a long prompt must not hold up other streams.
    """
    record: RequestRecord = http.scope["state"]["record"]
    ticket = server.fairness.enter(record.client)
    timeout = server.settings.request_timeout
    queued = [replace(request, priority=ticket.priority, timeout=request.timeout or timeout) for request in requests]

    def submit() -> list[Handle]:
        handles: list[Handle] = []
        try:
            for request in queued:
                handles.append(server.engine.submit(server.media.fetch(request, server.card.vision)))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    work = asyncio.get_running_loop().run_in_executor(server.workers, submit)
    try:
        handles = await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_cancel_submitted)
        server.fairness.leave(ticket)
        raise
    except BaseException:
        server.fairness.leave(ticket)
        raise
    ticket.waits = lambda: any(handle.queue_position is not None for handle in handles)
    record.prompt_tokens = handles[0].prompt_tokens
    record.submitted = time.monotonic()
    generation = Generation(server, record, handles, ticket, choices)
    server.active.add(generation)
    server.metrics.generation_started(generation)
    return generation


def _cancel_submitted(work: asyncio.Future[list[Handle]]) -> None:
    if not work.cancelled() and work.exception() is None:
        for handle in work.result():
            handle.cancel()


async def collect(http: HttpRequest, generation: Generation) -> list[Completion]:
    """The completions of all choices; a client that leaves meanwhile cancels them.

    Raises:
        ClientGoneError: the client left.
    """
    events: list[list[Event]] = [[] for _ in generation.handles]

    async def read() -> None:
        async for batch in generation.batches():
            for index, event in batch:
                events[index].append(event)

    reader = asyncio.ensure_future(read())
    watcher = asyncio.ensure_future(wait_for_disconnect(http.receive))
    reason = "error"
    try:
        await asyncio.wait({reader, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            reason = "disconnect"
            raise ClientGoneError
        reader.result()
        for finish in generation.finishes.values():
            raise_if_stopped(finish.reason)
        reason = "done"
        return [_completion(items) for items in events]
    finally:
        for task in (reader, watcher):
            task.cancel()
        await asyncio.gather(reader, watcher, return_exceptions=True)
        generation.close(reason)


def _completion(events: Sequence[Event]) -> Completion:
    """The completion with the log-probabilities of the answer alone, as the APIs define them."""
    answer = tuple(item for event in events if isinstance(event, TextDelta) for item in event.logprobs)
    return replace(completion_from_events(events), logprobs=answer)


class Encoder(Protocol):
    """Turns one request's events into one API's stream."""

    @property
    def media_type(self) -> str:
        """The stream's content type."""

    @property
    def heartbeat(self) -> bytes:
        """What goes out after a silent interval."""

    def start(self) -> bytes:
        """What goes out before the prompt is read."""

    def event(self, index: int, event: Event) -> bytes:
        """The bytes of one event of choice `index`."""

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """The close of a complete stream."""

    def error(self, error: BaseException) -> bytes:
        """The close of a stream that failed."""


@dataclass(slots=True)
class EncodedStream:
    """A generation played through an encoder: the source of a `StreamResponse`."""

    generation: Generation
    encoder: Encoder

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Encoded batches, then the closing block; a failure becomes the API's own error event."""
        record = self.generation.record
        try:
            async with contextlib.aclosing(self.generation.batches()) as batches:
                async for batch in batches:
                    yield b"".join([self.encoder.event(index, event) for index, event in batch])
            for finish in self.generation.finishes.values():
                raise_if_stopped(finish.reason)
            last = self.encoder.end(self.generation.finishes)
        except Exception as error:
            record.fail(error)
            last = self.encoder.error(error)
        yield last

    def close(self, reason: str) -> None:
        """End the generation; a failure that was told to the client stays an error in the log."""
        self.generation.close("error" if self.generation.record.error and reason == "done" else reason)


def raise_if_stopped(reason: FinishReason) -> None:
    """A request that the engine ended by itself (shutdown, operator) is a failure for its client, never a success."""
    if reason in ("cancelled", "error"):
        raise RequestCancelledError("the server stopped this request before it was complete; send it again")
