"""Requests the engine must refuse by the name of the field, and odd ones it must take."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from engine_support import TOOL, assert_free, raw
from tiny import tiny_engine

from ninfer_core.errors import (
    ContextOverflowError,
    InvalidRequestError,
    UnsupportedError,
)
from ninfer_core.types import Image, Message, Request, ResponseFormat, Sampling, Text, Tool, ToolCall, ToolChoice


@pytest.fixture(scope="module")
def shared():
    with tiny_engine(draft_tokens=2, max_sequences=4, max_queue=8, adaptive_drafts=True) as engine:
        yield engine


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
    (Request((Message("user", "x"),), tools=(Tool(""),)), "tools[0].name"),
    (Request((Message("user", "x"),), tools=(Tool("f", parameters={"x": float("nan")}),)), "tools[0].parameters"),
    (Request((Message("user", "x"),), tools=(TOOL,), tool_choice=ToolChoice("required", ("other",))), "tool_choice"),
    (Request((Message("user", "x"),), tool_choice=ToolChoice("required")), "tool_choice"),
]


USER = Message("user", "x")


def said(*calls):
    return Request((USER, Message("assistant", "", tool_calls=calls), Message("tool", "y")))


def tools(*given, **fields):
    return Request((USER,), tools=given, **fields)


def doubled(levels):
    value = [1]
    for _ in range(levels):
        value = [value, value]
    return value


def cyclic():
    value = {}
    value["a"] = [value, value]
    return value


BAD += [
    (raw(sampling=Sampling(logit_bias={5: None})), "logit_bias"),
    (raw(timeout=10**400), "timeout"),
    (raw(timeout=10**6000), "timeout"),
    (raw(sampling=Sampling(seed=10**6000)), "seed"),
    (raw(thinking=np.array([1, 2])), "thinking"),
    (raw(parallel_tool_calls="x"), "parallel_tool_calls"),
    (Request(prompt="x", ignore_eos="x"), "ignore_eos"),
    (raw(priority=None), "priority"),
    (raw(tool_choice="auto"), "tool_choice"),
    (raw(tool_choice=None), "tool_choice"),
    (raw(tool_choice=ToolChoice("auto", None)), "tool_choice"),
    (tools(TOOL, tool_choice=ToolChoice("auto", "bash")), "tool_choice"),
    (Request((Message("assistant", "a", tool_calls=None),)), "messages[0].tool_calls"),
    (said({"name": "f"}), "messages[1].tool_calls[0]"),
    (said(ToolCall("1", "f", 5)), "messages[1].tool_calls[0].arguments"),
    (said(ToolCall("1", "f", [1])), "messages[1].tool_calls[0].arguments"),
    (said(ToolCall("1", "f", {"x": {3: 4}})), "messages[1].tool_calls[0].arguments"),
    (said(ToolCall("1", "f", {"x": 10**6000})), "messages[1].tool_calls[0].arguments"),
    (Request((Message("user", "a", name=5),)), "messages[0].name"),
    (Request((Message("user", "a", name="\ud800"),)), "messages[0].name"),
    (tools(Tool("a", parameters=None)), "tools[0].parameters"),
    (tools(Tool("a", parameters="x")), "tools[0].parameters"),
    (tools(Tool("a", parameters={"x": doubled(24)})), "tools[0].parameters"),
    (tools(Tool("a", parameters=cyclic())), "tools[0].parameters"),
    (tools(Tool("a", raw=[1])), "tools[0].raw"),
    (tools(Tool("a"), Tool("b"), Tool("a")), "tools[2].name"),
    *((tools(Tool("a"), Tool(name)), "tools[1].name") for name in ("<x>", "a=b>", "a\nb", " a", "a ", "\0", 5)),
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


def test_tool_names_with_other_signs_are_taken(shared):
    names = ["a b", "a=b", "é", "get-weather.v2", "a/b:c"]
    assert shared.generate("x", tools=[Tool(name) for name in names], max_tokens=1).usage.completion_tokens == 1


ODD = [
    None,
    True,
    5,
    -1,
    2.5,
    float("nan"),
    10**400,
    10**6000,
    "x",
    "\ud800",
    b"x",
    (),
    ["x"],
    (None,),
    ({"x": 1},),
    {"x": 1},
    {5: None},
    {"x": {(1, 2): object()}},
    doubled(24),
    np.array([1, 2]),
    np.float32(1),
    object(),
    ToolChoice(),
    Message,
]
PLACES = {
    Request: lambda value: value,
    Sampling: lambda value: raw(tokens=1, sampling=value),
    Message: lambda value: Request((USER, value), max_tokens=1),
    ToolCall: lambda value: dataclasses.replace(said(value), max_tokens=1),
    Tool: lambda value: tools(value, max_tokens=1),
    ToolChoice: lambda value: tools(TOOL, tool_choice=value, max_tokens=1),
    ResponseFormat: lambda value: Request((USER,), response_format=value, max_tokens=1),
}
WHOLE = {
    Request: Request((USER,), max_tokens=1),
    Sampling: Sampling(),
    Message: USER,
    ToolCall: ToolCall("1", "f", {}),
    Tool: TOOL,
    ToolChoice: ToolChoice(),
    ResponseFormat: ResponseFormat("json_schema", {"type": "object"}),
}
FIELDS = [(kind, field.name) for kind in WHOLE for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("kind,name", FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS])
def test_every_field_takes_or_refuses_any_value(shared, kind, name):
    """No other error than `InvalidRequestError` leaves `submit`, at once; what is taken runs to an end of its own."""
    for value in ODD:
        request = PLACES[kind](dataclasses.replace(WHOLE[kind], **{name: value}))
        started = time.perf_counter()
        try:
            handle = shared.submit(request)
        except InvalidRequestError as error:
            assert error.param and len(str(error)) < 1000
            assert time.perf_counter() - started < 1.0
            continue
        handle.cancel()
        assert handle.wait(20) and handle.error is None, (value, handle.error)
    assert_free(shared)


@pytest.mark.parametrize("option", ["tools", "stop", "stop_token_ids"])
def test_options_of_sequences_are_refused_by_name(shared, option):
    with pytest.raises(InvalidRequestError) as info:
        shared.generate("x", **{option: 5})
    assert info.value.param == option
    assert shared.generate("x", max_tokens=1, **{option: None}).usage.completion_tokens == 1


@pytest.mark.parametrize("calls", [5, [5], [{"name": "f"}], {"name": "f"}])
def test_calls_of_messages_as_mappings_are_refused(shared, calls):
    with pytest.raises(InvalidRequestError) as info:
        shared.generate([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert info.value.param.startswith("messages")
