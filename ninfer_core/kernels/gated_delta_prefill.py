"""Triton prefill of Gated DeltaNet in chunks of 64 rows: convolution and gates, solve, scan over chunks, gated output.

Four launches. The first three quarters of the work are parallel over chunks; only the scan walks through them, with a
tile of the state in registers. Products take fp16 operands (keys and queries are unit vectors, the rest is of order 1)
and sum in fp32; the triangular inverse, the state and all decays are fp32. Chunks count from the call's first row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..state import RING, DeltaState
from . import _tiles_prefill as tiling
from ._dequant import silu

CHUNK = 64
"""Rows solved together."""


@triton.jit(do_not_specialize=["slot", "start", "rows"])
def mixer_input_kernel(
    projected, ab, taps, a_log, dt_bias, ring, qkv, sums, beta, slot, start, rows,
    HK: tl.constexpr, HV: tl.constexpr, BV: tl.constexpr, RINGS: tl.constexpr,
):  # fmt: skip
    """Programs (head of q, k, v; the last: gates, chunk): convolution, SiLU, unit norm of q and k as fp16 [T, C].

    Gates: `sums` [HV, chunks * 64], running sum of log decays inside a chunk, and `beta` likewise; padding rows have
    beta 0 and decay 1.
    """
    C: tl.constexpr = (2 * HK + HV) * 128
    WIDTH: tl.constexpr = C + HV * 128
    head = tl.program_id(0)
    t = tl.program_id(1) * 64 + tl.arange(0, 64)
    live = t < rows
    at = t.to(tl.int64)
    if head == 2 * HK + HV:
        h = tl.arange(0, BV)
        inside = live[:, None] & (h < HV)[None, :]
        known = h < HV
        a = tl.load(ab + at[:, None] * (2 * HV) + h[None, :], mask=inside, other=0.0)
        a += tl.load(dt_bias + h, mask=known, other=0.0)[None, :]
        b = tl.load(ab + at[:, None] * (2 * HV) + HV + h[None, :], mask=inside, other=0.0)
        rate = -tl.exp(tl.load(a_log + h, mask=known, other=0.0))
        g = rate[None, :] * (tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a))))
        padded = tl.num_programs(1) * 64
        out = h[None, :] * padded + t[:, None]
        tl.store(sums + out, tl.cumsum(tl.where(live[:, None], g, 0.0), 0), mask=known[None, :])
        tl.store(beta + out, tl.where(live[:, None], 1.0 / (1.0 + tl.exp(-b)), 0.0), mask=known[None, :])
    else:
        channel = head * 128 + tl.arange(0, 128)
        y = tl.zeros([64, 128], tl.float32)
        for d in tl.static_range(4):
            row = at - 3 + d
            x = tl.load(
                projected + row[:, None] * WIDTH + channel[None, :], mask=(live & (row >= 0))[:, None], other=0.0
            ).to(tl.float32)  # fmt: skip
            if tl.program_id(1) == 0:
                token = start + row
                old = ring + (slot.to(tl.int64) * RINGS + (token + RINGS) % RINGS)[:, None] * C + channel[None, :]
                x += tl.load(old, mask=((row < 0) & (token >= 0))[:, None], other=0.0).to(tl.float32)
            y += x * tl.load(taps + d * C + channel).to(tl.float32)[None, :]
        y = silu(y).to(tl.bfloat16).to(tl.float32)
        if head < 2 * HK:
            scale = tl.where(head < HK, 0.08838834764831845, 1.0)
            y = y * (scale / tl.sqrt_rn(tl.sum(y * y, 1) + 1e-6))[:, None]
        tl.store(qkv + at[:, None] * C + channel[None, :], tl.where(live[:, None], y, 0.0).to(tl.float16))


@triton.jit
def exact_product(a, b):
    """Product of fp32 tiles, or of stacks of them, at close to fp32 precision."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def quadrants(a, B: tl.constexpr, N: tl.constexpr):
    """Stack [B, 2 N, 2 N] as its diagonal quadrants [2 B, N, N] (first, last, ..) and its lower left ones [B, N, N]."""
    parts = tl.permute(tl.reshape(a, [B, 2, N, 2, N]), [0, 2, 4, 3, 1])  # b, i, j, column half, row half
    upper, lower = tl.split(parts)
    first, _ = tl.split(upper)
    corner, last = tl.split(lower)
    return tl.reshape(tl.permute(tl.join(first, last), [0, 3, 1, 2]), [2 * B, N, N]), corner


@triton.jit
def join_inverses(inverse, corner, B: tl.constexpr, N: tl.constexpr):
    """Inverses [2 B, N, N] of diagonal quadrants and the lower left quadrants [B, N, N] to inverses [B, 2 N, 2 N]."""
    first, last = tl.split(tl.permute(tl.reshape(inverse, [B, 2, N, N]), [0, 2, 3, 1]))
    lower = -exact_product(last, exact_product(corner, first))
    left = tl.join(first, lower)  # b, i, j, row half
    right = tl.join(tl.zeros([B, N, N], tl.float32), last)
    return tl.reshape(tl.permute(tl.join(left, right), [0, 3, 1, 4, 2]), [B, 2 * N, 2 * N])


@triton.jit
def unit_lower_inverse(a):
    """(I + a)^-1 of a strictly lower fp32 [64, 64], from the inverses of its blocks of 16, joined two by two.

    Within 16 rows: with L the part of `a` inside blocks of 4, (I + L)^-1 = I - L + L^2 - L^3 = D, and with
    N = D (a - L), (I + a)^-1 = (I - N + N^2 - N^3) D. No power is above the third, so no large terms cancel.
    """
    pair, corner32 = quadrants(tl.reshape(a, [1, 64, 64]), 1, 32)
    block, corner16 = quadrants(pair, 2, 16)
    i = tl.arange(0, 16)
    near = (i[:, None] // 4 == i[None, :] // 4)[None, :, :]
    one = tl.where((i[:, None] == i[None, :])[None, :, :], 1.0, tl.zeros([4, 16, 16], tl.float32))
    inner = tl.where(near, block, 0.0)
    square = exact_product(inner, inner)
    d = one - inner + square - exact_product(inner, square)
    n = exact_product(d, tl.where(near, 0.0, block))
    square = exact_product(n, n)
    inverse = exact_product(one - n + square - exact_product(n, square), d)
    inverse = join_inverses(inverse, corner16, 2, 16)
    return tl.reshape(join_inverses(inverse, corner32, 1, 32), [64, 64])


@triton.jit
def decays(g_row, g_column, keep):
    """exp(g_row - g_column) where `keep`, else 0; masked before the exponential."""
    return tl.where(keep, tl.exp(tl.where(keep, g_row - g_column, 0.0)), 0.0)


@triton.jit
def solve_kernel(
    qkv, sums, beta, u_out, w_out,
    HK: tl.constexpr, HV: tl.constexpr,
):  # fmt: skip
    """Programs (value head, chunk): U = M beta V and W = M beta exp(G) K of the chunk, fp16 [T, HV * 128]."""
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    i = tl.arange(0, 64)
    d = tl.arange(0, 128)
    t = (chunk * 64 + i).to(tl.int64)
    gate = head * (tl.num_programs(1) * 64) + chunk * 64 + i
    g = tl.load(sums + gate)
    b = tl.load(beta + gate)
    k = tl.load(qkv + t[:, None] * C + (HK + head // RATIO) * 128 + d[None, :])
    v = tl.load(qkv + t[:, None] * C + (2 * HK + head) * 128 + d[None, :])
    lower = i[:, None] > i[None, :]
    a = tl.dot(k, tl.trans(k)) * decays(g[:, None], g[None, :], lower) * b[:, None]
    m = unit_lower_inverse(a).to(tl.float16)
    out = t[:, None] * (HV * 128) + head * 128 + d[None, :]
    u = tl.dot(m, (v.to(tl.float32) * b[:, None]).to(tl.float16))
    tl.store(u_out + out, u.to(tl.float16))
    w = tl.dot(m, (k.to(tl.float32) * (b * tl.exp(g))[:, None]).to(tl.float16))
    tl.store(w_out + out, w.to(tl.float16))


@triton.jit(do_not_specialize=["slot", "start", "rows", "chunks"])
def scan_kernel(
    projected, qkv, sums, u_ptr, w_ptr, states, s_ptr, ring, slot, start, rows, chunks,
    HK: tl.constexpr, HV: tl.constexpr, BLOCK: tl.constexpr, RINGS: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Programs (value head, BLOCK of its 128 columns): every chunk's first state to `states`, its E over U in place.

    `states` [chunks, HV, 128 k, 128 v] fp16. Ends with the new state in the slot and the convolution's last rows.
    """
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    WIDTH: tl.constexpr = C + HV * 128
    head = tl.program_id(0)
    v0 = tl.program_id(1) * BLOCK
    i = tl.arange(0, 64)
    k_lane = tl.arange(0, 128)
    v_lane = v0 + tl.arange(0, BLOCK)
    s_at = s_ptr + ((slot.to(tl.int64) * HV + head) * 128 + v_lane)[None, :] * 128 + k_lane[:, None]
    state = tl.zeros([128, BLOCK], tl.float32)
    if start > 0:
        state = tl.load(s_at)
    gate = sums + head * (chunks * 64)
    for chunk in range(0, LOOPS if LOOPS else chunks):
        t = (chunk * 64 + i).to(tl.int64)
        w = tl.load(w_ptr + t[:, None] * (HV * 128) + head * 128 + k_lane[None, :])
        k = tl.load(qkv + t[:, None] * C + (HK + head // RATIO) * 128 + k_lane[None, :])
        e_at = u_ptr + t[:, None] * (HV * 128) + head * 128 + v_lane[None, :]
        u = tl.load(e_at)
        g = tl.load(gate + chunk * 64 + i)
        last = tl.load(gate + chunk * 64 + 63)
        half = state.to(tl.float16)
        line = ((chunk * HV + head) * 128 + k_lane).to(tl.int64)
        first = states + line[:, None] * 128 + v_lane[None, :]
        tl.store(first, half)
        e = u.to(tl.float32) - tl.dot(w, half)
        tl.store(e_at, e.to(tl.float16))
        faded = (e * tl.exp(last - g)[:, None]).to(tl.float16)
        state = tl.dot(tl.trans(k), faded, state * tl.exp(last))
    tl.store(s_at, state)
    for d in tl.static_range(3):
        row = rows - 3 + d
        if row >= 0:
            line = projected + row.to(tl.int64) * WIDTH
            into = ring + (slot.to(tl.int64) * RINGS + (start + row) % RINGS) * C
            channel = 2 * HK * 128 + head * 128 + v_lane
            tl.store(into + channel, tl.load(line + channel))
            if head % RATIO == 0:
                channel = (head // RATIO) * 128 + v_lane
                tl.store(into + channel, tl.load(line + channel))
                tl.store(into + HK * 128 + channel, tl.load(line + HK * 128 + channel))


@triton.jit(do_not_specialize=["rows"])
def mixer_output_kernel(
    projected, qkv, sums, e_ptr, states, norm, out, rows, eps,
    HK: tl.constexpr, HV: tl.constexpr,
):  # fmt: skip
    """Programs (value head, chunk): norm(O) * silu(z) as bf16 [T, HV * 128], O = exp(G) Q S + (Q K^T Lam) E."""
    RATIO: tl.constexpr = HV // HK
    C: tl.constexpr = (2 * HK + HV) * 128
    WIDTH: tl.constexpr = C + HV * 128
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    i = tl.arange(0, 64)
    d = tl.arange(0, 128)
    t = (chunk * 64 + i).to(tl.int64)
    live = (t < rows)[:, None]
    g = tl.load(sums + head * (tl.num_programs(1) * 64) + chunk * 64 + i)
    q = tl.load(qkv + t[:, None] * C + (head // RATIO) * 128 + d[None, :])
    k = tl.load(qkv + t[:, None] * C + (HK + head // RATIO) * 128 + d[None, :])
    s = tl.load(states + ((chunk.to(tl.int64) * HV + head) * 128 + d)[:, None] * 128 + d[None, :])
    e = tl.load(e_ptr + t[:, None] * (HV * 128) + head * 128 + d[None, :])
    o = tl.dot(q, s) * tl.exp(g)[:, None]
    inner = tl.dot(q, tl.trans(k)) * decays(g[:, None], g[None, :], i[:, None] >= i[None, :])
    o = tl.dot(inner.to(tl.float16), e, o)
    factor = 1.0 / tl.sqrt_rn(tl.sum(o * o, 1) / 128 + eps)
    z = tl.load(projected + t[:, None] * WIDTH + C + head * 128 + d[None, :], mask=live, other=0.0).to(tl.float32)
    y = o * factor[:, None] * tl.load(norm + d).to(tl.float32)[None, :] * silu(z)
    tl.store(out + t[:, None] * (HV * 128) + head * 128 + d[None, :], y.to(tl.bfloat16), mask=live)


@dataclass(frozen=True, slots=True)
class DeltaWorkspace:
    """Buffers of a chunk of up to T rows, padded to 64: see the kernels."""

    qkv: torch.Tensor
    sums: torch.Tensor
    beta: torch.Tensor
    u: torch.Tensor
    w: torch.Tensor
    states: torch.Tensor

    @staticmethod
    def shapes(rows: int, key_heads: int, value_heads: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every buffer for `rows` rows."""
        chunks = -(-rows // CHUNK)
        padded, width = chunks * CHUNK, value_heads * 128
        return [
            ((padded, 2 * key_heads * 128 + width), torch.float16),
            ((value_heads * padded,), torch.float32),
            ((value_heads * padded,), torch.float32),
            ((padded, width), torch.float16),
            ((padded, width), torch.float16),
            ((chunks, value_heads, 128, 128), torch.float16),
        ]

    @staticmethod
    def empty(rows: int, key_heads: int, value_heads: int, device: torch.device | str) -> DeltaWorkspace:
        """Buffers for `rows` rows."""
        found = DeltaWorkspace.shapes(rows, key_heads, value_heads)
        return DeltaWorkspace(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in found))


def gated_delta_chunk(
    projected: torch.Tensor,
    ab: torch.Tensor,
    taps: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    state: DeltaState,
    slot: int,
    start: int,
    work: DeltaWorkspace,
    out: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> None:
    """Mixer of one layer for a chunk of one sequence; its state advances by all rows, none is left pending.

    Args:
        projected: bf16 [T, C + Hv * 128], raw q, k, v then z. ab: fp32 [T, 2 * Hv], a then b.
        taps: bf16 [4, C]. a_log, dt_bias: fp32 [Hv]. norm: bf16 [128].
        state: of the layer; rows before `start` are committed. With `start` 0 what the slot held is ignored.
        work: buffers for at least T rows. out: bf16 [T, Hv * 128], norm(o) * silu(z).
    """
    rows = projected.shape[0]
    value_heads = a_log.shape[0]
    key_heads = (taps.shape[1] // 128 - value_heads) // 2
    chunks = -(-rows // CHUNK)
    heads = {"HK": key_heads, "HV": value_heads}
    mixer_input_kernel[(2 * key_heads + value_heads + 1, chunks)](
        projected, ab, taps, a_log, dt_bias, state.conv, work.qkv, work.sums, work.beta, slot, start, rows,
        BV=triton.next_power_of_2(value_heads), RINGS=RING, num_warps=8, **heads,
    )  # fmt: skip
    solve_kernel[(value_heads, chunks)](work.qkv, work.sums, work.beta, work.u, work.w, num_warps=4, **heads)
    block, warps, stages = tiling.scan_tile_of(tiling.family(projected))
    scan_kernel[(value_heads, 128 // block)](
        projected, work.qkv, work.sums, work.u, work.w, work.states, state.s, state.conv, slot, start, rows, chunks,
        BLOCK=block, RINGS=RING, LOOPS=tiling.loops(projected, chunks), num_warps=warps, num_stages=stages, **heads,
    )  # fmt: skip
    mixer_output_kernel[(value_heads, chunks)](
        projected, work.qkv, work.sums, work.u, work.states, norm, out, rows, eps, num_warps=4, **heads
    )
