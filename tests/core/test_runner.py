"""The runner: cursors, windows, pages and slots, restarts."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny import tiny_engine

from ninfer_core.runtime.handle import RequestHandle
from ninfer_core.runtime.pool import Pool
from ninfer_core.runtime.runner import Runner
from ninfer_core.runtime.sampler import Sampler
from ninfer_core.runtime.session import Session
from ninfer_core.runtime.validation import SamplingParams
from ninfer_core.types import Request
from tests.serving import wait_for

PROMPT = tuple((i * 37) % 250 for i in range(100))


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(draft_tokens=3, max_sequences=2, context_length=256, prefix_cache=False) as engine:
        yield engine


@pytest.fixture
def runner(engine):
    """The engine's runner, driven by hand: its loop sleeps while nothing is submitted."""
    runner = engine._runner
    before = (runner.pages.free, runner.slots.free)
    with torch.inference_mode():
        yield runner
    runner.proposal = None
    assert (runner.pages.free, runner.slots.free) == before


def start(engine, prompt=PROMPT, tokens=40, seed=1, **fields):
    request = Request(prompt=prompt, ignore_eos=True, **fields)
    prepared = engine.frontend.prepare(request)
    machine = engine.frontend.machine(request, prepared)
    session = Session(RequestHandle(request), prepared, machine, limit=tokens, seed=seed)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), addressable=270, prompt=prompt)
    sequence = engine._runner.open(session, sampler)
    assert sequence is not None
    return sequence


def run(runner, sequence, until):
    while sequence.prefilling:
        runner.prefill(sequence)
    while sequence.emitted < until and not sequence.session.ended:
        assert runner.round([sequence]) == {}
    return sequence


def test_pool_counts_and_refuses_what_it_never_gave():
    pool = Pool(3, "page")
    assert pool.take(4) is None and pool.free == 3
    taken = pool.take(2)
    assert taken == [0, 1] and pool.free == 1
    pool.give([1])
    with pytest.raises(ValueError, match="page 1"):
        pool.give([1])
    assert pool.take(2) == [1, 2] and pool.take(1) is None


def test_prefill_goes_by_fixed_chunks(engine, runner):
    sequence = start(engine)
    lengths = []
    while sequence.prefilling:
        runner.prefill(sequence)
        lengths.append(sequence.length)
    assert lengths == [64, 100] and sequence.emitted == 1 and len(sequence.drafts) == 3
    runner.close(sequence)


def test_spare_time_is_used_in_the_loops_thread(engine, caplog, monkeypatch):
    """One step after the other while nothing runs; a step that fails ends them, and nothing else."""
    seen = []

    def steps():
        for _ in range(3):
            seen.append(threading.current_thread().name)
            yield
        raise RuntimeError("no plan for this shape")

    monkeypatch.setattr(engine._loop, "pause", 0.0)
    engine._runner.warming = steps()
    engine._scheduler.notify()
    assert wait_for(lambda: "no plan for this shape" in caplog.text, seconds=240)
    assert len(seen) == 3 and all(name.startswith("ninfer-") for name in seen)
    assert engine.submit(Request(prompt=PROMPT, max_tokens=3, ignore_eos=True)).result(240).usage.completion_tokens == 3


def test_requests_that_follow_each_other_do_not_wait_for_what_spare_time_is_used_for(engine, monkeypatch):
    """A step may take longer than reading a prompt: it begins after a pause, not at the end of a request."""
    seen = []

    def steps():
        seen.append(1)
        yield

    request = Request(prompt=PROMPT, max_tokens=1, ignore_eos=True)
    engine.submit(request).result(240)
    monkeypatch.setattr(engine._loop, "pause", 86400.0)
    engine._runner.warming = steps()
    for _ in range(3):
        engine.submit(request).result(240)
    assert seen == []
    engine._loop.pause = 0.0
    engine._scheduler.notify()
    assert wait_for(lambda: engine._runner.warming is None, seconds=240) and seen == [1]


def test_chunk_size_must_be_whole_blocks():
    with pytest.raises(ValueError, match="multiple of 64"):
        Runner(None, None, None, reuse=None, draft_tokens=0, prefill_chunk=96, decorate=list)


def test_the_cursor_follows_what_was_kept(engine, runner):
    sequence = run(runner, start(engine), 1)
    for _ in range(5):
        length, emitted = sequence.length, sequence.emitted
        assert runner.round([sequence]) == {}
        made = sequence.emitted - emitted
        assert sequence.length - length == made == sequence.commit >= 1
        assert sequence.length == len(sequence.tokens) - 1  # all but the anchor
    runner.close(sequence)


def test_the_last_token_takes_a_single_row(engine, runner):
    sequence = run(runner, start(engine, tokens=3), 1)
    runner.proposal = lambda s, d: [269, 269, 269]
    sequence.drafts = [269, 269, 269]
    assert runner.rows_for(sequence) == 4
    runner.round([sequence])
    assert sequence.session.room == 1 and runner.rows_for(sequence) == 1
    runner.round([sequence])
    assert sequence.session.outcome == "length" and sequence.emitted == 3
    runner.close(sequence)


def test_the_end_of_the_pages_takes_single_rows(engine, runner):
    sequence = run(runner, start(engine, tokens=20), 1)
    sequence.length = len(sequence.pages) * 64 - 3
    assert runner.rows_for(sequence) == 1
    sequence.length -= 1
    assert runner.rows_for(sequence) == 4
    runner.close(sequence)


def test_padding_rows_never_advance_state(engine, runner):
    """Without drafts a window is padded; the state afterwards is that of one row."""
    states = []
    for drafts in ([], [250, 251, 252]):
        sequence = run(runner, start(engine), 1)
        sequence.drafts = list(drafts)
        before = sequence.length
        runner.round([sequence])
        assert sequence.length == before + 1 == before + sequence.commit
        runner._decoder.flush(runner._state, [sequence.slot], [sequence.commit], [sequence.length])
        states.append((runner._state.s[:, sequence.slot].clone(), sequence.tokens))
        runner.close(sequence)
    assert torch.equal(states[0][0], states[1][0]) and states[0][1] == states[1][1]


def test_a_reused_slot_is_that_of_an_empty_sequence(engine, runner):
    first = run(runner, start(engine), 10)
    tokens, slot = list(first.tokens), first.slot
    runner.close(first)
    again = start(engine)
    assert again.slot == slot
    assert not runner._state.s[:, slot].any() and not runner._state.conv[:, slot].any()
    run(runner, again, 10)
    assert again.tokens[: len(tokens)] == tokens[: len(again.tokens)]
    runner.close(again)


def test_restart_reads_everything_again(engine, runner):
    sequence = run(runner, start(engine), 6)
    tokens = list(sequence.tokens)
    runner.restart(sequence)
    assert sequence.prefilling and sequence.alone and sequence.length == 0
    while sequence.prefilling:
        runner.prefill(sequence)
    assert sequence.tokens == tokens and sequence.length == len(tokens) - 1  # nothing was emitted twice
    assert runner.round([sequence]) == {}
    assert len(sequence.tokens) > len(tokens)
    runner.close(sequence)


def test_restart_before_the_first_token(engine, runner):
    sequence = start(engine)
    runner.prefill(sequence)
    runner.restart(sequence)
    run(runner, sequence, 3)
    other = run(runner, start(engine), 3)
    assert sequence.tokens[:103] == other.tokens[:103]
    runner.close(sequence)
    runner.close(other)


def test_scrub_leaves_nothing_that_is_not_a_number(engine, runner):
    sequence = run(runner, start(engine), 2)
    runner._state.kv_scales[:, :, :, sequence.pages] = float("nan")
    runner.scrub(sequence)
    assert not runner._state.kv_scales.isnan().any()
    runner.close(sequence)


def test_open_takes_nothing_when_it_cannot_take_all(engine, runner):
    first, second = start(engine, tokens=30), start(engine, tokens=30)
    pages = runner.pages.free
    assert runner.slots.free == 0
    assert runner.open(first.session, first.sampler) is None
    assert runner.pages.free == pages
    runner.close(first)
    runner.close(second)


def test_probe_makes_a_token_and_gives_everything_back(engine, runner):
    assert runner.probe() is True
    logits = runner._decoder.logits
    runner._decoder.logits = lambda h: logits(h) * float("nan")
    try:
        with pytest.raises(FloatingPointError):
            runner.probe()
    finally:
        runner._decoder.logits = logits
    sequences = [start(engine, tokens=5), start(engine, tokens=5)]
    assert runner.probe() is False
    for sequence in sequences:
        runner.close(sequence)


def test_forced_tokens_enter_the_state_as_known_ones(engine, runner):
    """After forced tokens the window begins with all of them, and no draft is judged before them."""
    sequence = run(runner, start(engine, thinking=True, thinking_budget=2), 1)
    while not sequence.session._machine.reasoning_tokens >= 2:
        runner.round([sequence])
    close = engine.frontend.tokenizer.encode("\n</think>\n\n")
    assert sequence.tokens[-len(close) :] == close
    waiting = len(sequence.tokens) - sequence.length
    assert waiting == len(close) + 1
    assert sequence.window(4).tokens == sequence.tokens[sequence.length : sequence.length + 4]
    runner.round([sequence])
    if waiting > 4:  # more known tokens than rows: nothing is sampled
        assert len(sequence.tokens) - sequence.length == waiting - 4
    assert sequence.session.usage.reasoning_tokens == 2
    runner.close(sequence)
