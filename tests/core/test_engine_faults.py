"""Faults of single requests, a dead model, and how running requests share the engine."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_support import Gate, assert_free, raw, until
from tiny import tiny_engine

from ninfer_core.errors import (
    EngineBusyError,
    EngineFailedError,
    InvalidRequestError,
    RequestTimeoutError,
)
from ninfer_core.runtime.loop import Restarts


@pytest.fixture(scope="module")
def shared():
    with tiny_engine(draft_tokens=2, max_sequences=4, max_queue=8, adaptive_drafts=True) as engine:
        yield engine


def poison(engine, seed, action):
    """Run `action(logits, index)` on the logits of the request with this seed, after every shared call."""
    original = engine._runner._rounds.verify
    round_ = engine._runner.round
    group = []

    def watch(sequences):
        group[:] = sequences
        return round_(sequences)

    def verify(windows, *rest):
        hidden, logits = original(windows, *rest)
        for i, sequence in enumerate(group):
            if sequence.session.request.sampling.seed == seed and sequence.emitted >= 3:
                action(logits, i)
        return hidden, logits

    engine._runner.round, engine._runner._rounds.verify = watch, verify


def raising(logits, index):
    raise RuntimeError("a secret of the inside")


@pytest.mark.parametrize("kind", ["nan", "exception"])
def test_a_fault_ends_its_request_only(kind):
    requests = [raw(seed=s, tokens=12) for s in (1, 2, 3)]
    with tiny_engine(draft_tokens=2, max_sequences=4) as engine:
        alone = [engine.generate(r).text for r in requests]
        poison(engine, 2, (lambda logits, i: logits[i].fill_(float("nan"))) if kind == "nan" else raising)
        handles = [engine.submit(r) for r in requests]
        with pytest.raises(EngineFailedError) as info:
            handles[1].result(60)
        assert ("not finite" if kind == "nan" else "RuntimeError") in str(info.value)
        assert "secret" not in str(info.value)
        others = [handles[i].result(60) for i in (0, 2)]
        assert [o.usage.completion_tokens for o in others] == [12, 12]
        if kind == "nan":
            assert [o.text for o in others] == [alone[0], alone[2]]
        assert_free(engine)
        assert engine.generate(requests[0]).text == alone[0]


def test_a_fault_in_the_text_machine_ends_its_request_only(shared):
    machine = shared.frontend.machine

    def broken(request, prompt):
        made = machine(request, prompt)
        if request.sampling.seed == 77:
            made.feed = lambda *args: 1 / 0
        return made

    shared.frontend.machine = broken
    try:
        bad, good = shared.submit(raw(seed=77)), shared.submit(raw(seed=78))
        with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
            bad.result(20)
        assert good.result(20).usage.completion_tokens == 8
    finally:
        shared.frontend.machine = machine
    assert_free(shared)


def test_a_fault_in_prefill_ends_its_request_only(shared):
    prefill = shared._runner.prefill

    def broken(sequence, room):
        if sequence.session.request.sampling.seed == 77:
            raise OSError("no")
        return prefill(sequence, room)

    shared._runner.prefill = broken
    try:
        bad, good = shared.submit(raw(seed=77)), shared.submit(raw(seed=78))
        with pytest.raises(EngineFailedError, match="OSError"):
            bad.result(20)
        assert good.result(20).usage.completion_tokens == 8
    finally:
        shared._runner.prefill = prefill
    assert_free(shared)


def test_a_dead_model_is_not_healthy():
    with tiny_engine(draft_tokens=0, max_sequences=1) as engine:
        engine._loop.rules = Restarts(pauses=(0.0, 0.0))
        engine.generate(raw(tokens=2))

        def dead(*args):
            raise RuntimeError("the device is gone")

        engine._runner._decoder.begin = dead
        handles = [engine.submit(raw()), engine.submit(raw(seed=2))]
        for handle in handles:
            with pytest.raises(EngineFailedError):
                handle.result(20)
        until(lambda: engine.state == "failed")
        assert engine.health()["status"] == "failed" and "load it again" in engine.health()["error"]
        with pytest.raises(EngineFailedError, match="load it again"):
            engine.submit(raw())


# scheduling


def test_a_long_prompt_holds_others_up_for_one_piece_at_most():
    with tiny_engine(draft_tokens=0, max_sequences=2) as engine:
        log, chunks = [], engine.stats()["chunks"]
        prefill, round_ = engine._runner.prefill, engine._runner.round
        engine._runner.prefill = lambda *args: (log.append("piece"), prefill(*args))[1]
        engine._runner.piece_seconds = lambda decoding: 0.0  # one layer
        engine._runner.round = lambda g: (log.append("round"), round_(g))[1]
        gate = Gate(engine, "round")
        running = engine.submit(raw(tokens=150))
        assert gate.reached.wait(60)
        long = engine.submit(raw(n=600, tokens=2))
        gate.opened.set()
        running.result(120), long.result(120)
        text = "".join(entry[0] for entry in log)
        start = text.index("r")
        assert text.count("p", start) > 10 and "pp" not in text[start : text.rindex("p")]
        assert engine.stats()["chunks"] == chunks + 1 + 10


def test_two_prompts_take_turns():
    with tiny_engine(draft_tokens=0, max_sequences=2) as engine:
        order = []
        gate = Gate(engine, "prefill")
        gated = engine._runner.prefill
        engine._runner.prefill = lambda s, room: (order.append(s.session.request.sampling.seed), gated(s, room))[1]
        a, b = engine.submit(raw(n=300, seed=1, tokens=1)), engine.submit(raw(n=100, seed=2, tokens=1))
        gate.opened.set()
        a.result(20), b.result(20)
        assert order in ([1, 2, 1, 2, 1, 1, 1], [1, 1, 2, 1, 2, 1, 1])  # as the second arrived in time for it or not


def test_many_threads_get_their_own_answers(shared):
    requests = [raw(n=10 + 9 * i, seed=i, tokens=10) for i in range(8)]
    alone = [shared.generate(r).text for r in requests]

    def ask(i):
        time.sleep(0.003 * (i % 5))
        return shared.generate(requests[i % 8]).text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(16))) == [alone[i % 8] for i in range(16)]
    assert_free(shared)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_crowd_of_all_kinds(shared, seed):
    """Random lengths, cancellations, deadlines, faults and budgets: each ends once, in its own way; nothing is lost."""
    rng = random.Random(seed)
    solo, crowd = {}, []
    for i in range(5):
        r = raw(n=rng.choice([1, 30, 64, 65, 140]), seed=seed * 100 + i, tokens=rng.choice([1, 5, 9]))
        solo[id(r)] = (r, shared.generate(r).text)
    kinds = [rng.choice(["plain", "plain", "cancel", "leave", "late", "bad"]) for _ in range(24)]

    def visit(kind):
        time.sleep(rng.random() * 0.3)
        r, text = solo[rng.choice(list(solo))]
        try:
            if kind == "bad":
                with pytest.raises(InvalidRequestError):
                    shared.submit(raw(tokens=-1))
            elif kind == "late":
                with pytest.raises(RequestTimeoutError):
                    shared.submit(raw(tokens=900, timeout=0.05)).result(60)
            elif kind == "cancel":
                handle = shared.submit(raw(n=200, tokens=700))
                time.sleep(rng.random() * 0.2)
                handle.cancel()
                assert list(handle)[-1].reason == "cancelled"
            elif kind == "leave":
                for _ in shared.stream(raw(n=100, tokens=700)):
                    break
            else:
                assert shared.generate(r).text == text
        except EngineBusyError:
            return "busy"
        return kind

    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(visit, kinds))
    assert crowd.count("plain") >= 1
    assert_free(shared)


def test_two_event_loops_at_once(shared):
    r = raw(tokens=10)
    expected = shared.generate(r).text

    async def several():
        return [c.text for c in await asyncio.gather(*(shared.agenerate(r) for _ in range(3)))]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: asyncio.run(several()), range(2))) == [[expected] * 3] * 2
