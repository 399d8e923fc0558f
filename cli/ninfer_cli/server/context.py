"""What all handlers share: the engine and its names, settings, fairness between clients, and the per-request record."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest

from ninfer_core.errors import EngineBusyError, ModelNotFoundError, NinferError
from ninfer_core.types import Request, Usage

from ..presets import Preset, PresetFile
from .durations import parse_duration
from .errors import Fault, HttpError, fault_of
from .host import ModelHost, lookup
from .settings import ServerSettings
from .wire import wait_for_disconnect

if TYPE_CHECKING:
    from ninfer_core.store import ModelEntry

    from .card import ModelCard
    from .generation import Generation
    from .media import MediaReader
    from .metrics import Metrics
    from .openai_responses import ResponseStore
    from .pulls import Pulls
    from .requestlog import RequestLog

logger = logging.getLogger("ninfer.server")
_FOREIGN_PREFIXES = ("claude-", "gpt-")


@dataclass(slots=True)
class RequestRecord:
    """What the log and the metrics say about one HTTP request; times from `time.monotonic`."""

    request_id: str
    client: str
    method: str
    path: str
    arrived: float = field(default_factory=time.monotonic)
    submitted: float | None = None
    first_event: float | None = None
    last_event: float | None = None
    model: str | None = None
    stream: bool | None = None
    prompt_tokens: int | None = None
    usage: Usage | None = None
    finish_reasons: list[str] = field(default_factory=list)
    outcome: str | None = None
    error: Fault | None = None
    dropped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    load_seconds: float = 0.0

    def output_seen(self, metrics: Metrics) -> None:
        """Note that output has come, and the gap since the output before."""
        now = time.monotonic()
        if self.first_event is None or self.last_event is None:
            self.first_event = now
            metrics.first_token(now - self.arrived)
        else:
            metrics.token_gap(now - self.last_event)
        self.last_event = now

    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.arrived

    def fail(self, error: BaseException) -> None:
        """Note the failure."""
        self.error = fault_of(error)


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the fair order: `priority` goes into the engine's request, `waits` tells whether it still waits."""

    client: str
    priority: int
    waits: Callable[[], bool] = lambda: True


class Fairness:
    """Start-time fair order between clients, expressed as the engine's priorities, and the bound on all of them.

    A client's priorities grow with each of its requests; a client without any starts beside the first in the queue.
    So a backlog delays another client's first request by one place at most, nobody starves, and one client alone is
    served first in, first out.
    """

    def __init__(self, limit: int, per_client: int | None = None) -> None:
        self.limit, self.per_client = limit, per_client
        self._lock = threading.Lock()
        self._active: list[Ticket] = []

    def enter(self, client: str) -> Ticket:
        """A place for a new request.

        Raises:
            EngineBusyError: `limit` requests are already in flight.
            HttpError: 429, the client has as many as one client may have.
        """
        with self._lock:
            own_requests = sum(ticket.client == client for ticket in self._active)
            if self.per_client is not None and own_requests >= self.per_client:
                raise HttpError(
                    429, f"{own_requests} of your requests are running or waiting, which is the limit for one client",
                    code="rate_limit_exceeded", headers={"Retry-After": "1", "retry-after-ms": "1000"},
                )  # fmt: skip
            if len(self._active) >= self.limit:
                raise EngineBusyError(
                    f"{len(self._active)} requests are running or waiting, the limit is {self.limit}", retry_after=1.0
                )
            waiting = [ticket.priority for ticket in self._active if ticket.waits()]
            everybody = [ticket.priority for ticket in self._active]
            now = min(waiting) if waiting else max(everybody, default=0)
            own = max((ticket.priority + 1 for ticket in self._active if ticket.client == client), default=0)
            ticket = Ticket(client, max(now, own))
            self._active.append(ticket)
            return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request has ended."""
        with self._lock:
            if ticket in self._active:
                self._active.remove(ticket)

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return len(self._active)


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request asks for: the name to answer with, its key, the name to load it by, its keep-alive.

    `preset` is what the name stands for beside the model.
    """

    name: str
    key: str
    load_name: str
    keep_alive: float | None = None
    preset: Preset | None = None

    def filled(self, request: Request, index: int = 0) -> Request:
        """A request for this name, with what its preset adds; `index` is its choice's. Twice is the same as once."""
        return request if self.preset is None else self.preset.fill(request, index)


@dataclass(slots=True)
class Server:
    """One running server."""

    host: ModelHost
    settings: ServerSettings
    metrics: Metrics
    log: RequestLog
    store: ResponseStore
    media: MediaReader
    fairness: Fairness
    pulls: Pulls
    presets: PresetFile
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="ninfer-http"))
    started: float = field(default_factory=time.time)
    stopping: bool = False
    aliases: dict[str, None] = field(default_factory=dict)
    active: set[Generation] = field(default_factory=set)

    @property
    def engine(self) -> Any:
        """The loaded engine; a request that uses it holds a lease from `use`."""
        return self.host.engine

    @property
    def card(self) -> ModelCard:
        """What is said about the model that is loaded, or was last."""
        return self.host.last.card

    async def use(self, http: HttpRequest, asked: str | None, keep_alive: float | str | None = None) -> Target:
        """Have the model that a request asks for loaded until the request ends.

        The request body must have been read. `keep_alive` is how long the model stays afterwards.

        Raises:
            ModelNotFoundError: neither a served or installed name nor one that stands for "the default model".
            EngineBusyError: too many wait for a switch, or it takes too long.
            ClientGoneError: the client left while waiting.
        """
        target = await self.target(http, asked, keep_alive)
        await self.lease(http, target)
        return target

    async def target(self, http: HttpRequest, asked: str | None, keep_alive: float | str | None = None) -> Target:
        """The first half of `use`: which model is meant."""
        seconds = None if keep_alive is None else parse_duration(keep_alive)
        known, preset = self.known_name(asked), self.presets.get(asked)
        if known is not None:
            target = Target(known, self.host.last.key, self.host.last.names[0], seconds, preset)
        else:
            entry = await self.find(asked or "")
            if entry is None:
                raise self.not_found(asked or "")
            target = Target(asked or entry.name, str(entry.path), entry.name, seconds, preset)
        http.scope["state"]["record"].model = target.name
        return target

    async def lease(self, http: HttpRequest, target: Target, *, watch: bool = True) -> None:
        """The second half of `use`: wait until it is loaded. `watch` False: somebody else watches the client."""
        gone = (lambda: wait_for_disconnect(http.receive)) if watch else None
        lease = await self.host.acquire(target.key, target.load_name, target.keep_alive, gone)
        http.scope["state"]["record"].load_seconds = lease.waited
        http.scope["state"]["lease"] = lease

    def known_name(self, asked: str | None) -> str | None:
        """The name to answer with if the model that is loaded (or was last) is meant; reads no disk."""
        names = self.names
        if not asked:
            return names[0]
        preset = self.presets.get(asked)
        if preset is not None:
            return asked if normal_name(preset.model) in map(normal_name, names) else None
        if asked in names or normal_name(asked) in {normal_name(name) for name in names}:
            return asked
        if not self.settings.strict_models and asked.lower().startswith(_FOREIGN_PREFIXES):
            return asked
        return None

    def not_found(self, asked: str) -> ModelNotFoundError:
        """The error for a name that nothing has."""
        return ModelNotFoundError(
            f"model {asked[:200]!r} not found, try pulling it first; this server has {', '.join(self.names)}",
            param="model",
        )

    async def find(self, asked: str) -> ModelEntry | None:
        """The installed model of a name, loaded or not; of a preset's name its model."""
        if not self.host.switches or not asked:
            return None
        preset = self.presets.get(asked)
        wanted = asked if preset is None else preset.model
        return lookup(await asyncio.to_thread(self.host.installed), wanted, normal_name)

    async def listed(self) -> list[tuple[str, ModelCard]]:
        """All names that can be asked for with their cards: the loaded model's, what is installed, the presets."""
        out = [(name, self.card) for name in self.names]
        seen = {normal_name(name) for name in self.names}
        for entry in await asyncio.to_thread(self.host.installed):
            if normal_name(entry.name) in seen:
                continue
            try:
                out.append((entry.name, await asyncio.to_thread(self.host.card_of, entry)))
            except NinferError as error:
                logger.warning("%s is installed, but cannot be described: %s", entry.name, error)
        cards = {normal_name(name): card for name, card in out}
        for preset in self.presets.all().values():
            if normal_name(preset.model) in cards:
                out.append((preset.name, cards[normal_name(preset.model)]))
        return out

    async def describe(self, asked: str) -> tuple[str, ModelCard]:
        """The name and card of one model, which need not be loaded.

        Raises:
            ModelNotFoundError: there is none of that name.
        """
        known = self.known_name(asked)
        if known is not None:
            return known, self.card
        entry = await self.find(asked)
        if entry is None:
            raise self.not_found(asked)
        return asked, await asyncio.to_thread(self.host.card_of, entry)

    @property
    def names(self) -> list[str]:
        """Names of the loaded model, the main one first, then what clients added as copies."""
        return [*self.host.names_of_loaded(), *self.aliases]

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """The text of a raw prompt."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(list(prompt)))

    def count_tokens(self, request: Request) -> int:
        """Prompt tokens of a request, as its later usage has them; images are fetched for that."""
        return int(self.engine.count_tokens(self.media.fetch(request, self.card.vision)))

    def stop_generations(self) -> None:
        """Cancel everything that runs: its clients get an error event, not a stream that just stops."""
        self.stopping = True
        for generation in list(self.active):
            generation.cancel()

    @property
    def template(self) -> str:
        """The chat template's source."""
        return self.card.template

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: `encode`, `decode`, `token_bytes`."""
        return self.engine.frontend.tokenizer


def normal_name(name: str) -> str:
    """A model name without case, publisher, `:latest`, and with the colon form's separator unified."""
    name = name.strip().lower().removesuffix(":latest")
    return name.rpartition("/")[2].replace(":", "-")
