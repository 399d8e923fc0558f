"""`ChatNInfer` feature by feature: messages in, messages and chunks out, tools, structure, errors, cancellation."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import pickle
import threading
from typing import Any

import langchain_ninfer
import pytest
from langchain_core import exceptions as lc
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ninfer import ChatNInfer
from pydantic import BaseModel

from ninfer_core import errors
from ninfer_core.testing import Delay, End, Fault, Refuse, Reply, ScriptedEngine, Tokens, Wait
from ninfer_core.types import Request, ToolCall, ToolChoice
from tests.integrations.conftest import cancelled_amid


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Point(BaseModel):
    """A point."""

    x: int
    y: int


TWO_CALLS = Reply("", tool_calls=[ToolCall("", "add", {"a": 1, "b": 2}), ToolCall("", "add", {"a": 1, "b": 2})])
FULL = [  # reasoning, text in two parts, two calls, text
    *(Tokens("why"), "</think>\n\n", Tokens("A"), Delay(0.01), Tokens("B")),
    "\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n",
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>\n",
]


def scripted(*scripts: Any, **options: Any) -> tuple[ScriptedEngine, ChatNInfer]:
    fields = options.pop("fields", {})
    engine = ScriptedEngine(*(scripts or ("Hello!",)), **options)
    return engine, ChatNInfer.from_engine(engine, **fields)


def total(chunks: Any) -> Any:
    first, *others = chunks
    for chunk in others:
        first = first + chunk
    return first


def test_public_names() -> None:
    assert set(langchain_ninfer.__all__) == {"ChatNInfer", "__version__", "register"}


# --- answers ---


def test_reasoning_with_and_without_tools_streams_piece_by_piece() -> None:
    steps = [
        Tokens("15"),
        Delay(0.03),
        Tokens("*23"),
        "</think>",
        "\n\n",
        Delay(0.03),
        Tokens("34"),
        Delay(0.03),
        Tokens("5"),
    ]
    engine, model = scripted(steps)
    whole = model.invoke("hi")
    assert whole.content == "345" and whole.additional_kwargs["reasoning_content"] == "15*23"
    assert [block["type"] for block in whole.content_blocks] == ["reasoning", "text"]
    for bound in (model, model.bind_tools([add])):
        chunks = list(bound.stream("hi"))
        assert [chunk.content for chunk in chunks if chunk.content] == ["34", "5"]
        summed = total(chunks)
        assert (summed.content, summed.additional_kwargs) == (whole.content, whole.additional_kwargs)
        assert len([chunk for chunk in chunks if chunk.usage_metadata]) == 1
        assert summed.response_metadata["finish_reason"] == "stop"
    off = model.bind(reasoning=False)
    off.invoke("hi")
    assert engine.requests[-1].thinking is False


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_blocks_keep_their_order_in_streams(version: str) -> None:
    _, model = scripted(FULL, fields={"output_version": version})
    summed = total(model.bind_tools([add]).stream("hi"))
    kinds = [block["type"] for block in summed.content_blocks]
    assert kinds == ["reasoning", "text", "tool_call", "tool_call"]
    assert [call["args"] for call in summed.tool_calls] == [{"a": 1}, {"a": 2}]
    assert len({call["id"] for call in summed.tool_calls}) == 2
    whole = model.bind_tools([add]).invoke("hi")
    assert [block["type"] for block in whole.content_blocks] == kinds
    assert str(whole.text) == str(summed.text) == "AB"


async def test_native_events_equal_the_message() -> None:
    _, model = scripted(FULL)
    stream = model.bind_tools([add]).stream_events("hi", version="v3")
    events = list(stream)
    assert events[0]["event"] == "message-start" and events[-1]["event"] == "message-finish"
    finished = [event["content"] for event in events if event["event"] == "content-block-finish"]
    assert [block["type"] for block in finished] == ["reasoning", "text", "tool_call", "tool_call"]
    opened, closed = [], []
    for event in events:  # each block closes before the next one opens
        if event["event"] == "content-block-start":
            assert opened == closed
            opened.append(event["index"])
        elif event["event"] == "content-block-finish":
            closed.append(event["index"])
    assert "reasoning_content" not in stream.output.additional_kwargs
    astream = await model.bind_tools([add]).astream_events("hi", version="v3")
    assert [event["event"] async for event in astream] == [event["event"] for event in events]


def test_usage_and_metadata() -> None:
    _, model = scripted([Tokens("a", "b"), "</think>", "c"], fields={"seed": 5})
    message = model.invoke("hi")
    usage = message.usage_metadata
    assert usage["output_token_details"]["reasoning"] == 2 and usage["input_token_details"]["cache_read"] == 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == model.get_num_tokens_from_messages([HumanMessage("hi")])
    metadata = message.response_metadata
    assert (metadata["model_name"], metadata["model_provider"], metadata["seed"], metadata["mode"]) == (
        "scripted",
        "ninfer",
        5,
        "in-process",
    )
    assert total(model.stream("hi")).usage_metadata == usage


def test_counting_includes_tools() -> None:
    _, model = scripted()
    message = model.bind_tools([add]).invoke("hi")
    assert message.usage_metadata["input_tokens"] == model.get_num_tokens_from_messages(
        [HumanMessage("hi")], tools=[add]
    )
    assert len(model.get_token_ids("abc")) == model.get_num_tokens("abc") == 3


def test_logprobs_merge_over_a_stream() -> None:
    _, model = scripted()
    whole = model.invoke("hi", logprobs=True, top_logprobs=2)
    entries = whole.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Hello!" and len(entries[0]["top_logprobs"]) == 2
    assert total(model.stream("hi", logprobs=True, top_logprobs=2)).response_metadata["logprobs"]["content"] == entries


def test_a_cut_call_is_invalid_in_both_forms() -> None:
    _, model = scripted(["<tool_call>\n<function=add>\n<parameter=a>\n1", End("length")], fields={"reasoning": False})
    bound = model.bind_tools([add])
    for message in (bound.invoke("hi"), total(bound.stream("hi"))):
        assert message.tool_calls == [] and message.invalid_tool_calls[0]["name"] == "add"
        assert message.response_metadata["finish_reason"] == "length"


def test_a_call_cut_inside_its_name_is_no_call_and_says_why() -> None:
    _, model = scripted(["<tool_call>\n<function=Poi", End("length")], fields={"reasoning": False})
    bound = model.bind_tools([add])
    for message in (bound.invoke("hi"), total(bound.stream("hi"))):
        assert message.tool_calls == message.invalid_tool_calls == []
        assert message.response_metadata["finish_reason"] == "length"
    with pytest.raises(lc.OutputParserException, match=r"'length'.*raise max_tokens"):
        model.with_structured_output(Point, method="function_calling").invoke("hi")


# --- messages in ---


def test_reasoning_comes_back_once_from_either_place() -> None:
    engine, model = scripted()
    beside = AIMessage("4", additional_kwargs={"reasoning_content": "2+2"})
    block = AIMessage([{"type": "reasoning", "reasoning": "2+2"}, {"type": "text", "text": "4"}])
    both = AIMessage(block.content, additional_kwargs=beside.additional_kwargs)
    thinking = AIMessage([{"type": "thinking", "thinking": "2+2", "signature": "x"}, {"type": "text", "text": "4"}])
    for message in (beside, block, both, thinking):
        model.invoke([HumanMessage("2+2?"), message, HumanMessage("And?")])
        past = engine.requests[-1].messages[1]
        assert (past.reasoning, past.text) == ("2+2", "4")


def test_calls_and_results_come_back() -> None:
    engine, model = scripted()
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "c1", "type": "tool_call"}
    use = {"type": "tool_use", "name": "add", "input": {"a": 1, "b": 2}, "id": "c1"}
    for past in (AIMessage("", tool_calls=[call]), AIMessage([use], tool_calls=[call]), AIMessage([call])):
        model.invoke([HumanMessage("1+2?"), past, ToolMessage("3", tool_call_id="c1", status="error")])
        sent = engine.requests[-1].messages
        assert sent[1].tool_calls == (ToolCall("c1", "add", {"a": 1, "b": 2}),)
        assert (sent[2].role, sent[2].tool_call_id, sent[2].text) == ("tool", "c1", "3")


def test_history_and_inputs_stay_as_they_were() -> None:
    _, model = scripted()
    history = [SystemMessage("s"), HumanMessage([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    before = copy.deepcopy(history)
    model.invoke(history)
    assert history == before


def test_text_blocks_join_exactly_and_late_system_messages_stay() -> None:
    engine, model = scripted()
    model.invoke([SystemMessage("a"), SystemMessage("b"), HumanMessage(["x", {"type": "text", "text": "y"}])])
    assert engine.requests[-1].messages[2].text == "xy"
    late = [HumanMessage("hi"), AIMessage("ho"), SystemMessage("Be kind."), HumanMessage("well?")]
    assert model.invoke(late).content == "Hello!"
    assert "Be kind." in engine.render(engine.requests[-1])
    assert model.invoke([SystemMessage("no user turn")]).content == "Hello!"


PIXEL = "iVBORw0KGgo="


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "base64": PIXEL, "mime_type": "image/png"},
        {"type": "image", "source_type": "base64", "data": PIXEL, "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{PIXEL}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "video", "base64": PIXEL, "mime_type": "video/mp4", "fps": 2.0},
    ],
    ids=lambda block: "-".join(block),
)
def test_every_media_shape_reaches_the_engine(block: dict[str, Any]) -> None:
    from langchain_ninfer.messages import to_messages

    from ninfer_core.adapter import MediaPolicy

    (message,) = to_messages([HumanMessage([block])], MediaPolicy())
    (part,) = message.content
    assert part.data == b"\x89PNG\r\n\x1a\n" and getattr(part, "fps", 2.0) == 2.0
    _, model = scripted()
    with pytest.raises(lc.ModelInvalidRequestError, match="no vision"):  # this model is told what it cannot read
        model.invoke([HumanMessage([block])])


@pytest.mark.parametrize(
    ("block", "match"),
    [
        ({"type": "image", "url": "http://127.0.0.1:9/x.png"}, "allow_remote_media"),
        ({"type": "image", "url": "file:///etc/passwd"}, "media_root"),
        ({"type": "image", "base64": "?", "mime_type": "image/png"}, "base64"),
        ({"type": "image", "file_id": "f"}, "file store"),
        ({"type": "audio", "base64": PIXEL}, "audio"),
        ({"type": "file", "base64": PIXEL, "mime_type": "application/pdf"}, "application/pdf"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(block: dict[str, Any], match: str) -> None:
    _, model = scripted()
    with pytest.raises(lc.ModelInvalidRequestError, match=match):
        model.invoke([HumanMessage([block])])


def test_files_are_read_below_the_media_root_only(tmp_path: Any) -> None:
    from langchain_ninfer.messages import to_messages

    from ninfer_core.adapter import MediaPolicy

    (tmp_path / "x.png").write_bytes(b"x")
    policy = MediaPolicy(root=str(tmp_path))
    (message,) = to_messages([HumanMessage([{"type": "image", "path": "x.png"}])], policy)
    assert message.content[0].path == str(tmp_path / "x.png")
    with pytest.raises(errors.MediaError, match="media_root"):
        to_messages([HumanMessage([{"type": "image", "path": "../x.png"}])], policy)


# --- tools and structure ---


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("any", ToolChoice("required")),
        ("required", ToolChoice("required")),
        (True, ToolChoice("required")),
        ("add", ToolChoice("required", ("add",))),
        ({"type": "function", "function": {"name": "add"}}, ToolChoice("required", ("add",))),
        ({"type": "tool", "name": "add"}, ToolChoice("required", ("add",))),
    ],
)
def test_tool_choices(choice: Any, sent: ToolChoice) -> None:
    engine, model = scripted(TWO_CALLS)
    model.bind_tools([add], tool_choice=choice, parallel_tool_calls=False).invoke("hi")
    assert engine.requests[0].tool_choice == sent and engine.requests[0].parallel_tool_calls is False
    assert engine.requests[0].tools[0].parameters["required"] == ["a", "b"]


def test_a_wrong_name_is_refused_when_binding() -> None:
    _, model = scripted()
    with pytest.raises(lc.ModelInvalidRequestError, match="subtract"):
        model.bind_tools([add], tool_choice="subtract")
    with pytest.raises(lc.ModelInvalidRequestError, match="web_search"):
        model.bind_tools([{"type": "web_search"}])


# --- options ---


def test_every_sampling_field_of_model_and_call() -> None:
    engine, model = scripted(fields={"temperature": 0.5, "top_k": 4, "stop": ["a"], "max_tokens": 5, "seed": 1})
    model.invoke("hi", temperature=0.0, stop=["b"], min_p=0.1, reasoning_budget=7, timeout=60)
    request = engine.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.min_p) == (0.0, 4, 0.1)
    assert (request.stop, request.max_tokens, request.thinking_budget, request.timeout) == (("b",), 5, 7, 60)
    model.invoke("hi")
    assert engine.requests[1].stop == ("a",)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'max_tokens'"):
        ChatNInfer(model="demo", max_token=3)
    with pytest.raises(ValueError, match="engine_options"):
        ChatNInfer(model="demo", engine_options={"contextlength": 3})
    _, model = scripted()
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        model.invoke("hi", temprature=1)


def test_models_of_an_engine() -> None:
    _, model = scripted(name="one", aliases=["two"])
    assert model.invoke("hi", model="two").response_metadata["model_name"] == "two"
    with pytest.raises(lc.ModelNotFoundError, match="one, two"):
        model.invoke("hi", model="three")


def test_copies_pickles_and_configured_ones_share_the_engine() -> None:
    engine, model = scripted(fields={"temperature": 0.5})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.model_copy(update={"top_k": 2})):
        assert other.invoke("hi").content == "Hello!"
    assert copy.deepcopy(model) == model and len(engine.requests) == 3
    from langchain_core.runnables import ConfigurableField

    configurable = model.configurable_fields(temperature=ConfigurableField(id="t"))
    configurable.with_config(configurable={"t": 0.25}).invoke("hi")
    assert engine.requests[-1].sampling.temperature == 0.25


def test_the_cache_tells_models_apart() -> None:
    cache = InMemoryCache()
    one = ScriptedEngine("one", name="one")
    two = ScriptedEngine("two", name="two")
    assert ChatNInfer.from_engine(one, cache=cache).invoke("hi").content == "one"
    assert ChatNInfer.from_engine(two, cache=cache).invoke("hi").content == "two"
    assert ChatNInfer.from_engine(one, cache=cache).invoke("hi").content == "one" and len(one.requests) == 1
    assert (
        ChatNInfer.from_engine(one, cache=cache, temperature=0).invoke("hi").content == "one" and len(one.requests) == 2
    )


def test_serialized_models_load_without_secrets() -> None:
    model = ChatNInfer(model="demo", api_key="s3cret", temperature=0.5)
    text = json.dumps(dumpd(model))
    assert "s3cret" not in text
    again = load(
        json.loads(text),
        allowed_objects=[ChatNInfer],
        valid_namespaces=["langchain_ninfer"],
        secrets_map={"NINFER_API_KEY": "s3cret"},
    )
    assert again == model


def test_profile() -> None:
    profile = ChatNInfer(model="demo", engine="unloaded", engine_options={"context_length": 512}).profile
    assert profile["max_input_tokens"] == 512 and profile["tool_calling"] and profile["audio_inputs"] is False
    assert ChatNInfer(model="qwen3.6-27b", base_url="http://127.0.0.1:9").profile["max_input_tokens"] == 262144


# --- many at once, leaving, failing ---


async def test_batches_fill_the_engine() -> None:
    gate, seen = threading.Event(), itertools.count()

    def steps(request: Request) -> list[Any]:
        if next(seen) % 12 == 11:  # only when all of a run are live at once does any of them end
            gate.set()
        return ["</think>", Wait(gate), "ok"]

    _, model = scripted(steps, max_sequences=16)
    for run in (
        lambda: model.batch(["hi"] * 12),
        lambda: asyncio.run(model.abatch(["hi"] * 12)),
        lambda: [g[0].message for g in model.generate([[HumanMessage("hi")]] * 12).generations],
        lambda: [message for _, message in model.batch_as_completed(["hi"] * 12)],
    ):
        gate.clear()
        answers = await asyncio.wait_for(asyncio.to_thread(run), 120)
        assert [message.content for message in answers] == ["ok"] * 12


async def test_leaving_frees_the_sequence() -> None:
    engine, model = scripted(["</think>a", Wait(threading.Event())])
    await cancelled_amid(engine, model.ainvoke("hi"))
    async for _ in model.astream("hi"):
        break
    for _ in model.stream("hi"):
        break
    events = await model.astream_events("hi", version="v3")
    await anext(aiter(events))
    await events.aclose()
    assert await asyncio.to_thread(engine.wait_idle, 60) and len(engine.cancelled) == 4


OTHERS = (errors.DownloadError, errors.DiskSpaceError, errors.MissingDependencyError, errors.EngineClosedError)
"""What has no word in LangChain keeps its own type as the cause."""


@pytest.mark.parametrize(
    ("script", "kind", "retryable"),
    [
        (Refuse(errors.EngineBusyError("full")), lc.ModelRateLimitError, True),
        (Refuse(errors.ContextOverflowError(9, 8)), lc.ContextOverflowError, False),
        (Refuse(errors.SchemaError("no", path="/x")), lc.ModelInvalidRequestError, False),
        (Fault(errors.RequestTimeoutError("late")), lc.ModelTimeoutError, True),
        (Refuse(errors.ModelNotFoundError("no")), lc.ModelNotFoundError, False),
        (Refuse(errors.AuthenticationError("no")), lc.ModelAuthenticationError, False),
        (Refuse(errors.PermissionDeniedError("no")), lc.ModelPermissionDeniedError, False),
        (Refuse(errors.UnsupportedError("no")), lc.ModelInvalidRequestError, False),
        (Refuse(errors.MediaError("no")), lc.ModelInvalidRequestError, False),
        (Refuse(errors.InvalidRequestError("no")), lc.ModelInvalidRequestError, False),
        (Fault(errors.ServerUnreachableError("gone")), lc.ModelConnectionError, True),
        (Fault(errors.EngineClosedError("closed")), lc.ModelAPIError, False),
        (Fault(errors.DownloadError("gone")), lc.ModelError, True),
        (Fault(errors.DiskSpaceError("/x", 2, 1)), lc.ModelError, False),
        (Fault(errors.MissingDependencyError("a", "b", "c")), lc.ModelError, False),
        (Fault(RuntimeError("x")), lc.ModelAPIError, False),
    ],
)
async def test_errors_are_of_both_families(script: Any, kind: type[Exception], retryable: bool) -> None:
    _, model = scripted(script)
    original = type(script.error) if isinstance(script.error, errors.NinferError) else errors.EngineError
    for call in (lambda: model.invoke("hi"), lambda: list(model.stream("hi"))):
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value if original not in OTHERS else caught.value.__cause__, original)
        assert caught.value.is_retryable is retryable and str(caught.value)
    with pytest.raises(kind):
        await model.ainvoke("hi")
