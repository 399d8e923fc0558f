"""The interactive prompt in a real terminal: keys, commands, Ctrl-C, history; and its state without a terminal."""

from __future__ import annotations

import json
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pexpect
import pytest
from cli_support import SCRIPTED, ended, environment, plain, write_tiny_artifact

PROMPT = ">>>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_artifact(tmp_path_factory.mktemp("models") / "tiny")


class Terminal:
    """The program in a pseudo-terminal, with what was seen so far as plain text."""

    def __init__(self, model: Path, home: Path, *args: str, columns: int = 120, **env: str) -> None:
        self.home = home
        self.child = pexpect.spawn(
            SCRIPTED[0],
            [*SCRIPTED[1:], "run", str(model), *args],
            env=environment(home, **env),
            encoding="utf-8",
            timeout=60,
            dimensions=(40, columns),
        )
        self.child.delaybeforesend = None
        self.raw = ""
        self.expect(PROMPT)

    def expect(self, text: str) -> str:
        """Wait for a text; returns the plain output before it."""
        self.child.expect_exact(text)
        self.raw += self.child.before + text
        return plain(self.child.before)

    def ask(self, line: str, answer: str) -> str:
        """Type a line, wait for the answer and the next prompt."""
        self.child.send(line + "\r")
        seen = self.expect(answer)
        return seen + self.expect(PROMPT)

    def key(self, keys: str) -> None:
        self.child.send(keys)

    def end(self) -> int | None:
        status, last = ended(self.child)
        self.raw += last
        return status

    @property
    def history(self) -> Path:
        return self.home / ".local/state/ninfer/history"


@pytest.fixture
def terminal(model: Path, tmp_path: Path):
    made: list[Terminal] = []

    def start(*args: str, **options: Any) -> Terminal:
        made.append(Terminal(model, tmp_path, *args, **options))
        return made[-1]

    yield start
    for item in made:
        item.child.close(force=True)


def test_a_conversation_keeps_its_turns(terminal) -> None:
    t = terminal("--no-think")
    t.ask("hello", "turn 1: hello")
    t.ask("again", "turn 2: again")
    t.ask("/undo", "took back the last message; 2 messages left")
    t.ask("other", "turn 2: other")
    t.ask("/clear", "conversation cleared")
    t.ask("fresh", "turn 1: fresh")
    t.ask("/regen", "turn 1: fresh")
    t.key("\x04")
    assert t.end() == 0


def test_several_lines(terminal) -> None:
    t = terminal("--no-think")
    t.key('"""one\rtwo"""\r')
    t.expect("turn 1: one")
    t.expect("two")
    t.expect(PROMPT)
    t.key("three\\\rfour\r")
    t.expect("turn 2: three")
    t.expect(PROMPT)
    t.key("five\x1b\rsix\r")
    t.expect("turn 3: five")
    t.expect(PROMPT)
    t.key("\x1b[200~seven\reight\x1b[201~")
    t.key("\r")
    t.expect("turn 4: seven")
    t.expect(PROMPT)
    t.key("/bye\r")
    assert t.end() == 0


def test_wide_characters_on_a_narrow_terminal(terminal) -> None:
    """One backspace takes one character of two cells, also where the line has wrapped; the answer comes whole."""
    t = terminal("--no-think", columns=24)
    t.key("\u4e2d\u6587" * 9 + "\u5b57\x7f\x7fq\u0301\r")
    t.expect("turn 1: ")
    assert t.expect(PROMPT).startswith("\u4e2d\u6587" * 8 + "\u4e2dq\u0301\n")
    t.ask("/show parameters", "temperature")
    t.key("\x04")
    assert t.end() == 0


def test_an_editor_takes_the_message(terminal, tmp_path: Path) -> None:
    program = tmp_path / "editor"
    program.write_text('#!/bin/sh\nprintf \'%s\\nand more\' "$(cat "$1")" > "$1"\n')
    program.chmod(0o755)
    t = terminal("--no-think", NINFER_EDITOR=str(program), EDITOR="false")
    t.key("a beginning\x07")
    t.expect("and more")
    t.key("\r")
    t.expect("turn 1: a beginning")
    t.expect("and more")
    t.expect(PROMPT)
    t.ask("/list", "demo")
    t.key("\x04")
    assert t.end() == 0


def test_history_is_private_and_pasted_blocks_stay_out_of_it(terminal) -> None:
    t = terminal("--no-think")
    t.ask("typed line", "turn 1")
    t.key("\x1b[200~SECRET=1\rSECRET=2\x1b[201~")
    t.key("\r")
    t.expect("turn 2")
    t.expect(PROMPT)
    t.key("\x1b[A\x1b[A\x1b[A\r")  # up through both pasted lines to the typed one
    t.expect("turn 3: typed line")
    t.expect(PROMPT)
    t.key("\x04")
    assert t.end() == 0
    assert stat.S_IMODE(t.history.stat().st_mode) == 0o600
    text = t.history.read_text()
    assert "typed line" in text and "SECRET" not in text


@pytest.mark.parametrize(("args", "env"), [(["--no-history"], {}), ([], {"NINFER_NOHISTORY": "1"})])
def test_history_can_be_switched_off(terminal, args: list[str], env: dict[str, str]) -> None:
    t = terminal(*args, "--no-think", **env)
    t.ask("hello", "turn 1")
    t.key("\x04")
    assert t.end() == 0 and not t.history.exists()


def test_read_puts_a_file_in_front_and_not_into_the_history(terminal, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("alpha\nbeta\n")
    t = terminal("--no-think")
    t.ask(f"/read {tmp_path}/notes.txt", "2 lines go in front")
    t.ask("summarise", "alpha")
    t.ask("/read /nonexistent", "no such file or directory: /nonexistent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    t.ask(f"/read {tmp_path}/binary", "not UTF-8")
    t.key("\x04")
    assert t.end() == 0 and "alpha" not in t.history.read_text()


def test_save_and_load(terminal, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    t = terminal("--no-think", "--system", "Be brief")
    t.ask("hello", "[system: Be brief]")
    t.ask("/set parameter temperature 0.5", "temperature: 0.5")
    t.ask(f"/save {path}", "saved 2 messages")
    t.ask("/clear", "cleared")
    t.ask("/set system", "removed")
    t.ask(f"/load {path}", "loaded 2 messages")
    t.ask("next", "turn 2: next [system: Be brief]")
    t.ask("/load /nonexistent.json", "no such file")
    t.key("\x04")
    assert t.end() == 0
    saved = json.loads(path.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["parameters"] == {"temperature": 0.5} and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_commands_answer(terminal) -> None:
    t = terminal("--no-think")
    t.ask("/help", "/regen")
    t.ask("/show", "600 tokens")
    t.ask("/show parameters", "repetition_penalty")
    t.ask("/set parameter seed 4", "seed: 4")
    t.ask("what seed", "[seed 4]")
    t.ask("/regen", "[seed 5]")
    t.ask("/set parameter seed default", "seed: default of the model")
    t.ask("/tokens", "of 600 tokens")
    t.ask("/stats", "first token")
    t.ask("/set verbose", "on")
    t.ask("hi", "finish       stop")
    t.ask("/set quiet", "off")
    t.ask("/set parameter top_q 1", "did you mean top_p?")
    t.ask("/set parameter top_p 7", "top_p is 7")
    t.ask("/tokns", "did you mean /tokens?")
    t.ask("//slash", "/slash")
    t.key("/bye\r")
    assert t.end() == 0


def test_thinking_is_switched_and_dim(terminal) -> None:
    t = terminal("--think")
    t.ask("hi", "turn 1: hi")
    assert "\x1b[2mHmm, let me see.\x1b[0m" in t.raw
    t.ask("/set nothink", "thinking: off")
    assert "Hmm" not in t.ask("again", "turn 2: again")
    t.ask("/set think", "thinking: on")
    assert "Hmm" in t.ask("and again", "turn 3: and again")
    t.ask("/set think low", "thinking: on, up to 4,096 tokens")
    t.ask("/show parameters", "thinking_budget     4096")
    t.ask("/set think none", "thinking: off")
    t.ask("/set think much", "unknown level 'much'")
    t.key("\x04")
    assert t.end() == 0


def test_lines_break_between_words_unless_switched_off(terminal) -> None:
    words = "alpha bravo charlie delta echo foxtrot"
    t = terminal("--no-think", columns=30)
    t.key(words + "\r")
    t.expect("turn 1: ")
    assert t.expect(PROMPT).startswith("alpha bravo charlie \ndelta echo foxtrot\n")
    t.ask("/set nowordwrap", "lines break between words: no")
    t.key(words + "\r")
    t.expect("turn 2: ")
    assert t.expect(PROMPT).startswith(words + "\n")
    t.ask("/set wordwrap", "lines break between words: yes")
    t.ask("/set margins", "/set knows parameter, ")
    t.key("\x04")
    assert t.end() == 0


def test_history_is_switched_in_the_conversation(terminal) -> None:
    t = terminal("--no-think", "--no-history")
    t.ask("before", "turn 1")
    t.ask("/set history", "is kept")
    t.ask("during", "turn 2")
    t.ask("/set nohistory", "not kept")
    t.ask("after", "turn 3")
    t.key("\x04")
    assert t.end() == 0 and stat.S_IMODE(t.history.stat().st_mode) == 0o600
    kept = [line[1:] for line in t.history.read_text().splitlines() if line.startswith("+")]
    assert kept == ["during", "/set nohistory"]


def test_license_and_template_are_shown(terminal) -> None:
    t = terminal("--no-think")
    assert "Apache-2.0" in t.ask("/show license", "Apache-2.0\r\n") + t.raw
    t.ask("/show template", "<|im_start|>")
    t.ask("/show weather", "/show knows info, parameters, system, license, template")
    t.key("\x04")
    assert t.end() == 0


def test_tab_completes_commands_parameters_and_paths(terminal, tmp_path: Path) -> None:
    (tmp_path / "unique-name.txt").write_text("x")
    t = terminal("--no-think")
    t.key("/reg\t")
    t.expect("/regen")
    t.key("\x15/set parameter temp\t 1\r")
    t.expect("temperature: 1.0")
    t.expect(PROMPT)
    t.key(f"/read {tmp_path}/uni\t\r")
    t.expect("1 lines go in front")


def test_ctrl_c_stops_the_turn_and_keeps_what_was_said(terminal) -> None:
    t = terminal("--no-think")
    t.key("count\r")
    t.expect("1 2 3 4 5")
    t.key("\x03")
    t.expect("(stopped; what was said so far is kept)")
    t.expect(PROMPT)
    time.sleep(1.1)  # past the double press
    t.ask("/save " + str(t.home / "c.json"), "saved 2 messages")
    answer = json.loads((t.home / "c.json").read_text())["messages"][1]["content"]
    assert answer.startswith("1 2 3 4 5") and "300" not in answer
    t.ask("still here", "turn 2: still here")
    t.key("\x04")
    assert t.end() == 0


def test_a_second_ctrl_c_within_a_second_leaves(terminal) -> None:
    t = terminal("--no-think")
    for _ in range(10):  # on a busy machine more than that second may pass between the two
        t.key("count\r")
        t.expect("1 2 3")
        t.key("\x03")
        t.expect("(stopped")
        t.expect(PROMPT)
        t.key("\x03")
        if t.child.expect_exact([pexpect.EOF, "Ctrl-C again"]) == 0:
            break
        t.expect(PROMPT)
    assert t.end() == 130


def test_ctrl_c_twice_at_an_empty_prompt_leaves(terminal) -> None:
    t = terminal()
    t.key("half a line")
    t.expect("half a line")
    t.key("\x03")  # drops the line only
    t.expect(PROMPT)
    t.key("\x03")
    t.expect("Ctrl-C again")
    t.expect(PROMPT)
    t.ask("/show system", "no system")  # anything in between disarms it
    t.key("\x03")
    t.expect("Ctrl-C again")
    t.expect(PROMPT)
    t.key("\x03")
    assert t.end() == 130


def test_a_failed_turn_is_shown_and_forgotten(terminal) -> None:
    t = terminal("--no-think")
    t.ask("fail", "error: ")
    t.ask("x" * 700, "/undo drops the last turn")
    t.ask("fine", "turn 1: fine")
    t.key("\x04")
    assert t.end() == 0


@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_leaves_with_143(terminal, busy: bool) -> None:
    t = terminal("--no-think")
    if busy:
        t.key("count\r")
        t.expect("1 2 3")
    t.child.kill(signal.SIGTERM)
    assert t.end() == 143


def test_a_dumb_terminal_gets_no_escape_codes(terminal) -> None:
    t = terminal("--think", TERM="dumb")
    t.ask("hi", "turn 1: hi")
    t.ask("/set history", "cannot edit lines")
    t.key('"""one\r')
    t.expect("... ")
    t.key('two"""\r')
    t.expect("turn 2: one")
    t.expect(PROMPT)
    t.key("\x03")
    t.expect("Ctrl-C again")
    t.key("\x04")
    assert t.end() == 0
    assert "\x1b" not in t.raw and not t.history.exists()


def test_colours_are_off_under_no_color(terminal) -> None:
    t = terminal("--think", NO_COLOR="1")
    t.ask("hi", "turn 1: hi")
    t.key("\x04")
    assert t.end() == 0
    # cursor movement belongs to line editing; colours and dim text do not
    styles = set(re.findall(r"\x1b\[[0-9;]*m", t.raw)) - {"\x1b[0m"}
    assert not styles and "[thinking]" in t.raw
