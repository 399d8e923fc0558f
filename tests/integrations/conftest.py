"""A ninfer server over a real socket for the adapters' tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings

from ninfer_core import get_engine


@contextlib.contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[str]:
    """The address of a server over an engine; the caller closes the engine."""
    config = uvicorn.Config(build_app(engine, ServerSettings(**settings)), log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """A factory of servers: `serve(engine, api_keys=("k",))` returns the address."""
    with contextlib.ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(serving(engine, **settings))


@pytest.fixture(scope="session")
def demo_server() -> Iterator[str]:
    """The demo model behind a server; it is the same engine that the in-process tests use."""
    engine = get_engine("default", None)
    with serving(engine.load()) as address:
        yield address
