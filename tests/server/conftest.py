"""A server over a real socket for every test: in-process transports never deliver a disconnect."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.testing import Script, ScriptedEngine
from ninfer_core.types import Message, Text
from tests.serving import serving

DATA = Path(__file__).resolve().parents[1] / "data/server"


class Running:
    """A started server: its engine, its shared state, and a client for it."""

    def __init__(self, engine: ScriptedEngine, port: int, state: Any) -> None:
        self.engine, self.port, self.state = engine, port, state
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """A POST of a JSON body (or of `content=`)."""
        return self.http.post(path, **({} if "content" in options else {"json": body}), **options)

    def lines(self, path: str, body: Any, **options: Any) -> list[str]:
        """The non-empty lines of a streamed answer."""
        with self.http.stream("POST", path, json=body, **options) as answer:
            assert answer.status_code == 200, answer.read()
            return [line for line in answer.iter_lines() if line]

    @property
    def last(self) -> Any:
        """The last request the engine accepted."""
        return self.engine.requests[-1]

    def idle(self) -> bool:
        """Wait until nothing runs any more, in the engine and in the server."""
        done = self.engine.wait_idle()
        end = time.monotonic() + 5
        while self.state.fairness.in_flight and time.monotonic() < end:
            time.sleep(0.005)
        return done and not self.state.fairness.in_flight


@contextlib.contextmanager
def running(engine: ScriptedEngine, **settings: Any) -> Iterator[Running]:
    """Serve an engine on a free port."""
    app = build_app(engine, ServerSettings(**settings))
    try:
        with serving(app) as port:
            handle = Running(engine, port, app.state.server)
            try:
                yield handle
            finally:
                handle.http.close()
    finally:
        engine.close()


@pytest.fixture(scope="session")
def plain_server() -> Iterator[Running]:
    """One server with default settings for all tests that need nothing else: starting one takes half a second."""
    with running(ScriptedEngine("Hello!")) as server:
        yield server


@pytest.fixture
def serve(plain_server: Running) -> Iterator[Callable[..., Running]]:
    """A factory: `serve("Hello!")`, `serve(Script(...), Script(...))`, `serve(engine, heartbeat=0.1)`."""
    with contextlib.ExitStack() as stack:

        def start(*scripts: Any, **settings: Any) -> Running:
            scripts = scripts or ("Hello!",)
            if not settings and not isinstance(scripts[0], ScriptedEngine):
                assert plain_server.idle()
                plain_server.engine._scripts = [s if isinstance(s, Script) else Script(s) for s in scripts]
                plain_server.engine.requests.clear()
                plain_server.engine.handles.clear()
                return plain_server
            engine = scripts[0] if isinstance(scripts[0], ScriptedEngine) else ScriptedEngine(*scripts)
            return stack.enter_context(running(engine, **settings))

        yield start


def text_of(message: Message) -> str:
    """The text of a message."""
    content = message.content
    return content if isinstance(content, str) else "".join(p.text for p in content if isinstance(p, Text))
