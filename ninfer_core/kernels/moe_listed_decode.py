"""Triton decode kernels of the sparse MLP for calls of more than eight rows: their pairs of row and expert in lists.

A list is by expert over the whole call, with up to four pairs an item, so that few experts are read twice; the shared
expert's weights are read once for all rows. Sums of a row have the same order as in `moe_decode`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import EARLY1, FRESH1, load_one, store_one, sum_warps, wait_for_inputs
from ._experts import (
    ITEM,
    LIST,
    PAIRS,
    finish_row,
    inner_columns,
    inner_sums,
    inner_units,
    item_tile,
    outer_sums,
    shared_rows,
    shares_of,
    store_choice,
    top_experts,
)
from .linear_decode import fresh, norm_gains


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    logits, ids, weights, rows, E: tl.constexpr, TOPK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr
):
    """Programs (row): ids and softmax weights [T, TOPK] of the chosen experts."""
    t = tl.program_id(0) + tl.arange(0, 1)
    wait_for_inputs(PDL)
    found, chosen = top_experts(logits, t, rows, FRESH1, E, TOPK, PTX)
    store_choice(ids, weights, found, shares_of(chosen, TOPK), t, t >= 0, TOPK, PTX)


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    ids, items, used, rows, TOPK: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr, MOST: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (`OWN` experts): the work items of a call of `MOST` rows at most, by expert, by row.

    An item is a line of `items` [., 8]: four pairs (row * TOPK + slot) of an expert, the last of fewer repeated, and
    the expert.
    """
    pair = tl.arange(0, MOST * TOPK)
    every = tl.arange(0, BLOCK)
    first = tl.program_id(0) * OWN
    own = first + tl.arange(0, OWN)
    wait_for_inputs(PDL)
    inside = pair < rows * TOPK
    chosen = tl.load(ids + pair, mask=inside, other=0)
    lines = (tl.histogram(chosen, BLOCK, mask=inside) + (PAIRS - 1)) // PAIRS
    before = tl.sum(tl.where(every < first, lines, 0), 0)
    tl.store(used, tl.sum(lines, 0), mask=first == 0)
    member = (chosen[None, :] == own[:, None]) & inside[None, :]
    count = tl.sum(member.to(tl.int32), 1)
    place = tl.cumsum(member.to(tl.int32), 1) - 1
    filled = (count + (PAIRS - 1)) // PAIRS
    start = before + tl.cumsum(filled, 0) - filled
    at = items + (start[:, None] + place // PAIRS) * ITEM + place % PAIRS
    last = member & (place == count[:, None] - 1)
    tl.store(at, pair[None, :], mask=member)
    for more in tl.static_range(1, PAIRS):
        tl.store(at + more, pair[None, :], mask=last & (place % PAIRS + more < PAIRS))
    line = tl.arange(0, MOST // PAIRS)[None, :]
    tl.store(items + (start[:, None] + line) * ITEM + PAIRS, own[:, None], mask=line < filled[:, None])


@triton.jit(do_not_specialize=["rows"])
def item_gate_up_kernel(
    w, wh, ws, xq, xs, ss, shared_gate_up, hq, hs, items, used, rows, eps,
    TOPK: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, U: tl.constexpr, PARTS: tl.constexpr, FMT: tl.constexpr,
    S: tl.constexpr, X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (tile, 1 + item): `pair_gate_up_kernel` for an item's pairs; index 0 does the shared expert's rows."""
    tile = tl.program_id(0)
    item = tl.program_id(1) - 1
    lane = tl.arange(0, 32)
    wait_for_inputs(PDL)
    filled = tl.load(used)
    if item < 0:
        shared_rows(shared_gate_up, hq, hs, tile, rows, TOPK, INTER)
    line = items + tl.maximum(item, 0) * ITEM
    expert = tl.load(line + PAIRS)
    pair = load_one(line + lane % PAIRS, FRESH1, PTX)
    own = load_one(line + lane // (32 // PAIRS), FRESH1, PTX)
    if (item >= 0) & (item < filled):
        item_tile(w, wh, ws, xq, xs, ss, hq, hs, expert, own, pair, tile, eps, TOPK, INTER, K, U, PARTS, FMT, S, X, PTX)


@triton.jit(do_not_specialize=["rows"])
def expert_rows_kernel(
    w, wh, ws, sw, sws, hq, hs, items, used, y, rows,
    TOPK: tl.constexpr, INTER: tl.constexpr, N: tl.constexpr, U: tl.constexpr, FMT: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (32 X outputs, X + items): y[pair, n]; the first X do the shared expert's rows, behind the pairs.

    A warp owns 32 outputs over all of K; of the shared expert its share of K, as in `expert_down_kernel`. The list is
    two launches old: it is read, and weights are asked for, before the wait.
    """
    G32: tl.constexpr = INTER // 32
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    item = tl.program_id(1) - X
    filled = tl.load(used, cache_modifier=".cg")
    if item < 0:
        shared_products(sw, sws, hq, hs, y, rows, tl.program_id(0) * X + item + X, TOPK, INTER, N, X, PTX, PDL)
    else:
        line = items + item * ITEM
        expert = tl.load(line + PAIRS, cache_modifier=".cg")
        pair = load_one(line + (lane % PAIRS + warp * 0), EARLY1, PTX)
        row = load_one(line + (lane // (32 // PAIRS) + warp * 0), EARLY1, PTX)
        group = tl.program_id(0) * X + warp
        if item < filled:
            tile = expert * (N // 16) + group * 2
            units = inner_units(w, wh, ws, tile, 0, lane, U, S, 1, FMT, PTX)
            wait_for_inputs(PDL)
            acc = outer_sums(
                fresh(2, X), 0, (), units, w, wh, ws, tile, hq, hs, row, pair, lane, G32, U, 0, S, X, FMT, PTX
            )
            for r in tl.static_range(2):
                for h in tl.static_range(2):
                    n = group * 32 + r * 16 + h * 8 + lane // 4
                    store_one(y + pair * N + n, acc[r][2 * h], lane + warp >= 0, PTX)
        else:
            wait_for_inputs(PDL)


@triton.jit
def shared_products(
    sw, sws, hq, hs, y, rows, group, TOPK: tl.constexpr, INTER: tl.constexpr, N: tl.constexpr, X: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """32 outputs of the shared expert for all rows, eight at a time: weights are read once, warps share K."""
    G32: tl.constexpr = INTER // 32
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    units = inner_units(sw, sw, sws, group * 2 + warp * 0, warp, lane, G32, G32 // X, X, 8, PTX)
    wait_for_inputs(PDL)
    first = 0
    while first < rows:
        t = first + lane % 4 * 2 + warp * 0
        row = rows * TOPK + tl.minimum(first + lane // 4 + warp * 0, rows - 1)
        even = rows * TOPK + tl.minimum(t, rows - 1)
        odd = rows * TOPK + tl.minimum(t + 1, rows - 1)
        loaded = inner_columns(hq, hs, row, even, odd, warp, lane, G32, G32 // X, X, 8, 8, PTX)
        acc = sum_warps(inner_sums(fresh(2, X), units, loaded, G32 // X, X, 8, 8, PTX))
        own = first + tl.arange(0, 32) % 4 * 2
        n = group * 32 + tl.arange(0, 32) // 4
        for r in tl.static_range(2):
            for i in tl.static_range(4):
                at = (rows * TOPK + own + i % 2) * N + n + (r * 16 + i // 2 * 8)
                tl.store(y + at, acc[r][i], mask=own + i % 2 < rows)
        first += 8


@triton.jit(do_not_specialize=["rows"])
def join_kernel(
    weights, logits, y, x, norm, x_out, u_out, q_out, s_out, ss_out, rows,
    E: tl.constexpr, TOPK: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (group of 32 outputs, row): `expert_down_kernel` with the products of `expert_rows_kernel`; one warp.

    Pairs are added up as the sum over that kernel's warps does it: halves first.
    """
    pid = tl.program_id(0)
    t = tl.program_id(1)
    lane = tl.arange(0, 32)
    gains = norm_gains(norm, pid)
    n = pid * 32 + lane // 4
    old = ()
    for i in tl.static_range(4):
        old = old + (load_one(x + t * N + n + i * 8, EARLY1, PTX),)  # noqa: RUF005
    shares = ()
    for s in tl.static_range(TOPK):
        shares = shares + (load_one(weights + t * TOPK + s + lane * 0, EARLY1, PTX),)  # noqa: RUF005
    gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * (E + 1) + E, cache_modifier=".cg")))
    wait_for_inputs(PDL)
    shared = ()
    terms = ()
    for i in tl.static_range(4):
        shared = shared + (load_one(y + (rows * TOPK + t) * N + n + i * 8, FRESH1, PTX),)  # noqa: RUF005
        for s in tl.static_range(TOPK):
            terms = terms + (load_one(y + (t * TOPK + s) * N + n + i * 8, FRESH1, PTX),)  # noqa: RUF005
    routed = ()
    for i in tl.static_range(4):
        products = ()
        for s in tl.static_range(TOPK):
            products = products + (terms[i * TOPK + s] * shares[s],)  # noqa: RUF005
        routed = routed + (sum_halves(products),)  # noqa: RUF005
    finish_row(routed, shared, gate, gains, old, x_out, u_out, q_out, s_out, ss_out, t, pid, N)


@triton.jit
def sum_halves(values):
    """Sum of 2, 4 or 8 values: the second half to the first, until one is left."""
    N: tl.constexpr = len(values)
    if N == 1:
        return values[0]
    else:
        half = ()
        for i in tl.static_range(N // 2):
            half = half + (values[i] + values[i + N // 2],)  # noqa: RUF005
        return sum_halves(half)


def most_items(rows: int, top_k: int, experts: int) -> int:
    """Most work items of a call: every chosen expert one, and one more for each four further pairs of it."""
    chosen = min(experts, rows * top_k)
    return chosen + (rows * top_k - chosen) // PAIRS.value


def choose(
    logits: torch.Tensor, items: torch.Tensor, used: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """The chosen experts of more than eight rows, their weights, and the call's work items; see `list_kernel`."""
    rows, top_k = ids.shape
    experts = logits.shape[1] - 1
    choose_kernel[(rows,)](logits, ids, weights, rows, E=experts, TOPK=top_k, **_tiles.launch(logits, 1))
    most = next(n for n in (16, 32, LIST.value) if n >= rows)
    list_kernel[(triton.cdiv(experts, 8),)](
        ids, items, used, rows,
        TOPK=top_k, BLOCK=triton.next_power_of_2(experts), OWN=8, MOST=most, **_tiles.launch(logits, 8),
    )  # fmt: skip
