"""The prompt chunk under way, run in pieces of some layers each, and what chunks and pieces of them take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..model.decoder import Decoder
from ..model.prompt_chunk import PromptChunk
from ..state import FusedState, State
from .budget import ChunkTimes, Stopwatch
from .running import Running

if TYPE_CHECKING:
    from ..model.fused import FusedDecoder


@dataclass(frozen=True, slots=True)
class Reading:
    """The chunk of the tokens `start .. end - 1` of a sequence, on its way through the layers."""

    sequence: Running
    start: int
    end: int
    chunk: PromptChunk

    @property
    def hidden(self) -> Tensor:
        """Hidden rows `[T, E]` behind its last layer."""
        return self.chunk.hidden


class Pieces:
    """Runs prompt chunks, one at a time: the workspace of the layers is that of one. `clock` tells seconds."""

    def __init__(
        self,
        decoder: Decoder | FusedDecoder,
        state: State | FusedState,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self._decoder, self._state, self._device = decoder, state, device
        self._watch = Stopwatch(device, clock)
        self.times = ChunkTimes()
        self.reading: Reading | None = None

    def begin(self, sequence: Running, start: int, end: int) -> Reading:
        """The chunk that is under way of this sequence, or a new one."""
        reading = self.reading
        if reading is not None:
            assert reading.sequence is sequence, "a chunk of another prompt is under way"
            return reading
        media = sequence.media
        chunk = self._decoder.begin(
            self._state,  # type: ignore[arg-type]
            torch.tensor(sequence.tokens[start:end], device=self._device),
            sequence.slot,
            start,
            sequence.table,
            media.positions(start, end) if media is not None else None,
            media.embeddings(start, end) if media is not None else None,
        )
        self.reading = Reading(sequence, start, end, chunk)
        return self.reading

    def advance(self, room: float | None) -> bool:
        """Run layers of the chunk: all, or those that fit into so many seconds, one at least; whether all have run.

        One whose time is not known fits alone.
        """
        assert self.reading is not None
        chunk, tokens, done = self.reading.chunk, self.reading.end - self.reading.start, 0.0
        stop = self._watch.start()
        while chunk.left:
            cost = chunk.left[0]
            if room is not None and done:
                seconds = self.times.expected(tokens, done + cost)
                if seconds is None or seconds > room:
                    break
            chunk.advance()
            done += cost
        if done:
            stop(lambda seconds: self.times.measured(tokens, done, seconds))
        return not chunk.left

    def leave(self, sequence: Running) -> None:
        """Give up the chunk of a sequence. What its layers have written is in its own pages and slot."""
        if self.reading is not None and self.reading.sequence is sequence:
            self.reading = None

    def seconds(self, sequence: Running, start: int, end: int) -> float | None:
        """What the layers of a chunk will take, of one under way those that are left; None if that is not known."""
        reading = self.reading
        under_way = reading is not None and reading.sequence is sequence
        left = reading.chunk.left if reading is not None and under_way else self._decoder.costs(start, end - start)
        return self.times.expected(end - start, sum(left))
