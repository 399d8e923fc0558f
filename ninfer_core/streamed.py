"""A checkpoint that is never here as a whole: its shards come one after the other while it is converted, and go again.

The folder looks complete to the converter from the start: every shard is there with its size and its header, fetched
in one small range each, and a hole in place of its tensors. `provide` fills the holes that are needed next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx

from .download import Download, check_space, received
from .errors import DownloadError
from .remote import RemoteFile, Transfer, read_range

HEADER_GUESS = 1 << 20
HEADER_LIMIT = 100 << 20
_DAWN = 1_000_000_000  # nanoseconds are derived from the digest; a second before which no file was made


class StreamedShards:
    """The shards of one checkpoint in `folder`. `progress(file, done, size)` tells of each download."""

    def __init__(
        self,
        folder: Path,
        files: Iterable[RemoteFile],
        session: httpx.Client,
        transfer: Transfer,
        progress: Callable[[RemoteFile, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self.folder, self.session, self.transfer = folder, session, transfer
        self.files = {file.name: file for file in files}
        self._progress, self._cancelled = progress, cancelled
        self._headers: dict[str, bytes] = {}

    def prepare(self) -> None:
        """Put every shard in place, with its header alone.

        Raises:
            DownloadError: a header cannot be had, or is none.
        """
        for file in self.files.values():
            path = self.folder / file.name
            if path.is_file() and path.stat().st_size == file.size:
                with open(path, "rb") as stored:
                    length = int.from_bytes(stored.read(8), "little")
                    if 0 < length <= min(HEADER_LIMIT, file.size - 8):
                        stored.seek(0)
                        self._headers[file.name] = stored.read(8 + length)
                        continue
            self._headers[file.name] = self._fetch_header(file)
            self._empty(file)

    def _fetch_header(self, file: RemoteFile) -> bytes:
        start = read_range(self.session, file, 0, min(HEADER_GUESS, file.size), self.transfer)
        length = int.from_bytes(start[:8], "little")
        if not 0 < length <= min(HEADER_LIMIT, file.size - 8):
            raise DownloadError(f"{file.name} is not a safetensors file: it announces a header of {length:,} bytes")
        if 8 + length > len(start):
            start += read_range(self.session, file, len(start), 8 + length, self.transfer)
        return start[: 8 + length]

    def _empty(self, file: RemoteFile) -> None:
        """The shard as a hole behind its header."""
        self._place(file, self.folder / (file.name + ".hole"), self._headers[file.name])

    def _place(self, file: RemoteFile, made: Path, header: bytes | None = None) -> None:
        if header is not None:
            with open(made, "wb") as out:
                out.write(header)
                out.truncate(file.size)
        # The converter knows a source by sizes and times. These follow from the content, full or not.
        stamp = (_DAWN << 30) + int(file.digest[:12], 16)
        os.utime(made, ns=(stamp, stamp))
        os.replace(made, self.folder / file.name)

    def _full(self, file: RemoteFile) -> bool:
        return (self.folder / (file.name + ".full")).exists()

    def provide(self, files: frozenset[str], later: frozenset[str]) -> None:
        """Fetch and verify what is needed and not here; drop what is not needed any more.

        Raises:
            DownloadError, DiskSpaceError, RequestCancelledError: as a download does.
        """
        for name, file in self.files.items():
            if name not in files and name not in later and self._full(file):
                (self.folder / (name + ".full")).unlink()  # first: a mark without its shard would be believed
                self._empty(file)
        for name in sorted(files):
            if name in self.files and not self._full(self.files[name]):
                self._fill(self.files[name])

    def _fill(self, file: RemoteFile) -> None:
        fetched = self.folder / (file.name + ".fetched")
        check_space(self.folder, file.size - received(fetched, file))
        Download(
            file, fetched, self.session, self.transfer, lambda done, _: self._progress(file, done), self._cancelled
        ).run()
        header = self._headers[file.name]
        with open(fetched, "rb") as stored:
            if stored.read(len(header)) != header:
                fetched.unlink()
                raise DownloadError(
                    f"{file.name}: the header that was sent first is not that of the verified file; try again"
                )
        self._place(file, fetched)
        (self.folder / (file.name + ".full")).touch()

    def close(self) -> None:
        """Remove the folder's shards and marks; what else is in it belongs to others."""
        for name in self.files:
            for suffix in ("", ".full", ".hole", ".fetched", ".fetched.part", ".fetched.journal"):
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / (name + suffix)).unlink()
