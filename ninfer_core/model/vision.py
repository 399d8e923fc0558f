"""The vision tower: patch rows of images and video pairs -> features that stand in for embedding rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu

from ..config import VisionConfig
from ..errors import InvalidRequestError
from ..kernels.vision import biased_linear, layer_norm, patch_angles, position_rows, segment_attention
from ..weights import VisionBlock, VisionLinear, VisionWeights


class VisionTower:
    """Runs media through the tower. Slices of a video do not see each other, nor do different media."""

    def __init__(self, weights: VisionWeights, config: VisionConfig) -> None:
        self.weights, self.config = weights, config
        self.device = weights.position.device

    @torch.inference_mode()
    def features(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Features of one or more media.

        Args:
            patches: patch rows `[P, channels * 2 * 16 * 16]` in fp32, media after each other; in a slice `2 x 2`
            blocks in
                raster order, inside a block row by row.
            grids: `(slices, patch rows, patch columns)` of every medium.

        Returns:
            `[P / 4, text width]` fp32, in the order of the placeholders.

        Raises:
            InvalidRequestError: the grids do not fit the patches, or a side is not even.
        """
        merge = self.config.spatial_merge_size
        if any(h % merge or w % merge for _, h, w in grids):
            raise InvalidRequestError(f"grid sides must be multiples of {merge}, found {list(grids)}", param="messages")
        if sum(t * h * w for t, h, w in grids) != patches.shape[0]:
            raise InvalidRequestError(
                f"grids {list(grids)} need {sum(t * h * w for t, h, w in grids)} patch rows, found {patches.shape[0]}",
                param="messages",
            )
        w = self.weights
        x = _linear(patches.to(self.device).float(), w.patch)
        x = x + torch.cat([position_rows(w.position, h, c, merge).repeat(t, 1) for t, h, c in grids])
        dim = self.config.head_dim
        angles = [patch_angles(h, c, merge, dim, self.device) for _, h, c in grids]
        cos, sin = (
            torch.cat([pair[i].repeat(t, 1) for pair, (t, _, _) in zip(angles, grids, strict=True)]) for i in (0, 1)
        )
        segments = [(t, h * c) for t, h, c in grids]
        for block in w.blocks:
            x = self._block(x, block, cos, sin, segments)
        y = layer_norm(x, w.merger_norm.weight, w.merger_norm.bias).view(x.shape[0] // merge**2, -1)
        return _linear(gelu(_linear(y, w.merger_fc1)), w.merger_fc2)

    def _block(
        self, x: Tensor, block: VisionBlock, cos: Tensor, sin: Tensor, segments: list[tuple[int, int]]
    ) -> Tensor:
        """One block, `x [P, width]` -> `[P, width]`."""
        qkv = _linear(layer_norm(x, block.norm1.weight, block.norm1.bias), block.qkv)
        x = x + _linear(segment_attention(qkv, cos, sin, segments, self.config.num_heads), block.output)
        hidden = _linear(layer_norm(x, block.norm2.weight, block.norm2.bias), block.fc1)
        return x + _linear(gelu(hidden, approximate="tanh"), block.fc2)


def _linear(x: Tensor, weight: VisionLinear) -> Tensor:
    return biased_linear(x, weight.dense, weight.bias)
