"""What HTTP costs one stream: its decode rate and its first token over each API, beside the same engine in process.

    python -m tests.bench.http --random-weights 35b-a3b [--drafts 0,3] [--tokens 256] [--idle 64] [--json FILE] [--check]
    python -m tests.bench.http --model demo --device cpu --tokens 64 --runs 2
    python -m tests.bench.http --tiny    # random weights of the demo's shape on the CPU, to try the script

The client is a process of its own, which also keeps `--idle` further connections open. One run in process and one over
each API follow each other, so that whatever drifts meets all alike; the first round of them is not counted. Rates are
tokens after the first over the time from the first text to the last; figures are medians, with the quickest and the
slowest first token beside them, and the part of the first token that the engine itself counts. Random weights have no
text: every request reads as the same ids, each token is written as a word, and where the device can be told, drafts are
accepted as often as those of real text. `--check` fails below 95 % of the rate in process, or where the first token
comes more than 5 ms later.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEAST_SHARE, MOST_DELAY = 0.95, 0.005
ACCEPTED = 2.19
"""Drafts of three that count, on average, as with real text."""
ALONE = "in process"
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


def bodies(prompt: str, rendered: str, tokens: int) -> dict[str, dict[str, Any]]:
    """The same question in every API, with and without a template: no thinking, greedy, so many tokens where the API
    can say so.
    """
    messages = [{"role": "user", "content": prompt}]
    exact = {"ignore_eos": True, "stream": True, "temperature": 0}
    counted = {"stream_options": {"include_usage": True}}
    options = {"temperature": 0, "num_predict": tokens}
    return {
        "/v1/chat/completions": {
            "messages": messages, "max_tokens": tokens, "enable_thinking": False, **exact, **counted
        },
        "/v1/completions": {"prompt": rendered, "max_tokens": tokens, **exact, **counted},
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
    received = b""
    while not received.endswith(b"pong"):
        block = made.recv(4096)
        if not block:
            raise RuntimeError(f"/ping answered {received!r}")
        received += block
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
    """Answer every path on the standard input with what one stream over it took."""
    held = [idle(port) for _ in range(spec["idle"])]
    asked = bodies(spec["prompt"], spec["rendered"], spec["tokens"])
    for line in sys.stdin:
        seen = streamed(port, line.strip(), asked[line.strip()])
        print(json.dumps([seen.first, seen.span, seen.tokens]), flush=True)
    for connection in held:
        connection.setblocking(False)
        with connection, contextlib.suppress(BlockingIOError):
            raise RuntimeError(f"an idle connection was closed, or told {connection.recv(100)!r}")


# --- the engine's process ---------------------------------------------------------------------------------------------


def random_engine(shape: str, device: str, drafts: int, prompt: str) -> Any:
    """An engine of random weights behind the scripted engine's texts: each token is written as a word.

    A request costs the host what it always costs, and then reads as the ids that stand for `prompt`.
    """
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
            self.tokens = self.subject.prompt(self.count_tokens(asked(prompt, 1)), seed=7)
            if drafts and self.subject.on_device:
                self.subject.force(ACCEPTED)

        @property
        def _runner(self) -> Any:
            return self.subject.runner

        def submit(self, messages: Any = None, **options: Any) -> RequestHandle:
            request = make_request(messages, **options)
            self.count_tokens(request)
            return self.subject.enqueue(request, self.tokens, request.max_tokens or 16, seed=7, machine=Words())

        def close(self, **options: Any) -> None:
            super().close(**options)
            self.subject.close()

    return RandomEngine()


def real_engine(model: str, device: str, drafts: int, prompt: str) -> Any:
    """The engine of a model, as it is measured elsewhere: without the prefix cache, whose hits would hide the prompt."""
    from ninfer_core.engine import Engine

    return Engine.load(model, device=device, draft_tokens=drafts, prefix_cache=False)


def asked(prompt: str, tokens: int) -> Any:
    """The question of `bodies` without HTTP."""
    from ninfer_core.types import Message, Request, Sampling

    return Request(
        messages=(Message("user", prompt),), max_tokens=tokens, ignore_eos=True, thinking=False,
        sampling=Sampling(temperature=0.0),
    )  # fmt: skip


def in_process(engine: Any, prompt: str, tokens: int) -> Timed:
    """One answer without HTTP."""
    from ninfer_core.types import TextDelta

    request = asked(prompt, tokens)
    began, stamps = time.monotonic(), []
    handle = engine.submit(request)
    for batch in handle.batches():
        if any(isinstance(event, TextDelta) and event.text for event in batch):
            stamps.append(time.monotonic())
    return Timed(stamps[0] - began, stamps[-1] - stamps[0], handle.result().usage.completion_tokens)


def followed(engine: Any) -> list[Any]:
    """The handles of all requests from now on, in order."""
    handles, submit = [], engine.submit

    def keep(*given: Any, **options: Any) -> Any:
        handles.append(submit(*given, **options))
        return handles[-1]

    engine.submit = keep
    return handles


@contextlib.contextmanager
def far_client(port: int, spec: dict[str, Any]) -> Iterator[Callable[[str], Timed]]:
    """The client's process; gives what asks over one path."""
    command = [sys.executable, "-m", "tests.bench.http", "--port", str(port), "--spec", json.dumps(spec)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}:{os.environ.get('PYTHONPATH', '')}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        send, receive = process.stdin, process.stdout

        def ask(path: str) -> Timed:
            send.write(path + "\n")
            send.flush()
            line = receive.readline()
            if not line:
                raise RuntimeError("the client failed; what it wrote stands above")
            return Timed(*json.loads(line))

        yield ask
        send.close()
        if process.wait(60):
            raise RuntimeError("the client failed; what it wrote stands above")


def measured(engine: Any, given: argparse.Namespace, prompt: str) -> dict[str, dict[str, float]]:
    """Rate and first text in process and over every API."""
    from ninfer_cli.server.app import build_app
    from ninfer_cli.server.boot import config_of
    from ninfer_cli.server.settings import ServerSettings

    from tests.serving import serving, wait_for

    # What an idle engine makes ready may fall into any run, and belongs to none.
    assert wait_for(lambda: engine._runner.warming is None, seconds=120), "the engine does not get ready"
    handles = followed(engine)
    rendered = engine.render(asked(prompt, 1))
    spec = {"idle": given.idle, "prompt": prompt, "rendered": rendered, "tokens": given.tokens}
    runs: dict[str, list[tuple[Timed, float]]] = {name: [] for name in (ALONE, *MARKS)}
    settings = ServerSettings(keep_alive=86400)
    app = build_app(engine, settings)
    with serving(app, config_of(app, settings)) as port, far_client(port, spec) as ask:
        for _ in range(given.runs + 1):
            for name, seen in runs.items():
                timed = in_process(engine, prompt, given.tokens) if name == ALONE else ask(name)
                seen.append((timed, handles[-1].result(60).timings.first_token))
    return {name: summary(seen[1:]) for name, seen in runs.items()}


def one_pass(given: argparse.Namespace, drafts: int) -> dict[str, dict[str, float]]:
    """Load with so many drafts a round, and measure."""
    make, name = (real_engine, given.model) if given.model else (random_engine, given.random_weights)
    prompt = TEXT * max(1, given.prompt_characters // len(TEXT))
    engine = make(name, given.device, drafts, prompt)
    try:
        return measured(engine, given, prompt)
    finally:
        engine.close()


def free() -> None:
    """Give back what the engine of a pass had: the application and it refer to each other."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def summary(runs: Sequence[tuple[Timed, float]]) -> dict[str, float]:
    """Medians, and how far the first tokens lie apart; the second of each run is what the engine counts, in seconds."""
    firsts = [1e3 * run.first for run, _ in runs]
    return {
        "tokens_per_second": statistics.median(run.rate for run, _ in runs),
        "first_ms": statistics.median(firsts),
        "quickest_first_ms": min(firsts),
        "slowest_first_ms": max(firsts),
        "engine_first_ms": 1e3 * statistics.median(own for _, own in runs),
        "tokens": statistics.median(run.tokens for run, _ in runs),
    }


def show(found: dict[str, dict[str, float]], drafts: int) -> bool:
    """Print a table; whether every API is within the limits."""
    base, good = found[ALONE], True
    head = f"{'first ms':>9} {'min':>8} {'max':>8} {'engine':>8} {'later ms':>9} {'tokens':>7}"
    print(f"\ndrafts {drafts}: {'':18} {'tok/s':>9} {'share':>7} {head}")
    for name, row in found.items():
        share = row["tokens_per_second"] / base["tokens_per_second"]
        later = row["first_ms"] - base["first_ms"]
        good = good and share >= LEAST_SHARE and later <= 1e3 * MOST_DELAY
        spread = f"{row['quickest_first_ms']:8.2f} {row['slowest_first_ms']:8.2f} {row['engine_first_ms']:8.2f}"
        rates = f"{row['tokens_per_second']:9.1f} {share:7.3f} {row['first_ms']:9.2f} {spread} {later:9.2f}"
        print(f"{name:28} {rates} {row['tokens']:7.0f}", flush=True)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print, or with `--port` be the client. 1 if `--check` finds HTTP too dear."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="name or path of an artifact")
    parser.add_argument("--random-weights", default="", help="35b-a3b, 27b or demo")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--drafts", default="0,3", help="tokens drafted per round, one pass each")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-characters", type=int, default=2000)
    parser.add_argument("--idle", type=int, default=64, help="further connections that stay open")
    parser.add_argument("--runs", type=int, default=7)
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
        results[f"drafts {drafts}"] = found = one_pass(given, drafts)
        free()
        good = show(found, drafts) and good
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if given.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
