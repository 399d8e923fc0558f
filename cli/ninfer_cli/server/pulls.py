"""Downloads asked for over HTTP: one job per model, any number of watchers, ended with the last of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from ninfer_core import store
from ninfer_core.errors import NinferError
from ninfer_core.pull import Options, Status, pull

from .errors import INTERNAL

_INTERVAL = 0.1


@dataclass(eq=False)
class _Job:
    """One running pull, worked on by a thread."""

    name: str
    watchers: int = 0
    status: Status = field(default_factory=lambda: Status("manifest"))
    stopped: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: NinferError | None = None
    entry: store.ModelEntry | None = None

    def run(self, options: Options) -> None:
        """The thread's work."""

        def progress(status: Status) -> None:
            self.status = status

        options.progress, options.cancelled = progress, self.stopped.is_set
        try:
            self.entry = pull(self.name, options)
        except NinferError as error:
            self.error = error
        except Exception as error:
            self.error = NinferError(INTERNAL)
            self.error.__cause__ = error
        finally:
            self.done.set()


class Pulls:
    """All running pulls of one server. `options` makes the options of each (tests shorten its patience)."""

    def __init__(self, options: Callable[[], Options] = Options) -> None:
        self.options = options
        self._jobs: dict[str, _Job] = {}

    def stop(self) -> None:
        """End all pulls; what has arrived is kept."""
        for job in self._jobs.values():
            job.stopped.set()

    async def watch(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Start the pull of a model, or join the one that runs; Ollama's status lines, at most ten a second.

        Raises:
            NinferError: the pull failed.
        """
        key = store.canonical(name)
        job = self._jobs.get(key)
        if job is None or job.done.is_set():
            job = self._jobs[key] = _Job(name)
            threading.Thread(target=job.run, args=(self.options(),), name="ninfer-pull", daemon=True).start()
        job.watchers += 1
        try:
            yield {"status": "pulling manifest"}
            async for line in _lines(job):
                yield line
            if job.error is not None:
                raise job.error
            for status in ("verifying sha256 digest", "writing manifest", "success"):
                yield {"status": status}
        finally:
            job.watchers -= 1
            if job.watchers == 0:
                job.stopped.set()
                if self._jobs.get(key) is job:
                    del self._jobs[key]


async def _lines(job: _Job) -> AsyncIterator[dict[str, Any]]:
    last: Any = None
    beat = time.monotonic()
    while not job.done.is_set():
        await asyncio.sleep(_INTERVAL)
        line = _line(job.status)
        if line is not None and (line != last or time.monotonic() - beat > 5.0):
            last, beat = line, time.monotonic()
            yield line
    line = _line(job.status)
    if job.error is None and line is not None and "completed" in line:
        yield {**line, "completed": line["total"]}


def _line(status: Status) -> dict[str, Any] | None:
    if status.phase == "download":
        digest = f"sha256:{status.digest}" if len(status.digest) == 64 else f"git:{status.digest}"
        return {
            "status": f"pulling {status.digest[:12]}",
            "digest": digest,
            "total": status.size,
            "completed": status.done,
        }
    if status.phase == "waiting" and status.total:
        return {"status": f"waiting for {status.file}", "total": status.total, "completed": status.all_done}
    return None
