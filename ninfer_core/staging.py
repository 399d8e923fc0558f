"""File contents to device memory: reader threads fill pinned buffers, the device takes them in and repacks.

No full copy of a file is ever held on the host: as many buffers as readers, plus those on their way to the device.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ContentError, DeviceError
from .files import SourceFile

IN_FLIGHT = 3
"""Buffers whose copy to the device may still be running."""

MAX_THREADS = 8

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), on the thread that loads."""


@dataclass(frozen=True, slots=True)
class Task:
    """A payload to be put together from file spans and given to `apply` on the device (uint8 `[nbytes]`).

    Spans are `(file, position, bytes, place in the payload)`; bytes that no span covers are undefined.
    """

    nbytes: int
    spans: tuple[tuple[SourceFile, int, int, int], ...]
    apply: Callable[[Tensor], None]


class _Meter:
    """Counts bytes from several threads; reports on the loading thread only."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock, self._done, self._total, self._progress = threading.Lock(), 0, total, progress

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    def report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)


def transfer(
    tasks: Sequence[Task],
    device: torch.device,
    *,
    digests: Mapping[SourceFile, str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Run all tasks, in no particular order; `apply` is called on this thread.

    Args:
        tasks: what to read and where to put it.
        device: the payloads are handed over there.
        digests: files to check against their SHA-256 at the same time, each by a thread of its own.
        threads: readers; None takes the cores of this machine, at most eight.
        progress: see `Progress`; bytes that are hashed count too.

    Raises:
        ContentError: a file changed meanwhile, or a digest differs.
        GeometryError: a file is cut off.
        DeviceError: host memory could not be pinned.
        OSError: a file cannot be read.
    """
    digests = digests or {}
    total = sum(span[2] for task in tasks for span in task.spans) + sum(file.stamp.size for file in digests)
    meter, stop = _Meter(total, progress), threading.Event()
    with ThreadPoolExecutor(max(1, len(digests)), thread_name_prefix="ninfer-digest") as pool:
        hashes = {pool.submit(_digest, file, meter, stop): (file, wanted) for file, wanted in digests.items()}
        try:
            _read_all(tasks, device, min(len(tasks), threads or min(MAX_THREADS, os.cpu_count() or 1)), meter)
            _await_digests(hashes, meter)
        finally:
            stop.set()
    for file in {span[0] for task in tasks for span in task.spans} | set(digests):
        file.check()


class _StoppedError(Exception):
    """The load ended before this thread did."""


def _digest(file: SourceFile, meter: _Meter, stop: threading.Event) -> str:
    def seen(nbytes: int) -> None:
        meter.add(nbytes)
        if stop.is_set():
            raise _StoppedError

    return file.sha256(seen)


def _await_digests(hashes: Mapping[Future[str], tuple[SourceFile, str]], meter: _Meter) -> None:
    pending = set(hashes)
    while pending:
        done, pending = wait(pending, timeout=0.1, return_when="FIRST_COMPLETED")
        meter.report()
        for future in done:
            (file, wanted), found = hashes[future], future.result()
            if found != wanted:
                file.check()  # a file that was changed says so first
                raise ContentError(f"{file.path} is damaged or was edited: SHA-256 {found}, expected {wanted}")


# --- reading ---------------------------------------------------------------------------------------------------------


class _Readers:
    """Threads that fill free buffers with the next tasks. `ready` yields `(task index, buffer, error)`."""

    def __init__(self, tasks: Sequence[Task], views: Sequence[memoryview], threads: int) -> None:
        self._tasks, self._views = tasks, views
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[tuple[int, int, BaseException | None]] = queue.SimpleQueue()
        self._next = iter(range(len(tasks)))
        self._lock = threading.Lock()
        for index in range(len(views)):
            self._free.put(index)
        self._threads = [
            threading.Thread(target=self._run, name=f"ninfer-read-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def release(self, buffer: int) -> None:
        """Give a buffer back."""
        self._free.put(buffer)

    def close(self) -> None:
        """Stop after the reads that are running now."""
        with self._lock:
            self._next = iter(range(0))
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (buffer := self._free.get()) is not None:
            with self._lock:
                index = next(self._next, None)
            if index is None:
                return
            error: BaseException | None = None
            try:
                for file, position, nbytes, place in self._tasks[index].spans:
                    file.read_into(position, self._views[buffer][place : place + nbytes])
            except BaseException as caught:  # handed over: raised by the thread that waits for this task
                error = caught
            self.ready.put((index, buffer, error))


def _read_all(tasks: Sequence[Task], device: torch.device, threads: int, meter: _Meter) -> None:
    if not tasks:
        return
    count, size = threads + IN_FLIGHT + 1, max(task.nbytes for task in tasks)
    buffers = torch.empty(count, -(-size // 4096) * 4096, dtype=torch.uint8)
    with _pinned(buffers, device):
        readers = _Readers(tasks, [memoryview(row.numpy()) for row in buffers], threads)
        on_the_way: deque[tuple[Any, int]] = deque()
        try:
            for _ in tasks:
                index, buffer, error = readers.ready.get()
                if error is not None:
                    raise error
                task = tasks[index]
                payload = buffers[buffer, : task.nbytes]
                if device.type == "cuda":
                    payload = payload.to(device, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(torch.cuda.current_stream(device))
                    on_the_way.append((event, buffer))
                task.apply(payload)
                if device.type != "cuda":
                    readers.release(buffer)
                elif len(on_the_way) > IN_FLIGHT:
                    event, buffer = on_the_way.popleft()
                    event.synchronize()
                    readers.release(buffer)
                meter.add(sum(nbytes for _, _, nbytes, _ in task.spans))
                meter.report()
        finally:
            readers.close()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # nothing may still read from the buffers


@contextmanager
def _pinned(buffers: Tensor, device: torch.device) -> Iterator[None]:
    """Buffers the device can read by itself. Pinned by hand: torch would keep pinned memory for the next time."""
    if device.type != "cuda":
        yield
        return
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(buffers.data_ptr(), buffers.nbytes, 0))
        if code:
            raise DeviceError(
                f"the driver refused to pin {buffers.nbytes / 1e6:.0f} MB of host memory for loading (error {code}); "
                "raise the limit of locked memory (ulimit -l), or free host memory"
            )
        try:
            yield
        finally:
            runtime.cudaHostUnregister(buffers.data_ptr())
