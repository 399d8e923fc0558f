"""A lock between processes, and between threads of one, that dies with its owner and tells who that is."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


class ProcessLock:
    """A lock file. The file stays when the lock is released; only the operating system's lock on it counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def acquire(self) -> bool:
        """Take the lock if it is free; whether it was.

        Raises:
            OSError: the file cannot be made.
        """
        file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - held until release
        try:
            _lock(file)
        except OSError:
            file.close()
            return False
        self._file = file
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        return True

    def holder(self) -> int | None:
        """The process that took the lock last; None if it is not known."""
        try:
            return int(self.path.read_bytes())
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Let others take it. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> ProcessLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: Any) -> None:
        file.seek(1 << 30)  # beyond the text: a locked range cannot be read by others here
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)
else:
    import fcntl

    def _lock(file: Any) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
