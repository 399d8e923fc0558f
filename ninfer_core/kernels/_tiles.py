"""Fixed tile shapes per matrix role and device family, and the launch options every decode kernel shares.

A tile's warps never depend on the number of rows in the call: the order of a sum, and so its bits, follow from them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ..footprint import MULTIPROCESSORS, attention_splits
from ._order import KernelMatrix


class Tile(NamedTuple):
    """Row tiles of 16 in a program, steps (units of K) a warp has in flight, warps that share K.

    `parts`: programs that share K of a group of rows; see `_parts.py`.
    """

    tiles: int
    steps: int
    warps: int
    parts: int = 1


def steps(units: int, warps: int, most: int, multiple: int = 1) -> int:
    """Most steps, at most `most`, that divide a warp's share of `units` and are a multiple of `multiple`."""
    share = units // warps
    fits = [n for n in range(multiple, most + 1, multiple) if share % n == 0]
    if units % warps or not fits:
        raise ValueError(f"{units} units of K do not divide among {warps} warps in steps of {multiple}")
    return max(fits)


def warps(units: int, most: int) -> int:
    """Largest power of two, at most `most`, that divides `units`."""
    count = 1
    while count < most and units % (count * 2) == 0:
        count *= 2
    return count


def parts(units: int, most: int) -> int:
    """Most parts, at most `most`, into which `units` divide."""
    return next(n for n in range(most, 0, -1) if units % n == 0)


def uneven(groups: int, tensor: torch.Tensor) -> bool:
    """Whether the busiest multiprocessor has a tenth more of `groups` programs than if they divided evenly."""
    count = processors(tensor.device)
    return 10 * -(-groups // count) * count > 11 * groups


def blocks(rows: int, most: int = 4) -> int:
    """Blocks of eight rows that a program serves with one read of its weights: 4, 2 or 1, whole programs only."""
    count = -(-rows // 8)
    return next(n for n in (4, 2, 1) if n <= most and count % n == 0)


def window(rows: int) -> int:
    """Live rows of a block as a compiled-in bound: 1, 4 or 8."""
    return next(n for n in (1, 4, 8) if n >= min(rows, 8))


class ExpertRegisters(NamedTuple):
    """Bounds for the routed experts: gate/up and down of one row, of two to eight, of more by items.

    Far below what a kernel takes without one, it spills; with fewer registers more programs fit at once.
    """

    up_row: int | None = 128
    up_pairs: int | None = 128
    up_items: int | None = 80
    down_row: int | None = None
    down_pairs: int | None = 128
    down_items: int | None = None


class Family(NamedTuple):
    """What is fixed for a kind of card. Tiles name the most steps and warps; a matrix's K may allow fewer.

    `long`: a projection whose K takes more than two stages of `projection`. `shared`: a projection with the residual in
    a packed format whose groups of 32 are uneven on the card, bounded by `shared_registers`. `head`, `head_registers`:
    the output head, where the registers of a stage of its four-bit codes suffice for a long K. `expert_steps`,
    `item_steps`: most steps of the routed gate/up with two to eight rows, and with more, `down_steps` of down with more
    than two. `expert_registers`, `registers`: bounds for the routed experts, and for other kernels of at most eight
    rows, so that more programs fit at once. `many_steps`, `many_registers`: those of projections of more rows, of which
    a program serves `blocks` of eight at most, of the router's `router_blocks`; `side`, `router_side`: their
    high-precision rows of a warp. `head_many_registers`: the head of 32 rows a program. `attention_depth`: see the
    function. `early`: see `_dequant.wait_for_inputs`. `held`: units of a program of the routed down products of up to
    eight rows that wait in shared memory, at most the 64 of `moe_decode.ROOM`. `ahead`: bytes that an ask for the next
    kernel's weights brings (`_ahead.py`), 0 for none. `rolling`: dense gate/up asks for a step as soon as one is done;
    see `linear_decode.tile_products`. `measured`: on what, or how else chosen.
    """

    measured: str
    projection: Tile = Tile(2, 8, 4)
    long: Tile = Tile(1, 10, 4)
    residual: Tile = Tile(2, 16, 8)
    shared: Tile = Tile(2, 4, 4, 4)
    router: Tile = Tile(1, 16, 4)
    experts: Tile = Tile(2, 4, 8)
    mlp: Tile = Tile(4, 5, 8, 5)
    expert_steps: int = 4
    item_steps: int = 2
    down_steps: int = 2
    held: int = 64
    expert_registers: ExpertRegisters = ExpertRegisters()
    registers: int | None = 128
    shared_registers: int | None = 96
    head: Tile = Tile(2, 10, 4)
    head_registers: int | None = 128
    blocks: int = 4
    router_blocks: int = 1
    side: int = 2
    router_side: int = 4
    many_steps: int = 8
    many_registers: int = 168
    head_many_registers: int = 168
    attention_depth: int = 2
    early: bool = False
    ahead: int = 0
    rolling: bool = False


ESTIMATED = "nothing of this kind: as on one H200, with fewer bytes under way for its lower bandwidth a multiprocessor"
FAMILIES = {
    80: Family("nothing of this kind: as on one H200"),
    86: Family(ESTIMATED, residual=Tile(2, 8, 8), router=Tile(1, 8, 4)),
    89: Family(ESTIMATED, residual=Tile(2, 8, 8), router=Tile(1, 8, 4)),
    90: Family("one H200", mlp=Tile(4, 4, 8, 5), early=True, ahead=128, rolling=True),
    100: Family("nothing of this kind: as on one H200"),
    120: Family(ESTIMATED, residual=Tile(2, 8, 8), router=Tile(1, 8, 4)),
}
"""By compute capability: A100, 30xx, 40xx, H100 and H200, B200, 50xx. A card between takes what stands below it."""


def family(tensor: torch.Tensor) -> Family:
    """Of the card a tensor lies on; the interpreter takes that of the H200."""
    if not tensor.is_cuda:
        return FAMILIES[90]
    major, minor = _capability(tensor.device.index or 0)
    return FAMILIES[max(n for n in FAMILIES if n <= max(80, 10 * major + minor))]


def projection(matrix: KernelMatrix, rows: int = 1) -> Tile:
    """Tile of a dense projection. Order of sums: the warps alone set it, so tiles and steps may follow the rows."""
    units, most = matrix.groups, family(matrix.words)
    count = warps(units, most.projection.warps)
    shape = most.long if is_long(matrix, most.projection) else most.projection
    tiles = shape.tiles if matrix.rows % (16 * shape.tiles) == 0 else 1
    return Tile(tiles, steps(units, count, shape.steps if rows <= 8 else min(shape.steps, most.many_steps)), count)


def is_long(matrix: KernelMatrix, tile: Tile) -> bool:
    """Whether K takes more than two stages of this tile."""
    return matrix.groups > 2 * tile.warps * tile.steps


def projection_registers(matrix: KernelMatrix, tile: Tile, rows: int) -> int | None:
    """Bound on the registers of a projection; with more rows of packed formats, or a loop over K, it needs them all."""
    if tile.warps > 4 or is_long(matrix, tile) or (rows > 1 and matrix.format != "W8"):
        return None
    return family(matrix.words).registers if rows <= 8 else family(matrix.words).many_registers


LEAST = 64 << 10
"""Bytes of a group that several programs share; of fewer the hand-over takes as long as it saves."""


def residual(matrix: KernelMatrix, rows: int, heads: bool = False) -> Tile:
    """Tile of a projection with the residual: 32 rows, the group of the epilogue. `heads`: a factor per head of 128."""
    most, dense = family(matrix.words), matrix.format == "W8"
    groups = matrix.rows // 32
    if not dense and matrix.nbytes >= groups * LEAST and uneven(groups, matrix.words):
        tile = shared(matrix, most.shared, rows, heads)
        if tile.parts > 1:
            return tile
    multiple = 4 if dense else 2
    count = warps(matrix.groups // multiple, most.residual.warps)
    if dense:
        ahead = most.residual.steps if rows <= 8 else 4
    else:
        ahead = 4 if rows == 1 else 2
    return Tile(2, steps(matrix.groups, count, ahead, multiple), count)


def shared(matrix: KernelMatrix, most: Tile, rows: int, heads: bool) -> Tile:
    """Tile of a projection whose K several programs share: as `most`, where K divides so. Its steps need not divide.

    A loop over K has two stages in flight, of half the steps.
    """
    run = 2 if heads else 1  # two units of a packed format are a head
    runs = matrix.groups // run
    count = parts(runs, most.parts)
    size = warps(runs // count, most.warps)
    each = runs // (count * size)
    ahead = most.steps if rows <= 8 and each * run <= 2 * most.steps else most.steps // 2
    return Tile(2, run * min(each, max(1, ahead // run)), size, count)


def residual_registers(matrix: KernelMatrix, tile: Tile, rows: int) -> int | None:
    """Bound on its registers: in packed formats two programs then fit on a multiprocessor, of shared groups five."""
    if rows > 8 or matrix.format == "W8":
        return None
    return family(matrix.words).shared_registers if tile.parts > 1 else family(matrix.words).registers


def head(matrix: KernelMatrix, rows: int) -> Tile:
    """Tile of the output head: 32 rows; twice the warps where K is long; else of many rows fewer steps.

    Of four-bit codes, a draft head, fewer warps hold as much of a long K.
    """
    most = family(matrix.words).projection
    long = is_long(matrix, most)
    if long and matrix.format == "Q4":
        deep = family(matrix.words).head
        count = warps(matrix.groups, deep.warps)
        return Tile(2, steps(matrix.groups, count, deep.steps if rows <= 8 else deep.steps // 2), count)
    count = warps(matrix.groups, most.warps * (2 if long else 1))
    return Tile(2, steps(matrix.groups, count, most.steps if rows <= 8 or long else 4), count)


def head_registers(matrix: KernelMatrix, tile: Tile, blocks: int) -> int | None:
    """Bound on its registers: with several blocks three or four programs then fit on a multiprocessor."""
    most = family(matrix.words)
    if blocks == 1:
        return most.head_registers if matrix.format == "Q4" and is_long(matrix, most.projection) else None
    return (
        {4: most.head_many_registers, 2: 128}.get(blocks)
        if tile.warps <= 4 and not is_long(matrix, most.projection)
        else None
    )


def router(matrix: KernelMatrix) -> Tile:
    """Tile of the shared expert's gate/up, which shares a launch with the router."""
    most = family(matrix.words).router
    count = warps(matrix.groups, most.warps)
    return Tile(most.tiles, steps(matrix.groups, count, most.steps), count)


def router_blocks(tensor: torch.Tensor, rows: int) -> int:
    """Blocks that a program of the router and the shared expert serves: few, since their weights are."""
    return blocks(rows, family(tensor).router_blocks)


def side(tensor: torch.Tensor, rows: int) -> int:
    """High-precision weight rows of a warp: two halve what many rows read of their activations, four of a router."""
    if rows <= 8:
        return 1
    return family(tensor).router_side if tensor.shape[0] > 128 else family(tensor).side


def experts(matrix: KernelMatrix) -> Tile:
    """Tile of the routed gate/up: 32 gate and 32 up rows."""
    most = family(matrix.words).experts
    count = warps(matrix.groups, most.warps)
    return Tile(2, steps(matrix.groups, count, most.steps), count)


def expert_held(matrix: KernelMatrix, warps: int) -> int:
    """Units of K of a warp of the routed down products that wait in a program's room: half of its share at most."""
    return min(matrix.groups // 2, family(matrix.words).held // (2 * warps))


def expert_steps(matrix: KernelMatrix, warps: int, rows: int) -> int:
    """Steps that a warp of the routed gate/up has in flight in a call of several rows."""
    most = family(matrix.words)
    return parts(matrix.groups // warps, most.expert_steps if rows <= 8 else most.item_steps)


def down_steps(matrix: KernelMatrix, held: int) -> int:
    """The same of the routed down products, beside `held`."""
    return parts(matrix.groups - held, family(matrix.words).down_steps)


def mlp(matrix: KernelMatrix, rows: int) -> Tile:
    """Tile of the dense gate/up: 32 gate and 32 up rows; its parts are those of a group left over."""
    most = family(matrix.words).mlp
    count = warps(matrix.groups, most.warps)
    shares = parts(matrix.groups // count, most.parts)
    if rows <= 8 and family(matrix.words).rolling:
        return Tile(4, min(most.steps, matrix.groups // count), count, shares)
    return Tile(4, steps(matrix.groups, count, most.steps if rows <= 8 else 1), count, shares)


def whole(groups: int, tile: Tile, tensor: torch.Tensor) -> int:
    """Groups of the dense gate/up with a program of their own: all, or as many as divide evenly among multiprocessors.

    The others are shared where that leaves a multiprocessor at most one part more.
    """
    count = processors(tensor.device)
    rest = groups % count
    return groups - rest if rest < groups and tile.parts > 1 and rest * tile.parts <= count else groups


def mlp_registers(matrix: KernelMatrix, rows: int) -> int | None:
    """Bound on its registers: two programs then fit on a multiprocessor."""
    return family(matrix.words).registers if rows <= 8 else None


def attention_rows(rows: int, codes: torch.Tensor) -> int:
    """Rows of a sequence that an attention program serves with one read of a page; no bit depends on it.

    With bf16 pages the registers hold one.
    """
    return next(n for n in (1, 2, 4) if n >= min(rows, 4)) if codes.dtype == torch.int8 else 1


def attention_depth(programs: int, rows: int, codes: torch.Tensor) -> int:
    """INT8 pages that an attention program has under way: two where registers hold them and all run at once anyway.

    `programs` of `rows` rows each. More programs than two a multiprocessor do better three at a time with one page.
    """
    deep = rows == 1 and codes.dtype == torch.int8 and programs <= 2 * processors(codes.device)
    return family(codes).attention_depth if deep else 1


def most_splits(device: torch.device, kv_heads: int) -> int:
    """`attention_splits` of this card."""
    return attention_splits(kv_heads, processors(device))


def processors(device: torch.device) -> int:
    """Multiprocessors of the card; those of the one that sizes are described for, where there is none."""
    return _processors(device.index or 0) if device.type == "cuda" else MULTIPROCESSORS


@cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def launch(tensor: torch.Tensor, warps: int, registers: int | None = None, *, leads: bool = False) -> dict[str, Any]:
    """Launch options for the device of `tensor`; the interpreter (CPU tensors) takes the plain-Triton branches.

    `registers` bounds those of a thread, so that programs of the next launch find room beside these. `leads`: whatever
    kernel comes next reads nothing early that a kernel in front of this one writes; see `_dequant.wait_for_inputs`.
    Fusion of products and sums is off: where a kernel wants it, it says so, and a row's bits cannot depend on what the
    compiler found around it.
    """
    if not tensor.is_cuda:
        return {"PTX": False, "PDL": 0}
    dependent = _capability(tensor.device.index or 0) >= (9, 0)
    options: dict[str, Any] = {"PTX": True, "PDL": 0, "num_warps": warps, "enable_fp_fusion": False}
    if dependent:
        options["PDL"] = 2 if leads and family(tensor).early else 1
        options["launch_pdl"] = True
    if registers is not None:
        options["maxnreg"] = registers
    return options
