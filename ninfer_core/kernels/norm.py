"""Root-mean-square norms. The gain is `1 + w` for the zero-centred norms of the text model, `w` for the GDN norm."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis.

    Math: `y = x / sqrt(mean(x^2) + eps) * gain`.
    Shapes: `x [..., M]`; `gain` broadcastable to `x` with last axis `M`; result like `x`.
    Domain: finite fp32.
    Numeric: fp32; the sum of squares of a row depends on that row only.
    Effects: none.
    """
    return x * torch.rsqrt(_floor(eps, x).add((x * x).sum(-1, keepdim=True), alpha=1 / x.shape[-1])) * gain


def l2_norm(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps) * scale` over the last axis: the norm of GDN queries and keys."""
    return x * torch.rsqrt(_floor(eps, x).add((x * x).sum(-1, keepdim=True))) * scale


@lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _floor(eps: float, x: Tensor) -> Tensor:
    """`eps` as a tensor: on the CPU a Python number costs more than the sum itself."""
    return _constant(eps, x.dtype, x.device)
