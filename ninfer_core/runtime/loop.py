"""The thread that runs an engine: steps while there is work, sleeps otherwise, begins anew where no token can be made.

What may go wrong, from small to large: a request fails and ends alone (`scheduler`); the model can make no token, or
the loop itself has failed, and the engine begins anew with the requests that wait (`Loop._restart`); that is in vain or
too frequent, and the engine gives up; a step does not come back at all (`watchdog`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass

import torch

from ..errors import DeviceFaultError, EngineClosedError, EngineFailedError
from .faults import device_fault
from .runner import Runner
from .scheduler import Scheduler
from .watchdog import Watchdog

log = logging.getLogger("ninfer.engine")


PAUSE = 1.0
"""Seconds without a request before the next step of what an idle engine does: one takes up to 77 ms."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often an engine may begin anew: after each of `pauses` in one go, and `most` times in `window` (seconds)."""

    pauses: tuple[float, ...] = (0.0, 1.0, 10.0)
    most: int = 5
    window: float = 3600.0


class Loop:
    """Owns the engine's thread. Nothing a request does ends it; a model that can make no token does, and says so.

    `limit`: seconds after which a step counts as hung; 0: none does.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, threads: int, name: str, limit: float) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._threads = threads
        self.rules = Restarts()
        self.pause = PAUSE
        self.failure: EngineFailedError | None = None
        self.restarts = 0
        self._began: list[float] = []
        self._restarting = self._stalled = self._idle = False
        self._steps = 0
        self._guard = threading.Lock()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"ninfer-{name}", daemon=True)
        self._watchdog = Watchdog(self, limit, name) if limit else None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def status(self) -> str:
        """`ok` where a token can be made; `checking` whether it can; `restarting`, `stalled` (hangs) or `failed`."""
        if self.failure is not None or not self.alive:
            return "failed"
        if self._stalled:
            return "stalled"
        if self._restarting:
            return "restarting"
        return "checking" if self._scheduler.suspect else "ok"

    @property
    def step(self) -> int | None:
        """The number of the step under way; None while the thread sleeps."""
        return None if self._idle else self._steps

    def start(self) -> None:
        """Start the threads."""
        self._thread.start()
        if self._watchdog is not None:
            self._watchdog.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End all requests with `EngineClosedError` and wait for the threads. Does nothing in a forked child.

        A child has no such threads, and a lock that one held at the fork is never released there.
        """
        if os.getpid() != self._pid:
            return
        self._scheduler.stop(EngineClosedError("the engine was closed"))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._watchdog is not None:
            self._watchdog.stop()

    def stall(self, step: int, seconds: float) -> bool:
        """The watchdog's alarm: unless that step is over by now, all requests end and none is taken until it is."""
        with self._guard:
            if self.step != step or self._stalled:
                return False
            self._stalled = True
            self._scheduler.refuse(
                DeviceFaultError(
                    f"the engine has not come back from one step for {seconds:.0f} s and counts as hung (the option "
                    "watchdog); requests are refused until it does"
                )
            )
        return True

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._turn():
                pass
        finally:  # whatever ends the thread, nobody may wait for it
            if self.failure is None and not self._scheduler.closed:
                self.failure = EngineFailedError("the engine's thread has ended; close the engine and load it again")
            self._scheduler.stop(self.failure or EngineClosedError("the engine was closed"))
            self._scheduler.end_all()

    def _turn(self) -> bool:
        """One step, and what follows from it; False once the engine is closed and all requests have ended."""
        scheduler = self._scheduler
        try:
            busy = scheduler.step()
        except Exception as error:
            log.exception("the engine's loop failed; running requests are ended")
            self._restart(error)
            busy = True
        if scheduler.suspect and not scheduler.closed:
            self._check_health()
        with self._guard:
            self._steps += 1
            if self._stalled:
                log.warning("the step that hung has come back; requests are taken again")
                self._stalled = False
                scheduler.accept()
                scheduler.suspect = True
        if scheduler.closed and not busy:
            return False
        if busy or scheduler.suspect:
            return True
        self._idle = True
        asked = scheduler.wait(self._patience)
        self._idle = False
        if not asked:
            self._warm()
        return True

    @property
    def _patience(self) -> float | None:
        """Seconds without work before the next step of `Runner.warming`, which a request that comes must wait for.

        Before the first request nobody is known to come; one that has ended is often followed by another at once.
        """
        if self._runner.warming is None:
            return None
        return self.pause if self._scheduler.totals.requests else 0.0

    def _warm(self) -> None:
        """A step of what makes the first prompts faster."""
        steps = self._runner.warming
        assert steps is not None
        try:
            if next(steps, self) is None:
                return
        except Exception:  # what it was for does without, or fails then, where a request can be told
            log.exception("the device could not be got ready for prompts")
        self._runner.warming = None

    def _check_health(self) -> None:
        """After a fault inside the model: make one token."""
        try:
            if self._runner.probe():
                self._scheduler.suspect = False
            elif self._scheduler.idle:
                raise RuntimeError("nothing runs, and no slot or page is free")
            # else nothing is free to try with; the next step asks again
        except Exception as error:
            log.exception("the engine can no longer make a token")
            self._restart(error)

    def _restart(self, cause: Exception) -> None:
        """End what runs, forget all state and try again; requests that wait keep their places.

        Weights are kept: what changes them breaks the device's context too, and then nothing here helps.
        """
        scheduler, rules = self._scheduler, self.rules
        scheduler.suspect = True
        self._restarting = True
        scheduler.abandon(device_fault(cause))
        for pause in rules.pauses:
            scheduler.pause(pause)
            now = time.monotonic()
            self._began = [t for t in self._began if now - t < rules.window]
            if scheduler.closed or len(self._began) >= rules.most:
                break
            self._began.append(now)
            try:
                self._runner.renew()
                if not self._runner.probe():
                    raise RuntimeError("no slot or page is free in an engine without requests")
            except Exception as error:
                log.exception("a restart of the engine failed")
                cause = error
                continue
            self.restarts += 1
            scheduler.suspect = self._restarting = False
            log.warning("the engine has begun anew; %d requests wait", scheduler.stats()["waiting"])
            return
        if not scheduler.closed:
            self._give_up(cause)
        self._restarting = False

    def _give_up(self, cause: Exception) -> None:
        """The engine is dead and must say so."""
        log.error("the engine gives up after %d restarts in the last hour", len(self._began), exc_info=cause)
        self.failure = EngineFailedError(
            f"the engine has failed and can make no token ({type(cause).__name__}), and beginning anew does not help; "
            "close it and load it again, in a new process if it runs on a GPU"
        )
        self._scheduler.suspect = False
        self._scheduler.stop(self.failure)


def start_loop(
    runner: Runner, *, max_sequences: int, max_queue: int, threads: int, name: str, limit: float = 0.0
) -> tuple[Scheduler, Loop]:
    """A scheduler for the runner, and its running thread. `limit`: see `Loop`."""
    scheduler = Scheduler(runner, max_sequences=max_sequences, max_queue=max_queue)
    loop = Loop(scheduler, runner, threads=threads, name=name, limit=limit)
    loop.start()
    return scheduler, loop
