"""What LangChain's core relies on, member by member: callbacks, chunks, tracing, forms of schemas, and many prompts at once."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, TypedDict

import pytest
from langchain_core import exceptions as lc
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables.base import RunnableBinding
from langchain_ninfer import ChatNInfer
from langchain_ninfer.options import FIELDS, SAMPLING
from langchain_ninfer.output import FIRST_CALL_INDEX
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModel1

from ninfer_core.testing import Refuse, Reply, Script, ScriptedEngine, Tokens, Wait
from ninfer_core.types import Request, ToolCall
from tests.serving import wait_for


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Point(BaseModel):
    """A point."""

    x: int
    y: int


class Point1(BaseModel1):
    """A point."""

    x: int
    y: int


class PointDict(TypedDict):
    """A point."""

    x: int
    y: int


PROPERTIES = {"x": {"type": "integer"}, "y": {"type": "integer"}}
OBJECT = {"type": "object", "properties": PROPERTIES, "required": ["x", "y"]}
CALLS = Reply("", "why", [ToolCall("", "add", {"a": 1, "b": 2}), ToolCall("", "add", {"a": 3, "b": 4})])
TALK = [HumanMessage("hi")]


class Seen(BaseCallbackHandler):
    """Counts what core tells handlers."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.starts: list[dict[str, Any]] = []
        self.ends: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **options: Any) -> None:
        self.starts.append(options)

    def on_llm_new_token(self, token: Any, **options: Any) -> None:
        self.tokens.append(str(token))

    def on_llm_end(self, response: Any, **options: Any) -> None:
        self.ends.append(response)


def scripted(*scripts: Any, **fields: Any) -> tuple[ScriptedEngine, ChatNInfer]:
    engine = ScriptedEngine(*(scripts or ("ok",)))
    return engine, ChatNInfer.from_engine(engine, **fields)


# --- members of the base class ---


def test_core_finds_every_native_member() -> None:
    own = (
        "_generate _agenerate _stream _astream _stream_chat_model_events _astream_chat_model_events bind_tools "
        "with_structured_output _resolve_model_profile _combine_llm_outputs _get_ls_params get_token_ids "
        "get_num_tokens_from_messages generate agenerate batch abatch batch_as_completed abatch_as_completed"
    )
    for name in own.split():
        assert getattr(ChatNInfer, name) is not getattr(BaseChatModel, name, None), name
    assert ChatNInfer(model="demo")._llm_type == "chat-ninfer"


def test_tools_are_bound_with_the_signature_that_agents_know() -> None:
    names = list(inspect.signature(ChatNInfer.bind_tools).parameters)
    assert names == ["self", "tools", "tool_choice", "strict", "parallel_tool_calls", "response_format", "kwargs"]
    engine, model = scripted(CALLS)
    bound = model.bind_tools([add], strict=True, temperature=0.25)
    assert isinstance(bound, RunnableBinding)
    bound.invoke("hi")
    assert engine.requests[0].tools[0].strict and engine.requests[0].sampling.temperature == 0.25


def test_tokens_reach_handlers_once_and_only_where_there_is_a_stream() -> None:
    _, model = scripted([Tokens("x"), "</think>\n\n", Tokens("A"), Tokens("B")])
    for run, wanted in (
        (lambda seen: model.invoke("hi", {"callbacks": [seen]}), ""),
        (lambda seen: list(model.stream("hi", {"callbacks": [seen]})), "AB"),
        (lambda seen: model.model_copy(update={"streaming": True}).invoke("hi", {"callbacks": [seen]}), "AB"),
    ):
        seen = Seen()
        run(seen)
        assert "".join(seen.tokens) == wanted and len(seen.ends) == 1


def test_streaming_can_be_switched_off() -> None:
    _, model = scripted([Tokens("A"), Tokens("B"), "</think>\n\n", Tokens("C"), Tokens("D")], disable_streaming=True)
    (chunk,) = [chunk for chunk in model.stream("hi") if chunk.content]
    assert chunk.content == "CD"


def test_an_empty_answer_is_still_a_chunk() -> None:
    _, model = scripted(Reply(""))
    chunks = list(model.stream("hi"))
    assert chunks[-1].chunk_position == "last" and "".join(chunk.text for chunk in chunks) == ""
    assert model.invoke("hi").content == "" and asyncio.run(model.ainvoke("hi")).content == ""


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_rules_of_chunks(version: str) -> None:
    _, model = scripted([*"why", "</think>\n\n", "AB\n\n", CALLS.raw(False)], output_version=version)
    raw = list(model._stream(TALK, tools=[{"type": "function", "function": {"name": "add", "parameters": OBJECT}}]))
    opened: set[int] = set()
    for chunk in raw:
        assert isinstance(chunk, ChatGenerationChunk) and isinstance(chunk.message.content, str)
        parts = chunk.message.tool_call_chunks
        assert not (parts and chunk.message.content), "core hides the parts of a call beside content"
        for part in parts:
            assert part["index"] >= FIRST_CALL_INDEX
            first = part["index"] not in opened
            assert (bool(part["name"]), bool(part["id"]), bool(part["args"])) == (first, first, not first)
            opened.add(part["index"])
    *others, last = [chunk.message for chunk in raw]
    assert len(opened) == 2 and last.chunk_position == "last" and last.usage_metadata
    for key in ("model_name", "finish_reason", "timings", "seed"):
        assert key in last.response_metadata and not any(key in message.response_metadata for message in others)
    assert not any(message.usage_metadata or message.chunk_position for message in others)
    seen = list(model.stream("hi"))
    kind = str if version == "v0" else list
    assert all(isinstance(chunk.content, kind) for chunk in seen)


def test_what_tracing_is_told() -> None:
    _, model = scripted(temperature=0.5, max_tokens=7, stop=["x"])
    own = model._get_ls_params()
    assert (own["ls_provider"], own["ls_model_name"], own["ls_model_type"]) == ("ninfer", "scripted", "chat")
    assert (own["ls_temperature"], own["ls_max_tokens"], own["ls_stop"]) == (0.5, 7, ["x"])
    call = model._get_ls_params(stop=["y"], model="other", temperature=0.0, max_tokens=3)
    assert (call["ls_model_name"], call["ls_temperature"], call["ls_max_tokens"]) == ("other", 0.0, 3)
    assert call["ls_stop"] == ["y"]
    seen = Seen()
    model.invoke("hi", {"callbacks": [seen], "tags": ["t"], "metadata": {"m": 1}})
    assert "t" in seen.starts[0]["tags"] and seen.starts[0]["metadata"]["m"] == 1
    assert seen.starts[0]["invocation_params"]["model"] == "scripted"


def test_whatever_changes_an_answer_identifies_the_model() -> None:
    known = set(ChatNInfer(model="demo")._identifying_params)
    assert {"model", "engine", "engine_options", "base_url", *FIELDS} - {"timeout"} <= known
    assert not {"api_key", "http_client"} & known


def test_usage_of_several_prompts_is_added_up() -> None:
    _, model = scripted()
    made = model.generate([TALK, [HumanMessage("hi again")]])
    messages = [generations[0].message for generations in made.generations]
    told = made.llm_output["token_usage"]
    assert told["input_tokens"] == sum(message.usage_metadata["input_tokens"] for message in messages)
    assert told["output_tokens"] == sum(message.usage_metadata["output_tokens"] for message in messages)
    assert made.llm_output["model_name"] == "scripted"


def test_counting_with_a_counter_of_the_user_and_without_weights() -> None:
    own = ChatNInfer(model="demo", engine="never-loaded-counts", custom_get_token_ids=lambda text: [1] * len(text))
    assert own.get_token_ids("abc") == [1, 1, 1] and own.get_num_tokens_from_messages(TALK) >= 2
    model = ChatNInfer(model="demo", engine="never-loaded-counts")
    assert model.get_num_tokens("Hello") > 0
    assert model.get_num_tokens_from_messages(TALK, tools=[add]) > model.get_num_tokens_from_messages(TALK) > 0
    assert model._engine().state == "new", "the tokenizer alone is read"
    model.close()


def test_every_field_is_also_an_option_of_a_call() -> None:
    values: dict[str, Any] = dict.fromkeys(SAMPLING, 0.5) | {"top_k": 5, "seed": 9, "repetition_penalty": 1.5}
    engine, model = scripted()
    model.invoke("hi", **values)
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in SAMPLING} == values
    ChatNInfer.from_engine(engine, **values).invoke("hi")
    assert engine.requests[1].sampling == sampling
    others = {"max_tokens": 9, "reasoning": True, "reasoning_budget": 4, "preserve_reasoning": True, "timeout": 600}
    for runnable in (model.bind(**others), ChatNInfer.from_engine(engine, **others)):
        runnable.invoke("hi")
        sent = engine.requests[-1]
        assert (sent.max_tokens, sent.thinking, sent.thinking_budget, sent.preserve_thinking) == (9, True, 4, True)
        assert sent.timeout == 600
    assert set(values) | set(others) | {"stop", "logprobs", "top_logprobs", "parallel_tool_calls"} == set(FIELDS)
    model.invoke("hi", logit_bias={5: -1.0}, priority=-2)
    assert engine.requests[-1].sampling.logit_bias == {5: -1.0} and engine.requests[-1].priority == -2


# --- forms of schemas, tools and history ---


@pytest.mark.parametrize(
    "schema",
    [
        Point,
        Point1,
        PointDict,
        {"title": "Point", "description": "A point.", **OBJECT},
        OBJECT,
        {"name": "Point", "description": "A point.", "parameters": OBJECT},
        {"type": "function", "function": {"name": "Point", "parameters": OBJECT}},
        {"name": "Point", "description": "A point.", "input_schema": OBJECT},
    ],
    ids=["pydantic", "pydantic-v1", "typed-dict", "json-schema", "untitled", "function", "tool", "anthropic"],
)
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_every_kind_of_schema(schema: Any, method: Any) -> None:
    name = "answer" if schema is OBJECT else getattr(schema, "__name__", "Point")
    values = {"x": 1, "y": 2}
    answer = Reply("", tool_calls=[ToolCall("", name, values)]) if method == "function_calling" else '{"x": 1, "y": 2}'
    engine, model = scripted(answer)
    made = model.with_structured_output(schema, method=method).invoke("hi")
    assert made == (schema(**values) if isinstance(schema, type) and schema is not PointDict else values)
    request = engine.requests[0]
    sent = request.tools[0].parameters if method == "function_calling" else request.response_format.schema
    assert set(sent["properties"]) == {"x", "y"} and set(sent["required"]) == {"x", "y"}


class Line(BaseModel):
    """A line."""

    ends: list[Point]
    notes: dict[str, int] = {}


class Open(BaseModel, extra="allow"):
    """A class that keeps what it does not know."""

    line: Line


class Both(Point):
    """Two schemas at once."""

    model_config = {"json_schema_extra": {"allOf": [{"required": ["x"]}, {"required": ["y"]}]}}


@pytest.mark.parametrize("schema", [Open, Open.model_json_schema()], ids=["class", "json-schema"])
def test_objects_have_no_properties_but_those_of_the_schema(schema: Any) -> None:
    engine, model = scripted('{"line": {"ends": []}}')
    model.with_structured_output(schema).invoke("hi")
    sent = engine.requests[0].response_format.schema
    line = sent["$defs"]["Line"] if "$defs" in sent else sent["properties"]["line"]
    point = sent["$defs"]["Point"] if "$defs" in sent else line["properties"]["ends"]["items"]
    assert sent["additionalProperties"] is True
    assert line["additionalProperties"] is point["additionalProperties"] is False
    assert line["properties"]["notes"]["additionalProperties"] == {"type": "integer"}
    model.with_structured_output(Both, include_raw=True).invoke("hi")
    assert "additionalProperties" not in engine.requests[-1].response_format.schema


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "Numbers", "type": "array", "items": {"type": "integer"}},
        {"title": "Mood", "enum": ["happy", "sad"]},
        {"title": "Either", "anyOf": [{"type": "integer"}, {"type": "null"}]},
    ],
    ids=lambda schema: schema["title"],
)
def test_a_schema_that_is_no_object_is_enforced_whole(schema: dict[str, Any]) -> None:
    engine, model = scripted("[1, 2]")
    assert model.with_structured_output(schema).invoke("hi") == [1, 2]
    assert engine.requests[0].response_format.schema == schema
    with pytest.raises(lc.ModelInvalidRequestError, match="properties"):
        model.with_structured_output(schema, method="function_calling")


def test_response_formats_of_a_call() -> None:
    engine, model = scripted('{"x": 1, "y": 2}')
    forms: list[tuple[Any, str | None]] = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, "json"),
        ({"type": "json_object", "schema": OBJECT}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": OBJECT, "strict": False}}, "json_schema"),
        (Point, "json_schema"),
        (OBJECT, "json_schema"),
    ]
    for form, kind in forms:
        model.invoke("hi", response_format=form)
        sent = engine.requests[-1].response_format
        assert (sent and sent.kind) == kind
    for wrong in ("json", {}, 3, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 3}):
        with pytest.raises(lc.ModelInvalidRequestError, match="schema"):
            model.invoke("hi", response_format=wrong)
    with pytest.raises(lc.ModelInvalidRequestError, match="schema"):
        model.invoke("hi", response_format={"type": "json_object", "schema": "x"})


@pytest.mark.parametrize(
    "block",
    [
        {"type": "refusal", "refusal": "B"},
        {"type": "text-plain", "text": "B", "mime_type": "text/plain"},
        {"type": "text", "text": "B", "annotations": [{"type": "citation", "url": "http://x"}]},
        {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}},
        {"type": "output_text", "text": "B"},
        "B",
    ],
    ids=str,
)
def test_text_blocks_of_a_history_are_read(block: Any) -> None:
    engine, model = scripted()
    model.invoke([HumanMessage("?"), AIMessage([{"type": "text", "text": "A"}, block]), HumanMessage("!")])
    assert engine.requests[0].messages[1].text == "AB"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_call", "name": "web_search", "args": {}, "id": "1"},
        {"type": "server_tool_result", "tool_call_id": "1", "status": "success"},
        {"type": "non_standard", "value": {"x": 1}},
        {"type": "reasoning", "summary": []},
    ],
    ids=lambda block: block["type"],
)
def test_blocks_of_other_providers_mean_nothing_here(block: Any) -> None:
    engine, model = scripted()
    model.invoke([HumanMessage("?"), AIMessage([{"type": "text", "text": "A"}, block]), HumanMessage("!")])
    past = engine.requests[0].messages[1]
    assert (past.text, past.reasoning, past.tool_calls) == ("A", None, ())


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_call", "name": "add", "args": {"a": 1}, "id": "c1"},
        {"type": "tool_use", "name": "add", "input": {"a": 1}, "id": "c1"},
        {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": "c1"},
    ],
    ids=lambda block: block["type"],
)
def test_calls_and_results_in_blocks(block: Any) -> None:
    engine, model = scripted()
    result = HumanMessage([{"type": "tool_result", "tool_use_id": "c1", "content": "1"}])
    for answer in (result, ToolMessage("1", tool_call_id="c1")):
        model.invoke([HumanMessage("?"), AIMessage([block]), answer])
        sent = engine.requests[-1].messages
        assert sent[1].tool_calls == (ToolCall("c1", "add", {"a": 1}),)
        assert (sent[2].role, sent[2].tool_call_id, sent[2].text) == ("tool", "c1", "1")


def test_our_own_answers_come_back_as_they_were() -> None:
    """Whole, summed from chunks, and from typed events: reasoning once, calls once, in both versions."""
    for version in ("v0", "v1"):
        engine, model = scripted(CALLS, output_version=version)
        bound = model.bind_tools([add])
        first, *others = bound.stream("hi")
        for chunk in others:
            first += chunk
        for message in (bound.invoke("hi"), first, bound.stream_events("hi", version="v3").output):
            calls = [ToolMessage("3", tool_call_id=call["id"]) for call in message.tool_calls]
            bound.invoke([*TALK, message, *calls])
            past = engine.requests[-1].messages[1]
            assert past.reasoning == "why" and [call.name for call in past.tool_calls] == ["add", "add"]
            assert engine.render(engine.requests[-1]).count("why") == 1


def test_names_of_messages_and_a_developer() -> None:
    engine, model = scripted()
    developer = SystemMessage("Be kind.", additional_kwargs={"__openai_role__": "developer"})
    model.invoke([developer, HumanMessage("hi", name="ada")])
    assert [(m.role, m.name) for m in engine.requests[0].messages] == [("developer", None), ("user", "ada")]


# --- many at once ---


class Places(ScriptedEngine):
    """An engine with a short queue, which tells how many places it has."""

    def __init__(self, *scripts: Any) -> None:
        super().__init__(*scripts, max_sequences=2, max_queue=2)

    @property
    def spec(self) -> Any:
        from ninfer_core.engine import EngineOptions

        return EngineOptions(model="scripted", max_sequences=2, max_queue=2)


@pytest.mark.parametrize(
    "form", ["batch", "abatch", "batch_as_completed", "abatch_as_completed", "generate", "agenerate"]
)
async def test_more_prompts_than_the_queue_holds(form: str) -> None:
    model = ChatNInfer.from_engine(Places("ok"))
    prompts = [f"p{i}" for i in range(12)]
    talks = [[HumanMessage(prompt)] for prompt in prompts]
    if form == "abatch":
        made = await model.abatch(prompts)
    elif form == "abatch_as_completed":
        made = [message async for _, message in model.abatch_as_completed(prompts)]
    elif form == "agenerate":
        made = [made[0].message for made in (await model.agenerate(talks)).generations]
    elif form == "generate":
        made = [made[0].message for made in (await asyncio.to_thread(model.generate, talks)).generations]
    elif form == "batch":
        made = await asyncio.to_thread(model.batch, prompts)
    else:
        made = await asyncio.to_thread(lambda: [message for _, message in model.batch_as_completed(prompts)])
    assert [message.content for message in made] == ["ok"] * 12


def test_a_width_of_the_user_is_kept_and_errors_stay_with_their_prompt() -> None:
    def steps(request: Request) -> Any:
        return Refuse(ValueError("no")) if request.messages[0].text == "p1" else "ok"

    engine, model = scripted(Script(steps))
    made = model.batch([f"p{i}" for i in range(3)], {"max_concurrency": 1}, return_exceptions=True)
    assert [getattr(one, "content", None) for one in made] == ["ok", None, "ok"] and isinstance(made[1], Exception)
    assert [request.messages[0].text for request in engine.requests if request.messages[0].text != "p1"] == ["p0", "p2"]
    assert model.batch([]) == [] and asyncio.run(model.abatch([])) == [] and model.generate([]).generations == []


async def test_leaving_a_batch_frees_every_sequence() -> None:
    import threading

    engine, model = scripted(["</think>a", Wait(threading.Event())])
    task = asyncio.ensure_future(model.abatch(["hi"] * 3))
    assert await asyncio.to_thread(wait_for, lambda: len(engine.requests) == 3, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(engine.wait_idle, 60)


async def test_a_synchronous_call_inside_a_running_loop_works() -> None:
    _, model = scripted()
    assert model.invoke("hi").content == "ok" and [chunk.text for chunk in model.stream("hi") if chunk.text] != []


# --- the profile ---


def test_fields_of_the_profile() -> None:
    known = set(ModelProfile.__annotations__)  # core warns of keys that its version does not know
    remote = {"base_url": "http://127.0.0.1:9"}
    for name, day in (("qwen3.6-27b", "2026-04-22"), ("Qwen/Qwen3.6-35B-A3B", "2026-04-17")):
        profile = ChatNInfer(model=name, **remote).profile
        assert profile["max_input_tokens"] == 262144 and profile["max_output_tokens"] == 65536
        for key in {"release_date", "last_updated"} & known:
            assert profile[key] == day
    profile = ChatNInfer(model="demo", engine="never-loaded-profile", engine_options={"context_length": 512}).profile
    assert profile["max_input_tokens"] == profile["max_output_tokens"] == 512
    yes = (
        "text_inputs text_outputs reasoning_output tool_calling tool_call_streaming tool_choice structured_output "
        "temperature open_weights"
    )
    no = (
        "image_inputs image_url_inputs image_tool_message attachment pdf_inputs audio_inputs video_inputs image_outputs"
    )
    assert all(profile[key] is True for key in known.intersection(yes.split()))
    assert all(profile[key] is False for key in known.intersection(no.split()))
    assert {"tool_calling", "structured_output", "reasoning_output", "image_inputs", "audio_inputs"} <= set(profile)
    assert set(profile) <= known and "release_date" not in profile
    assert "mid_conversation_system_messages" not in profile, "late system messages may be moved"
    seeing = ChatNInfer(model="demo", engine="never-loaded-seeing", engine_options={"vision": True}).profile
    assert seeing["image_inputs"] and seeing["video_inputs"] is False and seeing.get("attachment", True)
