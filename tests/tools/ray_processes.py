"""Server processes behind the application's own front and routing, for machines where Ray cannot be installed.

python -m tests.tools.ray_processes server PORT [--model NAME | --random SHAPE] [...]
python -m tests.tools.ray_processes front PORT URL [URL ...]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings
from ray_ninfer.front import Front
from ray_ninfer.replica import HttpCall, ReplicaLostError
from ray_ninfer.routing import Balance

from ninfer_core.engine import Engine, ModelCard
from ninfer_core.engine import _open as open_artifact

ROOT = Path(__file__).resolve().parents[2]
_HOP_BY_HOP = (b"connection", b"transfer-encoding", b"keep-alive", b"host", b"content-length")


class HttpReplicas:
    """Servers at addresses as the replicas of a front, chosen as Ray's router chooses."""

    def __init__(self, urls: Sequence[str], spread: int) -> None:
        self._urls = list(urls)
        self._balance = Balance(spread)
        self._numbers = itertools.count()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None, connect=10.0))

    async def call(self, call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        """As `front.Replicas`."""
        request = str(next(self._numbers))
        url = self._balance.order(request, call.key, self._urls, time.monotonic(), call.avoid)[0]
        self._balance.sent(request, call.key, url)
        target = url + call.scope["path"]
        if call.scope["query_string"]:
            target += "?" + call.scope["query_string"].decode("ascii")
        headers = [(name, value) for name, value in call.scope["headers"] if name.lower() not in _HOP_BY_HOP]
        try:
            sent = self._client.stream(call.scope["method"], target, content=call.body, headers=headers)
            async with sent as answer:
                raw = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in _HOP_BY_HOP[:3]]
                yield [{"type": "http.response.start", "status": answer.status_code, "headers": raw}]
                async for block in answer.aiter_raw():
                    yield [{"type": "http.response.body", "body": block, "more_body": True}]
                yield [{"type": "http.response.body", "body": b"", "more_body": False}]
        except httpx.TransportError as error:
            raise ReplicaLostError(f"{url}: {type(error).__name__}: {error}", url) from error
        finally:
            self._balance.ended(request)


class FrontApp:
    """The front as an ASGI application of its own."""

    def __init__(self, urls: Sequence[str], settings: ServerSettings) -> None:
        self._front = Front(HttpReplicas(urls, settings.slots), settings)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, or the server's start and end."""
        if scope["type"] == "http":
            await self._front.forward(scope, receive, send)
        elif scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": message["type"] + ".complete"})
            await send({"type": "lifespan.shutdown.complete"})


class RandomArtifact:
    """Random weights of a published shape under the demo model's text files: what they say means nothing.

    Only ids of the demo's vocabulary are drawn; the matrices have the full size.
    """

    def __init__(self, shape: str, resources: Any) -> None:
        from ninfer_core.benchmarks.subject import RandomSource, random_config

        self.config, self.resources = random_config(shape), resources
        self.model_id = f"random-{shape}"
        self._source = RandomSource(self.config, seed=7)
        self.tensors, self.tensor = self._source.tensors, self._source.tensor
        self.packed = self._source.packed

    def __enter__(self) -> RandomArtifact:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def load(model: str, random: str, **options: Any) -> Engine:
    """An engine of a model, or of random weights in a shape of the bench."""
    if not random:
        return Engine.load(model, **options)
    from ninfer_core import engine as module

    card = ModelCard(module.engine_options("demo", options))  # keeps the text side of the demo for the engine below
    resources = dict(open_artifact(card._path).resources)
    module._open = lambda path: RandomArtifact(random, resources)  # type: ignore[assignment,return-value]
    try:
        return Engine.load("demo", **options)
    finally:
        module._open = open_artifact


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(kind: str, port: int, *arguments: str, patience: float, **environment: str) -> Iterator[str]:
    """One process of this module until it answers; its address. It is ended behind the block.

    Raises:
        RuntimeError: it ended, or does not answer within `patience` seconds.
    """
    url = f"http://127.0.0.1:{port}"
    path = os.pathsep.join(str(ROOT / part) for part in ("", "cli", "integrations"))
    command = [sys.executable, "-m", "tests.tools.ray_processes", kind, str(port), *arguments]
    run = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment})
    try:
        end = time.monotonic() + patience
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + "/health", timeout=10.0).status_code == 200:
                    break
            if run.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{' '.join(command)} does not answer (exit code {run.poll()})")
            time.sleep(0.1)
        yield url
    finally:
        run.terminate()
        try:
            run.wait(30)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


def main() -> None:
    """One server or front, until a signal."""
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("server", "front"))
    parser.add_argument("port", type=int)
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--random", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--drafts", type=int, default=0)
    given = parser.parse_args()
    settings = ServerSettings(slots=given.slots, max_queue=1024)
    if given.kind == "front":
        app: Any = FrontApp(given.urls, settings)
    else:
        options = engine_fields(given)
        app = build_app(load(given.model, given.random, **options), settings)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning", timeout_graceful_shutdown=2)


def engine_fields(given: argparse.Namespace) -> dict[str, Any]:
    """The options of `Engine.load` of the arguments above."""
    return {
        "device": given.device, "max_sequences": given.slots, "max_queue": 1024, "context_length": given.context,
        "draft_tokens": given.drafts, **({"threads": 1} if given.device == "cpu" else {}),
    }  # fmt: skip


if __name__ == "__main__":
    main()
