"""Weights as the artifact will hold them, for training: a step may see rounded weights and update the unrounded ones."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...formats import Q4, Q5, Q6, format_of

MIXER = (
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "out_proj.weight",
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
)
FACTORS = {Q4: (1.0, 0.92, 0.83, 0.75), Q5: (1.0, 0.95, 0.88), Q6: (1.0, 0.96)}


def format_for(name: str) -> str | None:
    """The format of the demo recipe for a parameter of the text part; None if rounding it changes next to nothing."""
    if name in ("language_model.embed_tokens.weight", "lm_head.weight"):
        return Q6
    if name.startswith("language_model."):
        if name.endswith("experts.gate_up_proj"):
            return Q4
        if name.endswith("experts.down_proj") or name.endswith(MIXER):
            return Q5
    return None


def rounded(x: Tensor, fmt: str, factors: tuple[float, ...]) -> Tensor:
    """Groups `[n, 64]` as the format holds them: of the max-abs scale times each factor, the one with the least error."""
    f = format_of(fmt)
    peak = x.abs().amax(1, keepdim=True) / f.qmax
    best, best_error = x, torch.full_like(peak, float("inf"))
    for factor in factors:
        scale = (peak * factor).to(torch.float16).float().clamp(min=2.0**-24)
        y = (x / scale).round_().clamp_(f.qmin, f.qmax) * scale
        error = (y - x).square_().sum(1, keepdim=True)
        better = error < best_error
        best, best_error = torch.where(better, y, best), torch.where(better, error, best_error)
    return best


class Rounding:
    """Swaps rounded weights in and out: gradients are those at the rounded weights, updates go to the others."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, p in model.named_parameters():
            if fmt := format_for(name):
                groups[fmt].append(p)
        self.groups = dict(groups)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has rounded weights."""
        parameters = [p.data for group in self.groups.values() for p in group]
        kept = [p.clone() for p in parameters]
        for fmt, group in self.groups.items():
            size = format_of(fmt).group
            flat = torch.cat([p.data.reshape(-1, size) for p in group])
            pieces = rounded(flat, fmt, FACTORS[fmt]).split([p.numel() // size for p in group])
            torch._foreach_copy_([p.data for p in group], [y.view_as(p) for y, p in zip(pieces, group, strict=True)])
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, kept)
