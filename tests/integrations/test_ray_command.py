"""`ninfer serve --ray` up to where Ray begins. Needs no Ray."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from ninfer_cli.server import command
from typer.testing import CliRunner

from ninfer_core.errors import InvalidRequestError, MissingDependencyError

ROOT = Path(__file__).resolve().parents[2]


def serve(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command.serve)
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls: list[tuple] = []

    def start(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    found = [SimpleNamespace(load=lambda: start)]
    monkeypatch.setattr(command, "entry_points", lambda **wanted: found if wanted["group"] == "ninfer.serve" else [])
    return calls


def test_ray_gets_the_settings_the_model_and_the_engines_options(started: list[tuple]) -> None:
    done = serve("--ray", "--replicas", "2", "--parallel", "3", "--device", "cpu", "--port", "1234")
    assert done.exit_code == 0, done.output
    settings, model, fields, replicas = started[0]
    assert (settings.port, settings.slots, model, replicas) == (1234, 3, "demo", "2")
    assert fields["max_sequences"] == 3 and fields["device"] == "cpu"
    assert serve("--ray").exit_code == 0 and started[1][3] == "auto"


def test_options_that_do_not_go_together(started: list[tuple]) -> None:
    for arguments, text in (
        (["--replicas", "2"], "needs --ray"),
        (["--ray", "--keep-alive", "5m"], "--keep-alive is 300 s"),
    ):
        error = serve(*arguments).exception
        assert isinstance(error, InvalidRequestError) and text in str(error)
    assert not started


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "entry_points", lambda **wanted: [])
    error = serve("--ray").exception
    assert isinstance(error, MissingDependencyError) and 'pip install "ninfer[ray]"' in str(error)

    def load() -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr(command, "entry_points", lambda **wanted: [SimpleNamespace(load=load)])
    error = serve("--ray").exception
    assert isinstance(error, MissingDependencyError) and 'pip install "ninfer[ray]"' in str(error)


def test_the_entry_point_names_what_there_is() -> None:
    import ast
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["ninfer.serve"]["ray"].partition(":")
    tree = ast.parse((ROOT / "integrations" / (module.replace(".", "/") + ".py")).read_text())
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert [argument.arg for argument in defined[0].args.args] == ["settings", "model", "options", "replicas"]


def test_the_package_says_that_it_needs_ray() -> None:
    if importlib.util.find_spec("ray") is not None:
        pytest.skip("ray is installed")
    with pytest.raises(ImportError, match="ray"):
        importlib.import_module("ray_ninfer.app")
    assert "ray" not in {name.split(".")[0] for name in sys.modules}
