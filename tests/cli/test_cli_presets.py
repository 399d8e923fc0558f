"""Presets on the command line: the file and its faults, and `run`, `list`, `show`, `doctor` and completion with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scripted_ninfer
from cli_support import write_tiny_artifact
from ninfer_cli.main import app
from ninfer_cli.options import complete_model
from ninfer_cli.presets import PresetFile, presets_path, read_presets
from typer.testing import CliRunner, Result

from ninfer_core.errors import InvalidRequestError
from ninfer_core.testing import ScriptedEngine

GOOD = """
[Terse]
model = "tiny"
system = "Be terse."
think = false
temperature = 0.5
max_tokens = 90
stop = "END"

[lost]
model = "qwen3.6:27b"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_artifact(folder / "tiny", model_id="tiny")
    return folder


@pytest.fixture
def presets(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "presets.toml"
    path.write_text(GOOD)
    monkeypatch.setenv("NINFER_MODELS", str(folder))
    monkeypatch.setenv("NINFER_PRESETS", str(path))
    monkeypatch.setenv("NINFER_HOST", "127.0.0.1:9")
    monkeypatch.delenv("NINFER_DEBUG", raising=False)
    return path


def call(*args: str, obj: object = None) -> Result:
    return CliRunner().invoke(app, [*args], obj=obj)


def test_run_takes_what_is_not_said(presets: Path) -> None:
    engines: list[ScriptedEngine] = []

    def load(name: str, path: object, options: object) -> ScriptedEngine:
        engines.append(scripted_ninfer.load(name, path, options))  # type: ignore[arg-type]
        return engines[-1]

    result = call("run", "terse", "hello", obj=load)
    assert (result.exit_code, result.stdout) == (0, "turn 1: hello [system: Be terse.]\n"), result.stderr
    request = engines[-1].requests[-1]
    assert (request.sampling.temperature, request.max_tokens, request.stop) == (0.5, 90, ("END",))
    assert request.thinking is False
    call("run", "TERSE:latest", "hello", "--temperature", "1", "--system", "Be long.", "--think", obj=load)
    request = engines[-1].requests[-1]
    assert (request.sampling.temperature, request.thinking) == (1, True)
    assert request.messages[0].text == "Be long."
    lost = call("run", "lost", "hello", obj=load)
    assert lost.exit_code == 3 and "ninfer pull qwen3.6:27b" in lost.stderr


def test_list_and_show(presets: Path) -> None:
    result = call("list")
    assert "preset of tiny" in result.stdout and "lost" not in result.stdout
    assert "the preset lost needs qwen3.6:27b" in result.stderr
    value = json.loads(call("list", "--json").stdout)
    assert value["presets"] == [
        {
            "name": "terse",
            "model": "tiny",
            "system": "Be terse.",
            "think": False,
            "parameters": {"temperature": 0.5, "max_tokens": 90, "stop": ["END"]},
        }
    ]
    assert [item["name"] for item in value["unusable"]] == ["lost"]
    shown = call("show", "terse").stdout
    assert "Be terse." in shown and "name       tiny" in shown
    assert json.loads(call("show", "terse", "--json").stdout)["preset"]["name"] == "terse"
    assert json.loads(call("show", "tiny", "--json").stdout)["preset"] is None
    assert complete_model("te") == ["terse"]


def test_a_file_that_is_wrong_is_told_where_it_is_used(presets: Path) -> None:
    presets.write_text("[x]\nmodel = ")
    result = call("list")
    assert result.exit_code == 0 and "tiny" in result.stdout and "is not a TOML file" in result.stderr
    refused = call("run", "tiny", "hi", obj=scripted_ninfer.load)
    assert refused.exit_code == 2 and "is not a TOML file" in refused.stderr
    assert complete_model("ti") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 5", "[x] must be a table"),
        ("[demo]\nmodel = 'tiny'", "the name is a model's"),
        ("['a/b']\nmodel = 'tiny'", "holds a slash"),
        ("[x]\nmodel = 5", "[x]: model must be a text"),
        ("[x]\nsystem = 'S'", "[x] names no model"),
        ("[x]\nmodel = 'tiny'\nthink = 'yes'", "think must be true or false"),
        ("[x]\nmodel = 'tiny'\ntemprature = 1", "unknown key 'temprature'; known: model, system, think, temperature"),
        ("[x]\nmodel = 'tiny'\ntemperature = 3", "[x]: temperature is 3; it must be at least 0 and at most 2"),
        ("[x]\nmodel = 'tiny'\ntemperature = 'hot'", "temperature must be a number"),
        ("[x]\nmodel = 'tiny'\nseed = true", "seed must be a number"),
        ("[x]\nmodel = 'tiny'\nstop = [1]", "stop must be a text or a list of texts"),
        ("[x]\nmodel = 'tiny'\nstop = ''", "stop must hold at least one character"),
    ],
)
def test_faults_name_the_table_and_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        read_presets(path)
    assert says in caught.value.message and str(path) in caught.value.message


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert presets_path({}) == tmp_path / ".config/ninfer/presets.toml"
    assert presets_path({"XDG_CONFIG_HOME": "/c"}) == Path("/c/ninfer/presets.toml")
    assert presets_path({"NINFER_PRESETS": "~/p"}) == tmp_path / "p"
    assert read_presets(tmp_path / "none.toml") == {} and PresetFile(None).get("x") is None
