"""Requests the engine must refuse by the name of the field, and odd ones it must take."""

from __future__ import annotations

import time

import pytest
from engine_support import TOOL, assert_free, raw
from tiny import tiny_engine

from ninfer_core.errors import (
    ContextOverflowError,
    InvalidRequestError,
    UnsupportedError,
)
from ninfer_core.types import Image, Message, Request, Sampling, Text, Tool, ToolChoice


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
