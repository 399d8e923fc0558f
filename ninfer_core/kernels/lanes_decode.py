"""Triton kernels of a decode round around the model: rows from lanes, the draw, acceptance, drafts back to lanes.

A lane is the row of one slot in an int32 table: all that a round must know of a sequence and change in it, so that the
host need not look before it launches the next one. `LANE` names the columns; floats are stored by their bits.

Where the host has a say in what is drawn (a grammar), its order for a sequence's round is a row of another int32 table,
`ORDER`, with a bit mask of ids for every row of the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from . import _tiles
from ._dequant import wait_for_inputs
from .head_decode import Candidates

MOST_DRAFTS = 5
MOST_STOPS = 8
MOST_TOP_K = 64
SCRATCH_WIDTH = 5 * MOST_TOP_K
"""Columns of what a row's draw writes down on its way."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Columns of a lane; `drafts` and `stops` are the first of several. Seeds are split in two words."""

    anchor: int = 0
    length: int = 1
    commit: int = 2
    index: int = 3
    remaining: int = 4
    delta: int = 5
    rounds: int = 6
    top_k: int = 7
    temperature: int = 8
    top_p: int = 9
    min_p: int = 10
    seed: int = 12
    drafts: int = 16
    stops: int = 24


@dataclass(frozen=True, slots=True)
class OrderColumns:
    """Columns of an order; `known` is the first of several.

    `most`: tokens that the round may emit; 0 leaves the sequence where it is. `masked`: bit r is set where row r has a
    mask. `behind`: if the round's last token is that of this row, the `known` ones (-1: none) are the next drafts.
    """

    most: int = 0
    masked: int = 1
    behind: int = 2
    known: int = 8


LANE = Lane()
LANE_WIDTH = 32
ORDER = OrderColumns()
ORDER_WIDTH = 16
RESULT_WIDTH = 8
"""Columns of a result: tokens emitted, bits (0: a row was not finite, 1: all of the tokens are drafts), the tokens."""

_ANCHOR = tl.constexpr(LANE.anchor)
_LENGTH = tl.constexpr(LANE.length)
_COMMIT = tl.constexpr(LANE.commit)
_INDEX = tl.constexpr(LANE.index)
_REMAINING = tl.constexpr(LANE.remaining)
_DELTA = tl.constexpr(LANE.delta)
_ROUNDS = tl.constexpr(LANE.rounds)
_TOP_K = tl.constexpr(LANE.top_k)
_TEMPERATURE = tl.constexpr(LANE.temperature)
_TOP_P = tl.constexpr(LANE.top_p)
_MIN_P = tl.constexpr(LANE.min_p)
_SEED = tl.constexpr(LANE.seed)
_DRAFTS = tl.constexpr(LANE.drafts)
_STOPS = tl.constexpr(LANE.stops)
_WIDTH = tl.constexpr(LANE_WIDTH)
_MOST = tl.constexpr(ORDER.most)
_MASKED = tl.constexpr(ORDER.masked)
_BEHIND = tl.constexpr(ORDER.behind)
_KNOWN = tl.constexpr(ORDER.known)
_ORDER = tl.constexpr(ORDER_WIDTH)
_RESULT = tl.constexpr(RESULT_WIDTH)
_K = tl.constexpr(MOST_TOP_K)
_ROOM = tl.constexpr(2 * MOST_TOP_K)
_SCRATCH = tl.constexpr(SCRATCH_WIDTH)
_PATTERN = tl.constexpr(64)
_CHAIN = tl.constexpr(MOST_DRAFTS)
_LEAST = tl.constexpr(-3.0e38)


@triton.jit(do_not_specialize=["table_width", "pages_used"])
def open_kernel(
    lanes, tables, slots, tokens, lengths, commits, deltas, table_rows, table_width, pages_used,
    R: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (sequence, block of pages): the call of a round from its lanes; see `open_round`."""
    b = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slots + b).to(tl.int64)
    lane = lanes + slot * _WIDTH
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = page < pages_used
    tl.store(
        table_rows + b * table_width + page,
        tl.load(tables + slot * table_width + page, mask=inside, other=0),
        mask=inside,
    )
    if tl.program_id(1) == 0:
        tl.store(lengths + b, tl.load(lane + _LENGTH))
        tl.store(commits + b, tl.load(lane + _COMMIT))
        tl.store(deltas + b, tl.load(lane + _DELTA))
        tl.store(tokens + b * R, tl.load(lane + _ANCHOR))
        for r in tl.static_range(1, R):
            tl.store(tokens + b * R + r, tl.load(lane + _DRAFTS + r - 1))


@triton.jit(do_not_specialize=["addressable"])
def mask_kernel(
    logits, best, best_row, sent, masks, orders, addressable,
    V: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row, block of groups of 32 ids): ids that the mask leaves out are out, orders are taken; see `mask`."""
    COUNT: tl.constexpr = V // 32
    t = tl.program_id(0)
    wait_for_inputs(PDL)
    if (tl.program_id(1) == 0) & (t % R == 0):
        column = (t // R) * _ORDER + tl.arange(0, _ORDER)
        tl.store(orders + column, tl.load(sent + column))
    masked = tl.load(sent + (t // R) * _ORDER + _MASKED)
    if ((masked >> (t % R)) & 1) > 0:
        group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = group < COUNT
        word = tl.load(masks + t * COUNT + group, mask=there, other=0)
        bit = tl.arange(0, 32)
        ids = group[:, None] * 32 + bit[None, :]
        legal = (((word[:, None] >> bit[None, :]) & 1) > 0) & (ids < addressable) & there[:, None]
        at = logits + t.to(tl.int64) * V + ids
        value = tl.load(at, mask=legal, other=float("-inf"))
        tl.store(at, tl.full([BLOCK, 32], float("-inf"), tl.float32), mask=there[:, None] & (legal == 0))
        top = tl.max(value, 1)
        row = tl.min(tl.where(legal & (value == top[:, None]), ids, 2147483647), 1)
        # What was not finite stays so, for `sample` to see; a group without a legal id looks like the least of all.
        before = tl.load(best + t * COUNT + group, mask=there, other=0.0)
        sound = there & (before > float("-inf")) & (before < float("inf"))
        tl.store(best + t * COUNT + group, tl.where(top > _LEAST, top, _LEAST), mask=sound)
        tl.store(best_row + t * COUNT + group, row, mask=sound)


@triton.jit
def ordered(x):
    """int32 that compares as the fp32 `x` does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def first_of(rank, count):
    """Mask of the first `count` elements by (rank descending, place ascending): a search bit by bit."""
    low = -2147483648
    if tl.sum((rank >= 0).to(tl.int32), 0) >= count:
        low = 0
    bit = 30
    while bit >= 0:
        high = low | (1 << bit)
        low = tl.where(tl.sum((rank >= high).to(tl.int32), 0) >= count, high, low)
        bit -= 1
    above = rank > low
    tied = rank == low
    wanted = count - tl.sum(above.to(tl.int32), 0)
    return above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= wanted))


@triton.jit
def places_among(rank):
    """Place of every element by (rank descending, position ascending), all pairs at once."""
    at = tl.arange(0, rank.shape[0])
    before = (rank[None, :] > rank[:, None]) | ((rank[None, :] == rank[:, None]) & (at[None, :] < at[:, None]))
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def leaders(rank, live, count, ROOM: tl.constexpr):
    """Mask of at most `ROOM` elements with the first `count` (<= ROOM) `live` ones among them, and their places in it.

    The count-th largest of the maxima of disjoint groups is a bound: as many elements reach it, and mostly few more.
    Where too many do (ties), the first `count` themselves.
    """
    GROUPS: tl.constexpr = ROOM if rank.shape[0] > ROOM else rank.shape[0]
    tops = tl.max(tl.reshape(rank, [rank.shape[0] // GROUPS, GROUPS]), 0)
    last = tl.minimum(count, GROUPS) - 1
    bound = tl.max(tl.where(places_among(tops) == last, tops, -2147483648), 0)
    chosen = live & (rank >= bound)
    if tl.sum(chosen.to(tl.int32), 0) > ROOM:
        chosen = first_of(rank, count)
    return chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1


@triton.jit(do_not_specialize=["addressable"])
def sample_kernel(
    logits, best, best_row, lanes, slots, scratch, scratch_z, token, bad, addressable,
    V: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (row): the token that the law of its sequence draws; see `sample`."""
    COUNT: tl.constexpr = V // 32
    t = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slots + t // R).to(tl.int64)
    lane = lanes + slot * _WIDTH
    block = tl.arange(0, BLOCK)
    there = block < COUNT
    top = tl.load(best + t * COUNT + block, mask=there, other=float("-inf"))
    whole = block < addressable // 32
    # a block of ids that are all finite has a finite best
    odd = whole & ((top == float("-inf")) | (top == float("inf")) | (top != top))
    tl.store(bad + t, tl.max(odd.to(tl.int32), 0))
    temperature = tl.load(lane + _TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature < 1e-5:
        row = tl.load(best_row + t * COUNT + block, mask=there, other=2147483647)
        chosen = tl.min(tl.where(top == tl.max(top, 0), row, 2147483647), 0)
        tl.store(token + t, tl.minimum(chosen, addressable - 1))
    else:
        count = tl.load(lane + _TOP_K)
        names = scratch + t * _SCRATCH
        values = scratch_z + t * _SCRATCH
        # Blocks of 32 ids that hold the first `count`, then those ids and a few more, then they in order.
        rank = ordered(tl.where(there, tl.div_rn(top, temperature), float("-inf")))
        chosen, place = leaders(rank, there & (top > _LEAST), tl.minimum(count, COUNT), _ROOM)
        found = tl.sum(chosen.to(tl.int32), 0)
        tl.store(names + place, block, mask=chosen)
        tl.debug_barrier()
        i = tl.arange(0, _ROOM)
        home = tl.load(names + i, mask=i < found, other=0)
        ids = tl.reshape(home[:, None] * 32 + tl.arange(0, 32)[None, :], [_ROOM * 32])
        live = tl.reshape(tl.broadcast_to((i < found)[:, None], [_ROOM, 32]), [_ROOM * 32]) & (ids < addressable)
        value = tl.load(logits + t.to(tl.int64) * V + ids, mask=live, other=float("-inf"))
        value = tl.where(live, tl.div_rn(value, temperature), float("-inf"))
        chosen, place = leaders(ordered(value), value > float("-inf"), count, _ROOM)
        found = tl.sum(chosen.to(tl.int32), 0)
        tl.store(names + _ROOM + place, ids, mask=chosen)
        tl.store(values + _ROOM + place, value, mask=chosen)
        tl.debug_barrier()
        named = tl.load(names + _ROOM + i, mask=i < found, other=0)
        z = tl.load(values + _ROOM + i, mask=i < found, other=float("-inf"))
        place = places_among(ordered(z))
        tl.store(names + 2 * _ROOM + place, named, mask=place < count)
        tl.store(values + 2 * _ROOM + place, z, mask=place < count)
        tl.debug_barrier()
        k = tl.arange(0, _K)
        seed = tl.load(lane + _SEED).to(tl.uint32).to(tl.uint64)
        seed = seed | (tl.load(lane + _SEED + 1).to(tl.uint32).to(tl.uint64) << 32)
        chosen = draw(
            tl.load(names + 2 * _ROOM + k, mask=k < count, other=0),
            tl.load(values + 2 * _ROOM + k, mask=k < count, other=float("-inf")), k,
            tl.load(lane + _TOP_P).to(tl.float32, bitcast=True), tl.load(lane + _MIN_P).to(tl.float32, bitcast=True),
            tl.rand(seed, tl.load(lane + _INDEX) + t % R),
        )  # fmt: skip
        tl.store(token + t, tl.minimum(chosen, addressable - 1))


@triton.jit
def draw(ids, z, k, top_p, min_p, u):
    """One of the candidates `ids` [K], the likeliest first, with values `z` (-inf: none); sums in fp64."""
    weight = tl.exp((z - tl.max(z, 0)).to(tl.float64))
    live = (z > float("-inf")) & (weight >= min_p.to(tl.float64))
    weight = tl.where(live, weight, 0.0)
    before = tl.broadcast_to(weight[None, :], [_K, _K])
    sums = tl.sum(tl.where(k[None, :] < k[:, None], before, 0.0), 1) + weight
    total = tl.sum(weight, 0)
    kept = tl.sum((live & (sums < top_p.to(tl.float64) * total)).to(tl.int32), 0) + 1
    kept = tl.minimum(kept, tl.sum(live.to(tl.int32), 0))
    stays = live & (k < kept)
    mass = tl.max(tl.where(stays, sums, 0.0), 0)
    place = tl.sum((stays & (sums <= u.to(tl.float64) * mass)).to(tl.int32), 0)
    place = tl.minimum(place, kept - 1)
    return tl.max(tl.where(live & (k == place), ids, 0), 0)


@triton.jit(do_not_specialize=["batch"])
def accept_kernel(
    lanes, slots, sampled, bad, results, follow, pick, chain, pattern, orders, batch,
    R: tl.constexpr, FORCED: tl.constexpr, HELD: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (sequence): how many tokens a round emits, and the lane behind it; see `accept`."""
    b = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slots + b).to(tl.int64)
    lane = lanes + slot * _WIDTH
    remaining = tl.load(lane + _REMAINING)
    accepted = remaining * 0
    if FORCED:
        accepted = tl.minimum(tl.load(pattern + tl.load(lane + _ROUNDS) % _PATTERN), R - 1)
    else:
        alive = accepted + 1
        for r in tl.static_range(R - 1):
            alive = alive * (tl.load(sampled + b * R + r) == tl.load(lane + _DRAFTS + r)).to(tl.int32)
            accepted += alive
    emitted = tl.minimum(accepted + 1, remaining)
    if HELD:
        emitted = tl.minimum(emitted, tl.load(orders + b * _ORDER + _MOST))
    stops = tl.load(lane + _STOPS + tl.arange(0, 8))
    ended = remaining * 0
    fault = remaining * 0
    anchor = tl.load(lane + _ANCHOR)
    for r in tl.static_range(R):
        token = tl.load(sampled + b * R + r)
        if r + 1 < R:
            token = tl.where(r < accepted, tl.load(lane + _DRAFTS + r), token)
        tl.store(results + b * _RESULT + 2 + r, token)
        tl.store(follow + b * R + r, token)
        counts = r < emitted
        fault = tl.where(counts, fault | tl.load(bad + b * R + r), fault)
        anchor = tl.where(counts, token, anchor)
        stop = tl.max((stops == token).to(tl.int32), 0)
        ended = tl.where(counts & (stop > 0), 1, ended)
        emitted = tl.where(counts & (stop > 0), r + 1, emitted)
    tl.store(results + b * _RESULT, emitted)
    # Bit 1: no draw among them, the round was cut within its accepted drafts.
    tl.store(results + b * _RESULT + 1, fault + 2 * ((emitted > 0) & (accepted >= emitted)).to(tl.int32))
    length = tl.load(lane + _LENGTH) + emitted
    tl.store(pick + b, tl.maximum(emitted - 1, 0))
    for i in tl.static_range(_CHAIN):
        tl.store(chain + i * batch + b, length + i)
    tl.debug_barrier()
    tl.store(lane + _ANCHOR, anchor)
    tl.store(lane + _LENGTH, length)
    tl.store(lane + _COMMIT, emitted)
    tl.store(lane + _INDEX, tl.load(lane + _INDEX) + emitted)
    tl.store(lane + _REMAINING, tl.where((ended | fault) > 0, 0, remaining - emitted))
    tl.store(lane + _ROUNDS, tl.load(lane + _ROUNDS) + 1)


@triton.jit(do_not_specialize=["batch", "length"])
def keep_kernel(
    lanes, slots, drafts, results, orders, tape, pattern, batch, length,
    K: tl.constexpr, HELD: tl.constexpr, TAPE: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (sequence): drafts [K, B] into the lanes; see `keep_drafts`."""
    b = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slots + b).to(tl.int64)
    lane = lanes + slot * _WIDTH
    for i in tl.static_range(K):
        draft = tl.load(drafts + i * batch + b)
        if HELD:
            known = tl.load(orders + b * _ORDER + _KNOWN + i)
            last = tl.load(results + b * _RESULT) - 1
            draft = tl.where((last == tl.load(orders + b * _ORDER + _BEHIND)) & (known >= 0), known, draft)
        if TAPE:
            at = tl.load(lane + _INDEX) + i
            token = tl.load(tape + slot * length + at, mask=at < length, other=0)
            right = tl.load(pattern + tl.load(lane + _ROUNDS) % _PATTERN)
            draft = tl.where(i < right, token, tl.where(token == 0, 1, token - 1))
        tl.store(lane + _DRAFTS + i, draft)
        if HELD:
            tl.store(drafts + i * batch + b, draft)


def open_round(
    lanes: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    rows: int,
    pages_used: int,
    out: Any,
) -> None:
    """The call of a round: tokens (anchor, drafts), lengths, commits, rope deltas and pages of the lanes `slots`.

    Args:
        lanes: int32 [slots, LANE_WIDTH]. tables: int32 [slots, P]. slots: int32 [B], all different.
        rows: R. pages_used: leading pages of a table that can be looked at.
        out: has `tokens` [B * R], `lengths`, `commits`, `deltas` [B], `pages` [B, P], all int32, to be written.
    """
    open_kernel[(slots.shape[0], triton.cdiv(pages_used, 256))](
        lanes, tables, slots, out.tokens, out.lengths, out.commits, out.deltas, out.pages, tables.shape[1], pages_used,
        R=rows, BLOCK=256, **_tiles.launch(lanes, 1),
    )  # fmt: skip


def mask(
    logits: torch.Tensor,
    candidates: Candidates,
    sent: torch.Tensor,
    masks: torch.Tensor,
    orders: torch.Tensor,
    *,
    addressable: int,
) -> None:
    """Leave the ids that a row's mask does not name, out of its logits and candidates; other rows keep their bits.

    Effects: `orders` = `sent`. `sent` and `masks` may lie in pinned memory of the host and are read from there, which
    takes less than a copy between two graphs.

    Math: logits = -inf where bit id % 32 of word id // 32 is clear, or id >= addressable; candidates of what remains,
    below all others where nothing does. A candidate that is not finite stays, so that `sample` finds the row bad.
    Shapes: logits fp32 [T, V] and their candidates; sent, orders int32 [B, ORDER_WIDTH]; masks int32 [T, V / 32].
    """
    rows, vocabulary = logits.shape
    mask_kernel[(rows, triton.cdiv(vocabulary // 32, 64))](
        logits, candidates.value, candidates.row, sent, masks, orders, addressable,
        V=vocabulary, R=rows // orders.shape[0], BLOCK=64, **_tiles.launch(logits, 4),
    )  # fmt: skip


def sample(
    logits: torch.Tensor,
    candidates: Candidates,
    lanes: torch.Tensor,
    slots: torch.Tensor,
    scratch: torch.Tensor,
    scratch_z: torch.Tensor,
    token: torch.Tensor,
    bad: torch.Tensor,
    *,
    addressable: int,
) -> None:
    """token [T] int32 = the draw of every row by the law in its lane; bad [T] = 1 where logits are not finite.

    Math: `sampling.pick_ref` with the number `sampling.uniform(seed, index + row)`.
    Shapes: logits fp32 [T, V] and the candidates of the same rows; scratch int32, scratch_z fp32 [T, SCRATCH_WIDTH].
    Domain: temperature below 1e-5 (greedy), or 1 <= top_k <= 64; V a multiple of 32.
    Numeric: division in fp32, exponentials and sums in fp64: the host's draw but for sums that end on a border.
    """
    rows, vocabulary = logits.shape
    sample_kernel[(rows,)](
        logits, candidates.value, candidates.row, lanes, slots, scratch, scratch_z, token, bad, addressable,
        V=vocabulary, R=rows // slots.shape[0], BLOCK=triton.next_power_of_2(vocabulary // 32),
        **_tiles.launch(lanes, 16),
    )  # fmt: skip


def accept(
    lanes: torch.Tensor,
    slots: torch.Tensor,
    sampled: torch.Tensor,
    bad: torch.Tensor,
    results: torch.Tensor,
    follow: torch.Tensor,
    pick: torch.Tensor,
    chain: torch.Tensor,
    pattern: torch.Tensor | None = None,
    orders: torch.Tensor | None = None,
) -> None:
    """Move the lanes behind the tokens that a round emits: drafts as far as they equal the draws, and one draw more.

    A stop token, the lane's remaining tokens, or a row that is not finite ends it; an ended lane emits nothing.

    Shapes (int32): sampled, bad, follow [B * R]; results [B, RESULT_WIDTH]; pick [B]; chain [MOST_DRAFTS, B]. Written:
    `results`; `follow`, the token behind every row; `pick`, the last row that counts; `chain[i]`, the new length + i.
    With `pattern` [64] the number of accepted drafts is taken from there by the lane's round, for measurements.
    `orders` [B, ORDER_WIDTH]: no more tokens than each of them says.
    """
    batch = slots.shape[0]
    accept_kernel[(batch,)](
        lanes, slots, sampled, bad, results, follow, pick, chain, pattern if pattern is not None else bad,
        orders if orders is not None else bad, batch,
        R=sampled.shape[0] // batch, FORCED=pattern is not None, HELD=orders is not None, **_tiles.launch(lanes, 1),
    )  # fmt: skip


def keep_drafts(
    lanes: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor] | None = None,
    tape: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Drafts int32 [k, B] into the lanes `slots`.

    `held`: results and orders of the round; the tokens that an order knows take the place of drafts, in `drafts` too.
    `tape`, for measurements: tokens int32 [slots, n] of the whole answers and a pattern [64]; as many drafts as that
    says are those that will be drawn, the others are wrong.
    """
    count, batch = drafts.shape
    results, orders = held or (drafts, drafts)
    tokens, pattern = tape or (drafts, drafts)
    keep_kernel[(batch,)](
        lanes, slots, drafts, results, orders, tokens, pattern, batch, tokens.shape[1],
        K=count, HELD=held is not None, TAPE=tape is not None, **_tiles.launch(lanes, 1),
    )  # fmt: skip
