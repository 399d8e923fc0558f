"""Triton decode mixer of Gated DeltaNet: convolution, gates, deferred commit, recurrence and output norm in one launch.

The state is `state.DeltaState`. A call first applies the `commit` accepted rows of the window
before (S <- exp(g) S + k e^T), stores S once, then runs its own rows from registers and leaves k, e, g in the ring:
one read and one write of S whatever the number of drafts, and no copy when a draft is rejected.
A program owns 32 of a head's 128 value columns, which is also one int8 group of the output row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..state import RING, DeltaState
from . import _tiles
from ._dequant import silu, store_groups, wait_for_inputs
from ._order import Activation


@triton.jit
def conv_taps(ring, projected, taps, channel, n, C: tl.constexpr, RINGS: tl.constexpr):
    """The three raw rows before token `n` at `channel`, oldest first, and the four taps, all fp32."""
    old = ()
    weights = ()
    for d in tl.static_range(3):
        token = n - 3 + d
        row = tl.load(ring + (token % RINGS) * C + channel, mask=token >= 0, other=0.0)
        old = old + (row.to(tl.float32),)  # noqa: RUF005
    for d in tl.static_range(4):
        weights = weights + (tl.load(taps + d * C + channel).to(tl.float32),)  # noqa: RUF005
    return old, weights


@triton.jit
def convolve(window, weights, new):
    """silu of the causal convolution, rounded to bf16 as the next step reads it; and the moved window."""
    y = window[0] * weights[0] + window[1] * weights[1] + window[2] * weights[2] + new * weights[3]
    return silu(y).to(tl.bfloat16).to(tl.float32), (window[1], window[2], new)


@triton.jit
def row_sums(a, b):
    """The dot product of two 128-vectors, once for each of the 32 rows of the state tile."""
    return tl.sum(tl.broadcast_to((a * b)[None, :], [32, 128]), 1)


@triton.jit
def gated_delta_kernel(
    projected, ab, taps, a_log, dt_bias, norm, s_ptr, conv_ptr, k_ptr, e_ptr, g_ptr, slots, lengths, commits,
    q_out, s_out, ss_out, eps,
    HK: tl.constexpr, HV: tl.constexpr, R: tl.constexpr, RINGS: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (head * 4 + slice, sequence): rows b * R .. b * R + R - 1 of `projected` [T, C + Hv * 128]."""
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    WIDTH: tl.constexpr = C + HV * 128
    pid = tl.program_id(0)
    b = tl.program_id(1)
    head = pid // 4
    part = pid % 4
    key_head = head // RATIO
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.load(lengths + b)
    commit = tl.load(commits + b)
    k_lane = tl.arange(0, 128)
    v_lane = tl.arange(0, 32)
    v_index = head * 128 + part * 32 + v_lane
    s_at = s_ptr + (slot * HV * 128 + v_index[:, None]) * 128 + k_lane[None, :]
    ring_k = k_ptr + slot * (RINGS * HK * 128) + key_head * 128 + k_lane
    ring_e = e_ptr + slot * (RINGS * HV * 128) + v_index
    ring_g = g_ptr + slot * (RINGS * HV) + head
    conv = conv_ptr + slot * (RINGS * C)
    state = tl.load(s_at)
    token = n - commit
    while token < n:
        at = token % RINGS
        decay = tl.exp(tl.load(ring_g + at * HV))
        key = tl.load(ring_k + at * (HK * 128))
        update = tl.load(ring_e + at * (HV * 128))
        state = state * decay + update[:, None] * key[None, :]
        token += 1
    if commit > 0:
        tl.store(s_at, state)
    q_channel = key_head * 128 + k_lane
    k_channel = HK * 128 + q_channel
    v_channel = 2 * HK * 128 + v_index
    q_window, q_taps = conv_taps(conv, projected, taps, q_channel, n, C, RINGS)
    k_window, k_taps = conv_taps(conv, projected, taps, k_channel, n, C, RINGS)
    v_window, v_taps = conv_taps(conv, projected, taps, v_channel, n, C, RINGS)
    rate = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    weight = tl.load(norm + part * 32 + v_lane).to(tl.float32)
    wait_for_inputs(PDL)
    leads = (head % RATIO == 0) & (part == 0)
    for r in tl.static_range(R):
        t = b * R + r
        at = (n + r) % RINGS
        line = projected + t * WIDTH
        q_raw = tl.load(line + q_channel).to(tl.float32)
        k_raw = tl.load(line + k_channel).to(tl.float32)
        v_raw = tl.load(line + v_channel).to(tl.float32)
        z = tl.load(line + C + v_index).to(tl.float32)
        q, q_window = convolve(q_window, q_taps, q_raw)
        k, k_window = convolve(k_window, k_taps, k_raw)
        v, v_window = convolve(v_window, v_taps, v_raw)
        # Norms as sums over the tile's k axis: every warp holds whole rows, so no sum leaves a warp. q and k stay
        # as they are; their inverse norms go into o and e.
        q_scale = 0.08838834764831845 / tl.sqrt_rn(row_sums(q, q) + 1e-6)
        k_scale = 1.0 / tl.sqrt_rn(row_sums(k, k) + 1e-6)
        x = tl.load(ab + t * (2 * HV) + head) + bias
        beta = 1.0 / (1.0 + tl.exp(-tl.load(ab + t * (2 * HV) + HV + head)))
        g = rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
        state = state * tl.exp(g)
        update = beta * (v - tl.sum(state * k[None, :], 1) * k_scale) * k_scale
        o = (tl.sum(state * q[None, :], 1) + update * row_sums(k, q)) * q_scale
        if r + 1 < R:
            state = state + update[:, None] * k[None, :]
        tl.store(ring_e + at * (HV * 128), update)
        tl.store(conv + at * C + v_channel, v_raw.to(tl.bfloat16))
        if part == 0:
            tl.store(ring_g + at * HV, g)
        if leads:
            tl.store(ring_k + at * (HK * 128), k)
            tl.store(conv + at * C + q_channel, q_raw.to(tl.bfloat16))
            tl.store(conv + at * C + k_channel, k_raw.to(tl.bfloat16))
        y = o * weight * silu(z)
        store_groups(tl.reshape(y, [1, 32]), q_out, s_out, t, pid, HV * 4, 1)
        tl.store(ss_out + ((t // 8) * (HV * 4) + pid) * 8 + t % 8, tl.sum(o * o, 0))


def gated_delta(
    projected: torch.Tensor,
    ab: torch.Tensor,
    taps: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    state: DeltaState,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    commits: torch.Tensor,
    out: Activation,
    *,
    warps: int = 4,
    eps: float = 1e-6,
) -> None:
    """Mixer of one layer for B sequences of R rows (T = B * R, rows of a sequence together).

    Args:
        projected: bf16 [T, C + Hv * 128], raw q, k, v then z. ab: fp32 [T, 2 * Hv], a then b.
        taps: bf16 [4, C]. a_log, dt_bias: fp32 [Hv]. norm: bf16 [128].
        slots, lengths, commits: int32 [B]: state slot, index of the first row, rows of the window before to apply.
        out: int8 rows of norm(o) * silu(z) before the head's RMS factor; read with norm="head".
    """
    batch = slots.shape[0]
    rows = projected.shape[0] // batch
    value_heads = a_log.shape[0]
    key_heads = (taps.shape[1] // 128 - value_heads) // 2
    if 2 * rows > RING or rows + 3 > RING:
        raise ValueError(f"a window of {rows} rows does not fit the ring of {RING} tokens")
    gated_delta_kernel[(value_heads * 4, batch)](
        projected, ab, taps, a_log, dt_bias, norm, state.s, state.conv, state.k, state.e, state.g,
        slots, lengths, commits, out.q, out.s, out.ss, eps,
        HK=key_heads, HV=value_heads, R=rows, RINGS=RING, **_tiles.launch(projected, warps),
    )  # fmt: skip
