"""Downloads of single files: in ranges over several connections, resumed after any interruption, verified at the end.

A file grows in `NAME.part` beside its target, with a journal of what has arrived; it takes its name only when its
digest is right. Nothing a server says is trusted: ranges that are ignored, sizes that differ, wrong bytes, redirects,
limits and silence each have an answer here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from .errors import DiskSpaceError, DownloadError, RequestCancelledError
from .remote import BROKEN, BusyError, RemoteFile, Transfer, check_answer

logger = logging.getLogger("ninfer.download")

MARGIN = 1 << 30
"""Bytes that stay free on the disk beside what is downloaded."""
_HASH_BLOCK = 8 << 20


def part_path(target: Path) -> Path:
    """Where an unfinished download of `target` grows."""
    return target.with_name(target.name + ".part")


def journal_path(target: Path) -> Path:
    """Where its journal lies."""
    return target.with_name(target.name + ".journal")


def received(target: Path, remote: RemoteFile) -> int:
    """Bytes of `remote` that an earlier or a running download of `target` already has."""
    if target.is_file():
        return remote.size
    with contextlib.suppress(OSError, ValueError):
        journal = _read_journal(journal_path(target))
        if journal and journal[0] == _header(remote, journal[0].get("part", 0)) and part_path(target).is_file():
            return sum(dict(journal[1]).values())
    return 0


def check_space(folder: Path, missing: int, margin: int = MARGIN) -> None:
    """Before the first byte: what is missing fits on the disk of `folder`, and `margin` stays free.

    Raises:
        DiskSpaceError: it does not.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if missing and missing + margin > free:
        raise DiskSpaceError(str(folder), missing + margin, free)


def _header(remote: RemoteFile, part: int) -> dict[str, Any]:
    return {"size": remote.size, "digest": remote.digest, "part": part}


def _read_journal(path: Path) -> tuple[dict[str, Any], list[tuple[int, int]]] | None:
    """The header and the (part, bytes) entries of a journal; a last line that was cut off is dropped."""
    entries: list[tuple[int, int]] = []
    lines = path.read_bytes().splitlines()
    header = json.loads(lines[0]) if lines else None
    if not isinstance(header, dict):
        return None
    for line in lines[1:]:
        try:
            index, done = json.loads(line)
            entries.append((int(index), int(done)))
        except (ValueError, TypeError):
            break
    return header, entries


class _Stopped(Exception):  # noqa: N818 - not an error: another thread has already reported one
    """The download was stopped."""


class _RangesIgnoredError(Exception):
    """The server answers a range request with the whole file."""


class Download:
    """One running download. `progress(done, size)` is called from the calling thread about ten times a second.

    Args:
        remote: what to fetch.
        target: where to put it; the folder must exist.
        session: a client from `remote.client`.
        transfer: sizes and patience.
        progress: called with bytes done and in all; may raise to stop, with everything that has arrived kept.
        cancelled: asked about as often; True stops with `RequestCancelledError`.
    """

    def __init__(
        self,
        remote: RemoteFile,
        target: Path,
        session: httpx.Client,
        transfer: Transfer | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.remote, self.target, self.session = remote, target, session
        self.transfer = transfer or Transfer()
        self._progress, self._cancelled = progress, cancelled
        self._part_file = part_path(target)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._failure: BaseException | None = None
        self._not_before = 0.0
        self._whole: int | None = None  # bytes from the start, once the server turned out to ignore ranges
        self._done: list[int] = []
        self._noted: list[int] = []
        self._journal: Any = None

    def run(self) -> Path:
        """Fetch, verify and rename; returns the target. A target that is already there was verified when it was made.

        Raises:
            DownloadError: the server failed for good, or its bytes are wrong; says what was tried.
            DiskSpaceError: the disk filled up; what has arrived is kept.
            RequestCancelledError: `cancelled` said so.
        """
        if self.target.is_file():
            return self.target
        self.remote.hasher()
        try:
            self._open()
            found = self._fetch_all()
            if found != self.remote.digest:
                found = self._repair(found)
            self._finish(found)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, DiskSpaceError):
                raise
            missing = self.remote.size - sum(self._done)
            free = shutil.disk_usage(self.target.parent).free
            raise DiskSpaceError(str(self.target.parent), missing + MARGIN, free) from error
        finally:
            self._close()
        return self.target

    # the journal

    def _open(self) -> None:
        size, part = self.remote.size, self.transfer.part
        path = journal_path(self.target)
        journal = None
        with contextlib.suppress(OSError, ValueError):
            journal = _read_journal(path)
        header = _header(self.remote, journal[0].get("part", 0) if journal else 0)
        intact = self._part_file.is_file() and self._part_file.stat().st_size == size
        if journal and journal[0] == header and isinstance(header["part"], int) and header["part"] > 0 and intact:
            part = header["part"]  # parts of an earlier run stay as they were cut
        else:
            journal = None
        self._part_size = part
        self._done = [0] * max(1, -(-size // part))
        for index, done in journal[1] if journal else []:
            if 0 <= index < len(self._done):
                self._done[index] = min(max(done, self._done[index]), self._length(index))
        self._noted = list(self._done)
        if journal is None:
            with open(self._part_file, "wb") as file:
                file.truncate(size)
        # A fresh file also when resuming: a line that was cut off must not swallow the next one.
        with open(path, "wb") as file:
            file.write(json.dumps(_header(self.remote, part)).encode() + b"\n")
            file.writelines(b"[%d,%d]\n" % (i, n) for i, n in enumerate(self._done) if n)
        self._journal = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in `_close`

    def _length(self, index: int) -> int:
        return min(self._part_size, self.remote.size - index * self._part_size)

    def _note(self, index: int) -> None:
        """Bring a part's progress into the journal."""
        with self._lock:
            if self._journal is not None and self._done[index] != self._noted[index]:
                self._journal.write(b"[%d,%d]\n" % (index, self._done[index]))
                self._noted[index] = self._done[index]

    def _close(self) -> None:
        self._stop.set()
        if self._whole is None and self._journal is not None:
            with contextlib.suppress(OSError):
                for index in range(len(self._done)):
                    self._note(index)
        with self._lock:
            journal, self._journal = self._journal, None
            if journal is not None:
                journal.close()

    # fetching

    def _fetch_all(self) -> str:
        """Fetch what is missing on several connections while this thread hashes what is complete; the digest."""
        todo = iter([i for i, done in enumerate(self._done) if done < self._length(i)])
        threads = [
            threading.Thread(target=self._work, args=(todo,), name=f"ninfer-download-{i}", daemon=True)
            for i in range(min(self.transfer.connections, len(self._done)))
        ]
        for thread in threads:
            thread.start()
        try:
            return self._follow(threads)
        except _RangesIgnoredError:
            self._stop.set()
            for thread in threads:
                thread.join()
            logger.warning("%s: the server ignores ranges, so the file is fetched in one piece", self.remote.name)
            return self._fetch_whole()
        finally:
            self._stop.set()

    def _work(self, todo: Iterator[int]) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    index = next(todo, None)
                if index is None:
                    return
                self._fetch_part(index)
        except _Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            with self._news:
                self._news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._failure = self._failure or error
            self._stop.set()

    def _follow(self, threads: list[threading.Thread]) -> str:
        """Hash the finished beginning as it grows, report progress, and pass failures on."""
        hasher, hashed = self.remote.hasher(), 0
        # Unbuffered: a buffer would read ahead into what has not arrived yet.
        with open(self._part_file, "rb", buffering=0) as file:
            while hashed < self.remote.size or any(thread.is_alive() for thread in threads):
                if self._failure is not None:
                    raise self._failure
                self._report()
                ready = self._prefix()
                if ready > hashed:
                    block = file.read(min(_HASH_BLOCK, ready - hashed))
                    hasher.update(block)
                    hashed += len(block)
                    if block:
                        continue
                    raise DownloadError(f"{self._part_file} became shorter while it was written; pull again")
                with self._news:
                    self._news.wait(0.1)
        if self._failure is not None:
            raise self._failure
        self._report()
        return str(hasher.hexdigest())

    def _prefix(self) -> int:
        """Bytes from the start that are complete."""
        if self._whole is not None:
            return self._whole
        at = 0
        for index, done in enumerate(self._done):
            at += done
            if done < self._length(index):
                break
        return at

    def _report(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise RequestCancelledError(f"the download of {self.remote.name} was cancelled; what has arrived is kept")
        if self._progress is not None:
            self._progress(self._whole if self._whole is not None else sum(self._done), self.remote.size)

    def _fetch_part(self, index: int) -> None:
        with open(self._part_file, "r+b", buffering=0) as file:
            end = index * self._part_size + self._length(index)

            def write(at: int, data: bytes) -> None:
                file.seek(at)
                _write_all(file, data)
                self._done[index] = at + len(data) - index * self._part_size
                if self._done[index] - self._noted[index] >= self.transfer.step:
                    self._note(index)

            self._insist(lambda: index * self._part_size + self._done[index], end, write)
            os.fsync(file.fileno())  # a part that the journal calls complete survives a power failure
        self._note(index)
        with self._news:
            self._news.notify_all()

    def _insist(self, position: Callable[[], int], end: int, write: Callable[[int, bytes], None]) -> None:
        """Request from `position()` to `end` until everything is there, or nothing comes `retries` times in a row."""
        failures = 0
        while position() < end:
            before = position()
            try:
                self._request(before, end, write)
                problem = f"the connection closed after {position() - before:,} bytes"
            except BROKEN as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            except BusyError as error:
                problem = str(error)
                self._not_before = max(self._not_before, time.monotonic() + error.wait)
            if position() >= end:
                return
            failures = 0 if position() > before else failures + 1
            if failures >= self.transfer.retries:
                raise DownloadError(
                    f"{self.remote.name}: gave up after {failures} attempts without a new byte (at {position():,} of "
                    f"{self.remote.size:,}); last: {problem}; the same command resumes from here"
                )
            pause = self.transfer.backoff * min(2.0 ** max(0, failures - 1), 30.0) * random.uniform(0.5, 1.0)
            self._sleep(max(pause, self._not_before - time.monotonic()))

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(max(0.0, seconds)):
            raise _Stopped

    def _request(self, at: int, end: int, write: Callable[[int, bytes], None]) -> None:
        """One request for bytes `at` to `end`; writes what comes, at most up to `end`."""
        whole = at == 0 and end == self.remote.size
        headers = {} if whole else {"Range": f"bytes={at}-{end - 1}"}
        try:
            with self.session.stream("GET", self.remote.url, headers=headers) as answer:
                check_answer(answer, self.remote, at, self.transfer)
                if answer.status_code == 200 and not whole:
                    raise _RangesIgnoredError
                for data in answer.iter_raw():
                    if self._stop.is_set():
                        raise _Stopped
                    taken = data[: end - at]
                    write(at, taken)
                    at += len(taken)
                    if len(data) > len(taken):
                        return
        except (httpx.TooManyRedirects, httpx.UnsupportedProtocol) as error:
            raise DownloadError(f"{self.remote.name}: {error} ({self.remote.url})") from error

    def _fetch_whole(self) -> str:
        """From the first byte in one piece, again and again: all that a server without ranges allows. The digest."""
        self._stop = threading.Event()
        problem = ""
        for attempt in range(self.transfer.retries):
            if attempt:
                pause = self.transfer.backoff * 2.0 ** (attempt - 1)
                self._sleep(max(pause, self._not_before - time.monotonic()))
            self._whole, hasher = 0, self.remote.hasher()
            try:
                with open(self._part_file, "r+b", buffering=0) as file:

                    def write(at: int, data: bytes, file: Any = file, hasher: Any = hasher) -> None:
                        file.seek(at)
                        _write_all(file, data)
                        hasher.update(data)
                        self._whole = at + len(data)
                        self._report()

                    self._request(0, self.remote.size, write)
                    os.fsync(file.fileno())
                problem = f"the connection closed after {self._whole:,} bytes"
            except BROKEN as error:
                problem = f"{type(error).__name__}: {error}"
            except BusyError as error:
                problem = str(error)
                self._not_before = time.monotonic() + error.wait
            if self._whole == self.remote.size:
                return str(hasher.hexdigest())
        raise DownloadError(
            f"{self.remote.name}: gave up after {self.transfer.retries} attempts from the start (the server does not "
            f"support ranges, so nothing could be resumed); last: {problem}"
        )

    # verifying

    def _repair(self, found: str) -> str:
        """The digest is wrong: fetch parts again, keep those that differ, until it is right or all were tried."""
        logger.warning("%s: digest %s, expected %s; fetching again", self.remote.name, found, self.remote.digest)
        self._stop = threading.Event()
        if self._whole is not None:
            return self._fetch_whole()
        for index in range(len(self._done)):
            start, length = index * self._part_size, self._length(index)
            data = bytearray()

            def take(at: int, block: bytes, data: bytearray = data) -> None:
                data += block
                self._report()

            self._insist(lambda start=start, data=data: start + len(data), start + length, take)  # type: ignore[misc]
            with open(self._part_file, "r+b", buffering=0) as file:
                file.seek(start)
                if _read_all(file, length) == data:
                    continue
                logger.warning("%s: bytes %d to %d were damaged and are replaced", self.remote.name, start,
                               start + length)  # fmt: skip
                file.seek(start)
                _write_all(file, bytes(data))
                os.fsync(file.fileno())
            if self._follow([]) == self.remote.digest:
                break
        return self._follow([])

    def _finish(self, found: str) -> None:
        if found != self.remote.digest:
            self._part_file.unlink(missing_ok=True)
            journal_path(self.target).unlink(missing_ok=True)
            kind = "SHA-256" if self.remote.sha256 else "git blob id"
            raise DownloadError(
                f"{self.remote.name}: {kind} is {found}, expected {self.remote.digest}, also after fetching it again; "
                f"nothing of it was kept. The server ({httpx.URL(self.remote.url).host}) sends other bytes than it "
                "announces: try later or from another endpoint (HF_ENDPOINT)"
            )
        try:
            os.replace(self._part_file, self.target)
        except FileNotFoundError:
            raise DownloadError(
                f"{self._part_file} was removed while it was being downloaded; run the same command again"
            ) from None
        _sync_folder(self.target.parent)
        journal_path(self.target).unlink(missing_ok=True)


def _write_all(file: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _read_all(file: Any, count: int) -> bytes:
    out = bytearray()
    while len(out) < count and (block := file.read(count - len(out))):
        out += block
    return bytes(out)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
