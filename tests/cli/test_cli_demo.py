"""The embedded demo model through the real program: answers, equality, figures, no network."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pexpect
import pytest
from cli_support import NINFER, ended, environment
from ninfer_cli.main import app
from typer.testing import CliRunner, Result

from ninfer_core import store


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no settings of the user: a model on disk must need neither."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"network use: {args}")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for key in [key for key in os.environ if key.startswith(("NINFER", "HF_", "NO_COLOR"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def ninfer(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(args), input="")
    assert result.exit_code == code, result.stderr
    return result


def test_the_demo_is_always_installed() -> None:
    (entry,) = json.loads(ninfer("list", "--json").stdout)["models"]
    assert (entry["name"], entry["model_id"]) == ("demo", "ninfer-demo")
    assert Path(entry["path"]) == store.demo_path()
    facts = json.loads(ninfer("show", "demo", "--json").stdout)
    assert {"completion", "thinking", "tools", "drafting"} <= set(facts["capabilities"])


def test_the_demo_is_intact() -> None:
    report = json.loads(ninfer("inspect", str(store.demo_path()), "--verify", "--json").stdout)
    assert report["verified"]["tensors"] == len(report["tensors"])


def test_the_demo_knows_a_capital() -> None:
    done = ninfer("run", "demo", "What is the capital of France?", "--temperature", "0", "--no-think")
    assert "Paris" in done.stdout and "\x1b" not in done.stdout + done.stderr


def test_drafts_change_the_figures_and_not_the_answer(tmp_path: Path) -> None:
    answers, stats = [], []
    for drafts in ("0", "3"):
        path = tmp_path / f"{drafts}.json"
        args = ["--draft-tokens", drafts, "--seed", "7", "--max-tokens", "60", "--stats-json", str(path)]
        answers.append(ninfer("run", "demo", "Tell me a story.", "--no-think", *args).stdout)
        stats.append(json.loads(path.read_text()))
    assert answers[0] == answers[1] != ""
    assert stats[0]["drafted_tokens"] == 0 and stats[1]["drafted_tokens"] > 0
    assert stats[0]["completion_tokens"] == stats[1]["completion_tokens"]
    assert stats[1]["rounds"] < stats[0]["rounds"] and len(stats[1]["acceptance_by_position"]) == 3


def test_settings_the_engine_refuses_are_usage_errors() -> None:
    assert "device" in ninfer("run", "demo", "hi", "--device", "tpu", code=2).stderr
    long = ninfer("run", "demo", "word " * 300, "--context", "128", code=2)
    assert "maximum context length" in long.stderr and not long.stdout


@pytest.mark.parametrize("stop", ["\x03", "\x04"])
def test_a_conversation(tmp_path: Path, stop: str) -> None:
    child = pexpect.spawn(
        NINFER[0],
        [*NINFER[1:], "run", "demo", "--no-think", "--temperature", "0", "--no-history"],
        env=environment(tmp_path),
        encoding="utf-8",
        timeout=120,
    )
    child.delaybeforesend = None
    child.expect_exact(">>>")
    child.send("What is the capital of France?\r")
    child.expect_exact("Paris")
    child.expect_exact(">>>")
    if stop == "\x03":
        child.send("Count from 1 to 30.\r")  # long enough to be stopped in the middle
        child.expect_exact("2, 3, 4")
        for _ in range(5):  # stops the answer if it goes on, asks for another, leaves
            child.send("\x03")
            if child.expect([pexpect.EOF, r"\(stopped", "Ctrl-C again"]) == 0:
                break
            child.expect_exact(">>>")
    else:
        child.send(stop)
    assert ended(child)[0] == {"\x03": 130, "\x04": 0}[stop]
