"""One replica: an engine behind the HTTP app, called with whole requests by the front, and its health. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ninfer_core.errors import EngineFailedError

from .routing import Key

_FAREWELL = 5.0
# States of an engine that no request should wait for. While it restarts one may, if no other replica takes it.
_DEAD = ("failed", "stalled", "closed")


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request as it travels to a replica: its ASGI scope, its whole body, its routing key.

    `avoid` names replicas that have failed this request already.
    """

    scope: dict[str, Any]
    body: bytes
    key: Key | None
    avoid: tuple[str, ...] = ()


class ReplicaLostError(Exception):
    """A replica cannot answer, or can no longer; `replica` is its name, empty where the router knows it is gone."""

    def __init__(self, reason: str, replica: str = "") -> None:
        super().__init__(reason, replica)
        self.reason, self.replica = reason, replica

    def __str__(self) -> str:
        return self.reason


class Replica:
    """An engine and its ASGI application (`build_app`); `name` is what the router calls it."""

    def __init__(self, engine: Any, app: Any, name: str = "") -> None:
        self.engine, self.app, self.name = engine, app, name

    async def call(self, call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Run the application; its ASGI messages in batches as they come. Closing this early is a disconnect.

        Raises:
            ReplicaLostError: the engine can make no token, so another replica should answer.
        """
        # Without this a dead engine would be the idlest replica, and get every new conversation until it is replaced.
        status = self.engine.health()["status"]
        if status in _DEAD or (status == "restarting" and self.name not in call.avoid):
            raise ReplicaLostError(f"its engine is {status}", self.name)
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        unread = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.put_nowait(dict(message, headers=list(message["headers"])) if "headers" in message else message)

        async def run() -> None:
            try:
                await self.app({**call.scope, "state": {}}, receive, send)
            finally:
                messages.put_nowait(None)

        running = asyncio.ensure_future(run())
        ended = False
        try:
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                yield [message for message in batch if message is not None]
            await running
        finally:
            gone.set()
            await asyncio.wait({running}, timeout=_FAREWELL)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises three times in a row.

        Raises:
            EngineFailedError: the engine cannot make a token, or is finding out whether it can.
        """
        status = self.engine.health()["status"]
        if status != "ok":
            raise EngineFailedError(f"the engine cannot make a token: it is {status}")

    def close(self) -> None:
        """End what runs, with an error event, and the engine."""
        server = self.app.state.server
        server.stop_generations()
        server.workers.shutdown(wait=False, cancel_futures=True)
        self.engine.close()
