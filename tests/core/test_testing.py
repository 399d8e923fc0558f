"""The scripted engine: what users' tests and our servers' tests stand on."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ninfer_core.errors import (
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
)
from ninfer_core.testing import Delay, End, Fault, Refuse, Reply, Script, ScriptedEngine, Tokens, Wait
from ninfer_core.types import Finish, Message, ReasoningDelta, TextDelta, Tool, ToolCall, ToolCallDelta, ToolCallStart

BASH = Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}})
MV = Tool("mv", "", {"type": "object", "properties": {"src": {"type": "string"}, "dst": {"type": "string"}}})


def texts(events):
    return [e.text for e in events if isinstance(e, TextDelta)]


def test_a_text_answers_every_request_in_both_modes():
    engine = ScriptedEngine("Hello!")
    for thinking in (True, False, None):
        completion = engine.generate("hi", thinking=thinking)
        assert (completion.text, completion.message.reasoning, completion.finish_reason) == ("Hello!", None, "stop")
    assert engine.generate(prompt="raw").text == "Hello!"
    assert len(engine.requests) == len(engine.handles) == 4


def test_scripts_are_chosen_by_rule_and_times():
    engine = ScriptedEngine(
        Script("first", times=1),
        Script("tools", when=lambda r: bool(r.tools)),
        Script(lambda r: r.messages[-1].text.upper()),
    )
    assert engine.generate("a").text == "first"
    assert engine.generate("b").text == "B"
    assert engine.generate("b", tools=[BASH]).text == "tools"
    with pytest.raises(EngineFailedError, match="no script"):
        ScriptedEngine(Script("x", when=lambda r: False)).generate("a")


def test_reply_with_reasoning_and_calls_goes_through_the_real_parser():
    calls = [ToolCall("", "bash", {"command": "ls -l\n"}), ToolCall("", "mv", {"src": "a", "dst": "b"})]
    engine = ScriptedEngine(Reply("On it.", reasoning="Hm.", tool_calls=calls))
    completion = engine.generate("x", tools=[BASH, MV])
    assert (completion.message.reasoning, completion.text) == ("Hm.", "On it.")
    assert [(c.name, dict(c.arguments)) for c in completion.message.tool_calls] == [
        (c.name, c.arguments) for c in calls
    ]
    assert completion.finish_reason == "tool_calls"
    assert len({c.id for c in completion.message.tool_calls}) == 2
    assert engine.generate("x", thinking=False).message.tool_calls == ()  # no tools given: markup is text


def test_steps_are_raw_model_output():
    engine = ScriptedEngine(["Plan.", "</think>\n\n", "Hi"])
    message = engine.generate("x").message
    assert (message.reasoning, message.text) == ("Plan.", "Hi")


@pytest.mark.parametrize("burst", [1, 2, 3, 7, 1000])
def test_bursts_of_any_size_give_the_same_call(burst):
    raw = "<tool_call>\n<function=mv>\n<parameter=src>\na.txt\n</parameter>\n<parameter=dst>\nb.txt\n</parameter>\n</function>\n</tool_call>"
    engine = ScriptedEngine([raw], burst=burst)
    events = list(engine.stream("x", tools=[MV], thinking=False))
    joined = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
    assert joined == '{"src": "a.txt", "dst": "b.txt"}'
    assert sum(isinstance(e, ToolCallStart) for e in events) == 1 and events[-1].reason == "tool_calls"


def test_tokens_are_counted_as_written():
    engine = ScriptedEngine(
        [Tokens("one"), Tokens(" two", " three", drafted=5), Tokens("</think>", "\n\nans", "wer", drafted=2)]
    )
    usage = engine.generate("x").usage
    assert (usage.completion_tokens, usage.reasoning_tokens, usage.rounds) == (6, 3, 3)
    assert (usage.drafted_tokens, usage.accepted_tokens) == (7, 3)
    assert usage.accepted_by_position == (2, 1, 0, 0, 0)
    assert usage.prompt_tokens == engine.count_tokens("x")


def test_characters_over_tokens():
    engine = ScriptedEngine([Tokens(b"ok \xf0\x9f"), Tokens(b"\x98\x80!")])
    assert texts(engine.stream("x", thinking=False)) == ["ok ", "😀!"]


def test_malformed_bytes_end_normally_and_leave_others_alone():
    engine = ScriptedEngine(
        Script([Tokens(b"A\xf0\x9f"), Tokens(b"B"), Tokens(b"\xc3")], when=lambda r: r.messages[0].text == "bad"),
        "fine",
    )
    bad, good = engine.stream("bad", thinking=False), engine.stream("good")
    assert "".join(texts(bad)) == "A\ufffdB\ufffd"
    assert "".join(texts(good)) == "fine"
    assert engine.generate("after").text == "fine" and engine.health()["status"] == "ok"


def test_stop_over_tokens():
    engine = ScriptedEngine([Tokens("alpha"), Tokens(" beta"), Tokens(" gam"), Tokens("ma"), Tokens(" delta")])
    events = list(engine.stream("x", thinking=False, stop="beta gamma"))
    assert "".join(texts(events)) == "alpha " and not any("beta" in t for t in texts(events))
    assert (events[-1].reason, events[-1].stop_sequence) == ("stop", "beta gamma")
    assert events[-1].usage.completion_tokens == 4


def test_max_tokens_and_the_context_end_with_length():
    engine = ScriptedEngine("x" * 100, context_length=64)
    completion = engine.generate("hi", thinking=False, max_tokens=5)
    assert (completion.text, completion.finish_reason) == ("xxxxx", "length")
    room = 64 - engine.count_tokens("hi", thinking=False)
    assert engine.generate("hi", thinking=False, max_tokens=8192).usage.completion_tokens == room
    with pytest.raises(ContextOverflowError, match="> 64 maximum"):
        engine.generate("y" * 64)
    assert ScriptedEngine([End("length")]).generate("x", thinking=False).finish_reason == "length"


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_thinking_budget(burst):
    """(a) 0 is thinking off; (b) 4 of 50 thoughts, then the answer; (c) closed earlier: nothing injected."""
    engine = ScriptedEngine(["t" * 50, "</think>\n\n", "Answer"], burst=burst)
    completion = engine.generate("x", thinking_budget=4)
    assert (completion.message.reasoning, completion.text) == ("tttt", "Answer")
    assert completion.usage.reasoning_tokens == 4
    early = engine.generate("x", thinking_budget=60)
    assert (early.message.reasoning, early.text, early.usage.completion_tokens) == ("t" * 50, "Answer", 59)
    off = ScriptedEngine("Answer")
    assert off.count_tokens("x", thinking=False) == off.generate("x", thinking_budget=0).usage.prompt_tokens


def test_logprobs_come_with_their_text():
    engine = ScriptedEngine([Tokens("Hel", "lo")])
    completion = engine.generate("x", thinking=False, logprobs=2)
    assert [(lp.token, lp.bytes, lp.logprob) for lp in completion.logprobs] == [
        ("Hel", b"Hel", 0.0),
        ("lo", b"lo", 0.0),
    ]
    assert all(len(lp.top) == 2 and lp.top[0].token_id == lp.token_id for lp in completion.logprobs)
    assert engine.generate("x", thinking=False).logprobs == ()


def test_faults_where_they_are_written():
    engine = ScriptedEngine(["abc", Fault(ValueError("boom"))])
    seen = []
    with pytest.raises(EngineFailedError, match="boom"):
        for event in engine.stream("x", thinking=False):
            seen.append(event)
    assert "".join(texts(seen)) == "abc"
    with pytest.raises(RequestTimeoutError):
        ScriptedEngine(Fault(RequestTimeoutError("t"))).generate("x")
    with pytest.raises(EngineBusyError) as info:
        ScriptedEngine(Refuse(EngineBusyError("full", retry_after=7))).generate("x")
    assert info.value.retry_after == 7


def test_validation_is_the_real_one():
    engine = ScriptedEngine("x")
    with pytest.raises(InvalidRequestError) as info:
        engine.generate("x", temperature=9)
    assert info.value.param == "temperature" and engine.requests == []


def test_cancellation_is_seen():
    engine = ScriptedEngine(["a", Wait(threading.Event()), "b"])
    stream = engine.stream("x", thinking=False)
    assert next(stream).text == "a"
    stream.close()
    assert engine.wait_idle()
    (cancelled,) = engine.cancelled
    assert list(cancelled)[-1].reason == "cancelled"
    with pytest.raises(RequestCancelledError):
        cancelled.result(1)


def test_async_iteration_and_cancellation():
    engine = ScriptedEngine(["a", Delay(30), "b"])

    async def main():
        async for _ in engine.astream("x", thinking=False):
            break
        assert await asyncio.to_thread(engine.wait_idle)
        slow = asyncio.create_task(engine.agenerate("x"))
        await asyncio.sleep(0.05)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    asyncio.run(main())
    assert engine.wait_idle() and len(engine.cancelled) == 2


def test_deadline():
    started = time.monotonic()
    with pytest.raises(RequestTimeoutError):
        ScriptedEngine([Delay(30)]).generate("x", timeout=0.05)
    assert time.monotonic() - started < 5


def test_queue_order_limit_and_position():
    gate = threading.Event()
    engine = ScriptedEngine(Script([Wait(gate), "a"]), max_sequences=1, max_queue=2)
    first = engine.stream("1")
    later = [engine.stream("2"), engine.stream("3", priority=-1)]
    assert [h.queue_position for h in engine.handles] == [None, 1, 0]
    with pytest.raises(EngineBusyError, match="queue limit is 2"):
        engine.stream("4")
    assert engine.stats()["waiting"] == 2
    gate.set()
    for stream in (first, *later):
        assert isinstance(list(stream)[-1], Finish)


def test_close_ends_everything():
    engine = ScriptedEngine([Wait(threading.Event())], max_sequences=1)
    streams = [engine.stream("a"), engine.stream("b")]
    engine.close()
    for stream in streams:
        with pytest.raises(EngineClosedError):
            list(stream)
    with pytest.raises(EngineClosedError):
        engine.generate("x")
    assert engine.wait_idle()


def test_state_can_be_set():
    engine = ScriptedEngine("x")
    engine.state = "loading"
    assert engine.health()["status"] == "loading"
    with pytest.raises(EngineBusyError, match="loading"):
        engine.generate("x")
    engine.state = "failed"
    with pytest.raises(EngineFailedError):
        engine.generate("x")
    engine.state = "ready"
    assert engine.generate("x").text == "x"


def test_events_can_be_written_directly():
    engine = ScriptedEngine([ReasoningDelta("r"), TextDelta("t")])
    message = engine.generate("x").message
    assert (message.reasoning, message.text) == ("r", "t")


def test_messages_may_be_mappings():
    engine = ScriptedEngine("x")
    engine.generate([{"role": "system", "content": "s"}, Message("user", "u")])
    assert engine.requests[0].messages == (Message("system", "s"), Message("user", "u"))
    for bad in ([{"content": "x"}], [{"role": "user", "contents": "x"}], [5], 5):
        with pytest.raises(InvalidRequestError) as info:
            engine.generate(bad)
        assert info.value.param == "messages"


def test_one_request_is_read_by_several_iterators_and_loops():
    engine = ScriptedEngine("Hello")
    engine.generate("x")
    handle = engine.handles[0]

    async def read():
        return [event async for event in handle]

    assert list(handle) == list(handle) == asyncio.run(read()) == asyncio.run(read())


async def test_submitting_does_not_hold_up_the_event_loop():
    class Slow(ScriptedEngine):
        def submit(self, request):
            time.sleep(0.4)
            return super().submit(request)

    engine, gaps, done = Slow("Hi."), [], asyncio.Event()

    async def watch():
        while not done.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - began)

    watching = asyncio.create_task(watch())
    assert (await engine.agenerate("x", thinking=False)).text == "Hi."
    assert [event async for event in engine.astream("x", thinking=False)][-1].reason == "stop"
    task = asyncio.create_task(engine.agenerate("x"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.5)
    done.set()
    await watching
    assert max(gaps) < 0.35, "the loop ran on"
    assert engine.handles[-1].cancelled or engine.handles[-1].done
