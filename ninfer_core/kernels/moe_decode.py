"""Triton decode kernels of the sparse MLP: router with shared gate/up, routed gate/up, routed and shared down.

Up to eight rows take three launches, and a program per (row, expert) pair: rows share an expert too rarely for lists to
pay, and where they do its weights come from the cache. Every gate/up program chooses for its own row (256 logits fit in
a warp's registers; a launch would cost more), and with one or two rows so does the down kernel, before the wait: the
logits are two launches old. More rows are listed by expert, see `moe_listed_decode`. No atomics; sums of a row have the
same order on all ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles
from ._ahead import ask_matrix, asks
from ._dequant import (
    EARLY1,
    FRESH1,
    load_one,
    sum_warps,
    wait_for_inputs,
)
from ._experts import (
    ITEM,
    LIST,
    ask_inner_units,
    expert_of,
    expert_of_slot,
    finish_row,
    gathered_pointers,
    inner_columns,
    inner_sums,
    inner_units,
    of_slot,
    outer_sums,
    row_columns,
    row_squares,
    shared_rows,
    shares_of,
    store_choice,
    store_pair,
    tile_sums,
    top_experts,
)
from ._order import Activation, KernelMatrix
from ._room import room, room_of
from .linear_decode import fresh, linear_kernel, norm_gains, side_programs, side_words
from .moe_listed_decode import choose, expert_rows_kernel, item_gate_up_kernel, join_kernel, most_items

ROOM = room(32 * 1024)
"""Words that wait for the kernel in front: four units of two row tiles for each of eight warps."""


@triton.jit(do_not_specialize=["rows"])
def pair_gate_up_kernel(
    w, wh, ws, xq, xs, ss, logits, shared_gate_up, hq, hs, ids, weights, next_w, next_wh, next_ws, rows, eps,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr,
    FMT: tl.constexpr, S: tl.constexpr, X: tl.constexpr, LOADED: tl.constexpr, AHEAD: tl.constexpr, AFMT: tl.constexpr,
    APART: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, 1 + pair): h[t, slot] = silu(gate_e x) * up_e x for 32 of the inner width, as int8.

    Rows of `hq` (bytes), `hs` [pair, INTER / 32, 32]: t * TOPK + slot, then rows * TOPK + t for the shared expert. The
    first index belongs to the programs that quantise the shared expert's rows and store ids and weights, which take
    longest. `LOADED`: the row is read before the wait; with many programs registers for more of them are worth more.
    `AHEAD`: see `_ahead.py`; memory is idle from a program's products until the next launch knows its experts.
    """
    tile = tl.program_id(0)
    index = tl.program_id(1) - 1
    if index < 0:
        wait_for_inputs(PDL)
        if tile == 0:
            L: tl.constexpr = 8 if X < 8 else X
            t = tl.arange(0, L) % 8
            found, chosen = top_experts(logits, t, rows, FRESH1, E, TOPK, PTX)
            store_choice(ids, weights, found, shares_of(chosen, TOPK), t, t < rows, TOPK, PTX)
        shared_rows(shared_gate_up, hq, hs, tile, rows, TOPK, INTER)
    else:
        t = index // TOPK
        lane = tl.arange(0, 32)
        q, s = gathered_pointers(
            xq, xs, tl.arange(0, X)[:, None], lane[None, :], t, (t + lane * 0)[None, :], K // 32, FMT
        )
        loaded = ()
        if LOADED:
            squares = row_squares(ss, t + lane * 0, PARTS, EARLY1, PTX)
            loaded = row_columns(q, s, 0, U // X, FMT, X, EARLY1, PTX)
            wait_for_inputs(PDL)
        else:
            wait_for_inputs(PDL)
            squares = row_squares(ss, t + lane * 0, PARTS, FRESH1, PTX)
        expert = expert_of(logits, tl.arange(0, X) * 0 + t, rows, index % TOPK, FRESH1, E, PTX)[:, None]
        acc = tile_sums(w, wh, ws, expert, tile, loaded, q, s, INTER, U, FMT, S, X, PTX)
        if AHEAD:  # this program's share of what `expert_down_kernel` reads of the expert
            SHARE: tl.constexpr = AHEAD // E // (INTER // 32)
            first = expert * (AHEAD // E) + tile * SHARE
            place = tl.arange(0, X)[:, None] * 32 + lane[None, :]
            high = next_wh + first * (64 if AFMT == 6 else 32)
            ask_matrix(next_w + first * 128, high, next_ws + first * 8, place, X * 32, SHARE, AFMT, APART, PTX)
        store_pair(acc, hq, hs, squares, index, tile, eps, INTER, K)


@triton.jit(do_not_specialize=["rows"])
def expert_down_kernel(
    w, wh, ws, sw, sws, hq, hs, ids, weights, logits, x, norm, x_out, u_out, q_out, s_out, ss_out, rows,
    E: tl.constexpr, TOPK: tl.constexpr, INTER: tl.constexpr, N: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr,
    HELD: tl.constexpr, S: tl.constexpr, X: tl.constexpr, CHOOSES: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 outputs, row): residual + sum_s weight_s down_e(s) h_s + sigmoid(gate) * shared.

    A warp owns a chosen expert (X = TOPK) and a share of the shared expert's K. With `CHOOSES` a program finds its
    row's experts and asks for their weights before the wait; more rows' programs start late and read what was chosen.
    The first `HELD` units are asked into the room: in registers all of them would leave no place beside another
    program.
    """
    G32: tl.constexpr = INTER // 32
    pid = tl.program_id(0)
    t = tl.program_id(1)
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    pair = t * TOPK + warp + lane * 0
    gains = norm_gains(norm, pid)
    n = pid * 32 + tl.arange(0, 32) // 4
    old = ()
    for i in tl.static_range(4):
        old = old + (load_one(x + t * N + n + i * 8, EARLY1, PTX),)  # noqa: RUF005
    gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * (E + 1) + E, cache_modifier=".cg")))
    shared_tile = pid * 2 + warp * 0
    own = rows * TOPK + t + warp * 0 + lane * 0
    at = room_of(ROOM, HELD > 0 and PTX, X) + warp * 512 + lane * 16
    shared_units = inner_units(sw, sw, sws, shared_tile, warp, lane, G32, G32 // X, X, 8, PTX)
    if CHOOSES:
        found, chosen = top_experts(logits, tl.arange(0, X) * 0 + t, rows, EARLY1, E, TOPK, PTX)
        own_expert = expert_of_slot(found, warp + lane * 0, TOPK)
    else:
        wait_for_inputs(PDL)
        own_expert = load_one(ids + pair, FRESH1, PTX)
        share = load_one(weights + pair, FRESH1, PTX)
    tile = own_expert * (N // 16) + pid * 2
    asked = ask_inner_units(at, w, wh, ws, tile, lane, U, HELD, FMT, X, PTX)
    units = inner_units(w, wh, ws, tile, HELD, lane, U, S, 1, FMT, PTX)
    if CHOOSES:
        share = of_slot(shares_of(chosen, TOPK), warp + lane * 0, TOPK)
        wait_for_inputs(PDL)
    shared_loaded = inner_columns(hq, hs, own, own, own, warp, lane, G32, G32 // X, X, 8, 1, PTX)
    acc = outer_sums(
        fresh(2, X), at, asked, units, w, wh, ws, tile, hq, hs, pair, pair, lane, G32, U, HELD, S, X, FMT, PTX
    )
    parts = inner_sums(fresh(2, X), shared_units, shared_loaded, G32 // X, X, 8, 1, PTX)
    routed, shared = sum_warps(
        (
            (acc[0][0] * share, acc[0][2] * share, acc[1][0] * share, acc[1][2] * share),
            (parts[0][0], parts[0][2], parts[1][0], parts[1][2]),
        )
    )
    finish_row(routed, shared, gate, gains, old, x_out, u_out, q_out, s_out, ss_out, t, pid, N)


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

    One launch, by programs of their own: see `linear_kernel`.
    """
    rows = logits.shape[0]
    tile = tile or _tiles.router(shared_gate_up)
    blocks = _tiles.router_blocks(logits, rows)
    sides, each = side_programs(router, tile, rows, blocks)
    linear_kernel[(triton.cdiv(rows, 8 * blocks), shared_gate_up.rows // (16 * tile.tiles) + sides)](
        shared_gate_up.words, shared_gate_up.high, shared_gate_up.scales, a.q, a.s, a.ss, shared_out, u,
        side_words(router), logits, rows, router.shape[0], eps,
        N=shared_gate_up.rows, U=shared_gate_up.groups, K=shared_gate_up.columns, PARTS=a.ss.shape[1], HEADS=False,
        ROWNORM=True, SIDE=each, FMT=shared_gate_up.code, TILES=tile.tiles, S=tile.steps, X=tile.warps,
        NB=blocks, R=_tiles.window(rows),
        **_tiles.launch(logits, tile.warps),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Int8 inner rows of all (row, slot) pairs, then of the shared expert: `q` [P, G, 8] int32, `s` [P, G] fp32.

    The words of a row are in the order of `_experts.inner_byte`. For calls of more than eight rows also `items` [M, 8]
    and `used` [1] int32, the work items of `list_kernel`, and `y` [P, E] fp32, the results; otherwise these are empty.
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
            ValueError: more than eight rows without the number of experts and the hidden width, or more than 64; or
                an inner width that is not a multiple of 64.
        """
        if inner % 64:
            raise ValueError(f"the inner width is {inner}; expert rows are stored by 64 values")
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
            torch.zeros(most_items(rows, top_k, experts) + 1 if grouped else 0, ITEM.value, **i32),
            torch.zeros(1 if grouped else 0, **i32),
            torch.empty(count if grouped else 0, width, **f32),
        )

    def words(self) -> torch.Tensor:
        """The int8 rows in their own order: int32 [P, G, 8]."""
        pairs, groups, _ = self.q.shape
        return self.q.view(pairs, groups // 2, 4, 2, 2).permute(0, 1, 3, 4, 2).reshape(pairs, groups, 8)


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
    ahead: KernelMatrix | None = None,
) -> None:
    """Int8 rows silu(gate) * up of all chosen (row, expert) pairs and of the shared expert into `h`.

    Must follow `route_and_shared` of the same rows: up to eight rows of `a` are read while that still runs.
    Shapes: logits [T, E + 1], shared [T, 2 * inner], ids and weights [T, top_k] (written). `ahead`: the down matrices,
    of which a call of two to four rows asks for those of its experts.

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
    bounds = _tiles.family(logits).expert_registers
    if rows > 1:
        shape["S"] = _tiles.expert_steps(matrix, tile.warps, rows)
    hq = h.q.view(torch.int8)
    if rows <= 8:
        planes, asked = asks(ahead if 1 < rows <= 4 else None, a.q)
        pair_gate_up_kernel[(inner // 32, rows * top_k + 1)](
            matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, logits, shared, hq, h.s, ids, weights, *planes,
            rows, eps, **asked, E=experts, LOADED=rows == 1, **shape,
            **_tiles.launch(logits, tile.warps, bounds.up_row if rows == 1 else bounds.up_pairs),
        )  # fmt: skip
        return
    choose(logits, h.items, h.used, ids, weights)
    item_gate_up_kernel[(inner // 32, 1 + most_items(rows, top_k, experts))](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, shared, hq, h.s, h.items, h.used, rows, eps,
        **shape, **_tiles.launch(logits, tile.warps, bounds.up_items),
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
    if top_k & (top_k - 1) or matrix.columns // 32 % top_k or width // 32 % top_k:
        raise ValueError(f"{top_k} warps do not divide {matrix.columns} by {width} weights into whole groups of 32")
    grouped = rows > 8
    chooses = rows <= 2
    bounds = _tiles.family(x).expert_registers
    held = 0 if grouped else _tiles.expert_held(matrix, top_k)
    some = matrix.groups - held if chooses else _tiles.down_steps(matrix, held)
    if grouped:
        expert_rows_kernel[(width // 32 // top_k, top_k + most_items(rows, top_k, experts))](
            matrix.words, matrix.high, matrix.scales, shared_down.words, shared_down.scales, h.q, h.s, h.items, h.used,
            h.y, rows,
            TOPK=top_k, INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, S=some, X=top_k,
            **_tiles.launch(x, top_k, bounds.down_items),
        )  # fmt: skip
        join_kernel[(width // 32, rows)](
            weights, logits, h.y, x, next_norm, x_out, u_out, a_out.q.view(torch.int8), a_out.s, a_out.ss, rows,
            E=experts, TOPK=top_k, N=width, **_tiles.launch(x, 1, leads=True),
        )  # fmt: skip
        return
    expert_down_kernel[(width // 32, rows)](
        matrix.words, matrix.high, matrix.scales, shared_down.words, shared_down.scales, h.q, h.s, ids, weights, logits,
        x, next_norm, x_out, u_out, a_out.q.view(torch.int8), a_out.s, a_out.ss, rows,
        E=experts, TOPK=top_k, INTER=matrix.columns, N=width, U=matrix.groups, FMT=matrix.code, HELD=held, S=some,
        X=top_k, CHOOSES=chooses,
        **_tiles.launch(x, top_k, bounds.down_row if chooses else bounds.down_pairs, leads=True),
    )  # fmt: skip
