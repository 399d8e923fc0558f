"""Gated DeltaNet: causal convolution, gates, delta rule, gated output norm, in rows, in chunks, and the late commit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ..state import GdnLayer
from ._op import GdnWeights, RowCall
from .norm import l2_norm, rms_norm

CHUNK = 64
"""Rows solved together in the chunked form."""


def gated_delta_rows(
    proj: Tensor, weights: GdnWeights, layer: GdnLayer, call: RowCall, key_heads: int, eps: float
) -> Tensor:
    """The mixer of the rows of running sequences, with the commit of the accepted rows of the window before.

    Math: first, for i = 0 .. commit - 1: `S <- decay_i S + k_i e_i^T` (the stored rows). Then for every row, with
    `q, k, v` from `silu(conv)`, `q, k` divided by `sqrt(sum^2 + 1e-6)`, q also by `sqrt(d)`, `beta = sigma(b)`,
    `decay = exp(-exp(A_log) softplus(a + dt_bias))`: `S' <- decay S'`, `e = beta (v - S'^T k)`, `S' <- S' + k e^T`,
    `o = S'^T q`, `y = norm(o) silu(z)`. `S'` starts as the committed `S` and is dropped. Value head j uses key head
    `j div (V / G)`.
    Shapes: `proj [B * R, N]`: query, key, value, z, a, b; result `[B * R, V d]`.
    Domain: slots differ; `0 <= commit <= rows of the window before`; R <= rows of a window.
    Numeric: fp32. The committed state has the bits of the plain recurrence. A row's bits depend on its sequence up
    to that row only.
    Effects: per slot: `s` := committed state; `conv` := three committed raw rows and the R new ones; `k, e, decay`
    := the rows of this window.
    """
    rows, channels = call.rows, layer.conv.shape[-1]
    history = weights.conv.shape[0] - 1
    heads, width = layer.s.shape[1], layer.s.shape[3]
    out = proj.new_empty(proj.shape[0], heads, width)
    for number, (slot, _, commit) in enumerate(call.host):
        own = slice(number * rows, (number + 1) * rows)
        state = _commit(layer, slot, commit)
        window = torch.cat((layer.conv[slot, commit : commit + history], proj[own, :channels]))
        layer.conv[slot, : history + rows] = window
        q, k, v, spread = _conv_heads(window, weights, key_heads, heads)
        decay, beta = _gates(proj[own, channels + heads * width :], weights, heads)
        layer.k[slot, :rows] = k
        layer.decay[slot, :rows] = decay
        _recur(state, (q, spread, v), (decay, beta), layer.e[slot, :rows], out[own])
    return _gated_norm(out, proj[:, channels : channels + heads * width], weights.norm, eps)


def gated_delta_commit(layer: GdnLayer, slots: list[int], commit: list[int]) -> None:
    """Apply the accepted rows of the last window and leave no window behind.

    Math: `S <- decay_i S + k_i e_i^T`, i = 0 .. commit - 1, per slot; the committed raw rows move to the front.
    Effects: `s` and `conv[:, :3]` of the slots.
    """
    history = layer.conv.shape[1] - layer.k.shape[1]
    for slot, rows in zip(slots, commit, strict=True):
        if rows:
            _commit(layer, slot, rows)
            layer.conv[slot, :history] = layer.conv[slot, rows : rows + history].clone()


def gated_delta_chunk(
    proj: Tensor, weights: GdnWeights, layer: GdnLayer, place: tuple[int, int, bool], key_heads: int, eps: float
) -> Tensor:
    """The mixer of a prefill chunk of one sequence.

    Math: as `gated_delta_rows`, solved 64 rows at a time: with `G` the running sum of log decays inside 64 rows and
    `Lam_ij = exp(G_i - G_j)` for i >= j, `(I + A) [U | W] = [beta V | beta exp(G) K]`, `A_ij = beta_i (k_i . k_j)
    Lam_ij` (i > j); `E = U - W S`, `O = exp(G) Q S + ((Q K^T) Lam) E`, `S <- exp(G_64) S + (exp(G_64 - G) K)^T E`.
    Shapes: `proj [T padded to 64, N]`; `place` = (slot, number of real rows, whether the sequence starts here); result
    `[T padded, V d]`.
    Domain: no window is pending in the slot.
    Numeric: fp32 throughout, the solve included; every exponent is a difference that is not positive.
    Effects: `s` and the three committed raw rows of the slot advance by the real rows. A sequence that starts
    ignores what the slot held.
    """
    slot, real, fresh = place
    rows, channels = proj.shape[0], layer.conv.shape[-1]
    history = weights.conv.shape[0] - 1
    heads, width = layer.s.shape[1], layer.s.shape[3]
    past = layer.conv[slot, :history]
    state = layer.s[slot]
    if fresh:
        past.zero_()
        state.zero_()
    window = torch.cat((past, proj[:, :channels]))
    past.copy_(window[real : real + history])
    q, _, v, k = _conv_heads(window, weights, key_heads, heads)
    gates = proj[:, channels + heads * width :]
    log_decay = softplus(gates + weights.gate_bias).mul_(weights.gate_scale)[:, :heads]
    beta = torch.sigmoid(gates)[:, heads : 2 * heads]
    live = (torch.arange(rows, device=proj.device) < real).unsqueeze(1)
    # Rows of padding must not touch the state: without key, value, rate and decay the update is the identity.
    k, v = torch.where(live.unsqueeze(2), k, 0.0), torch.where(live.unsqueeze(2), v, 0.0)
    out, new = chunked_delta(q, k, v, torch.where(live, log_decay, 0.0), torch.where(live, beta, 0.0), state)
    state.copy_(new)
    return _gated_norm(out, proj[:, channels : channels + heads * width], weights.norm, eps)


def chunked_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks of 64 rows, in the type of the inputs.

    Shapes: `q, k [T, V, dk]` (normalised, q scaled), `v [T, V, dv]`, `log_decay, beta [T, V]`, `state [V, dk, dv]`; T a
    multiple of 64. Returns `(o [T, V, dv], new state)`.
    """
    rows, heads, _ = k.shape

    def blocks(x: Tensor) -> Tensor:
        return x.unflatten(0, (rows // CHUNK, CHUNK)).transpose(1, 2)

    q, k, v = blocks(q), blocks(k), blocks(v)
    # Sums in fp64: a few strong decays make them large, and only their differences count.
    total = blocks(log_decay.unsqueeze(2)).double().cumsum(2)
    rate = blocks(beta.unsqueeze(2))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    relative = torch.where(lower, total - total.transpose(2, 3), float("-inf")).to(q.dtype).exp()
    from_start = total.to(q.dtype).exp()
    coupling = ((k @ k.transpose(2, 3)) * relative * rate).tril(-1)
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    right = torch.cat((v * rate, k * (rate * from_start)), -1)
    solved = torch.linalg.solve_triangular(coupling + eye, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    inner = (q @ k.transpose(2, 3)) * relative
    faded = q * from_start
    carried = (k * (total[:, :, -1:] - total).to(q.dtype).exp()).transpose(2, 3)
    keep = from_start[:, :, -1:]
    out = torch.empty_like(v)
    for i in range(rows // CHUNK):
        e = u[i] - w[i] @ state
        out[i] = faded[i] @ state + inner[i] @ e
        state = keep[i] * state + carried[i] @ e
    return out.transpose(1, 2).reshape(rows, heads, -1), state


def _commit(layer: GdnLayer, slot: int, rows: int) -> Tensor:
    """Apply the first `rows` rows of the stored window to the state of a slot, in order; returns the state."""
    state = layer.s[slot]
    if rows:
        decay = layer.decay[slot, :rows, :, None, None].unbind(0)
        columns = _spread(layer.k[slot, :rows], state.shape[0]).unsqueeze(3).unbind(0)
        lines = layer.e[slot, :rows].unsqueeze(2).unbind(0)
        for d, column, line in zip(decay, columns, lines, strict=True):
            state.mul_(d).addcmul_(column, line)
    return state


def _recur(
    state: Tensor, qkv: tuple[Tensor, Tensor, Tensor], gates: tuple[Tensor, Tensor], e: Tensor, out: Tensor
) -> None:
    """The plain recurrence over rows from `state`, which stays unchanged; writes `e` and `out` `[R, V, dv]`."""
    columns = qkv[1].unsqueeze(3).unbind(0)
    q, k, v = (x.unsqueeze(2).unbind(0) for x in qkv)
    decay, beta = (x[..., None, None].unbind(0) for x in gates)
    work = state
    for row, (delta, o) in enumerate(zip(e.unsqueeze(2).unbind(0), out.unsqueeze(2).unbind(0), strict=True)):
        work = torch.mul(work, decay[row]) if row == 0 else work.mul_(decay[row])
        torch.sub(v[row], torch.bmm(k[row], work), out=delta).mul_(beta[row])
        work.addcmul_(columns[row], delta)
        torch.bmm(q[row], work, out=o)


def _conv_heads(
    window: Tensor, weights: GdnWeights, key_heads: int, heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convolution, SiLU and head norms of raw rows `[history + T, C]`.

    Returns queries `[T, V, d]`, keys `[T, G, d]`, values `[T, V, d]` and the keys spread over value heads `[T, V, d]`.
    """
    taps = weights.conv.unbind(0)
    rows = window.shape[0] - len(taps) + 1
    mixed = window[:rows] * taps[0]
    for number, tap in enumerate(taps[1:], 1):
        mixed.addcmul_(window[number : number + rows], tap)
    mixed = silu(mixed)
    split = mixed.shape[1] - heads * weights.norm.shape[0]
    v = mixed[:, split:].unflatten(1, (heads, -1))
    qk = l2_norm(mixed[:, :split].unflatten(1, (2 * key_heads, -1)), weights.qk_scale)
    wide = _spread(qk, 2 * heads)
    return wide[:, :heads], qk[:, key_heads:], v, wide[:, heads:]


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads `[T, G, d]` for the value heads that use them: value head j takes key head `j div (V / G)`."""
    ratio = heads // x.shape[1]
    return x if ratio == 1 else x.unsqueeze(2).expand(-1, -1, ratio, -1).reshape(x.shape[0], heads, x.shape[2])


def _gates(columns: Tensor, weights: GdnWeights, heads: int) -> tuple[Tensor, Tensor]:
    """Decay and update rate `[T, V]` of the gate columns `[T, W]`.

    The functions run over the whole padded rows, whose width is a multiple of 32: vector and scalar forms of exp differ
    in the last bit, and which elements take the scalar form would depend on the number of rows.
    """
    decay = softplus(columns + weights.gate_bias).mul_(weights.gate_scale).exp_()
    return decay[:, :heads], torch.sigmoid(columns)[:, heads : 2 * heads]


def _gated_norm(o: Tensor, z: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`norm(o) * silu(z)` with o `[T, V, d]` and z `[T, V d]`; returns `[T, V d]`."""
    return rms_norm(o, gain, eps).flatten(1).mul_(silu(z))
