"""Triton decode kernels of the sparse MLP: router with shared gate/up, routed gate/up, routed and shared down.

Up to eight rows take three launches, and a program per (row, expert) pair: rows share an expert too rarely for lists to
pay, and where they do its weights come from the cache. Every program chooses for its own row (256 logits fit in a
warp's registers; a launch would cost more); the down kernel does so before the wait: the logits are two launches old.
More rows are listed by expert over the whole call (three launches more), so every chosen expert is read once. No
atomics; a row's sums have the same order on both ways.
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
    load_one,
    round_bytes,
    rows_max,
    rows_sum,
    store_one,
    sum_warps,
    wait_for_inputs,
)
from ._experts import (
    ITEM,
    LIST,
    element,
    expert_of,
    item_tile,
    pair_pointers,
    pair_sums,
    pair_tile,
    pair_units,
    row_columns,
    shared_rows,
    shares_of,
    slots_of,
    top_experts,
)
from ._order import Activation, KernelMatrix
from .linear_decode import fresh, linear_kernel, norm_gains, side_words


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
def list_kernel(ids, items, used, rows, E: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """One program: the call's work items, an expert with up to eight of its pairs each, by expert, then by row.

    An item is a line of `items` [., 16]: pairs (row * TOPK + slot), expert, how many pairs.
    """
    expert = tl.arange(0, BLOCK)
    row = tl.arange(0, 8)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.int32)
    first = 0
    while first < rows:
        total += tl.sum((slots_of(ids, first + row, rows, expert, TOPK) >= 0).to(tl.int32), 1)
        first += 8
    lines = (total + 7) // 8
    start = tl.cumsum(lines, 0) - lines
    tl.store(used, tl.sum(lines, 0))
    taken = tl.zeros([BLOCK], tl.int32)
    first = 0
    while first < rows:
        slot = slots_of(ids, first + row, rows, expert, TOPK)
        member = (slot >= 0).to(tl.int32)
        place = taken[:, None] + tl.cumsum(member, 1) - member
        at = (start[:, None] + place // 8) * ITEM + place % 8
        tl.store(items + at, (first + row)[None, :] * TOPK + slot, mask=slot >= 0)
        taken += tl.sum(member, 1)
        first += 8
    for j in tl.static_range(LIST // 8):
        line = items + (start + j) * ITEM
        tl.store(line + 8, expert, mask=lines > j)
        tl.store(line + 9, tl.minimum(total - 8 * j, 8), mask=lines > j)


@triton.jit(do_not_specialize=["rows"])
def pair_gate_up_kernel(
    w, wh, ws, xq, xs, ss, logits, shared_gate_up, hq, hs, ids, weights, rows, eps,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr,
    FMT: tl.constexpr, S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, pair): h[t, slot] = silu(gate_e x) * up_e x for 32 of the inner width, as int8.

    Rows of `hq` (bytes), `hs` [pair, INTER / 32, 32]: t * TOPK + slot, then rows * TOPK + t for the shared expert. The
    last index belongs to the programs that quantise the shared expert's rows and store ids and weights.
    """
    tile = tl.program_id(0)
    index = tl.program_id(1)
    if index == tl.num_programs(1) - 1:
        wait_for_inputs(PDL)
        if tile == 0:
            L: tl.constexpr = 8 if X < 8 else X
            t = tl.arange(0, L) % 8
            found, chosen = top_experts(logits, t, rows, FRESH1, E, TOPK, PTX)
            shares = shares_of(chosen, TOPK)
            for s in tl.static_range(TOPK):
                tl.store(ids + t * TOPK + s, found[s], mask=t < rows)
                tl.store(weights + t * TOPK + s, shares[s], mask=t < rows)
        shared_rows(shared_gate_up, hq, hs, tile, rows, TOPK, INTER)
    else:
        t = index // TOPK
        loaded, squares = row_columns(xq, xs, ss, t, EARLY1, K, U, PARTS, FMT, X, PTX)
        wait_for_inputs(PDL)
        expert = expert_of(logits, tl.arange(0, X) * 0 + t, rows, index % TOPK, FRESH1, E, PTX)[:, None]
        pair_tile(w, wh, ws, hq, hs, expert, tile, loaded, squares, index, eps, INTER, K, U, FMT, S, X, PTX)


@triton.jit(do_not_specialize=["rows"])
def item_gate_up_kernel(
    w, wh, ws, xq, xs, ss, shared_gate_up, hq, hs, items, used, rows, eps,
    TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, 1 + item): the same for the pairs of an item; index 0 quantises the shared expert's rows."""
    tile = tl.program_id(0)
    index = tl.program_id(1) - 1
    wait_for_inputs(PDL)
    line = items + tl.maximum(index, 0) * ITEM
    filled = tl.load(used)
    live = tl.load(line + 9)
    expert = tl.load(line + 8)
    pair = tl.load(line)
    if index < 0:
        shared_rows(shared_gate_up, hq, hs, tile, rows, TOPK, INTER)
    elif index < filled:
        if live == 1:
            loaded, squares = row_columns(xq, xs, ss, pair // TOPK, FRESH1, K, U, PARTS, FMT, X, PTX)
            pair_tile(w, wh, ws, hq, hs, expert, tile, loaded, squares, pair, eps, INTER, K, U, FMT, S, X, PTX)
        else:
            item_tile(
                w, wh, ws, xq, xs, ss, hq, hs, line, expert, live, tile, eps, TOPK, INTER, K, U, PARTS, FMT, S, X, PTX
            )


@triton.jit
def expert_rows_kernel(
    w, wh, ws, hq, hs, items, used, y,
    INTER: tl.constexpr, N: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs (32 X outputs, item): y[pair, n] of the item's pairs; a warp owns 32 outputs over all of K.

    The list is two launches old: it is read, and weights are asked for, before the wait.
    """
    G32: tl.constexpr = INTER // 32
    index = tl.program_id(1)
    if index < tl.load(used, cache_modifier=".cg"):
        lane = tl.arange(0, 32)[None, :]
        warp = tl.arange(0, X)[:, None]
        group = tl.program_id(0) * X + warp
        line = items + index * ITEM
        expert = tl.load(line + 8, cache_modifier=".cg")
        live = tl.load(line + 9, cache_modifier=".cg")
        column = lane % 4 * 2 + warp * 0
        even = load_one(line + tl.minimum(column, live - 1), EARLY1, PTX)
        odd = load_one(line + tl.minimum(column + 1, live - 1), EARLY1, PTX)
        own = load_one(line + tl.minimum(lane // 4 + warp * 0, live - 1), EARLY1, PTX)
        units = pair_units(w, wh, ws, expert * (N // 16) + group * 2, 0, lane, U, U, 1, FMT, PTX)
        wait_for_inputs(PDL)
        q, low, top = pair_pointers(hq, hs, 0, lane, own, even, odd, G32, FMT)
        acc = pair_sums(fresh(2, X), units, q, low, top, U, 1, X, FMT, FRESH1, 8, PTX)
        for r in tl.static_range(2):
            for h in tl.static_range(2):
                n = group * 32 + r * 16 + h * 8 + lane // 4
                store_one(y + even * N + n, acc[r][2 * h], column < live, PTX)
                store_one(y + odd * N + n, acc[r][2 * h + 1], column + 1 < live, PTX)
    else:
        wait_for_inputs(PDL)


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
        share = load_one(weights + pair, EARLY1, PTX)
        wait_for_inputs(PDL)
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
        acc = pair_sums(fresh(2, X), units, q, low, top, U, 1, X, FMT, FRESH1, 1, PTX)
        parts = (acc[0][0], acc[0][2], acc[1][0], acc[1][2])
    own = rows * TOPK + t + warp * 0 + lane * 0
    q, low, top = pair_pointers(hq, hs, warp, lane, own, own, own, G32, 8)
    acc = pair_sums(fresh(2, X), shared_units, q, low, top, G32 // X, X, X, 8, FRESH1, 1, PTX)
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
        R=_tiles.window(rows), **_tiles.launch(logits, tile.warps),
    )  # fmt: skip


def most_items(rows: int, top_k: int, experts: int) -> int:
    """Most work items of a call: every chosen expert one, and one more for each eight further pairs of it."""
    chosen = min(experts, rows * top_k)
    return chosen + (rows * top_k - chosen) // 8


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Int8 inner rows of all (row, slot) pairs, then of the shared expert: `q` [P, G, 8] int32, `s` [P, G] fp32.

    For calls of more than eight rows also `items` [M, 16] and `used` [1] int32, the work items of `list_kernel`, and
    `y` [T * top_k, E] fp32, the pairs' results; otherwise these are empty.
    """

    q: torch.Tensor
    s: torch.Tensor
    items: torch.Tensor
    used: torch.Tensor
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
            torch.zeros(most_items(rows, top_k, experts) if grouped else 0, ITEM.value, **i32),
            torch.zeros(1 if grouped else 0, **i32),
            torch.empty(rows * top_k if grouped else 0, width, **f32),
        )


def choose(logits: torch.Tensor, h: ExpertRows, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """The chosen experts of more than eight rows, their weights, and the call's work items; see `list_kernel`."""
    rows, top_k = ids.shape
    experts = logits.shape[1] - 1
    choose_kernel[(rows,)](logits, ids, weights, rows, E=experts, TOPK=top_k, **_tiles.launch(logits, 1))
    list_kernel[(1,)](
        ids, h.items, h.used, rows,
        E=experts, TOPK=top_k, BLOCK=triton.next_power_of_2(experts), **_tiles.launch(logits, 8),
    )  # fmt: skip


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

    Must follow `route_and_shared` of the same rows: up to eight rows of `a` are read while that still runs.
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
    shape = {
        "TOPK": top_k, "INTER": inner, "K": matrix.columns, "U": matrix.groups, "PARTS": a.ss.shape[1],
        "FMT": matrix.code, "S": tile.steps, "X": tile.warps,
    }  # fmt: skip
    options = _tiles.launch(logits, tile.warps, _tiles.family(logits).expert_registers)
    hq = h.q.view(torch.int8)
    if rows <= 8:
        pair_gate_up_kernel[(inner // 32, rows * top_k + 1)](
            matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits, shared, hq, h.s, ids, weights, rows, eps,
            E=experts, **shape, **options,
        )  # fmt: skip
        return
    choose(logits, h, ids, weights)
    item_gate_up_kernel[(inner // 32, 1 + most_items(rows, top_k, experts))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, shared, hq, h.s, h.items, h.used, rows, eps,
        **shape, **options,
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
        expert_rows_kernel[(width // 32 // warps, most_items(rows, top_k, experts))](
            matrix.words, matrix.high, matrix.scales, h.q, h.s, h.items, h.used, h.y,
            INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, X=warps,
            **_tiles.launch(x, warps, _tiles.family(x).expert_registers),
        )  # fmt: skip
    expert_down_kernel[(width // 32, rows)](
        matrix.words, matrix.high, matrix.scales, shared_down.words, shared_down.scales, h.q, h.s, ids, weights, logits,
        h.y, x, next_norm, x_out, u_out, a_out.q.view(torch.int8), a_out.s, a_out.ss, rows,
        E=experts, TOPK=top_k, INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, X=top_k,
        GROUPED=grouped,
        **_tiles.launch(x, top_k, _tiles.family(x).expert_registers if rows > 1 else None, leads=True),
    )  # fmt: skip
