"""Triton decode kernels between the layers and the heads: rotary tables, final hidden rows, the draft layer's input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import wait_for_inputs
from ._order import Activation
from ._planes import store_groups


@triton.jit
def rope_kernel(turns, lengths, deltas, cos_out, sin_out, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr):
    """Programs (row): cosine and signed sine [64] of position lengths[b] + deltas[b] + r.

    `turns` [32] fp64 are turns per position: whole turns are dropped in fp64 before the fp32 functions.
    """
    t = tl.program_id(0)
    b = t // R
    wait_for_inputs(PDL)
    place = tl.load(lengths + b) + tl.load(deltas + b) + t % R
    i = tl.arange(0, 32)
    turn = tl.load(turns + i) * place.to(tl.float64)
    turn = turn - tl.floor(turn)
    angle = (turn * 6.283185307179586).to(tl.float32)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    tl.store(cos_out + t * 64 + i, cos)
    tl.store(cos_out + t * 64 + 32 + i, cos)
    tl.store(sin_out + t * 64 + i, -sin)
    tl.store(sin_out + t * 64 + 32 + i, sin)


@triton.jit
def rms_of(ss, t, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """RMS factor of row `t` of an activation from its partial sums of squares."""
    i = tl.arange(0, BLOCK)
    part = tl.load(ss + ((t // 8) * PARTS + i) * 8 + t % 8, mask=i < PARTS, other=0.0)
    return tl.rsqrt(tl.sum(part, 0) / WIDTH + eps)


@triton.jit
def finish_kernel(
    u, ss, pick, slots, lengths, h_out, ring, q_out, s_out, eps,
    R: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    NORM: tl.constexpr, PICK: tl.constexpr, RINGS: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (chunk of groups of 32, row): the normed row and its int8 groups; see `finish_rows`."""
    first = tl.program_id(0) * GROUPS
    row = tl.program_id(1)
    wait_for_inputs(PDL)
    t = row
    if PICK:
        t = row * R + tl.load(pick + row)
    at = (first + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    h = tl.load(u + t * K + at)
    if NORM:
        h = h * rms_of(ss, t, eps, K // 32, BLOCK, K)
        tl.store(h_out + row * K + at, h)
    if RINGS:
        slot = tl.load(slots + t // R).to(tl.int64)
        token = tl.load(lengths + t // R) + t % R
        tl.store(ring + (slot * KEPT + token % KEPT) * K + at, h.to(tl.bfloat16))
    store_groups(h, q_out, s_out, row, first, K // 32, GROUPS)


@triton.jit
def draft_input_kernel(
    u, ss, hidden, norm, q_out, s_out, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (chunk of groups of 32 of one half, half, row): int8 groups of [normed embedding | normed hidden]."""
    first = tl.program_id(0) * GROUPS
    half = tl.program_id(1)
    t = tl.program_id(2)
    at = (first + tl.arange(0, GROUPS))[:, None] * 32 + tl.arange(0, 32)[None, :]
    weight = 1.0 + tl.load(norm + at).to(tl.float32)
    wait_for_inputs(PDL)
    if half == 0:
        y = tl.load(u + t * K + at) * rms_of(ss, t, eps, K // 32, BLOCK, K)
    else:
        k = tl.arange(0, WIDE)
        row = tl.load(hidden + t * K + k, mask=k < K, other=0.0)
        y = tl.load(hidden + t * K + at) * weight * (tl.rsqrt(tl.sum(row * row, 0) / K + eps))
    store_groups(y, q_out, s_out, t, half * (K // 32) + first, K // 16, GROUPS)


def rope_turns(rotary: int, theta: float, device: torch.device | str) -> torch.Tensor:
    """Turns per position of every pair, fp64 [rotary / 2]: what `rope_rows` multiplies positions with."""
    half = rotary // 2
    return theta ** (-torch.arange(half, dtype=torch.float64) / half).to(device) / (2 * torch.pi)


def rope_rows(
    turns: torch.Tensor, lengths: torch.Tensor, deltas: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """cos, sin [T, 64] fp32 of rows lengths[b] + r (int32 [B]) at rotary position index + deltas[b].

    Numeric: angles reduced in fp64, functions in fp32: within 1e-6 of `rope.rope_tables`.

    Raises:
        ValueError: other than 64 rotary dims.
    """
    if turns.shape[0] != 32:
        raise ValueError(f"{2 * turns.shape[0]} dims of a head rotate; the kernels take 64")
    rows = cos.shape[0]
    rope_kernel[(rows,)](
        turns, lengths, deltas, cos, sin, R=rows // lengths.shape[0], **_tiles.launch(cos, 1),
    )  # fmt: skip


def finish_rows(
    u: torch.Tensor,
    a: Activation,
    out: Activation,
    h: torch.Tensor,
    *,
    eps: float = 1e-6,
    pick: torch.Tensor | None = None,
    keep: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """h [T, K] fp32 = rows u times their RMS factor, and their int8 groups in `out`.

    Args:
        u: fp32 [T, K], values times the norm's gain. a: holds their partial sums of squares.
        out: read by heads with eps 0: its partial sums must be 32 each, which gives the factor 1.
        h: `[T, K]`, or `[B, K]` with `pick`.
        pick: int32 [B]: only row `pick[b]` of every sequence.
        keep: (ring bf16 [slots, n, K], slots int32 [B], lengths int32 [B]): also store every row at its token's index
            modulo n in the ring of its slot.
    """
    width, rows = u.shape[1], h.shape[0]
    owners = pick.shape[0] if pick is not None else (keep[1].shape[0] if keep is not None else rows)
    ring, slots, lengths = keep if keep is not None else (a.s, a.s, a.s)
    finish_kernel[(width // 256, rows)](
        u, a.ss, pick if pick is not None else a.s, slots, lengths, h, ring, out.q, out.s, eps,
        R=u.shape[0] // owners, K=width, BLOCK=triton.next_power_of_2(width // 32), GROUPS=8,
        KEPT=ring.shape[1] if keep is not None else 1, NORM=True, PICK=pick is not None, RINGS=keep is not None,
        **_tiles.launch(h, 4),
    )  # fmt: skip


def quantize_rows(h: torch.Tensor, out: Activation) -> None:
    """Int8 groups of rows h [T, K] fp32 as `finish_rows` makes them."""
    finish_kernel[(h.shape[1] // 256, h.shape[0])](
        h, out.s, out.s, out.s, out.s, h, out.s, out.q, out.s, 0.0,
        R=1, K=h.shape[1], BLOCK=1, GROUPS=8, KEPT=1, NORM=False, PICK=False, RINGS=False, **_tiles.launch(h, 4),
    )  # fmt: skip


def draft_input(
    u: torch.Tensor, a: Activation, hidden: torch.Tensor, hidden_norm: torch.Tensor, out: Activation, *, eps: float
) -> None:
    """Int8 rows [T, 2 K] of the normed embedding (u [T, K] from `embed`, partial sums in `a`) and the normed `hidden`.

    `hidden` fp32 [T, K], `hidden_norm` bf16 [K] (gain 1 + w); `out` is read with norm="none".
    """
    rows, width = u.shape
    draft_input_kernel[(width // 256, 2, rows)](
        u, a.ss, hidden, hidden_norm, out.q, out.s, eps,
        K=width, BLOCK=triton.next_power_of_2(width // 32), WIDE=triton.next_power_of_2(width), GROUPS=8,
        **_tiles.launch(u, 4),
    )  # fmt: skip
