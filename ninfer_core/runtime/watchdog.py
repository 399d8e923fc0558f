"""Notices when the engine's loop does not come back from a step: a device that hangs raises nothing."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

log = logging.getLogger("ninfer.engine")
TICKS = 20
"""Looks at the loop within the limit."""


class Watched(Protocol):
    """What the watchdog needs of the loop."""

    @property
    def step(self) -> int | None:
        """The number of the step under way, None while there is nothing to do."""

    def stall(self, step: int, seconds: float) -> bool:
        """This step hangs; False if it is over by now."""


class Watchdog:
    """Raises the alarm when `TICKS` looks in a row find the loop in the same step, `limit / TICKS` seconds apart.

    Looks are counted and not seconds: while the machine sleeps or the process is stopped, this thread does not look
    either, and where it gets no time the loop's step is not to blame.
    """

    def __init__(self, loop: Watched, limit: float, name: str) -> None:
        self.limit = limit
        self._loop = loop
        self._seen: int | None = None
        self._looks = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ninfer-watchdog-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> bool:
        """One look; whether it raised the alarm."""
        step = self._loop.step
        self._looks = self._looks + 1 if step is not None and step == self._seen else 0
        self._seen = step
        if step is None or self._looks != TICKS:
            return False
        alarm = self._loop.stall(step, self.limit)
        if alarm:
            log.error("the engine has not come back from one step for %.0f s; its requests are ended", self.limit)
        return alarm

    def _run(self) -> None:
        while not self._ended.wait(self.limit / TICKS):
            self.look()
