"""The thread that runs an engine: steps while there is work, sleeps otherwise, and survives the faults of requests."""

from __future__ import annotations

import logging
import os
import threading

import torch

from ..errors import EngineClosedError, EngineFailedError
from .runner import Runner
from .scheduler import Scheduler

log = logging.getLogger("ninfer.engine")


class Loop:
    """Owns the engine's thread. Nothing a request does ends it; a model that can make no token does, and says so."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, threads: int, name: str) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._threads = threads
        self.failure: EngineFailedError | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"ninfer-{name}", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End all requests with `EngineClosedError` and wait for the thread. Does nothing in a forked child.

        A child has no such thread, and a lock that it held at the fork is never released there.
        """
        if os.getpid() != self._pid:
            return
        self._scheduler.stop(EngineClosedError("the engine was closed"))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        scheduler = self._scheduler
        while True:
            try:
                busy = scheduler.step()
            except Exception as error:
                log.exception("the engine's loop failed; running requests are ended")
                scheduler.abandon(error)
                busy = True
            if scheduler.suspect:
                self._check_health()
            if busy:
                continue
            if scheduler.closed:
                return
            scheduler.wait()

    def _check_health(self) -> None:
        """After a fault inside the model: make one token. If that fails too, the engine is dead and must say so."""
        try:
            if not self._runner.probe():
                return  # nothing free to try with; the next step asks again
            self._scheduler.suspect = False
        except Exception as error:
            log.exception("the engine can no longer make a token")
            self.failure = EngineFailedError(
                f"the engine has failed and can make no token ({type(error).__name__}); close it and load it again"
            )
            self._scheduler.suspect = False
            self._scheduler.stop(self.failure)


def start_loop(
    runner: Runner, *, max_sequences: int, max_queue: int, threads: int, name: str
) -> tuple[Scheduler, Loop]:
    """A scheduler for the runner, and its running thread."""
    scheduler = Scheduler(runner, max_sequences=max_sequences, max_queue=max_queue)
    loop = Loop(scheduler, runner, threads=threads, name=name)
    loop.start()
    return scheduler, loop
