"""`POST /api/pull`: status lines with progress, watchers that join, and what ends a download."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from ninfer_cli.server.host import ModelHost, loaded
from ninfer_cli.server.settings import ServerSettings

from ninfer_core import library, store
from ninfer_core.pull import Options
from ninfer_core.remote import Transfer
from tests import serving

from .conftest import Running, ScriptedModels, running

sys.path.insert(0, str(Path(__file__).parents[1]))
from pull.fake_hub import FakeHub, Faults
from pull.test_pull import artifact_files, ninfer_file

FAST = Transfer(part=64 << 10, connections=2, backoff=0.01, retries=3, stall=5.0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()
    for name, value in hub.environ(NINFER_MODELS=str(tmp_path / "models")).items():
        monkeypatch.setenv(name, value)
    hub.repos["me/My-Model"] = artifact_files()
    yield hub
    hub.close()


@pytest.fixture
def server(hub: FakeHub) -> Iterator[Running]:
    models, settings = ScriptedModels(), ServerSettings()
    host = ModelHost(settings, loaded(models.make("demo"), str(store.demo_path()), name="demo"), models)
    with running(host) as server:
        server.state.pulls.options = lambda: Options(transfer=FAST)
        yield server


wait_for = partial(serving.wait_for, seconds=30.0)


def test_progress_as_clients_expect_it(server: Running, hub: FakeHub) -> None:
    hub.faults = Faults(pause=0.02)
    lines = [json.loads(line) for line in server.lines("/api/pull", {"model": "me/My-Model"})]
    statuses = [line["status"] for line in lines]
    assert statuses[0] == "pulling manifest" and statuses[-3:] == [
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    moving = [line for line in lines if "completed" in line]
    assert moving and all(0 <= line["completed"] <= line["total"] for line in moving)
    shard = artifact_files()["model-00001-of-00002.safetensors"]
    digest = hashlib.sha256(shard).hexdigest()
    assert any(line["digest"] == f"sha256:{digest}" and line["status"] == f"pulling {digest[:12]}" for line in moving)
    names = [item["name"] for item in server.http.get("/api/tags").json()["models"]]
    assert "my-model" in names
    body = {"model": "my-model", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    assert server.post("/api/chat", body).json()["message"]["content"] == "my-model"


def test_the_ollama_client_pulls(server: Running, hub: FakeHub) -> None:
    client = ollama.Client(host=server.url)
    seen = [item.status for item in client.pull("me/My-Model", stream=True)]
    assert seen[-1] == "success" and client.pull("my-model").status == "success"
    client.copy("my-model", "mine")
    assert {"my-model", "mine"} <= {item.model for item in client.list().models}
    assert client.delete("mine").status == "success" and client.delete("my-model").status == "success"
    assert not {"my-model", "mine"} & {item.model for item in client.list().models}
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.delete("my-model")
    with pytest.raises(ollama.ResponseError, match="no model repository"):
        list(client.pull("no/thing", stream=True))


def test_failures_are_told(server: Running, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = server.lines("/api/pull", {"name": "nothing:1b"})
    assert "known: qwen3.6:27b" in json.loads(lines[-1])["error"]
    whole = server.post("/api/pull", {"model": "nothing:1b", "stream": False})
    assert whole.status_code == 404 and "known: qwen3.6:27b" in whole.json()["error"]
    assert server.post("/api/pull", {}).status_code == 400
    hub.faults = Faults(flip={100: 10**6})
    assert (
        "also after fetching it again" in json.loads(server.lines("/api/pull", {"model": "me/My-Model"})[-1])["error"]
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 1 << 30})())
    hub.faults = Faults()
    assert "not enough disk space" in json.loads(server.lines("/api/pull", {"model": "me/My-Model"})[-1])["error"]
    monkeypatch.undo()
    assert server.http.get("/health").status_code == 200


def test_a_full_disk_never_stops_serving(server: Running, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from ninfer_core import download

    real = download._write_all

    def full(file: Any, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_write_all", full)
    assert "not enough disk space" in json.loads(server.lines("/api/pull", {"model": "me/My-Model"})[-1])["error"]
    monkeypatch.setattr(download, "_write_all", real)
    assert json.loads(server.lines("/api/pull", {"model": "me/My-Model"})[-1]) == {"status": "success"}


def test_a_second_request_joins_the_first(server: Running, hub: FakeHub) -> None:
    hub.faults = Faults(pause=0.03)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.lines, "/api/pull", {"model": "me/My-Model"}) for _ in range(3)]
        statuses = [json.loads(item.result(30)[-1])["status"] for item in answers]
    assert statuses == ["success"] * 3
    assert sum(hub.sent.values()) <= sum(map(len, artifact_files().values())) + len(artifact_files()["manifest.json"])


def test_the_last_watcher_that_leaves_ends_the_download(server: Running, hub: FakeHub, tmp_path: Path) -> None:
    data = ninfer_file("x", 12_000_000)
    hub.repos["me/x"] = {"x.ninfer": data}
    hub.faults = Faults(pause=0.05)
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(httpx.stream("POST", server.url + "/api/pull", json={"model": "me/x"}, timeout=20))
            for _ in range(2)
        ]
        assert wait_for(lambda: hub.sent.get("x.ninfer", 0) > 100_000)
        streams[0].close()
        time.sleep(0.3)
        before = hub.sent["x.ninfer"]
        assert wait_for(lambda: hub.sent["x.ninfer"] > before + 50_000), "somebody still watches"
        streams[1].close()
    assert wait_for(lambda: not server.state.pulls._jobs)
    time.sleep(0.3)
    stopped = hub.sent["x.ninfer"]
    time.sleep(0.3)
    assert hub.sent["x.ninfer"] == stopped < len(data) and library.leftovers()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/api/pull", json={"model": "me/x", "stream": False}, timeout=0.5)
    assert wait_for(lambda: not server.state.pulls._jobs), "also without a stream"
    hub.faults = Faults()
    whole = server.post("/api/pull", {"model": "me/x", "stream": False})
    assert whole.json() == {"status": "success"} and hub.sent["x.ninfer"] < len(data) + 6 * FAST.part
    assert (tmp_path / "models/x.ninfer").read_bytes() == data


def test_a_published_model_over_http(server: Running, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ninfer_file("qwen3.6-27b")
    known = store.KNOWN[0]
    small = replace(known, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(store, "KNOWN", (small, *store.KNOWN[1:]))
    hub.repos[known.repository] = {known.file: data}
    assert json.loads(server.lines("/api/pull", {"model": "qwen3.6:27b"})[-1]) == {"status": "success"}
    hub.forget()
    assert server.post("/api/pull", {"model": "qwen3.6:27b", "stream": False}).json() == {"status": "success"}
    assert not hub.requests and threading.active_count() < 200
