"""The real thing, small: `ninfer serve` with the demo model installed twice, driven by the other commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ninfer_core import store
from tests.serving import wait_for

ROOT = Path(__file__).parents[2]
ASK = ["--no-think", "--max-tokens", "8", "--seed", "5", "--quiet"]

GUARD = """
import socket, sys
real = socket.socket.connect
def connect(self, where):
    if not (isinstance(where, tuple) and where[0] in ("127.0.0.1", "::1")):
        print("CONNECTION ATTEMPT", where, file=sys.stderr)
        raise OSError("no network in this test")
    return real(self, where)
socket.socket.connect = connect
socket.getaddrinfo = lambda host, *a, _real=socket.getaddrinfo, **k: (
    _real(host, *a, **k) if host in ("127.0.0.1", "::1", None) else print("LOOKUP", host, file=sys.stderr) or [])
from ninfer_cli.main import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        shutil.copytree(store.demo_path(), folder / name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {**os.environ, "NINFER_MODELS": str(folder), "NINFER_HOST": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}  # fmt: skip


@pytest.fixture(scope="module")
def server(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", GUARD, "serve", "one", "--keep-alive", "10m"], env=env, stderr=subprocess.PIPE, text=True
    )
    end, ready = time.monotonic() + 240, False
    while not ready and time.monotonic() < end and process.poll() is None:
        time.sleep(0.1)
        with contextlib.suppress(httpx.TransportError):
            ready = httpx.get(f"http://{env['NINFER_HOST']}/health", timeout=10).status_code == 200
    assert ready, "the server did not load its model"
    yield process
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert "CONNECTION ATTEMPT" not in errors and "LOOKUP" not in errors and "Traceback" not in errors, errors


def ninfer(env: dict[str, str], *args: str, code: int = 0, errors: bool = False) -> str:
    """What a command wrote to stdout, or with `errors` to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", GUARD, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    assert "CONNECTION ATTEMPT" not in done.stderr and "LOOKUP" not in done.stderr, done.stderr
    return done.stderr if errors else done.stdout


def loaded(env: dict[str, str]) -> list[str]:
    """Names of the loaded model, none without one."""
    return [item["name"] for item in httpx.get(f"http://{env['NINFER_HOST']}/api/ps", timeout=30).json()["models"]]


def test_commands_switch_and_unload_a_real_server(env: dict[str, str], server: subprocess.Popen[str]) -> None:
    alone = ninfer(env, "run", "two", "Hello", *ASK, "--no-server")
    assert loaded(env) == ["one"]
    assert ninfer(env, "run", "two", "Hello", *ASK) == alone, "the same answer, wherever it is computed"
    (entry,) = json.loads(ninfer(env, "ps", "--json"))["models"]
    assert entry["name"] == "two" and entry["processor"] in ("cpu", "cuda") and entry["tokens_per_second"] > 0
    ninfer(env, "cp", "two", "second")
    assert ninfer(env, "run", "second", "Hello", *ASK) == alone
    ninfer(env, "stop", "two")
    end = time.monotonic() + 20
    while loaded(env) and time.monotonic() < end:
        time.sleep(0.05)
    assert loaded(env) == []
    assert ninfer(env, "run", "one", "Hello", *ASK) == alone
    assert loaded(env) == ["one"]
    ninfer(env, "rm", "two")
    names = [item["name"] for item in httpx.get(f"http://{env['NINFER_HOST']}/api/tags").json()["models"]]
    assert "one" in names and not {"two", "second"} & set(names)


def test_a_model_is_removed_while_it_answers(env: dict[str, str], server: subprocess.Popen[str]) -> None:
    """Its files go at once; whoever reads its answer gets the rest of it, and nobody can ask it again."""
    folder = Path(env["NINFER_MODELS"]) / "three"
    shutil.copytree(store.demo_path(), folder)
    url = f"http://{env['NINFER_HOST']}/v1/chat/completions"
    body = {"model": "three", "messages": [{"role": "user", "content": "Count."}], "ignore_eos": True}
    with httpx.stream("POST", url, json={**body, "max_tokens": 3000, "stream": True}, timeout=120) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            next(lines)
        assert "three" in loaded(env)
        assert "--force" in ninfer(env, "rm", "three", code=4, errors=True)
        ninfer(env, "rm", "three", "--force")
        assert not folder.exists()
        rest = [json.loads(next(lines).removeprefix("data: ")) for _ in range(20)]
        assert all("error" not in chunk for chunk in rest)
    assert wait_for(lambda: "three" not in loaded(env), seconds=60)
    assert httpx.post(url, json={**body, "max_tokens": 1}, timeout=60).status_code == 404


@pytest.mark.parametrize("args", [["list"], ["show", "one"], ["pull", "one", "--offline"], ["run", "one", "Hi", *ASK]])
def test_what_is_complete_needs_no_network(env: dict[str, str], args: list[str]) -> None:
    ninfer(env, *args)
