"""How long prompt chunks take, measured, and so how many of them may run between two rounds of the running streams.

A stream must never wait longer than one whole chunk takes. Chunks have the sizes that their prompts give them, so what
the time decides is their number alone: several short ones run where one long one would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from .pace import Cost

PARTS = 8
"""Sizes of chunks that are told apart."""


class ChunkTimes:
    """Seconds of prompt chunks by their number of tokens. `chunk`: tokens of a whole one."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._costs = [Cost(0.2) for _ in range(PARTS + 1)]

    def _part(self, tokens: int) -> int:
        return min(PARTS, -(-tokens * PARTS // self._chunk))

    def measured(self, tokens: int, seconds: float) -> None:
        """A chunk of so many tokens took so long."""
        self._costs[self._part(tokens)].add(seconds)

    def expected(self, tokens: int) -> float | None:
        """What a chunk takes, by those that were as long or longer; None if none was."""
        return next((c.known for c in self._costs[self._part(tokens) :] if c.known is not None), None)

    @property
    def whole(self) -> float | None:
        """What a whole chunk takes; None if none was read yet."""
        return self.expected(self._chunk)


class Stopwatch:
    """Times what a device does: by the clock where calls return when it is done, by events where they return before."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]] = deque()

    def start(self) -> Callable[[Callable[[float], None]], None]:
        """Begin; the result ends it, and tells the seconds to its argument as soon as they are known."""
        if not self._cuda:
            began = self._clock()
            return lambda tell: tell(self._clock() - began)
        self._collect()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def stop(tell: Callable[[float], None]) -> None:
            last.record()
            self._running.append((first, last, tell))

        return stop

    def _collect(self) -> None:
        while self._running and self._running[0][1].query():
            first, last, tell = self._running.popleft()
            tell(float(first.elapsed_time(last)) / 1e3)
