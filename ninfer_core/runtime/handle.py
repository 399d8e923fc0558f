"""The handle of one submitted request: events in, sync and async iteration out. Imports neither torch nor the model.

One thread (the engine's loop) writes, any number of threads and event loops read. Events are kept, so every iterator
sees the whole stream from its start; a batch of events costs one wake-up.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType

from ..errors import RequestCancelledError
from ..types import Completion, Event, Finish, Request, completion_from_events


class RequestHandle:
    """One running request: an event stream with an end, which is a `Finish` event or an error.

    Iterate it (`for event in handle`, `async for event in handle`) or ask for the whole (`result`, `aresult`).
    Leaving an iteration before its end cancels the request, and so does leaving a `with` block.
    A cancelled request ends with `Finish(reason="cancelled")`; a failed one raises its error after the events so far.
    """

    def __init__(
        self,
        request: Request,
        *,
        on_cancel: Callable[[RequestHandle], None] | None = None,
        position: Callable[[RequestHandle], int | None] | None = None,
    ) -> None:
        self.id = "req-" + uuid.uuid4().hex[:24]
        self.request = request
        self.prompt_tokens = 0
        self._events: list[Event] = []
        self._error: BaseException | None = None
        self._done = False
        self._cancelled = False
        self._position = position
        self._on_cancel = on_cancel
        lock = threading.RLock()
        self._condition = threading.Condition(lock)
        self._ended = threading.Condition(lock)  # whoever wants the whole is not woken by every part
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    # reading

    @property
    def done(self) -> bool:
        """Whether the stream has ended (finished, failed or cancelled)."""
        return self._done

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called before the request ended."""
        return self._cancelled

    @property
    def error(self) -> BaseException | None:
        """The error that ended the request, if one did."""
        return self._error

    @property
    def queue_position(self) -> int | None:
        """How many requests are ahead of this waiting one; None once it runs or has ended."""
        return None if self._done or self._position is None else self._position(self)

    def __iter__(self) -> EventIterator:
        return EventIterator(self)

    def __aiter__(self) -> AsyncEventIterator:
        return AsyncEventIterator(self)

    def batches(self) -> Iterator[list[Event]]:
        """The events in groups: whatever has arrived since the last group. Leaving it early cancels the request."""
        cursor = 0
        try:
            while self._next(cursor) is not None:
                batch = self._events[cursor:]
                cursor += len(batch)
                yield batch
        finally:
            self.cancel()

    async def abatches(self) -> AsyncGenerator[list[Event], None]:
        """`batches` for coroutines."""
        cursor = 0
        try:
            while await self._anext(cursor) is not None:
                batch = self._events[cursor:]
                cursor += len(batch)
                yield batch
        finally:
            self.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the request has ended; False if `timeout` seconds passed first. Does not cancel."""
        with self._ended:
            return self._ended.wait_for(lambda: self._done, timeout)

    def result(self, timeout: float | None = None) -> Completion:
        """Block for the whole completion.

        Raises:
            RequestCancelledError: the request was cancelled.
            TimeoutError: `timeout` seconds passed; the request goes on.
            NinferError: what ended the request.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the request did not end within {timeout} s; it goes on, or call cancel()")
        return self._completion()

    async def aresult(self) -> Completion:
        """`result` for coroutines; cancelling the awaiting task cancels the request."""
        async for _ in self:
            pass
        return self._completion()

    def cancel(self) -> None:
        """End the request at the next round or prompt chunk. Idempotent; does nothing after the end."""
        with self._condition:
            if self._done or self._cancelled:
                return
            self._cancelled = True
        if self._on_cancel is not None:
            self._on_cancel(self)

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cancel()

    def _completion(self) -> Completion:
        if self._error is not None:
            raise self._error
        completion = completion_from_events(self._events)
        if completion.finish_reason == "cancelled":
            raise RequestCancelledError(
                f"request {self.id} was cancelled after {completion.usage.completion_tokens} tokens"
            )
        return completion

    # writing: the engine's side

    def push(self, events: Sequence[Event]) -> None:
        """Append events (engine side). A `Finish` ends the stream; nothing may follow it."""
        if events:
            self._update(events, None, isinstance(events[-1], Finish))

    def fail(self, error: BaseException) -> None:
        """End the stream with an error (engine side)."""
        self._update((), error, True)

    def _update(self, events: Sequence[Event], error: BaseException | None, done: bool) -> None:
        with self._condition:
            if self._done:
                return
            self._events.extend(events)
            self._error = error
            self._done = done
            waiters, self._waiters = self._waiters, []
            self._condition.notify_all()
            if done:
                self._ended.notify_all()
        for loop, future in waiters:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the reader's event loop is closed: nobody will read on
                self.cancel()

    def _next(self, cursor: int) -> Event | None:
        """The event at `cursor`, None at the end; blocks for it."""
        if cursor < len(self._events):
            return self._events[cursor]
        with self._condition:
            self._condition.wait_for(lambda: cursor < len(self._events) or self._done)
            return self._peek(cursor)

    def _peek(self, cursor: int) -> Event | None:
        if cursor < len(self._events):
            return self._events[cursor]
        if self._error is not None:
            raise self._error
        return None

    async def _anext(self, cursor: int) -> Event | None:
        while cursor >= len(self._events):
            loop = asyncio.get_running_loop()
            with self._condition:
                if cursor < len(self._events) or self._done:
                    break
                future: asyncio.Future[None] = loop.create_future()
                self._waiters.append((loop, future))
            await future
        return self._peek(cursor)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class EventIterator(Iterator[Event]):
    """Blocking iteration over a request's events; closed or dropped before the end, it cancels the request."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._cursor = 0

    def __next__(self) -> Event:
        try:
            event = self._handle._next(self._cursor)
        except KeyboardInterrupt:
            self.close()
            raise
        if event is None:
            raise StopIteration
        self._cursor += 1
        return event

    def close(self) -> None:
        """Stop reading: cancels the request if it still runs."""
        self._handle.cancel()

    def __del__(self) -> None:
        self._handle.cancel()


class AsyncEventIterator(AsyncIterator[Event]):
    """Awaiting iteration over a request's events; dropped, closed or cancelled before the end, it cancels the request.

    Works from any event loop; several loops may read one request.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._cursor = 0

    async def __anext__(self) -> Event:
        try:
            event = await self._handle._anext(self._cursor)
        except asyncio.CancelledError:
            self._handle.cancel()
            raise
        if event is None:
            raise StopAsyncIteration
        self._cursor += 1
        return event

    async def aclose(self) -> None:
        """Stop reading: cancels the request if it still runs."""
        self._handle.cancel()

    def __del__(self) -> None:
        self._handle.cancel()
