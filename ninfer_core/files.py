"""A file that is read while others may change it: positioned reads from any thread, and whether it is still the same.

Reads copy. A mapping would be shorter to write, but a file that is cut short under a mapping ends the process.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import ContentError, GeometryError

_STEP = 8 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells two states of a file apart without reading it: device, inode, size and time of change."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, where: str | os.PathLike[str] | int) -> Stamp:
        """The stamp of a path or an open descriptor. Raises OSError."""
        found = os.stat(where)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class SourceFile:
    """One file, opened for reading; all methods may be called from any thread.

    Args:
        path: the file.
        stamp: what it must still be; None takes it as it is.

    Raises:
        ContentError: the file is another than the stamp says.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], stamp: Stamp | None = None) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        self._close = weakref.finalize(self, os.close, self._fd)
        self._lock = threading.Lock()
        try:
            self.stamp = stamp or Stamp.of(self._fd)
            self.check()
        except BaseException:
            self._close()
            raise
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def check(self) -> None:
        """Raise ContentError if the file was written to, or another one was put in its place before it was opened."""
        found = Stamp.of(self._fd)
        if found != self.stamp:
            what = "was replaced" if found.inode != self.stamp.inode else "was changed"
            raise ContentError(
                f"{self.path} {what} while it was in use ({self.stamp.size:,} bytes before, {found.size:,} now); "
                "load the model again when the file is complete"
            )

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a writable buffer of bytes from position `start`.

        Raises:
            GeometryError: the file ends before.
        """
        done = 0
        while done < len(buffer):
            count = self._read_at(start + done, buffer[done:])
            if count == 0:
                raise GeometryError(
                    f"{self.path} is cut off: bytes {start:,} to {start + len(buffer):,} are wanted, it has "
                    f"{Stamp.of(self._fd).size:,}"
                )
            done += count

    def _read_at(self, start: int, buffer: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [buffer[: 1 << 30]], start)
        with self._lock:  # no positioned read here: position and read must stay together
            os.lseek(self._fd, start, os.SEEK_SET)
            data = os.read(self._fd, min(len(buffer), _STEP))
        buffer[: len(data)] = data
        return len(data)

    def read(self, start: int, nbytes: int) -> bytes:
        """Some bytes. Raises GeometryError as `read_into` does."""
        data = bytearray(nbytes)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def sha256(self, seen: Callable[[int], object] = lambda nbytes: None) -> str:
        """SHA-256 of the whole file, hex; `seen` gets the size of every piece and may raise to stop."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_STEP))
        for start in range(0, self.stamp.size, _STEP):
            piece = buffer[: min(_STEP, self.stamp.size - start)]
            self.read_into(start, piece)
            digest.update(piece)
            seen(len(piece))
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close()
