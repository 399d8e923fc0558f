"""The model store: names, paths, what counts as installed, and the errors for what does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_core import store
from ninfer_core.errors import ArtifactError, InvalidRequestError, ModelNotFoundError

MAGIC = b"NINFER\x00\x01"


def write_file(path: Path, model_id: str = "qwen3.6-27b", *, cut: int = 0) -> Path:
    """A `.ninfer` file of one small resource, without its last `cut` bytes."""
    objects = [{"name": "frontend/x", "kind": "resource", "encoding": "raw-bytes-v1", "offset": 0, "bytes": 100}]
    text = json.dumps({"model_id": model_id, "objects": objects}).encode()
    data = (MAGIC + len(text).to_bytes(8, "little") + text).ljust(4096, b"\0") + bytes(100)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[: len(data) - cut])
    return path


def write_folder(path: Path, model_id: str = "my-model", **manifest: object) -> Path:
    """An artifact folder of one 10-byte shard."""
    path.mkdir(parents=True)
    (path / "model-00001-of-00001.safetensors").write_bytes(bytes(10))
    root = {
        "format": "ninfer-artifact",
        "version": 1,
        "model_id": model_id,
        "files": {"model-00001-of-00001.safetensors": {"bytes": 10, "sha256": "0" * 64}},
        "objects": {},
    }
    (path / "manifest.json").write_text(json.dumps(root | manifest))
    return path


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def models(env: dict[str, str]) -> Path:
    return store.models_dir(env)


@pytest.mark.parametrize(
    "name",
    ["qwen3.6:27b", "QWEN3.6:27B", "qwen3.6-27b", "Qwen/Qwen3.6-27B", "qwen3.6:27b:latest", "qwen3.6-27b:latest"],
)
def test_every_spelling_means_the_same_file(env: dict[str, str], name: str) -> None:
    path = write_file(models(env) / "qwen3_6_27b.ninfer")
    assert store.resolve(name, env) == path


def test_the_two_models_are_told_apart(env: dict[str, str]) -> None:
    small = write_file(models(env) / "qwen3_6_27b.ninfer")
    large = write_file(models(env) / "qwen3_6_35b_a3b.ninfer", "qwen3.6-35b-a3b")
    assert store.resolve("Qwen/Qwen3.6-35B-A3B", env) == large
    assert store.resolve("qwen3.6:27b", env) == small


def test_a_private_build_keeps_its_own_name_beside_the_published_one(env: dict[str, str]) -> None:
    write_file(models(env) / "qwen3_6_27b.ninfer")
    write_folder(models(env) / "Mine", "qwen3.6-27b")
    names = [entry.name for entry in store.installed(env)]
    assert {"qwen3.6:27b", "mine"} <= set(names)
    assert store.resolve("MINE", env) == models(env) / "Mine"


def test_the_hub_cache_is_searched_unless_a_folder_is_set(env: dict[str, str], tmp_path: Path) -> None:
    hub = tmp_path / "cache/huggingface/hub/models--someone--Qwen3.6-27B"
    path = write_file(hub / "snapshots/0123abcd/any.ninfer")
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("0123abcd")
    write_file(hub / "snapshots/ffff/old.ninfer")
    assert store.resolve("qwen3.6:27b", env) == path
    own = {**env, "NINFER_MODELS": str(tmp_path / "own")}
    with pytest.raises(ModelNotFoundError):
        store.resolve("qwen3.6:27b", own)
    other = {"HF_HUB_CACHE": str(tmp_path / "cache/huggingface/hub"), "XDG_CACHE_HOME": str(tmp_path / "none")}
    assert store.resolve("qwen3.6:27b", other) == path
    assert store.resolve("qwen3.6:27b", {"HF_HOME": str(tmp_path / "cache/huggingface"), **other}) == path


def test_own_folder_comes_before_the_hub_cache(env: dict[str, str], tmp_path: Path) -> None:
    hub = tmp_path / "cache/huggingface/hub/models--someone--Qwen3.6-27B"
    write_file(hub / "snapshots/0123abcd/any.ninfer")
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("0123abcd")
    path = write_file(models(env) / "qwen3_6_27b.ninfer")
    assert store.resolve("qwen3.6:27b", env) == path
    assert [entry.path for entry in store.installed(env) if entry.name == "qwen3.6:27b"] == [path]


def test_entries_say_what_they_are(env: dict[str, str]) -> None:
    path = write_folder(models(env) / "mine")
    (entry,) = [entry for entry in store.installed(env) if entry.path == path]
    assert (entry.model_id, entry.form, entry.known) == ("my-model", "safetensors", None)
    assert entry.size == sum(file.stat().st_size for file in path.iterdir())
    assert len(entry.digest) == 64 and entry.modified > 1e9


@pytest.mark.parametrize("cut", [1, 100, 4090, 4196])
def test_an_unfinished_file_is_never_installed(env: dict[str, str], cut: int) -> None:
    path = write_file(models(env) / "qwen3_6_27b.ninfer", cut=cut)
    assert path not in [entry.path for entry in store.installed(env)]
    (broken,) = [entry for entry in store.survey(env) if entry.path == path]
    assert broken.problem
    with pytest.raises(ArtifactError, match="not usable"):
        store.resolve("qwen3.6:27b", env)


def test_a_folder_with_a_missing_or_short_shard_is_never_installed(env: dict[str, str]) -> None:
    short, missing = write_folder(models(env) / "short"), write_folder(models(env) / "missing")
    (short / "model-00001-of-00001.safetensors").write_bytes(bytes(9))
    (missing / "model-00001-of-00001.safetensors").unlink()
    problems = {entry.name: entry.problem for entry in store.survey(env)}
    assert "9 of 10 bytes" in problems["short"] and "is missing" in problems["missing"]
    assert not {"short", "missing"} & {entry.name for entry in store.installed(env)}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a .ninfer file"),
        (b"GGUF" + bytes(5000), "not a .ninfer file"),
        (b"NINFER\x00\x02" + bytes(5000), "revision 2"),
        (MAGIC + (1 << 63).to_bytes(8, "little") + bytes(5000), "cut short or damaged"),
        (MAGIC + (9).to_bytes(8, "little") + b"not json!" + bytes(5000), "not JSON"),
        (MAGIC + (2).to_bytes(8, "little") + b"{}" + bytes(5000), "not well formed"),
        (MAGIC + (2).to_bytes(8, "little") + b"[]" + bytes(5000), "not a JSON object"),
    ],
)
def test_foreign_and_damaged_files_are_named_not_fatal(env: dict[str, str], data: bytes, problem: str) -> None:
    models(env).mkdir(parents=True)
    (models(env) / "x.ninfer").write_bytes(data)
    (entry,) = [entry for entry in store.survey(env) if entry.name == "x"]
    assert problem in entry.problem


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ({"version": 2}, "version is 2"),
        ({"format": "other"}, "does not describe"),
        ({"files": [1]}, "not well formed"),
        ({"files": {"a": {}}}, "not well formed"),
    ],
)
def test_foreign_and_newer_folders_are_named_not_fatal(
    env: dict[str, str], manifest: dict[str, object], problem: str
) -> None:
    write_folder(models(env) / "x", **manifest)
    (entry,) = [entry for entry in store.survey(env) if entry.name == "x"]
    assert problem in entry.problem


def test_hidden_and_temporary_names_are_no_candidates(env: dict[str, str]) -> None:
    for name in (".hidden.ninfer", "a.ninfer.part", "b.ninfer.incomplete"):
        write_file(models(env) / name)
    write_folder(models(env) / "c.partial")
    assert [entry.name for entry in store.survey(env) if entry.name != "demo"] == []


def test_unknown_names_say_what_is_installed_and_what_is_near(env: dict[str, str]) -> None:
    write_folder(models(env) / "my-assistant")
    with pytest.raises(ModelNotFoundError):
        store.resolve("", env)
    with pytest.raises(ModelNotFoundError, match=r"did you mean my-assistant;") as caught:
        store.resolve("my-asistant", env)
    assert "installed: " in caught.value.message and "\n" not in caught.value.message
    with pytest.raises(ModelNotFoundError, match=r"did you mean qwen3\.6:27b"):
        store.resolve("qwen3.6:27", env)


def test_a_known_model_that_is_absent_says_how_to_get_it(env: dict[str, str]) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        store.resolve("qwen3.6:35b-a3b", env)
    message = caught.value.message
    assert "is not installed" in message and "ninfer pull qwen3.6:35b-a3b (22.8 GB)" in message


def test_paths(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = write_file(tmp_path / "a.ninfer"), write_folder(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert store.resolve("a.ninfer", env) == file
    assert store.resolve("./b", env) == folder
    assert store.resolve(str(folder), env) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.resolve("~/b", env) == folder
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        store.resolve("./none", env)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="ninfer convert"):
        store.resolve("./checkpoint", env)


def test_the_models_folder_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match="NINFER_MODELS"):
        store.models_dir({"NINFER_MODELS": str(tmp_path / "file")})
    assert store.models_dir({"NINFER_MODELS": str(tmp_path)}) == tmp_path
    assert store.models_dir({"NINFER_MODELS": "models"}) == Path.cwd() / "models"


def test_a_dangling_link_is_named_not_fatal(env: dict[str, str]) -> None:
    models(env).mkdir(parents=True)
    (models(env) / "x.ninfer").symlink_to(models(env) / "gone")
    (entry,) = [entry for entry in store.survey(env) if entry.name == "x"]
    assert "No such file" in entry.problem


def test_the_store_needs_no_torch() -> None:
    code = "import sys, ninfer_core.store as s; s.installed(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
