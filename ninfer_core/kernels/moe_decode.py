"""Triton decode kernels of the sparse MLP: router with shared gate/up, routed gate/up, routed and shared down.

Up to eight rows take three launches. The top-k choice is recomputed by every program that needs it, each warp for
itself (256 logits fit in a warp's registers; a launch would cost more), and the down kernel makes it and requests its
weights before the wait: the logits are two launches old. Rows that chose the same expert share one read of its gate/up
weights: the program of the first such row serves them all. More rows are grouped by expert over the whole call
(three launches more), so every chosen expert is read once. No atomics; a row's sums have the same order on both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    EARLY1,
    FRESH1,
    add_unit,
    lane_factors,
    load_one,
    round_bytes,
    rows_max,
    rows_sum,
    silu,
    store_one,
    sum_warps,
    unit_pointers,
    unpack_scales,
    wait_for_inputs,
)
from ._experts import (
    LIST,
    columns,
    element,
    gathered_pointers,
    gathered_squares,
    pair_pointers,
    pair_sums,
    pair_units,
    shares_of,
    store_pairs,
    top_experts,
)
from ._order import Activation, KernelMatrix
from .linear_decode import fresh, linear_kernel, load_units, norm_gains, side_words
from .mlp_decode import swiglu


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    logits, ids, weights, rows, E: tl.constexpr, TOPK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr
):
    """Programs (row): ids and softmax weights [T, TOPK] of the chosen experts."""
    t = tl.program_id(0) + tl.arange(0, 1)
    wait_for_inputs(PDL)
    found, chosen = top_experts(logits, t, rows, FRESH1, E, TOPK, PTX)
    shares = shares_of(chosen, TOPK)
    for s in tl.static_range(TOPK):
        tl.store(ids + t * TOPK + s, found[s])
        tl.store(weights + t * TOPK + s, shares[s])


@triton.jit(do_not_specialize=["rows"])
def group_kernel(ids, pairs, counts, rows, TOPK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr):
    """Programs (expert): its pairs (row * TOPK + slot) in the order of rows, and how many they are."""
    expert = tl.program_id(0)
    t = tl.arange(0, LIST)
    wait_for_inputs(PDL)
    slot = tl.full([LIST], -1, tl.int32)
    for s in tl.static_range(TOPK):
        slot = tl.where(tl.load(ids + t * TOPK + s, mask=t < rows, other=-1) == expert, s, slot)
    member = (slot >= 0).to(tl.int32)
    place = tl.cumsum(member, 0) - 1
    tl.store(pairs + expert * LIST + place, t * TOPK + slot, mask=slot >= 0)
    tl.store(counts + expert, tl.sum(member, 0))


@triton.jit(do_not_specialize=["rows"])
def expert_gate_up_kernel(
    w, wh, ws, xq, xs, ss, logits, shared_gate_up, hq, hs, ids, weights, pairs, counts, rows, eps,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr,
    FMT: tl.constexpr, R: tl.constexpr, S: tl.constexpr, X: tl.constexpr, GROUPED: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, pair or expert): h[t, slot] = silu(gate_e x) * up_e x for 32 of the inner width, as int8.

    Rows of `hq` (bytes), `hs` [pair, INTER / 32, 32]: t * TOPK + slot, then rows * TOPK + t for the shared expert. The
    last index belongs to the programs that quantise the shared expert's rows (and, ungrouped, store ids and weights).
    """
    L: tl.constexpr = 8 if X < 8 else X
    tile = tl.program_id(0)
    index = tl.program_id(1)
    wait_for_inputs(PDL)
    if index == tl.num_programs(1) - 1:
        if not GROUPED and tile == 0:
            t = tl.arange(0, L) % 8
            found, chosen = top_experts(logits, t, rows, FRESH1, E, TOPK, PTX)
            shares = shares_of(chosen, TOPK)
            for s in tl.static_range(TOPK):
                tl.store(ids + t * TOPK + s, found[s], mask=t < rows)
                tl.store(weights + t * TOPK + s, shares[s], mask=t < rows)
        shared_rows(shared_gate_up, hq, hs, tile, rows, TOPK, INTER)
    elif GROUPED:
        count = tl.load(counts + index)
        column = tl.arange(0, 32) % 4 * 2
        first = 0
        while first < count:
            line = pairs + index * LIST + first
            even = tl.load(line + column, mask=first + column < count, other=0)
            odd = tl.load(line + column + 1, mask=first + column + 1 < count, other=0)
            own = tl.load(line + tl.arange(0, 32) // 4, mask=first + tl.arange(0, 32) // 4 < count, other=0)
            gate_up_tile(
                w, wh, ws, xq, xs, ss, hq, hs, index, tile, own // TOPK, even // TOPK, odd // TOPK, even, odd,
                first + column < count, first + column + 1 < count, eps, INTER, K, U, PARTS, FMT, S, X, PTX,
            )  # fmt: skip
            first += 8
    elif R == 1:
        found, _chosen = top_experts(logits, tl.arange(0, X) * 0, rows, FRESH1, E, TOPK, PTX)
        lane = tl.arange(0, 32)
        gate_up_tile(
            w, wh, ws, xq, xs, ss, hq, hs, element(found, index, TOPK)[:, None], tile, lane // 4, lane % 4 * 2,
            lane % 4 * 2 + 1, lane * 0 + index, lane * 0 + index, lane % 4 == 0, lane < 0, eps,
            INTER, K, U, PARTS, FMT, S, X, PTX,
        )  # fmt: skip
    else:
        own = index // TOPK
        row = tl.arange(0, L) % 8
        found, _chosen = top_experts(logits, row, rows, FRESH1, E, TOPK, PTX)
        lane = tl.arange(0, 32)
        expert = tl.max(tl.where(row == own, element(found, index % TOPK, TOPK), 0), 0)
        # Slot of this expert in each row, or -1; and whether an earlier row already serves it.
        place = tl.where(found[0] == expert, 0, -1)
        for s in tl.static_range(1, TOPK):
            place = tl.where(found[s] == expert, s, place)
        earlier = tl.max(((place >= 0) & (row < own)).to(tl.int32), 0)
        if earlier == 0:
            column = lane % 4 * 2
            even = tl.max(tl.where(row[:, None] == column[None, :], place[:, None], -1), 0)
            odd = tl.max(tl.where(row[:, None] == column[None, :] + 1, place[:, None], -1), 0)
            gate_up_tile(
                w, wh, ws, xq, xs, ss, hq, hs, expert, tile, lane // 4, column, column + 1, column * TOPK + even,
                (column + 1) * TOPK + odd, (even >= 0) & (column < rows), (odd >= 0) & (column + 1 < rows), eps,
                INTER, K, U, PARTS, FMT, S, X, PTX,
            )  # fmt: skip


@triton.jit
def shared_rows(shared_gate_up, hq, hs, group, rows, TOPK: tl.constexpr, INTER: tl.constexpr):
    """The shared expert's int8 group `group` of all rows, eight rows at a time in lane form."""
    lane = tl.arange(0, 32)
    first = 0
    while first < rows:
        h = ()
        t = first + lane % 4 * 2
        for i in tl.static_range(4):
            for e in tl.static_range(2):
                at = (t + e) * (2 * INTER) + group * 32 + i * 8 + lane // 4
                gate = tl.load(shared_gate_up + at, mask=t + e < rows, other=0.0)
                up = tl.load(shared_gate_up + at + INTER, mask=t + e < rows, other=0.0)
                h = h + (silu(gate) * up,)  # noqa: RUF005
        pair = rows * TOPK + t
        store_pairs(h, hq, hs, pair, pair + 1, t < rows, t + 1 < rows, group, INTER // 32)
        first += 8


@triton.jit
def gate_up_tile(
    w, wh, ws, q, s, ss, hq, hs, expert, tile, row, row_even, row_odd, even, odd, live_even, live_odd, eps,
    INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """32 gate rows and the matching 32 up rows of `expert` (a number or [X, 1]) for eight rows, stored as pairs."""
    G32: tl.constexpr = K // 32
    HIGH: tl.constexpr = 64 if FMT == 6 else 32
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    gate_at = (expert * (INTER // 8) + tile * 2) * U + warp
    gate_w, gate_h, gate_s = unit_pointers(w, wh, ws, gate_at, lane, FMT)
    up_w, up_h, up_s = unit_pointers(w, wh, ws, gate_at + (INTER // 16) * U, lane, FMT)
    qp, ep, op = gathered_pointers(q, s, warp, lane, row[None, :], row_even[None, :], row_odd[None, :], G32, FMT)
    squares = gathered_squares(ss, row_even, row_odd, PARTS, PTX)
    acc = fresh(4, X)
    for c in tl.static_range(U // (X * S)):
        n = c * S * X
        gates = load_units(gate_w + n * 128, gate_h + n * HIGH, gate_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        ups = load_units(up_w + n * 128, up_h + n * HIGH, up_s + n * 8, 2, U, S, FMT, X, 1, PTX)
        for i in tl.static_range(S):
            b, scales = columns(qp, ep, op, n + i * X, 64, 8, FMT, PTX)
            grown = ()
            for r in tl.static_range(4):
                unit = gates[i * 2 + r] if r < 2 else ups[i * 2 + r - 2]
                low, top = unpack_scales(unit[2], FMT)
                grown = grown + (add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX),)  # noqa: RUF005
            acc = grown
    y = sum_warps(acc)
    h = swiglu(y, lane_factors(squares, eps, K))
    store_pairs(h, hq, hs, even, odd, live_even, live_odd, tile, INTER // 32)


@triton.jit
def expert_rows_kernel(
    w, wh, ws, hq, hs, pairs, counts, y,
    INTER: tl.constexpr, N: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (32 X outputs, expert): y[pair, n] of the expert's pairs; a warp owns 32 outputs over all of K."""
    G32: tl.constexpr = INTER // 32
    expert = tl.program_id(1)
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    group = tl.program_id(0) * X + warp
    wait_for_inputs(PDL)
    count = tl.load(counts + expert)
    if count > 0:
        units = pair_units(w, wh, ws, expert * (N // 16) + group * 2, 0, lane, U, U, 1, FMT, PTX)
        first = 0
        while first < count:
            line = pairs + expert * LIST + first + warp * 0
            column = lane % 4 * 2
            last = count - 1 - first
            even = load_one(line + tl.minimum(column, last), FRESH1, PTX)
            odd = load_one(line + tl.minimum(column + 1, last), FRESH1, PTX)
            own = load_one(line + tl.minimum(lane // 4, last), FRESH1, PTX)
            q, low, top = pair_pointers(hq, hs, 0, lane, own, even, odd, G32, FMT)
            acc = pair_sums(fresh(2, X), units, q, low, top, U, 1, X, FMT, PTX)
            for r in tl.static_range(2):
                for h in tl.static_range(2):
                    n = group * 32 + r * 16 + h * 8 + lane // 4
                    store_one(y + even * N + n, acc[r][2 * h], column + warp * 0 <= last, PTX)
                    store_one(y + odd * N + n, acc[r][2 * h + 1], column + warp * 0 < last, PTX)
            first += 8


@triton.jit(do_not_specialize=["rows"])
def expert_down_kernel(
    w, wh, ws, sw, sws, hq, hs, ids, weights, logits, y, x, norm, x_out, u_out, q_out, s_out, ss_out, rows,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, N: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr,
    X: tl.constexpr, GROUPED: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 outputs, row): residual + sum_s weight_s down_e(s) h_s + sigmoid(gate) * shared.

    A warp owns a chosen expert (X = TOPK) and a share of the shared expert's K. Grouped: expert results come from `y`.
    """
    G32: tl.constexpr = INTER // 32
    pid = tl.program_id(0)
    t = tl.program_id(1)
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    pair = t * TOPK + warp + lane * 0
    gains = norm_gains(norm, pid)
    old = ()
    for i in tl.static_range(4):
        n = pid * 32 + i * 8 + tl.arange(0, 32) // 4
        old = old + (load_one(x + t * N + n, EARLY1, PTX),)  # noqa: RUF005
    gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * (E + 1) + E, cache_modifier=".cg")))
    shared_units = pair_units(sw, sw, sws, pid * 2 + warp * 0, warp, lane, G32, G32 // X, X, 8, PTX)
    if GROUPED:
        wait_for_inputs(PDL)
        share = load_one(weights + pair, FRESH1, PTX)
        parts = ()
        for i in tl.static_range(4):
            parts = parts + (load_one(y + pair * N + pid * 32 + i * 8 + lane // 4, FRESH1, PTX),)  # noqa: RUF005
    else:
        slot = tl.arange(0, X)
        found, chosen = top_experts(logits, slot * 0 + t, rows, EARLY1, E, TOPK, PTX)
        share = element(shares_of(chosen, TOPK), slot, TOPK)[:, None]
        expert = element(found, slot, TOPK)[:, None]
        units = pair_units(w, wh, ws, expert * (N // 16) + pid * 2, 0, lane, U, U, 1, FMT, PTX)
        wait_for_inputs(PDL)
        q, low, top = pair_pointers(hq, hs, 0, lane, pair, pair, pair, G32, FMT)
        acc = pair_sums(fresh(2, X), units, q, low, top, U, 1, X, FMT, PTX)
        parts = (acc[0][0], acc[0][2], acc[1][0], acc[1][2])
    own = rows * TOPK + t + warp * 0 + lane * 0
    q, low, top = pair_pointers(hq, hs, warp, lane, own, own, own, G32, 8)
    acc = pair_sums(fresh(2, X), shared_units, q, low, top, G32 // X, X, X, 8, PTX)
    routed, shared = sum_warps(
        (
            (parts[0] * share, parts[1] * share, parts[2] * share, parts[3] * share),
            (acc[0][0], acc[0][2], acc[1][0], acc[1][2]),
        )
    )
    finish_row(routed, shared, gate, gains, old, x_out, u_out, q_out, s_out, ss_out, t, pid, N)


@triton.jit
def finish_row(routed, shared, gate, gains, old, x_out, u_out, q_out, s_out, ss_out, t, group, N: tl.constexpr):
    """New residual of row `t`, 32 values in lane form (four [32], the same in all columns), and its int8 group."""
    lane = tl.arange(0, 32)
    one = lane % 4 == 0
    n = group * 32 + lane // 4
    u = ()
    square = tl.zeros([32], tl.float32)
    top = tl.zeros([32], tl.float32)
    values = ()
    for i in tl.static_range(4):
        value = old[i] + (routed[i] + gate * shared[i])
        values = values + (value,)  # noqa: RUF005
        u = u + (value * gains[i],)  # noqa: RUF005
        square = tl.fma(value, value, square)
        top = tl.maximum(top, tl.abs(u[i]))
    for i in tl.static_range(4):
        tl.store(x_out + t * N + n + i * 8, values[i], mask=one)
        tl.store(u_out + t * N + n + i * 8, u[i], mask=one)
    top = rows_max(top)
    inverse = tl.where(top > 0.0, 127.0 / top, 0.0)
    unit = (t // 8) * (N // 32) + group
    for i in tl.static_range(4):
        tl.store(q_out + unit * 256 + t % 8 * 32 + i * 8 + lane // 4, round_bytes(u[i], inverse).to(tl.int8), mask=one)
    tl.store(s_out + unit * 8 + t % 8 + lane * 0, top / 127.0, mask=lane == 0)
    tl.store(ss_out + unit * 8 + t % 8 + lane * 0, rows_sum(square), mask=lane == 0)


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
    tile = tile or _tiles.router(shared_gate_up)
    blocks = _tiles.blocks(rows)
    main = shared_gate_up.rows // (16 * tile.tiles)
    linear_kernel[(main + triton.cdiv(router.shape[0], tile.warps), triton.cdiv(rows, 8 * blocks))](
        shared_gate_up.words, shared_gate_up.high, shared_gate_up.scales, a.q, a.s, a.ss, shared_out, u,
        side_words(router), logits, rows, router.shape[0], eps,
        N=shared_gate_up.rows, U=shared_gate_up.groups, K=shared_gate_up.columns, PARTS=a.ss.shape[1], HEADS=False,
        ROWNORM=True, SIDE=True, FMT=shared_gate_up.code, TILES=tile.tiles, S=tile.steps, X=tile.warps, NB=blocks,
        R=_tiles.window(rows), **_tiles.launch(logits, tile.warps, leads=True),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Int8 inner rows of all (row, slot) pairs, then of the shared expert: `q` [P, G, 8] int32, `s` [P, G] fp32.

    For calls of more than eight rows also `pairs` [X, 64] and `counts` [X] int32, the pairs of every expert, and
    `y` [T * top_k, E] fp32, their results; otherwise these are empty.
    """

    q: torch.Tensor
    s: torch.Tensor
    pairs: torch.Tensor
    counts: torch.Tensor
    y: torch.Tensor

    @staticmethod
    def empty(
        rows: int, top_k: int, inner: int, device: torch.device | str, *, experts: int = 0, width: int = 0
    ) -> ExpertRows:
        """Buffers for `rows` rows: P = rows * (top_k + 1), G = inner / 32.

        Raises:
            ValueError: more than eight rows without the number of experts and the hidden width, or more than 64.
        """
        grouped = rows > 8
        if rows > LIST.value or (grouped and not (experts and width)):
            raise ValueError(
                f"{rows} rows: a call takes at most {LIST.value}, and more than 8 need the number of experts "
                f"({experts}) and the hidden width ({width})"
            )
        count = rows * (top_k + 1)
        i32, f32 = {"dtype": torch.int32, "device": device}, {"dtype": torch.float32, "device": device}
        return ExpertRows(
            torch.empty(count, inner // 32, 8, **i32),
            torch.empty(count, inner // 32, **f32),
            torch.zeros(experts if grouped else 0, LIST.value, **i32),
            torch.zeros(experts if grouped else 0, **i32),
            torch.empty(rows * top_k if grouped else 0, width, **f32),
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
    tile = tile or _tiles.experts(matrix)
    grouped = rows > 8
    if grouped:
        choose_kernel[(rows,)](logits, ids, weights, rows, E=experts, TOPK=top_k, **_tiles.launch(logits, 1))
        group_kernel[(experts,)](ids, h.pairs, h.counts, rows, TOPK=top_k, **_tiles.launch(logits, 1))
    expert_gate_up_kernel[(inner // 32, (experts if grouped else rows * top_k) + 1)](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits, shared, h.q.view(torch.int8), h.s, ids,
        weights, h.pairs, h.counts, rows, eps,
        E=experts, TOPK=top_k, INTER=inner, K=matrix.columns, U=matrix.groups, PARTS=a.ss.shape[1], FMT=matrix.code,
        R=1 if rows == 1 else 8, S=tile.steps, X=tile.warps, GROUPED=grouped,
        **_tiles.launch(logits, tile.warps, _tiles.family(logits).expert_registers),
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
) -> None:
    """x_out = x + routed + sigmoid(shared gate) * shared, and the next reader's int8 rows; see `expert_down_kernel`.

    Must follow `expert_gate_up` of the same rows, and that `route_and_shared`: `logits` and `x` are read while the
    launch in front still runs.

    Raises:
        ValueError: `top_k` is no power of two, or the shared expert's groups do not divide among as many warps.
    """
    rows, top_k = ids.shape
    experts = logits.shape[1] - 1
    width = x.shape[1]
    if top_k & (top_k - 1) or matrix.columns // 32 % top_k:
        raise ValueError(f"{top_k} warps do not divide an inner width of {matrix.columns} into whole groups")
    grouped = rows > 8
    if grouped:
        warps = _tiles.warps(width // 32, 8)
        expert_rows_kernel[(width // 32 // warps, experts)](
            matrix.words, matrix.high, matrix.scales, h.q, h.s, h.pairs, h.counts, h.y,
            INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, X=warps, **_tiles.launch(x, warps),
        )  # fmt: skip
    expert_down_kernel[(width // 32, rows)](
        matrix.words, matrix.high, matrix.scales, shared_down.words, shared_down.scales, h.q, h.s, ids, weights, logits,
        h.y, x, next_norm, x_out, u_out, a_out.q.view(torch.int8), a_out.s, a_out.ss, rows,
        E=experts, TOPK=top_k, INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, X=top_k,
        GROUPED=grouped,
        **_tiles.launch(x, top_k, _tiles.family(x).expert_registers if rows > 1 else None, leads=True),
    )  # fmt: skip
