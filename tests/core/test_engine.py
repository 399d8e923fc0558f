"""The engine from outside: requests, cancellation, deadlines, limits, faults, threads, processes, names."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_support import TOOL, Gate, assert_free, raw, until
from tiny import tiny_engine

from ninfer_core.engine import Engine, EngineOptions
from ninfer_core.errors import (
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineForkError,
    InvalidRequestError,
    MemoryPlanError,
    ModelNotFoundError,
    RequestCancelledError,
    RequestTimeoutError,
)
from ninfer_core.runtime.options import EngineFields
from ninfer_core.types import (
    Finish,
    ReasoningDelta,
    Request,
    Sampling,
    TextDelta,
)


@pytest.fixture(scope="module")
def shared():
    with tiny_engine(draft_tokens=2, max_sequences=4, max_queue=8, adaptive_drafts=True) as engine:
        yield engine


@pytest.fixture
def single():
    """One running sequence, one that may wait; every chunk and round passes through `gate`."""
    with tiny_engine(draft_tokens=1, max_sequences=1, max_queue=1, context_length=512) as engine:
        yield engine


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
        # The first one met an empty prefix cache, or not, as other tests with this engine ran before.
        assert dataclasses.replace(found[-1].usage, known_tokens=whole.usage.known_tokens) == whole.usage
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
    with pytest.raises(TypeError, match="context_length"):
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

    def prefill(sequence, room):
        over = original(sequence, room)
        chunks.append(sequence.length)
        if len(chunks) == 2:
            sequence.session.handle.cancel()
        return over

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_exits_though_a_lock_was_held_at_the_fork(shared):
    forked, held = threading.Event(), threading.Event()

    def hold():
        with shared._scheduler._lock:
            held.set()
            forked.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # kills the child, should it hang
        shared._finalizer()  # as at the interpreter's exit
        os._exit(0)
    forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_free(shared)


def test_the_stats_behind_a_last_event_count_its_request_as_ended(shared):
    until(lambda: shared.stats()["running"] == 0)
    for i in range(20):
        before = shared.stats()
        shared.generate(raw(tokens=2, seed=i))
        stats = shared.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])
        assert stats["kv_cache_usage"] == 0
        assert stats["finished"] == before["finished"] + 1
        assert stats["completion_tokens"] == before["completion_tokens"] + 2


@pytest.mark.parametrize("way", ["generate", "iterate", "batches"])
def test_an_interrupt_of_the_main_thread_ends_the_request(shared, way):
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    endless = raw(tokens=900, sampling=Sampling(seed=1))
    with pytest.raises(KeyboardInterrupt):
        if way == "generate":
            shared.generate(endless)
        elif way == "iterate":
            list(shared.stream(endless))
        else:
            list(shared.submit(endless).batches())
    timer.join()
    assert_free(shared)


def test_closing_ends_a_crowd_and_its_readers():
    engine = tiny_engine(draft_tokens=1, max_sequences=2, max_queue=30)
    handles = [engine.submit(raw(n=70, tokens=400, seed=i)) for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(lambda handle=handle: list(handle)) for handle in handles[:6]]
        until(lambda: handles[0]._events)
        for closer in [pool.submit(engine.close) for _ in range(2)]:
            closer.result(20)
        for reader in readers:
            with pytest.raises(EngineClosedError):
                reader.result(20)
    for handle in handles:
        assert handle.wait(5) and isinstance(handle.error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.agenerate(raw()))
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["pages_free"] == stats["pages_total"]


def test_loading_and_closing_leaves_no_threads():
    before = threading.active_count()
    for _ in range(5):
        with tiny_engine(draft_tokens=1) as engine:
            engine.generate(raw(tokens=2))
    until(lambda: threading.active_count() <= before)


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
    with tiny_engine() as engine:
        assert engine.context_length == 1024
        memory = engine.plan.footprint.weights + (2 << 20)
    with tiny_engine(memory=memory, context_length="auto") as engine:
        assert 64 <= engine.context_length < 1024
        assert engine.plan.nbytes <= memory
        assert_free(engine)


@pytest.mark.parametrize("drafts,context", [(0, 128), (1, 127), (3, 125), (3, 128)])
def test_a_prompt_that_fills_the_context_gets_its_one_token(drafts, context):
    """Also where the pages of one sequence are all there is, and end exactly with the context."""
    with tiny_engine(draft_tokens=drafts, max_sequences=1, context_length=context, prefix_cache=False) as engine:
        assert engine.stats()["pages_total"] == -(-(context + drafts) // 64)
        for n in (context, context - 1, context - 2):
            made = engine.generate(raw(n=n, tokens=50)).usage.completion_tokens
            assert made == max(1, context - n)
        assert_free(engine)


def test_requests_wait_for_pages_in_order():
    """Pages for one full context: two long requests run one after the other, a short one does not overtake."""
    with tiny_engine(draft_tokens=0, max_sequences=3, context_length=512, memory=9_000_000) as engine:
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
