"""How long prompt chunks take, measured, and so how much of them may run between two rounds of the running streams.

A stream must never wait much longer than `PIECE`. Chunks have the sizes that their prompts give them, and the first
bits of a token do not depend on when its layers run: so a long chunk stops between two layers, and several short ones
run where one long one would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from .pace import Cost

PIECE = 0.04
"""Seconds of a device that prompts may take between two rounds."""
ROUNDS = 2
"""Rounds whose time they may take where that is more: a slow device must get on with prompts too."""
SIZES = 20
"""Sizes of chunks that are told apart, each twice the one before."""


class ChunkTimes:
    """Seconds of an operation in prompt chunks, by their number of tokens. `piece`: seconds, see `PIECE`."""

    def __init__(self, piece: float = PIECE) -> None:
        self.piece = piece
        self._costs = [Cost(0.2) for _ in range(SIZES)]

    def measured(self, tokens: int, operations: float, seconds: float) -> None:
        """Layers of a chunk of so many tokens took so long."""
        self._costs[_size(tokens)].add(seconds / operations)

    def expected(self, tokens: int, operations: float) -> float | None:
        """Seconds of layers of a chunk of so many tokens; None if none as long or longer was measured.

        Where only longer ones were, it is taken to need as long as they do.
        """
        for longer, cost in enumerate(self._costs[_size(tokens) :]):
            if cost.known is not None:
                return cost.known * operations * 2**longer
        return None


def _size(tokens: int) -> int:
    return min(SIZES - 1, (tokens - 1).bit_length())


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
