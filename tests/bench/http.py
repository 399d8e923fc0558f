"""What HTTP costs one stream: its decode rate and its first token over each API, beside the same engine in process.

    python -m tests.bench.http --random-weights 35b-a3b [--drafts 0,3] [--tokens 512] [--idle 64] [--json FILE] [--check]
    python -m tests.bench.http --model demo --device cpu --tokens 64 --runs 2
    python -m tests.bench.http --tiny    # random weights of the demo's shape on the CPU, to try the script

The client is a process of its own, which also keeps `--idle` further connections open. Rates are tokens after the
first over the time from the first text to the last; every figure is the median of the runs, one warm-up comes before.
Random weights have no text: each token is written as a word. `--check` fails below 95 % of the rate in process, or
where the first token comes more than 5 ms later.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEAST_SHARE, MOST_DELAY = 0.95, 0.005
TEXT = "Write down everything that you know about rivers. "
COUNTED = re.compile(rb'"(?:completion_tokens|output_tokens|eval_count)":(\d+)')
# The part of a stream that carries text, by path.
MARKS = {
    "/v1/chat/completions": rb'"content":"[^"]',
    "/v1/completions": rb'"text":"[^"]',
    "/v1/responses": rb'"type":"response.output_text.delta"',
    "/v1/messages": rb'"type":"text_delta"',
    "/api/chat": rb'"content":"[^"]',
}


def bodies(prompt: str, tokens: int) -> dict[str, dict[str, Any]]:
    """The same question in every API: no thinking, greedy, so many tokens where the API can say so."""
    messages = [{"role": "user", "content": prompt}]
    exact = {"ignore_eos": True, "stream": True, "temperature": 0}
    counted = {"stream_options": {"include_usage": True}}
    options = {"temperature": 0, "num_predict": tokens}
    return {
        "/v1/chat/completions": {
            "messages": messages, "max_tokens": tokens, "enable_thinking": False, **exact, **counted
        },
        "/v1/completions": {"prompt": prompt, "max_tokens": tokens, **exact, **counted},
        "/v1/responses": {"input": prompt, "max_output_tokens": tokens, "reasoning": {"effort": "none"}, **exact},
        "/v1/messages": {"messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0},
        "/api/chat": {"messages": messages, "think": False, "options": options},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: seconds to its first text, seconds from there to the last, tokens."""

    first: float
    span: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (self.tokens - 1) / self.span


# --- the client's process ---------------------------------------------------------------------------------------------


def connect(port: int) -> socket.socket:
    """A connection without delay of small writes."""
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def idle(port: int) -> socket.socket:
    """A connection that has asked once and then stays open."""
    made = connect(port)
    made.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 " in made.recv(4096)
    return made


def streamed(port: int, path: str, body: Any) -> Timed:
    """Ask, and read the answer to its end."""
    data, mark = json.dumps(body).encode(), re.compile(MARKS[path])
    with connect(port) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        began = time.monotonic()
        connection.sendall(head.encode() + data)
        stamps, received = [], b""
        while block := connection.recv(1 << 16):
            if mark.search(block):
                stamps.append(time.monotonic())
            received = (received + block)[-65536:]
    counted = COUNTED.findall(received)
    if len(stamps) < 2 or not counted:
        raise RuntimeError(f"{path} gave no stream to measure: {received[-300:]!r}")
    return Timed(stamps[0] - began, stamps[-1] - stamps[0], int(counted[-1]))


def client(port: int, spec: dict[str, Any]) -> None:
    """Measure every API in turn and print what was seen."""
    held = [idle(port) for _ in range(spec["idle"])]
    found: dict[str, list[tuple[float, float, int]]] = {}
    for path, body in bodies(spec["prompt"], spec["tokens"]).items():
        for run in range(spec["runs"] + 1):
            seen = streamed(port, path, body)
            if run:
                found.setdefault(path, []).append((seen.first, seen.span, seen.tokens))
    for connection in held:
        connection.close()
    print(json.dumps(found))


# --- the engine's process ---------------------------------------------------------------------------------------------


def random_engine(shape: str, device: str, drafts: int) -> Any:
    """An engine of random weights behind the scripted engine's texts: each token is written as a word."""
    from ninfer_core.benchmarks.subject import CountingMachine, RandomSubject, Target
    from ninfer_core.runtime.handle import RequestHandle
    from ninfer_core.runtime.interface import make_request
    from ninfer_core.testing import ScriptedEngine
    from ninfer_core.types import Event, TextDelta

    class Words(CountingMachine):
        def feed(self, ids: Sequence[int], logprobs: Any = None) -> list[Event]:
            super().feed(ids, logprobs)
            return [TextDelta(" word" * len(ids))]

    class RandomEngine(ScriptedEngine):
        def __init__(self) -> None:
            target = Target(random=shape, device=device)
            self.subject = RandomSubject(target, draft_tokens=drafts, max_sequences=1, context=None)
            super().__init__("x", context_length=self.subject.context_length)

        def submit(self, messages: Any = None, **options: Any) -> RequestHandle:
            request = make_request(messages, **options)
            length = self.count_tokens(request)
            tokens, limit = self.subject.prompt(length, seed=length), request.max_tokens or 16
            return self.subject.enqueue(request, tokens, limit, length, machine=Words())

        def close(self, **options: Any) -> None:
            super().close(**options)
            self.subject.close()

    return RandomEngine()


def real_engine(model: str, device: str, drafts: int) -> Any:
    """The engine of a model, as it is measured elsewhere: without the prefix cache, whose hits would hide the prompt."""
    from ninfer_core.engine import Engine

    return Engine.load(model, device=device, draft_tokens=drafts, prefix_cache=False)


def in_process(engine: Any, prompt: str, tokens: int) -> Timed:
    """The same question without HTTP."""
    from ninfer_core.types import Message, Request, Sampling, TextDelta

    request = Request(
        messages=(Message("user", prompt),), max_tokens=tokens, ignore_eos=True, thinking=False,
        sampling=Sampling(temperature=0.0),
    )  # fmt: skip
    began, stamps = time.monotonic(), []
    handle = engine.submit(request)
    for batch in handle.batches():
        if any(isinstance(event, TextDelta) and event.text for event in batch):
            stamps.append(time.monotonic())
    return Timed(stamps[0] - began, stamps[-1] - stamps[0], handle.result().usage.completion_tokens)


def measured(engine: Any, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rate and first text in process and over every API, as medians."""
    from ninfer_cli.server.app import build_app
    from ninfer_cli.server.settings import ServerSettings

    from tests.serving import serving

    prompt = TEXT * max(1, given.prompt_characters // len(TEXT))
    alone = [in_process(engine, prompt, given.tokens) for _ in range(given.runs + 1)][1:]
    found = {"in process": alone}
    spec = {"idle": given.idle, "prompt": prompt, "tokens": given.tokens, "runs": given.runs}
    path = f"{ROOT}:{ROOT / 'cli'}"
    with serving(build_app(engine, ServerSettings())) as port:
        command = [sys.executable, "-m", "tests.bench.http", "--port", str(port), "--spec", json.dumps(spec)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError("the client failed; what it wrote stands above")
    found |= {name: [Timed(*values) for values in runs] for name, runs in json.loads(done.stdout).items()}
    return {
        name: {
            "tokens_per_second": statistics.median(run.rate for run in runs),
            "first_ms": 1e3 * statistics.median(run.first for run in runs),
            "tokens": statistics.median(run.tokens for run in runs),
        }
        for name, runs in found.items()
    }


def show(found: dict[str, dict[str, float]], drafts: int) -> bool:
    """Print a table; whether every API is within the limits."""
    base, good = found["in process"], True
    print(f"\ndrafts {drafts}: {'':18} {'tok/s':>9} {'share':>7} {'first ms':>9} {'later ms':>9} {'tokens':>7}")
    for name, row in found.items():
        share = row["tokens_per_second"] / base["tokens_per_second"]
        later = row["first_ms"] - base["first_ms"]
        good = good and share >= LEAST_SHARE and later <= 1e3 * MOST_DELAY
        rates = f"{row['tokens_per_second']:9.1f} {share:7.3f} {row['first_ms']:9.2f} {later:9.2f}"
        print(f"{name:28} {rates} {row['tokens']:7.0f}", flush=True)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print, or with `--port` be the client. 1 if `--check` finds HTTP too dear."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="name or path of an artifact")
    parser.add_argument("--random-weights", default="", help="35b-a3b, 27b or demo")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--drafts", default="0,3", help="tokens drafted per round, one pass each")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt-characters", type=int, default=2000)
    parser.add_argument("--idle", type=int, default=64, help="further connections that stay open")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    given: Any = parser.parse_args(arguments)
    if given.port:
        client(given.port, json.loads(given.spec))
        return 0
    if given.tiny:
        given.model, given.random_weights, given.device, given.drafts = "", "demo", "cpu", "2"
        given.tokens, given.prompt_characters, given.runs = 16, 50, 1
    if bool(given.model) == bool(given.random_weights):
        parser.error("name either --model or --random-weights")
    results, good = {}, True
    for drafts in [int(item) for item in given.drafts.split(",")]:
        make, name = (real_engine, given.model) if given.model else (random_engine, given.random_weights)
        engine = make(name, given.device, drafts)
        try:
            results[f"drafts {drafts}"] = found = measured(engine, given)
        finally:
            engine.close()
        good = show(found, drafts) and good
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if given.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
