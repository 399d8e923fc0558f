"""A server of an ASGI application on a free port, and waiting for what happens in it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def serving(app: Any, config: uvicorn.Config | None = None) -> Iterator[int]:
    """Serve an application on a free port of the loopback address; gives the port."""
    plain = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2, lifespan="on")
    server = uvicorn.Server(config or plain)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether a condition comes to hold within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
