"""How much the HTTP server carries: chunks a second to one client, and the lag of its event loop under many.

    python -m tests.tools.server_load [--clients 64] [--rate 20] [--seconds 10] [--chunks 20000]

The server plays a script, so no model takes part. Clients run in a process of their own, over loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MOST_CLIENTS = 256


async def _client(port: int, tokens: int) -> int:
    """Events of one stream, read to its end mark."""
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": tokens}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    events, last = 0, b""
    while block := await reader.read(1 << 16):
        events += block.count(b"data: ")
        last = (last + block)[-64:]
    writer.close()
    assert b"[DONE]" in last, last
    return events


async def _clients(port: int, count: int, tokens: int) -> dict[str, float]:
    began = time.monotonic()
    events = await asyncio.gather(*(_client(port, tokens) for _ in range(count)))
    return {"events": sum(events), "seconds": time.monotonic() - began}


def _run_clients(port: int, count: int, tokens: int) -> dict[str, float]:
    """Run the clients in another process, which does not share this one's interpreter lock."""
    command = [sys.executable, "-m", "tests.tools.server_load", "--port", str(port)]
    command += ["--clients", str(count), "--chunks", str(tokens)]
    path = f"{ROOT}:{ROOT / 'cli'}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, timeout=300
    )
    return dict(json.loads(done.stdout))


class LoadedServer:
    """A server over scripts of so many tokens a second (None: as fast as possible), and a probe on its event loop."""

    def __init__(self, tokens: int, rate: float | None, burst: int) -> None:
        import uvicorn
        from ninfer_cli.server.app import build_app
        from ninfer_cli.server.settings import ServerSettings

        from ninfer_core.testing import Script, ScriptedEngine

        script = Script(["</think>", "x" * tokens], rate=rate, burst=burst)
        self.engine = ScriptedEngine(script, max_sequences=MOST_CLIENTS, context_length=1 << 20)
        self.app = build_app(self.engine, ServerSettings(slots=MOST_CLIENTS))
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=2))
        self.lags: list[float] = []
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=asyncio.run, args=(self._serve(listener),), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    async def _serve(self, listener: socket.socket) -> None:
        probe = asyncio.create_task(self._probe())
        await self.server.serve(sockets=[listener])
        probe.cancel()

    async def _probe(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            self.lags.append(time.monotonic() - began - 0.01)

    def close(self) -> None:
        """Stop everything."""
        self.server.should_exit = True
        self.thread.join(10)
        self.engine.close()


def measure(clients: int, tokens: int, rate: float | None, burst: int) -> dict[str, float]:
    """Events a second in all, and percentiles of the event loop's lag in milliseconds."""
    server = LoadedServer(tokens, rate, burst)
    try:
        server.lags.clear()
        found = _run_clients(server.port, clients, tokens + 16)
        lags = sorted(server.lags)
        assert not server.app.state.server.fairness.in_flight
    finally:
        server.close()
    return {
        "clients": clients,
        "events": found["events"],
        "events_per_second": round(found["events"] / found["seconds"], 1),
        "lag_p50_ms": round(1e3 * lags[len(lags) // 2], 2),
        "lag_p99_ms": round(1e3 * lags[int(len(lags) * 0.99)], 2),
        "lag_max_ms": round(1e3 * lags[-1], 2),
        "samples": len(lags),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, or with `--port` be the clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each of them")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chunks", type=int, default=20_000, help="to the single client")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given: Any = parser.parse_args(arguments)
    if given.port:
        print(json.dumps(asyncio.run(_clients(given.port, given.clients, given.chunks))))
        return
    print(json.dumps({"one client": measure(1, given.chunks, None, 1)}))
    many = measure(min(given.clients, MOST_CLIENTS), round(given.rate * given.seconds), given.rate, 1)
    print(json.dumps({"many clients": many, "load": os.getloadavg()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
