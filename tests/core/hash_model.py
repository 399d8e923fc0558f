"""A model whose state is a hash of its tokens: it finds any page, slot or cursor that is wrong, at once, at any scale.

The hidden row of a token is the hash of the sequence up to it. Pages hold token and hash of every row, a slot holds the
hash and the length, so every call can check that what it was given is the sequence it claims to be. The next token is a
function of the hash, and the draft layer computes the same function: with the right hidden row and the right next
token it is always right.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from ninfer_core.kernels.sampling import pick, uniform
from ninfer_core.model.prompt_chunk import PromptChunk
from ninfer_core.runtime import orders
from ninfer_core.runtime.flights import Result
from ninfer_core.runtime.handle import RequestHandle
from ninfer_core.runtime.reuse import Reuse
from ninfer_core.runtime.runner import Runner
from ninfer_core.runtime.sampler import Sampler
from ninfer_core.runtime.scheduler import Scheduler
from ninfer_core.runtime.session import Session
from ninfer_core.runtime.validation import SamplingParams
from ninfer_core.testing import ScriptedEngine
from ninfer_core.types import Request

PAGE, TOKENS, PRIME = 64, 250, 2**31 - 1
GREEDY = SamplingParams(temperature=0.0, seed=0)
FRONTEND = ScriptedEngine("").frontend
VOCAB = FRONTEND.tokenizer.addressable


def step(value: int, token: int) -> int:
    return (value * 48271 + token + 1) % PRIME


def following(value: int) -> int:
    return (value >> 5) % TOKENS


def answer(prompt, count: int) -> list[int]:
    """What the model says after a prompt."""
    value, out = 0, []
    for token in prompt:
        value = step(value, token)
    for _ in range(count):
        out.append(following(value))
        value = step(value, out[-1])
    return out


class HashState:
    """Pages of (token, hash) of the trunk and (hash, next token) of the draft layer; slots of (hash, length, window).

    `rings`: windows lie in rings by token index, as on a device, where rows that never count are in nobody's way.
    """

    rings = False

    def __init__(self, slots: int, pages: int) -> None:
        self.trunk = np.full((pages, PAGE, 2), -1)
        self.draft = np.full((pages, PAGE, 2), -1)
        self.slots = [None] * slots

    def copy_slot(self, source, target):
        value, length, window = self.slots[source]
        self.slots[target] = (value, length, list(window))

    def clear_slot(self, slot):
        self.slots[slot] = (0, 0, [])

    def copy_page(self, source, target):
        self.trunk[target], self.draft[target] = self.trunk[source], self.draft[source]

    def clear_pages(self, pages):
        self.trunk[list(pages)] = self.draft[list(pages)] = -1

    def rows(self, pages, table, count):
        """The first `count` rows of a sequence."""
        return pages[np.asarray(table)].reshape(-1, 2)[:count]

    def write(self, pages, table, start, rows):
        at = np.arange(start, start + len(rows))
        pages[np.asarray(table)[at // PAGE], at % PAGE] = rows

    def check(self, slot, table, length):
        """The slot holds `length` tokens, and so do the pages: the same ones."""
        value, count, _ = self.slots[slot]
        assert count == length, f"the state has {count} tokens, the caller says {length}"
        rows = self.rows(self.trunk, table, length)
        assert (rows[:, 0] >= 0).all()
        before = np.concatenate(([0], rows[:-1, 1])) if length else rows[:, 1]
        assert (rows[:, 1] == (before * 48271 + rows[:, 0] + 1) % PRIME).all(), "pages of different sequences"
        assert value == (rows[-1, 1] if length else 0), "state and pages of different sequences"

    def check_draft(self, table, length):
        """Every draft-layer row before `length` belongs to this sequence."""
        trunk, draft = self.rows(self.trunk, table, length + 1), self.rows(self.draft, table, length)
        assert (draft[:, 0] == trunk[:length, 1]).all() and (draft[:-1, 1] == trunk[1:length, 0]).all()


class HashTicket:
    def __init__(self):
        self.ended = False

    def query(self):
        return self.ended


class HashHost:
    """Host memory for a `HashState`. `slow`: copies end when `end` says so, and until then their blocks hold nothing."""

    state_blocks, block = 2, 1000

    def __init__(self, state, blocks, slow=False):
        self.state, self.blocks, self.slow = state, blocks, slow
        self.held, self.tickets, self.copied = [None] * blocks, [], 0

    @property
    def nbytes(self):
        return self.blocks * self.block

    def store(self, slot, slot_blocks, pages, page_blocks, carry):
        assert len(slot_blocks) == self.state_blocks and len(set(slot_blocks) | set(page_blocks)) == len(pages) + 2
        value, length, window = self.state.slots[slot]
        written = dict(zip(slot_blocks, ((value, length), list(window)), strict=True))
        for page, block in zip(pages, page_blocks, strict=True):
            written[block] = (self.state.trunk[page].copy(), self.state.draft[page].copy())
            self.copied += 1
        for block in written:
            self.held[block] = None
        ticket = HashTicket()
        self.tickets.append((ticket, written))
        if not self.slow:
            self.end()
        return carry.clone(), ticket

    def end(self, count=None):
        """The first copies under way, or all, end."""
        for ticket, written in self.tickets[:count]:
            ticket.ended = True
            for block, data in written.items():
                self.held[block] = data
        del self.tickets[:count]

    def restore(self, slot_blocks, slot, page_blocks, pages, carry):
        (value, length), window = (self.held[block] for block in slot_blocks)
        self.state.slots[slot] = (value, length, list(window))
        for block, page in zip(page_blocks, pages, strict=True):
            self.state.trunk[page], self.state.draft[page] = self.held[block]
        return carry.clone()


class HashDecoder:
    """`layers`: steps of a prompt chunk, each of which `ran` sees with its rows; the state is torn until the last."""

    def __init__(self, layers=1):
        self.layers, self.begun, self.ran = layers, 0, lambda rows: None

    def _run(self, state, tokens, start, table, value):
        rows = []
        for token in tokens:
            value = step(value, token)
            rows.append((token, value))
        state.write(state.trunk, table, start, rows)
        return [value for _, value in rows]

    def costs(self, start, rows):
        return [float(rows)] * self.layers

    def begin(self, state, tokens, slot, start, table, positions=None, embeddings=None):
        assert positions is None and embeddings is None  # text only
        self.begun += 1
        return PromptChunk(self._steps(state, tokens, slot, start, table, self.begun), self.costs(start, len(tokens)))

    def _steps(self, state, tokens, slot, start, table, number):
        state.check(slot, table, start)
        value, length, window = state.slots[slot]
        assert state.rings or not window, "a prompt chunk with a window pending"
        for left in reversed(range(self.layers)):
            self.ran(len(tokens))
            assert number == self.begun, "another chunk has begun between the layers of this one"
            hidden = self._run(state, tokens.tolist(), start, table, value)
            state.slots[slot] = (None, None, []) if left else (hidden[-1], length + len(hidden), [])
            yield None if left else torch.tensor(hidden)[:, None]

    def prefill(self, *args):
        return self.begin(*args).finish()

    def flush(self, state, slots, commit, lengths):
        for slot, count, after in zip(slots, commit, lengths, strict=True):
            value, length, window = state.slots[slot]
            assert length + count == after
            for token in window[:count]:
                value = step(value, token)
            state.slots[slot] = (value, length + count, [])

    def verify(self, state, tokens, slots, lengths, commit, tables, rope_delta):
        assert len(set(slots)) == len(slots)
        self.flush(state, slots, commit, lengths)
        out = []
        for i, slot in enumerate(slots):
            state.check(slot, tables[i], lengths[i])
            value, length, _ = state.slots[slot]
            row = tokens[i].tolist()
            out.append(self._run(state, row, lengths[i], tables[i], value))
            state.slots[slot] = (value, length, row)
        return torch.tensor(out)[:, :, None]

    def logits(self, hidden):
        made = torch.zeros(*hidden.shape[:-1], VOCAB)
        best = torch.tensor([following(v) for v in hidden.flatten().tolist()]).view(hidden.shape)
        return made.scatter_(-1, best, 1.0)


class HashMTP:
    def prefill(self, state, tokens, hidden, start, table, positions=None, embeddings=None):
        assert positions is None and embeddings is None
        rows = list(zip(hidden[:, 0].tolist(), tokens.tolist(), strict=True))
        state.check_draft(table, start)
        state.write(state.draft, table, start, rows)

    def rows(self, state, tokens, hidden, slots, starts, tables, rope_delta, only=None):
        out = []
        for i, start in enumerate(starts):
            rows = list(zip(hidden[i, :, 0].tolist(), tokens[i].tolist(), strict=True))
            if only is not None:  # realignment: everything before is final
                state.check_draft(tables[i], start)
            state.write(state.draft, tables[i], start, rows)
            made = [step(*row) for row in rows]
            out.append(made if only is None else [made[only[i]]])
        return torch.tensor(out)[:, :, None]

    def draft(self, hidden):
        return torch.tensor([following(v) for v in hidden.flatten().tolist()])


class HashRounds:
    """The device's side of `runtime.flights` over the hash model: lanes in Python, rounds run when they are launched.

    `cost(rows, drafts, sequences)`: seconds that a launch is said to take. `begun`: a round that waits for its orders;
    `given`: the orders of all rounds.
    """

    def __init__(self, state, decoder, mtp, cost=None):
        self.state, self.decoder, self.mtp, self.cost = state, decoder, mtp, cost
        self.lanes, self.launched, self.rotten, self.given, self.begun = {}, [], set(), [], None

    def draws(self, params):
        return params.temperature == 0 or 1 <= params.top_k <= 64

    def rows_within(self, tokens):
        return 8

    def clear(self):
        self.lanes.clear()

    def seat(self, slot, pages, start):
        self.lanes[slot] = {"anchor": start.anchor, "length": start.length, "commit": start.commit,
                            "remaining": start.remaining, "drafts": list(start.drafts), "stops": set(start.stops),
                            "pages": list(pages), "hidden": {}, "index": start.index, "law": start.params}  # fmt: skip

    def hidden(self, slot, start, stop):
        return torch.tensor([self.lanes[slot]["hidden"][i] for i in range(start, stop)])[:, None]

    def launch(self, slots, rows, drafts, tokens):
        return self.begin(slots, rows, drafts, tokens).finish(None)

    def begin(self, slots, rows, drafts, tokens):
        assert self.begun is None, "another round has not got its orders"
        lanes = [self.lanes[slot] for slot in slots]
        assert len(slots) * rows <= 8 and all(lane["length"] + rows <= tokens for lane in lanes)
        self.launched.append((tuple(slots), rows, drafts))
        tables = [lane["pages"] for lane in lanes]
        windows = [[lane["anchor"], *lane["drafts"]][:rows] for lane in lanes]
        assert all(len(window) == rows for window in windows)
        starts = [lane["length"] for lane in lanes]
        hidden = self.decoder.verify(
            self.state, torch.tensor(windows), list(slots), starts, [lane["commit"] for lane in lanes], tables, None
        )
        self.begun = HashBegun(self, slots, lanes, tables, starts, windows, hidden, drafts)
        return self.begun

    def finish(self, begun, told):
        slots, lanes, tables, starts, windows, hidden, drafts = begun.round
        assert self.begun is begun
        self.begun, rows = None, len(windows[0])
        logits, results = self.decoder.logits(hidden), []
        assert told is None or len(told) == len(slots)
        self.given += told or []
        for order, row in zip(told or [], logits, strict=False):
            _mask(order, row)
        drawn = [[_draw(lane, row[r], r) for r in range(rows)] for lane, row in zip(lanes, logits, strict=True)]
        for i, lane in enumerate(lanes):
            for r, value in enumerate(hidden[i, :, 0].tolist()):
                lane["hidden"][starts[i] + r] = value
            most = told[i].most if told else rows
            results.append(self._accept(lane, windows[i][1:], drawn[i], slots[i] in self.rotten, most))
        if drafts:
            self._draft(slots, lanes, tables, starts, drawn, hidden, results, drafts)
        if told:
            results = [self._known(*each) for each in zip(lanes, results, told, strict=True)]
        return Landed(results, self.cost and self.cost(rows, drafts, len(slots)))

    def _known(self, lane, result, order):
        if order.known and len(result.tokens) == len(order.rows):
            lane["drafts"] = [*order.known, *lane["drafts"][len(order.known) :]][: len(lane["drafts"])]
        return Result(result.tokens, result.finite, list(lane["drafts"]), result.cut)

    def _accept(self, lane, drafts, drawn, rotten, most):
        accepted = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts))
        tokens = drawn[: min(accepted + 1, lane["remaining"], most)]
        end = next((i + 1 for i, token in enumerate(tokens) if token in lane["stops"]), None)
        tokens = tokens[:end]
        lane["commit"] = len(tokens)
        lane["length"] += len(tokens)
        lane["index"] += len(tokens)
        lane["remaining"] = 0 if end is not None or rotten else lane["remaining"] - len(tokens)
        lane["anchor"] = tokens[-1] if tokens else lane["anchor"]
        return Result(tokens, not rotten, (), 0 < len(tokens) <= accepted)

    def _draft(self, slots, lanes, tables, starts, drawn, hidden, results, drafts):
        pick = [max(len(result.tokens) - 1, 0) for result in results]
        last = self.mtp.rows(self.state, torch.tensor(drawn), hidden, slots, starts, tables, None, pick)
        made = [self.mtp.draft(last)]
        for i in range(drafts - 1):
            at = [lane["length"] + i for lane in lanes]
            last = self.mtp.rows(self.state, made[-1][:, None], last, slots, at, tables, None)
            made.append(self.mtp.draft(last))
        for i, lane in enumerate(lanes):
            lane["drafts"] = [int(step[i]) for step in made]


class HashBegun:
    """A round whose rows are computed."""

    def __init__(self, rounds, *round_):
        self.rounds, self.round = rounds, round_

    def finish(self, told):
        return self.rounds.finish(self, told)


def _mask(order, logits):
    """Leave out what an order's rows do not name, through the bits that a device gets."""
    for row, z in zip(order.rows, logits, strict=False):
        bits = np.zeros(-(-VOCAB // 32) * 4, np.uint8)
        if orders.write(row, bits):
            legal = np.unpackbits(bits, bitorder="little")[:VOCAB].astype(bool)
            assert legal.any()
            z[torch.from_numpy(~legal)] = -torch.inf


def _draw(lane, z, row):
    law = lane["law"]
    return pick(z, law, uniform(law.seed, lane["index"] + row))


class Landed:
    def __init__(self, results, seconds=None):
        self._results, self._seconds = results, seconds

    def read(self):
        return self._results

    def seconds(self):
        return self._seconds


class Machine:
    """Runner and scheduler over the hash model, stepped by hand; `lanes`: with rounds on a device of its own.

    `layers`: see `HashDecoder`.
    """

    def __init__(
        self,
        *,
        slots=3,
        pages=60,
        checkpoints=6,
        drafts=3,
        chunk=64,
        lanes=False,
        blocks=0,
        slow=False,
        cost=None,
        clock=time.perf_counter,
        layers=1,
        **options,
    ):
        self.state = HashState(slots + checkpoints, pages)
        self.host = HashHost(self.state, blocks, slow) if blocks else None
        self.reuse = Reuse(
            self.state, slots=slots, pages=pages, checkpoints=checkpoints, chunk=chunk, host=self.host, **options
        )
        mtp = HashMTP() if drafts else None
        decoder, self.state.rings = HashDecoder(layers), lanes
        self.device = HashRounds(self.state, decoder, mtp, cost) if lanes else None
        self.runner = Runner(decoder, mtp, self.state, reuse=self.reuse, draft_tokens=drafts, prefill_chunk=chunk,
                             decorate=list, adaptive=cost is not None, lanes=self.device, clock=clock)  # fmt: skip
        self.scheduler = Scheduler(self.runner, max_sequences=slots, max_queue=1000)
        self.tokens, self.restarted = {}, set()
        close = self.runner.close

        def record(sequence):
            self.tokens[sequence.session.handle.id] = sequence.tokens[sequence.prompt_tokens :]
            if sequence.alone:
                self.restarted.add(sequence.session.handle.id)
            close(sequence)

        self.runner.close = record

    def submit(self, prompt, tokens=8, logprobs=None, **fields):
        request = Request(prompt=tuple(prompt), max_tokens=tokens, ignore_eos=True, **fields)
        return self.enqueue(request, tokens, logprobs=logprobs)

    def enqueue(self, request, tokens, logprobs=None, grammar=None, law=GREEDY):
        """`grammar`: makes one for a request, its prompt and its limit."""
        prepared = FRONTEND.prepare(request)
        handle = RequestHandle(request, on_cancel=self.scheduler.notify)
        made = grammar and grammar(request, prepared, tokens)
        reserve = made.reserve if made else 0
        machine = FRONTEND.machine(request, prepared)
        session = Session(handle, prepared, machine, limit=tokens, seed=0, reserve=reserve)
        sampler = Sampler(law, addressable=VOCAB, logprobs=logprobs, grammar=made)
        self.scheduler.enqueue(session, sampler)
        handle.session = session
        return handle

    def run(self, *handles):
        while not all(handle.done for handle in handles):
            self.scheduler.step()
        return [self.tokens[handle.id] for handle in handles]

    def ask(self, prompt, tokens=8, **fields):
        """Run one request alone; `(tokens, usage)`."""
        handle = self.submit(prompt, tokens, **fields)
        (made,) = self.run(handle)
        if handle.error is not None:
            raise handle.error
        return made, handle.session.usage

    def expect(self, prompt, tokens=8):
        """Run one request alone, whose answer must be the right one; its usage."""
        made, usage = self.ask(prompt, tokens)
        assert made == answer(prompt, tokens)
        return usage

    def reach(self, tokens, *handles):
        """Step until each of these requests has so many tokens or more."""
        while min(handle.session.completion_tokens for handle in handles) < tokens:
            self.scheduler.step()

    def audit(self):
        """Every page and slot has exactly the owners that there are, and every checkpoint holds what it says."""
        scheduler, cache = self.scheduler, self.reuse.cache
        running = [*scheduler._prefilling, *scheduler._decoding]
        owners = {}
        for pages in [s.pages for s in running] + [c.pages for c in cache.checkpoints]:
            for page in pages:
                owners[page] = owners.get(page, 0) + 1
        assert owners == self.reuse.pages._owners
        assert {s.slot for s in running} == set(self.reuse.slots._owners)
        assert {c.slot for c in cache.checkpoints} == set(self.reuse.saves._owners)
        for c in cache.checkpoints:
            self.state.check(c.slot, c.pages, c.length)
            assert self.state.rings or not self.state.slots[c.slot][2], "a checkpoint with a window pending"
            assert cache.keys(c) == tuple(self.state.rows(self.state.trunk, c.pages, c.length)[:, 0])
            if self.runner.draft_tokens:
                self.state.check_draft(c.pages, c.length - 1)
                assert c.carry.item() == self.state.slots[c.slot][0]
        if self.reuse.host is not None:
            self.audit_host(self.reuse.host)
        for i, sequence in enumerate(running):  # nobody writes where another may look
            for other in running[:i]:
                first = min(sequence.length, other.length) // PAGE
                assert not set(sequence.pages[first + 1 :]) & set(other.pages[first + 1 :])

    def audit_host(self, tier):
        """Every block has the owners that there are, and what is offered is written and is what it says."""
        owners = {}
        for block in [b for c in (*tier.cache.checkpoints, *(p.checkpoint for p in tier._pending)) for b in c.pages]:
            owners[block] = owners.get(block, 0) + 1
        assert owners == tier.blocks._owners
        for c in tier.cache.checkpoints:
            state, pages = c.pages[:2], c.pages[2:]
            (value, length), window = (self.host.held[block] for block in state)
            assert length == c.length and (self.state.rings or not window) and len(pages) == (length - 1) // PAGE + 1
            rows = np.concatenate([self.host.held[block][0] for block in pages])[:length]
            assert tier.cache.keys(c) == tuple(rows[:, 0]) and rows[-1, 1] == value
            if self.runner.draft_tokens:
                draft = np.concatenate([self.host.held[block][1] for block in pages])[: length - 1]
                assert (draft[:, 0] == rows[:-1, 1]).all() and (draft[:, 1] == rows[1:, 0]).all()
                assert c.carry.item() == value
