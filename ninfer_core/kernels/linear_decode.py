"""Triton decode projections: packed weights times int8 activation rows, 1 to 64 rows; residual_decode.py adds them up.

One program owns some output rows over all of K and a block of eight activation rows, so each result is one fixed sum:
its bits depend neither on the other rows of the call nor on their number. The weights of the first units are requested
before the wait for the kernel in front.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import (
    FRESH1,
    FRESH2,
    FRESH4,
    WEIGHT4,
    add_unit,
    lane_factors,
    lane_squares,
    load_four,
    load_one,
    load_two,
    load_unit,
    store_one,
    sum_warps,
    unit_pointers,
    unpack_scales,
    wait_for_inputs,
    zero_registers,
)
from ._order import Activation, KernelMatrix
from ._planes import GROUP_WORDS, activation_pointers, load_activation


@triton.jit
def unit_after(i: tl.constexpr, X: tl.constexpr, RUN: tl.constexpr):
    """How many units behind its first a warp's unit of step `i` lies: runs of `RUN` units, warp by warp."""
    return (i // RUN) * X * RUN + i % RUN


@triton.jit
def load_units(
    w, wh, ws, TILES: tl.constexpr, U: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, X: tl.constexpr,
    RUN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """`S` steps of `TILES` row tiles from pointers [X, 32]: a flat tuple of units, tile by tile within a step."""
    units = ()
    for i in tl.static_range(S):
        for r in tl.static_range(TILES):
            units = units + (load_unit(w, wh, ws, r * U + unit_after(i, X, RUN), FMT, PTX),)  # noqa: RUF005
    return units


@triton.jit
def add_units(
    acc, units, q, s, stride, TILES: tl.constexpr, NB: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr,
    X: tl.constexpr, RUN: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Add `S` steps to the accumulators, `NB` blocks for each row tile; `q`, `s` are pointers [X, 32] of block 0.

    `stride` are the groups of 32 between two blocks; a tuple index is tile * NB + block.
    """
    for i in tl.static_range(S):
        columns = ()
        for n in tl.static_range(NB):
            columns = columns + (  # noqa: RUF005
                load_activation(
                    q + stride * (n * GROUP_WORDS), s + stride * (n * 8), unit_after(i, X, RUN), FMT, R, PTX, FINE
                ),
            )
        grown = ()
        for r in tl.static_range(TILES):
            unit = units[i * TILES + r]
            low, top = unpack_scales(unit[2], FMT, FINE)
            for n in tl.static_range(NB):
                b, scales = columns[n]
                grown = grown + (  # noqa: RUF005
                    add_unit(acc[r * NB + n], unit[0], unit[1], low, top, b, scales, X, FMT, PTX, R, 0x4B400000, FINE),
                )
        acc = grown
    return acc


@triton.jit
def fold_heads(acc, part, ss, stride, head, lane, eps, TILES: tl.constexpr, NB: tl.constexpr, R: tl.constexpr,
               PTX: tl.constexpr):  # fmt: skip
    """`acc` plus `part` (sums over one head of 128) times the head's RMS factors of the two columns of a lane."""
    evens = ()
    odds = ()
    for n in tl.static_range(NB):
        at = stride * (n * 8) + head * 32 + (lane % 4) * 2
        even = tl.zeros_like(acc[0][0])
        odd = even
        for i in tl.static_range(4):
            pair = load_two(ss + at + 8 * i, FRESH2, PTX)
            even += pair[0]
            odd += pair[1]
        evens = evens + (tl.rsqrt(even / 128 + eps),)  # noqa: RUF005
        odds = odds + (tl.rsqrt(odd / 128 + eps) if R > 1 else odd,)  # noqa: RUF005
    grown = ()
    for r in tl.static_range(TILES):
        for n in tl.static_range(NB):
            total = acc[r * NB + n]
            head_sum = part[r * NB + n]
            grown = grown + ((  # noqa: RUF005
                tl.fma(head_sum[0], evens[n], total[0]),
                tl.fma(head_sum[1], odds[n], total[1]) if R > 1 else total[1],
                tl.fma(head_sum[2], evens[n], total[2]),
                tl.fma(head_sum[3], odds[n], total[3]) if R > 1 else total[3],
            ),)  # fmt: skip
    return grown


@triton.jit
def fresh(TILES: tl.constexpr, X: tl.constexpr):
    """Zero accumulators of `TILES` row tiles."""
    acc = ()
    for _r in tl.static_range(TILES):
        acc = acc + (zero_registers(X),)  # noqa: RUF005
    return acc


@triton.jit
def tile_products(
    w, wh, ws, tile, q, s, ss, stride, eps,
    TILES: tl.constexpr, NB: tl.constexpr, U: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, X: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
    SHARE: tl.constexpr = 0, ROLLING: tl.constexpr = False, FINE: tl.constexpr = False,
):  # fmt: skip
    """Sums over K of row tiles tile..tile+TILES-1 with `NB` activation blocks, `stride` groups of 32 apart.

    `R`: live rows of a single block, rounded up to 1, 4 or 8; 8 with several. `SHARE`: units of K from where the
    pointers stand, not all `U`; a warp's share need not divide into stages. `ROLLING`: of up to two stages, a step is
    asked for as soon as one is done. `FINE`: of both planes of the activations. Also a tuple of `lane_squares` per
    block, where `PARTS` is not 0.
    """
    # With a factor per head a warp takes whole heads: 128 of K are four units of 32 or two of 64.
    RUN: tl.constexpr = (4 if FMT == 8 else 2) if HEADS else 1
    EACH: tl.constexpr = (SHARE if SHARE else U) // X
    STAGES: tl.constexpr = EACH // S
    TAIL: tl.constexpr = EACH - STAGES * S  # steps that remain
    HIGH: tl.constexpr = 64 if FMT == 6 else 32
    HALVES: tl.constexpr = 1 if FMT == 8 else 2
    AHEAD: tl.constexpr = S * X  # units from one stage to the next
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    wp, hp, sp = unit_pointers(w, wh, ws, tile * U + warp * RUN, lane, FMT)
    qp, xp = activation_pointers(q, s, warp * RUN, lane, FMT, R)
    units = load_units(wp, hp, sp, TILES, U, S, FMT, X, RUN, PTX)
    wait_for_inputs(PDL)
    squares = ()
    if PARTS:
        for n in tl.static_range(NB):
            squares = squares + (lane_squares(ss + n * (PARTS * 8), PARTS, PTX),)  # noqa: RUF005
    acc = fresh(TILES * NB, X)
    if ROLLING and STAGES <= 2 and NB == 1 and not HEADS:
        acc = rolling(acc, units, wp, hp, sp, qp, xp, TILES, U, S, EACH, FMT, X, R, PTX, FINE)
    elif STAGES <= 2:
        for c in tl.static_range(STAGES):
            if c > 0:
                units = load_units(
                    wp + c * AHEAD * 128, hp + c * AHEAD * HIGH, sp + c * AHEAD * 8, TILES, U, S, FMT, X, RUN, PTX
                )
            acc = add_stage(
                acc, units, qp + c * AHEAD * HALVES * GROUP_WORDS, xp + c * AHEAD * HALVES * 8, ss, stride, c * S, lane,
                eps, TILES, NB, S, FMT, HEADS, X, RUN, R, PTX, FINE,
            )  # fmt: skip
        if TAIL:
            END: tl.constexpr = STAGES * AHEAD
            rest = load_units(wp + END * 128, hp + END * HIGH, sp + END * 8, TILES, U, TAIL, FMT, X, RUN, PTX)
            acc = add_stage(
                acc, rest, qp + END * HALVES * GROUP_WORDS, xp + END * HALVES * 8, ss, stride, STAGES * S, lane, eps,
                TILES, NB, TAIL, FMT, HEADS, X, RUN, R, PTX, FINE,
            )  # fmt: skip
    else:
        for c in range(STAGES - 1 if TAIL else STAGES):
            # The next stage is on its way while this one is multiplied; a last turn asks for its own again.
            step = tl.where(c + 1 < STAGES, AHEAD, 0)
            wp += step * 128
            hp += step * HIGH
            sp += step * 8
            following = load_units(wp, hp, sp, TILES, U, S, FMT, X, RUN, PTX)
            acc = add_stage(
                acc, units, qp, xp, ss, stride, c * S, lane, eps, TILES, NB, S, FMT, HEADS, X, RUN, R, PTX, FINE
            )
            qp += AHEAD * HALVES * GROUP_WORDS
            xp += AHEAD * HALVES * 8
            units = following
        if TAIL:
            rest = load_units(
                wp + AHEAD * 128, hp + AHEAD * HIGH, sp + AHEAD * 8, TILES, U, TAIL, FMT, X, RUN, PTX
            )  # fmt: skip
            acc = add_stage(
                acc, units, qp, xp, ss, stride, (STAGES - 1) * S, lane, eps, TILES, NB, S, FMT, HEADS, X, RUN, R, PTX,
                FINE,
            )  # fmt: skip
            acc = add_stage(
                acc, rest, qp + AHEAD * HALVES * GROUP_WORDS, xp + AHEAD * HALVES * 8, ss, stride, STAGES * S, lane,
                eps, TILES, NB, TAIL, FMT, HEADS, X, RUN, R, PTX, FINE,
            )  # fmt: skip
    return acc, squares


@triton.jit
def rolling(
    acc, units, wp, hp, sp, qp, xp, TILES: tl.constexpr, U: tl.constexpr, S: tl.constexpr, EACH: tl.constexpr,
    FMT: tl.constexpr, X: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Add `EACH` steps, `S` of which are under way at any time, and the activations of two; `units`: the first `S`."""
    columns = ()
    for i in tl.static_range(min(2, EACH)):
        columns = columns + (load_activation(qp, xp, i * X, FMT, R, PTX, FINE),)  # noqa: RUF005
    for i in tl.static_range(EACH):
        b, scales = columns[i]
        if i + 2 < EACH:
            columns = columns + (load_activation(qp, xp, (i + 2) * X, FMT, R, PTX, FINE),)  # noqa: RUF005
        grown = ()
        for r in tl.static_range(TILES):
            unit = units[i * TILES + r]
            low, top = unpack_scales(unit[2], FMT, FINE)
            grown = grown + (  # noqa: RUF005
                add_unit(acc[r], unit[0], unit[1], low, top, b, scales, X, FMT, PTX, R, 0x4B400000, FINE),
            )
        acc = grown
        if i + S < EACH:
            for r in tl.static_range(TILES):
                units = units + (load_unit(wp, hp, sp, r * U + (i + S) * X, FMT, PTX),)  # noqa: RUF005
    return acc


@triton.jit
def part_products(
    w, wh, ws, tile, q, s, ss, part, stride, eps,
    TILES: tl.constexpr, NB: tl.constexpr, U: tl.constexpr, S: tl.constexpr, FMT: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, X: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
    FINE: tl.constexpr = False,
):  # fmt: skip
    """`tile_products` over part `part` of `PARTS` of K."""
    SHARE: tl.constexpr = U // PARTS
    GROUPS: tl.constexpr = SHARE * (1 if FMT == 8 else 2)  # of 32, four to a head
    acc, _squares = tile_products(
        w + part * (SHARE * 128), wh + part * (SHARE * (64 if FMT == 6 else 32)), ws + part * (SHARE * 8), tile,
        q + part * (GROUPS * GROUP_WORDS), s + part * (GROUPS * 8), ss + part * (GROUPS * 8), stride, eps,
        TILES, NB, U, S, FMT, HEADS, 0, X, R, PTX, PDL, SHARE, False, FINE,
    )  # fmt: skip
    return acc


@triton.jit
def add_stage(
    acc, units, q, s, ss, stride, step, lane, eps, TILES: tl.constexpr, NB: tl.constexpr, S: tl.constexpr,
    FMT: tl.constexpr, HEADS: tl.constexpr, X: tl.constexpr, RUN: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """One stage of S steps; with HEADS every run is summed alone and folded with its factor."""
    if HEADS:
        HALVES: tl.constexpr = 1 if FMT == 8 else 2
        for h in tl.static_range(S // RUN):
            run = ()
            for i in tl.static_range(RUN * TILES):
                run = run + (units[h * RUN * TILES + i],)  # noqa: RUF005
            after = h * RUN * X * HALVES
            part = add_units(
                fresh(TILES * NB, X), run, q + after * GROUP_WORDS, s + after * 8, stride, TILES, NB, RUN, FMT, X, RUN,
                R, PTX, FINE,
            )  # fmt: skip
            head = (step // RUN + h) * X + tl.arange(0, X)[:, None]
            acc = fold_heads(acc, part, ss, stride, head, lane, eps, TILES, NB, R, PTX)
        return acc
    else:
        return add_units(acc, units, q, s, stride, TILES, NB, S, FMT, X, RUN, R, PTX, FINE)


@triton.jit
def of_block(acc, n: tl.constexpr, TILES: tl.constexpr, NB: tl.constexpr):
    """The accumulators of block `n`: a tuple of one per row tile."""
    found = ()
    for r in tl.static_range(TILES):
        found = found + (acc[r * NB + n],)  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["rows", "side_rows"])
def linear_kernel(
    w, wh, ws, xq, xs, ss, out, u, side_w, side_out, rows, side_rows, eps,
    N: tl.constexpr, U: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr,
    ROWNORM: tl.constexpr, SIDE: tl.constexpr, FMT: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr,
    X: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
    FINE: tl.constexpr = False,
):  # fmt: skip
    """out[t, n] = factor(t) * sum_k w[n, k] x[t, k]; with SIDE also fp32 `side_out` = bf16 `side_w` times `u` rows.

    Programs (blocks, row tiles): those that share weights start together, and memory is read once for all.

    `SIDE`: rows of `side_w` a warp, 0 for none. Their programs come first in calls of five rows and more, where they
    take as long as the others; behind them with fewer.
    """
    G32: tl.constexpr = K // 32
    main: tl.constexpr = N // (16 * TILES)
    first = tl.program_id(0) * NB
    pid = tl.program_id(1)
    if SIDE and R == 8:
        pid -= tl.num_programs(1) - main
    if (pid >= 0) & (pid < main):
        q = xq + first * (G32 * GROUP_WORDS)
        parts = ss + first * (PARTS * 8)
        acc, squares = tile_products(
            w, wh, ws, pid * TILES, q, xs + first * (G32 * 8), parts, G32, eps, TILES, NB, U, S, FMT, HEADS,
            PARTS if ROWNORM else 0, X, R, PTX, PDL, 0, False, FINE,
        )  # fmt: skip
        lane = tl.arange(0, 32)
        for b in tl.static_range(NB):
            y = sum_warps(of_block(acc, b, TILES, NB), R)
            factor = (1.0, 1.0)
            if ROWNORM:
                factor = lane_factors(squares[b], eps, K)
            for e in tl.static_range(1 if R == 1 else 2):
                t = (first + b) * 8 + (lane % 4) * 2 + e
                live = t < rows
                for r in tl.static_range(TILES):
                    for h in tl.static_range(2):
                        n = (pid * TILES + r) * 16 + h * 8 + lane // 4
                        value = y[r][h * 2 + e] * factor[e]
                        tl.store(out + t * N + n, value.to(out.dtype.element_ty), mask=live)
    elif SIDE:
        EACH: tl.constexpr = (2 if SIDE == 1 else 4) if R == 8 else R
        SHARES: tl.constexpr = NB * 8 // EACH if R == 8 else 1
        index = tl.program_id(1) if R == 8 else pid - main
        t0 = first * 8 + index % SHARES * EACH
        side_products(
            u, side_w, side_out, ss, index // SHARES * (X * SIDE), t0, rows, side_rows, eps, K, PARTS, X, SIDE, EACH,
            PTX, PDL,
        )  # fmt: skip


@triton.jit
def side_products(
    u, side_w, side_out, ss, first, t0, rows, side_rows, eps,
    K: tl.constexpr, PARTS: tl.constexpr, X: tl.constexpr, M: tl.constexpr, R: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`M` bf16 rows a warp (router, decay and update-rate inputs) times `R` fp32 rows from `t0`: logits stay precise.

    `side_w` are pairs of bf16 as int32. Rows from `rows` on are not stored. All loads come before the first sum over
    lanes: behind a store they would wait for it.
    """
    lane = tl.arange(0, 32)[None, :]
    warp = tl.arange(0, X)[:, None]
    none = tl.zeros([X, 32], tl.float32)
    words = ()
    for m in tl.static_range(M):
        weight = side_w + tl.minimum(first + m * X + warp, side_rows - 1) * (K // 2) + lane * 4
        for c in tl.static_range(K // 256):
            words = words + (load_four(weight + c * 128, WEIGHT4, PTX),)  # noqa: RUF005
    wait_for_inputs(PDL)
    squares = ()
    totals = ()
    for r in tl.static_range(R):
        t = tl.minimum(t0 + r, rows - 1)
        square = none
        for i in tl.static_range((PARTS + 31) // 32):
            part = i * 32 + lane + warp * 0
            at = ss + t // 8 * (PARTS * 8) + t % 8
            value = load_one(at + tl.minimum(part, PARTS - 1) * 8, FRESH1, PTX)
            square += tl.where(part < PARTS, value, 0.0)
        squares = squares + (square,)  # noqa: RUF005
        for _m in tl.static_range(M):
            totals = totals + (none,)  # noqa: RUF005
    for c in tl.static_range(K // 256):
        values = ()
        for r in tl.static_range(R):
            x = u + tl.minimum(t0 + r, rows - 1) * K + c * 256 + lane * 8 + warp * 0
            values = values + (load_four(x, FRESH4, PTX) + load_four(x + 4, FRESH4, PTX),)  # noqa: RUF005
        grown = ()
        for r in tl.static_range(R):
            for m in tl.static_range(M):
                total = totals[r * M + m]
                for i in tl.static_range(4):
                    pair = words[m * (K // 256) + c][i]
                    total = tl.fma((pair << 16).to(tl.float32, bitcast=True), values[r][2 * i], total)
                    total = tl.fma((pair & -65536).to(tl.float32, bitcast=True), values[r][2 * i + 1], total)
                grown = grown + (total,)  # noqa: RUF005
        totals = grown
    for r in tl.static_range(R):
        factor = tl.rsqrt(tl.sum(squares[r], 1) / K + eps)
        for m in tl.static_range(M):
            row = first + m * X + warp
            y = (tl.sum(totals[r * M + m], 1) * factor)[:, None] + none
            live = (row < side_rows) & (t0 + r < rows) & (lane == 0)
            store_one(side_out + (t0 + r) * side_rows + row + lane * 0, y, live, PTX)


@triton.jit
def norm_gains(norm, group):
    """1 + the norm's weight of a group's 32 values in lane form: four [32]."""
    gains = ()
    for i in tl.static_range(4):
        n = group * 32 + i * 8 + tl.arange(0, 32) // 4
        gains = gains + (1.0 + tl.load(norm + n).to(tl.float32),)  # noqa: RUF005
    return gains


def side_words(side: torch.Tensor) -> torch.Tensor:
    """Rows of bf16 [M, K] as pairs, int32 [M, K / 2].

    Raises:
        ValueError: K is not a multiple of 256, what a warp reads at once.
    """
    if side.shape[1] % 256:
        raise ValueError(f"side rows are {side.shape[1]} wide; the kernels take multiples of 256")
    return side.view(torch.int32)


def side_programs(side: torch.Tensor | None, tile: _tiles.Tile, rows: int, blocks: int) -> tuple[int, int]:
    """Programs of `side_products` beside the others of the same `blocks` blocks; and `SIDE`.

    Of eight rows a program takes two, of more four.
    """
    if side is None:
        return 0, 0
    each = _tiles.side(side, rows)
    shares = blocks * (4 if each == 1 else 2) if _tiles.window(rows) == 8 else 1
    return triton.cdiv(side.shape[0], tile.warps * each) * shares, each


def project(
    matrix: KernelMatrix,
    a: Activation,
    out: torch.Tensor,
    *,
    eps: float = 1e-6,
    norm: str = "row",
    u: torch.Tensor | None = None,
    side: torch.Tensor | None = None,
    side_out: torch.Tensor | None = None,
    tile: _tiles.Tile | None = None,
) -> torch.Tensor:
    """out [T, N] = matrix times activation rows, both planes of them; see `linear_kernel`.

    Args:
        norm: "row" applies the RMS factor of the whole row, "head" that of each head of 128, "none" nothing.
        u: fp32 [T, K], `side`: bf16 [M, K], `side_out`: fp32 [T, M]: extra high-precision rows in the same launch.
    """
    rows = out.shape[0]
    tile = tile or _tiles.projection(matrix, rows)
    extra = side.shape[0] if side is not None else 0
    blocks = _tiles.blocks(rows, _tiles.family(out).blocks)
    sides, each = side_programs(side, tile, rows, blocks)
    linear_kernel[(triton.cdiv(rows, 8 * blocks), matrix.rows // (16 * tile.tiles) + sides)](
        matrix.words, matrix.high, matrix.scales, a.q, a.s, a.ss, out,
        u if u is not None else a.s, side_words(side) if side is not None else a.q,
        side_out if side_out is not None else a.s, rows, extra, eps,
        N=matrix.rows, U=matrix.groups, K=matrix.columns, PARTS=a.ss.shape[1], HEADS=norm == "head",
        ROWNORM=norm == "row", SIDE=each, FMT=matrix.code, TILES=tile.tiles,
        S=tile.steps, X=tile.warps, NB=blocks, R=_tiles.window(rows), FINE=True,
        **_tiles.launch(out, tile.warps, _tiles.projection_registers(matrix, tile, rows), leads=True),
    )  # fmt: skip
    return out
