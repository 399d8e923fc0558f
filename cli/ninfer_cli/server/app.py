"""`build_app`: the ASGI application of one engine, its middleware in order, and its error handlers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ninfer_core import __version__
from ninfer_core.errors import NinferError

from ..presets import PresetFile
from . import anthropic, models, ollama, openai_chat, openai_completions, openai_responses, utility
from .body import ClientGoneError
from .context import Fairness, RequestRecord, Server
from .errors import Fault, HttpError, body_of, dialect_of, fault_of, status_of
from .host import ModelHost
from .media import MediaReader
from .metrics import Metrics
from .openai_responses import ResponseStore
from .pulls import Pulls
from .requestlog import RequestLog
from .security import ApiKeys, HostGuard, Origins, presented_key, tag_answer
from .settings import ServerSettings
from .wire import JsonResponse

logger = logging.getLogger("ninfer.server")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def build_app(
    engine: Any | ModelHost, settings: ServerSettings | None = None, *, artifact: Path | None = None
) -> FastAPI:
    """The application over a loaded engine (or anything with an engine's interface, such as `ScriptedEngine`).

    `artifact` is the path of the loaded model, for its size and digest in the model lists. The caller closes the
    engine. In place of an engine, a `ModelHost` switches between the installed models. The shared state is
    `app.state.server`.
    """
    settings = settings or ServerSettings()
    host = engine if isinstance(engine, ModelHost) else ModelHost.fixed(engine, settings, artifact)
    server = Server(
        host=host,
        settings=settings,
        metrics=Metrics(host, settings.metrics_compat),
        log=RequestLog(settings.request_log),
        pulls=Pulls(),
        store=ResponseStore(settings.stored_responses, settings.response_ttl),
        media=MediaReader(settings),
        presets=PresetFile(settings.presets),
        fairness=Fairness(settings.slots + settings.max_queue, settings.max_per_client),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.stop_generations()
        server.pulls.stop()
        server.workers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(server.log.close)

    app = FastAPI(
        title="ninfer", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.server = server
    for module in (openai_chat, openai_completions, openai_responses, anthropic, ollama, models, utility):
        app.include_router(module.router(server))
    for kind in (NinferError, HttpError, HTTPException, ClientGoneError):
        app.add_exception_handler(kind, _handle)
    app.openapi = _description(app)  # type: ignore[method-assign]
    # The last one added is the outermost.
    for middleware in (ApiKeys, Origins, HostGuard):
        app.add_middleware(middleware, settings=settings)  # type: ignore[arg-type]
    app.add_middleware(RequestContext, server=server)  # type: ignore[arg-type]
    return app


def _description(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """OpenAPI without the framework's own 422 answers, which this server never gives."""
    original = app.openapi

    def describe() -> dict[str, Any]:
        document = original()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document

    return describe


async def _handle(request: Request, error: Exception) -> Response:
    """Any exception of a handler, in the shape of the API that was called."""
    record: RequestRecord = request.scope["state"]["record"]
    if isinstance(error, ClientGoneError):
        record.outcome = "disconnect"
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = _routing_error(request, error)
    record.fail(error)
    return _error_response(request.scope, fault_of(error), record.request_id)


def _routing_error(request: Request, error: HTTPException) -> HttpError:
    path = request.url.path[:200]
    if error.status_code == 404:
        return HttpError(404, f"there is nothing at {path}", code="not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(
            405, f"{path} does not answer {request.method}", code="method_not_allowed", headers={"Allow": allowed}
        )
    return HttpError(error.status_code, str(error.detail), code="invalid_request")


def _error_response(scope: Scope, fault: Fault, request_id: str) -> Response:
    dialect = dialect_of(scope["path"], Headers(scope=scope))
    return JsonResponse(
        body_of(fault, dialect, request_id), status_code=status_of(fault, dialect), headers=fault.headers
    )


class Turns:
    """Requests that arrive together begin one per turn of the event loop, so that running streams go on in between."""

    def __init__(self) -> None:
        self._free = True
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when it is this request's turn."""
        loop = asyncio.get_running_loop()
        if self._free:
            self._free = False
            loop.call_soon(self._next, loop)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._free = True


class RequestContext:
    """Gives every request an id and a record, renders what other middleware raised, logs and counts the end."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app = app
        self.server = server
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request inside its record."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.turns.wait()
        record = self._record(scope)
        scope.setdefault("state", {})["record"] = record
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = record.request_id
                headers["request-id"] = record.request_id
                tag_answer(headers, scope["state"].get("origin"))
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except Exception as error:
            record.fail(error)
            if not isinstance(error, HttpError):
                logger.error("request %s failed", record.request_id, exc_info=error)
            if status:
                raise
            await _error_response(scope, fault_of(error), record.request_id)(scope, receive, tagged)
        finally:
            lease = scope["state"].get("lease")
            if lease is not None:
                lease.release()
            route = scope.get("route")
            pattern = str(getattr(route, "path", "unknown"))
            gone = record.outcome == "disconnect"
            self.server.metrics.http_answer(pattern, 499 if gone else status)
            self.server.log.write(record, 499 if gone else status)

    def _record(self, scope: Scope) -> RequestRecord:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else "req_" + secrets.token_hex(12)
        client = scope.get("client")
        name = str(client[0]) if client else "local"
        keys = presented_key(headers) if self.server.settings.api_keys else []
        if keys:
            name = "key-" + hashlib.sha256(keys[0].encode("utf-8", "surrogateescape")).hexdigest()[:8]
        return RequestRecord(request_id, name, scope["method"], scope["path"][:200])
