"""The trainable vision tower: patch embedding, interpolated positions, two transformer blocks, merger."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import Vision


class PatchEmbed(nn.Module):
    """One matrix product, stored as the convolution of the checkpoint."""

    def __init__(self, c: Vision) -> None:
        super().__init__()
        size = (c.temporal, c.patch, c.patch)
        self.proj = nn.Conv3d(3, c.hidden, size, size)

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Unmasked attention inside one image."""

    def __init__(self, c: Vision) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.proj = nn.Linear(c.hidden, c.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, P, width = x.shape
        q, k, v = self.qkv(x).view(n, P, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).float()

        def turn(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        # Spelled out: fused kernels are suspected of gradients that were not finite (see CARD.md).
        with torch.autocast(x.device.type, enabled=False):
            o = ((turn(q) * q.shape[-1] ** -0.5) @ turn(k).transpose(-1, -2)).softmax(-1) @ v
        return self.proj(o.transpose(1, 2).reshape(n, P, width))


class VisionMLP(nn.Module):
    """Two layers with the tanh form of GELU."""

    def __init__(self, c: Vision) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(c.hidden, c.inner)
        self.linear_fc2 = nn.Linear(c.inner, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, c: Vision) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden, eps=1e-6), nn.LayerNorm(c.hidden, eps=1e-6)
        self.attn = VisionAttention(c)
        self.mlp = VisionMLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four neighbouring patches -> one text-width feature."""

    def __init__(self, c: Vision, out: int) -> None:
        super().__init__()
        wide = c.hidden * c.merge**2
        self.wide = wide
        self.norm = nn.LayerNorm(c.hidden, eps=1e-6)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.linear_fc2 = nn.Linear(wide, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).reshape(x.shape[0], -1, self.wide))))


def block_order(height: int, width: int, merge: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a grid in merge-block order."""
    index = torch.arange(height * width, device=device).view(height // merge, merge, width // merge, merge)
    rows, cols = index.div(width, rounding_mode="floor"), index % width
    return rows.permute(0, 2, 1, 3).reshape(-1), cols.permute(0, 2, 1, 3).reshape(-1)


def patch_rows(pixels: Tensor, c: Vision) -> Tensor:
    """Images [n,3,H,W] of 0..255 -> patch rows [n, patches, 3*temporal*patch*patch] in merge-block order."""
    n, _, H, W = pixels.shape
    x = (pixels - 127.5) / 127.5
    rows, cols = block_order(H // c.patch, W // c.patch, c.merge, pixels.device)
    x = x.view(n, 3, H // c.patch, c.patch, W // c.patch, c.patch).permute(0, 2, 4, 1, 3, 5)
    x = x[:, rows, cols].unsqueeze(3).expand(-1, -1, -1, c.temporal, -1, -1)
    return x.reshape(n, rows.numel(), -1)


class Tower(nn.Module):
    """Images of one size -> features."""

    def __init__(self, c: Vision, out: int) -> None:
        super().__init__()
        self.c = c
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c.positions, c.hidden)
        self.blocks = nn.ModuleList([VisionBlock(c) for _ in range(c.depth)])
        self.merger = Merger(c, out)
        with torch.no_grad():
            self.pos_embed.weight.normal_(std=0.02)
            self.merger.linear_fc2.weight.mul_(0.1)

    def position_table(self, rows: Tensor, cols: Tensor, height: int, width: int) -> Tensor:
        """Bilinear reading of the square position table with aligned corners."""
        side = round(self.c.positions**0.5)
        total: Tensor | None = None
        y, x = rows * ((side - 1) / max(height - 1, 1)), cols * ((side - 1) / max(width - 1, 1))
        y0, x0 = y.floor().long(), x.floor().long()
        fy, fx = (y - y0).unsqueeze(-1), (x - x0).unsqueeze(-1)
        for iy, wy in ((y0, 1 - fy), ((y0 + 1).clamp(max=side - 1), fy)):
            for ix, wx in ((x0, 1 - fx), ((x0 + 1).clamp(max=side - 1), fx)):
                part = self.pos_embed(iy * side + ix).float() * (wy * wx)
                total = part if total is None else total + part
        assert total is not None
        return total

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [n,3,H,W] of 0..255, H and W multiples of patch*merge -> features [n, cells, out]."""
        c = self.c
        height, width = pixels.shape[2] // c.patch, pixels.shape[3] // c.patch
        rows, cols = block_order(height, width, c.merge, pixels.device)
        x = self.patch_embed(patch_rows(pixels, c)) + self.position_table(rows, cols, height, width)
        quarter = c.hidden // c.heads // 4
        frequency = 10000.0 ** (-torch.arange(quarter, device=pixels.device) / quarter)
        angle = torch.cat([rows[:, None] * frequency, cols[:, None] * frequency], -1)
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin())
        return self.merger(x)
