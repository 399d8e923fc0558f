"""The fifteen problems that users of such adapters report most, in that order: one test each, named after it."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core import exceptions as lc
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_ninfer import ChatNInfer
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ninfer import NInfer
from pydantic import BaseModel, Field

from ninfer_core.errors import ContextOverflowError, MediaError, RequestTimeoutError
from ninfer_core.testing import Delay, Reply, Script, ScriptedEngine, Tokens, Wait
from ninfer_core.types import Image, Request, ToolCall
from tests.serving import wait_for

ASK = "What is 15 * 23?"
CHAT = [ChatMessage(role="user", content=ASK)]
BOTH = pytest.mark.parametrize("mode", ["in-process", "http"])
Models = Callable[..., tuple[ScriptedEngine, ChatNInfer, NInfer]]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


TOOL = FunctionTool.from_defaults(multiply)
CALL = Reply("", "I must multiply.", [ToolCall("", "multiply", {"a": 15, "b": 23})])


def answered(request: Request) -> bool:
    return any(message.role == "tool" for message in request.messages)


@pytest.fixture
def models(serve: Callable[..., str]) -> Models:
    """An engine and both adapters over it, in this process or behind a server."""

    def made(mode: str, *scripts: Any, **options: Any) -> tuple[ScriptedEngine, ChatNInfer, NInfer]:
        engine = ScriptedEngine(*scripts, **options)
        if mode == "in-process":
            return engine, ChatNInfer.from_engine(engine), NInfer.from_engine(engine)
        address = serve(engine)
        return engine, ChatNInfer(model="scripted", base_url=address), NInfer(model="scripted", base_url=address)

    return made


@BOTH
def test_01_thinking_cannot_be_switched_or_leaks_or_is_lost(mode: str, models: Models) -> None:
    engine, chat, llm = models(mode, Reply("345", reasoning="15*23"))
    for message in (chat.invoke(ASK), sum_of(chat.stream(ASK))):
        assert message.content == "345" and message.additional_kwargs["reasoning_content"] == "15*23"
    whole = llm.chat(CHAT)
    assert whole.message.content == "345" and whole.message.blocks[0].content == "15*23"
    *_, last = llm.stream_chat(CHAT)
    assert last.message.blocks == whole.message.blocks
    for own, call in ((True, False), (False, True), (None, False)):
        chat.model_copy(update={"reasoning": own}).invoke(ASK, reasoning=call)
        assert engine.requests[-1].thinking is call
        llm.model_copy(update={"thinking": own}).chat(CHAT, thinking=call)
        assert engine.requests[-1].thinking is call
    off = chat.invoke(ASK, reasoning=False)
    assert off.content == "345" and "reasoning_content" not in off.additional_kwargs


@BOTH
def test_02_the_prompt_is_cut_in_silence(mode: str, models: Models) -> None:
    _, chat, llm = models(mode, "ok", context_length=64)
    chat.load()
    llm.load()
    assert chat.profile["max_input_tokens"] == llm.metadata.context_window == 64
    with pytest.raises(lc.ContextOverflowError) as told:
        chat.invoke("x" * 100)
    assert isinstance(told.value, ContextOverflowError)
    assert told.value.n_ctx == 64 < told.value.n_prompt_tokens and "64" in str(told.value)
    with pytest.raises(ContextOverflowError, match="64"):
        llm.chat([ChatMessage(role="user", content="x" * 100)])


def test_03_tool_choice_is_ignored_or_rejected() -> None:
    """The demo model has no mind to call anything when it is greeted: a call is there since it is enforced."""
    chat = ChatNInfer(model="demo", temperature=0, max_tokens=120, reasoning=False)
    for choice in ("any", "required", True, "multiply", {"type": "function", "function": {"name": "multiply"}}):
        (call,) = chat.bind_tools([multiply], tool_choice=choice, parallel_tool_calls=False).invoke("Hello!").tool_calls
        assert call["name"] == "multiply" and {type(value) for value in call["args"].values()} == {int}
    for choice in (None, "auto", "none"):
        assert chat.bind_tools([multiply], tool_choice=choice).invoke("Hello!").text
    with pytest.raises(lc.ModelInvalidRequestError, match="divide"):
        chat.bind_tools([multiply], tool_choice="divide")
    llm = NInfer(model="demo", temperature=0, max_tokens=120, thinking=False)
    forced = llm.chat_with_tools([TOOL], "Hello!", tool_required=True)
    assert [call.tool_name for call in llm.get_tool_calls_from_response(forced)] == ["multiply"]


@BOTH
def test_04_streaming_stops_when_tools_are_bound(mode: str, models: Models) -> None:
    steps = ["</think>\n\n", Tokens("34"), Delay(0.05), Tokens("5"), Delay(0.05)]
    _, chat, llm = models(mode, Script([*steps, "\n<tool_call>\n<function=multiply>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"], burst=4))  # fmt: skip
    chunks = list(chat.bind_tools([multiply]).stream(ASK))
    assert [chunk.content for chunk in chunks if chunk.content] == ["34", "5"]
    parts = [part["args"] for chunk in chunks for part in chunk.tool_call_chunks]
    assert len([part for part in parts if part]) > 1 and json.loads("".join(parts)) == {"a": 1, "b": 2}
    deltas = [item.delta for item in llm.stream_chat_with_tools([TOOL], ASK) if item.delta]
    assert deltas == ["34", "5"]


class Kind(BaseModel):
    """A nested value with what schemas of users have: definitions, enumerations, unions."""

    class Part(BaseModel):
        name: str = Field(max_length=12)
        size: int | None = None

    mood: Literal["happy", "sad"]
    parts: list[Part] = Field(max_length=2)
    value: int | Literal["none"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_05_structured_output_is_none_or_not_of_the_schema(method: Any) -> None:
    chat = ChatNInfer(model="demo", temperature=1.0, seed=5, max_tokens=160, reasoning=False)
    assert isinstance(chat.with_structured_output(Kind, method=method).invoke("Describe the weather."), Kind)
    short = chat.model_copy(update={"max_tokens": 4})
    with pytest.raises(lc.OutputParserException):
        short.with_structured_output(Kind, method=method).invoke("Describe the weather.")
    raw = short.with_structured_output(Kind, method=method, include_raw=True).invoke("Hi")
    assert raw["parsed"] is None and raw["parsing_error"] is not None
    assert isinstance(raw["raw"], AIMessage)
    if method == "json_schema":
        llm = NInfer(model="demo", temperature=1.0, seed=5, max_tokens=160, thinking=False)
        assert isinstance(llm.structured_predict(Kind, PromptTemplate("Describe the weather.")), Kind)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("structured", [True, False])
def test_06_a_schema_is_ignored_without_thinking_or_thinking_with_a_schema(thinking: bool, structured: bool) -> None:
    chat = ChatNInfer(model="demo", temperature=0, max_tokens=200, reasoning=thinking, reasoning_budget=20)
    runnable = chat.with_structured_output(Kind, include_raw=True) if structured else chat
    made = runnable.invoke("Describe the weather.")
    message = made["raw"] if structured else made
    assert bool(message.additional_kwargs.get("reasoning_content")) is thinking
    assert isinstance(made["parsed"], Kind) if structured else message.text


@BOTH
def test_07_a_second_or_late_system_message_is_an_error(mode: str, models: Models) -> None:
    engine, chat, llm = models(mode, "ok")
    for talk in (
        [SystemMessage("Be kind."), SystemMessage("Be brief."), HumanMessage("Hi")],
        [HumanMessage("Hi"), AIMessage("Ho"), SystemMessage("Be kind."), HumanMessage("Well?")],
        [SystemMessage("Be kind.")],
        [AIMessage("Ho")],
    ):
        assert chat.invoke(talk).content == "ok"
        prompt = engine.render(engine.requests[-1])
        assert all(message.text in prompt for message in talk)
    late = [ChatMessage(role=r, content=c) for r, c in (("user", "Hi"), ("assistant", "Ho"), ("system", "Be kind."))]
    assert llm.chat(late).message.content == "ok" and "Be kind." in engine.render(engine.requests[-1])


@BOTH
def test_08_past_reasoning_is_dropped(mode: str, models: Models) -> None:
    engine, chat, llm = models(mode, Script("345", when=answered), CALL)
    bound = chat.bind_tools([multiply])
    first = bound.invoke(ASK)
    bound.invoke([HumanMessage(ASK), first, ToolMessage("345", tool_call_id=first.tool_calls[0]["id"])])
    assert engine.render(engine.requests[-1]).count("I must multiply.") == 1
    response = llm.chat_with_tools([TOOL], chat_history=list(CHAT))
    (call,) = llm.get_tool_calls_from_response(response)
    result = ChatMessage(role="tool", content="345", additional_kwargs={"tool_call_id": call.tool_id})
    llm.chat_with_tools([TOOL], chat_history=[*CHAT, response.message, result])
    assert engine.render(engine.requests[-1]).count("I must multiply.") == 1
    earlier, later = engine.requests[-2], engine.requests[-1]
    assert engine.render(later).startswith(engine.render(earlier).removesuffix("<think>\n")), "the prefix stays"


@BOTH
def test_09_arguments_of_the_wrong_type_or_malformed(mode: str, models: Models) -> None:
    def update(count: int, ratio: float, on: bool, tags: list[str], point: dict[str, int], note: str) -> str:
        """Update."""
        return "done"

    values = {"count": 3, "ratio": 0.5, "on": True, "tags": ["a"], "point": {"x": 1}, "note": "3"}
    body = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in values.items()
    )
    broken = "<tool_call>\n<function=update>\n<parameter=count>\nmany\n</parameter>\n</function>\n</tool_call>"
    whole = f"</think>\n\n<tool_call>\n<function=update>\n{body}</function>\n</tool_call>"
    _, chat, llm = models(mode, Script([whole], times=2), Script(["</think>\n\n" + broken]))
    assert chat.bind_tools([update]).invoke("go").tool_calls[0]["args"] == values
    tool = FunctionTool.from_defaults(update)
    assert llm.get_tool_calls_from_response(llm.chat_with_tools([tool], "go"))[0].tool_kwargs == values
    kept = chat.bind_tools([update]).invoke("go")
    assert kept.tool_calls[0]["args"] == {"count": "many"}, "what cannot be typed is kept as text; nothing is raised"


@BOTH
async def test_10_timeouts_count_loading_or_come_by_default(mode: str, models: Models) -> None:
    gate = threading.Event()
    engine, chat, llm = models(mode, ["</think>\n\n", Wait(gate), "late"])
    assert chat.timeout is None and llm.timeout is None
    with pytest.raises(lc.ModelTimeoutError) as told:
        await chat.ainvoke(ASK, timeout=0.1)
    assert isinstance(told.value, RequestTimeoutError)
    with pytest.raises(RequestTimeoutError):
        await llm.achat(CHAT, timeout=0.1)
    before = len(engine.requests)
    late = asyncio.ensure_future(chat.ainvoke(ASK))
    assert await asyncio.to_thread(wait_for, lambda: len(engine.requests) > before, 60)
    gate.set()
    assert (await late).content == "late"
    assert await asyncio.to_thread(engine.wait_idle, 60)


@BOTH
async def test_11_concurrent_calls_crash_or_wait_for_each_other(mode: str, models: Models) -> None:
    barrier = threading.Barrier(16)

    def together(request: Request) -> list[Any]:
        return ["</think>\n\n", Wait(all_here), request.messages[-1].text]

    all_here = threading.Event()
    engine, chat, llm = models(mode, Script(together), max_sequences=32)

    def one(i: int) -> str:
        barrier.wait()
        if i % 2:
            return chat.invoke(f"m{i}").content
        return str(llm.chat([ChatMessage(role="user", content=f"m{i}")]).message.content)

    threads = ThreadPoolExecutor(16)
    loop = asyncio.get_running_loop()
    calls: list[Any] = [loop.run_in_executor(threads, one, i) for i in range(16)]
    running = asyncio.gather(*calls, *(chat.ainvoke(f"a{i}") for i in range(8)))
    here = await asyncio.to_thread(wait_for, lambda: len(engine.requests) == 24, 60)
    assert here, "the calls do not run at once"
    all_here.set()
    made = await asyncio.wait_for(running, 60)
    assert made[:16] == [f"m{i}" for i in range(16)] and [m.content for m in made[16:]] == [f"a{i}" for i in range(8)]
    threads.shutdown()
    assert [m.content for m in chat.batch([f"b{i}" for i in range(40)])] == [f"b{i}" for i in range(40)]


@BOTH
def test_12_counting_tokens_fails_offline_or_is_another_models(
    mode: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, chat, llm = models(mode, "ok")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    talk = [SystemMessage("Be kind."), HumanMessage("é" * 20)]
    usage = chat.bind_tools([multiply]).invoke(talk).usage_metadata
    assert usage["input_tokens"] == chat.get_num_tokens_from_messages(talk, tools=[multiply])
    kept = trim_messages(talk, max_tokens=usage["input_tokens"], token_counter=chat, strategy="last")
    assert kept == talk
    history = [ChatMessage(role="user", content="é" * 20)]
    assert llm.chat(history).raw["usage"]["prompt_tokens"] == llm.count_tokens(history)
    assert len(llm.tokenizer("é")) == 2


@BOTH
async def test_13_tools_never_reach_the_prompt_and_agents_do_not_work(mode: str, models: Models) -> None:
    engine, chat, llm = models(mode, Script("It is 345.", when=answered), CALL)
    messages = create_agent(chat, tools=[multiply]).invoke({"messages": [("user", ASK)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"] and messages[2].content == "345"
    assert "Multiply two numbers." in engine.render(engine.requests[0])
    assert llm.metadata.is_function_calling_model
    assert "345" in str(await FunctionAgent(tools=[multiply], llm=llm).run(ASK))


@BOTH
def test_14_ids_of_calls_are_the_tools_name_or_calls_get_lost(mode: str, models: Models) -> None:
    three = Reply("", tool_calls=[ToolCall("", "multiply", {"a": 1, "b": 1})] * 3)
    _, chat, llm = models(mode, three)
    for message in (chat.bind_tools([multiply]).invoke(ASK), sum_of(chat.bind_tools([multiply]).stream(ASK))):
        ids = {call["id"] for call in message.tool_calls}
        assert len(message.tool_calls) == len(ids) == 3 and "multiply" not in ids
    *_, last = llm.stream_chat_with_tools([TOOL], ASK, allow_parallel_tool_calls=True)
    for response in (llm.chat_with_tools([TOOL], ASK, allow_parallel_tool_calls=True), last):
        calls = llm.get_tool_calls_from_response(response)
        assert len({call.tool_id for call in calls}) == len(calls) == 3


PIXELS = b"\x89PNG\r\n\x1a\n"
DATA = base64.b64encode(PIXELS).decode()


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "base64": DATA, "mime_type": "image/png"},
        {"type": "image", "source_type": "base64", "data": DATA, "mime_type": "image/png"},
        {"type": "image", "url": f"data:image/png;base64,{DATA}"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{DATA}"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    ],
    ids=["v1", "v0", "url", "openai", "openai-short", "responses", "anthropic"],
)
@pytest.mark.parametrize("where", ["human", "tool"])
def test_15_images_are_refused_by_their_shape(block: dict[str, Any], where: str, seeing: ScriptedEngine) -> None:
    chat = ChatNInfer.from_engine(seeing)
    call = AIMessage([], tool_calls=[{"name": "look", "args": {}, "id": "1", "type": "tool_call"}])
    content = [{"type": "text", "text": "See: "}, block]
    talk = {"human": [HumanMessage(content)], "tool": [HumanMessage("?"), call, ToolMessage(content, tool_call_id="1")]}
    assert chat.invoke(talk[where]).content == "ok"
    assert seeing.requests[-1].messages[-1].content[1] == Image(data=PIXELS)
    with pytest.raises(MediaError, match="allow_remote_media"):
        chat.invoke([HumanMessage([{"type": "image", "url": "https://example.org/x.png"}])])


def sum_of(chunks: Any) -> Any:
    first, *others = chunks
    for chunk in others:
        first = first + chunk
    return first


def test_the_engine_is_reached_over_http_where_a_test_says_so(models: Models) -> None:
    """Else `http` above would prove nothing."""
    engine, chat, _ = models("http", "ok")
    assert chat.invoke(ASK).response_metadata["mode"] == "http" and len(engine.requests) == 1
    assert httpx.get(f"{chat.base_url}/v1/models").json()["data"][0]["id"] == "scripted"
