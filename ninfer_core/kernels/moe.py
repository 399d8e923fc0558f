"""The mixture-of-experts block: router, routed experts, gated shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from ._op import MoeWeights
from .linear import product, swiglu, trim
from .norm import rms_norm


def moe(x: Tensor, gain: Tensor, eps: float, weights: MoeWeights, active: int, chunk: bool = False) -> Tensor:
    """Post-attention norm, mixture of experts, shared expert and residual sum.

    Math: `u = norm(x)`; the `active` largest router logits of a row (ties: the lower expert) give weights by softmax
    over the chosen; `y = x + (sum_e w_e down_e(swiglu(gate_up_e u)) + sigma(gate . u)
    shared_down(swiglu(shared_gate_up u)))`.
    Shapes: `x [T, E]`, `gain [E]`, result `[T, E]`.
    Domain: any T >= 1; `1 <= active <= X`.
    Numeric: fp32; the kernels of both paths choose by the logit without its last bits (8 of 256 experts), then by the
    lower expert (`_experts.expert_keys`), so that near ties may fall otherwise than here. Routed terms are added by
    falling router weight, then the shared term, then the residual. Row call (`chunk` false): a row's bits depend on
    that row only, not on how many rows chose an expert.
    Effects: none.
    """
    u = rms_norm(x, gain, eps)
    scores = product(u, weights.router, chunk)
    experts = weights.router.rows - 1
    values, indices = torch.sort(scores[:, :experts], dim=-1, descending=True, stable=True)
    share = torch.softmax(values[:, :active], -1)
    chosen = indices[:, :active].tolist()
    terms = (_chunk_experts if chunk else _row_experts)(u, weights, chosen).unbind(1)
    columns = share.unsqueeze(2).unbind(1)
    routed = terms[0] * columns[0]
    for term, column in zip(terms[1:], columns[1:], strict=True):
        routed.addcmul_(term, column)
    hidden = trim(product(u, weights.shared_gate_up, chunk), weights.shared_gate_up.rows)
    shared = trim(product(swiglu(hidden), weights.shared_down, chunk), weights.shared_down.rows)
    # The sigmoid runs over the whole padded row: its vector and scalar forms differ in the last bit.
    routed.addcmul_(shared, torch.sigmoid(scores)[:, experts : experts + 1])
    return x + routed


def _row_experts(u: Tensor, weights: MoeWeights, chosen: list[list[int]]) -> Tensor:
    """Outputs of the chosen experts `[T, A, E]`, one vector-matrix product per pair of row and expert."""
    gate_up, down = weights.gate_up, weights.down
    u = u.to(gate_up[0].weight.dtype)
    # In the order of experts: rows that share one find its weights in the cache.
    pairs = sorted((expert, place) for place, expert in enumerate(e for experts in chosen for e in experts))
    active = len(chosen[0])
    hidden = u.new_empty(len(pairs), gate_up[0].weight.shape[0])
    rows, outs = u.unbind(0), hidden.unbind(0)
    for expert, place in pairs:
        torch.mv(gate_up[expert].weight, rows[place // active], out=outs[place])
    inner = swiglu(trim(hidden, gate_up[0].rows).float()).to(u.dtype)
    result = u.new_empty(len(pairs), down[0].weight.shape[0])
    rows, outs = inner.unbind(0), result.unbind(0)
    for expert, place in pairs:
        torch.mv(down[expert].weight, rows[place], out=outs[place])
    return trim(result, down[0].rows).float().unflatten(0, (len(chosen), active))


def _chunk_experts(u: Tensor, weights: MoeWeights, chosen: list[list[int]]) -> Tensor:
    """The same, one matrix product per expert over all its rows."""
    flat = torch.tensor(chosen).flatten()
    active = len(chosen[0])
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(weights.gate_up)).tolist()
    result = u.new_empty(len(flat), u.shape[1])
    for expert, places in enumerate(order.to(u.device).split(counts)):
        if len(places):
            gate_up, down = weights.gate_up[expert], weights.down[expert]
            hidden = trim(product(u.index_select(0, places // active), gate_up, True), gate_up.rows)
            result[places] = trim(product(swiglu(hidden), down, True), down.rows)
    return result.view(len(chosen), active, u.shape[1])
