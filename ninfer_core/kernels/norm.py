"""Root-mean-square norms. The gain is `1 + w` for the zero-centred norms of the text model, `w` for the GDN norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ._op import dispatch


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis.

    Math: `y = x / sqrt(mean(x^2) + eps) * gain`.
    Shapes: `x [..., M]`; `gain` broadcastable to `x` with last axis `M`; result like `x`.
    Domain: finite fp32.
    Numeric: fp32; the sum of squares of a row depends on that row only.
    Effects: none.
    """
    return dispatch(rms_norm_ref, x, gain, eps)


def rms_norm_ref(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Twin of `rms_norm`."""
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)) * gain


def l2_norm_ref(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps) * scale` over the last axis: the norm of GDN queries and keys."""
    return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)) * scale
