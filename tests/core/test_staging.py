"""Reading files that change meanwhile: what arrives, what is refused, and that no thread or descriptor stays behind."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import threading

import pytest
import torch

from ninfer_core import files, packed, staging
from ninfer_core.artifact import Artifact
from ninfer_core.engine import Engine
from ninfer_core.errors import ContentError, GeometryError
from ninfer_core.files import SourceFile, Stamp
from ninfer_core.staging import Task, transfer
from tests.core.tiny import tiny_artifact

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_stays():
    """Reader threads end and descriptors close, whatever happened."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    yield
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("ninfer-read", "ninfer-digest"))]
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def big(tmp_path):
    """A file of 3 MB of known bytes."""
    path = tmp_path / "big"
    path.write_bytes(bytes(range(256)) * 12_000)
    return path


def tasks_of(file, got, count=40, size=70_000):
    """Tasks of two spans each, the second one before the first in the payload."""

    def apply(index):
        return lambda payload: got.__setitem__(index, payload.clone())

    return [
        Task(size, ((file, i * size, 50_000, size - 50_000), (file, i * size + 50_000, 20_000, 0)), apply(i))
        for i in range(count)
    ]


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_payloads_arrive_whole_and_in_place(big, threads):
    file, got, seen = SourceFile(big), {}, []
    transfer(tasks_of(file, got), CPU, threads=threads, progress=lambda *pair: seen.append(pair))
    data = big.read_bytes()
    for i in range(40):
        part = data[i * 70_000 : (i + 1) * 70_000]
        assert bytes(got[i].numpy()) == part[50_000:] + part[:50_000]
    assert len(seen) == 40 and seen == sorted(seen) and seen[-1] == (2_800_000, 2_800_000)


def test_nothing_to_read_is_fine():
    transfer([], CPU)


def test_digests_are_checked_beside(big):
    file, got = SourceFile(big), {}
    wanted = hashlib.sha256(big.read_bytes()).hexdigest()
    seen = []
    transfer(tasks_of(file, got), CPU, digests={file: wanted}, progress=lambda *pair: seen.append(pair))
    assert len(got) == 40 and seen[-1] == (2_800_000 + 3_072_000,) * 2
    with pytest.raises(ContentError, match=f"damaged or was edited: SHA-256 {wanted}, expected 00"):
        transfer(tasks_of(file, got), CPU, digests={file: "00"})


def test_a_file_cut_off_meanwhile(big):
    file, got = SourceFile(big), {}

    def cut(done, total):
        os.truncate(big, 1_000_000)

    with pytest.raises(GeometryError, match=r"is cut off: bytes [\d,]+ to [\d,]+ are wanted, it has 1,000,000"):
        transfer(tasks_of(file, got), CPU, threads=2, progress=cut)
    assert len(got) < 40


def test_a_file_written_to_meanwhile(big):
    file, got = SourceFile(big), {}

    def write(done, total):
        os.utime(big, ns=(0, file.stamp.mtime_ns + 1))

    with pytest.raises(ContentError, match="was changed while it was in use"):
        transfer(tasks_of(file, got), CPU, progress=write)


def test_a_file_replaced_between_opening_and_reading(big, tmp_path):
    stamp = Stamp.of(big)
    shutil.copy(big, tmp_path / "other")
    os.replace(tmp_path / "other", big)
    with pytest.raises(ContentError, match="was replaced while it was in use"):
        SourceFile(big, stamp)


def test_a_file_that_is_open_may_be_replaced(tmp_path):
    """As a download or a conversion does: the old content is read to its end."""
    path = shutil.copytree(tiny_artifact(), tmp_path / "a")
    shard = next(path.glob("*.safetensors"))
    with Artifact.open(path) as artifact:
        artifact.payload("text/final_norm")
        (tmp_path / "other").write_bytes(bytes(shard.stat().st_size))
        os.replace(tmp_path / "other", shard)
        old = packed.load_packed(artifact, "cpu")
    with Artifact.open(tiny_artifact()) as artifact:
        same = packed.load_packed(artifact, "cpu")
    assert torch.equal(old.head.words, same.head.words) and torch.equal(old.final_norm, same.final_norm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_load_frees_its_memory_while_the_error_lives(monkeypatch, error):
    made = []
    arena = packed._Arena

    def remember(*args, **options):
        made.append(arena(*args, **options))
        return made[-1]

    monkeypatch.setattr(packed, "_Arena", remember)

    def stop(done, total):
        if done > total // 2:
            raise error("here")

    with Artifact.open(tiny_artifact()) as artifact, pytest.raises(error, match="here") as caught:
        packed.load_packed(artifact, "cpu", progress=stop)
    assert made[0]._memory.untyped_storage().nbytes() == 0
    assert caught.value is not None


def test_a_reader_that_fails_hands_its_error_over(big, monkeypatch):
    file, got = SourceFile(big), {}
    read = SourceFile.read_into

    def fail(self, start, buffer):
        if start > 1_500_000:
            raise OSError("the disk is gone")
        read(self, start, buffer)

    monkeypatch.setattr(SourceFile, "read_into", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        transfer(tasks_of(file, got), CPU, threads=4)


def test_systems_without_positioned_reads(big, monkeypatch):
    monkeypatch.delattr(files.os, "preadv", raising=False)
    file, got = SourceFile(big), {}
    transfer(tasks_of(file, got), CPU, threads=4)
    data = big.read_bytes()
    assert all(bytes(got[i].numpy())[20_000:] == data[i * 70_000 : i * 70_000 + 50_000] for i in range(40))
    file.close()
    file.close()


def test_engines_can_be_closed_and_loaded_again_and_again():
    tokens = []
    for _ in range(3):
        with Engine.load(str(tiny_artifact()), device="cpu", threads=1, max_sequences=1, context_length=128) as engine:
            tokens.append(engine.generate("hello", max_tokens=4, temperature=0.0, thinking=False).text)
    assert len(set(tokens)) == 1


def test_buffers_do_not_grow_with_the_file(big, monkeypatch):
    """The host holds a few buffers of one task, not the file."""
    file, got, held = SourceFile(big), {}, []
    empty = torch.empty

    def watched(*shape, **options):
        out = empty(*shape, **options)
        held.append(out.nbytes)
        return out

    monkeypatch.setattr(staging.torch, "empty", watched)
    transfer(tasks_of(file, got), CPU, threads=2)
    assert sum(held) == (2 + staging.IN_FLIGHT + 1) * 73_728
