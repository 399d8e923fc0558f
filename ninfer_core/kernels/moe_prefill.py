"""Triton prefill kernels of the sparse MLP: choice and sorting by expert on the device, grouped products, weighted sum.

Rows of a chunk are sorted by expert without the host: a first kernel chooses and counts, a second gives every (row,
expert) pair its place and lists the tiles. The grouped products take packed weights as the left operand of the matrix
unit, from registers, and tokens as the right one: a weight is unpacked once for all rows of its tile. Within an expert
the order of rows is not fixed; no result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _tiles_prefill as tiling
from ._dequant import silu
from ._dequant_prefill import multiply_add, tile_lanes, unit_operand
from ._order import KernelMatrix


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    logits, ids, weights, rank, counts, rows, stride,
    X: tl.constexpr, BX: tl.constexpr, A: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Programs of R rows: top `A` of X logits, softmax over them, place among the expert's.

    By the keys of the decode kernels (`_experts.expert_keys`): an expert's number takes the place of the last bits of
    its logit, so that no two are equal, one maximum finds it, and a row has the same experts on both paths.
    """
    t = tl.program_id(0) * R + tl.arange(0, R)
    e = tl.arange(0, BX)
    live = t < rows
    inside = live[:, None] & (e < X)[None, :]
    line = logits + t.to(tl.int64) * stride
    bits = tl.load(line[:, None] + e[None, :], mask=inside, other=0.0).to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -BX) | (BX - 1 - e)[None, :]
    key = tl.where((e < X)[None, :], key, -2147483648)
    top = tl.zeros([R], tl.float32)
    total = tl.zeros([R], tl.float32)
    shares = ()
    for s in tl.static_range(A):
        best = tl.max(key, 1)
        key = tl.where(key == best[:, None], -2147483648, key)
        at = BX - 1 - (best & (BX - 1))
        value = tl.load(line + at, mask=live, other=0.0)
        if s == 0:
            top = value
        share = tl.exp(value - top)
        total += share
        shares = shares + (share,)  # noqa: RUF005
        tl.store(ids + t * A + s, at, mask=live)
        tl.store(rank + t * A + s, tl.atomic_add(counts + at, 1, mask=live), mask=live)
    for s in tl.static_range(A):
        tl.store(weights + t * A + s, shares[s] / total, mask=live)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def place_kernel(
    ids, rank, counts, row_of, place, tile_e, tile_first, tile_end, pairs, tiles,
    X: tl.constexpr, BX: tl.constexpr, A: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Programs: places of BLOCK pairs; and the tile lists of the experts pid, pid + PROGRAMS, .."""
    pid = tl.program_id(0)
    e = tl.arange(0, BX)
    count = tl.load(counts + e, mask=e < X, other=0)
    number = (count + BT - 1) // BT
    pair = pid * BLOCK + tl.arange(0, BLOCK)
    live = pair < pairs
    mine = tl.load(ids + pair, mask=live, other=0)
    start = tl.cumsum(count, 0) - count
    at = tl.gather(start, mine, 0) + tl.load(rank + pair, mask=live, other=0)
    tl.store(place + pair, at, mask=live)
    tl.store(row_of + at, pair // A, mask=live)
    i = tl.arange(0, BLOCK)
    own = pid
    while own < X:
        first_row = tl.sum(tl.where(e < own, count, 0), 0)
        first_tile = tl.sum(tl.where(e < own, number, 0), 0)
        n = tl.sum(tl.where(e == own, count, 0), 0)
        j = 0
        while j * BT < n:
            tl.store(tile_e + first_tile + j, own)
            tl.store(tile_first + first_tile + j, first_row + j * BT)
            tl.store(tile_end + first_tile + j, first_row + n)
            j += 1
        own += PROGRAMS
    if pid == 0:
        used = tl.sum(number, 0)
        while used < tiles:
            tl.store(tile_e + used + i, -1, mask=used + i < tiles)
            used += BLOCK


@triton.jit
def gate_up_tile(
    w, wh, ws, x, row_of, h, e, f0, first, end,
    K: tl.constexpr, INTER: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Features f0 .. f0 + BF - 1 of the sorted rows first .. min(first + BT, end) - 1, all of expert `e`."""
    WIDTH: tl.constexpr = 32 if FMT == 8 else 64
    U: tl.constexpr = K // WIDTH
    t = first + tl.arange(0, BT)
    live = t < end
    row = tl.load(row_of + t, mask=live, other=0).to(tl.int64)
    line = tl.arange(0, BF)  # lines of gate, then of up
    part = line // (BF // 2)
    at = (e * (2 * INTER) + f0) // 16 + part * (INTER // 16) + (line % (BF // 2)) // 8
    wp, hp, sp = tile_lanes(w, wh, ws, at, U, FMT, BF)
    xp = x + row[:, None] * K + tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros([2 * BF, BT], tl.float32)
    for u in range(0, U):
        a = unit_operand(wp, hp, sp, u, BF // 8, FMT, True, PTX)
        acc = multiply_add(a, tl.trans(tl.load(xp + u * WIDTH)), acc, PTX)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BF, BT]), [1, 2, 0]))
    y = (silu(gate) * up).to(tl.bfloat16)
    y = tl.permute(tl.reshape(y, [BF // 32, 2, 4, 4, BT]), [0, 3, 2, 1, 4])  # half, byte, c, h
    y = tl.trans(tl.reshape(y, [BF, BT]))
    out = h + t.to(tl.int64)[:, None] * INTER + (f0 + tl.arange(0, BF))[None, :]
    tl.store(out, y, mask=live[:, None])


@triton.jit
def expert_gate_up_kernel(
    w, wh, ws, x, row_of, tile_e, tile_first, tile_end, h,
    K: tl.constexpr, INTER: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr, WIDTHS: tl.constexpr,
    FMT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (BF features, tile): h [pair, INTER] = silu(gate) * up of an expert's rows, columns in operand order.

    `x` [T, K] bf16 in operand order. Gate rows stand above up rows in the left operand, so that both meet in a thread.
    An expert's last tile takes the least of the WIDTHS widths BT, BT / 2, .. that hold its rows.
    """
    tile = tl.program_id(1)
    e = tl.load(tile_e + tile)
    first = tl.load(tile_first + tile)
    end = tl.load(tile_end + tile)
    f0 = tl.program_id(0) * BF
    rows = tl.where(e >= 0, tl.minimum(end - first, BT), 0)
    for s in tl.static_range(WIDTHS):
        less = 0 if s == WIDTHS - 1 else BT >> (s + 1)
        if (rows > less) & (rows <= BT >> s):
            gate_up_tile(w, wh, ws, x, row_of, h, e, f0, first, end, K, INTER, BF, BT >> s, FMT, PTX)


@triton.jit
def down_tile(
    w, wh, ws, h, y, e, n0, first, end,
    N: tl.constexpr, INTER: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Outputs n0 .. n0 + BN - 1 of the sorted rows first .. min(first + BT, end) - 1, all of expert `e`."""
    WIDTH: tl.constexpr = 32 if FMT == 8 else 64
    U: tl.constexpr = INTER // WIDTH
    t = first + tl.arange(0, BT)
    live = t < end
    row = tl.minimum(t, end - 1).to(tl.int64)
    at = (e * N + n0) // 16 + tl.arange(0, BN // 2) // 8
    wp, hp, sp = tile_lanes(w, wh, ws, at, U, FMT, BN // 2)
    xp = h + row[:, None] * INTER + tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros([BN, BT], tl.float32)
    for u in range(0, U):
        a = unit_operand(wp, hp, sp, u, BN // 16, FMT, True, PTX)
        acc = multiply_add(a, tl.trans(tl.load(xp + u * WIDTH)), acc, PTX)
    out = y + t.to(tl.int64)[:, None] * N + (n0 + tl.arange(0, BN))[None, :]
    tl.store(out, tl.trans(acc).to(tl.bfloat16), mask=live[:, None])


@triton.jit
def expert_down_kernel(
    w, wh, ws, h, tile_e, tile_first, tile_end, y,
    N: tl.constexpr, INTER: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, WIDTHS: tl.constexpr, PARTS: tl.constexpr,
    FMT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Programs (BN outputs, part of a tile): y [pair, N] bf16 = down of an expert's rows of `h`.

    A listed tile has PARTS parts of BT rows; the last one of an expert may be narrower, as above.
    """
    part = tl.program_id(1)
    tile = part // PARTS
    e = tl.load(tile_e + tile)
    first = tl.load(tile_first + tile) + part % PARTS * BT
    end = tl.load(tile_end + tile)
    n0 = tl.program_id(0) * BN
    rows = tl.where(e >= 0, tl.minimum(end - first, BT), 0)
    for s in tl.static_range(WIDTHS):
        less = 0 if s == WIDTHS - 1 else BT >> (s + 1)
        if (rows > less) & (rows <= BT >> s):
            down_tile(w, wh, ws, h, y, e, n0, first, end, N, INTER, BN, BT >> s, FMT, PTX)


@triton.jit
def combine_kernel(
    y, place, weights, shared, logits, x, norm, u, stride, eps,
    E: tl.constexpr, BE: tl.constexpr, A: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Programs (row): x += routed sum by falling weight + gated shared expert; `u` = normed row for what follows."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    inside = e < E
    total = tl.zeros([BE], tl.float32)
    for s in tl.static_range(A):
        at = tl.load(place + t * A + s).to(tl.int64)
        total += tl.load(weights + t * A + s) * tl.load(y + at * E + e, mask=inside, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-tl.load(logits + t * stride + X)))
    total += gate * tl.load(shared + t * E + e, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(x + t * E + e, mask=inside, other=0.0) + total
    tl.store(x + t * E + e, row, mask=inside)
    factor = 1.0 / tl.sqrt_rn(tl.sum(row * row, 0) / E + eps)
    gain = 1.0 + tl.load(norm + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(u + t * E + e, (row * factor * gain).to(u.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the rows of a chunk go: for T rows, A active of X experts.

    `ids`, `place` [T * A] int32 (place: the pair's row among the sorted ones), `weights` [T * A] fp32, `row_of` [T * A]
    int32 (token of a sorted row), tile lists `tile_e` (-1: none), `tile_first`, `tile_end` int32 of `tokens` rows each.
    """

    tokens: int
    ids: torch.Tensor
    weights: torch.Tensor
    rank: torch.Tensor
    place: torch.Tensor
    row_of: torch.Tensor
    tile_e: torch.Tensor
    tile_first: torch.Tensor
    tile_end: torch.Tensor

    @staticmethod
    def shapes(rows: int, experts: int, active: int, tokens: int) -> list[tuple[int, torch.dtype]]:
        """Length and type of every buffer for `rows` rows in tiles of `tokens`."""
        pairs = rows * active
        most = min(pairs, pairs // tokens + experts)
        lengths = [pairs] * 5 + [most] * 3
        return [(n, torch.float32 if i == 1 else torch.int32) for i, n in enumerate(lengths)]

    @staticmethod
    def empty(rows: int, experts: int, active: int, tokens: int, device: torch.device | str) -> Routing:
        """Buffers for `rows` rows in tiles of `tokens`."""
        found = Routing.shapes(rows, experts, active, tokens)
        return Routing(tokens, *(torch.empty(n, dtype=dtype, device=device) for n, dtype in found))


def slots(width: int, device: torch.device | str) -> torch.Tensor:
    """Column of operand order that holds each of `width` values: `_dequant_prefill.slot_of` as an index."""
    k = torch.arange(width, device=device)
    r = k % 64
    v = (r // 32) * 4 + r % 4
    return k - r + v * 8 + ((r % 16) // 4) * 2 + (r % 32) // 16


def route(logits: torch.Tensor, counts: torch.Tensor, routing: Routing, experts: int, active: int) -> None:
    """Choose experts and sort: `logits` [T, >= experts] fp32, `counts` [experts] int32 zeros (counted up)."""
    rows = logits.shape[0]
    block = triton.next_power_of_2(experts)
    options = {"num_warps": 4}
    choose_kernel[(triton.cdiv(rows, 8),)](
        logits, routing.ids, routing.weights, routing.rank, counts, rows, logits.stride(0),
        X=experts, BX=block, A=active, R=8, **options,
    )  # fmt: skip
    pairs = rows * active
    programs = triton.cdiv(pairs, 256)
    place_kernel[(programs,)](
        routing.ids, routing.rank, counts, routing.row_of, routing.place, routing.tile_e, routing.tile_first,
        routing.tile_end, pairs, routing.tile_e.shape[0],
        X=experts, BX=block, A=active, BT=routing.tokens, BLOCK=256, PROGRAMS=programs, **options,
    )  # fmt: skip


def expert_gate_up(
    weight: KernelMatrix, x: torch.Tensor, routing: Routing, h: torch.Tensor, tile: tiling.Grouped
) -> None:
    """`h` [T * A, I] bf16 := SwiGLU of the sorted rows of `x` [T, E] bf16; columns of both in operand order.

    The tiles of `routing` are of `tile.tokens` rows.
    """
    inner = h.shape[1]
    expert_gate_up_kernel[(inner // tile.outputs, routing.tile_e.shape[0])](
        weight.words, weight.high, weight.scales, x, routing.row_of, routing.tile_e, routing.tile_first,
        routing.tile_end, h,
        K=weight.columns, INTER=inner, BF=tile.outputs, BT=tile.tokens, WIDTHS=tile.widths,
        FMT=weight.code, **tiling.launch(x, tile.warps, tile.stages),
    )  # fmt: skip


def expert_down(weight: KernelMatrix, h: torch.Tensor, routing: Routing, y: torch.Tensor, tile: tiling.Grouped) -> None:
    """`y` [T * A, E] bf16 := down product of the sorted rows `h` (columns in operand order).

    The tiles of `routing` are of `tile.tokens` rows or a multiple.
    """
    width, parts = y.shape[1], routing.tokens // tile.tokens
    expert_down_kernel[(width // tile.outputs, parts * routing.tile_e.shape[0])](
        weight.words, weight.high, weight.scales, h, routing.tile_e, routing.tile_first, routing.tile_end, y,
        N=width, INTER=weight.columns, BN=tile.outputs, BT=tile.tokens, WIDTHS=tile.widths, PARTS=parts,
        FMT=weight.code, **tiling.launch(h, tile.warps, tile.stages),
    )  # fmt: skip


def combine(
    y: torch.Tensor,
    routing: Routing,
    shared: torch.Tensor,
    logits: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    u: torch.Tensor,
    experts: int,
    eps: float,
) -> None:
    """x [T, E] fp32 += sum of `y` by router weight + sigma(logits[:, experts]) * shared; u := norm(x) (1 + norm).

    `u` [T, E] is bf16 or fp32.
    """
    rows, width = x.shape
    combine_kernel[(rows,)](
        y, routing.place, routing.weights, shared, logits, x, norm, u, logits.stride(0), eps,
        E=width, BE=triton.next_power_of_2(width), A=routing.ids.shape[0] // rows, X=experts, num_warps=4,
    )  # fmt: skip
