"""Triton decode kernels of the sparse MLP: router with shared gate/up, routed gate/up, routed and shared down.

Three launches a layer. The top-k choice is recomputed by every program that needs it, each warp for itself (256 logits
fit in a warp's registers; a launch would cost more). Rows that chose the same expert share one read of its gate/up
weights: the program of the first such row serves them all. No atomics; every sum has one fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    activation_pointers,
    add_unit,
    load_unit,
    quantize_columns,
    row_factors,
    silu,
    stack,
    store_groups,
    tile_of,
    unit_pointers,
    unpack_scales,
    wait_for_inputs,
)
from ._order import Activation, KernelMatrix
from .linear_decode import add_units, fresh, linear_kernel, load_units


@triton.jit
def top_experts(logits, first, rows, L: tl.constexpr, E: tl.constexpr, TOPK: tl.constexpr):
    """Top `TOPK` of `E` logits for the eight rows from `first`: tuples of [L] vectors (ids int32, raw logits).

    `L` lanes, at least one a warp, stand for rows first + lane % 8: with a row of the tile per warp no reduction
    leaves a warp. Order: logit descending, then id ascending.
    """
    t = first + tl.arange(0, L) % 8
    e = tl.arange(0, E)
    value = tl.load(logits + t[:, None] * (E + 1) + e[None, :], mask=(t < rows)[:, None], other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = ()
    chosen = ()
    for _s in tl.static_range(TOPK):
        best = tl.max(rank, 1)
        at = tl.min(tl.where(rank == best[:, None], e[None, :], E), 1)
        rank = tl.where(e[None, :] == at[:, None], -2147483647, rank)
        ids = ids + (at,)  # noqa: RUF005
        chosen = chosen + ((best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True),)  # noqa: RUF005
    return ids, chosen


@triton.jit
def store_choice(ids, chosen, ids_out, weights_out, first, rows, TOPK: tl.constexpr, L: tl.constexpr):
    """Ids and softmax weights of the chosen experts, for the down kernel."""
    lane = tl.arange(0, L)
    live = (lane < 8) & (first + lane < rows)
    total = tl.zeros([L], tl.float32)
    for s in tl.static_range(TOPK):
        total += tl.exp(chosen[s] - chosen[0])
    for s in tl.static_range(TOPK):
        tl.store(ids_out + (first + lane) * TOPK + s, ids[s], mask=live)
        tl.store(weights_out + (first + lane) * TOPK + s, tl.exp(chosen[s] - chosen[0]) / total, mask=live)


@triton.jit(do_not_specialize=["rows"])
def expert_gate_up_kernel(
    w, wh, ws, xq, xs, ss, logits, shared_gate_up, hq, hs, ids_out, weights_out, rows, eps,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, FMT: tl.constexpr, L: tl.constexpr, S: tl.constexpr, X: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, pair, block): h[t, slot] = silu(gate_e x) * up_e x for 32 of the inner width, as int8.

    Rows of `hq`, `hs` [pair, INTER / 32, 8 words]: t * TOPK + slot, then rows * TOPK + t for the shared expert. The
    last pair index belongs to the programs that quantise the shared expert's rows and store ids and weights.
    """
    G32: tl.constexpr = INTER // 32
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    block = tl.program_id(2)
    first = block * 8
    width = tl.minimum(rows, 8)
    wait_for_inputs(PDL)
    if pair == width * TOPK:
        if tile == 0:
            ids, chosen = top_experts(logits, first, rows, L, E, TOPK)
            store_choice(ids, chosen, ids_out, weights_out, first, rows, TOPK, L)
        group = tile + tl.arange(0, 1)
        k = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        t = first
        while t < tl.minimum(first + 8, rows):
            gate = tl.load(shared_gate_up + t * (2 * INTER) + k)
            up = tl.load(shared_gate_up + t * (2 * INTER) + INTER + k)
            store_pair_group(silu(gate) * up, hq, hs, rows * TOPK + t, tile, G32)
            t += 1
    else:
        ids, chosen = top_experts(logits, first, rows, L, E, TOPK)
        lane = tl.arange(0, L)
        slot = pair % TOPK
        own = pair // TOPK
        mine = tl.zeros([L], tl.int32)
        for s in tl.static_range(TOPK):
            mine = tl.where(slot == s, ids[s], mine)
        expert = tl.max(tl.where(lane == own, mine, 0), 0)
        # Slot of this expert in each row, or -1; and whether an earlier row of the block already serves it.
        place = tl.full([L], -1, tl.int32)
        for s in tl.static_range(TOPK):
            place = tl.where(ids[s] == expert, s, place)
        earlier = tl.max(((place >= 0) & (lane < own)).to(tl.int32), 0)
        if (earlier == 0) & (first + own < rows):
            gate_up_tile(
                w, wh, ws, xq + block * (K * 2), xs + block * (K // 4), ss + block * (PARTS * 8), hq, hs, expert,
                place, tile, first, rows, eps, TOPK, INTER, K, U, PARTS, PARTS_BLOCK, FMT, L, S, X, PTX,
            )  # fmt: skip


@triton.jit
def store_pair_group(h, hq, hs, pair, group, G32: tl.constexpr):
    """One int8 group `h` [1, 32] of expert row `pair`."""
    top = tl.max(tl.abs(h), 1)
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    bits = (h * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True) & 255
    words = tl.sum(tl.reshape(bits, [1, 8, 4]) << (8 * tl.arange(0, 4))[None, None, :], 2)
    at = pair * G32 + group + tl.arange(0, 1)
    tl.store(hq + at[:, None] * 8 + tl.arange(0, 8)[None, :], words)
    tl.store(hs + at, top / 127.0)


@triton.jit
def gate_up_tile(
    w, wh, ws, q, s, ss, hq, hs, expert, place, tile, first, rows, eps,
    TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr, FMT: tl.constexpr, L: tl.constexpr, S: tl.constexpr, X: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """32 gate rows and the matching 32 up rows of one expert for the rows of the block that chose it."""
    G32: tl.constexpr = INTER // 32
    HIGH: tl.constexpr = 64 if FMT == 6 else 32
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    gate_at = (expert * (INTER // 8) + tile * 2) * U + warp
    gate_w, gate_h, gate_s = unit_pointers(w, wh, ws, gate_at, lane, FMT)
    up_w, up_h, up_s = unit_pointers(w, wh, ws, gate_at + (INTER // 16) * U, lane, FMT)
    qp, xp = activation_pointers(q, s, warp, lane, FMT)
    gate = fresh(2, X)
    up = fresh(2, X)
    for c in tl.static_range(U // (X * S)):
        n = c * S * X
        gates = load_units(gate_w + n * 128, gate_h + n * HIGH, gate_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        ups = load_units(up_w + n * 128, up_h + n * HIGH, up_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        gate = add_units(gate, gates, qp + n * HALVES * 64, xp + n * HALVES * 8, 2, S, FMT, X, 1, PTX)
        up = add_units(up, ups, qp + n * HALVES * 64, xp + n * HALVES * 8, 2, S, FMT, X, 1, PTX)
    factor = row_factors(ss, eps, PARTS, PARTS_BLOCK, K)[None, :]
    h = silu(stack(tile_of(gate[0]), tile_of(gate[1])) * factor) * (stack(tile_of(up[0]), tile_of(up[1])) * factor)
    words, scale = quantize_columns(h)
    column = tl.arange(0, 8)
    slot = tl.max(tl.where(tl.arange(0, L)[:, None] == column[None, :], place[:, None], -1), 0)
    live = (slot >= 0) & (first + column < rows)
    at = ((first + column) * TOPK + slot) * G32 + tile
    tl.store(hq + at[None, :] * 8 + tl.arange(0, 8)[:, None], words, mask=live[None, :])
    tl.store(hs + at, scale, mask=live)


@triton.jit
def pair_activation(q, s, index, FMT: tl.constexpr):
    """Fragments of one expert row per warp, from pointers [X, 32]: all eight columns are that row."""
    b = ()
    scales = ()
    halves: tl.constexpr = 1 if FMT == 8 else 2
    for half in tl.static_range(halves):
        group = index * halves + half
        scale = tl.load(s + group)
        b = b + (tl.load(q + group * 8), tl.load(q + group * 8 + 4))  # noqa: RUF005
        scales = scales + (scale, scale)  # noqa: RUF005
    return b, scales


@triton.jit
def down_sums(
    w, wh, ws, hq, hs, pair, tile, lane, first,
    U: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, G32: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Two row tiles of each warp's expert row `pair` [X, 1]; units first, first + STEP, ... of `S`."""
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    wp, hp, sp = unit_pointers(w, wh, ws, tile * U + first, lane, FMT)
    group = pair * G32 + first * HALVES
    qp = hq + tl.max_contiguous(group * 8 + lane % 4, [1, 2])
    xp = hs + tl.max_contiguous(group + lane // 32, [1, 2])
    units = ()
    for i in tl.static_range(S):
        for r in tl.static_range(2):
            units = units + (load_unit(wp, hp, sp, r * U + i * STEP, FMT, PTX),)  # noqa: RUF005
    acc = fresh(2, X)
    for i in tl.static_range(S):
        b, scales = pair_activation(qp, xp, i * STEP, FMT)
        grown = ()
        for r in tl.static_range(2):
            unit = units[i * 2 + r]
            low, top = unpack_scales(unit[2], FMT)
            grown = grown + (add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX),)  # noqa: RUF005
        acc = grown
    return acc


@triton.jit
def rows_of(acc, share):
    """32 results, of one column, of two row tiles: each warp's share weighed, warps added."""
    upper = tl.reshape(tl.sum(acc[0][0] * share, 0), [8, 4])
    lower = tl.reshape(tl.sum(acc[0][2] * share, 0), [8, 4])
    first = tl.join(tl.max(upper, 1), tl.max(lower, 1))
    upper = tl.reshape(tl.sum(acc[1][0] * share, 0), [8, 4])
    lower = tl.reshape(tl.sum(acc[1][2] * share, 0), [8, 4])
    second = tl.join(tl.max(upper, 1), tl.max(lower, 1))
    return tl.reshape(tl.permute(tl.join(first, second), [2, 1, 0]), [32])


@triton.jit(do_not_specialize=["rows"])
def expert_down_kernel(
    w, wh, ws, sw, sws, hq, hs, ids, weights, logits, x, norm, x_out, u_out, q_out, s_out, ss_out, rows,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, N: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr,
    X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 outputs, row): residual + sum_s weight_s down_e(s) h_s + sigmoid(gate) * shared.

    X / TOPK warps share an expert.
    """
    G32: tl.constexpr = INTER // 32
    PER: tl.constexpr = X // TOPK
    pid = tl.program_id(0)
    t = tl.program_id(1)
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    slot = warp // PER
    wait_for_inputs(PDL)
    expert = tl.load(ids + tl.max_contiguous(t * TOPK + slot + lane // 32, [1, 2]))
    share = tl.load(weights + tl.max_contiguous(t * TOPK + slot + lane // 32, [1, 2]))
    acc = down_sums(
        w, wh, ws, hq, hs, t * TOPK + slot, expert * (N // 16) + pid * 2, lane, warp % PER,
        U, U // PER, PER, G32, FMT, X, PTX,
    )  # fmt: skip
    routed = rows_of(acc, share)
    pair = rows * TOPK + t + warp * 0
    acc = down_sums(sw, sw, sws, hq, hs, pair, pid * 2 + warp * 0, lane, warp, G32, G32 // X, X, G32, 8, X, PTX)
    gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * (E + 1) + E)))
    value = routed + gate * rows_of(acc, 1.0)
    n = pid * 32 + tl.arange(0, 32)
    value += tl.load(x + t * N + n)
    tl.store(x_out + t * N + n, value)
    u = value * (1.0 + tl.load(norm + n).to(tl.float32))
    tl.store(u_out + t * N + n, u)
    store_groups(tl.reshape(u, [1, 32]), q_out, s_out, t, pid, N // 32, 1)
    tl.store(ss_out + ((t // 8) * (N // 32) + pid) * 8 + t % 8, tl.sum(value * value, 0))


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
    tile = tile or _tiles.projection(shared_gate_up)
    side_bn = 2
    parts = a.ss.shape[1]
    main = shared_gate_up.rows // (16 * tile.tiles)
    linear_kernel[(main + triton.cdiv(router.shape[0], side_bn), triton.cdiv(rows, 8))](
        shared_gate_up.words, shared_gate_up.high, shared_gate_up.scales, a.q, a.s, a.ss, shared_out, u, router, logits,
        rows, router.shape[0], eps,
        N=shared_gate_up.rows, U=shared_gate_up.groups, K=shared_gate_up.columns, PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts), HEADS=False, ROWNORM=True, SIDE=True, SIDE_BN=side_bn,
        FMT=shared_gate_up.code, TILES=tile.tiles, S=tile.steps, X=tile.warps, **_tiles.launch(logits, tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Int8 inner rows of all (row, slot) pairs, then of the shared expert: `q` [P, G, 8] int32, `s` [P, G] fp32."""

    q: torch.Tensor
    s: torch.Tensor

    @staticmethod
    def empty(rows: int, top_k: int, inner: int, device: torch.device | str) -> ExpertRows:
        """Buffers for `rows` rows: P = rows * (top_k + 1), G = inner / 32."""
        count = rows * (top_k + 1)
        return ExpertRows(
            torch.empty(count, inner // 32, 8, dtype=torch.int32, device=device),
            torch.empty(count, inner // 32, dtype=torch.float32, device=device),
        )


def expert_gate_up(
    matrix: KernelMatrix,
    a: Activation,
    logits: torch.Tensor,
    shared: torch.Tensor,
    h: ExpertRows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps: float = 1e-6,
    tile: _tiles.Tile | None = None,
) -> None:
    """Int8 rows silu(gate) * up of all chosen (row, expert) pairs and of the shared expert into `h`.

    Shapes: logits [T, E + 1], shared [T, 2 * inner], ids and weights [T, top_k] (written).

    Raises:
        ValueError: the shared expert is not as wide as a routed one.
    """
    rows, top_k = ids.shape
    experts = logits.shape[1] - 1
    inner = matrix.rows // experts // 2
    if shared.shape[1] != 2 * inner:
        raise ValueError(
            f"the shared expert is {shared.shape[1] // 2} wide, the routed ones {inner}; both must be equal"
        )
    if tile is None:
        warps = _tiles.warps(matrix.groups, 8)
        tile = _tiles.Tile(2, _tiles.steps(matrix.groups, warps, 4), warps)
    parts = a.ss.shape[1]
    expert_gate_up_kernel[(inner // 32, min(rows, 8) * top_k + 1, triton.cdiv(rows, 8))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits, shared, h.q, h.s, ids, weights, rows, eps,
        E=experts, TOPK=top_k, INTER=inner, K=matrix.columns, U=matrix.groups, PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts), FMT=matrix.code, L=max(8, tile.warps), S=tile.steps, X=tile.warps,
        **_tiles.launch(logits, tile.warps),
    )  # fmt: skip


def expert_down(
    matrix: KernelMatrix,
    shared_down: KernelMatrix,
    h: ExpertRows,
    ids: torch.Tensor,
    weights: torch.Tensor,
    logits: torch.Tensor,
    x: torch.Tensor,
    next_norm: torch.Tensor,
    x_out: torch.Tensor,
    u_out: torch.Tensor,
    a_out: Activation,
    *,
    share: int = 1,
) -> None:
    """x_out = x + routed + sigmoid(shared gate) * shared, and the next reader's int8 rows; see `expert_down_kernel`.

    `share` warps work on one expert; `top_k * share` must be a power of two.
    """
    rows, top_k = ids.shape
    experts = logits.shape[1] - 1
    width = x.shape[1]
    warps = top_k * share
    if warps & (warps - 1) or matrix.columns // 32 % warps:
        raise ValueError(f"{warps} warps do not divide an inner width of {matrix.columns} into whole groups")
    expert_down_kernel[(width // 32, rows)](
        matrix.words, matrix.high, matrix.scales, shared_down.words, shared_down.scales, h.q, h.s, ids, weights, logits,
        x, next_norm, x_out, u_out, a_out.q, a_out.s, a_out.ss, rows,
        E=experts, TOPK=top_k, INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, X=warps,
        **_tiles.launch(x, warps),
    )  # fmt: skip
