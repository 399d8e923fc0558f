"""The fused path on a GPU: against the torch path, and equal bits whatever else is in a call, in a graph or not."""

from __future__ import annotations

import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from ninfer_core import store
from ninfer_core.artifact import Artifact
from ninfer_core.engine import Engine
from ninfer_core.errors import NotFiniteError
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.fused import FusedDecoder, FusedMTP
from ninfer_core.model.mtp import MTP
from ninfer_core.packed import load_packed, reference_weights
from ninfer_core.state import FusedState, State
from ninfer_core.types import Message, Request, Sampling

HIDDEN = 0.05
"""Relative error of hidden rows: activations of eight and eleven bits in groups of 32, through the demo's layers."""
TOP1 = 0.97
"""Agreement of the likeliest token on random ids, where the model is unsure; on text see `test_demo_text`."""
TEXT = 0.99
DEVICE = "cuda"


@pytest.fixture(scope="module")
def demo():
    with Artifact.open(store.resolve("demo")) as artifact:
        weights = load_packed(artifact, DEVICE)
        config = artifact.config
    decoder = FusedDecoder(weights, config, context=1024)
    reference = reference_weights(weights, config)
    return config, decoder, FusedMTP(decoder), Decoder(reference, config), MTP(reference, config)


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 6000, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def state_of(config, slots: int = 3, pages: int = 40) -> FusedState:
    return FusedState(config, slots=slots, pages=pages, max_draft=5, device=DEVICE)


TABLE = torch.tensor([7, 2, 19, 0, 5, 31, 1, 3, 12, 8])


def test_rows_agree_with_the_torch_path(demo):
    config, decoder, mtp, reference, reference_mtp = demo
    tokens, state = ids(100), state_of(config)
    other = State(config, slots=3, pages=40, max_draft=5, device=DEVICE)
    hidden = decoder.prefill(state, tokens, 1, 0, TABLE)
    want = reference.prefill(other, tokens, 1, 0, TABLE)
    assert error(hidden, want) < HIDDEN
    got, logits = decoder.logits(hidden), reference.logits(want)
    assert (got.argmax(-1) == logits.argmax(-1)).float().mean() >= TOP1
    drafted = mtp.rows(state, tokens[None, 1:], hidden[None, :-1], [1], [0], TABLE[None], [0])
    assert (
        error(drafted, reference_mtp.rows(other, tokens[None, 1:], want[None, :-1], [1], [0], TABLE[None], [0]))
        < HIDDEN
    )
    assert (mtp.draft(drafted[0]) == reference_mtp.draft(drafted[0].float())).float().mean() >= TOP1


def play(demo, plan, more, slot=1):
    """Windows of (rows, rows that count), wrong ids behind those that count; the rows that count, and the state."""
    config, decoder, *_ = demo
    state = state_of(config)
    decoder.prefill(state, ids(37), slot, 0, TABLE)
    at, commit, rows = 0, 0, []
    for count, kept in plan:
        window = ids(1, count, seed=at + 5)
        window[0, :kept] = more[at : at + kept]
        hidden = decoder.verify(state, window, [slot], [37 + at], [commit], TABLE[None], [0])
        rows.append(hidden[0, :kept])
        at, commit = at + kept, kept
    decoder.flush(state, [slot], [commit], [37 + at])
    return torch.cat(rows), state


def test_windows_leave_the_bits_of_single_rows(demo):
    more = ids(40, seed=9)
    plan = [(4, 2), (4, 4), (4, 1), (6, 6), (2, 1), (5, 5), (3, 3), (1, 1), (6, 1), (4, 4)]
    single, one = play(demo, [(1, 1)] * sum(kept for _, kept in plan), more)
    window, other = play(demo, plan, more, slot=2)
    assert torch.equal(single, window)
    assert all(torch.equal(a.s[1], b.s[2]) for a, b in zip(one.gdn, other.gdn, strict=True))


@pytest.mark.parametrize("most", [1, 2])
def test_windows_leave_the_bits_of_single_rows_where_splits_grow(demo, most):
    """Attention splits of another length from token 64 or 128 on, in the middle of a window."""
    work = demo[1].work
    kept, work.most = work.most, most
    try:
        more = ids(120, seed=11)
        plan = [(4, 2), (4, 4), (4, 1), (6, 6), (2, 1), (5, 5), (3, 3)] * 5
        single, _ = play(demo, [(1, 1)] * sum(count for _, count in plan), more)
        window, _ = play(demo, plan, more, slot=2)
        assert torch.equal(single, window)
    finally:
        work.most = kept


def test_bf16_pages_agree_with_the_torch_path(demo):
    config, decoder, _, reference, _ = demo
    tokens = ids(100)
    state = FusedState(config, slots=3, pages=40, kv_dtype="bf16", max_draft=5, device=DEVICE)
    other = State(config, slots=3, pages=40, kv_dtype="bf16", max_draft=5, device=DEVICE)
    chunks, decoder.chunks = decoder.chunks, None
    try:
        hidden = decoder.prefill(state, tokens, 1, 0, TABLE)
        again = decoder.verify(state, ids(1, 3, seed=4), [1], [100], [0], TABLE[None], [0])
        alone = decoder.verify(state, ids(1, 3, seed=4)[:, :1], [1], [100], [0], TABLE[None], [0])
    finally:
        decoder.chunks = chunks
    assert error(hidden, reference.prefill(other, tokens, 1, 0, TABLE)) < HIDDEN
    assert torch.equal(again[:, 0], alone[:, 0])


def test_a_copied_slot_goes_on_with_the_same_bits(demo):
    decoder = demo[1]
    more = ids(20, seed=3)
    _, state = play(demo, [(4, 3)], more)
    state.copy_slot(1, 0)
    state.copy_page(int(TABLE[0]), 39)
    table = TABLE.clone()
    table[0] = 39
    want = decoder.verify(state, more[None, 3:6], [1], [40], [0], TABLE[None], [0])
    assert torch.equal(decoder.verify(state, more[None, 3:6], [0], [40], [0], table[None], [0]), want)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_rows_do_not_see_their_neighbours(demo, rows):
    config, decoder, *_ = demo
    state, tables = state_of(config, slots=8, pages=72), torch.arange(72).view(8, 9)
    prompts = [ids(5 + 30 * i, seed=i) for i in range(8)]
    for slot, prompt in enumerate(prompts):
        decoder.prefill(state, prompt, slot, 0, tables[slot])
    window, lengths = ids(8, rows, seed=50), [len(prompt) for prompt in prompts]
    together = decoder.verify(state, window, list(range(8)), lengths, [0] * 8, tables, [0] * 8)
    logits = decoder.logits(together)
    for i in range(8):
        alone = decoder.verify(state, window[i : i + 1], [i], [lengths[i]], [0], tables[i : i + 1], [0])
        assert torch.equal(alone[0], together[i])
        assert torch.equal(decoder.logits(alone)[0], logits[i])


def requests(tokens: int = 48, **fields) -> list[Request]:
    made = []
    for i in range(8):
        prompt = tuple((i * 37 + j * 11 + j // 5) % 5000 for j in range(20 + 45 * i))
        law = Sampling(temperature=0.0) if i % 2 else Sampling(temperature=1.0, top_k=20, top_p=0.95, min_p=0.0, seed=i)
        made.append(Request(prompt=prompt, sampling=law, max_tokens=tokens, ignore_eos=True, **fields))
    return made


def tokens_of(engine: Engine, asked: list[Request], together: bool) -> list[list[int]]:
    """All output ids, those without text included."""
    found, close = {}, engine._runner.close

    def keep(sequence):
        found[id(sequence.session.request)] = sequence.tokens[sequence.prompt_tokens :]
        close(sequence)

    engine._runner.close = keep
    handles = [engine.submit(r) for r in asked] if together else []
    for i, request in enumerate(asked):
        (handles[i] if together else engine.submit(request)).result(120)
    deadline = time.monotonic() + 10
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    engine._runner.close = close
    return [found[id(request)] for request in asked]


def loaded(drafts: int, **options) -> Engine:
    fields = {"max_sequences": 8, "adaptive_drafts": False, "prefix_cache": False} | options
    return Engine.load("demo", device="cuda", draft_tokens=drafts, **fields)


@pytest.fixture(scope="module")
def plain():
    """Tokens without drafts, one request at a time."""
    with loaded(0) as engine:
        return tokens_of(engine, requests(), together=False)


@pytest.mark.parametrize("drafts", range(6))
def test_tokens_are_the_same_for_any_drafts_and_neighbours(plain, drafts):
    with loaded(drafts) as engine:
        assert tokens_of(engine, requests(), together=False) == plain
        assert tokens_of(engine, requests(), together=True) == plain
        assert engine.stats()["failed"] == 0
        lanes = engine._runner._flights.rounds
        lanes._use_graphs = False
        assert tokens_of(engine, requests(), together=True) == plain


def test_the_host_draws_what_the_device_draws(plain):
    with loaded(3) as engine:
        assert tokens_of(engine, requests(logprobs=1), together=True) == plain


def test_drafting_that_rests_changes_nothing(plain):
    with loaded(3, adaptive_drafts=True, prefix_cache=True) as engine:
        assert tokens_of(engine, requests(), together=True) == plain


def test_every_page_and_slot_comes_back():
    with loaded(3) as engine:
        before = engine.stats()
        handles = [engine.submit(request) for request in requests(400)]
        for handle in handles[::2]:
            handle.cancel()
        for handle in handles[1::2]:
            handle.result(120)
        deadline = time.monotonic() + 10
        while engine.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        after = engine.stats()
        assert (after["pages_free"], after["slots_free"]) == (before["pages_free"], before["slots_free"])


def test_demo_text():
    """Top-1 agreement on the model's own answers, and acceptance within a point of the CPU's."""
    texts = ("Tell me about the sea.", "What is two plus three?", "Who are you?", "Why is the sky blue?")
    asked = [
        Request(
            (Message("user", text),), max_tokens=160, thinking=False, sampling=Sampling(temperature=0.0), logprobs=0
        )
        for text in texts
    ]
    share, answers = {}, {}
    for device in ("cpu", "cuda"):
        with Engine.load("demo", device=device, adaptive_drafts=False, prefix_cache=False) as engine:
            usage = [engine.submit(request).result(120) for request in asked]
            share[device] = sum(u.usage.accepted_tokens for u in usage) / sum(u.usage.drafted_tokens for u in usage)
            prompts = [engine.frontend.prepare(request).token_ids for request in asked]
            if device == "cpu":
                answers = [[entry.token_id for entry in u.logprobs] for u in usage]
                continue
            decoder, same, count = engine._runner._decoder, 0, 0
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens = torch.tensor([*prompt, *answer[:-1]], device=DEVICE)
                state = state_of(engine.config)
                hidden = decoder.prefill(state, tokens, 0, 0, list(range(-(-len(tokens) // 64))))
                best = decoder.logits(hidden[len(prompt) - 1 :])[:, : engine.tokenizer.addressable].argmax(-1)
                same, count = (
                    same + sum(a == b for a, b in zip(best.tolist(), answer, strict=True)),
                    count + len(answer),
                )
            assert same / count >= TEXT
    assert abs(share["cpu"] - share["cuda"]) < 0.01


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("where", ["recurrent state", "keys"])
def test_a_state_that_is_not_finite_ends_its_request_alone(plain, drafts, where):
    """What int8 activations must not wash away: the round on the device flags it, and the pages are cleaned."""
    asked = requests()
    with loaded(drafts) as engine:
        state, round_, spoiled = engine._runner._state, engine._runner.round, []

        def spoil(group):
            for sequence in group:
                if sequence.session.request is asked[3] and sequence.emitted >= 8 and not spoiled:
                    spoiled.append(sequence.slot)
                    if where == "keys":
                        state.kv_scales[:, 0, :, sequence.pages[0]] = float("inf")
                    else:
                        for layer in state.gdn:
                            layer.s[sequence.slot] = float("nan")
            return round_(group)

        engine._runner.round = spoil
        handles = [engine.submit(request) for request in asked]
        with pytest.raises(NotFiniteError, match=handles[3].id):
            handles[3].result(120)
        for handle in (handle for i, handle in enumerate(handles) if i != 3):
            assert handle.result(120).usage.completion_tokens == 48
        engine._runner.round = round_
        assert engine.health()["status"] == "ok" and not state.kv_scales.isinf().any()
        assert tokens_of(engine, asked, together=True) == plain
