"""Files on a server: what is known of one before it is fetched, and what the answers to a request for it mean."""

from __future__ import annotations

import email.utils
import hashlib
import time
from dataclasses import dataclass
from typing import Any

import httpx

from .errors import DownloadError

BROKEN = (httpx.TransportError, httpx.StreamError, httpx.DecodingError)
"""Failures of one connection, after which another one may do better."""
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch: `size` in bytes, and its SHA-256 or (small files of a repository) its git blob id."""

    url: str
    name: str
    size: int
    sha256: str = ""
    git_id: str = ""

    def hasher(self) -> Any:
        """A fresh hash object of the kind the file is known by.

        Raises:
            DownloadError: no digest is known, so nothing could be verified.
        """
        if self.sha256:
            return hashlib.sha256()
        if self.git_id:
            return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        raise DownloadError(f"no digest is known for {self.name}; a file that cannot be verified is not downloaded")

    @property
    def digest(self) -> str:
        """The digest that `hasher` must arrive at, hex."""
        return self.sha256 or self.git_id


@dataclass(frozen=True, slots=True)
class Transfer:
    """How to fetch. Sizes in bytes, times in seconds.

    `connections * part / 16` bounds what a killed process fetches again, so it stays below one part. `retries` counts
    attempts in a row that brought nothing; `patience` is the longest wait that a server may ask for.
    """

    part: int = 64 << 20
    connections: int = 8
    retries: int = 6
    backoff: float = 1.0
    stall: float = 30.0
    patience: float = 120.0

    @property
    def step(self) -> int:
        """Progress inside a part is journaled about this often."""
        return max(1, self.part // 16)


def client(headers: dict[str, str] | None = None, transfer: Transfer | None = None) -> httpx.Client:
    """An HTTP client for downloads: proxies from the environment, few redirects, keys dropped on another host."""
    stall = (transfer or Transfer()).stall
    return httpx.Client(
        headers={"Accept-Encoding": "identity", **(headers or {})},
        timeout=httpx.Timeout(stall, connect=min(stall, 15.0)),
        follow_redirects=True,
        max_redirects=5,
        limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
    )


class BusyError(Exception):
    """The server asks to come again in `wait` seconds."""

    def __init__(self, message: str, wait: float) -> None:
        super().__init__(message)
        self.wait = wait


def check_answer(answer: httpx.Response, remote: RemoteFile, at: int, transfer: Transfer) -> None:
    """The status and the announced sizes of an answer fit what was asked for.

    Raises:
        DownloadError: they never will.
        BusyError: they may later.
    """
    status, name = answer.status_code, remote.name
    if status == 206:
        _check_content_range(answer.headers.get("content-range", ""), remote, at)
        return
    if status == 200:
        length = answer.headers.get("content-length", "")
        if length == "0" and remote.size:
            raise DownloadError(f"{name}: the server sent an empty response (status 200, no bytes)")
        if length.isdigit() and int(length) != remote.size:
            raise DownloadError(f"{name}: the server has {int(length):,} bytes, {remote.size:,} were expected")
        return
    if status in _RETRYABLE or (status in (401, 403) and answer.history):
        # A signed address that a redirect led to can have expired; the next attempt gets a new one.
        wait = _retry_after(answer.headers.get("retry-after", ""))
        if wait > transfer.patience:
            raise DownloadError(f"{name}: the server (status {status}) asks to come again in {wait:.0f} s; pull then")
        raise BusyError(f"status {status}", wait)
    hints = {
        401: "; a token is needed: set HF_TOKEN or run `hf auth login`",
        403: "; this token may not read it: accept the terms on the repository's page, or use another token (HF_TOKEN)",
        416: f"; the file there is not {remote.size:,} bytes long",
    }
    raise DownloadError(f"{name}: the server answered {status} for {remote.url}{hints.get(status, '')}")


def _check_content_range(value: str, remote: RemoteFile, at: int) -> None:
    unit, _, rest = value.partition(" ")
    span, _, total = rest.partition("/")
    start = span.partition("-")[0]
    if unit != "bytes" or not start.isdigit() or int(start) != at:
        raise DownloadError(f"{remote.name}: bytes from {at:,} were asked for, the server sends {value!r}")
    if total.isdigit() and int(total) != remote.size:
        raise DownloadError(f"{remote.name}: the server has {int(total):,} bytes, {remote.size:,} were expected")


def _retry_after(value: str) -> float:
    """Seconds of a Retry-After header, which holds a number or a date; 0 without one."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def read_range(session: httpx.Client, remote: RemoteFile, start: int, stop: int, transfer: Transfer) -> bytes:
    """Bytes `start:stop` of a file, a few of them, without keeping the file.

    Raises:
        DownloadError: they could not be had; says why.
    """
    problem = ""
    for attempt in range(transfer.retries):
        if attempt:
            time.sleep(transfer.backoff * min(2.0 ** (attempt - 1), 30.0))
        try:
            headers = {"Range": f"bytes={start}-{stop - 1}"}
            with session.stream("GET", remote.url, headers=headers) as answer:
                check_answer(answer, remote, start, transfer)
                skip, out = start if answer.status_code == 200 else 0, bytearray()
                for data in answer.iter_raw():
                    out += data
                    if len(out) >= skip + stop - start:
                        return bytes(out[skip : skip + stop - start])
            problem = f"the connection closed after {len(out):,} bytes"
        except BusyError as error:
            problem = str(error)
            time.sleep(error.wait)
        except BROKEN as error:
            problem = f"{type(error).__name__}: {error}"
        except httpx.TooManyRedirects as error:
            raise DownloadError(f"{remote.name}: {error} ({remote.url})") from error
    raise DownloadError(f"{remote.name}: gave up after {transfer.retries} attempts; last: {problem}")
