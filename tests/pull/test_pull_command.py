"""`ninfer pull`, `rm` and `cp` as commands: output, exit codes, interruption; nothing of a server needed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ninfer_cli.main import program
from typer.testing import CliRunner, Result

from ninfer_core import download, store

from .fake_hub import COMMIT, FakeHub, Faults
from .test_pull import artifact_files, ninfer_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in hub.environ(NINFER_MODELS=str(tmp_path / "models"), NINFER_HOST="127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NINFER_DEBUG", raising=False)

    def call(*args: str, code: int = 0) -> Result:
        result = CliRunner().invoke(program(list(args)), list(args))
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output and "\x1b" not in result.output
        return result

    return call


def test_pull_and_its_answers(cli: Any, hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["me/My-Model"] = artifact_files()
    planned = json.loads(cli("pull", "me/My-Model", "--dry-run", "--json").stdout)
    assert planned["bytes"] == planned["missing"] > 400_000 and planned["commit"] == COMMIT
    assert not (tmp_path / "models").exists()
    text = cli("pull", "me/My-Model", "--dry-run").stdout
    assert "model-00001-of-00002.safetensors" in text and "to download" in text
    result = cli("pull", "me/My-Model")
    assert not result.stdout and f"my-model: 400.7 kB at {tmp_path}/models/my-model" in result.stderr
    again = json.loads(cli("pull", "me/My-Model", "--revision", "main", "--json", "--quiet").stdout)
    assert again["name"] == "my-model" and again["path"] == str(tmp_path / "models/my-model")
    assert "my-model" in cli("list").stdout


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["qwen3.6:28b"], 3, "known: qwen3.6:27b"),
        (["no/thing"], 3, "has no model repository"),
        (["me/checkpoint"], 2, "add --convert"),
        (["me/newer"], 6, "revision 3, this ninfer reads revision 1"),
        (["qwen3.6:27b", "--offline"], 6, "--offline forbids"),
        (["me/wrong"], 6, "also after fetching it again"),
        ([], 2, "Missing argument"),
    ],
)
def test_refusals_and_their_exit_codes(cli: Any, hub: FakeHub, args: list[str], code: int, says: str) -> None:
    newer = bytearray(ninfer_file("x"))
    newer[7] = 3
    hub.repos["me/newer"] = {"x.ninfer": bytes(newer)}
    hub.repos["me/checkpoint"] = {"config.json": b"{}", "model.safetensors": bytes(20_000)}
    hub.repos["me/wrong"] = {"x.ninfer": ninfer_file("x")}
    hub.faults = Faults(flip={5000: 10**6})
    result = cli("pull", *args, code=code)
    assert says in result.stderr
    assert (code == 2 and not args) or result.stderr.splitlines()[-1].startswith("error: ")


def test_no_room_is_exit_code_7(cli: Any, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["me/My-Model"] = artifact_files()
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("U", (), {"free": 1 << 30})())
    result = cli("pull", "me/My-Model", code=7)
    assert "bytes are needed" in result.stderr and f"{1 << 30:,} are free" in result.stderr
    assert set(hub.sent) <= {"manifest.json"}


def test_a_limit_on_file_sizes_is_exit_code_7_too(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["me/x"] = {"x.ninfer": ninfer_file("x", 400_000)}
    env = {**os.environ, **hub.environ(NINFER_MODELS=str(tmp_path / "models"), PYTHONPATH=f"{ROOT}:{ROOT / 'cli'}")}
    line = f'ulimit -f 200; exec "{sys.executable}" -B -m ninfer_cli pull me/x'  # blocks of 1,024 bytes
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7 and "error: file too large" in done.stderr and "ulimit -f" in done.stderr, done.stderr


def test_cp_and_rm(cli: Any, hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["me/My-Model"] = artifact_files()
    cli("pull", "me/My-Model", "--quiet")
    assert "mine now stands for my-model" in cli("cp", "my-model", "Mine").stderr
    cli("cp", "mine", "third:1b", "--quiet")
    entries = json.loads(cli("list", "--json").stdout)["models"]
    assert {entry["name"]: entry["path"] for entry in entries if entry["name"] != "demo"} == dict.fromkeys(
        ("my-model", "mine", "third:1b"), str(tmp_path / "models/my-model")
    )
    assert store.describe("THIRD:1b:latest").alias_of == "my-model", "an alias of an alias means the model"
    for name in ("demo", "my-model", "qwen3.6-27b", "a b", "", "x/y"):
        assert cli("cp", "my-model", name, code=2).stderr.startswith("error: ")
    assert "unknown" in cli("cp", "nothing", "x", code=3).stderr
    assert cli("rm", "mine").stderr == "removed mine; 0 B freed\n"
    assert (tmp_path / "models/my-model").is_dir()
    removed = json.loads(cli("rm", "my-model", "--json").stdout)["removed"]
    assert removed[0]["aliases"] == ["third:1b"] and removed[0]["freed"] > 400_000
    assert not list((tmp_path / "models").glob("my*")) and "third" not in cli("list").output
    assert "unknown" in cli("rm", "my-model", code=3).stderr
    assert "ships with the program" in cli("rm", "demo", code=2).stderr


def test_rm_takes_broken_models_but_no_foreign_paths(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/broken.ninfer").write_bytes(b"NINFER\x00\x01" + b"\xff" * 100)
    (tmp_path / "elsewhere.ninfer").write_bytes(ninfer_file("x", 100))
    cli("rm", "broken")
    assert not (tmp_path / "models/broken.ninfer").exists()
    assert "is not in the store" in cli("rm", str(tmp_path / "elsewhere.ninfer"), code=2).stderr
    assert (tmp_path / "elsewhere.ninfer").exists()


def test_ctrl_c_keeps_what_came_and_says_so(hub: FakeHub, tmp_path: Path) -> None:
    data = ninfer_file("x", 3_000_000)
    hub.repos["me/x"] = {"x.ninfer": data}
    hub.faults = Faults(pause=0.03)
    env = {**os.environ, **hub.environ(NINFER_MODELS=str(tmp_path / "models"), PYTHONPATH=f"{ROOT}:{ROOT / 'cli'}")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ninfer_cli", "pull", "me/x"], env=env, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 90
    while hub.sent.get("x.ninfer", 0) < 300_000 and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on from here" in errors and "Traceback" not in errors
    hub.faults = Faults()
    done = subprocess.run(
        [sys.executable, "-m", "ninfer_cli", "pull", "me/x"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models/x.ninfer").read_bytes() == data and hub.sent["x.ninfer"] < len(data) + 500_000


def test_verify_reads_everything_again(cli: Any, hub: FakeHub, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests/cli"))
    from cli_support import write_tiny_artifact

    made = write_tiny_artifact(tmp_path / "tiny")
    hub.repos["me/tiny"] = {path.name: path.read_bytes() for path in made.iterdir()}
    answer = json.loads(cli("pull", "me/tiny", "--verify", "--json").stdout)
    assert answer["verified"] and store.describe("tiny").path == tmp_path / "models/tiny"
    shard = next((tmp_path / "models/tiny").glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert shard.name in cli("pull", "me/tiny", "--verify", code=6).stderr


def test_a_published_model_by_name(cli: Any, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ninfer_file("qwen3.6-35b-a3b")
    known = store.KNOWN[1]
    small = replace(known, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(store, "KNOWN", (store.KNOWN[0], small, store.KNOWN[2]))
    hub.repos[known.repository] = {known.file: data}
    assert "try: ninfer run qwen3.6:35b-a3b" in cli("pull", "qwen3.6:35b-a3b").stderr
    hub.forget()
    cli("pull", "qwen3.6:35b-a3b")
    assert not hub.requests
