"""What all handlers share: the engine and its names, settings, fairness between clients, and the per-request record."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ninfer_core.errors import EngineBusyError, ModelNotFoundError
from ninfer_core.types import Usage

from .errors import Fault, fault_of
from .settings import ServerSettings

if TYPE_CHECKING:
    from .generation import Generation
    from .media import MediaReader
    from .metrics import Metrics
    from .models import ModelCard
    from .openai_responses import ResponseStore
    from .requestlog import RequestLog

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

    def token_seen(self, metrics: Metrics) -> None:
        """Note an output event and the gap since the one before."""
        now = time.monotonic()
        if self.first_event is None:
            self.first_event = now
            metrics.first_token(now - self.arrived)
        elif self.last_event is not None and now > self.last_event:
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

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._active: list[Ticket] = []

    def enter(self, client: str) -> Ticket:
        """A place for a new request.

        Raises:
            EngineBusyError: `limit` requests are already in flight.
        """
        with self._lock:
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


@dataclass(slots=True)
class Server:
    """One running server."""

    engine: Any
    settings: ServerSettings
    metrics: Metrics
    log: RequestLog
    card: ModelCard
    store: ResponseStore
    media: MediaReader
    fairness: Fairness
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="ninfer-http"))
    started: float = field(default_factory=time.time)
    stopping: bool = False
    aliases: dict[str, None] = field(default_factory=dict)
    active: set[Generation] = field(default_factory=set)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with for the `model` field of a request.

        Raises:
            ModelNotFoundError: neither a served name nor one that stands for "the default model".
        """
        names = self.names
        if not asked:
            return str(names[0])
        if asked in names:
            return asked
        wanted = normal_name(asked)
        for name in names:
            if normal_name(name) == wanted:
                return asked
        if not self.settings.strict_models and asked.lower().startswith(_FOREIGN_PREFIXES):
            return asked
        raise ModelNotFoundError(
            f"model {asked!r} not found, try pulling it first; this server has {', '.join(names)}", param="model"
        )

    @property
    def names(self) -> list[str]:
        """Served names, the main one first, then what clients added as copies."""
        return [*map(str, self.engine.served_names), *self.aliases]

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """The text of a raw prompt."""
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(list(prompt)))

    def stop_generations(self) -> None:
        """Cancel everything that runs: its clients get an error event, not a stream that just stops."""
        self.stopping = True
        for generation in list(self.active):
            generation.cancel()

    @property
    def template(self) -> str:
        """The chat template's source."""
        return str(self.engine.frontend.template.source)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: `encode`, `decode`, `token_bytes`."""
        return self.engine.frontend.tokenizer


def normal_name(name: str) -> str:
    """A model name without case, publisher, `:latest`, and with the colon form's separator unified."""
    name = name.strip().lower().removesuffix(":latest")
    return name.rpartition("/")[2].replace(":", "-")
