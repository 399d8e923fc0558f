"""The vision tower: patch rows of images and video pairs -> features that stand in for embedding rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ..config import VisionConfig
from ..errors import InvalidRequestError
from ..kernels.vision import (
    biased_linear,
    gelu_linear,
    patch_angles,
    patch_rows,
    position_rows,
    segment_attention,
    split_of,
    sum_norm,
)
from ..types import Pixels
from ..weights import VisionBlock, VisionLinear, VisionNorm, VisionWeights

TILE = 8192
"""Patch rows that go through the wide layers at a time, which bounds what they need beside the residual."""


class VisionTower:
    """Runs media through the tower. Slices of a video do not see each other, nor do different media."""

    def __init__(self, weights: VisionWeights, config: VisionConfig) -> None:
        self.weights, self.config = weights, config
        self.device = weights.position.device
        self.dtype = weights.patch.dense.dtype

    @torch.inference_mode()
    def features(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Features of one or more media.

        Args:
            patches: patch rows `[P, channels * 2 * 16 * 16]` (`kernels.vision.patch_rows`), media after each other.
            grids: `(slices, patch rows, patch columns)` of every medium.

        Returns:
            `[P / 4, text width]` in the type of the weights, in the order of the placeholders.

        Raises:
            InvalidRequestError: the grids do not fit the patches, or a side is not even.
        """
        encoding = Encoding(self, patches, grids)
        while not encoding.advance(1 << 62):
            pass
        return encoding.features

    @torch.inference_mode()
    def begin(self, pixels: Pixels, grid: tuple[int, int, int]) -> Encoding:
        """Start on one medium; its work is done by `Encoding.advance`.

        Raises:
            InvalidRequestError: see `features`.
        """
        c = self.config
        frames = torch.as_tensor(pixels.frames).to(self.device, non_blocking=True)
        sizes = (c.patch_size, c.temporal_patch_size, c.spatial_merge_size)
        return Encoding(self, patch_rows(frames, *sizes, pixels.mean, pixels.std, self.dtype), [grid])

    def workspace(self, patches: int) -> int:
        """See `tower_workspace`."""
        return tower_workspace(self.config, self.dtype.itemsize, patches)


def tower_workspace(c: VisionConfig, size: int, patches: int) -> int:
    """Bytes that a medium of that many patch rows takes beside the weights, its features included.

    `size`: bytes of the compute type.
    """
    wide, tile = c.hidden_size * c.spatial_merge_size**2, min(patches, TILE)
    # the residual, its norm, cosines and sines, the features
    row = c.hidden_size * (4 + size) + c.head_dim * 8 + c.out_hidden_size * size // c.spatial_merge_size**2
    # query, key and value and what attention makes of them, or a tile of the wide layers
    mixed = c.hidden_size * 3 + max(5 * c.hidden_size if size == 4 else 0, 3 * c.num_heads * sum(split_of(c.head_dim)))
    blocks = max(patches * mixed * size, tile * 2 * max(c.intermediate_size, wide) * size)
    # the frames, normalised and in patch order, are gone before the blocks begin
    begin = patches * max(c.patch_dim * (8 + 3 * size), c.patch_dim * size + c.hidden_size * 12)
    return max(patches * row + blocks, begin) + tile * 16 * c.hidden_size


class Encoding:
    """Media on their way through the tower, some blocks at a time, so that other work goes on between."""

    def __init__(self, tower: VisionTower, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> None:
        config, device = tower.config, tower.device
        merge = config.spatial_merge_size
        if any(h % merge or w % merge for _, h, w in grids):
            raise InvalidRequestError(f"grid sides must be multiples of {merge}, found {list(grids)}", param="messages")
        if sum(t * h * w for t, h, w in grids) != patches.shape[0]:
            raise InvalidRequestError(
                f"grids {list(grids)} need {sum(t * h * w for t, h, w in grids)} patch rows, found {patches.shape[0]}",
                param="messages",
            )
        self._tower, self._next = tower, 0
        self._segments = [(t, h * c) for t, h, c in grids]
        # attention over a segment of 2 width + inner rows costs as much as the matrices of a block
        even = 2 * config.hidden_size + config.intermediate_size
        self._cost = sum(count * length * (1 + length / even) for count, length in self._segments)
        angles = [patch_angles(h, c, merge, config.head_dim, device) for _, h, c in grids]
        self._cos, self._sin = (
            torch.cat([pair[i].repeat(t, 1) for pair, (t, _, _) in zip(angles, grids, strict=True)]) for i in (0, 1)
        )
        weights = tower.weights
        x = _tiled(lambda rows: _linear(rows, weights.patch).float(), patches.to(device, tower.dtype))
        self._x: Tensor | None = x
        first = 0
        for slices, height, width in grids:
            own = x[first : (first := first + slices * height * width)]
            own.view(slices, height * width, -1).add_(position_rows(weights.position, height, width, merge))
        self._normed: Tensor | None = None
        self._features: Tensor | None = None

    @property
    def features(self) -> Tensor:
        """`[P / 4, text width]`, once `advance` has said so."""
        assert self._features is not None
        return self._features

    @torch.inference_mode()
    def advance(self, budget: int) -> bool:
        """Run blocks, one at least; True when the features are there.

        budget: about how much, in patch rows x blocks, a row's attention counted as the matrices that cost as much.
        """
        x, weights, config = self._x, self._tower.weights, self._tower.config
        if x is None:
            return True
        norms = [block.norm1 for block in weights.blocks] + [weights.merger_norm]
        u = self._normed
        if u is None:
            u = self._normed = torch.empty_like(x, dtype=self._tower.dtype)
            sum_norm(x, None, norms[0].weight, norms[0].bias, u)
        first, self._next = self._next, min(len(weights.blocks), self._next + max(1, int(budget / self._cost)))
        for number in range(first, self._next):
            self._block(x, u, weights.blocks[number], norms[number + 1])
        if self._next < len(weights.blocks):
            return False
        group = config.spatial_merge_size**2

        def merged(rows: Tensor) -> Tensor:
            y = rows.view(rows.shape[0] // group, -1)
            return _linear(gelu(_linear(y, weights.merger_fc1)), weights.merger_fc2)

        self._features, self._x, self._normed = _tiled(merged, u), None, None
        return True

    def _block(self, x: Tensor, u: Tensor, block: VisionBlock, following: VisionNorm) -> None:
        """One block, in place: on the residual `x [P, width]` fp32 and its norm `u`, then the norm that follows."""
        qkv = _tiled(lambda rows: _linear(rows, block.qkv), u)
        segment_attention(qkv, self._cos, self._sin, self._segments, self._tower.config.num_heads, u)
        del qkv
        for rows, part in zip(x.split(TILE), u.split(TILE), strict=True):
            sum_norm(rows, _linear(part, block.output), block.norm2.weight, block.norm2.bias, part)
            hidden = gelu_linear(part, block.fc1.dense, block.fc1.bias)
            sum_norm(rows, _linear(hidden, block.fc2), following.weight, following.bias, part)


def _linear(x: Tensor, weight: VisionLinear) -> Tensor:
    return biased_linear(x, weight.dense, weight.bias)


def _tiled(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of rows, or of groups of them, `TILE` rows at a time."""
    part = function(x[:TILE])
    if x.shape[0] <= TILE:
        return part
    ratio = TILE // part.shape[0]
    out = part.new_empty(x.shape[0] // ratio, part.shape[1])
    out[: part.shape[0]] = part
    for first in range(TILE, x.shape[0], TILE):
        out[first // ratio : (first + TILE) // ratio] = function(x[first : first + TILE])
    return out
