"""The server process: an application that says "loading" until the model is there, and a uvicorn that ends in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ninfer_core.errors import EngineBusyError
from ninfer_core.store import ModelEntry

from . import host as hosting
from . import page
from .app import build_app
from .errors import body_of, dialect_of, fault_of, status_of
from .host import ModelHost, loaded
from .security import HEALTH_PATHS, OPEN_PATHS, ApiKeys, HostGuard
from .settings import ServerSettings
from .wire import JsonResponse

HEADER_LIMIT = 64 << 10


class Models(hosting.Models, Protocol):
    """Where engines come from, and which model a name means at the start."""

    def find(self, name: str) -> ModelEntry:
        """The installed model; an empty name is the one to serve when none was named."""


class Boot:
    """An ASGI application in front of the real one, which exists once the model is loaded."""

    def __init__(self, settings: ServerSettings, models: Models, model: str) -> None:
        self.settings, self.models, self.model = settings, models, model
        self.error: Exception | None = None
        self.host: ModelHost | None = None
        self.app: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def load(self, stop: Callable[[], None]) -> None:
        """Load the model and take requests; `stop` ends the server if that fails."""
        try:
            entry = self.models.find(self.model)
            first = loaded(self.models.load(str(entry.path)), str(entry.path), entry.path, entry.name)
            self.host = ModelHost(self.settings, first, self.models)
            self.app = build_app(self.host, self.settings)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.host.touch)
        except Exception as error:
            self.error = error
            stop()

    def close(self) -> None:
        """Close the log and the engine."""
        if self.app is not None:
            self.app.state.server.pulls.stop()
            self.app.state.server.log.close()
        if self.host is not None:
            self.host.close()

    def stop_generations(self) -> None:
        """Cancel everything that runs."""
        if self.app is not None:
            self.app.state.server.stop_generations()

    @property
    def busy(self) -> bool:
        """Whether requests run."""
        return self.app is not None and bool(self.app.state.server.fairness.in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand over to the application, or answer that the model is loading."""
        if scope["type"] == "lifespan":
            self._loop = asyncio.get_running_loop()
            await _lifespan(receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._loading(scope, receive, send)

    async def _loading(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] in HEALTH_PATHS:
                body = {"status": "loading", "error": {"code": 503, "message": "Loading model"}}
                await JsonResponse(body, status_code=503, headers={"Retry-After": "2"})(scope, receive, send)
                return
            guards: ASGIApp = HostGuard(ApiKeys(_refuse_loading, self.settings), self.settings)
            await guards(scope, receive, send)
        except Exception as error:
            fault = fault_of(error)
            dialect = dialect_of(scope["path"], Headers(scope=scope))
            answer = JsonResponse(
                body_of(fault, dialect, "loading"), status_code=status_of(fault, dialect), headers=fault.headers
            )
            await answer(scope, receive, send)


async def _refuse_loading(scope: Scope, receive: Receive, send: Send) -> None:
    page_answer = page.answer_for(scope)
    if page_answer is not None:
        await page_answer(scope, receive, send)
        return
    if scope["path"] in OPEN_PATHS:
        await JsonResponse({"status": "loading"})(scope, receive, send)
        return
    raise EngineBusyError("the model is still loading; try again shortly", retry_after=2.0)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


class Connection(H11Protocol):
    """uvicorn's connection, closed when the head of a request takes longer than an idle connection may stay open."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._watch(True)

    def data_received(self, data: bytes) -> None:
        """Wait on while a head has begun; the silence between requests is uvicorn's own matter."""
        super().data_received(data)
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun or self._head is None:
            self._watch(begun)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to wait for."""
        self._watch(False)
        super().connection_lost(exc)

    def _watch(self, begun: bool) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(self.timeout_keep_alive, self.transport.close) if begun else None


def config_of(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """How uvicorn serves an application: limits and times."""
    return uvicorn.Config(
        app,
        # The other parser that uvicorn would take where it is installed has no limit for headers.
        http=Connection,
        log_level="warning",
        lifespan="on",
        timeout_keep_alive=settings.keep_alive,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace) + 2),
        h11_max_incomplete_event_size=HEADER_LIMIT,
        server_header=False,
        access_log=False,
    )


class GracefulServer(uvicorn.Server):
    """Stops accepting on a signal, lets requests end for the grace period, then ends them with an error event."""

    def __init__(self, boot: Boot, settings: ServerSettings) -> None:
        self._boot = boot
        self._grace = settings.shutdown_grace
        super().__init__(config_of(boot, settings))

    def stop(self) -> None:
        """End as after a signal."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, with the grace period inside."""
        ending = asyncio.ensure_future(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        end = asyncio.get_running_loop().time() + self._grace
        while self._boot.busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        self._boot.stop_generations()
