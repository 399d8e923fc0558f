"""`ChatNInfer.with_structured_output` and answers of a schema beside tools: whole, streamed, with the raw answer, cut."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from langchain_core import exceptions as lc
from langchain_ninfer import ChatNInfer

from ninfer_core.testing import End, Reply, Wait
from ninfer_core.types import ToolCall
from tests.integrations.test_langchain import Point, add, scripted, total


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_structured_output(method: Any) -> None:
    answer = (
        Reply("", tool_calls=[ToolCall("", "Point", {"x": 1, "y": 2})])
        if method == "function_calling"
        else ('{"x": 1, "y": 2}')
    )
    engine, model = scripted(answer, fields={"reasoning": True})
    chain = model.with_structured_output(Point, method=method)
    assert chain.invoke("hi") == Point(x=1, y=2) == await chain.ainvoke("hi")
    assert list(chain.stream("hi"))[-1] == Point(x=1, y=2)
    request = engine.requests[0]
    if method == "function_calling":
        assert request.tool_choice.names == ("Point",)
    else:
        assert request.response_format.kind == "json_schema" and set(request.response_format.schema["properties"]) == {
            "x",
            "y",
        }
    both = model.with_structured_output(Point, method=method, include_raw=True).invoke("hi")
    assert both["parsed"] == Point(x=1, y=2) and both["parsing_error"] is None
    version1 = ChatNInfer.from_engine(engine, output_version="v1").with_structured_output(Point, method=method)
    assert version1.invoke("hi") == Point(x=1, y=2)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output_is_never_none(method: Any) -> None:
    _, model = scripted(["no", End("length")], fields={"reasoning": False})
    with pytest.raises(lc.OutputParserException):
        model.with_structured_output(Point, method=method).invoke("hi")
    chain = model.with_structured_output(Point, method=method, include_raw=True)
    whole = [chain.invoke("hi"), await chain.ainvoke("hi"), *chain.batch(["hi"])]
    whole += [total(chain.stream("hi")), total([part async for part in chain.astream("hi")])]
    for both in whole:
        assert both["parsed"] is None and isinstance(both["parsing_error"], lc.OutputParserException)
        assert both["raw"].content == "no" and both["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_a_stream_with_the_raw_answer_does_not_wait_for_its_end(method: Any) -> None:
    finish = threading.Event()
    inside = "<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n</parameter>\n</function>\n</tool_call>"
    call = method == "function_calling"
    script = ["<tool_call>\n<function=Point>\n" if call else '{"x"', Wait(finish), inside if call else ': 1, "y": 2}']
    _, model = scripted(script, fields={"reasoning": False})
    chain = model.with_structured_output(Point, method=method, include_raw=True)
    parts = chain.stream("hi")
    first = next(parts)
    assert set(first) == {"raw"}
    finish.set()
    both = total([first, *parts])
    assert both["parsed"] == Point(x=1, y=2) and both["parsing_error"] is None
    assert (both["raw"].tool_calls or [{"args": json.loads(both["raw"].text)}])[0]["args"] == {"x": 1, "y": 2}
    wrong = json.dumps({"x": 1, "y": "two"})
    _, model = scripted(Reply("", tool_calls=[ToolCall("", "Point", json.loads(wrong))]) if call else wrong)
    chain = model.with_structured_output(Point, method=method, include_raw=True)
    for both in (total(chain.stream("hi", reasoning=False)), await chain.ainvoke("hi", reasoning=False)):
        assert both["parsed"] is None and isinstance(both["parsing_error"], lc.OutputParserException)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_options_of_a_call_reach_the_model_beside_the_raw_answer(method: Any) -> None:
    """A `RunnableMap` around the model would drop them without a word."""
    call = Reply("", tool_calls=[ToolCall("", "Point", {"x": 1, "y": 2})])
    engine, model = scripted(call if method == "function_calling" else '{"x": 1, "y": 2}')
    chain = model.with_structured_output(Point, method=method, include_raw=True)
    chain.invoke("hi", reasoning=False, max_tokens=99)
    chain.batch(["hi"], reasoning=False, max_tokens=99)
    await chain.ainvoke("hi", reasoning=False, max_tokens=99)
    parts = list(chain.stream("hi", reasoning=False, max_tokens=99))
    parts += [part async for part in chain.astream("hi", reasoning=False, max_tokens=99)]
    assert all(isinstance(part, dict) for part in parts) and any("raw" in part for part in parts)
    assert [(request.thinking, request.max_tokens) for request in engine.requests] == [(False, 99)] * 5


def test_tools_and_a_schema_in_one_request() -> None:
    engine, model = scripted()
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "Point", "schema": Point.model_json_schema(), "strict": True},
    }
    model.bind_tools([add], tool_choice=None, response_format=schema).invoke("hi")
    assert engine.requests[0].tools and engine.requests[0].response_format.kind == "json_schema"
