"""A whole decode round on the device: verify, draw, accept, realign the draft layer, draft again; as one CUDA graph.

All that a round reads of a sequence and changes in it lies in the lane of its slot (`kernels.lanes_decode`), so the
host can launch a round before it has read the one before. Rounds of the same shape (sequences, rows, drafts, context
in powers of two) replay one graph; the first round of a number of rows and drafts runs without a graph, which
compiles its kernels.
Every batch size has graphs of its own, so no padding rows exist that could touch a state.

A round under `orders` is two graphs: `begin` launches all up to the logits, `BegunRound.finish` writes the orders where
the device reads them and launches the rest.

To measure without requests: make `DeviceRounds`, `seat` its slots (any page contents), set `pattern` to force how many
drafts are accepted (64 counts, taken in turn by every sequence), then `launch` and `LaunchedRound.read` in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import ModelConfig
from ..kernels.compile_ahead import prepare
from ..kernels.head_decode import Candidates
from ..kernels.lanes_decode import (
    LANE,
    LANE_WIDTH,
    MOST_DRAFTS,
    MOST_STOPS,
    MOST_TOP_K,
    ORDER,
    ORDER_WIDTH,
    RESULT_WIDTH,
    SCRATCH_WIDTH,
    accept,
    keep_drafts,
    mask,
    open_round,
    sample,
)
from ..kernels.rows_decode import rope_rows
from ..kernels.sampling import MIN_TEMPERATURE
from ..model.fused import ROWS, FusedCall, FusedDecoder, FusedMTP
from ..state import FusedState
from .flights import KEPT, Result, Start
from .orders import Order, write
from .validation import SamplingParams

MOST_GRAPHS = 64
"""Graphs kept, of some megabytes each; one that was not used for longest goes first."""
Shape = tuple[int, int, int, int]
"""Sequences, rows of each, drafts made, attention splits."""


class LaunchedRound:
    """A round that was launched. `rows`: of each sequence; `read` waits for it."""

    def __init__(
        self,
        slots: tuple[int, ...],
        rows: int,
        results: Tensor,
        events: tuple[object, object] | None,
        drafts: Tensor | None = None,
    ) -> None:
        self.slots, self.rows = slots, rows
        self._results, self._events, self._drafts = results, events, drafts

    def read(self) -> list[Result]:
        """The results, one for each slot of the launch."""
        if self._events is not None:
            self._events[1].synchronize()  # type: ignore[attr-defined]
        found = self._results.tolist()
        made: list[list[int]] = [[]] * len(found) if self._drafts is None else self._drafts.t().tolist()
        return [
            Result(row[2 : 2 + row[0]], not row[1] & 1, drafts, bool(row[1] & 2))
            for row, drafts in zip(found, made, strict=True)
        ]

    def seconds(self) -> float | None:
        """Device time of the round, once it was read; None where there is no clock."""
        if self._events is None:
            return None
        begin, end = self._events
        return float(begin.elapsed_time(end)) / 1e3  # type: ignore[attr-defined]


class BegunRound:
    """A round whose rows are being computed. Nothing else may run before it is finished."""

    def __init__(self, rounds: DeviceRounds, shape: Shape, turn: int, begin: object | None) -> None:
        self._rounds, self._shape, self._turn, self._begin = rounds, shape, turn, begin

    def finish(self, orders: Sequence[Order]) -> LaunchedRound:
        """Draw by these orders, one for each slot; accept, and draft."""
        return self._rounds._finish(self._shape, self._turn, self._begin, orders)


class _Orders:
    """Orders and masks of one round, in pinned memory of the host, from where the second part of a round reads them.

    `sent`: what the host wrote, `orders`: what the device made of it, for the kernels behind `mask`.
    """

    def __init__(self, device: torch.device, vocabulary: int) -> None:
        cuda = device.type == "cuda"
        self.sent = torch.zeros(ROWS, ORDER_WIDTH, dtype=torch.int32, pin_memory=cuda)
        self.masks = torch.zeros(ROWS, vocabulary // 32, dtype=torch.int32, pin_memory=cuda)
        self.orders = torch.zeros(ROWS, ORDER_WIDTH, dtype=torch.int32, device=device)
        self._used = torch.cuda.Event() if cuda else None

    def write(self, orders: Sequence[Order], rows: int) -> None:
        """Write the orders of a round of so many rows a sequence.

        Waits for the launch that uses those before: another part of the same round, which ends before this one's rows.
        """
        if self._used is not None:
            self._used.synchronize()
        table, masks = self.sent.numpy(), self.masks.numpy().view(np.uint8)
        for i, order in enumerate(orders):
            masked = [write(row, masks[i * rows + r]) for r, row in enumerate(order.rows)]
            table[i] = -1
            table[i, ORDER.most] = order.most
            table[i, ORDER.masked] = sum(1 << r for r, there in enumerate(masked) if there)
            table[i, ORDER.behind] = len(order.rows) - 1
            table[i, ORDER.known : ORDER.known + len(order.known)] = order.known

    def used(self) -> None:
        """What was launched so far is all that uses them."""
        if self._used is not None:
            self._used.record()


class _Buffers:
    """Fixed tensors of all rounds, cut to size for one shape."""

    def __init__(self, device: torch.device, pages: int) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.slots, self.tokens, self.lengths, self.commits = ints(ROWS), ints(ROWS), ints(ROWS), ints(ROWS)
        self.deltas, self.sampled, self.bad, self.follow = ints(ROWS), ints(ROWS), ints(ROWS), ints(ROWS)
        self.pick, self.chain, self.drafts = ints(ROWS), ints(MOST_DRAFTS * ROWS), ints(MOST_DRAFTS * ROWS)
        self.results, self.pages = ints(ROWS, RESULT_WIDTH), ints(ROWS * pages)
        self.scratch = ints(ROWS, SCRATCH_WIDTH)
        self.scratch_z = torch.zeros(ROWS, SCRATCH_WIDTH, device=device)
        self.cos, self.sin = (torch.zeros(ROWS, 64, device=device) for _ in range(2))


@dataclass(frozen=True, slots=True)
class _Logits:
    """What the first part of a round leaves for the second: views of fixed buffers."""

    call: FusedCall
    hidden: Tensor
    logits: Tensor
    candidates: Candidates


@dataclass(frozen=True, slots=True)
class _Opened:
    """Where `open_round` puts the call of a round."""

    tokens: Tensor
    lengths: Tensor
    commits: Tensor
    deltas: Tensor
    pages: Tensor


def rounds_bytes(config: ModelConfig, slots: int, pages: int, mtp: bool) -> int:
    """Device bytes of `DeviceRounds`, nearly all of them hidden rows and page tables."""
    kept = slots * KEPT * config.hidden_size * 2 if mtp else 0
    return kept + (slots + ROWS) * (pages + 16) * 4 + ROWS * 4 * ORDER_WIDTH + (1 << 18)


class DeviceRounds:
    """Runs rounds of the sequences that have a lane. One stream, one caller.

    Args:
        decoder: the trunk. mtp: the draft layer, or None.
        state: device state. slots: its first slots, which have lanes.
        pages: most pages of one sequence.
        addressable: ids below this have text; no other is drawn.
        graphs: replay CUDA graphs; False launches kernel by kernel (same bits).
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        mtp: FusedMTP | None,
        state: FusedState,
        *,
        slots: int,
        pages: int,
        addressable: int,
        graphs: bool = True,
    ) -> None:
        self._decoder, self._mtp, self._state = decoder, mtp, state
        self._addressable = addressable
        device = decoder.device
        self._cuda = device.type == "cuda"
        self._graphs: dict[tuple[str, Shape], torch.cuda.CUDAGraph] = {}
        self._warm: set[tuple[str, Shape]] = set()
        self._opened: dict[Shape, _Logits] = {}
        self._orders: _Orders | None = None
        self._use_graphs = graphs and self._cuda
        self._pages = -(-pages // 16) * 16
        self.lanes = torch.zeros(slots, LANE_WIDTH, dtype=torch.int32, device=device)
        self.tables = torch.zeros(slots, self._pages, dtype=torch.int32, device=device)
        self.kept = (
            torch.zeros(slots, KEPT, decoder.config.hidden_size, dtype=torch.bfloat16, device=device)
            if mtp is not None
            else None
        )
        self._pattern: Tensor | None = None
        self._tape: tuple[Tensor, Tensor] | None = None
        self._aside: torch.cuda.Stream | None = None
        self._buffers = _Buffers(device, self._pages)
        # Results lie in turns: at most two rounds of a sequence are launched and not read, each in a launch of its own.
        self._turns = max(64, 2 * slots + 2)
        self._host = torch.zeros(self._turns, ROWS, RESULT_WIDTH, dtype=torch.int32, pin_memory=self._cuda)
        self._host_slots = torch.zeros(self._turns, ROWS, dtype=torch.int32, pin_memory=self._cuda)
        self._host_drafts = torch.zeros(self._turns, MOST_DRAFTS * ROWS, dtype=torch.int32, pin_memory=self._cuda)
        self._launched = 0
        self._current: tuple[int, ...] = ()

    @property
    def pattern(self) -> Tensor | None:
        """For measurements: int32 [64], accepted drafts of a sequence's rounds in turn, whatever was drawn."""
        return self._pattern

    @pattern.setter
    def pattern(self, counts: Tensor | None) -> None:
        self._pattern = counts
        self._forget()  # each graph holds where the counts are, or that there are none

    def replay(self, answers: Tensor | None, counts: Tensor | None = None) -> None:
        """For measurements: drafts come from known answers from now on, or no longer.

        Args:
            answers: int32 [slots, n], the tokens that the lanes' sequences will draw, from their first on.
            counts: int32 [64], how many drafts are right in a sequence's rounds in turn; the others are wrong.
        """
        self._tape = None if answers is None or counts is None else (answers, counts)
        self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        self._warm.clear()
        self._opened.clear()

    def clear(self) -> None:
        """Forget all lanes and graphs. Nothing of earlier launches is read again."""
        self._forget()
        self._current = ()
        for tensor in (self.lanes, self.tables):
            tensor.zero_()
        if self._cuda:
            torch.cuda.synchronize(self.lanes.device)

    def compile(self, drafts: int) -> int:
        """Compile what rounds of one sequence and of up to eight launch, in several processes; how many kernels.

        Nothing is launched. Rounds of more compile what they lack when they first run.
        """
        splits = self._decoder.work.splits(1)
        windows = ((1, 0), (1, drafts), (drafts + 1, drafts))
        shapes = {(batch, *window) for batch in (1, min(8, len(self.lanes))) for window in windows}

        def launch() -> None:
            for shape in sorted(shapes):
                self._round(*shape, splits)
                if shape[0] == 1:
                    self._second(*shape, splits)

        return prepare(launch)

    def draws(self, params: SamplingParams) -> bool:
        """Whether the sampler here serves these: no penalties or bias, and greedy or a top-k of 1 to 64."""
        greedy = params.temperature < MIN_TEMPERATURE
        return not (params.penalized or params.logit_bias) and (greedy or 1 <= params.top_k <= MOST_TOP_K)

    def rows_within(self, tokens: int) -> int:
        """Most rows of one launch whose sequences see up to so many tokens."""
        return self._decoder.work.rows_within(self._decoder.work.splits(tokens))

    def seat(self, slot: int, pages: Sequence[int], start: Start) -> None:
        """Make the lane of a slot that of a sequence.

        Raises:
            ValueError: more pages or drafts than a lane holds, or parameters that the device does not draw by.
        """
        if len(pages) > self._pages or len(start.drafts) > MOST_DRAFTS or not self.draws(start.params):
            raise ValueError(
                f"{len(pages)} pages, {len(start.drafts)} drafts, {start.params}: a lane holds {self._pages} pages and "
                f"{MOST_DRAFTS} drafts and draws without penalties by a top_k of 1 to {MOST_TOP_K}"
            )
        row = np.zeros(LANE_WIDTH, np.int32)
        params = start.params
        row[[LANE.anchor, LANE.length, LANE.commit]] = start.anchor, start.length, start.commit
        row[[LANE.index, LANE.remaining, LANE.delta]] = start.index, start.remaining, start.rope_delta
        row[LANE.top_k] = params.top_k
        law = np.array([params.temperature, params.top_p, params.min_p], np.float32)
        row[LANE.temperature : LANE.temperature + 3] = law.view(np.int32)
        row[LANE.seed : LANE.seed + 2] = np.array([params.seed], np.uint64).view(np.int32)
        row[LANE.drafts : LANE.drafts + len(start.drafts)] = list(start.drafts)
        row[LANE.stops : LANE.stops + MOST_STOPS] = -1
        stops = list(start.stops)[:MOST_STOPS]
        row[LANE.stops : LANE.stops + len(stops)] = stops
        self.lanes[slot].copy_(torch.from_numpy(row))
        self.tables[slot, : len(pages)].copy_(torch.tensor(pages, dtype=torch.int32))

    def hidden(self, slot: int, start: int, stop: int) -> Tensor:
        """Final hidden rows of tokens `start .. stop - 1` of a slot `[n, E]` fp32, from the last `KEPT` tokens."""
        assert self.kept is not None
        return self.kept[slot, torch.arange(start, stop, device=self.kept.device) % KEPT].float()

    def launch(self, slots: Sequence[int], rows: int, drafts: int, tokens: int) -> LaunchedRound:
        """Start a round of the lanes `slots`.

        Args:
            slots: all different.
            rows: anchor and drafts verified of each.
            drafts: drafts made for the next round; 0 leaves the draft layer behind.
            tokens: no row sees more tokens than this; it chooses the graph.
        """
        shape, turn = self._turn_of(slots, rows, drafts, tokens)
        began = self._now()
        self._run("round", shape)
        return self._returned(shape, turn, began)

    def begin(self, slots: Sequence[int], rows: int, drafts: int, tokens: int) -> BegunRound:
        """Start a round as `launch` does, up to the logits; whatever follows must first `finish` it."""
        shape, turn = self._turn_of(slots, rows, drafts, tokens)
        began = self._now()
        self._run("first", (shape[0], rows, 0, shape[3]))
        return BegunRound(self, shape, turn, began)

    def _finish(self, shape: Shape, turn: int, began: object | None, orders: Sequence[Order]) -> LaunchedRound:
        self._told.write(orders, shape[1])
        self._run("second", shape)
        self._told.used()
        drafts, count = None, shape[0] * shape[2]
        if count:
            made = self._host_drafts[turn, :count]
            made.copy_(self._buffers.drafts[:count], non_blocking=self._cuda)
            drafts = made.view(shape[2], shape[0])
        return self._returned(shape, turn, began, drafts)

    def _turn_of(self, slots: Sequence[int], rows: int, drafts: int, tokens: int) -> tuple[Shape, int]:
        """The shape of a launch and where its results go. The device learns its slots."""
        batch = len(slots)
        splits = self._decoder.work.splits(tokens)
        if batch * rows > self._decoder.work.rows_within(splits):
            raise ValueError(
                f"{batch} x {rows} rows over {tokens} tokens, but one launch holds {self.rows_within(tokens)} rows"
            )
        turn = self._launched % self._turns
        self._launched += 1
        if self._current != tuple(slots):
            self._current = tuple(slots)
            self._host_slots[turn, :batch] = torch.tensor(slots, dtype=torch.int32)
            self._buffers.slots[:batch].copy_(self._host_slots[turn, :batch], non_blocking=True)
        return (batch, rows, drafts, splits), turn

    def _now(self) -> object | None:
        """An event behind all that was launched; None where there is no clock."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _returned(self, shape: Shape, turn: int, began: object | None, drafts: Tensor | None = None) -> LaunchedRound:
        """A round that was launched from `began` on; its results are on their way."""
        results = self._host[turn, : shape[0]]
        results.copy_(self._buffers.results[: shape[0]], non_blocking=self._cuda)
        end = self._now()
        events = None if began is None or end is None else (began, end)
        return LaunchedRound(self._current, shape[1], results, events, drafts)

    @property
    def _told(self) -> _Orders:
        """Made when the first round needs orders."""
        if self._orders is None:
            self._orders = _Orders(self.lanes.device, self._decoder.config.vocab_size)
        return self._orders

    def _run(self, part: str, shape: Shape) -> None:
        batch, rows, drafts, _ = shape
        kernels = (part, (rows, drafts, -(-batch * rows // 8), -(-batch // 8)))
        if not self._use_graphs or kernels not in self._warm:
            self._warm.add(kernels)
            self._part(part, shape)
            return
        graph = self._graphs.pop((part, shape), None) or self._captured(part, shape)
        graph.replay()
        self._graphs[part, shape] = graph  # the last used are last
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _part(self, part: str, shape: Shape) -> None:
        """Launch a whole round, or its first or second part."""
        if part == "round":
            self._round(*shape)
        elif part == "first":
            self._first(shape[0], shape[1], shape[3])
        else:
            self._second(*shape)

    def _captured(self, part: str, shape: Shape) -> torch.cuda.CUDAGraph:
        """A round, or a part, as a graph. Nothing is allocated and nothing runs, so nothing is awaited."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._aside = self._aside or torch.cuda.Stream()
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            graph.capture_begin(capture_error_mode="relaxed")  # a kernel may be loaded here
            try:
                self._part(part, shape)
            finally:
                graph.capture_end()
        current.wait_stream(self._aside)
        return graph

    def _round(self, batch: int, rows: int, drafts: int, splits: int) -> None:
        """All launches of one round."""
        self._first(batch, rows, splits)
        self._rest(batch, rows, drafts, splits, None)

    def _second(self, batch: int, rows: int, drafts: int, splits: int) -> None:
        """The launches behind the logits, by the orders that were sent."""
        told, opened = self._told, self._opened[batch, rows, 0, splits]
        orders = told.orders[:batch]
        masks = told.masks[: batch * rows]
        mask(opened.logits, opened.candidates, told.sent[:batch], masks, orders, addressable=self._addressable)
        self._rest(batch, rows, drafts, splits, orders)

    def _first(self, batch: int, rows: int, splits: int) -> None:
        """The launches up to the logits."""
        buffers, decoder, total = self._buffers, self._decoder, batch * rows
        slots = buffers.slots[:batch]
        opened = _Opened(
            buffers.tokens[:total],
            buffers.lengths[:batch],
            buffers.commits[:batch],
            buffers.deltas[:batch],
            buffers.pages[: batch * self._pages].view(batch, self._pages),
        )
        open_round(self.lanes, self.tables, slots, rows, decoder.work.pages(splits, self._pages), opened)
        cos, sin = buffers.cos[:total], buffers.sin[:total]
        rope_rows(decoder.turns, opened.lengths, opened.deltas, cos, sin)
        call = FusedCall(rows, opened.tokens, slots, opened.lengths, opened.commits, opened.pages, cos, sin, splits)
        hidden = decoder.forward(self._state, call, self.kept)
        self._opened[batch, rows, 0, splits] = _Logits(call, hidden, *decoder.choose(total, self._addressable))

    def _rest(self, batch: int, rows: int, drafts: int, splits: int, orders: Tensor | None) -> None:
        """The launches behind the logits: draw, accept, draft."""
        buffers, total = self._buffers, batch * rows
        opened = self._opened[batch, rows, 0, splits]
        slots, sampled, bad = opened.call.slots, buffers.sampled[:total], buffers.bad[:total]
        sample(
            opened.logits, opened.candidates, self.lanes, slots, buffers.scratch, buffers.scratch_z, sampled, bad,
            addressable=self._addressable,
        )  # fmt: skip
        follow, pick, chain = (
            buffers.follow[:total],
            buffers.pick[:batch],
            buffers.chain[: MOST_DRAFTS * batch].view(MOST_DRAFTS, batch),
        )
        results = buffers.results[:batch]
        accept(self.lanes, slots, sampled, bad, results, follow, pick, chain, self._pattern, orders)
        if drafts:
            made = buffers.drafts[: drafts * batch].view(drafts, batch)
            self._draft(opened.call, opened.hidden, follow, pick, chain, made)
            keep_drafts(self.lanes, slots, made, None if orders is None else (results, orders), self._tape)

    def _draft(
        self, call: FusedCall, hidden: Tensor, follow: Tensor, pick: Tensor, chain: Tensor, made: Tensor
    ) -> None:
        """Realign the draft layer over the rows of the round, then draft from the last that counts."""
        mtp, buffers, batch = self._mtp, self._buffers, call.slots.shape[0]
        assert mtp is not None
        aligned = FusedCall(
            call.rows, follow, call.slots, call.lengths, call.commits, call.tables, call.cos, call.sin, call.splits
        )
        last = mtp.forward(self._state, aligned, hidden, pick)
        mtp.choose(batch, made[0])
        for i in range(made.shape[0] - 1):
            cos, sin = buffers.cos[:batch], buffers.sin[:batch]
            rope_rows(self._decoder.turns, chain[i], buffers.deltas[:batch], cos, sin)
            step = FusedCall(1, made[i], call.slots, chain[i], call.commits, call.tables, cos, sin, call.splits)
            last = mtp.forward(self._state, step, last)
            mtp.choose(batch, made[i + 1])
