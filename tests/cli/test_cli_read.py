"""`list`, `show`, `inspect`: tables, JSON, and the exit codes of artifacts that are wrong."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import TINY_CONFIG, write_tiny_artifact
from ninfer_cli.main import app
from typer.testing import CliRunner, Result

from ninfer_core.artifact import Artifact
from ninfer_core.container import plan_directory
from ninfer_core.quant import BF16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    write_tiny_artifact(path / "tiny")
    tensors = {"some/weight": ((3, 5), BF16)}
    directory, prefix = plan_directory("private-model", {"frontend/note.txt": 5}, tensors)
    data = (prefix + b"hello").ljust(directory.file_bytes - 30, b"\0") + bytes(30)
    (path / "private.ninfer").write_bytes(data)
    return path


@pytest.fixture
def cli(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NINFER_MODELS", str(folder))
    monkeypatch.delenv("NINFER_DEBUG", raising=False)

    def call(*args: str, code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(args))
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output and "\x1b" not in result.output
        return result

    return call


def test_list(cli, folder: Path) -> None:
    lines = cli("list").stdout.splitlines()
    assert lines[0].split() == ["NAME", "ID", "SIZE", "MODIFIED", "PATH"]
    assert any(line.startswith("tiny ") and str(folder / "tiny") in line for line in lines)
    assert cli("ls").stdout == cli("list").stdout


def test_list_json_and_broken_artifacts(cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, tmp_path / "m")
    with (tmp_path / "m/private.ninfer").open("r+b") as file:
        file.truncate(4100)
    monkeypatch.setenv("NINFER_MODELS", str(tmp_path / "m"))
    value = json.loads(cli("list", "--json").stdout)
    entry = next(entry for entry in value["models"] if entry["name"] == "tiny")
    assert entry["form"] == "safetensors" and entry["model_id"] == "ninfer-demo" and entry["size"] > 100_000
    assert set(entry) == {"name", "model_id", "path", "form", "size", "digest", "modified"}
    (broken,) = value["unusable"]
    assert broken["name"] == "private" and "unfinished" in broken["problem"]
    text = cli("list")
    assert "private" not in text.stdout and "not usable" in text.stderr


def test_show(cli, folder: Path) -> None:
    text = cli("show", "tiny").stdout
    for word in ("4,096 tokens", "completion, thinking, tools, drafting", "bits each", "recipe demo", "Apache-2.0"):
        assert word in text
    shard = next((folder / "tiny").glob("*.safetensors"))
    assert hashlib.sha256(shard.read_bytes()).hexdigest() in text


def test_show_json_adds_up(cli, folder: Path) -> None:
    facts = json.loads(cli("show", "tiny", "--json").stdout)
    with Artifact.open(folder / "tiny") as artifact:
        weights = sum(math.prod(info.shape) for info in artifact.tensors.values())
        assert facts["weights"] == weights == sum(row["weights"] for row in facts["formats"])
        assert sum(row["bytes"] for row in facts["formats"]) == artifact.nbytes
        assert facts["bits_per_weight"] == pytest.approx(8 * artifact.nbytes / weights)
    assert facts["context_length"] == TINY_CONFIG["text_config"]["max_position_embeddings"]
    assert facts["architecture"]["layers"] == 4 and facts["architecture"]["attention_layers"] == 1
    assert (facts["recipe"], facts["encoder"], facts["licence"]) == ("demo", "search", "Apache-2.0")
    for file in facts["files"]:
        data = (folder / "tiny" / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_show_says_what_a_gpu_needs(cli) -> None:
    memory = json.loads(cli("show", "tiny", "--json").stdout)["memory"]
    for row in memory["contexts"]:
        parts = ("weights", "kv_cache", "state", "buffers", "driver")
        assert row["total"] == sum(row[key] for key in parts) and all(row[key] > 0 for key in parts)
    assert [row["context"] for row in memory["contexts"]] == [4096]
    lines = cli("show", "tiny").stdout.splitlines()
    (header,) = (line for line in lines if line.startswith("CONTEXT"))
    assert all(word in header for word in ("KV CACHE", "TOTAL", "24 GB", "80 GB"))
    assert any(line.startswith("longest context") for line in lines)
    kept = memory["contexts"][0]["host_cache"]
    assert (
        0
        < kept - memory["contexts"][0]["kv_cache"]
        <= memory["contexts"][0]["state"] + memory["contexts"][0]["kv_cache"]
    )
    assert any(line.startswith("in host memory (host_cache_gb)") and "4,096 tokens" in line for line in lines)


def test_show_describes_published_models_that_are_not_installed(cli) -> None:
    for name, stored, chunk in (
        ("qwen3.6:27b", 17_482_342_304, 8192),
        ("Qwen/Qwen3.6-35B-A3B", 22_360_205_000, 16_384),
    ):
        result = cli("show", name, "--json")
        assert "is not installed" in result.stderr
        facts = json.loads(result.stdout)
        assert facts["path"] is None and abs(facts["size"] - stored) < 400_000  # the rest are gaps and frontend files
        by_context = {row["context"]: row["total"] for row in facts["memory"]["contexts"]}
        assert list(by_context) == [4_096, 32_768, 131_072, 262_144]
        assert by_context[262_144] < 31.5e9
        longest = {card["name"]: card["longest"] for card in facts["memory"]["cards"]}
        assert longest["32 GB"] == longest["80 GB"] == 262_144
        assert {card["name"]: card["chunk"] for card in facts["memory"]["cards"]} == dict.fromkeys(longest, chunk) | {
            "24 GB": 2048
        }
    assert "not installed" in cli("show", "qwen3.6:27b").stdout


def test_show_does_not_wait_for_torch(folder: Path) -> None:
    code = (
        "import os, sys; os.environ['NINFER_MODELS'] = sys.argv[1]\n"
        "from ninfer_cli.main import main\n"
        "sys.argv = ['ninfer', 'show', 'tiny']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "longest context" in done.stdout


def test_show_template(cli, folder: Path) -> None:
    template = (folder / "tiny/chat_template.jinja").read_text()
    assert cli("show", "tiny", "--template").stdout.rstrip("\n") == template.rstrip("\n")
    assert json.loads(cli("show", "tiny", "--template", "--json").stdout) == {"template": template}


def test_inspect_shows_any_model(cli, folder: Path) -> None:
    text = cli("inspect", str(folder / "private.ninfer")).stdout
    assert "some/weight" in text and "3x5" in text and "BF16" in text and "note.txt" in text
    value = json.loads(cli("inspect", str(folder / "private.ninfer"), "--json").stdout)
    assert value["tensors"] == [{"name": "some/weight", "shape": [3, 5], "format": "BF16", "bytes": 30}]
    assert value["resources"] == [{"name": "note.txt", "bytes": 5}]
    assert (value["model_id"], value["tensor_bytes"], value["verified"]) == ("private-model", 30, None)


def test_inspect_verifies(cli, folder: Path) -> None:
    text = cli("inspect", str(folder / "tiny"), "--verify").stdout
    assert "verified: digests and contents are right" in text
    value = json.loads(cli("inspect", str(folder / "private.ninfer"), "--verify", "--json").stdout)
    digest = hashlib.sha256((folder / "private.ninfer").read_bytes()).hexdigest()
    assert value["verified"] == {"files": {"private.ninfer": digest}, "tensors": 1, "published": False}


def test_a_wrong_digest_is_found(cli, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tiny", tmp_path / "tiny")
    shard = next((tmp_path / "tiny").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = cli("inspect", str(tmp_path / "tiny"), "--verify", code=6)
    assert shard.name in result.stderr and not result.stdout
    assert cli("inspect", str(tmp_path / "tiny")).exit_code == 0


def damage(path: Path, how: str) -> None:
    """Make a good artifact folder bad in one way."""
    manifest = json.loads((path / "manifest.json").read_text())
    shard = next(path.glob("*.safetensors"))
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "missing shard":
        shard.unlink()
    elif how == "newer version":
        manifest["version"] = 99
    elif how == "foreign manifest":
        manifest = {"name": "web app"}
    elif how == "no tokenizer":
        (path / "tokenizer.json").unlink()
        del manifest["files"]["tokenizer.json"]
    elif how == "damaged manifest":
        manifest = {**manifest, "objects": 7}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "bytes"),
        ("missing shard", "missing"),
        ("newer version", "99"),
        ("foreign manifest", "does not describe a model artifact"),
        ("no tokenizer", "tokenizer.json"),
        ("damaged manifest", "objects"),
    ],
)
def test_bad_folders_end_with_6_and_one_line(cli, folder: Path, tmp_path: Path, how: str, says: str) -> None:
    shutil.copytree(folder / "tiny", tmp_path / "bad")
    damage(tmp_path / "bad", how)
    result = cli("show", str(tmp_path / "bad"), code=6)
    assert says in result.stderr and result.stderr.count("\n") == 1 and not result.stdout


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"NINFER\x00\x02" + bytes(100), "revision"),
        (b"NINFER\x00\x01" + b"\xff" * 8 + bytes(100), "directory"),
    ],
)
def test_bad_files_end_with_6_and_one_line(cli, tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "x.ninfer").write_bytes(data)
    for command in ("show", "inspect"):
        result = cli(command, str(tmp_path / "x.ninfer"), code=6)
        assert says in result.stderr and result.stderr.count("\n") == 1


def test_unknown_models_end_with_3(cli) -> None:
    result = cli("show", "tinny", code=3)
    assert "did you mean tiny" in result.stderr
    assert "is not installed" in cli("show", "Qwen/Qwen3.6-27B", "--template", code=3).stderr
    assert "private-model" in cli("show", "private", code=6).stderr


def test_usage(cli) -> None:
    assert "nonexistent" in cli("inspect", "/nonexistent", code=3).stderr
    assert "ninfer-demo" in cli("inspect", "demo").stdout
    cli("show", code=2)
    cli("lst", code=2)
    assert cli("--version").stdout.startswith("ninfer ")
