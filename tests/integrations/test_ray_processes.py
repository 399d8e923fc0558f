"""Servers behind the front and its routing without Ray: conversations, streams, a lost server, random weights."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.testing import Script, ScriptedEngine, Tokens, Wait
from tests.serving import serving, wait_for
from tests.tools.ray_processes import FrontApp, load

SETTINGS = ServerSettings(slots=4)


@contextlib.contextmanager
def servers(*steps: Any) -> Iterator[tuple[list[ScriptedEngine], list[str]]]:
    """Two servers whose engines play the same steps."""
    with contextlib.ExitStack() as stack:
        engines = [ScriptedEngine(Script(list(steps))) for _ in range(2)]
        for engine in engines:
            stack.callback(engine.close)
        ports = [stack.enter_context(serving(build_app(engine, SETTINGS))) for engine in engines]
        yield engines, [f"http://127.0.0.1:{port}" for port in ports]


def ask(port: int, *texts: str) -> str:
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": turns}, timeout=200)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_conversations_spread_and_come_back() -> None:
    with servers(Tokens("Hello", " you!")) as (engines, urls), serving(FrontApp(urls, SETTINGS)) as port:
        homes = []
        for number in range(24):
            before = len(engines[0].requests)
            assert "Hello" in ask(port, f"first {number}")
            homes.append(int(len(engines[0].requests) == before))
        assert set(homes) == {0, 1}
        for number in range(6):
            before = len(engines[homes[number]].requests)
            ask(port, f"first {number}", "answer", "second")
            assert len(engines[homes[number]].requests) == before + 1


def test_a_stream_passes_as_it_comes() -> None:
    gate = threading.Event()
    with servers(Tokens("one"), Wait(gate), Tokens("two")) as (_, urls), serving(FrontApp(urls, SETTINGS)) as port:
        body = {"prompt": "go", "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=200) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            assert any("one" in line for line in lines)
            gate.set()
            rest = list(lines)
        assert any("two" in line for line in rest) and rest[-2:] == ["data: [DONE]", ""]


def test_a_client_that_leaves_ends_its_generation_on_the_server() -> None:
    with servers(Tokens("one"), Wait(threading.Event())) as (engines, urls), serving(FrontApp(urls, SETTINGS)) as port:
        body = {"prompt": "go", "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=200) as answer:
            assert any("one" in line for line in answer.iter_lines())
        assert wait_for(lambda: any(engine.cancelled for engine in engines), 60)


def test_a_server_that_is_gone_is_made_up_for() -> None:
    with socket.socket() as gone, servers(Tokens("Hello")) as (engines, urls):
        gone.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
        with serving(FrontApp([dead, urls[0]], SETTINGS)) as port:
            for number in range(6):
                ask(port, f"talk {number}")
        assert len(engines[0].requests) == 6


def test_nobody_there_is_said() -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        with serving(FrontApp([f"http://127.0.0.1:{gone.getsockname()[1]}"], SETTINGS)) as port:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "go"}, timeout=200)
    assert answer.status_code == 503 and "was lost" in answer.text


@pytest.mark.parametrize("random", ["", "demo"])
def test_the_servers_engines_are_of_a_model_or_of_random_weights(random: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "context_length": 128, "max_sequences": 1}
    with load("demo", random, draft_tokens=0, **options) as engine:
        done = engine.generate("Hello", max_tokens=6, ignore_eos=True, temperature=0.0)
        assert done.usage.completion_tokens == 6
        assert (engine.model_id == "random-demo") == bool(random)
