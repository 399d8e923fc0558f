"""One replica: an engine behind the HTTP application, called by the front with whole requests, and its health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ninfer_cli.server.app import build_app
from ninfer_cli.server.host import ModelHost, loaded
from ninfer_cli.server.settings import ServerSettings
from ray.util.metrics import Gauge

from ninfer_core import store
from ninfer_core.engine import Engine
from ninfer_core.errors import EngineFailedError

from .routing import Key

logger = logging.getLogger("ninfer.server")
_FAREWELL = 5.0


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request as it travels to a replica: its ASGI scope, its whole body, and its routing key."""

    scope: dict[str, Any]
    body: bytes
    key: Key | None


class Replica:
    """A loaded model. Serve keeps it while `check_health` passes, and lets its streams end before it stops it."""

    def __init__(self, model: str, options: dict[str, Any], settings: ServerSettings) -> None:
        entry = store.describe(model)
        self.engine = Engine.load(str(entry.path), **options)
        host = ModelHost(settings, loaded(self.engine, str(entry.path), entry.path, entry.name))
        self.app = build_app(host, settings)
        self._gauges = EngineGauges()

    async def call(self, call: HttpCall) -> AsyncIterator[list[dict[str, Any]]]:
        """Run the application; its ASGI messages in batches as they come. Closing this early is a disconnect."""
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
        """Serve replaces the replica when this raises three times in a row, 5 s apart.

        Raises:
            EngineFailedError: the engine cannot make a token, or is finding out whether it can.
        """
        status = self.engine.health()["status"]
        if status != "ok":
            raise EngineFailedError(f"the engine cannot make a token: it is {status}")
        self._gauges.publish(self.app.state.server.metrics.registry)

    def __del__(self) -> None:
        if hasattr(self, "app"):
            self.app.state.server.stop_generations()
        if hasattr(self, "engine"):
            self.engine.close()


class EngineGauges:
    """The server's Prometheus series as metrics of Ray, under the same names with `_` for `:`; Ray tags the replica."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def publish(self, registry: Any) -> None:
        """Set every series to its value of now."""
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    name = sample.name.replace(":", "_")
                    gauge = Gauge(name, description=family.documentation, tag_keys=tuple(sorted(sample.labels)))
                    self._gauges[sample.name] = gauge
                gauge.set(float(sample.value), tags=dict(sample.labels))
