"""Lanes and the kernels between layers under Triton's interpreter. A program: prints one JSON line a case.

Run with TRITON_INTERPRET=1 in a process of its own: the interpreter is chosen when Triton is first imported.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from ninfer_core.config import config_from_dict
from ninfer_core.kernels import lanes_decode, rows_decode
from ninfer_core.kernels._order import Activation, fine_rows_ref
from ninfer_core.kernels.head_decode import Candidates
from ninfer_core.kernels.lanes_decode import (
    LANE,
    LANE_WIDTH,
    MOST_DRAFTS,
    ORDER,
    ORDER_WIDTH,
    RESULT_WIDTH,
    SCRATCH_WIDTH,
)
from ninfer_core.kernels.rope import rope_tables
from ninfer_core.kernels.sampling import pick, uniform
from ninfer_core.runtime.flights import Start
from ninfer_core.runtime.grammar import Row
from ninfer_core.runtime.graphs import DeviceRounds
from ninfer_core.runtime.orders import VOID, Order
from ninfer_core.runtime.validation import SamplingParams
from tests.kernels.interpreter import run

VOCABULARY, ADDRESSABLE = 8192, 8000
LAWS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=s)
    for t, k, p, m, s in (
        (0.0, 20, 1.0, 0.0, 1), (1.0, 20, 0.95, 0.0, 12345678901234567), (0.7, 1, 1.0, 0.0, 3), (0.6, 64, 0.8, 0.0, 4),
        (1.3, 50, 1.0, 0.05, 2**63 + 5), (2.0, 64, 1.0, 0.0, 7), (1e-6, 5, 0.5, 0.0, 8),
    )
]  # fmt: skip


def i32(*shape, fill=-1):
    return torch.full(shape, fill, dtype=torch.int32)


class NoDecoder:
    """What `DeviceRounds` needs to make lanes."""

    device = torch.device("cpu")


def lanes_of(starts):
    """A lane table with these sequences in slots 1, 2, ..., written as the runtime writes it."""
    rounds = DeviceRounds(NoDecoder(), None, None, slots=9, pages=8, addressable=ADDRESSABLE)
    for slot, start in enumerate(starts, 1):
        rounds.seat(slot, [slot, slot + 10], start)
    return rounds.lanes, rounds.tables, torch.arange(1, len(starts) + 1, dtype=torch.int32)


def candidates(logits):
    cut = logits.clone()
    cut[:, ADDRESSABLE:] = -torch.inf
    value, at = cut.view(len(cut), -1, 32).nan_to_num(-torch.inf, torch.inf, -torch.inf).max(-1)
    return Candidates(value.contiguous(), (at + 32 * torch.arange(value.shape[1])).int())


def draw(kind):
    """Every law at two rows each, against the host's draw."""
    rows = 2 * len(LAWS)
    logits = torch.randn(rows, VOCABULARY) * 3
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "crowd":  # more of the largest value than there is room for; some a little above
        logits = torch.where(torch.rand(rows, VOCABULARY) < 0.5, torch.tensor(1.0), logits.clamp(max=0.0))
        logits[:, 777:1900:181] = 1.25
    if kind == "sick":
        logits[3, 96:128], logits[7, 40] = torch.nan, torch.inf
    starts = [Start(0, 0, 0, 10 * i, 100, law) for i, law in enumerate(LAWS)]
    lanes, _, slots = lanes_of(starts)
    token, bad = i32(rows), i32(rows)
    scratch = i32(rows, SCRATCH_WIDTH), torch.full((rows, SCRATCH_WIDTH), torch.nan)
    lanes_decode.sample(logits, candidates(logits), lanes, slots, *scratch, token, bad, addressable=ADDRESSABLE)
    assert bad.tolist() == [int(kind == "sick" and row in (3, 7)) for row in range(rows)], bad
    for i, law in enumerate(LAWS):
        for r in range(2):
            row = 2 * i + r
            if not bad[row]:
                want = pick(logits[row, :ADDRESSABLE], law, uniform(law.seed, 10 * i + r))
                assert token[row] == want, f"{law}, row {r}: {token[row]}, not {want}"
            assert 0 <= token[row] < ADDRESSABLE


def accept():
    """Four rows a sequence: none, some, all drafts; a stop; a limit; a sick row that counts, one that does not; an end."""
    drafts = [11, 12, 13]
    cases = [  # remaining, stops, drawn, sick rows, emitted, what is left, whether they are drafts alone
        (50, (), [9, 8, 7, 6], (), [9], 49, 0),
        (50, (7,), [11, 12, 7, 6], (), [11, 12, 7], 0, 0),
        (50, (), [11, 12, 13, 6], (), [11, 12, 13, 6], 46, 0),
        (50, (12, 77), [11, 12, 13, 6], (), [11, 12], 0, 1),
        (3, (), [11, 12, 13, 6], (), [11, 12, 13], 0, 1),
        (50, (), [11, 7, 13, 6], (1,), [11, 7], 0, 0),
        (50, (), [11, 7, 13, 6], (2, 3), [11, 7], 48, 0),
        (0, (), [11, 12, 13, 6], (), [], 0, 0),
    ]
    starts = [Start(5, 100 + i, 2, 7, c[0], LAWS[0], drafts, c[1]) for i, c in enumerate(cases)]
    lanes, _, slots = lanes_of(starts)
    drawn = torch.tensor([c[2] for c in cases], dtype=torch.int32).flatten()
    bad = torch.tensor([[int(r in c[3]) for r in range(4)] for c in cases], dtype=torch.int32).flatten()
    count = len(cases)
    results, follow, last = i32(count, RESULT_WIDTH), i32(4 * count), i32(count)
    chain = i32(MOST_DRAFTS, count)
    lanes_decode.accept(lanes, slots, drawn, bad, results, follow, last, chain)
    for i, (remaining, _, _, sick, emitted, left, alone) in enumerate(cases):
        row, lane = results[i].tolist(), lanes[i + 1].tolist()
        faulty = any(r < len(emitted) for r in sick)
        assert row[:2] == [len(emitted), faulty + 2 * alone] and row[2 : 2 + row[0]] == emitted, row
        assert follow[4 * i : 4 * i + len(emitted)].tolist() == emitted
        assert last[i] == max(len(emitted) - 1, 0)
        assert chain[:, i].tolist() == [100 + i + len(emitted) + k for k in range(MOST_DRAFTS)]
        assert lane[LANE.length] == 100 + i + len(emitted) and lane[LANE.commit] == len(emitted)
        assert lane[LANE.anchor] == (emitted[-1] if emitted else 5)
        assert lane[LANE.index] == 7 + len(emitted) and lane[LANE.remaining] == left and lane[LANE.rounds] == 1
    lanes[1 : count + 1, LANE.remaining] = 50
    pattern = torch.zeros(64, dtype=torch.int32)
    pattern[1] = 2
    lanes_decode.accept(lanes, slots, drawn, bad * 0, results, follow, last, chain, pattern)
    assert results[0, :5].tolist() == [3, 0, 11, 12, 7], "forced: drafts as they are, then what was drawn"


def orders_of(*values):
    """An order table: what is said of each sequence by the names of columns, nothing elsewhere."""
    table = i32(len(values), ORDER_WIDTH)
    for i, order in enumerate(values):
        for name, value in order.items():
            table[i, getattr(ORDER, name)] = value
    return table


def allowed(kind, generator):
    """Legal ids of a row: one, a few near each other, a few far apart, half of all, all but some."""
    ids = torch.arange(ADDRESSABLE)
    if kind == "one":
        return ids == 4321
    if kind == "near":
        return (ids >= 97) & (ids < 123)
    if kind == "far":
        return ids % 997 == 3
    if kind == "half":
        return torch.rand(ADDRESSABLE, generator=generator) < 0.5
    return (ids < 500) | (ids > 520)


def masked(kind):
    """Rows under masks draw what the host draws of the legal ids, by every law; rows beside them keep every bit."""
    rows, generator = 2 * len(LAWS), torch.Generator().manual_seed(3)
    logits = torch.randn(rows, VOCABULARY) * 3
    if kind == "half":
        logits = (logits * 2).round() / 2  # ties
    logits[6, 64:96] = torch.nan
    kept = logits.clone()
    found, before = candidates(logits), candidates(logits)
    legal = torch.stack([allowed(kind, generator) for _ in range(rows)])
    bits = np.zeros((rows, VOCABULARY // 8), np.uint8)
    bits[:, : ADDRESSABLE // 8] = np.packbits(legal.numpy(), axis=1, bitorder="little")
    masks = torch.from_numpy(bits.view(np.int32).copy())
    held = [0b11, 0b10, 0b01, 0b11, 0b11, 0b00, 0b11]
    sent = orders_of(*({"masked": word, "most": i} for i, word in enumerate(held)))
    orders = i32(len(LAWS) + 1, ORDER_WIDTH, fill=77)
    lanes_decode.mask(logits, found, sent, masks, orders[:-1], addressable=ADDRESSABLE)
    assert torch.equal(orders[:-1], sent) and (orders[-1] == 77).all(), "the orders are taken along"
    lanes, _, slots = lanes_of([Start(0, 0, 0, 10 * i, 100, law) for i, law in enumerate(LAWS)])
    token, bad = i32(rows), i32(rows)
    scratch = i32(rows, SCRATCH_WIDTH), torch.full((rows, SCRATCH_WIDTH), torch.nan)
    lanes_decode.sample(logits, found, lanes, slots, *scratch, token, bad, addressable=ADDRESSABLE)
    assert bad.tolist() == [int(row == 6) for row in range(rows)]
    for i, law in enumerate(LAWS):
        for r in range(2):
            row, u = 2 * i + r, uniform(law.seed, 10 * i + r)
            if not held[i] >> r & 1:
                assert torch.equal(logits[row].view(torch.int32), kept[row].view(torch.int32))
                assert torch.equal(found.value[row], before.value[row]) and torch.equal(found.row[row], before.row[row])
                assert token[row] == pick(kept[row, :ADDRESSABLE], law, u)
            elif row != 6:
                ids = legal[row].nonzero()[:, 0]
                want = ids[pick(kept[row, ids], law, u)]
                assert token[row] == want, f"{kind}, {law}, row {r}: {token[row]}, not {want}"
                assert torch.equal(logits[row, ids], kept[row, ids])


def accept_by_orders():
    """No more than an order says; nothing at all leaves the lane, but for the rows that the round has applied."""
    drafts, drawn = [11, 12, 13], [11, 12, 13, 6]
    most = [4, 2, 1, 0, 3]
    lanes, _, slots = lanes_of([Start(5, 100, 2, 7, 50, LAWS[0], drafts, (13,) if i == 4 else ()) for i in range(5)])
    results, follow, last, chain = i32(5, RESULT_WIDTH), i32(20), i32(5), i32(MOST_DRAFTS, 5)
    orders = orders_of(*({"most": n, "masked": 0} for n in most))
    sampled, bad = torch.tensor(drawn * 5, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    bad[12:16] = 1  # of the one that emits nothing
    lanes_decode.accept(lanes, slots, sampled, bad, results, follow, last, chain, None, orders)
    for i, count in enumerate(most):
        row, lane = results[i].tolist(), lanes[i + 1].tolist()
        assert row[:2] == [count, 2 * (0 < count < 4)] and row[2 : 2 + count] == drawn[:count]
        assert lane[LANE.length] == 100 + count and lane[LANE.commit] == count and lane[LANE.index] == 7 + count
        assert lane[LANE.anchor] == (drawn[count - 1] if count else 5)
        assert lane[LANE.remaining] == (0 if i == 4 else 50 - count)


def keep_by_orders():
    """What must follow takes the place of drafts where the round ended as foreseen; a tape takes that of both."""
    lanes, _, slots = lanes_of([Start(5, 100, 0, 2, 50, LAWS[0]) for _ in range(3)])
    made = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    results = i32(3, RESULT_WIDTH)
    results[:, 0] = torch.tensor([2, 2, 1])
    orders = orders_of({"behind": 1}, {"behind": 3}, {"behind": 0})
    orders[:, ORDER.known : ORDER.known + 2] = torch.tensor([[70, 71], [80, 81], [90, -1]])
    drafts = made.clone()
    lanes_decode.keep_drafts(lanes, slots, drafts, (results, orders))
    want = [[70, 71, 7], [2, 5, 8], [90, 6, 9]]
    assert drafts.t().tolist() == want == lanes[1:4, LANE.drafts : LANE.drafts + 3].tolist()
    tape = torch.arange(9)[:, None].int() * 100 + torch.arange(5)[None].int()
    pattern = torch.zeros(64, dtype=torch.int32)
    pattern[0] = 2
    lanes_decode.keep_drafts(lanes, slots, drafts, (results, orders), (tape, pattern))
    assert lanes[1:4, LANE.drafts : LANE.drafts + 3].tolist() == [
        [s * 100 + 2, s * 100 + 3, s * 100 + 3] for s in (1, 2, 3)
    ]
    lanes[1:4, LANE.index] = 4
    lanes_decode.keep_drafts(lanes, slots, made, None, (tape, pattern))
    assert lanes[1, LANE.drafts : LANE.drafts + 3].tolist() == [104, 0, 1], "behind its end"


class RowsOnly(NoDecoder):
    """A trunk whose logits are given."""

    turns = rows_decode.rope_turns(64, 1e4, "cpu")
    config = type("Config", (), {"vocab_size": VOCABULARY})()
    work = type(
        "Work", (), {"splits": lambda *_: 1, "rows_within": lambda *_: 64, "pages": lambda self, splits, pages: pages}
    )()

    def __init__(self, logits):
        self.logits = logits

    def forward(self, state, call, keep):
        return torch.zeros(call.tokens.shape[0], 8)

    def choose(self, rows, addressable):
        made = self.logits[:rows].clone()
        return made, candidates(made)


def rounds_by_orders():
    """`begin` and `finish`: orders of all kinds reach the device, sequence by sequence and row by row."""
    logits = torch.randn(8, VOCABULARY)
    rounds = DeviceRounds(RowsOnly(logits), None, None, slots=9, pages=8, addressable=ADDRESSABLE)
    greedy, best = LAWS[0], logits[:, :ADDRESSABLE].argmax(-1)
    mask = np.packbits(np.arange(ADDRESSABLE) % 7 == 2, bitorder="little").tobytes()
    sevenths = 2 + 7 * logits[:, 2:ADDRESSABLE:7].argmax(-1)
    banned = np.array([best[5], 31, 32, 7999])
    without = logits[5, :ADDRESSABLE].clone()
    without[banned] = -torch.inf
    for turn in range(3):
        drafts = [[int(sevenths[0])], [4000], [int(best[4])], [1]]
        for slot in range(4):
            rounds.seat(slot, [slot], Start(5, 60, 1, 3, 50, greedy, drafts[slot]))
        orders = [
            Order(2, (Row(mask=mask), Row(forced=77))),
            Order(1, (Row(forced=4000 + turn),)),
            Order(2, (Row(), Row(banned=banned))),
            VOID,
        ]
        launched = rounds.begin(list(range(4)), 2, 0, 100).finish(orders)
        want = [[int(sevenths[0]), 77], [4000 + turn], [int(best[4]), int(without.argmax())], []]
        assert [result.tokens for result in launched.read()] == want
        free = rounds.launch([8], 2, 0, 100).read()[0].tokens
        assert free == [] and rounds.lanes[8, LANE.rounds] == turn + 1
    rounds.seat(8, [8], Start(5, 60, 1, 3, 50, greedy, [int(best[0])]))
    assert rounds.launch([8], 2, 0, 100).read()[0].tokens == best[:2].tolist(), "no mask is left"


def open_and_keep():
    starts = [Start(40 + i, 60 + i, i, 0, 9, LAWS[0], [1 + i, 2 + i], rope_delta=3 * i) for i in range(3)]
    lanes, tables, slots = lanes_of(starts)
    out = type("Call", (), {name: i32(3) for name in ("lengths", "commits", "deltas")})()
    out.tokens, out.pages = i32(9), i32(3, tables.shape[1])
    lanes_decode.open_round(lanes, tables, slots, 3, 2, out)
    assert out.tokens.tolist() == [40, 1, 2, 41, 2, 3, 42, 3, 4]
    assert (out.lengths.tolist(), out.commits.tolist(), out.deltas.tolist()) == ([60, 61, 62], [0, 1, 2], [0, 3, 6])
    assert out.pages[:, :2].tolist() == [[1, 11], [2, 12], [3, 13]] and (out.pages[:, 2:] == -1).all()
    lanes_decode.keep_drafts(lanes, slots, torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32))
    assert lanes[1:4, LANE.drafts : LANE.drafts + 2].tolist() == [[7, 4], [8, 5], [9, 6]]
    assert lanes.shape[1] == LANE_WIDTH and (lanes[0] == 0).all()


def many_rounds():
    """Two rounds of 200 sequences, each in a launch of its own, are read in the end: none has taken another's place."""
    work = type("Work", (), {"splits": lambda self, tokens: 1, "rows_within": lambda self, splits: 8})()
    rounds = DeviceRounds(type("Decoder", (NoDecoder,), {"work": work})(), None, None, slots=200, pages=8,
                          addressable=ADDRESSABLE)  # fmt: skip

    def emit(batch, rows, drafts, splits):
        results = rounds._buffers.results[:batch]
        results[:, 0], results[:, 1] = 1, 0
        results[:, 2] = rounds._buffers.slots[:batch]

    rounds._round = emit
    launched = [rounds.launch([slot], 1, 0, 10) for _ in range(2) for slot in range(200)]
    assert [one.read()[0].tokens for one in launched] == [[slot] for _ in range(2) for slot in range(200)]
    rounds.clear()
    assert not rounds.lanes.any() and not rounds.tables.any()
    assert rounds.launch([7], 1, 0, 10).read()[0].tokens == [7]


def rope():
    lengths, deltas = torch.tensor([0, 262_140], dtype=torch.int32), torch.tensor([0, -7], dtype=torch.int32)
    cos, sin = torch.full((6, 64), torch.nan), torch.full((6, 64), torch.nan)
    rows_decode.rope_rows(rows_decode.rope_turns(64, 1e7, "cpu"), lengths, deltas, cos, sin)
    places = torch.cat([n + d + torch.arange(3) for n, d in zip(lengths, deltas, strict=True)])
    for got, want in zip((cos, sin), rope_tables(places, 64, 1e7), strict=True):
        assert (got - want[:, 0]).abs().max() < 1e-6


def finish():
    rows, width = 4, 512
    u, x = torch.randn(rows, width), torch.randn(rows, width)
    a = Activation.from_rows(u, (x * x).view(rows, -1, 32).sum(-1))
    want = u * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    ring, slots, lengths = torch.zeros(3, 5, width).bfloat16(), *(torch.tensor(v).int() for v in ([2, 1], [9, 3]))
    out, h = Activation.empty(rows, width, 1, "cpu"), torch.full((rows, width), torch.nan)
    rows_decode.finish_rows(u, a, out, h, keep=(ring, slots, lengths))
    assert torch.allclose(h, want, rtol=1e-6, atol=1e-7)
    words, scales = fine_rows_ref(h)
    assert torch.equal(out.rows(rows)[0], words) and torch.allclose(out.rows(rows)[1], scales, rtol=1e-6)
    for row, (slot, place) in enumerate(((2, 9 % 5), (2, 10 % 5), (1, 3), (1, 4))):
        assert torch.allclose(ring[slot, place].float(), h[row], rtol=2**-7)
    one, some = Activation.empty(2, width, 1, "cpu"), torch.full((2, width), torch.nan)
    rows_decode.finish_rows(u, a, one, some, pick=torch.tensor([1, 0], dtype=torch.int32))
    assert torch.equal(some, h[[1, 2]]) and torch.equal(one.rows(2)[0], out.rows(4)[0][[1, 2]])
    rows_decode.quantize_rows(some, one)
    assert torch.equal(one.rows(2)[0], out.rows(4)[0][[1, 2]]), "logits of kept rows see the same codes"


def draft_input():
    rows, width = 2, 256
    u, x, hidden = torch.randn(rows, width), torch.randn(rows, width), torch.randn(rows, width)
    norm = (torch.randn(width) * 0.1).bfloat16()
    a = Activation.from_rows(u, (x * x).view(rows, -1, 32).sum(-1))
    out = Activation.empty(rows, 2 * width, 1, "cpu")
    rows_decode.draft_input(u, a, hidden, norm, out, eps=1e-6)
    left = u * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    right = hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True) + 1e-6) * (1 + norm.float())
    want = torch.cat([left, right], 1)
    assert ((out.values(rows) - want).norm() / want.norm()) < 0.002


def workspace():
    """Splits cover the context in powers of two up to as many as the card holds; then fewer rows fit."""
    text = {
        "hidden_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 256, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 384, "max_position_embeddings": 65536,
        "intermediate_size": 256,
    }  # fmt: skip
    from ninfer_core.model.fused import Workspace

    work = Workspace(config_from_dict({"text_config": text}, "ninfer-demo"), "meta", context=65536)
    for tokens in (1, 1024, 1025, 16_000, 65_536, 65_544):
        splits, pages = work.splits(tokens), -(-tokens // 64)
        needed = max(page // (max(page // work.most, min(page // 64, 1)) + 1) + 1 for page in range(pages))
        assert splits >= needed and work.rows_within(splits) * splits <= work.parts
        assert work.pages(splits, 1030) >= pages
    assert work.splits(65_536) == work.most and work.splits(1025) == 32
    assert work.rows_within(work.splits(8_192)) == 64 and work.rows_within(work.splits(65_536)) == 32


CASES = {
    "draw": lambda: draw("plain"), "draw ties": lambda: draw("ties"), "draw crowd": lambda: draw("crowd"),
    "draw sick": lambda: draw("sick"),
    "masked one": lambda: masked("one"), "masked near": lambda: masked("near"), "masked far": lambda: masked("far"),
    "masked half": lambda: masked("half"), "masked most": lambda: masked("most"),
    "accept by orders": accept_by_orders, "keep by orders": keep_by_orders, "rounds by orders": rounds_by_orders,
    "accept": accept, "open and keep": open_and_keep, "many rounds": many_rounds,
    "rope": rope, "finish": finish, "draft input": draft_input,
    "workspace": workspace,
}  # fmt: skip


if __name__ == "__main__":
    run(CASES, sys.argv[1:])
