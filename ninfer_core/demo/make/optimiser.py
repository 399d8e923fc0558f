"""Muon for matrices, AdamW for tables, norms, routers and decay parameters."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from .model import Model

MUON_RATE, ADAM_RATE, SLOW_RATE = 0.02, 3e-3, 1e-3
_STEPS = (3.4445, -4.775, 2.0315)


def orthogonal(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix, batched over the first axis."""
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _STEPS
    for _ in range(5):
        y = x @ x.transpose(1, 2)
        x = a * x + (b * y + c * (y @ y)) @ x
    return x if wide else x.transpose(1, 2)


class Muon:
    """Momentum, orthogonalised per matrix; matrices of one shape are stacked so that a step is few launches."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            groups[(p.shape[-2], p.shape[-1])].append(p)
        self.groups = list(groups.items())
        self.parameters = [p for _, group in self.groups for p in group]
        self.buffers = [torch.zeros_like(p) for p in self.parameters]
        self.momentum, self.decay, self.rate = momentum, decay, MUON_RATE

    @torch.no_grad()
    def step(self) -> None:
        """One update at the current rate."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        torch._foreach_lerp_(self.buffers, grads, 1 - self.momentum)
        updates = torch._foreach_lerp(grads, self.buffers, self.momentum)
        torch._foreach_mul_(list[Tensor](self.parameters), 1 - self.rate * self.decay)
        at = 0
        for shape, group in self.groups:
            count = len(group)
            stacked = torch.cat([u.reshape(-1, *shape) for u in updates[at : at + count]])
            kind = torch.bfloat16 if stacked.is_cuda else torch.float32
            scaled = orthogonal(stacked.to(kind)).float() * (-self.rate * max(1, shape[0] / shape[1]) ** 0.5)
            pieces = scaled.split([p.numel() // (shape[0] * shape[1]) for p in group])
            torch._foreach_add_(list[Tensor](group), [piece.view_as(p) for piece, p in zip(pieces, group, strict=True)])
            at += count


class Optimiser:
    """Both optimisers under one schedule factor."""

    def __init__(self, model: Model) -> None:
        matrices, tables, slow = [], [], []
        for name, p in model.named_parameters():
            if "embed" in name or name.startswith("lm_head"):
                tables.append(p)
            elif (
                p.dim() < 2
                or name.endswith(
                    (
                        "mlp.gate.weight",
                        "shared_expert_gate.weight",
                        "conv1d.weight",
                        "in_proj_a.weight",
                        "in_proj_b.weight",
                    )
                )
                or p.dim() > 3
            ):
                slow.append(p)
            else:
                matrices.append(p)
        self.muon = Muon(matrices)
        fused = next(model.parameters()).is_cuda
        groups = [{"params": tables, "lr": ADAM_RATE}, {"params": slow, "lr": SLOW_RATE}]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01, fused=fused)
        self.base = [ADAM_RATE, SLOW_RATE]

    def step(self, factor: float) -> None:
        """One update at `factor` times the base rates."""
        self.muon.rate = MUON_RATE * factor
        for group, base in zip(self.adam.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        self.muon.step()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for p in self.muon.parameters:
            p.grad = None
