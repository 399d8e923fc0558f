"""How much the HTTP server carries: chunks a second to one client, and the lag of its event loop under many.

    python -m tests.tools.server_load [--clients 64] [--rate 100] [--seconds 10] [--chunks 20000] [--threads]
    python -m tests.tools.server_load --chaos 160 [--clients 64]    # rude clients: memory at every tenth of the time

No model takes part: a token for every request in each round, from one thread, as a real engine does it; `--threads`
takes a thread per request instead, which fight for the interpreter's lock. Clients run in a process of their own, over
loopback; they come at once and leave at different times, for their answers differ in length. `thread_us` is the
processor time of the loop's thread per event, which other work on the machine changes least.
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
from collections.abc import Iterator, Sequence
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


def _length(tokens: int, place: int, count: int) -> int:
    """Tokens of one client's answer: from so many down to half of that."""
    return tokens - tokens * place // (2 * count)


async def _clients(port: int, count: int, tokens: int) -> dict[str, float]:
    began = time.monotonic()
    events = await asyncio.gather(*(_client(port, _length(tokens, i, count)) for i in range(count)))
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


def _rounds_engine(rate: float | None) -> Any:
    """An engine that gives every request a token in each of its rounds, so many a second, until its limit."""
    from ninfer_core.runtime.session import Session
    from ninfer_core.testing import Script, ScriptedEngine

    class RoundsEngine(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(Script("x"), max_sequences=MOST_CLIENTS, context_length=1 << 20)
            self.ending = threading.Event()
            self.opening = self._tokenizer.encode("</think>")
            self.token = self._tokenizer.encode("x")
            self.rounds = threading.Thread(target=self._rounds, daemon=True)
            self.rounds.start()

        def _start_next(self) -> None:
            with self._lock:
                while self._waiting and len(self._running) < self._max_sequences:
                    session = self._waiting.pop(0)[0]
                    session.start()
                    self._running.append(session)

        def _rounds(self) -> None:
            due = time.monotonic()
            while not self.ending.is_set():
                with self._lock:
                    running = list(self._running)
                for session in running:
                    self._one(session)
                due = max(due + (1 / rate if rate else 0), time.monotonic() - 1)
                self.ending.wait(max(0.0, due - time.monotonic()) if running else 0.001)

        def _one(self, session: Session) -> None:
            if self._alive(session):
                made = session.usage.completion_tokens
                self._burst(session, self.token if made else [*self.opening, *self.token], None)
            if session.ended:
                with self._lock:
                    self._running.remove(session)
                    self._lock.notify_all()

        def close(self, **options: Any) -> None:
            self.ending.set()
            self.rounds.join(10)
            super().close(**options)

    return RoundsEngine()


class LoadedServer:
    """A server over an engine of so many tokens a second (None: as fast as possible), and a probe on its event loop."""

    def __init__(self, tokens: int, rate: float | None, threads: bool) -> None:
        import uvicorn
        from ninfer_cli.server.app import build_app
        from ninfer_cli.server.settings import ServerSettings

        from ninfer_core.testing import Script, ScriptedEngine

        script = Script(["</think>", "x" * 2 * tokens], rate=rate)
        own = {"max_sequences": MOST_CLIENTS, "context_length": 1 << 20}
        self.engine = ScriptedEngine(script, **own) if threads else _rounds_engine(rate)
        self.app = build_app(self.engine, ServerSettings(slots=MOST_CLIENTS))
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=2, http="h11", loop="asyncio")
        )
        self.lags: list[float] = []
        self.thread_time = 0.0
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
            self.thread_time = time.thread_time()

    def close(self) -> None:
        """Stop everything."""
        self.server.should_exit = True
        self.thread.join(10)
        self.engine.close()


def measure(clients: int, tokens: int, rate: float | None, threads: bool = False) -> dict[str, float]:
    """Events a second in all, processor time of the loop's thread per event, and its lag in milliseconds."""
    server = LoadedServer(tokens, rate, threads)
    try:
        server.lags.clear()
        before = server.thread_time
        found = _run_clients(server.port, clients, tokens)
        lags, spent = sorted(server.lags), server.thread_time - before
        assert not server.app.state.server.fairness.in_flight
    finally:
        server.close()
    return {
        "clients": clients,
        "events": found["events"],
        "events_per_second": round(found["events"] / found["seconds"], 1),
        "thread_us": round(1e6 * spent / found["events"], 1),
        "lag_p50_ms": round(1e3 * lags[len(lags) // 2], 2),
        "lag_p99_ms": round(1e3 * lags[int(len(lags) * 0.99)], 2),
        "lag_max_ms": round(1e3 * lags[-1], 2),
        "samples": len(lags),
    }


def chaos(clients: int, seconds: float) -> Iterator[dict[str, float]]:
    """Memory of a server's process in MB while clients leave at any point and send rubbish, at each tenth of the time.

    Raises:
        RuntimeError: a connection broke, or a request is left over.
    """
    from tests.server.crowd import crowd

    code = (
        "import sys; from tests.server.conftest import running\n"
        "from ninfer_core.testing import Reply, Script, ScriptedEngine\n"
        "script = Script(Reply('word ' * 40, reasoning='hm ' * 10), burst=4, rate=400)\n"
        "engine = ScriptedEngine(script, max_sequences=8)\n"
        "with running(engine, slots=8, max_queue=40, heartbeat=0.05) as server:\n"
        "    print(server.port, flush=True)\n"
        "    for _ in sys.stdin:\n"
        "        idle = server.idle()\n"
        "        engine.requests.clear(), engine.handles.clear()\n"
        "        print(int(idle), flush=True)\n"
    )
    path = f"{ROOT}:{ROOT / 'cli'}"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        url, requests = f"http://127.0.0.1:{int(server.stdout.readline())}", 0
        for _ in range(10):
            seen = asyncio.run(crowd(url, clients, seconds / 10))
            server.stdin.write("?\n")
            server.stdin.flush()
            idle = server.stdout.readline().strip() == "1"
            if seen.get("broken") or not idle:
                raise RuntimeError(f"{seen}, idle: {idle}")
            requests += seen["done"]
            pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
            yield {"requests": requests, "process_mb": round(pages * os.sysconf("SC_PAGESIZE") / 1e6, 1)}
        server.stdin.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, or with `--port` be the clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens a second of each of them")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chunks", type=int, default=20_000, help="to the single client")
    parser.add_argument("--threads", action="store_true", help="a thread per request")
    parser.add_argument("--chaos", type=float, metavar="SECONDS", help="rude clients for so long, and nothing else")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given: Any = parser.parse_args(arguments)
    if given.port:
        print(json.dumps(asyncio.run(_clients(given.port, given.clients, given.chunks))))
        return
    if given.chaos:
        for mark in chaos(given.clients, given.chaos):
            print(json.dumps(mark), flush=True)
        return
    print(json.dumps({"one client": measure(1, given.chunks, None, True)}))
    many = measure(min(given.clients, MOST_CLIENTS), round(given.rate * given.seconds), given.rate, given.threads)
    print(json.dumps({"many clients": many, "load": os.getloadavg()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
