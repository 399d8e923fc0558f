"""Bytes on the wire: JSON, server-sent events, JSON lines, and a streaming answer with heartbeats by wall clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SSE = "text/event-stream; charset=utf-8"
NDJSON = "application/x-ndjson"
SSE_DONE = b"data: [DONE]\n\n"
SSE_COMMENT = b": waiting\n\n"


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event; JSON text never holds a line break, so one data line is enough."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + dumps(data) + b"\n\n"


def ndjson(data: Any) -> bytes:
    """One JSON line."""
    return dumps(data) + b"\n"


class JsonResponse(Response):
    """A complete JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return dumps(content)


class Source(Protocol):
    """What a `StreamResponse` plays: blocks of bytes, then the end; `close` after any end."""

    def blocks(self) -> AsyncGenerator[bytes, None]:
        """The stream after its first block."""

    def close(self, reason: str) -> None:
        """Free what the stream holds; `reason` is "done", "disconnect", "stalled" or "error"."""


class StreamResponse(Response):
    """Headers and `first` at once, then the source's blocks, with `heartbeat` after every silent interval.

    The client's disconnect is watched all the time, also while nothing is being written, and a client that
    does not read for `stall_timeout` seconds counts as gone. One task writes, and one timer watches it: a block costs
    no task and no timer of its own.
    """

    def __init__(
        self,
        first: bytes,
        source: Source,
        *,
        media_type: str,
        heartbeat: bytes,
        interval: float,
        stall_timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers=dict(headers or {}))
        self.headers["Content-Type"] = media_type
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        del self.headers["content-length"]
        self.first, self.source, self.heartbeat = first, source, heartbeat
        self.interval, self.stall_timeout = interval, stall_timeout
        self._writing = False
        self._moved = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the source ends or the client is gone."""
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(wait_for_disconnect(receive))
        clock = asyncio.ensure_future(self._keep_alive(send))
        tasks = (writer, watcher, clock)
        reason = "error"
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                reason = writer.result()
            else:
                reason = "disconnect" if watcher.done() else clock.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.source.close(reason)

    async def _write(self, send: Send) -> str:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(send, self.first)
            async with contextlib.aclosing(self.source.blocks()) as blocks:
                async for block in blocks:
                    if block:
                        await self._send(send, block)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            return "disconnect"
        return "done"

    async def _send(self, send: Send, block: bytes) -> None:
        self._writing, self._moved = True, time.monotonic()
        await send({"type": "http.response.body", "body": block, "more_body": True})
        self._writing, self._moved = False, time.monotonic()

    async def _keep_alive(self, send: Send) -> str:
        """Write the heartbeat when it is due; ends when the client has not read for too long."""
        while True:
            limit = self.stall_timeout if self._writing else self.interval
            left = self._moved + limit - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, self.interval, self.stall_timeout))
            elif self._writing:
                return "stalled"
            else:
                try:
                    async with asyncio.timeout(self.stall_timeout):
                        await send({"type": "http.response.body", "body": self.heartbeat, "more_body": True})
                except TimeoutError:
                    return "stalled"
                except OSError:
                    return "disconnect"
                self._moved = time.monotonic()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has closed its side; the request body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
