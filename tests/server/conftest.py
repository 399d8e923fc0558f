"""A server over a real socket for every test: in-process transports never deliver a disconnect."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.host import ModelHost, loaded
from ninfer_cli.server.settings import ServerSettings

from ninfer_core import store
from ninfer_core.errors import ArtifactError
from ninfer_core.testing import Reply, Script, ScriptedEngine, Wait
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
        done = self.engine.wait_idle(20)
        end = time.monotonic() + 20
        while self.state.fairness.in_flight and time.monotonic() < end:
            time.sleep(0.005)
        return done and not self.state.fairness.in_flight


@contextlib.contextmanager
def running(engine: ScriptedEngine | ModelHost, **settings: Any) -> Iterator[Running]:
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


def write_model(path: Path, model_id: str) -> Path:
    """A folder that the store takes for an artifact."""
    path.mkdir(parents=True)
    (path / "x.safetensors").write_bytes(bytes(10))
    root = {"format": "ninfer-artifact", "version": 1, "model_id": model_id, "objects": {}}
    files = {"x.safetensors": {"bytes": 10, "sha256": "0" * 64}}
    (path / "manifest.json").write_text(json.dumps({**root, "files": files}))
    return path


class ScriptedModels:
    """Every model is a scripted engine that answers with its own name; a record of what was loaded and closed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gate: threading.Event | None = None
        self.broken: set[str] = set()
        self.slow: dict[str, float] = {}
        self.hold = threading.Event()

    def load(self, path: str) -> ScriptedEngine:
        name = Path(path).name
        self.events.append(f"load {name}")
        time.sleep(self.slow.get(name, 0.0))
        if self.gate is not None:
            self.gate.wait(60)
        if name in self.broken:
            raise ArtifactError(f"{name} is damaged")
        return self.make(name)

    def make(self, name: str) -> ScriptedEngine:
        held = [Wait(self.hold), f"x</think>{name} held"]
        hold = Script(held, when=lambda request: any("hold" in message.text for message in request.messages))
        engine = ScriptedEngine(hold, Script(lambda request: Reply(name)), name=name, max_sequences=4)
        events, close = self.events, engine.close

        def closing() -> None:
            events.append(f"close {name}")
            close()

        engine.close = closing  # type: ignore[method-assign]
        return engine

    def describe(self, path: str) -> ScriptedEngine:
        return ScriptedEngine("", name=Path(path).name, context_length=777)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedModels:
    for name in ("alpha", "beta", "gamma"):
        write_model(tmp_path / "models" / name, name)
    monkeypatch.setenv("NINFER_MODELS", str(tmp_path / "models"))
    return ScriptedModels()


@pytest.fixture
def start(models: ScriptedModels) -> Iterator[Callable[..., Running]]:
    """A server that has loaded `alpha` and can load the others."""
    with contextlib.ExitStack() as stack:

        def begin(**options: Any) -> Running:
            settings = ServerSettings(**options)
            entry = store.describe("alpha")
            host = ModelHost(
                settings, loaded(models.load(str(entry.path)), str(entry.path), entry.path, "alpha"), models
            )
            models.events.clear()
            return stack.enter_context(running(host, **options))

        yield begin
        models.hold.set()
