"""What README shows is run: its commands on the demo model, its requests, its Python; what it links to exists."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ninfer_cli.bench import own_server
from ninfer_cli.main import program
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:11434"
ELSEWHERE = ("pull", "convert", "inspect", "serve")
"""Commands that need a network, a checkpoint or a place of their own; other tests run them."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands(program: str) -> list[list[str]]:
    """The words of each line of the shell blocks that starts a program."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith(program + " ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """`ninfer serve demo` in a process of its own: host and port."""
    with own_server("demo", 4, "cpu", True) as base:
        yield base.removeprefix("http://").removesuffix("/v1")


@pytest.fixture
def at_the_server(served: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The commands of a user without settings, whose server is that one."""
    for key in [key for key in os.environ if key.startswith(("NINFER", "HF_"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NINFER_HOST", served)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return served


def test_commands(at_the_server: str) -> None:
    lines = [words for words in commands("ninfer") if words[0] not in ELSEWHERE and "qwen3" not in " ".join(words)]
    assert {words[0] for words in lines} >= {"run", "list", "doctor", "ps", "stop", "launch"}
    for words in lines:
        done = CliRunner().invoke(program(words), words, input="")
        assert done.exit_code == 0 and done.output.strip(), f"ninfer {shlex.join(words)}\n{done.output}"
        if "France" in words[-1]:
            assert "Paris" in done.stdout
        if "--format" in words:
            assert re.search(r'"\w+": ', done.stdout)


def test_requests(served: str) -> None:
    """As curl sends them: the body of `-d` counts as a form unless a header says otherwise."""
    found = commands("curl")
    assert len(found) >= 3
    for url, option, body in found:
        assert option == "-d"
        form = {"content-type": "application/x-www-form-urlencoded"}
        answer = httpx.post(url.replace(ADDRESS, served), content=body, headers=form, timeout=300)
        assert answer.status_code == 200, answer.text
        assert ("Paris" in answer.text) is ("France" in body), answer.text


def test_python(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_index.core")
    found = blocks("python")
    assert len(found) >= 3 and any(ADDRESS in block for block in found)
    for block in found:
        scope: dict[str, Any] = {"__name__": "readme"}
        exec(compile(block.replace(ADDRESS, served), "README.md", "exec"), scope)
        printed = capsys.readouterr().out
        assert printed.count("Paris") >= block.count("capital of France"), f"{block}\n{printed}"


def test_links() -> None:
    places = re.findall(r"\]\(([^)#]+)", README)
    assert len(places) > 15
    missing = [place for place in places if not place.startswith("http") and not (ROOT / place).exists()]
    assert not missing, f"README links to what is not there: {missing}"
