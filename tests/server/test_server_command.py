"""`ninfer serve` as a process: addresses, keys, taken ports, answers while loading, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ninfer_cli.server.address import Address, bind, holder_of, parse_address
from ninfer_cli.server.command import read_keys

from ninfer_core.errors import InvalidRequestError

PROGRAM = """
    import pathlib, sys, threading, time
    from ninfer_cli.server import command
    from ninfer_cli.server.address import parse_address
    from ninfer_cli.server.settings import ServerSettings
    from ninfer_core import store
    from ninfer_core.errors import ModelNotFoundError
    from ninfer_core.testing import Delay, Script, ScriptedEngine

    mode, port = sys.argv[1], int(sys.argv[2])

    class Models:
        def find(self, name):
            return store.describe("demo")

        def load(self, path):
            while len(sys.argv) > 3 and not pathlib.Path(sys.argv[3]).exists():
                time.sleep(0.01)
            if mode == "broken":
                raise ModelNotFoundError("no such model")
            return ScriptedEngine(Script(["x</think>" + "word " * 4000], rate=100))

    settings = ServerSettings(port=port, shutdown_grace=0.5, api_keys=("k",) if mode == "keys" else ())
    try:
        sys.exit(command.run(settings, parse_address("127.0.0.1", port), "scripted", Models()))
    except ModelNotFoundError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("text", "port", "host", "expected"),
    [
        ("", None, "127.0.0.1", 11434),
        ("1.2.3.4", None, "1.2.3.4", 11434),
        (":56789", None, "127.0.0.1", 56789),
        ("1.2.3.4:56789", None, "1.2.3.4", 56789),
        ("http://1.2.3.4", None, "1.2.3.4", 80),
        ("https://1.2.3.4", None, "1.2.3.4", 443),
        ("http://1.2.3.4:56789/", None, "1.2.3.4", 56789),
        ("example.com", None, "example.com", 11434),
        ("example.com:56789", None, "example.com", 56789),
        ("[0001:002:003:0004::1]", None, "0001:002:003:0004::1", 11434),
        ("[::1]:56789", None, "::1", 56789),
        ("::1", None, "::1", 11434),
        ("http://[::1]", None, "::1", 80),
        ("0.0.0.0", 80, "0.0.0.0", 80),
        (" localhost:1 ", 2, "localhost", 2),
    ],
)
def test_addresses(text: str, port: int | None, host: str, expected: int) -> None:
    assert parse_address(text, port) == Address(host, expected)


@pytest.mark.parametrize("text", ["host:port", "host:99999", "ftp://x", "http://x/prefix", "a@b", "[::1", "x:1:2:y"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parsed = parse_address(text)
        bind(parsed)


def test_keys_from_options_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\none\n\n two \n")
    assert read_keys(["zero", "one"], file) == ("zero", "one", "two")
    file.write_text("# nothing\n")
    with pytest.raises(InvalidRequestError, match="holds no key"):
        read_keys([], file)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    """Start the command in a process: `program(mode, port)`; with a third argument it loads until that path exists."""
    file = tmp_path / "serve.py"
    file.write_text(textwrap.dedent(PROGRAM))
    started: list[subprocess.Popen[str]] = []

    def start(mode: str, port: int, *until: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(file), mode, str(port), *map(str, until)]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def answers(url: str, path: str, status: int, seconds: float = 60) -> httpx.Response:
    """The first answer of a path with this status."""
    end = time.monotonic() + seconds
    seen: object = None
    while time.monotonic() < end:
        try:
            answer = httpx.get(url + path, timeout=20)
            if answer.status_code == status:
                return answer
            seen = answer
        except httpx.TransportError as error:
            seen = error
        time.sleep(0.02)
    raise AssertionError(f"{path} did not answer {status} in {seconds} s; last: {seen}")


def test_loading_serving_and_an_orderly_end(program: Any, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = program("plain", port, tmp_path / "go")
    assert answers(url, "/health", 503).json()["status"] == "loading"
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    early = httpx.post(url + "/v1/messages", json=body)
    assert early.status_code == 529 and early.headers["retry-after"] == "2"
    assert early.json()["error"]["type"] == "overloaded_error"
    assert httpx.get(url + "/v1/models", headers={"host": "evil.example"}).status_code == 403
    (tmp_path / "go").touch()
    answers(url, "/health", 200)
    assert httpx.get(f"http://[::1]:{port}/health").status_code == 200, "localhost may mean either family"
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert first.startswith("data: {")
    assert json.loads(rest[-1][6:])["error"]["code"] == "cancelled", "cut streams end with an error"
    assert process.wait(60) in (-signal.SIGTERM, 0, 143)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")


def test_a_server_killed_while_it_loads_leaves_the_port_free(program: Any, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = program("plain", port, tmp_path / "never")
    answers(url, "/health", 503)
    process.kill()
    process.wait(60)
    program("plain", port)
    answers(url, "/health", 200, 60)


def test_a_model_that_cannot_be_loaded_ends_the_server(program: Any) -> None:
    process = program("broken", free_port())
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3 and "no such model" in errors


def test_a_taken_port(program: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = program("plain", port)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 8
    assert f"cannot listen on 127.0.0.1:{port}" in errors and f"--port {port + 1}" in errors


def test_who_holds_a_port(serve: Any) -> None:
    server = serve()
    assert holder_of(Address("127.0.0.1", server.port)) == " (a ninfer server is there)"
    assert holder_of(Address("127.0.0.1", free_port())) == ""
    with pytest.raises(OSError):
        bind(Address("127.0.0.1", server.port))


def test_options_and_help() -> None:
    import typer
    from ninfer_cli.main import program
    from ninfer_cli.server.command import serve as command
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(command)
    whole = program(["serve"])
    shown = CliRunner().invoke(whole, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0
    groups = re.findall(r"^([A-Z].*):$", shown.output, re.M)
    assert groups[:3] == ["Arguments", "Address and access", "Model and memory"]
    other = shown.output.partition("\nOther:\n")[2].split()
    assert [word for word in other if word.startswith("-")] == ["-h,", "--help"], "every option has its group"
    for option in re.findall(r"^  --([a-z-]+)", shown.output, re.M):
        at = shown.output.index(f"\n  --{option}")
        told = " ".join(shown.output[at : shown.output.find("\n  --", at + 1)].split())
        assert "env var: NINFER_" in told, f"--{option} has no variable"
    far = CliRunner().invoke(whole, ["serve", "demo"], env={"NINFER_SERVE_QUEUE_TIMEOUT": "soon"})
    assert far.exit_code == 2 and "--queue-timeout" in far.output
    for option in ("--port", "--api-key", "--max-queue", "--allow-remote-media", "--metrics-compat", "--request-log"):
        assert option in shown.output
    refused = CliRunner().invoke(app, ["demo", "--host", "0.0.0.0"])
    assert isinstance(refused.exception, InvalidRequestError) and "without an API key" in str(refused.exception)
    wrong = CliRunner().invoke(app, ["demo"], env={"NINFER_MAX_QUEUE": "many"})
    assert wrong.exit_code == 2


def test_the_command_module_is_light() -> None:
    code = (
        "import sys, ninfer_cli.server.command\n"
        "bad = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'starlette', 'prometheus_client'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
