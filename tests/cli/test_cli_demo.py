"""The embedded demo model through the real program: answers, equality, figures, no network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from cli_support import NINFER, environment

from ninfer_core import store

# Refuses every connection and name look-up, then runs the program.
OFFLINE = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"network use: {args}")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from ninfer_cli.main import main
main(sys.argv[1:])
"""


def ninfer(home: Path, *args: str, input: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *args],
        env=environment(home),
        input=input,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done


def test_the_demo_is_always_installed(tmp_path: Path) -> None:
    (entry,) = json.loads(ninfer(tmp_path, "list", "--json").stdout)["models"]
    assert (entry["name"], entry["model_id"]) == ("demo", "ninfer-demo")
    assert Path(entry["path"]) == store.demo_path()
    facts = json.loads(ninfer(tmp_path, "show", "demo", "--json").stdout)
    assert {"completion", "thinking", "tools", "drafting"} <= set(facts["capabilities"])


def test_the_demo_is_intact(tmp_path: Path) -> None:
    report = json.loads(ninfer(tmp_path, "inspect", str(store.demo_path()), "--verify", "--json").stdout)
    assert report["verified"]["tensors"] == len(report["tensors"])


def test_the_demo_knows_a_capital(tmp_path: Path) -> None:
    done = ninfer(tmp_path, "run", "demo", "What is the capital of France?", "--temperature", "0", "--no-think")
    assert "Paris" in done.stdout and "\x1b" not in done.stdout + done.stderr


def test_drafts_change_the_figures_and_not_the_answer(tmp_path: Path) -> None:
    answers, stats = [], []
    for drafts in ("0", "3"):
        path = tmp_path / f"{drafts}.json"
        args = ["--draft-tokens", drafts, "--seed", "7", "--max-tokens", "60", "--stats-json", str(path)]
        answers.append(ninfer(tmp_path, "run", "demo", "Tell me a story.", "--no-think", *args).stdout)
        stats.append(json.loads(path.read_text()))
    assert answers[0] == answers[1] != ""
    assert stats[0]["drafted_tokens"] == 0 and stats[1]["drafted_tokens"] > 0
    assert stats[0]["completion_tokens"] == stats[1]["completion_tokens"]
    assert stats[1]["rounds"] < stats[0]["rounds"] and len(stats[1]["acceptance_by_position"]) == 3


def test_settings_the_engine_refuses_are_usage_errors(tmp_path: Path) -> None:
    assert "device" in ninfer(tmp_path, "run", "demo", "hi", "--device", "tpu", code=2).stderr
    long = ninfer(tmp_path, "run", "demo", "word " * 300, "--context", "128", code=2)
    assert "maximum context length" in long.stderr and not long.stdout


@pytest.mark.parametrize("stop", ["\x03", "\x04"])
def test_a_conversation(tmp_path: Path, stop: str) -> None:
    child = pexpect.spawn(
        NINFER[0],
        [*NINFER[1:], "run", "demo", "--no-think", "--temperature", "0", "--no-history"],
        env=environment(tmp_path),
        encoding="utf-8",
        timeout=60,
    )
    child.delaybeforesend = None
    child.expect_exact(">>>")
    child.send("What is the capital of France?\r")
    child.expect_exact("Paris")
    child.expect_exact(">>>")
    if stop == "\x03":
        child.send("Tell me a story.\r")
        child.expect(r"\w+ \w+ \w+ \w+")
        child.send("\x03\x03")
    else:
        child.send(stop)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == {"\x03": 130, "\x04": 0}[stop]
