"""The downloader against every fault of a server: at most one part twice, the digest always checked."""

from __future__ import annotations

import email.utils
import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ninfer_core import download
from ninfer_core.download import Download, check_space, journal_path, part_path, received
from ninfer_core.errors import DiskSpaceError, DownloadError, RequestCancelledError
from ninfer_core.remote import RemoteFile, Transfer, client, read_range

from .fake_hub import COMMIT, FakeHub, Faults, git_id

PART = 256 << 10
FAST = Transfer(part=PART, connections=4, backoff=0.01, stall=2.0)
DATA = random.Random(7).randbytes(11 * PART + 12_345)


@pytest.fixture
def remote(hub: FakeHub) -> RemoteFile:
    hub.repos["a/b"] = {"big.bin": DATA, "small.json": b"{}"}
    url = f"{hub.url}/a/b/resolve/{COMMIT}/big.bin"
    return RemoteFile(url, "big.bin", len(DATA), sha256=hashlib.sha256(DATA).hexdigest())


def fetch(remote: RemoteFile, target: Path, transfer: Transfer = FAST, **options: Any) -> Path:
    with client({}, transfer) as session:
        return Download(remote, target, session, transfer, **options).run()


def complete(target: Path) -> bool:
    """The file is right and nothing else lies beside it."""
    return target.read_bytes() == DATA and [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_file_in_parts(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    fetch(remote, tmp_path / "x", progress=lambda done, size: seen.append((done, size)))
    assert complete(tmp_path / "x") and hub.sent["big.bin"] == len(DATA)
    ranges = {asked for _, _, asked in hub.requests}
    assert len(ranges) == 12 and f"bytes=0-{PART - 1}" in ranges
    assert seen[-1] == (len(DATA), len(DATA)) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    hub.forget()
    fetch(remote, tmp_path / "x")
    assert not hub.requests, "a file that is there was verified when it was made"


@pytest.mark.parametrize("cut", [1_000, 70_000, PART - 1])
def test_responses_that_break_off(hub: FakeHub, remote: RemoteFile, tmp_path: Path, cut: int) -> None:
    hub.faults = Faults(cut=cut, cuts=20)
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x") and hub.sent["big.bin"] == len(DATA), "not one byte twice"


def test_a_server_that_ignores_ranges(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(ignore_ranges=True)
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x")


def test_ranges_ignored_after_a_part_and_a_break(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(cut=PART // 2, statuses=[])
    stop_after(remote, tmp_path / "x", 3 * PART)
    hub.faults = Faults(ignore_ranges=True, cut=len(DATA) - 5, cuts=2)
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x")


def test_a_server_that_ignores_ranges_and_always_breaks_off(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(ignore_ranges=True, cut=100_000)
    with pytest.raises(DownloadError, match="does not support ranges"):
        fetch(remote, tmp_path / "x", Transfer(part=PART, connections=4, backoff=0.001, retries=3))
    assert not (tmp_path / "x").exists()


def test_one_wrong_byte_costs_at_most_the_parts_up_to_it(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(flip={2 * PART + 17: 1})
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x") and hub.sent["big.bin"] <= len(DATA) + 3 * PART


def test_wrong_bytes_every_time(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(flip={5: 10**6})
    with pytest.raises(DownloadError, match=f"expected {remote.sha256}.*fetching it again"):
        fetch(remote, tmp_path / "x")
    assert not list(tmp_path.iterdir()), "nothing wrong is kept"
    hub.faults = Faults()
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x")


def test_wrong_bytes_without_ranges(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(ignore_ranges=True, flip={5: 1})
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x")


def test_a_part_damaged_on_the_disk_is_the_only_one_replaced(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    stop_after(remote, tmp_path / "x", 6 * PART)
    with part_path(tmp_path / "x").open("r+b") as file:
        file.seek(10)
        file.write(b"\xff" * 100)
    fetch(remote, tmp_path / "x")
    assert complete(tmp_path / "x")


def test_small_files_are_checked_by_their_blob_id(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    url = f"{hub.url}/a/b/resolve/main/small.json"
    fetch(RemoteFile(url, "small.json", 2, git_id=git_id(b"{}")), tmp_path / "ok")
    assert (tmp_path / "ok").read_bytes() == b"{}"
    with pytest.raises(DownloadError, match="git blob id"):
        fetch(RemoteFile(url, "small.json", 2, git_id="0" * 40), tmp_path / "bad")
    with pytest.raises(DownloadError, match="no digest is known"):
        fetch(RemoteFile(url, "small.json", 2), tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (Faults(empty=True), "empty response"),
        (Faults(announced=len(DATA) + 1), "were expected"),
        (Faults(statuses=[(404, {})]), "answered 404"),
        (Faults(statuses=[(401, {})]), "HF_TOKEN"),
        (Faults(statuses=[(403, {})]), "accept the terms"),
        (Faults(statuses=[(416, {})]), "bytes long"),
        (Faults(statuses=[(429, {"Retry-After": "86400"})]), "come again in 86400 s"),
        (Faults(statuses=[(503, {})] * 99), "gave up after 6 attempts"),
    ],
)
def test_what_ends_a_download(hub: FakeHub, remote: RemoteFile, tmp_path: Path, faults: Faults, says: str) -> None:
    hub.faults = faults
    with pytest.raises(DownloadError, match=says):
        fetch(remote, tmp_path / "x", Transfer(part=PART, connections=1, backoff=0.001, stall=2.0))
    assert not (tmp_path / "x").exists()


def test_a_busy_server_is_given_the_time_it_asks_for(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    at = email.utils.formatdate(time.time() + 2, usegmt=True)
    hub.faults = Faults(statuses=[(429, {"Retry-After": "1"}), (503, {"Retry-After": at})])
    began = time.monotonic()
    fetch(remote, tmp_path / "x", Transfer(part=PART, connections=1, backoff=0.001))
    assert complete(tmp_path / "x") and 1.0 <= time.monotonic() - began < 60.0


def test_silence_ends_a_connection_not_the_download(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(silent=2)
    fetch(remote, tmp_path / "x", Transfer(part=PART, connections=4, backoff=0.01, stall=0.3))
    assert complete(tmp_path / "x")


def test_a_redirect_to_another_host_gets_no_token(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(redirect=f"localhost:{hub.port}")
    with client({"Authorization": "Bearer secret"}, FAST) as session:
        Download(remote, tmp_path / "x", session, FAST).run()
    assert complete(tmp_path / "x")
    tokens = {host.partition(":")[0]: token for host, token in hub.tokens}
    assert tokens == {"127.0.0.1": "Bearer secret", "localhost": None}


def test_proxies_of_the_environment(
    hub: FakeHub, remote: RemoteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "all_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("http_proxy", hub.url)
    away = replace(remote, url=remote.url.replace(hub.url, "http://hub.invalid"))
    assert complete(fetch(away, tmp_path / "x")) and {host for host, _ in hub.tokens} == {"hub.invalid"}
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "x").unlink()
    assert complete(fetch(remote, tmp_path / "x"))


def test_redirects_in_a_circle_end(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(redirect="127.0.0.1:1")
    hub.faults.redirect = f"127.0.0.1:{hub.port}/"  # never equals the Host header, so it redirects for ever
    with pytest.raises(DownloadError, match="redirects"):
        fetch(remote, tmp_path / "x")


def test_nobody_there(remote: RemoteFile, tmp_path: Path) -> None:
    gone = RemoteFile("http://127.0.0.1:9/x", "x", 5, sha256="0" * 64)
    with pytest.raises(DownloadError, match="ConnectError"):
        fetch(gone, tmp_path / "x", Transfer(backoff=0.001))


def stop_after(remote: RemoteFile, target: Path, count: int) -> None:
    """An earlier run that was interrupted after about `count` bytes."""

    def progress(done: int, size: int) -> None:
        if done >= count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote, target, Transfer(part=PART, connections=1, backoff=0.01), progress=progress)


def test_an_interrupted_download_resumes_in_a_new_one(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(pause=0.002)
    stop_after(remote, tmp_path / "x", 4 * PART)
    hub.settle()
    hub.faults = Faults()
    assert 4 * PART <= received(tmp_path / "x", remote) < len(DATA)
    assert received(tmp_path / "x", RemoteFile(remote.url, "x", len(DATA), sha256="1" * 64)) == 0
    fetch(remote, tmp_path / "x", Transfer(part=2 * PART, backoff=0.01))
    assert complete(tmp_path / "x") and hub.sent["big.bin"] < len(DATA) + PART


def test_a_cancelled_download_keeps_what_came(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    hub.faults = Faults(pause=0.005)
    come: list[int] = [0]
    with pytest.raises(RequestCancelledError, match="is kept"):
        fetch(
            remote,
            tmp_path / "x",
            progress=lambda done, size: come.append(done),
            cancelled=lambda: come[-1] > PART,
        )
    assert received(tmp_path / "x", remote) > 0 and not (tmp_path / "x").exists()


@pytest.mark.parametrize("damage", ["journal line", "journal header", "other file", "short part", "no part"])
def test_a_damaged_state_is_not_believed(hub: FakeHub, remote: RemoteFile, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "x"
    stop_after(remote, target, 3 * PART)
    journal = journal_path(target)
    if damage == "journal line":
        journal.write_bytes(journal.read_bytes() + b"[99999,5]\n[3,99999999999]\n[2,")
    elif damage == "journal header":
        journal.write_bytes(b"{" + journal.read_bytes())
    elif damage == "other file":
        header = {"size": len(DATA), "digest": "f" * 64, "part": PART}
        journal.write_text(json.dumps(header) + "".join(f"\n[{i},{PART}]" for i in range(11)))
        part_path(target).write_bytes(bytes(len(DATA)))
    elif damage == "short part":
        os.truncate(part_path(target), PART)
    else:
        part_path(target).unlink()
    fetch(remote, target)
    assert complete(target)


def test_a_part_file_that_is_taken_away(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    def progress(done: int, size: int) -> None:
        if done == size:
            part_path(tmp_path / "x").unlink(missing_ok=True)

    with pytest.raises(DownloadError, match="was removed while"):
        fetch(remote, tmp_path / "x", progress=progress)
    assert not (tmp_path / "x").exists()


def test_a_disk_that_fills_up(
    hub: FakeHub, remote: RemoteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 5 * PART
    real = download._write_all

    def limited(file: Any, data: bytes) -> None:
        nonlocal room
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    monkeypatch.setattr(download, "_write_all", limited)
    with pytest.raises(DiskSpaceError, match="bytes are needed"):
        fetch(remote, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    monkeypatch.setattr(download, "_write_all", real)
    kept = received(tmp_path / "x", remote)
    hub.settle()
    hub.forget()
    fetch(remote, tmp_path / "x")
    assert kept > 2 * PART and complete(tmp_path / "x") and hub.sent["big.bin"] <= len(DATA) - kept, "it resumed"


def test_space_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: type("U", (), {"free": 5 << 30})())
    check_space(tmp_path / "not/there/yet", 4 << 30)
    with pytest.raises(DiskSpaceError, match=f"{5 << 30:,} are free"):
        check_space(tmp_path / "not/there/yet", (4 << 30) + 1)
    check_space(tmp_path, 0)


def test_a_few_bytes_of_a_file(hub: FakeHub, remote: RemoteFile) -> None:
    with client() as session:
        assert read_range(session, remote, 5, 300, FAST) == DATA[5:300]
        hub.faults = Faults(ignore_ranges=True, statuses=[(503, {})])
        assert read_range(session, remote, 5, 300, FAST) == DATA[5:300]
        with pytest.raises(DownloadError):
            read_range(session, RemoteFile(hub.url + "/a/b/resolve/main/none", "none", 9), 0, 4, FAST)


def in_a_process(remote: RemoteFile, target: Path, part: int) -> None:
    """What a process does that will be killed."""
    fetch(remote, target, Transfer(part=part, connections=4, backoff=0.01))


def test_killed_at_twenty_places(hub: FakeHub, remote: RemoteFile, tmp_path: Path) -> None:
    """SIGKILL after a random amount, twenty times over one download: never more than one part twice per kill."""
    rng, target = random.Random(20), tmp_path / "x"
    data = rng.randbytes(24 << 20)
    part = 4 << 20
    hub.repos["a/b"]["big.bin"] = data
    file = RemoteFile(remote.url, "big.bin", len(data), sha256=hashlib.sha256(data).hexdigest())
    hub.faults = Faults(pause=0.002)
    processes = multiprocessing.get_context("forkserver")  # clean ones, without a second of imports each
    processes.set_forkserver_preload(["ninfer_core.download", "httpx", "pytest"])
    for kills, place in enumerate(sorted(rng.sample(range(len(data) * 9 // 10), 20)), 1):
        before = hub.sent.get("big.bin", 0)
        process = processes.Process(target=in_a_process, args=(file, target, part))
        process.start()
        end = time.monotonic() + 20
        while process.is_alive() and time.monotonic() < end:
            if received(target, file) >= place and hub.sent.get("big.bin", 0) > before:
                break
            time.sleep(0.002)
        kept = received(target, file)
        assert process.is_alive() and process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
        assert process.exitcode == -signal.SIGKILL and not target.exists()
        assert kept <= received(target, file)
        time.sleep(0.02)
        again = hub.sent["big.bin"] - received(target, file)
        assert again <= kills * part, f"{again:,} bytes were in vain after {kills} kills"
    hub.faults = Faults()
    fetch(file, target, Transfer(part=part, connections=4, backoff=0.01))
    assert target.read_bytes() == data and not part_path(target).exists()
    again = hub.sent["big.bin"] - len(data)
    assert again <= 20 * part, f"{again:,} bytes were sent twice"


def test_the_client_times_out_by_itself() -> None:
    with client() as session:
        assert isinstance(session.timeout, httpx.Timeout) and session.timeout.read == Transfer().stall
