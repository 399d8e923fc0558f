"""The engine from outside: requests, cancellation, deadlines, limits, faults, threads, processes, names."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny import tiny_artifact, tiny_engine

from ninfer_core.engine import Engine, EngineOptions, get_engine, parse_output, render_prompt
from ninfer_core.errors import (
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineConflictError,
    EngineFailedError,
    EngineForkError,
    InvalidRequestError,
    MemoryPlanError,
    ModelNotFoundError,
    RequestCancelledError,
    RequestTimeoutError,
    UnsupportedError,
)
from ninfer_core.runtime.options import EngineFields
from ninfer_core.types import (
    Finish,
    Image,
    Message,
    ReasoningDelta,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
    Tool,
    ToolChoice,
)

TOOL = Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}})


def raw(n=20, seed=1, tokens=8, **fields) -> Request:
    """A request whose output has exactly `tokens` tokens."""
    prompt = tuple((i * 31 + seed) % 250 for i in range(n))
    sampling = fields.pop("sampling", Sampling(seed=seed))
    return Request(prompt=prompt, sampling=sampling, max_tokens=tokens, ignore_eos=True, **fields)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.002)


def assert_free(engine):
    """All pages and slots are back, and a request still works."""
    until(lambda: engine.stats()["running"] == 0 and engine.stats()["waiting"] == 0)
    stats = engine.stats()
    assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])
    assert engine.health()["status"] == "ok"
    assert engine.generate(raw(tokens=2)).usage.completion_tokens == 2


@pytest.fixture(scope="module")
def shared():
    with tiny_engine(draft_tokens=2, max_sequences=4, max_queue=8, adaptive_drafts=True) as engine:
        yield engine


@pytest.fixture
def single():
    """One running sequence, one that may wait; every chunk and round passes through `gate`."""
    with tiny_engine(draft_tokens=1, max_sequences=1, max_queue=1, context_length=512) as engine:
        yield engine


class Gate:
    """Holds the engine's loop before a verb until it is opened."""

    def __init__(self, engine, verb):
        self.reached, self.opened = threading.Event(), threading.Event()
        original = getattr(engine._runner, verb)

        def wait(*args):
            self.reached.set()
            assert self.opened.wait(20)
            return original(*args)

        setattr(engine._runner, verb, wait)


# plain use


def test_generate_stream_and_async_agree(shared):
    r = raw(tokens=10)
    whole = shared.generate(r)
    events = list(shared.stream(r))

    async def astream():
        return [event async for event in shared.astream(r)]

    async def agenerate():
        return await shared.agenerate(r)

    again = asyncio.run(astream())
    for found in (events, again):
        assert "".join(e.text for e in found if isinstance(e, TextDelta)) == whole.text
        assert isinstance(found[-1], Finish) and sum(isinstance(e, Finish) for e in found) == 1
        assert found[-1].usage == whole.usage
    assert asyncio.run(agenerate()).text == whole.text


def test_usage_and_timings_are_consistent(shared):
    completion = shared.generate(raw(n=70, tokens=10))
    usage, times = completion.usage, completion.timings
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (70, 10, 0)
    assert usage.accepted_tokens == sum(usage.accepted_by_position) <= usage.drafted_tokens
    assert usage.total_tokens == 80 and completion.finish_reason == "length" and completion.seed == 1
    assert 0 <= times.queue <= times.first_token
    assert times.first_token == pytest.approx(times.queue + times.prefill, abs=1e-6)
    assert times.decode > 0


def test_a_drawn_seed_is_reported_and_reproduces(shared):
    first = shared.generate(raw(tokens=12, sampling=Sampling(temperature=1.0)))
    assert shared.generate(raw(tokens=12, sampling=Sampling(temperature=1.0, seed=first.seed))).text == first.text


def test_messages_are_counted_as_used(shared):
    completion = shared.generate("How are you?", max_tokens=2)
    assert completion.usage.prompt_tokens == shared.count_tokens("How are you?")
    assert shared.count_tokens("How are you?", [TOOL]) > shared.count_tokens("How are you?")
    assert "How are you?" in shared.render("How are you?")


def test_unknown_options_name_the_nearest(shared):
    with pytest.raises(TypeError, match="temperature"):
        shared.generate("x", temperatur=1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Engine.load("demo", contextlength=5)


def test_describes_itself(shared):
    assert shared.state == "ready" and shared.context_length == 1024 and shared.route.startswith("cpu")
    assert shared.profile["max_input_tokens"] == 1024 and shared.profile["image_inputs"] is False
    assert "ninfer-demo" in shared.served_names and shared.spec.draft_tokens == 2


# cancellation and deadlines


def test_cancel_while_waiting(single):
    gate = Gate(single, "prefill")
    first = single.submit(raw())
    assert gate.reached.wait(20)
    waiting = single.submit(raw())
    assert waiting.queue_position == 0
    waiting.cancel()
    waiting.cancel()
    gate.opened.set()
    assert first.result(20).finish_reason == "length"
    with pytest.raises(RequestCancelledError):
        waiting.result(20)
    assert list(waiting)[-1].reason == "cancelled" and waiting.queue_position is None
    assert_free(single)
    assert single.stats()["cancelled"] == 1


def test_cancel_during_prefill(single):
    chunks = []
    original = single._runner.prefill

    def prefill(sequence):
        original(sequence)
        chunks.append(sequence.length)
        if len(chunks) == 2:
            sequence.session.handle.cancel()

    single._runner.prefill = prefill
    handle = single.submit(raw(n=400))
    with pytest.raises(RequestCancelledError):
        handle.result(20)
    assert chunks == [64, 128]  # no chunk after the one during which it came
    assert_free(single)


def test_cancel_during_decode_keeps_what_was_made(single):
    handle = single.submit(raw(tokens=400))
    events = []
    for event in handle:
        events.append(event)
        if len(events) == 3:
            handle.cancel()
    assert isinstance(events[-1], Finish) and events[-1].reason == "cancelled"
    assert 0 < events[-1].usage.completion_tokens < 400
    assert_free(single)


def test_leaving_the_iterator_cancels(single):
    for _ in single.stream(raw(tokens=400)):
        break
    assert_free(single)
    with single.submit(raw(tokens=400)) as handle:
        next(iter(handle))
    until(lambda: handle.done)
    assert handle.cancelled
    assert_free(single)


def test_leaving_the_async_iterator_cancels(single):
    async def leave():
        async for _ in single.astream(raw(tokens=400)):
            return

    asyncio.run(leave())
    assert_free(single)


def test_cancelling_the_task_cancels_the_request(single):
    handles = []

    async def main():
        handle = single.submit(raw(tokens=450))
        handles.append(handle)
        task = asyncio.create_task(handle.aresult())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    until(lambda: handles[0].done)
    assert handles[0].cancelled
    assert_free(single)


def test_result_timeout_does_not_cancel(single):
    gate = Gate(single, "prefill")
    handle = single.submit(raw(tokens=3))
    with pytest.raises(TimeoutError):
        handle.result(0.02)
    gate.opened.set()
    assert handle.result(20).usage.completion_tokens == 3


def test_deadline_in_decode_and_in_the_queue(single):
    gate = Gate(single, "prefill")
    running = single.submit(raw(tokens=400, timeout=0.3))
    assert gate.reached.wait(20)
    waiting = single.submit(raw(timeout=0.1))
    time.sleep(0.15)
    gate.opened.set()
    with pytest.raises(RequestTimeoutError, match="after 0 tokens"):
        waiting.result(20)
    with pytest.raises(RequestTimeoutError, match=r"0\.3 s"):
        running.result(20)
    assert_free(single)
    assert single.stats()["failed"] == 2


def test_after_any_cancel_the_output_is_unchanged(single):
    r = raw(n=130, tokens=10)
    first = single.generate(r).text
    for tokens in (0, 1, 4):
        handle = single.submit(raw(n=300, seed=5, tokens=200))
        for i, _ in enumerate(handle):
            if i == tokens:
                break
        assert single.generate(r).text == first


# limits


def test_full_queue_is_refused_with_a_hint(single):
    gate = Gate(single, "prefill")
    first = single.submit(raw())
    assert gate.reached.wait(20)
    second = single.submit(raw())
    with pytest.raises(EngineBusyError, match="queue limit is 1") as info:
        single.submit(raw())
    assert info.value.retry_after >= 1 and info.value.retryable
    gate.opened.set()
    first.result(20), second.result(20)
    assert_free(single)
    assert single.stats()["refused"] == 1


def test_priority_then_arrival():
    with tiny_engine(draft_tokens=0, max_sequences=1, max_queue=8) as engine:
        gate = Gate(engine, "prefill")
        order, handles = [], [engine.submit(raw())]
        assert gate.reached.wait(20)
        original = engine._runner.open
        engine._runner.open = lambda s, p: order.append(s.request.sampling.seed) or original(s, p)
        for seed, priority in ((11, 0), (12, 1), (13, -1), (14, 0)):
            handles.append(engine.submit(raw(seed=seed, priority=priority)))
        assert [h.queue_position for h in handles] == [None, 1, 3, 0, 2]
        gate.opened.set()
        for handle in handles:
            handle.result(20)
        assert order == [13, 11, 14, 12]


def test_context_overflow_before_anything_runs():
    with tiny_engine(context_length=128, draft_tokens=1) as engine:
        with pytest.raises(ContextOverflowError, match="maximum context length is 128 tokens") as info:
            engine.submit(raw(n=140))
        assert (info.value.n_prompt_tokens, info.value.n_ctx) == (140, 128) and "140 tokens > 128" in str(info.value)
        assert engine.stats()["requests"] == 0
        capped = engine.generate(raw(n=100, tokens=8192))
        assert capped.finish_reason == "length" and capped.usage.completion_tokens == 28
        assert engine.generate(raw(n=128, tokens=5)).usage.completion_tokens == 1
        assert_free(engine)


# faults


def poison(engine, seed, action):
    """Run `action(logits, index)` on the logits of the request with this seed, after every shared call."""
    original = engine._runner._rounds.verify
    round_ = engine._runner.round
    group = []

    def watch(sequences):
        group[:] = sequences
        return round_(sequences)

    def verify(windows):
        hidden, logits = original(windows)
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

    def broken(sequence):
        if sequence.session.request.sampling.seed == 77:
            raise OSError("no")
        prefill(sequence)

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
        engine.generate(raw(tokens=2))

        def dead(*args):
            raise RuntimeError("the device is gone")

        engine._runner._decoder.prefill = dead
        handles = [engine.submit(raw()), engine.submit(raw(seed=2))]
        for handle in handles:
            with pytest.raises(EngineFailedError):
                handle.result(20)
        until(lambda: engine.state == "failed")
        assert engine.health()["status"] == "failed"
        with pytest.raises(EngineFailedError, match="load it again"):
            engine.submit(raw())


# scheduling


def test_a_long_prompt_holds_others_up_for_one_chunk_at_most():
    with tiny_engine(draft_tokens=0, max_sequences=2) as engine:
        log = []
        prefill, round_ = engine._runner.prefill, engine._runner.round
        engine._runner.prefill = lambda s: (log.append("chunk"), prefill(s))[1]
        engine._runner.round = lambda g: (log.append("round"), round_(g))[1]
        running = engine.submit(raw(tokens=60))
        until(lambda: "round" in log)
        long = engine.submit(raw(n=600, tokens=2))
        running.result(60), long.result(60)
        text = "".join(entry[0] for entry in log)
        start = text.index("r")
        assert text.count("c", start) == 10 and "cc" not in text[start : text.rindex("c")]


def test_two_prompts_take_turns():
    with tiny_engine(draft_tokens=0, max_sequences=2) as engine:
        order = []
        gate = Gate(engine, "prefill")
        gated = engine._runner.prefill
        engine._runner.prefill = lambda s: (order.append(s.session.request.sampling.seed), gated(s))[1]
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


# thinking, stops


@pytest.mark.parametrize("budget", [1, 4])
def test_thinking_budget(budget):
    outputs = []
    for drafts in (0, 3):
        with tiny_engine(draft_tokens=drafts) as engine:
            completion = engine.generate(
                "Think.", thinking_budget=budget, max_tokens=40, seed=5, temperature=1.0, ignore_eos=True
            )
            assert completion.usage.reasoning_tokens <= budget
            assert "</think>" not in completion.text and completion.usage.completion_tokens == 40
            assert completion.text
            outputs.append((completion.message, completion.usage.reasoning_tokens))
            assert_free(engine)
    assert outputs[0] == outputs[1]


def test_thinking_budget_zero_is_thinking_off(shared):
    off = shared.generate("Think.", thinking=False, max_tokens=12, seed=5)
    zero = shared.generate("Think.", thinking_budget=0, max_tokens=12, seed=5)
    assert (zero.message, zero.usage.prompt_tokens) == (off.message, off.usage.prompt_tokens)


def test_an_open_think_block_is_reasoning(shared):
    events = list(shared.stream("Think.", max_tokens=12, seed=5, ignore_eos=True, logit_bias={269: -100}))
    assert any(isinstance(e, ReasoningDelta) for e in events) and not any(isinstance(e, TextDelta) for e in events)


@pytest.mark.parametrize("drafts", [0, 3, 5])
def test_a_stop_string_inside_a_burst_cuts_it(drafts):
    """A model that is made to write "abcdefgh..." stops inside a burst of accepted drafts; then a follow-up."""
    alphabet = [ord(c) for c in "abcdefghijklmnopqrstuvwxyz"]
    with tiny_engine(draft_tokens=drafts) as engine:
        spell(engine, alphabet)
        engine._runner.proposal = lambda s, d: [alphabet[(s.emitted + i) % 26] for i in range(len(d))]
        completion = engine.generate(Request(prompt="x", stop=("fg",), max_tokens=26))
        assert (completion.text, completion.finish_reason, completion.stop_sequence) == ("abcde", "stop", "fg")
        assert completion.usage.completion_tokens == 7  # a..g: the tokens of the stop string were generated
        usage = completion.usage
        assert usage.accepted_tokens <= usage.drafted_tokens and usage.accepted_tokens == sum(
            usage.accepted_by_position
        )
        whole = engine.generate(Request(prompt="x", max_tokens=26))
        assert whole.text == "abcdefghijklmnopqrstuvwxyz"
        assert_free(engine)


def spell(engine, alphabet):
    """Make the engine's logits prefer alphabet[i] at output position i, whatever the model says."""
    original = engine._runner._emit

    def emit(sequence, logits, drafts, *, drafted):
        logits = logits * 0.0
        for row in range(logits.shape[0]):
            logits[row, alphabet[(sequence.emitted + row) % len(alphabet)]] = 100.0
        return original(sequence, logits, drafts, drafted=drafted)

    engine._runner._emit = emit


# bad input


BAD = [
    (Request(), "messages"),
    (Request((Message("user", "x"),), prompt="y"), "prompt"),
    (Request(prompt=(-1,)), "prompt"),
    (Request(prompt=(99999999,)), "prompt"),
    (Request(prompt=(True,)), "prompt"),
    (Request(prompt=()), "prompt"),
    (Request(prompt=""), "prompt"),
    (Request(({"role": "user"},)), "messages[0]"),
    (Request((Message("robot", "x"),)), "messages[0]"),
    (Request((Message("user", 5),)), "messages[0].content"),
    (Request((Message("user", "\ud800"),)), "messages[0].content"),
    (Request((Message("user", (Text("a"), "b")),)), "messages[0].content[1]"),
    (raw(tokens=0), "max_tokens"),
    (raw(tokens=-1), "max_tokens"),
    (raw(tokens=1.5), "max_tokens"),
    (raw(sampling=Sampling(temperature=999999)), "temperature"),
    (raw(sampling=Sampling(temperature=float("nan"))), "temperature"),
    (raw(sampling=Sampling(temperature="hot")), "temperature"),
    (raw(sampling=Sampling(top_p=-1)), "top_p"),
    (raw(sampling=Sampling(top_p=1.01)), "top_p"),
    (raw(sampling=Sampling(top_k=-2)), "top_k"),
    (raw(sampling=Sampling(min_p=float("inf"))), "min_p"),
    (raw(sampling=Sampling(repetition_penalty=0)), "repetition_penalty"),
    (raw(sampling=Sampling(presence_penalty=2.1)), "presence_penalty"),
    (raw(sampling=Sampling(frequency_penalty=-2.1)), "frequency_penalty"),
    (raw(sampling=Sampling(seed=1 << 64)), "seed"),
    (raw(sampling=Sampling(logit_bias={"AI": -100})), "logit_bias"),
    (raw(sampling=Sampling(logit_bias={99999999: 5})), "logit_bias"),
    (raw(sampling=Sampling(logit_bias={5: float("nan")})), "logit_bias"),
    (raw(sampling=Sampling(logit_bias={5: 101})), "logit_bias"),
    (raw(sampling=Sampling(logit_bias=None)), "logit_bias"),
    (raw(stop=("x",) * 17), "stop"),
    (raw(stop=("",)), "stop"),
    (raw(stop=(5,)), "stop"),
    (raw(stop_token_ids=(-3,)), "stop_token_ids"),
    (raw(logprobs=21), "logprobs"),
    (raw(thinking_budget=-1), "thinking_budget"),
    (raw(thinking="maybe"), "thinking"),
    (raw(timeout=0), "timeout"),
    (raw(timeout=float("nan")), "timeout"),
    (raw(priority=0.5), "priority"),
    (Request((Message("user", "x"),), tools=(Tool(""),)), "tools[0]"),
    (Request((Message("user", "x"),), tools=(Tool("f", parameters={"x": float("nan")}),)), "tools[0].parameters"),
    (Request((Message("user", "x"),), tools=(TOOL,), tool_choice=ToolChoice("required", ("other",))), "tool_choice"),
    (Request((Message("user", "x"),), tool_choice=ToolChoice("required")), "tool_choice"),
]


@pytest.mark.parametrize("request_,param", BAD, ids=[f"{i}-{p}" for i, (_, p) in enumerate(BAD)])
def test_bad_values_are_refused_by_name(shared, request_, param):
    started = time.perf_counter()
    with pytest.raises(InvalidRequestError) as info:
        shared.submit(request_)
    assert info.value.param == param
    assert time.perf_counter() - started < 1.0


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def test_a_schema_nested_2000_deep_is_refused(shared):
    with pytest.raises(InvalidRequestError, match="nested deeper") as info:
        shared.submit(Request((Message("user", "x"),), tools=(Tool("f", parameters=nested(2000)),)))
    assert info.value.param == "tools[0].parameters"


def test_odd_but_right_requests_work(shared):
    assert shared.generate(raw(tokens=1, sampling=Sampling(logit_bias={}))).usage.completion_tokens == 1
    assert shared.generate(raw(tokens=1, sampling=Sampling(top_k=-1, top_p=0.0))).usage.completion_tokens == 1
    many = [Tool(f"tool{i}") for i in range(21)]
    assert shared.count_tokens("x", many) > 1000
    with pytest.raises(ContextOverflowError):
        shared.generate("x", tools=[Tool(f"tool{i}") for i in range(512)])
    with pytest.raises(ContextOverflowError):
        shared.generate("y" * 50_000)
    assert_free(shared)


UNSUPPORTED = [
    (Request((Message("user", "x"),), response_format=ResponseFormat("json")), "response_format"),
    (Request((Message("user", "x"),), tools=(TOOL,), tool_choice=ToolChoice("required")), "tool_choice"),
    (Request((Message("user", "x"),), tools=(TOOL,), tool_choice=ToolChoice("required", ("bash",))), "tool_choice"),
    (Request((Message("user", (Text("x"), Image(data=b"1"))),)), "messages[0].content[1]"),
]


@pytest.mark.parametrize("request_,param", UNSUPPORTED, ids=[p for _, p in UNSUPPORTED])
def test_what_cannot_be_honoured_is_refused_by_name(shared, request_, param):
    with pytest.raises(UnsupportedError) as info:
        shared.submit(request_)
    assert info.value.param == param


def test_tool_choice_none_and_auto_work(shared):
    for mode in ("none", "auto"):
        assert (
            shared.generate("x", tools=[TOOL], tool_choice=ToolChoice(mode), max_tokens=1).usage.completion_tokens == 1
        )


# life and death


def test_close_ends_what_runs_and_what_waits():
    engine = tiny_engine(draft_tokens=1, max_sequences=1, max_queue=4)
    running, waiting = engine.submit(raw(tokens=900)), engine.submit(raw())
    next(events := iter(running))
    engine.close()
    engine.close()
    for handle in (running, waiting):
        with pytest.raises(EngineClosedError):
            handle.result(20)
    with pytest.raises(EngineClosedError):
        for _ in events:
            pass
    with pytest.raises(EngineClosedError):
        engine.submit(raw())
    assert engine.state == "closed" and engine.health()["status"] == "closed"
    stats = engine.stats()
    assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])


def test_an_engine_that_nobody_holds_stops_its_thread():
    engine = tiny_engine(draft_tokens=0)
    thread = engine._loop._thread
    engine.generate(raw(tokens=1))
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error(shared):
    shared.generate(raw(tokens=1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            shared.submit(raw())
        except EngineForkError:
            shared.close()  # must not hang either
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_free(shared)


def test_options_are_checked():
    assert EngineFields.__annotations__.keys() | {"model"} == {f.name for f in dataclasses.fields(EngineOptions)}
    for field, value in (
        ("draft_tokens", 6),
        ("device", "tpu"),
        ("prefill_chunk", 100),
        ("max_sequences", 0),
        ("context_length", 0),
        ("kv_cache", "int4"),
        ("threads", True),
    ):
        with pytest.raises(InvalidRequestError) as info:
            EngineOptions(**{field: value})
        assert info.value.param == field
    with pytest.raises(InvalidRequestError, match="trained for at most 1024"):
        tiny_engine(context_length=2048)
    with pytest.raises(MemoryPlanError, match="KV cache of one sequence"):
        tiny_engine(memory=2 << 20, context_length=1024)
    with pytest.raises(ModelNotFoundError):
        Engine.load("no-such-model")


def test_auto_context_shrinks_to_the_memory():
    with tiny_engine(memory=2 << 20, context_length="auto") as engine:
        assert 64 <= engine.context_length < 1024
        assert engine.plan.nbytes <= 2 << 20
        assert_free(engine)


@pytest.mark.parametrize("drafts,context", [(0, 128), (1, 127), (3, 125), (3, 128)])
def test_a_prompt_that_fills_the_context_gets_its_one_token(drafts, context):
    """Also where the pages of one sequence are all there is, and end exactly with the context."""
    with tiny_engine(draft_tokens=drafts, max_sequences=1, context_length=context) as engine:
        assert engine.stats()["pages_total"] == -(-(context + drafts) // 64)
        for n in (context, context - 1, context - 2):
            made = engine.generate(raw(n=n, tokens=50)).usage.completion_tokens
            assert made == max(1, context - n)
        assert_free(engine)


def test_requests_wait_for_pages_in_order():
    """Pages for one full context: two long requests run one after the other, a short one does not overtake."""
    with tiny_engine(draft_tokens=0, max_sequences=3, context_length=512, memory=2_200_000) as engine:
        pages = engine.stats()["pages_total"]
        assert 8 <= pages < 16
        gate = Gate(engine, "prefill")
        long = [engine.submit(raw(n=200, seed=i, tokens=300)) for i in (1, 2)]
        short = engine.submit(raw(n=10, tokens=2))
        assert gate.reached.wait(20)
        until(lambda: engine.stats()["running"] == 1)
        assert (long[1].queue_position, short.queue_position) == (0, 1)
        for handle in long:
            handle.cancel()
        gate.opened.set()
        assert short.result(20).usage.completion_tokens == 2
        assert_free(engine)


# names


@pytest.fixture
def names():
    made = []

    def get(name, **options):
        spec = EngineOptions(model=str(tiny_artifact()), device="cpu", threads=1, **options) if options else None
        engine = get_engine(name, spec)
        made.append(engine)
        return engine

    yield get
    for engine in made:
        engine.close()


def test_a_named_engine_is_made_once_and_loaded_late(names):
    engine = names("a", draft_tokens=1)
    assert names("a") is engine and names("a", draft_tokens=1) is engine
    assert engine.state == "new" and engine.context_length == 1024 and engine.count_tokens("hi") > 1
    assert engine.profile["tool_calling"] and "ninfer-demo" in engine.served_names and engine.state == "new"
    assert engine.health() == {"status": "new"} and engine.stats() == {}
    assert engine.generate(raw(tokens=2)).usage.completion_tokens == 2
    assert engine.state == "ready" and engine.health()["status"] == "ok"
    engine.close()
    engine.close()
    assert engine.state == "closed"
    with pytest.raises(EngineClosedError):
        engine.submit(raw())
    assert names("a", draft_tokens=2) is not engine


def test_other_options_under_one_name_are_refused(names):
    names("a", draft_tokens=1)
    with pytest.raises(EngineConflictError, match="draft_tokens: 2 != 1"):
        names("a", draft_tokens=2)


def test_one_loaded_engine_per_process(names):
    first, second = names("a", draft_tokens=1), names("b", draft_tokens=2)
    first.load()
    with pytest.raises(EngineConflictError, match="'a'"):
        second.load()
    first.close()
    second.load()
    assert second.state == "ready"


def test_one_load_for_many_callers(names):
    engine = names("a", draft_tokens=1)
    with ThreadPoolExecutor(6) as pool:
        loaded = list(pool.map(lambda _: engine.load(), range(6)))
    assert len({id(e) for e in loaded}) == 1
    assert asyncio.run(engine.aload()) is loaded[0]


def test_a_failed_load_raises_the_same_error_for_all(names):
    engine = names("a", memory=1000)
    entered = threading.Event()
    loader = engine._registry.loader

    def slow(spec):
        entered.set()
        time.sleep(0.1)
        return loader(spec)

    engine._registry.loader = slow
    errors = []

    def load():
        try:
            engine.load()
        except MemoryPlanError as error:
            errors.append(error)

    try:
        first = threading.Thread(target=load)
        first.start()
        assert entered.wait(10)
        others = [threading.Thread(target=load) for _ in range(3)]
        for thread in others:
            thread.start()
        for thread in (first, *others):
            thread.join(20)
    finally:
        engine._registry.loader = loader
    assert len(errors) == 4 and len({id(e) for e in errors}) == 1
    assert engine.state == "failed"
    with pytest.raises(MemoryPlanError):
        engine.submit(raw())


# module functions


def test_render_and_parse_need_no_weights():
    path = str(tiny_artifact())
    text = render_prompt([Message("user", "Hi")], model=path)
    assert text.endswith("<think>\n") and "Hi" in text
    assert "</think>" in render_prompt([{"role": "user", "content": "Hi"}], thinking=False, model=path)
    message = parse_output(
        "Plan.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        [TOOL],
        thinking=True,
    )
    assert message.reasoning == "Plan." and message.tool_calls[0].arguments == {"command": "ls"}
    assert parse_output("<tool_call>").text == "<tool_call>"


def test_importing_the_engine_does_not_import_torch():
    program = (
        "import sys, ninfer_core; ninfer_core.Engine; ninfer_core.get_engine('x'); import ninfer_core.testing;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
