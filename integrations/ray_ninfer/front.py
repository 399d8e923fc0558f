"""The address of all replicas: reads a request, names its conversation, plays the answer of its replica. No Ray."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from ninfer_cli.server.errors import HttpError, body_of, dialect_of, fault_of, status_of
from ninfer_cli.server.settings import ServerSettings
from ninfer_cli.server.wire import JsonResponse, ndjson, sse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ninfer_core.errors import EngineBusyError

from .replica import HttpCall, ReplicaLostError
from .routing import Key, conversation_key

logger = logging.getLogger("ninfer.server")
_SCOPE = ("type", "asgi", "http_version", "method", "path", "raw_path", "query_string", "headers", "client", "scheme")
_ATTEMPTS = 3
# What one replica would do for itself only, and where it is done instead.
_ONE_REPLICA = {
    "/metrics": "every replica has its own figures; they are among Ray's metrics, as ray_ninfer_*",
    "/api/pull": "a model is pulled with `ninfer pull` on the machines of the cluster",
    "/api/copy": "a model gets further names with `ninfer cp` on the machines of the cluster",
    "/api/delete": "a model is removed with `ninfer rm` on the machines of the cluster",
    "/api/create": "a model is made with `ninfer convert` on the machines of the cluster",
}


class Replicas(Protocol):
    """All replicas, and the choice among them."""

    def call(self, call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        """ASGI messages of the answer in batches; an asynchronous generator, whose early end is a disconnect.

        Raises:
            EngineBusyError: none has room.
            ReplicaLostError: the one that was chosen does not answer, or not to the end.
        """


class Front:
    """The ASGI side of the application over its replicas."""

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self.replicas, self.settings = replicas, settings

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        answer = Answer(scope, send)
        try:
            if (reason := _ONE_REPLICA.get(scope["path"])) is not None:
                raise HttpError(501, f"{scope['path']} does not exist for several replicas: {reason}", code="not_found")
            body = await self._body(receive)
            if body is None:
                return
            call = HttpCall({name: scope[name] for name in _SCOPE if name in scope}, body, await _key(scope, body))
            playing = asyncio.ensure_future(self._play(call, answer))
            leaving = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({playing, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if playing.done():
                    playing.result()
            finally:
                for task in (playing, leaving):
                    task.cancel()
                await asyncio.gather(playing, leaving, return_exceptions=True)
        except Exception as error:
            await answer.fail(error)

    async def _play(self, call: HttpCall, answer: Answer) -> None:
        """Send a replica's answer. A replica lost before its first byte is made up for by another one."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with aclosing(self.replicas.call(call)) as batches:
                    async for batch in batches:
                        for message in batch:
                            await answer.send(message)
                return
            except ReplicaLostError as error:
                logger.warning("a replica was lost under %s (attempt %d): %s", call.scope["path"], attempt, error)
                if answer.ended:
                    return
                if answer.started or attempt == _ATTEMPTS:
                    text = "the replica that answered this request was lost; send it again"
                    raise EngineBusyError(text, retry_after=1.0) from error
                if error.replica:
                    call = replace(call, avoid=(*call.avoid, error.replica))

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, cut off behind the limit, which the replica then reports; None: the client left."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body", False) or size > self.settings.max_body_bytes:
                return b"".join(parts)


class Answer:
    """What goes out to the client; `fail` ends it in the shape of the API that was called, however far it is."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = self.ended = False
        self._scope, self._send = scope, send
        self._type = self._request_id = ""

    async def send(self, message: Message) -> None:
        """Pass on one message of the application."""
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self._type, self._request_id = headers.get("content-type", ""), headers.get("x-request-id", "")
            self.started = True
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Tell the client."""
        fault = fault_of(error)
        if fault.status >= 500 and not isinstance(error, (EngineBusyError, HttpError)):
            logger.error("%s failed", self._scope["path"], exc_info=error)
        if self.ended:
            return
        dialect = dialect_of(self._scope["path"], Headers(scope=self._scope))
        body = body_of(fault, dialect, self._request_id)
        if not self.started:
            answer = JsonResponse(body, status_code=status_of(fault, dialect), headers=fault.headers)
            await answer(self._scope, _nothing, self._send)
        elif self._type.startswith("text/event-stream"):
            await self._close(self._event(body, dialect))
        elif self._type.startswith("application/x-ndjson"):
            await self._close(ndjson(body))
        else:
            raise error  # half of a body with a length: only an aborted connection says so

    def _event(self, body: dict[str, Any], dialect: str) -> bytes:
        if self._scope["path"].startswith("/v1/responses"):
            told = body["error"]
            event = {"type": "error", "code": told["code"], "message": told["message"], "param": None}
            return sse({**event, "sequence_number": 0}, "error")
        return sse(body, "error" if dialect == "anthropic" else None)

    async def _close(self, block: bytes) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": block, "more_body": False})


async def _key(scope: Scope, body: bytes) -> Key | None:
    """The conversation of a request. A compressed body is not opened for it: that request goes where there is room."""
    if scope["method"] != "POST" or not body or "content-encoding" in Headers(scope=scope):
        return None
    return await asyncio.to_thread(_parsed_key, body)


def _parsed_key(body: bytes) -> Key | None:
    try:
        return conversation_key(json.loads(body))
    except (ValueError, RecursionError):
        return None  # the replica says what is wrong with it


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
