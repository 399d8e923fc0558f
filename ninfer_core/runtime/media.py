"""The images and videos of one running prompt: their positions, and their features when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..model.vision import Encoding, VisionTower

STEP = 1 << 17
"""Work of the tower in one step of the loop (`Encoding.advance`): some ten milliseconds where this was measured."""


def positions_of(length: int, media: Sequence[Any], merge: int) -> tuple[Tensor, int]:
    """Three-axis positions `[3, length]` of a prompt, and how far later positions are from their token index.

    Text counts on in all axes. A block of `h x w` features (an image, or one pair of frames) stands at one temporal
    position, spreads over the other two axes, and moves what follows by the larger side.
    """
    made = torch.empty(3, length, dtype=torch.int64)
    at = position = 0
    for placed in media:
        height, width = (side // merge for side in placed.media.grid[1:])
        for start, stop in placed.spans:
            made[:, at:start] = torch.arange(position, position + start - at)
            position += start - at
            made[0, start:stop] = position
            made[1, start:stop] = position + torch.arange(height).repeat_interleave(width)
            made[2, start:stop] = position + torch.arange(width).repeat(height)
            position += max(height, width)
            at = stop
    made[:, at:] = torch.arange(position, position + length - at)
    return made, position - at


class PromptMedia:
    """Positions and features of a prompt with media. `rope_delta`: rotary position minus index behind the prompt.

    A medium is encoded alone and as a whole when a chunk first needs it, so its features do not depend on what else
    runs or on where a prompt resumes; they are dropped when the prompt has been read beyond them.
    """

    def __init__(self, tower: VisionTower, length: int, media: Sequence[Any]) -> None:
        self._tower, self._media, self._length = tower, media, length
        positions, self.rope_delta = positions_of(length, media, tower.config.spatial_merge_size)
        self._positions = positions.to(tower.device)
        self._features: dict[int, Tensor] = {}
        self._current: tuple[int, Encoding] | None = None
        self.encoded = 0

    def positions(self, start: int, stop: int) -> Tensor:
        """Positions `[3, stop - start]` of the tokens `start ..`, which may lie behind the prompt."""
        known = self._positions[:, start : min(stop, self._length)]
        if stop <= self._length:
            return known
        first = max(start, self._length) + self.rope_delta
        more = torch.arange(first, stop + self.rope_delta, device=known.device)
        return torch.cat((known, more.expand(3, -1)), 1)

    def _within(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """`(medium, first token, end, its first feature)` of what lies between two tokens."""
        found = []
        for number, placed in enumerate(self._media):
            feature = 0
            for low, high in placed.spans:
                first, last = max(low, start), min(high, stop)
                if first < last:
                    found.append((number, first, last, feature + first - low))
                feature += high - low
        return found

    def ready(self, start: int, stop: int) -> bool:
        """Whether all features of the tokens `start .. stop - 1` are there."""
        return all(n in self._features for n, *_ in self._within(start, stop))

    def work(self, start: int, stop: int) -> bool:
        """One step of the tower for the tokens `start .. stop - 1`. False if all their features are there."""
        missing = next((n for n, *_ in self._within(start, stop) if n not in self._features), None)
        if missing is None:
            return False
        if self._current is None or self._current[0] != missing:
            pixels = self._media[missing].media
            self._current = (missing, self._tower.begin(pixels, pixels.grid))
        encoding = self._current[1]
        if encoding.advance(STEP):
            self._features[missing], self._current = encoding.features, None
            self.encoded += 1
        return True

    def embeddings(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """`(rows, features)` of the tokens `start .. stop - 1`, rows counted from `start`; None without media."""
        found = self._within(start, stop)
        if not found:
            return None
        device = self._tower.device
        rows = torch.cat([torch.arange(first - start, last - start, device=device) for _, first, last, _ in found])
        parts = [self._features[n][feature : feature + last - first] for n, first, last, feature in found]
        return rows, torch.cat(parts)

    def drop(self, length: int) -> None:
        """Free the features of media that end before token `length`."""
        for number in [n for n in self._features if self._media[n].spans[-1][1] <= length]:
            del self._features[number]
