"""What LangChain wraps around a chat model: rate limiter, retries, fallbacks, alternatives; and what it is told of the prefix cache."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core import exceptions as lc
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.rate_limiters import BaseRateLimiter, InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, Runnable
from langchain_ninfer import ChatNInfer

from ninfer_core import errors
from ninfer_core.testing import Fault, Refuse, Script, ScriptedEngine


class CountingLimiter(BaseRateLimiter):
    """A limiter that lets everything pass and counts."""

    def __init__(self) -> None:
        self.passed = 0
        self._lock = threading.Lock()

    def acquire(self, *, blocking: bool = True) -> bool:
        with self._lock:
            self.passed += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire(blocking=blocking)


# --- the rate limiter ---


def test_every_form_of_a_call_asks_the_limiter_once() -> None:
    engine, limiter = ScriptedEngine("ok"), CountingLimiter()
    model = ChatNInfer.from_engine(engine, rate_limiter=limiter)
    prompts = [[HumanMessage("hi")]] * 4
    forms: list[tuple[int, Callable[[], Any]]] = [
        (2, lambda: [model.invoke("hi") for _ in range(2)]),
        (2, lambda: [list(model.stream("hi")) for _ in range(2)]),
        (4, lambda: model.batch(["hi"] * 4)),
        (4, lambda: model.generate(prompts)),
        (4, lambda: asyncio.run(model.agenerate(prompts))),
        (4, lambda: asyncio.run(model.abatch(["hi"] * 4))),
        (2, lambda: [list(model.stream_events("hi", version="v3")) for _ in range(2)]),
    ]
    for count, run in forms:
        requests, passed = len(engine.requests), limiter.passed
        run()
        assert (len(engine.requests) - requests, limiter.passed - passed) == (count, count)


def test_a_real_limiter_spaces_calls() -> None:
    rate, count = 20.0, 4
    limiter = InMemoryRateLimiter(requests_per_second=rate, check_every_n_seconds=0.002)
    model = ChatNInfer.from_engine(ScriptedEngine("ok"), rate_limiter=limiter)
    began = time.monotonic()
    assert len(model.batch(["hi"] * count)) == count
    # The bucket is empty at first and the limiter's clock ticks: a call may come one and a half places early.
    assert time.monotonic() - began >= (count - 1.5) / rate


def test_a_cached_answer_passes_the_limiter_and_a_stream_passes_the_cache() -> None:
    engine, limiter = ScriptedEngine("ok"), CountingLimiter()
    model = ChatNInfer.from_engine(engine, rate_limiter=limiter, cache=InMemoryCache())
    assert [model.invoke("hi").content for _ in range(5)] == ["ok"] * 5
    assert len(engine.requests) == limiter.passed == 1
    list(model.stream("hi"))
    assert len(engine.requests) == limiter.passed == 2


# --- retries ---


def busy_first(times: int) -> ScriptedEngine:
    return ScriptedEngine(Script(Refuse(errors.EngineBusyError("256 requests are waiting")), times=times), "ok")


async def invoked(runnable: Runnable[Any, Any], how: str) -> Any:
    return await runnable.ainvoke("hi") if how == "async" else await asyncio.to_thread(runnable.invoke, "hi")


HOW = pytest.mark.parametrize("how", ["sync", "async"])


def retrying(model: ChatNInfer, attempts: int) -> Runnable[Any, Any]:
    """Retries of what LangChain's own middleware would retry: errors that pass."""
    return model.with_retry(
        retry_if_exception_type=(lc.ModelRateLimitError, lc.ModelTimeoutError, lc.ModelConnectionError),
        exponential_jitter_params={"initial": 0.001, "max": 0.002, "jitter": 0.001},
        stop_after_attempt=attempts,
    )


@HOW
async def test_a_retry_follows_an_error_that_passes(how: str) -> None:
    engine = busy_first(2)
    assert (await invoked(retrying(ChatNInfer.from_engine(engine), 3), how)).content == "ok"
    assert len(engine.requests) == 1
    short = retrying(ChatNInfer.from_engine(busy_first(2)), 2)
    with pytest.raises(lc.ModelRateLimitError, match="256"):
        await invoked(short, how)


@HOW
async def test_a_fault_amid_the_answer_is_retried_as_a_new_request(how: str) -> None:
    late = Script(["</think>half of it", Fault(errors.RequestTimeoutError("late"))], times=1)
    engine = ScriptedEngine(late, "whole")
    answer = await invoked(retrying(ChatNInfer.from_engine(engine), 2), how)
    assert answer.content == "whole" and len(engine.requests) == 2


@HOW
async def test_no_retry_follows_an_error_of_the_caller(how: str) -> None:
    engine = ScriptedEngine(Script(Refuse(errors.ContextOverflowError(9, 8)), times=1), "ok")
    with pytest.raises(lc.ContextOverflowError):
        await invoked(retrying(ChatNInfer.from_engine(engine), 3), how)
    assert (await invoked(ChatNInfer.from_engine(engine), how)).content == "ok", "one attempt took the one refusal"


# --- fallbacks ---


@HOW
async def test_a_fallback_answers_where_the_first_model_fails(how: str) -> None:
    down = ScriptedEngine(Refuse(errors.EngineFailedError("the engine has failed; load it again")), name="first")
    spare = ScriptedEngine("from the spare", name="second")
    chain = ChatNInfer.from_engine(down).with_fallbacks([ChatNInfer.from_engine(spare)])
    answer = await invoked(chain, how)
    assert answer.content == "from the spare" and answer.response_metadata["model_name"] == "second"


async def test_a_stream_falls_back_before_its_first_chunk() -> None:
    down = ChatNInfer.from_engine(ScriptedEngine(Refuse(errors.EngineBusyError("full"))))
    chain = down.with_fallbacks([ChatNInfer.from_engine(ScriptedEngine("spare"))])
    assert "".join(chunk.text for chunk in chain.stream("hi")) == "spare"
    assert "".join([chunk.text async for chunk in chain.astream("hi")]) == "spare"


def test_a_longer_context_is_the_fallback_of_an_overflow_only() -> None:
    small, large = ScriptedEngine("small", context_length=64), ScriptedEngine("large", context_length=4096)
    chain = ChatNInfer.from_engine(small).with_fallbacks(
        [ChatNInfer.from_engine(large)], exceptions_to_handle=(lc.ContextOverflowError,)
    )
    assert chain.invoke("hi").content == "small" and chain.invoke("x" * 100).content == "large"
    with pytest.raises(lc.ModelInvalidRequestError, match="temperature"):
        chain.invoke("hi", temperature=-1)


def test_bound_tools_and_structure_reach_the_fallback() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    down = ScriptedEngine(Refuse(errors.EngineBusyError("full")))
    spare = ScriptedEngine('{"a": 1, "b": 2}')
    chain = ChatNInfer.from_engine(down).with_fallbacks([ChatNInfer.from_engine(spare)])
    chain.bind_tools([add], tool_choice="none").invoke("hi")
    assert [tool.name for tool in spare.requests[0].tools] == ["add"] and spare.requests[0].tool_choice.mode == "none"
    assert chain.with_structured_output(add).invoke("hi") == {"a": 1, "b": 2}


def test_alternatives_are_chosen_by_configuration() -> None:
    one, two = ScriptedEngine("one", name="one"), ScriptedEngine("two", name="two")
    model = ChatNInfer.from_engine(one).configurable_alternatives(
        ConfigurableField(id="which"), default_key="first", second=ChatNInfer.from_engine(two)
    )
    assert model.invoke("hi").content == "one"
    assert model.with_config(configurable={"which": "second"}).invoke("hi").content == "two"


# --- the prefix cache, told as cache_read ---


@pytest.mark.parametrize("mode", ["in-process", "http"])
@pytest.mark.parametrize("form", ["invoke", "stream", "ainvoke", "events"])
async def test_the_second_turn_reads_the_first_from_the_cache(
    mode: str, form: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue("demo_server") if mode == "http" else None
    model = ChatNInfer(model="demo", base_url=address, temperature=0, max_tokens=8, reasoning=False)

    async def turn(talk: list[Any]) -> Any:
        if form == "ainvoke":
            return await model.ainvoke(talk)
        if form == "events":
            return await asyncio.to_thread(lambda: model.stream_events(talk, version="v3").output)
        if form == "invoke":
            return await asyncio.to_thread(model.invoke, talk)
        first, *others = await asyncio.to_thread(lambda: list(model.stream(talk)))
        for chunk in others:
            first += chunk
        return first

    # Words of this test alone: what another test asked would be in the cache already. And many: states are kept behind
    # system turns and questions of a quarter of a prompt chunk or more.
    rules = SystemMessage(f"My parrot says {mode} {form} every morning. " + "Answer in one short sentence. " * 15)
    talk: list[Any] = [rules, HumanMessage("What is the capital of France?")]
    first = await turn(talk)
    assert first.text and first.usage_metadata["input_token_details"]["cache_read"] == 0
    talk += [AIMessage(first.text), HumanMessage("And what is the capital of Italy?")]
    second = await turn(talk)
    read = second.usage_metadata["input_token_details"]["cache_read"]
    assert first.usage_metadata["input_tokens"] / 2 < read < second.usage_metadata["input_tokens"]
