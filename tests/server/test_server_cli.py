"""Commands that talk to a running server: run, ps, stop, rm, launch, doctor, and pulls over HTTP."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ninfer_cli import remote
from ninfer_cli.launch import PROGRAMS
from ninfer_cli.main import program
from typer.testing import CliRunner, Result

from ninfer_core.errors import ServerUnreachableError
from ninfer_core.testing import Reply, Script
from tests import serving

from .conftest import Running, ScriptedModels

ROOT = Path(__file__).parents[2]
wait_for = partial(serving.wait_for, seconds=20.0)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("NINFER_DEBUG", "NINFER_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def call(server: Running | None, *args: str, code: int = 0, stdin: str = "") -> Result:
        monkeypatch.setenv("NINFER_HOST", f"127.0.0.1:{server.port if server else 9}")
        result = CliRunner().invoke(program(list(args)), list(args), input=stdin)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output and "\x1b" not in result.output
        return result

    return call


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", "http://127.0.0.1:11434"),
        (":80", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("[::]:7", "http://[::1]:7"),
        ("example.com:1", "http://example.com:1"),
        ("https://example.com", "https://example.com:443"),
        ("https://example.com/ninfer/", "https://example.com:443/ninfer"),
        ("http://h:5/v1", "http://h:5"),
    ],
)
def test_where_a_server_is(text: str, url: str) -> None:
    assert remote.server_url(text) == url


def test_ps_and_stop(cli: Any, start: Any, models: ScriptedModels) -> None:
    server = start()
    lines = cli(server, "ps").stdout.splitlines()
    assert lines[0].split() == ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "REQUESTS", "TOK/S", "UNTIL"]
    assert lines[1].startswith("alpha") and lines[1].endswith("the server stops") and "0+0" in lines[1]
    (entry,) = json.loads(cli(server, "ps", "--json").stdout)["models"]
    assert entry["names"][0] == "alpha" and entry["context_length"] > 0
    assert "beta is not loaded; loaded: alpha" in cli(server, "stop", "beta", code=3).stderr
    assert "is unloaded" in cli(server, "stop", "ALPHA").stderr
    assert wait_for(lambda: models.events == ["close alpha"])
    assert json.loads(cli(server, "ps", "--json").stdout) == {"models": []}
    for command in (["ps"], ["stop", "x"], ["launch", "codex"]):
        assert "no ninfer server answers at http://127.0.0.1:9" in cli(None, *command, code=4).stderr


def test_rm_of_a_loaded_model_needs_force(cli: Any, start: Any, models: ScriptedModels, tmp_path: Path) -> None:
    server = start()
    assert "ninfer stop alpha" in cli(server, "rm", "alpha", code=4).stderr
    assert (tmp_path / "models/alpha").exists()
    cli(server, "rm", "beta")
    cli(server, "rm", "alpha", "--force")
    assert not (tmp_path / "models/alpha").exists()
    assert wait_for(lambda: models.events == ["close alpha"]), "the server unloads it behind its answer"


def test_a_server_with_keys(cli: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve("Hello!", api_keys=("secret",))
    assert "key" in cli(server, "ps", code=4).stderr
    monkeypatch.setenv("NINFER_API_KEY", "secret")
    assert "scripted" in cli(server, "ps").stdout
    assert cli(server, "run", "scripted", "hi", "--no-think").stdout == "Hello!\n"


def test_run_uses_a_running_server(cli: Any, start: Any, models: ScriptedModels) -> None:
    server = start()
    assert cli(server, "run", "alpha", "hi", "--no-think").stdout == "alpha\n"
    assert cli(server, "run", "beta", "hi", "--no-think", "--verbose").stdout == "beta\n"
    assert models.events == ["close alpha", "load beta"], "a command that names another model switches too"
    assert cli(None, "run", "beta", "hi", "--host", server.url, "--no-think").stdout == "beta\n"
    assert "no model 'delta'" in cli(None, "run", "delta", "hi", "--host", server.url, code=3).stderr
    assert "no ninfer server answers" in cli(None, "run", "beta", "hi", "--host", "127.0.0.1:9", code=4).stderr
    both = cli(server, "run", "beta", "hi", "--host", server.url, "--context", "100", code=2)
    assert "are about loading it here" in both.stderr


def test_run_says_how_long_a_server_keeps_the_model(cli: Any, start: Any, models: ScriptedModels) -> None:
    server = start()
    cli(server, "run", "alpha", "hi", "--no-think", "--keep-alive", "10m")
    assert wait_for(lambda: server.state.host.expires is not None), "the request ends behind its answer"
    assert 300 < server.state.host.expires - time.time() <= 600
    cli(server, "run", "alpha", "hi", "--no-think", "--keep-alive", "0")
    assert wait_for(lambda: models.events == ["close alpha"])
    wrong = cli(server, "run", "alpha", "hi", "--keep-alive", "soon", code=2)
    assert "--keep-alive is 'soon'" in wrong.stderr
    alone = cli(None, "run", "demo", "hi", "--keep-alive", "5m", code=2)
    assert "is about a running server" in alone.stderr


def test_run_with_a_preset_on_a_server(cli: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[helper]\nmodel = "beta"\nsystem = "Help."\ntop_k = 3\n')
    server = start(presets=path)
    asked = ("run", "helper", "hi", "--no-think")
    for place, env in ((server, path), (None, tmp_path / "none.toml")):  # known here, or to the server alone
        monkeypatch.setenv("NINFER_PRESETS", str(env))
        host = () if place else ("--host", server.url)
        assert cli(place, *asked, *host).stdout == "beta\n"
        request = server.state.engine.requests[-1]
        assert request.messages[0].text == "Help." and request.sampling.top_k == 3


def test_run_loads_by_itself_where_no_server_can(cli: Any, serve: Any) -> None:
    server = serve()
    before = len(server.engine.requests)
    asked = ("run", "demo", "hi", "--no-think", "--max-tokens", "2", "--quiet", "--seed", "1")
    alone = cli(None, *asked).stdout
    assert alone and alone == cli(server, *asked).stdout == cli(server, *asked, "--no-server").stdout
    assert len(server.engine.requests) == before, "that server has another model"


def test_formats(cli: Any, serve: Any, tmp_path: Path) -> None:
    server = serve(Script(Reply('{"a": 1}')))
    assert json.loads(cli(server, "run", "scripted", "hi", "--format", "json", "--no-think").stdout) == {"a": 1}
    assert server.last.response_format.kind == "json"
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    cli(server, "run", "scripted", "hi", "--schema", str(schema), "--no-think")
    assert server.last.response_format.schema["properties"] == {"a": {"type": "integer"}}
    cut = cli(server, "run", "scripted", "hi", "--format", "json", "--no-think", "--max-tokens", "3", code=4)
    assert cut.stdout == '{"a\n' and "was cut" in cut.stderr
    schema.write_text("[1]")
    assert "is not a JSON schema" in cli(server, "run", "scripted", "hi", "--format", str(schema), code=2).stderr
    assert "no such file" in cli(server, "run", "scripted", "hi", "--format", "none.json", code=2).stderr


def test_the_demo_model_keeps_a_schema(cli: Any, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], '
                      '"additionalProperties": false}')  # fmt: skip
    asked = ("run", "demo", "Say a number.", "--no-think", "--max-tokens", "60", "--seed", "3")
    answer = cli(None, *asked, "--format", str(schema)).stdout
    assert json.loads(answer)["n"] in (1, 2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_launch_prints_what_it_would_do(cli: Any, serve: Any, name: str) -> None:
    server = serve()
    lines = cli(server, "launch", name, "--print", "--", "--flag", "a b").stdout.splitlines()
    exported = dict(shlex.split(line)[1].split("=", 1) for line in lines if line.startswith("export "))
    command = shlex.split(lines[-1])
    assert command[0] == PROGRAMS[name].executable and command[-2:] == ["--flag", "a b"]
    everything = " ".join([*exported.values(), *command])
    assert server.url in everything and "scripted" in everything
    context = str(server.state.card.context_length)
    if name == "claude":
        assert exported["ANTHROPIC_BASE_URL"] == server.url and "unset ANTHROPIC_API_KEY" in lines
        assert exported["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == context
    elif name == "codex":
        assert f"model_context_window={context}" in command and 'model_providers.ninfer.wire_api="responses"' in command
    elif name == "opencode":
        config = json.loads(exported["OPENCODE_CONFIG_CONTENT"])
        assert config["model"] == "ninfer/scripted"
        assert config["provider"]["ninfer"]["models"]["scripted"]["limit"]["context"] == int(context)


def test_launch_starts_the_program(serve: Any, tmp_path: Path) -> None:
    server = serve()
    fake = tmp_path / "bin/claude"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL [$ANTHROPIC_API_KEY] $*"\nexit 5\n')
    fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "NINFER_HOST": server.url}
    env |= {"ANTHROPIC_API_KEY": "mine", "PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    done = subprocess.run(
        [sys.executable, "-m", "ninfer_cli", "launch", "claude", "--", "-p", "hi"],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 5 and done.stdout == f"{server.url} scripted [] -p hi\n", done.stderr


def test_launch_refusals(cli: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = serve()
    assert "known: claude, codex" in cli(server, "launch", "vim", code=2).stderr
    assert "has no model 'delta'" in cli(server, "launch", "codex", "--model", "delta", "--print", code=3).stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "npm install -g" in cli(server, "launch", "codex", code=2).stderr


def test_doctor(cli: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NINFER_MODELS", str(tmp_path))
    text = cli(None, "doctor").stdout
    for word in ("python", "torch", "what would compute", "GB of main memory", f"models at {tmp_path}", "demo:",
                 "ninfer pull qwen3.6:27b", "nobody listens"):  # fmt: skip
        assert word in text, word
    assert "a ninfer server runs at" in cli(serve(), "doctor").stdout
    (tmp_path / "broken.ninfer").write_bytes(b"NINFER\x00\x01" + b"\xff" * 50)
    (tmp_path / "old.part").write_bytes(b"x" * 5000)
    os.utime(tmp_path / "old.part", (1, 1))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    value = json.loads(cli(None, "doctor", "--json", "--verify", code=6).stdout)
    assert not value["healthy"]
    failed = [finding for finding in value["findings"] if finding["level"] == "fail"]
    assert len(failed) == 1 and "broken" in failed[0]["text"] and failed[0]["mend"] == "ninfer rm broken"
    texts = "\n".join(finding["text"] for finding in value["findings"])
    assert (
        "demo: verified" in texts and "old.part is an unfinished download" in texts and "HF_HUB_OFFLINE is set" in texts
    )


def test_doctor_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ninfer_core import checkup

    monkeypatch.setattr(checkup, "_driver", lambda: "570.1")
    levels = [(finding.level, finding.text) for finding in checkup._device()]
    assert levels[0][0] == "fail" and ("built for the CPU" in levels[0][1] or "sees no card" in levels[0][1])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: type("P", (), {"name": "Old", "major": 6, "minor": 1})
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i=0: (10**9, 8 * 10**9))
    small, large = checkup.Card("Small", 24 * 10**9, 20 * 10**9), checkup.Card("Large", 80 * 10**9, 79 * 10**9)
    monkeypatch.setattr(checkup, "cards", lambda: [small, large])
    fits = [finding for finding in checkup._memory() if "card" in finding.text]
    assert [finding.level for finding in fits] == ["ok", "note", "ok", "ok"]
    assert "qwen3.6:35b-a3b does not fit on card 0 (Small): 20.0 GB are free" in fits[1].text
    assert "up to 262,144 tokens" in fits[3].text
    card = checkup._card(0, "570.1")
    assert card.level == "fail" and "1.0 of 8.0 GB free" in card.text and "compute capability" in card.mend


def test_a_server_that_is_none(cli: Any, tmp_path: Path) -> None:
    import http.server
    import threading

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *args: Any) -> None:
            return

    other = http.server.HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        assert remote.find_server(f"127.0.0.1:{other.server_port}", {}) is None
        with pytest.raises(ServerUnreachableError):
            remote.call(f"http://127.0.0.1:{other.server_port}", "/api/ps", {})
    finally:
        other.shutdown()
        other.server_close()
