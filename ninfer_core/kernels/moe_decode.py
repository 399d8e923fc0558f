"""Triton decode kernels of the sparse MLP: router with shared gate/up, routed gate/up, routed and shared down.

Three launches a layer. The top-8 choice is recomputed by every program that needs it (256 logits fit in a warp's
registers; a launch would cost more). Rows that chose the same expert share one read of its gate/up weights: the
program of the first such row serves them all. No atomics; every sum has one fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    code_factor,
    dp4a,
    emit_group,
    load_high,
    load_words,
    round_bytes,
    row_dot,
    row_factor,
    signed_bytes,
    silu,
    wait_for_inputs,
)
from ._order import Activation, KernelMatrix
from .linear_decode import finish_residual, linear_kernel, weight_offsets


@triton.jit
def top_experts(logits, first, rows, T: tl.constexpr, E: tl.constexpr, STRIDE: tl.constexpr, TOPK: tl.constexpr):
    """Top `TOPK` of `E` logits for rows first..first+T-1: tuples of T-vectors (ids int32, weights fp32).

    Order: logit descending, then id ascending. Weights are the softmax over the chosen logits.
    """
    i = tl.arange(0, T)
    e = tl.arange(0, E)
    live = first + i < rows
    value = tl.load(logits + (first + i)[:, None] * STRIDE + e[None, :], mask=live[:, None], other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (rank.to(tl.int64) << 32) | (E - 1 - e)[None, :].to(tl.int64)
    ids = ()
    chosen = ()
    for _s in tl.static_range(TOPK):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], -9223372036854775807, key)
        ids = ids + ((E - 1 - (best & 0xFFFFFFFF)).to(tl.int32),)  # noqa: RUF005
        back = (best >> 32).to(tl.int32)
        chosen = chosen + ((back ^ ((back >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True),)  # noqa: RUF005
    total = tl.zeros([T], tl.float32)
    raw = ()
    for s in tl.static_range(TOPK):
        weight = tl.exp(chosen[s] - chosen[0])
        total += weight
        raw = raw + (weight,)  # noqa: RUF005
    weights = ()
    for s in tl.static_range(TOPK):
        weights = weights + (raw[s] / total,)  # noqa: RUF005
    return ids, weights


@triton.jit
def swiglu_group_rows(gate_up, i, q_out, s_out, INTER: tl.constexpr):
    """silu(gate) * up of row `i` of fp32 [T, 2 * INTER], as one int8 activation row."""
    groups: tl.constexpr = INTER // 32
    g = tl.arange(0, groups)
    k = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    gate = tl.load(gate_up + i * (2 * INTER) + k)
    up = tl.load(gate_up + i * (2 * INTER) + INTER + k)
    h = silu(gate) * up
    top = tl.max(tl.abs(h), 1)
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    byte = tl.reshape(round_bytes(h, inverse[:, None]), [groups, 8, 4]) << (8 * tl.arange(0, 4))[None, None, :]
    words = tl.sum(byte, 2)
    position = (g % 2) * (groups // 2) + g // 2
    tl.store(q_out + tl.arange(0, 8)[None, :] * groups + position[:, None], words)
    tl.store(s_out + position, top / 127.0)


@triton.jit
def expert_gate_up_kernel(
    w, wh, ws, xq, xs, ss, logits, shared_gate_up, hq, hs, ids_out, weights_out, rows, eps,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, SHARED: tl.constexpr, FMT: tl.constexpr, T: tl.constexpr, TP: tl.constexpr,
    BG: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, pair): h[t, slot] = silu(gate_e x) * up_e x for one group of 32 of the inner width, as int8.

    Rows of `hq`, `hs`: t * TOPK + slot, then rows * TOPK + t for the shared expert. The last pair index belongs to the
    programs that quantise the shared expert's rows and store ids and weights for the down kernel.
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    first = tl.program_id(2) * T
    wait_for_inputs(PDL)
    ids, weights = top_experts(logits, first, rows, TP, E, E + 1, TOPK)
    lane = tl.arange(0, TP)
    if pair == T * TOPK:
        if tile < T:
            i = first + tile
            if i < rows:
                for s in tl.static_range(TOPK):
                    tl.store(ids_out + (first + lane) * TOPK + s, ids[s], mask=lane == tile)
                    tl.store(weights_out + (first + lane) * TOPK + s, weights[s], mask=lane == tile)
                row = rows * TOPK + i
                swiglu_group_rows(
                    shared_gate_up, i, hq + row * (INTER // 4), hs + row * (INTER // 32), SHARED
                )
    else:
        slot = pair % TOPK
        own = pair // TOPK
        mine = tl.zeros([TP], tl.int32)
        for s in tl.static_range(TOPK):
            mine = tl.where(slot == s, ids[s], mine)
        expert = tl.sum(tl.where(lane == own, mine, 0), 0)
        # Slot of this expert in each row, or -1; and whether an earlier row already serves it.
        place = tl.full([TP], -1, tl.int32)
        for s in tl.static_range(TOPK):
            place = tl.where(ids[s] == expert, s, place)
        earlier = tl.sum(((place >= 0) & (lane < own)).to(tl.int32), 0)
        if (earlier == 0) & (first + own < rows):
            gate_up_tile(
                w, wh, ws, xq, xs, ss, hq, hs, expert, place, tile, own, first, rows, eps,
                TOPK, INTER, K, G, PARTS, PARTS_BLOCK, FMT, T, TP, BG, PTX,
            )  # fmt: skip


@triton.jit
def gate_up_tile(
    w, wh, ws, xq, xs, ss, hq, hs, expert, place, tile, own, first, rows, eps,
    TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, FMT: tl.constexpr, T: tl.constexpr, TP: tl.constexpr, BG: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """32 gate rows and the matching 32 up rows of one expert for every row of the block that chose it."""
    high_planes: tl.constexpr = 2 if FMT == 5 else (4 if FMT == 6 else 0)
    G32: tl.constexpr = K // 32
    lane = tl.arange(0, TP)
    gate_row = expert * (2 * INTER) + tile * 32 + tl.arange(0, 32)
    up_row = gate_row + INTER
    g = tl.arange(0, BG)
    gate_sums = ()
    up_sums = ()
    for _t in tl.static_range(T):
        gate_sums = gate_sums + (tl.zeros([32, BG], tl.float32),)  # noqa: RUF005
        up_sums = up_sums + (tl.zeros([32, BG], tl.float32),)  # noqa: RUF005
    for c in tl.static_range(G // BG):
        k = c * BG + g
        gate_at = weight_offsets(gate_row, G, 8)[:, None] + k[None, :]
        up_at = weight_offsets(up_row, G, 8)[:, None] + k[None, :]
        gate_words = load_words(w, gate_at, 32 * G, None)
        up_words = load_words(w, up_at, 32 * G, None)
        gate_high = load_high(wh, weight_offsets(gate_row, G, high_planes)[:, None] + k[None, :], 32 * G, None, FMT)
        up_high = load_high(wh, weight_offsets(up_row, G, high_planes)[:, None] + k[None, :], 32 * G, None, FMT)
        gate_scale = tl.load(ws + gate_row[:, None] * G + k[None, :]).to(tl.float32) * code_factor(FMT)
        up_scale = tl.load(ws + up_row[:, None] * G + k[None, :]).to(tl.float32) * code_factor(FMT)
        gates = ()
        ups = ()
        for t in tl.static_range(T):
            i = tl.minimum(first + t, rows - 1)
            q = xq + i * (8 * G32)
            s = xs + i * G32
            gate = row_dot(gate_words, gate_high, q, s, ss, k, eps, G32, FMT, False, PTX)
            up = row_dot(up_words, up_high, q, s, ss, k, eps, G32, FMT, False, PTX)
            gates = gates + (gate_sums[t] + gate * gate_scale,)  # noqa: RUF005
            ups = ups + (up_sums[t] + up * up_scale,)  # noqa: RUF005
        gate_sums = gates
        up_sums = ups
    for t in tl.static_range(T):
        slot = tl.sum(tl.where(lane == t, place, 0), 0)
        if (slot >= 0) & (first + t < rows):
            factor = row_factor(ss + (first + t) * PARTS, eps, PARTS, PARTS_BLOCK, K)
            h = silu(tl.sum(gate_sums[t], 1) * factor) * (tl.sum(up_sums[t], 1) * factor)
            out = (first + t) * TOPK + slot
            emit_group(h, hq + out * (INTER // 4), hs + out * (INTER // 32), tile, INTER // 32)


@triton.jit
def expert_down_kernel(
    w, wh, ws, sw, sws, hq, hs, ids, weights, logits, x, norm, x_out, u_out, q_out, s_out, ss_out, rows,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, N: tl.constexpr, G: tl.constexpr, FMT: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 outputs, row): residual + sum_s weight_s down_e(s) h_s + sigmoid(gate) * shared."""
    high_planes: tl.constexpr = 2 if FMT == 5 else (4 if FMT == 6 else 0)
    G32: tl.constexpr = INTER // 32
    C: tl.constexpr = TOPK * G
    pid = tl.program_id(0)
    t = tl.program_id(1)
    r = tl.arange(0, 32)
    row = pid * 32 + r
    gs = tl.arange(0, G32)
    shared_words = load_words(sw, weight_offsets(row, G32, 8)[:, None] + gs[None, :], 32 * G32, None)
    shared_scale = tl.load(sws + row[:, None] * G32 + gs[None, :])
    wait_for_inputs(PDL)
    column = tl.arange(0, C)
    slot = column // G
    g = column % G
    expert = tl.max_constancy(tl.load(ids + t * TOPK + slot), [G])
    share = tl.load(weights + t * TOPK + slot)
    tile = tl.multiple_of(expert * (N // 32) + pid, 1)
    words = load_words(w, (tile * (256 * G) + g)[None, :] + (r * G)[:, None], 32 * G, None)
    high = load_high(wh, (tile * (high_planes * 32 * G) + g)[None, :] + (r * G)[:, None], 32 * G, None, FMT)
    scale = tl.load(ws + (tile * (32 * G) + g)[None, :] + (r * G)[:, None])
    pair = t * TOPK + slot
    total = tl.zeros([32, C], tl.int32)
    for j in tl.static_range(8):
        h = tl.load(hq + pair * (8 * G32) + j * G32 + g)
        total = _dot(words, high, h, total, j, 0, FMT, PTX)
    y = total.to(tl.float32) * tl.load(hs + pair * G32 + g)[None, :]
    if FMT != 8:
        total = tl.zeros([32, C], tl.int32)
        for j in tl.static_range(8):
            h = tl.load(hq + pair * (8 * G32) + j * G32 + G + g)
            total = _dot(words, high, h, total, j, 1, FMT, PTX)
        y += total.to(tl.float32) * tl.load(hs + pair * G32 + G + g)[None, :]
    routed = tl.sum(y * (scale.to(tl.float32) * (code_factor(FMT) * share)[None, :]), 1)
    line = rows * TOPK + t
    shared = row_dot(shared_words, (), hq + line * (8 * G32), hs + line * G32, hs, gs, 0.0, G32, 8, False, PTX)
    shared_sum = tl.sum(shared * shared_scale.to(tl.float32), 1)
    gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * (E + 1) + E)))
    value = tl.load(x + t * N + row) + (routed + gate * shared_sum)
    finish_residual(value, norm, x_out, u_out, q_out, s_out, ss_out, t, pid, row, N)


@triton.jit
def _dot(words, high, h, total, j: tl.constexpr, half: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    return dp4a(signed_bytes(words, high, j, half, FMT), tl.broadcast_to(h[None, :], total.shape), total, PTX)


def route_and_shared(
    shared_gate_up: KernelMatrix,
    router: torch.Tensor,
    a: Activation,
    u: torch.Tensor,
    shared_out: torch.Tensor,
    logits: torch.Tensor,
    *,
    eps: float = 1e-6,
    tile: _tiles.Tile | None = None,
) -> None:
    """logits [T, E + 1] fp32 = router (bf16) times the normed rows; shared_out [T, 2 * inner] fp32 = shared gate/up.

    One launch: the router's programs come after the shared expert's.
    """
    rows = logits.shape[0]
    tile = tile or _tiles.Tile(16, _tiles.chunk(shared_gate_up.groups, 64), 4)
    block = min(rows, 8)
    side_bn = 2
    parts = a.ss.shape[1]
    grid = (shared_gate_up.rows // tile.rows + triton.cdiv(router.shape[0], side_bn), triton.cdiv(rows, block))
    linear_kernel[grid](
        shared_gate_up.words, shared_gate_up.high, shared_gate_up.scales, a.q, a.s, a.ss, shared_out, u, router, logits,
        rows, router.shape[0], eps,
        N=shared_gate_up.rows, G=shared_gate_up.groups, K=shared_gate_up.columns, PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts), HEADS=False, ROWNORM=True, SIDE=True, SIDE_BN=side_bn,
        FMT=shared_gate_up.code, T=block, BN=tile.rows, BG=tile.groups, **_tiles.launch(logits, tile.warps),
    )  # fmt: skip


def expert_gate_up(
    matrix: KernelMatrix,
    a: Activation,
    logits: torch.Tensor,
    shared: torch.Tensor,
    h: Activation,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    top_k: int = 8,
    eps: float = 1e-6,
    tile: _tiles.Tile | None = None,
) -> None:
    """Int8 rows silu(gate) * up of all chosen (row, expert) pairs and of the shared expert into `h`.

    Shapes: logits [T, E + 1], shared [T, 2 * inner], h rows T * top_k + T, ids and weights [T, top_k] (written).
    """
    rows, experts = logits.shape[0], logits.shape[1] - 1
    inner = matrix.rows // experts // 2
    tile = tile or _tiles.Tile(32, _tiles.chunk(matrix.groups, 32), 8)
    block = min(rows, 8)
    parts = a.ss.shape[1]
    grid = (inner // 32, block * top_k + 1, triton.cdiv(rows, block))
    if grid[0] < block:
        raise ValueError(f"an inner width of {inner} gives {grid[0]} tiles, fewer than the {block} rows of a block")
    expert_gate_up_kernel[grid](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits, shared, h.q, h.s, ids, weights, rows, eps,
        E=experts, TOPK=top_k, INTER=inner, K=matrix.columns, G=matrix.groups, PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts), SHARED=shared.shape[1] // 2, FMT=matrix.code, T=block,
        TP=triton.next_power_of_2(block), BG=tile.groups, **_tiles.launch(logits, tile.warps),
    )  # fmt: skip


def expert_down(
    matrix: KernelMatrix,
    shared_down: KernelMatrix,
    h: Activation,
    ids: torch.Tensor,
    weights: torch.Tensor,
    logits: torch.Tensor,
    x: torch.Tensor,
    next_norm: torch.Tensor,
    x_out: torch.Tensor,
    u_out: torch.Tensor,
    a_out: Activation,
    *,
    warps: int = 8,
) -> None:
    """x_out = x + routed + sigmoid(shared gate) * shared, and the next reader's int8 rows; see `expert_down_kernel`."""
    rows, top_k = ids.shape
    experts = logits.shape[1] - 1
    width = x.shape[1]
    expert_down_kernel[(width // 32, rows)](
        matrix.words, matrix.high, matrix.scales, shared_down.words, shared_down.scales, h.q, h.s, ids, weights, logits,
        x, next_norm, x_out, u_out, a_out.q, a_out.s, a_out.ss, rows,
        E=experts, TOPK=top_k, INTER=matrix.columns, N=width, G=matrix.groups, FMT=matrix.code,
        **_tiles.launch(x, warps),
    )  # fmt: skip
