"""`ninfer run` with a prompt: what goes to which stream, inputs, figures, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pexpect
import pytest
import scripted_ninfer
from cli_support import SCRIPTED, ended, environment, plain, write_tiny_artifact
from ninfer_cli.main import app
from typer.testing import CliRunner, Result

from ninfer_core.testing import ScriptedEngine
from ninfer_core.types import Text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_artifact(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[ScriptedEngine, object]]:
    for key in [key for key in os.environ if key.startswith(("NINFER", "NO_COLOR"))]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return []


@pytest.fixture
def run(engines: list[tuple[ScriptedEngine, object]], model: Path):
    def call(*args: str, input: str | bytes = "", name: str = "") -> Result:
        def load(name: str, path: object, options: object) -> ScriptedEngine:
            engine = scripted_ninfer.load(name, path, options)
            engines.append((engine, options))
            return engine

        return CliRunner().invoke(app, ["run", name or str(model), *args], input=input, obj=load)

    return call


def request_of(engines):
    return engines[-1][0].requests[-1]


def test_stdout_carries_the_answer_alone(run) -> None:
    result = run("hello")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "turn 1: hello\n", "")


def test_stdin_goes_in_front_of_the_prompt(run, engines) -> None:
    assert run("summarise", input="some text\n").exit_code == 0
    assert request_of(engines).messages[-1].text == "some text\n\nsummarise"


@pytest.mark.parametrize("args", [[], ["-"]])
def test_the_prompt_may_come_from_stdin(run, engines, args: list[str]) -> None:
    assert run(*args, input="only stdin\n").stdout == "turn 1: only stdin\n"


def test_an_empty_prompt_is_a_usage_error(run, engines) -> None:
    result = run()
    assert result.exit_code == 2 and "the prompt is empty" in result.stderr
    assert not engines, "the model must not be loaded for nothing"


def test_stdin_that_is_no_text_is_refused(run) -> None:
    result = run("x", input=b"\xff\xfe\x00")
    assert result.exit_code == 2 and "not UTF-8" in result.stderr


def test_thinking_is_dropped_or_on_stderr(run, engines) -> None:
    assert "Hmm" not in run("hi", "--think").output
    shown = run("hi", "--think", "--show-thinking")
    assert shown.stdout == "turn 1: hi\n" and shown.stderr == "Hmm, let me see.\n"
    assert request_of(engines).thinking is True
    assert run("hi", "--no-think", "--show-thinking").stderr == ""
    assert request_of(engines).thinking is False
    run("hi")
    assert request_of(engines).thinking is None


def test_every_sampling_flag_reaches_the_request(run, engines) -> None:
    flags = (
        "--temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --presence-penalty 1 --frequency-penalty -1 "
        "--repetition-penalty 1.1 --seed 5 --max-tokens 50 --thinking-budget 9 --stop END --stop FIN --system Be"
    )
    result = run("hi", *flags.split())
    assert result.exit_code == 0 and "[system: Be]" in result.stdout
    request = request_of(engines)
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 7, 0.1)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty, s.seed) == (1, -1, 1.1, 5)
    assert (request.max_tokens, request.stop, request.thinking_budget) == (50, ("END", "FIN"), 9)


def test_load_options_reach_the_loader(run, engines, monkeypatch: pytest.MonkeyPatch) -> None:
    run("hi", "--draft-tokens", "2", "--context", "512", "--device", "cpu", "--threads", "1")
    options = engines[-1][1]
    assert (options.draft_tokens, options.context, options.device, options.threads) == (2, 512, "cpu", 1)
    monkeypatch.setenv("NINFER_CONTEXT_LENGTH", "256")
    run("hi")
    assert engines[-1][1].context == 256
    run("hi", "--max-context", "auto")
    assert engines[-1][1].context == "auto" and engines[-1][1].progress is not None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--temperature", "3"], "temperature is 3"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "-1"], "at least 0"),
        (["--repetition-penalty", "0"], "above 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "at least one character"),
        (["--draft-tokens", "6"], "--draft-tokens"),
        (["--context", "0"], "--context"),
        (["--max-context", "much"], "neither a number of tokens from 1 on nor auto"),
        (["--top-k", "x"], "--top-k"),
        (["--nonsense"], "--nonsense"),
        (["--messages", "/nonexistent.json"], "no such file or directory: /nonexistent.json"),
        (["--tools", "/nonexistent.json"], "no such file or directory: /nonexistent.json"),
        (["--stats-json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
    ],
)
def test_usage_errors_come_before_loading(run, engines, args: list[str], says: str) -> None:
    result = run("hi", *args)
    assert result.exit_code == 2 and says in result.stderr and not result.stdout
    assert "Traceback" not in result.stderr and not engines


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NINFER_CONTEXT_LENGTH", "many"),
        ("NINFER_DEBUG", "maybe"),
        ("NINFER_NOHISTORY", "maybe"),
        ("NINFER_MODELS", __file__),
    ],
)
def test_settings_that_do_not_parse_are_usage_errors(run, monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    result = run("hi", name="demo")
    assert result.exit_code == 2 and name in result.stderr


def test_exit_codes_of_what_can_go_wrong(run, model: Path, tmp_path: Path) -> None:
    def exits(*args: str, name: str = "") -> tuple[int, str]:
        result = run(*args, name=name)
        assert "Traceback" not in result.stderr
        return result.exit_code, result.stderr

    assert exits("hi", name="no-such-model")[0] == 3
    assert exits("hi", name="./no/such/path")[0] == 3
    for word, code, says in (
        ("memory", 5, "20.0 GB"),
        ("broken", 1, "failed while loading"),
        ("bug", 1, "internal error: RuntimeError: unexpected"),
    ):
        link = tmp_path / word
        link.symlink_to(model)
        found, text = exits("hi", name=str(link))
        assert found == code and says in text
    code, text = exits("fail")
    assert code == 1 and "boom" in text
    code, text = exits("x" * 700)
    assert code == 2 and "maximum context length is 600" in text


def test_the_partial_answer_of_a_failed_request_stays_and_ends_its_line(run) -> None:
    result = run("fail", "--no-think")
    assert result.stdout == "half an ans\n" and result.stderr.startswith("error: ")


def test_debug_shows_the_traceback(run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bug").symlink_to(model)
    monkeypatch.setenv("NINFER_DEBUG", "1")
    result = run("hi", name=str(tmp_path / "bug"))
    assert result.exit_code == 1 and "Traceback" in result.stderr and "RuntimeError: unexpected" in result.stderr


def test_messages_from_a_file(run, engines, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "result"},
    ]
    path.write_text(json.dumps({"messages": chat}))
    assert run("and now?", "--messages", str(path)).exit_code == 0
    messages = request_of(engines).messages
    assert [m.role for m in messages] == ["system", "user", "assistant", "tool", "user"]
    assert messages[1].content == (Text("one"),) and messages[-1].text == "and now?"
    call = messages[2].tool_calls[0]
    assert (call.id, call.name, call.arguments, messages[2].reasoning) == ("c1", "f", {"a": 1}, "r")
    path.write_text(json.dumps([{"role": "user", "content": "bare list"}]))
    assert run("--messages", str(path)).stdout == "turn 1: bare list\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no messages"),
        ('{"a": 1}', "holds no messages"),
        ('["x"]', "message 1 is not an object"),
        ('[{"role": "wizard", "content": ""}]', "role 'wizard'"),
        ('[{"role": "user", "content": 5}]', "content must be text"),
        ('[{"role": "user", "text": "x"}]', "unknown key 'text'"),
        ('[{"role": "user", "content": [{"type": "audio"}]}]', "found 'audio'"),
        ('[{"role": "assistant", "tool_calls": [{}]}]', "has no function name"),
    ],
)
def test_bad_message_files_name_the_place(run, engines, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "m.json").write_text(text)
    result = run("hi", "--messages", str(tmp_path / "m.json"))
    assert result.exit_code == 2 and says in result.stderr and "m.json" in result.stderr and not engines


def test_tool_calls_are_json_lines(run, engines, tmp_path: Path) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    for tools in ([{"type": "function", "function": function}], [function]):
        (tmp_path / "tools.json").write_text(json.dumps(tools))
        result = run("tool please", "--tools", str(tmp_path / "tools.json"))
        (line,) = result.stdout.splitlines()
        call = json.loads(line)
        assert (call["name"], call["arguments"]) == ("weather", {"city": "Paris"}) and call["id"]
        assert request_of(engines).tools[0].raw == {"type": "function", "function": function}


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", '[{"name": ""}]', '[{"name": "f", "parameters": 3}]'])
def test_bad_tool_files_are_usage_errors(run, engines, tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    result = run("hi", "--tools", str(tmp_path / "tools.json"))
    assert result.exit_code == 2 and "tools.json" in result.stderr and not engines


def test_figures(run, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    result = run("count", "--verbose", "--max-tokens", "41", "--stats-json", str(path), "--no-think", "--seed", "3")
    for label in ("load ", "prompt ", "first token ", "answer ", "rounds ", "accepted ", "finish "):
        assert any(line.startswith(label) for line in result.stderr.splitlines()), label
    stats = json.loads(path.read_text())
    assert (stats["completion_tokens"], stats["finish_reason"], stats["seed"]) == (41, "length", 3)
    assert stats["decode_tokens_per_second"] > 0 and stats["load_seconds"] >= 0
    assert stats["accepted_tokens"] <= stats["drafted_tokens"]
    assert stats["acceptance_by_position"][0] == pytest.approx(1.0, abs=0.1)
    assert stats["tokens_per_round"] == pytest.approx(2, abs=0.2)


def test_a_cut_answer_is_said_on_stderr_unless_quiet(run) -> None:
    assert "cut after 5 tokens" in run("count", "--max-tokens", "5", "--no-think").stderr
    assert run("count", "--max-tokens", "5", "--no-think", "--quiet").stderr == ""


# --- the real program ------------------------------------------------------------------------------------------------


def spawn(model: Path, home: Path, *args: str, **env: str) -> pexpect.spawn:
    child = pexpect.spawn(
        SCRIPTED[0],
        [*SCRIPTED[1:], "run", str(model), *args],
        env=environment(home, **env),
        encoding="utf-8",
        timeout=60,
        dimensions=(40, 120),
    )
    child.delaybeforesend = None
    return child


def test_a_closed_pipe_is_quiet(model: Path, tmp_path: Path) -> None:
    command = " ".join([*SCRIPTED, "run", str(model), "count", "--no-think", "< /dev/null"])
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 3; echo; echo ${{PIPESTATUS[0]}}"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "1 2\n0\n" and done.stderr == ""


def test_tokens_are_flushed_as_they_come(model: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*SCRIPTED, "run", str(model), "hang", "--think"],
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.read(5) == b"slow "  # the script then waits for 30 seconds
    child.send_signal(signal.SIGTERM)
    start = time.monotonic()
    child.communicate(timeout=60)
    assert child.returncode == 143 and time.monotonic() - start < 20


def test_sigint_ends_with_130_and_keeps_the_figures(model: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    child = subprocess.Popen(
        [*SCRIPTED, "run", str(model), "hang", "--think", "--stats-json", str(stats)],
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.read(5) == b"slow "
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"\n", b"")
    assert json.loads(stats.read_text())["finish_reason"] == "cancelled"


def test_a_terminal_shows_thinking_dim(model: Path, tmp_path: Path) -> None:
    code, text = ended(spawn(model, tmp_path, "hi", "--think", "-q"))
    # stdin is a terminal here: nothing is read from it in front of the prompt
    assert code == 0 and text == "\x1b[2mHmm, let me see.\x1b[0m\r\n\r\nturn 1: hi\r\n"
    assert "Hmm" not in ended(spawn(model, tmp_path, "hi", "--think", "--hide-thinking"))[1]


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_codes_where_they_are_not_wanted(model: Path, tmp_path: Path, env: dict[str, str]) -> None:
    code, text = ended(spawn(model, tmp_path, "hi", "--think", **env))
    assert code == 0 and "\x1b" not in text
    assert text == "[thinking]\r\nHmm, let me see.\r\n[answer]\r\nturn 1: hi\r\n"


def test_escape_codes_of_the_model_cannot_reach_the_terminal(model: Path, tmp_path: Path, run) -> None:
    code, text = ended(spawn(model, tmp_path, "escape", "--no-think", "-q"))
    assert code == 0 and text == "a\u241b[31mb\r\n"
    assert run("escape", "--no-think").stdout == "a\x1b[31mb\n"


def test_output_of_an_ascii_locale_does_not_fail(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*SCRIPTED, "run", str(model), "naïve 你好", "--no-think"],
        env=environment(tmp_path, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"turn 1: na?ve ??\n")


def test_an_idle_pipe_on_stdin_is_announced(model: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*SCRIPTED, "run", str(model), "hi", "--no-think"],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert b"waiting for text on stdin" in child.stderr.readline()
    out, _ = child.communicate(b"late", timeout=20)
    assert out == b"turn 1: late\n\nhi\n"


def test_plain_strips_what_a_terminal_would_hide() -> None:
    assert plain("\x1b[2J\x1b[31mred\x1b[0m\r\n") == "red\n"


def test_the_example_files_are_valid(run, engines) -> None:
    folder = Path(__file__).parents[2] / "examples/messages"
    result = run("--messages", str(folder / "chat.json"), "--tools", str(folder / "tools.json"), "--context", "4000")
    assert result.exit_code == 0, result.stderr
    request = request_of(engines)
    assert len(request.messages) == 4 and request.tools[0].name == "get_weather"
