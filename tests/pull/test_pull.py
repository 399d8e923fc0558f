"""`pull` from names to installed models: sources, places, waiting for each other, offline, refusals, conversion."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_core import library, store
from ninfer_core.errors import (
    ArtifactError,
    DiskSpaceError,
    DownloadError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
)
from ninfer_core.pull import Options, Status, plan, pull
from ninfer_core.remote import Transfer

from .fake_hub import COMMIT, FakeHub, Faults

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

PART = 64 << 10
FAST = Transfer(part=PART, connections=4, backoff=0.01, retries=3, stall=5.0)
MAGIC = b"NINFER\x00\x01"


def ninfer_file(model_id: str, count: int = 500_000, seed: int = 1) -> bytes:
    """A `.ninfer` file of one resource of random bytes."""
    objects = [{"name": "frontend/x", "kind": "resource", "encoding": "raw-bytes-v1", "offset": 0, "bytes": count}]
    text = json.dumps({"model_id": model_id, "objects": objects}).encode()
    head = (MAGIC + len(text).to_bytes(8, "little") + text).ljust(4096, b"\0")
    return head + random.Random(seed).randbytes(count)


def artifact_files(model_id: str = "my-model", seed: int = 2) -> dict[str, bytes]:
    """The files of an artifact folder, as the store and the manifest reader check them."""
    rng = random.Random(seed)
    files = {f"model-0000{i}-of-00002.safetensors": rng.randbytes(200_000 + i) for i in (1, 2)}
    files |= {"config.json": b'{"a": 1}', "tokenizer.json": b"{}"}
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    objects = {"x": {"shape": [4, 128], "format": "BF16", "shard": "model-00001-of-00002.safetensors"}}
    manifest = {"format": "ninfer-artifact", "version": 1, "model_id": model_id, "recipe": "", "encoder": "search"}
    text = json.dumps({**manifest, "files": listed, "objects": objects}).encode()
    return {**files, "manifest.json": text, "README.md": b"# not needed", ".gitattributes": b""}


@pytest.fixture(params=["hub cache", "models folder"])
def env(hub: FakeHub, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    more = {"NINFER_MODELS": str(tmp_path / "models")} if request.param == "models folder" else {}
    return hub.environ(XDG_CACHE_HOME=str(tmp_path / "cache"), HOME=str(tmp_path), **more)


@pytest.fixture
def published(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The 27B's published file, in small."""
    data = ninfer_file("qwen3.6-27b")
    known = store.KNOWN[0]
    small = replace(known, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(store, "KNOWN", (small, *store.KNOWN[1:]))
    hub.repos[known.repository] = {known.file: data, "README.md": b"# hello"}
    return data


def options(env: dict[str, str], **more: Any) -> Options:
    return Options(environ=env, transfer=FAST, **more)


def nothing_half(env: dict[str, str]) -> bool:
    """No unfinished file is left, and nothing unusable is listed."""
    return not library.leftovers(env) and not [entry for entry in store.survey(env) if entry.problem]


@pytest.mark.parametrize(
    "name", ["qwen3.6:27b", "Qwen/Qwen3.6-27B", "neroued/Qwen3.6-27B-NInfer", "QWEN3.6-27B:latest"]
)
def test_a_published_model(hub: FakeHub, env: dict[str, str], published: bytes, name: str) -> None:
    seen: list[Status] = []
    entry = pull(name, options(env, progress=seen.append))
    assert (entry.name, entry.path.read_bytes()) == ("qwen3.6:27b", published)
    assert store.resolve("qwen3.6:27b", env) == entry.path and nothing_half(env)
    assert ("NINFER_MODELS" in env) == (entry.path == Path(env.get("NINFER_MODELS", "")) / "qwen3_6_27b.ninfer")
    phases = list(dict.fromkeys(status.phase for status in seen))
    assert phases == ["manifest", "download", "install"]
    last = [status for status in seen if status.phase == "download"][-1]
    assert last.done == last.size == last.all_done == last.total == len(published)
    assert last.digest == hashlib.sha256(published).hexdigest()
    hub.forget()
    assert pull(name, options(env)).path == entry.path and not hub.requests, "complete: nobody is asked"


def test_the_cache_is_laid_out_as_other_tools_expect(
    hub: FakeHub, published: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = pull("qwen3.6:27b", options(hub.environ(HF_HOME=str(tmp_path / "hf"), HOME=str(tmp_path))))
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(
        "neroued/Qwen3.6-27B-NInfer", "qwen3_6_27b.ninfer", cache_dir=tmp_path / "hf/hub"
    )
    assert Path(str(found)) == entry.path and entry.path.is_symlink()
    scanned = huggingface_hub.scan_cache_dir(tmp_path / "hf/hub")
    (repo,) = scanned.repos
    assert repo.repo_id == "neroued/Qwen3.6-27B-NInfer" and repo.size_on_disk == len(published) and not scanned.warnings


def test_a_published_file_is_pinned(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    other = ninfer_file("qwen3.6-27b", seed=9)
    hub.repos["neroued/Qwen3.6-27B-NInfer"]["qwen3_6_27b.ninfer"] = other
    with pytest.raises(DownloadError, match=r"holds another .*--revision main"):
        pull("qwen3.6:27b", options(env))
    entry = pull("qwen3.6:27b", options(env, revision="main"))
    assert entry.path.read_bytes() == other
    hub.repos["neroued/Qwen3.6-27B-NInfer"] = {}
    with pytest.raises(ModelNotFoundError, match="does not hold"):
        library.remove("qwen3.6:27b", env)
        pull("qwen3.6:27b", options(env))


def test_a_converted_repository(hub: FakeHub, env: dict[str, str]) -> None:
    hub.repos["me/My-Model"] = artifact_files()
    what = plan("me/My-Model", options(env))
    assert {file.name for file in what.files} == set(artifact_files()) - {"README.md", ".gitattributes"}
    assert what.missing == what.total and what.commit == COMMIT and not store.survey(env)[1:]
    entry = pull("me/My-Model", options(env))
    assert entry.name == "my-model" and not entry.problem and nothing_half(env)
    assert store.resolve("my-model", env) == entry.path
    assert {path.name for path in entry.path.iterdir()} == {file.name for file in what.files}
    assert plan("me/My-Model", options(env, revision="main")).missing == 0
    hub.forget()
    pull("me/My-Model", options(env, revision="main"))
    assert set(hub.sent) <= {"manifest.json"}, "what is here is not fetched again"


def test_a_repository_is_found_by_its_own_name_in_the_hub_cache(hub: FakeHub, tmp_path: Path) -> None:
    env = hub.environ(XDG_CACHE_HOME=str(tmp_path))
    hub.repos["me/My-Model"] = artifact_files()
    assert store.resolve("me/My-Model", env) if pull("me/My-Model", options(env)) else None
    assert store.describe("ME/my-model", env).repository == "me/My-Model"


def test_a_new_revision_replaces_the_old_one(
    hub: FakeHub, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["me/My-Model"] = artifact_files()
    pull("me/My-Model", options(env))
    hub.repos["me/My-Model"] = artifact_files(seed=3)
    monkeypatch.setattr(f"{FakeHub.__module__}.COMMIT", "f" * 40)
    entry = pull("me/My-Model", options(env, revision="main"))
    assert store.resolve("my-model", env) == entry.path and nothing_half(env)
    shard = "model-00001-of-00002.safetensors"
    assert (entry.path / shard).read_bytes() == artifact_files(seed=3)[shard]
    assert library.remove("my-model", env).freed > (800_000 if "NINFER_MODELS" not in env else 400_000)
    assert [item.name for item in store.survey(env)] == ["demo"] and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": b"{}", "model.safetensors": b"x" * 20_000}, "--convert"),
        ({"README.md": b"hi"}, "holds no model artifact"),
        ({"a.ninfer": ninfer_file("a"), "b.ninfer": ninfer_file("b")}, "several artifacts"),
    ],
)
def test_repositories_that_hold_something_else(
    hub: FakeHub, env: dict[str, str], files: dict[str, bytes], says: str
) -> None:
    hub.repos["me/other"] = files
    with pytest.raises(InvalidRequestError, match=says):
        pull("me/other", options(env))
    assert nothing_half(env)


def test_versions_are_named_before_anything_large_is_fetched(hub: FakeHub, env: dict[str, str]) -> None:
    data = bytearray(ninfer_file("x"))
    data[7] = 2
    hub.repos["me/newer"] = {"x.ninfer": bytes(data)}
    with pytest.raises(ArtifactError, match=r"revision 2, this ninfer reads revision 1: upgrade with pip install"):
        pull("me/newer", options(env))
    hub.repos["me/foreign"] = {"x.ninfer": b"GGUF" + bytes(20_000)}
    with pytest.raises(ArtifactError, match=r"is not a \.ninfer file"):
        pull("me/foreign", options(env))
    files = artifact_files()
    files["manifest.json"] = json.dumps({**json.loads(files["manifest.json"]), "version": 7}).encode()
    hub.repos["me/folder"] = files
    with pytest.raises(ArtifactError, match=r"version 7 found, this ninfer supports version \d+; upgrade"):
        pull("me/folder", options(env))
    assert sum(hub.sent.values()) < 100_000 and nothing_half(env)


def test_a_manifest_that_contradicts_the_repository(hub: FakeHub, env: dict[str, str]) -> None:
    files = artifact_files()
    hub.repos["me/m"] = {**files, "model-00001-of-00002.safetensors": b"y" * 200_001}
    with pytest.raises(ArtifactError, match=r"not the file its manifest\.json describes"):
        pull("me/m", options(env))
    hub.repos["me/m"] = {name: data for name, data in files.items() if name != "config.json"}
    with pytest.raises(ArtifactError, match=r"lacks config\.json"):
        pull("me/m", options(env))
    hub.repos["me/m"] = files
    hub.faults = Faults(flip={100: 10**6})
    with pytest.raises(DownloadError, match="also after fetching it again"):
        pull("me/m", options(env))
    assert [item.name for item in store.installed(env)] == ["demo"], "nothing unverified is ever listed"


def test_a_hub_without_digests(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    hub.faults = Faults(no_digests=True)
    pull("qwen3.6:27b", options(env))
    hub.repos["me/x"] = {"x.ninfer": ninfer_file("x")}
    with pytest.raises(DownloadError, match="no digest is known"):
        pull("me/x", options(env))


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("qwen3.6:99b", ModelNotFoundError, "known: qwen3.6:27b, qwen3.6:35b-a3b"),
        ("no/such", ModelNotFoundError, "no model repository 'no/such'"),
        ("./folder/x", ModelNotFoundError, "owner/name"),
    ],
)
def test_names_that_cannot_be_pulled(hub: FakeHub, env: dict[str, str], name: str, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        pull(name, options(env))


def test_gated_and_unreachable(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    hub.faults = Faults(token="t0ken")
    with pytest.raises(PermissionDeniedError, match="terms to be accepted"):
        pull("qwen3.6:27b", options(env))
    pull("qwen3.6:27b", options({**env, "HF_TOKEN": "t0ken"}))
    library.remove("qwen3.6:27b", env)
    with pytest.raises(DownloadError, match="does not tell what"):
        pull("qwen3.6:27b", options({**env, "HF_ENDPOINT": "http://127.0.0.1:9"}))


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "--offline"])
def test_offline_makes_no_connection(
    hub: FakeHub, env: dict[str, str], published: bytes, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("qwen3.6:27b", options(env))

    def refuse(*args: Any) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    off = options(env, offline=True) if how == "--offline" else options({**env, how: "1"})
    assert pull("qwen3.6:27b", off).name == "qwen3.6:27b"
    assert pull("demo", off).name == "demo"
    with pytest.raises(DownloadError, match=how):
        pull("qwen3.6:35b-a3b", off)


def test_the_disk_is_checked_before_the_first_byte(
    hub: FakeHub, env: dict[str, str], published: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = len(published) + (1 << 30) - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": free})())
    with pytest.raises(DiskSpaceError, match=f"{free + 1:,} bytes are needed, {free:,} are free"):
        pull("qwen3.6:27b", options(env))
    assert not hub.sent and nothing_half(env)
    free += 1
    pull("qwen3.6:27b", options(env))


def test_a_cancelled_pull_resumes(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    hub.faults = Faults(pause=0.003)
    come: list[int] = [0]
    with pytest.raises(RequestCancelledError):
        pull(
            "qwen3.6:27b",
            options(env, progress=lambda status: come.append(status.done), cancelled=lambda: come[-1] > 200_000),
        )
    left = library.leftovers(env)
    assert left and sum(item.size for item in left) > 100_000
    assert [item.name for item in store.installed(env)] == ["demo"]
    assert plan("qwen3.6:27b", options(env)).missing < len(published)
    hub.settle()
    hub.faults = Faults()
    pull("qwen3.6:27b", options(env))
    assert nothing_half(env) and hub.sent["qwen3_6_27b.ninfer"] < len(published) + 4 * PART


def test_two_pulls_at_once_share_one_download(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    results: list[Any] = []
    seen: list[Status] = []
    met = threading.Event()
    hub.on_file = lambda name: met.wait(60) if sum(hub.sent.values()) >= PART else None
    hub.faults = Faults(pause=0.05)

    def note(status: Status) -> None:
        seen.append(status)
        if status.phase == "waiting" and status.all_done:
            met.set()

    def run(progress: Callable[[Status], None]) -> None:
        results.append(pull("qwen3.6:27b", options(env, progress=progress)))

    first = threading.Thread(target=run, args=(lambda status: None,))
    first.start()
    while not hub.sent:
        time.sleep(0.005)
    second = threading.Thread(target=run, args=(note,))
    second.start()
    first.join(120)
    second.join(120)
    assert len(results) == 2 and results[0] == results[1]
    assert hub.sent["qwen3_6_27b.ninfer"] == len(published)
    waiting = [status for status in seen if status.phase == "waiting"]
    assert waiting and waiting[-1].all_done > 0 and waiting[0].file == f"process {os.getpid()}"


def pull_in_a_process(env: dict[str, str], known: Any, done: Any) -> None:
    store.KNOWN = known
    done.put(str(pull("qwen3.6:27b", options(env)).path))


def test_three_processes_and_one_is_killed(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    killed = threading.Event()
    hub.on_file = lambda name: killed.wait(60) if sum(hub.sent.values()) >= 2 * PART else None
    hub.faults = Faults(pause=0.01)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["ninfer_core.pull", "huggingface_hub", "pytest"])
    done = processes.Queue()
    started = []
    for _ in range(3):
        process = processes.Process(target=pull_in_a_process, args=(env, store.KNOWN, done))
        process.start()
        started.append(process)
        end = time.monotonic() + 20
        while not hub.sent and time.monotonic() < end:
            time.sleep(0.01)
    started[0].kill()
    started[0].join(20)
    killed.set()
    assert done.get(timeout=30) == done.get(timeout=30) == str(store.resolve("qwen3.6:27b", env))
    for process in started:
        process.join(10)
    assert hub.sent["qwen3_6_27b.ninfer"] <= len(published) + 5 * PART and nothing_half(env)


def test_old_parts_of_nothing_are_pruned(hub: FakeHub, env: dict[str, str], published: bytes) -> None:
    hub.faults = Faults(pause=0.003)
    with pytest.raises(RequestCancelledError):
        pull("qwen3.6:27b", options(env, cancelled=lambda: bool(hub.sent)))
    folder = library.leftovers(env)[0].path
    folder = folder if folder.is_dir() else folder.parent
    for name, age in (("old.part", 2 * library.DAY), ("new.part", 0.0)):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (time.time() - age, time.time() - age))
    hub.faults = Faults()
    kept: list[bool] = []
    pull("qwen3.6:27b", options(env, progress=lambda status: kept.append((folder / "new.part").exists())))
    assert not (folder / "old.part").exists() and any(kept)


def test_a_checkpoint_is_converted_shard_by_shard(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = importlib.import_module("test_convert")
    source = made.write_checkpoint(tmp_path / "src", made.make_tensors(True), made.config_json(True), shards=4)
    hub.repos["org/Check"] = {path.name: path.read_bytes() for path in source.iterdir()}
    shards = [name for name in hub.repos["org/Check"] if name.endswith(".safetensors")]
    env = hub.environ(NINFER_MODELS=str(tmp_path / "models"))
    monkeypatch.setattr("ninfer_core.shortlist.default_counts", lambda ids: made.COUNTS)
    monkeypatch.setattr("ninfer_core.shortlist.vocabulary", known_vocabulary(made))
    assert plan("org/Check", options(env, convert=True)).convert
    work = tmp_path / "models/check.checkpoint"

    def stop(status: Status) -> None:
        if status.phase == "convert" and status.done > status.size // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("org/Check", options(env, convert=True, progress=stop))
    assert work.is_dir() and [item.name for item in store.installed(env)] == ["demo"]
    hub.faults = Faults(flip={50_000: 1})
    entry = pull("org/Check", options(env, convert=True))
    assert entry.name == "check" and not work.exists() and nothing_half(env)
    whole = made.convert(source, tmp_path / "whole")
    assert made.payloads(entry.path) == made.payloads(whole.path), "the same bytes as from a complete folder"
    for name in shards:
        assert hub.sent[name] <= 3 * len(hub.repos["org/Check"][name]) + (1 << 20)
    hub.forget()
    assert pull("org/Check", options(env, convert=True)).path == entry.path


def known_vocabulary(made: Any) -> Callable[[Any], Any]:
    from ninfer_core import shortlist

    original = shortlist.vocabulary

    def vocabulary(resources: Any) -> Any:
        ids, forced, _ = original(resources)
        return ids, forced, True

    return vocabulary


def test_shards_are_dropped_when_nothing_needs_them(hub: FakeHub, tmp_path: Path) -> None:
    from ninfer_core.remote import RemoteFile, client
    from ninfer_core.streamed import StreamedShards

    header = json.dumps({"x": {"dtype": "U8", "shape": [100_000], "data_offsets": [0, 100_000]}}).encode()
    data = [len(header).to_bytes(8, "little") + header + random.Random(i).randbytes(100_000) for i in range(3)]
    hub.repos["a/b"] = {f"s{i}.safetensors": blob for i, blob in enumerate(data)}
    files = [
        RemoteFile(f"{hub.url}/a/b/resolve/main/{name}", name, len(blob), sha256=hashlib.sha256(blob).hexdigest())
        for name, blob in hub.repos["a/b"].items()
    ]
    with client() as session:
        streamed = StreamedShards(tmp_path, files, session, FAST, lambda file, done: None, lambda: False)
        streamed.prepare()
        stamps = {file.name: (tmp_path / file.name).stat().st_mtime_ns for file in files}
        names = [file.name for file in files]
        streamed.provide(frozenset(names[:1]), frozenset(names[1:]))
        assert (tmp_path / names[0]).read_bytes() == data[0]
        streamed.provide(frozenset(names[1:2]), frozenset(names[2:]))
        assert (tmp_path / names[1]).read_bytes() == data[1]
        hole = (tmp_path / names[0]).read_bytes()
        assert hole[: 8 + len(header)] == data[0][: 8 + len(header)] and not any(hole[8 + len(header) :])
        again = StreamedShards(tmp_path, files, session, FAST, lambda file, done: None, lambda: False)
        again.prepare()
        hub.forget()
        again.provide(frozenset(names[1:]), frozenset())
        assert set(hub.sent) == {names[2]}, "what another run fetched is used"
        assert {file.name: (tmp_path / file.name).stat().st_mtime_ns for file in files} == stamps
