"""The command line starts quickly, loads nothing it does not need, and the documents name only real commands."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import NINFER, ROOT, environment
from ninfer_cli.main import program

HEAVY = {"torch", "triton", "transformers", "numpy", "rich", "pydantic", "prompt_toolkit", "httpx", "fastapi", "jinja2"}


def imported(tmp_path: Path, *args: str) -> set[str]:
    """The heavy packages that a command loads."""
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr))\n"
        f"from ninfer_cli.main import main\nmain({list(args)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(eval(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["list"], ["list", "--json"], ["ls"], ["run", "--help"]])
def test_what_must_answer_at_once_loads_nothing_heavy(tmp_path: Path, args: list[str]) -> None:
    assert imported(tmp_path, *args) == set()


def work(tmp_path: Path, *args: str) -> tuple[int, int]:
    """What a command does from its first import on: function calls, Python's and C's, and modules in memory."""
    code = (
        "import sys, atexit\n"
        "calls = 0\n"
        "def count(frame, event, arg):\n"
        "    global calls\n"
        "    calls += event.endswith('call')\n"
        "def tell():\n"
        "    sys.setprofile(None)\n"
        "    print(calls, len(sys.modules), file=sys.stderr)\n"
        "atexit.register(tell)\n"
        "sys.setprofile(count)\n"
        f"from ninfer_cli.main import main\nmain({list(args)!r})"
    )
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    calls, modules = done.stderr.split()[-2:]
    return int(calls), int(modules)


@pytest.mark.parametrize("args", [["--help"], ["list"]])
def test_start_up_work(tmp_path: Path, args: list[str]) -> None:
    # Both take 0.25 s of processor time and must stay below 0.4. Seconds say how busy the machine is, calls are the
    # same each time: 96,000 and 166 modules for those 0.25 s, of which 33 modules are Python's own.
    calls, modules = work(tmp_path, *args)
    assert calls < 150_000 and modules < 250


def test_importing_the_program_loads_no_torch() -> None:
    code = f"import sys, ninfer_cli.main; bad = {HEAVY!r} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(Path.home()))


def test_ctrl_c_while_the_program_is_loading_is_quiet(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *args):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from ninfer_cli.__main__ import main\n"
        "main()"
    )
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")  # which shells show as 130


def command_names() -> set[str]:
    """All commands of the program, hidden ones included."""
    app = program(["--help"])
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    return names | {group.name for group in app.registered_groups}


def test_help_lists_every_command(tmp_path: Path) -> None:
    done = subprocess.run([*NINFER, "--help"], env=environment(tmp_path), capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  (\w+)  ", done.stdout.split("Commands:")[1], re.M))
    assert listed == command_names() - {"ls"}


def shell_lines(text: str) -> list[str]:
    """The lines of all shell code blocks of a Markdown text."""
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, re.S)
    return [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]


def test_the_documents_name_only_commands_and_options_that_exist(tmp_path: Path) -> None:
    helps: dict[tuple[str, ...], str] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        lines = [re.sub(r"\s#.*", "", line) for line in shell_lines(page.read_text(encoding="utf-8"))]
        uses = [match for line in lines for match in re.findall(r"(?:^|[\s;&|])ninfer (-?[\w-]+)([^|;&#]*)", line)]
        assert uses or page.name != "README.md", "README.md shows no ninfer command in a shell block"
        for command, rest in uses:
            if command.startswith("-"):
                assert command in ("--help", "--version", "--install-completion"), command
                continue
            assert command in command_names(), f"{page.name} uses `ninfer {command}`, which does not exist"
            path: tuple[str, ...] = (command,)
            if command == "bench":  # a group: the word behind it is a command of its own, or a model
                word = rest.split()[0]
                path += (word if word in ("serve", "workloads", "ops", "table") else "model",)
            if path not in helps:
                call = [*NINFER, *path, "--help"]
                done = subprocess.run(call, env=environment(tmp_path), capture_output=True, text=True, check=True)
                helps[path] = done.stdout
            for option in re.findall(r"(?<!\S)--[a-z-]+", rest):
                assert option in helps[path], f"{page.name} uses `ninfer {command} {option}`, which does not exist"


@pytest.mark.parametrize(("words", "expected"), [("ninfer sh", "show"), ("ninfer show ti", "tiny")])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "pwsh"])
def test_completion_knows_commands_and_models(tmp_path: Path, shell: str, words: str, expected: str) -> None:
    from cli_support import write_tiny_artifact

    write_tiny_artifact(tmp_path / "models/tiny")
    asked = environment(
        tmp_path,
        NINFER_MODELS=str(tmp_path / "models"),
        _NINFER_COMPLETE=f"complete_{shell}",
        COMP_WORDS=words,  # bash
        COMP_CWORD=str(len(words.split()) - 1),
        _TYPER_COMPLETE_ARGS=words,  # the others
        _TYPER_COMPLETE_FISH_ACTION="get-args",
        _TYPER_COMPLETE_WORD_TO_COMPLETE=words.split()[-1],
    )
    done = subprocess.run(NINFER, env=asked, capture_output=True, text=True, timeout=60)
    assert re.findall(r"[a-z]+", re.sub(r"_arguments|:::.*|\t.*", "", done.stdout))[0] == expected, done
    if shell == "bash":
        assert done.stdout.split() == [expected]


@pytest.mark.parametrize(
    ("line", "code", "out"),
    [
        ("--version >/dev/full", 7, ""),
        ("list >/dev/full", 7, ""),
        ("--version >&-", 0, ""),
        ("--version 2>&- <&-", 0, "ninfer "),
        ("--help | head -1", 0, "Usage: ninfer"),
    ],
)
def test_streams_that_are_full_or_closed(tmp_path: Path, line: str, code: int, out: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m ninfer_cli {line}; exit ${{PIPESTATUS[0]}}'],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code and done.stdout.startswith(out)
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == (1 if code else 0)
