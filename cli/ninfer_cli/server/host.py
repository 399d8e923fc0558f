"""`ModelHost`: which model is loaded. One at a time; requests for another one wait for those before them, then switch.

All of it runs on the server's event loop, except loading and closing an engine, which have a thread. A request holds
a `Lease` from before its prompt is rendered until its answer is complete, so no engine is ever closed under it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ninfer_core import store
from ninfer_core.errors import EngineBusyError, ModelNotFoundError

from .body import ClientGoneError
from .card import ModelCard
from .settings import ServerSettings

logger = logging.getLogger("ninfer.server")
_POLL = 0.2


class Models(Protocol):
    """Where engines come from."""

    def load(self, path: str) -> Any:
        """A loaded engine."""

    def describe(self, path: str) -> Any:
        """The same model without its weights: names, limits, profile."""


@dataclass(slots=True, eq=False)
class Loaded:
    """A loaded model: `key` tells it from others, `names` are all it answers to, the main one first."""

    key: str
    engine: Any
    card: ModelCard
    names: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Waiter:
    key: str | None  # None: whoever waits here wants nothing to be loaded
    name: str
    done: asyncio.Future[None]


class Lease:
    """The right to use the loaded model; `waited` is how long it took to get, in seconds. Release it exactly once."""

    def __init__(self, host: ModelHost, waited: float, keep_alive: float | None) -> None:
        self._host, self.waited, self._keep_alive = host, waited, keep_alive
        self._held = True

    def release(self) -> None:
        """The request has ended."""
        if self._held:
            self._held = False
            self._host._released(self._keep_alive)


class ModelHost:
    """Loads, switches and unloads. Without `models` there is one engine for good, whose owner closes it."""

    def __init__(self, settings: ServerSettings, first: Loaded, models: Models | None = None) -> None:
        self.settings, self.models = settings, models
        self.last = first
        """What was loaded last; it tells about the model also while nothing is loaded."""
        self.current: Loaded | None = first
        self.leases = 0
        self.loading: str | None = None
        self._loading_since = 0.0
        self._keep_alive = settings.unload_after
        self._expires: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._queue: deque[_Waiter] = deque()
        self._idle = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._closed = False
        self._cards: dict[tuple[str, float], ModelCard] = {}

    @classmethod
    def fixed(cls, engine: Any, settings: ServerSettings, artifact: Path | None = None) -> ModelHost:
        """A host of one engine that is not switched or unloaded."""
        return cls(settings, loaded(engine, str(artifact or engine.served_names[0]), artifact))

    @property
    def switches(self) -> bool:
        """Whether other models can be loaded."""
        return self.models is not None

    @property
    def engine(self) -> Any:
        """The loaded engine.

        Raises:
            EngineBusyError: nothing is loaded right now.
        """
        if self.current is None:
            raise EngineBusyError("no model is loaded right now; try again shortly", retry_after=2.0)
        return self.current.engine

    @property
    def state(self) -> str:
        """`ready`, `loading`, `idle` (nothing is loaded; the next request loads), or the engine's own bad state."""
        if self.loading is not None:
            return "loading"
        return "idle" if self.current is None else str(self.current.engine.state)

    def stats(self) -> dict[str, Any]:
        """The loaded engine's figures."""
        return dict(self.current.engine.stats()) if self.current is not None else {}

    @property
    def expires(self) -> float | None:
        """When the model will be unloaded if nobody uses it, seconds since the epoch; None: never."""
        if self.leases and self._keep_alive >= 0:
            return time.time() + self._keep_alive
        return self._expires

    # leases

    async def acquire(
        self, key: str, name: str, keep_alive: float | None = None, gone: Callable[[], Awaitable[None]] | None = None
    ) -> Lease:
        """Wait until the model of `key` is loaded and it is this request's turn. `gone` ends the wait.

        Raises:
            EngineBusyError: the queue is full, or loading takes longer than the limit; loading goes on.
            NinferError: the model could not be loaded.
            ClientGoneError: `gone` came true; nothing is held.
        """
        began = time.monotonic()
        if self._free_for(key):
            self._grant()
            return Lease(self, 0.0, keep_alive)
        self._check_room()
        waiter = _Waiter(key, name, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._start_pump()
        left = asyncio.ensure_future(gone()) if gone is not None else None
        try:
            await self._wait(waiter, began, left)
        except BaseException:
            if waiter in self._queue:
                self._queue.remove(waiter)
            if waiter.done.done() and not waiter.done.cancelled() and waiter.done.exception() is None:
                self._released(None)
            raise
        finally:
            if left is not None:
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
        return Lease(self, time.monotonic() - began, keep_alive)

    def waits_for(self, key: str) -> bool:
        """Whether `acquire` would have to wait.

        Raises:
            EngineBusyError: the queue is full.
        """
        if self._free_for(key):
            return False
        self._check_room()
        return True

    def _check_room(self) -> None:
        if len(self._queue) >= self.settings.slots + self.settings.max_queue:
            raise EngineBusyError(f"{len(self._queue)} requests wait for a model to be loaded, which is the limit")

    async def _wait(self, waiter: _Waiter, began: float, left: asyncio.Future[None] | None) -> None:
        limit, queue_limit = self.settings.load_timeout, self.settings.queue_timeout
        while True:
            watched = {waiter.done} if left is None else {waiter.done, left}
            await asyncio.wait(watched, timeout=_POLL, return_when=asyncio.FIRST_COMPLETED)
            if waiter.done.done():
                return waiter.done.result()
            if left is not None and left.done():
                raise ClientGoneError
            now = time.monotonic()
            if self.loading is not None and now - max(began, self._loading_since) > limit:
                raise EngineBusyError(
                    f"loading {self.loading} takes longer than {limit:g} s (--load-timeout); it goes on, try again",
                    retry_after=10.0,
                )
            if self.loading is None and queue_limit is not None and now - began > queue_limit:
                raise EngineBusyError(f"the request waited {queue_limit:g} s for its model, which is the limit")

    def _free_for(self, key: str) -> bool:
        """The model is loaded and usable, and nobody waits for another one."""
        if not self.switches:
            return True
        return self._usable() and self.current is not None and self.current.key == key and not self._queue

    def _usable(self) -> bool:
        fine = ("ready", "restarting")  # an engine that begins anew keeps its queue
        return self.current is not None and self.loading is None and self.current.engine.state in fine

    def _grant(self) -> None:
        self.leases += 1
        self._expires = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _released(self, keep_alive: float | None) -> None:
        self.leases -= 1
        self._keep_alive = self.settings.unload_after if keep_alive is None else keep_alive
        if self.leases == 0:
            self._idle.set()
            self.touch()

    def touch(self) -> None:
        """Start the time after which an unused model is unloaded."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._expires = None
        if not self.switches or self._keep_alive < 0 or self.leases or self.current is None or self._queue:
            return
        self._expires = time.time() + self._keep_alive
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if not self.leases and not self._queue and self.current is not None:
            self._ask_to_unload()

    def _ask_to_unload(self) -> asyncio.Future[None]:
        waiter = _Waiter(None, "", asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._start_pump()
        return waiter.done

    async def unload(self, *, wait: bool = False) -> None:
        """Unload once the requests that run have ended; with `wait` return only then."""
        if not self.switches or self.current is None:
            return
        if not wait and self.leases:
            self._keep_alive = 0.0
        done = self._ask_to_unload()
        if wait:
            await done

    # switching

    def _start_pump(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._serve_queue())

    async def _serve_queue(self) -> None:
        """Serve waiters in order: everything that runs ends, the model is switched, all who want it in a row go."""
        while self._queue and not self._closed:
            head = self._queue[0]
            if not (self._usable() and self.current is not None and self.current.key == head.key):
                while self.leases:
                    self._idle.clear()
                    await self._idle.wait()
                if not self._queue or self._queue[0] is not head:
                    continue  # whoever wanted this has left meanwhile
                try:
                    await self._switch(head)
                except Exception as error:
                    self._fail(head.key, error)
                    continue
            while self._queue and self._queue[0].key == head.key:
                waiter = self._queue.popleft()
                if waiter.done.done():
                    continue
                if waiter.key is not None:
                    self._grant()
                waiter.done.set_result(None)
        if not self.leases and self.current is not None:
            self.touch()

    def _fail(self, key: str | None, error: Exception) -> None:
        while self._queue and self._queue[0].key == key:
            waiter = self._queue.popleft()
            if not waiter.done.done():
                waiter.done.set_exception(error)

    async def _switch(self, waiter: _Waiter) -> None:
        old, self.current, self._expires = self.current, None, None
        if old is not None:
            logger.info("unloading %s", old.names[0])
            await asyncio.to_thread(old.engine.close)
            del old
            gc.collect()  # tensors of the old engine must be gone before the new one asks what is free
        if waiter.key is None or self.models is None:
            return
        self.loading, self._loading_since = waiter.name, time.monotonic()
        try:
            logger.info("loading %s", waiter.name)
            models, name, key = self.models, waiter.name, waiter.key
            self.current = self.last = await asyncio.to_thread(lambda: loaded(models.load(key), key, Path(key), name))
            logger.info("%s is loaded after %.1f s", waiter.name, time.monotonic() - self._loading_since)
        finally:
            self.loading = None

    def close(self) -> None:
        """Close the engine; nobody may acquire any more."""
        self._closed = True
        current, self.current = self.current, None
        if current is not None:
            current.engine.close()

    # what can be loaded

    def names_of_loaded(self) -> list[str]:
        """All names of the model that is loaded, or was last."""
        return list(self.last.names)

    def installed(self) -> list[store.ModelEntry]:
        """What is on this machine and can be loaded; reads the disk."""
        return store.installed() if self.switches else []

    def card_of(self, entry: store.ModelEntry) -> ModelCard:
        """The card of an installed model; reads its tokenizer the first time.

        Raises:
            NinferError: the model cannot be described.
        """
        if str(entry.path) == self.last.key:
            return self.last.card
        if self.models is None:
            raise ModelNotFoundError(f"model {entry.name!r} is not served here", param="model")
        key = (str(entry.path), entry.modified)
        if key not in self._cards:
            self._cards[key] = ModelCard.of(self.models.describe(str(entry.path)), entry.path, entry.name)
        return self._cards[key]


def loaded(engine: Any, key: str, artifact: Path | None = None, name: str = "") -> Loaded:
    """A loaded engine with what is said about it; `name` is the name it was asked for by."""
    own = [str(item) for item in engine.served_names]
    names = tuple(dict.fromkeys([name, *own] if name else own))
    card = ModelCard.of(engine, artifact, names[0])
    return Loaded(key, engine, card, names)


def lookup(entries: list[store.ModelEntry], asked: str, normal: Callable[[str], str]) -> store.ModelEntry | None:
    """The installed model that a client means by `asked`."""
    wanted = store.canonical(asked)
    exact = next((entry for entry in entries if wanted in (entry.name, entry.repository.casefold())), None)
    return exact or next((entry for entry in entries if normal(entry.name) == normal(asked)), None)
