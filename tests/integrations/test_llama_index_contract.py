"""What LlamaIndex's core relies on: callbacks and events of all eight calls, prompts, programs, limits, and the tokenizer."""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms.utils import resolve_llm
from llama_index.core.output_parsers.pydantic import PydanticOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ninfer import NInfer
from pydantic import BaseModel, Field

from ninfer_core.errors import InvalidRequestError
from ninfer_core.testing import Delay, Reply, Script, ScriptedEngine, Tokens
from ninfer_core.types import Request, ToolCall

USER = [ChatMessage(role="user", content="hi")]


class City(BaseModel):
    """A city."""

    name: str
    population: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)
CALL = Reply("", "I add.", [ToolCall("", "add", {"a": 1, "b": 2})])
PARIS = City(name="Paris", population=2)


def scripted(*scripts: Any, **fields: Any) -> tuple[ScriptedEngine, NInfer]:
    engine = ScriptedEngine(*(scripts or ("Hello!",)))
    return engine, NInfer.from_engine(engine, **fields)


async def each_call(llm: NInfer) -> dict[str, Any]:
    """All eight calls, streams read to their ends."""
    return {
        "chat": llm.chat(USER),
        "complete": llm.complete("hi"),
        "stream_chat": list(llm.stream_chat(USER)),
        "stream_complete": list(llm.stream_complete("hi")),
        "achat": await llm.achat(USER),
        "acomplete": await llm.acomplete("hi"),
        "astream_chat": [item async for item in await llm.astream_chat(USER)],
        "astream_complete": [item async for item in await llm.astream_complete("hi")],
    }


class Events(BaseEventHandler):
    """Keeps the names of instrumentation events, and what they hold."""

    seen: list[Any] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "Events"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.seen.append(event)


@pytest.fixture
def events() -> Any:
    handler = Events()
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


async def test_all_eight_calls_start_and_end_once(events: Events) -> None:
    _, llm = scripted(api_key="s3cret")
    await each_call(llm)
    names = [type(event).__name__ for event in events.seen]
    for kind in ("LLMChat", "LLMCompletion"):
        assert names.count(f"{kind}StartEvent") == names.count(f"{kind}EndEvent") == 4
    assert names.count("LLMChatInProgressEvent") >= 2 and names.count("LLMCompletionInProgressEvent") >= 2
    assert "s3cret" not in "".join(event.model_dump_json() for event in events.seen)
    if hasattr(llm, "to_payload"):  # older cores put to_dict into traces, which holds no secret either
        assert "s3cret" not in json.dumps(llm.to_payload(), default=str)


async def test_the_limiter_is_asked_once_per_call() -> None:
    if "rate_limiter" not in NInfer.model_fields:
        pytest.skip("this version of llama-index-core has no rate limiter")
    limits = pytest.importorskip("llama_index.core.rate_limiter")

    class Counting(limits.BaseRateLimiter):
        passed = 0

        def acquire(self, num_tokens: int = 0) -> None:
            self.passed += 1

        async def async_acquire(self, num_tokens: int = 0) -> None:
            self.passed += 1

    limiter = Counting()
    engine, llm = scripted(rate_limiter=limiter)
    await each_call(llm)
    assert limiter.passed == len(engine.requests) == 8
    engine, llm = scripted(CALL, rate_limiter=limiter)
    llm.chat_with_tools([ADD], "1+2?")
    assert limiter.passed == 9
    bucket = limits.TokenBucketRateLimiter(requests_per_minute=6000)
    assert NInfer.from_engine(engine, rate_limiter=bucket).chat(USER).message.blocks


def test_streams_are_generators_of_growing_messages() -> None:
    _, llm = scripted([Tokens("x"), "</think>\n\n", Tokens("A"), Delay(0.01), Tokens("B"), Delay(0.01), Tokens("C")])
    stream = llm.stream_chat(USER)
    assert inspect.isgenerator(stream)
    items = list(stream)
    contents = [item.message.content or "" for item in items]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(contents))
    assert contents[-1] == "ABC" == "".join(item.delta for item in items)
    assert all(item.message.role == "assistant" for item in items)


def test_prompts_of_the_user_are_kept() -> None:
    engine, llm = scripted(system_prompt="Be exact.")
    assert llm.predict(PromptTemplate("About {what}"), what="Paris") == "Hello!"
    assert [message.text for message in engine.requests[0].messages] == ["Be exact.", "About Paris"]
    own = NInfer.from_engine(engine, messages_to_prompt=lambda messages: "never asked for by a chat model")
    own.chat(USER)
    assert engine.requests[-1].messages[0].text == "hi"


def test_output_parsers_and_text_programs() -> None:
    engine, llm = scripted('{"name": "Paris", "population": 2}')
    parser = PydanticOutputParser(output_cls=City)
    told = llm.predict(PromptTemplate("About Paris", output_parser=parser))
    assert City.model_validate_json(told) == PARIS and "properties" in engine.requests[0].messages[0].text
    text = NInfer.from_engine(engine, pydantic_program_mode=PydanticProgramMode.LLM)
    assert text.structured_predict(City, PromptTemplate("About Paris")) == PARIS
    assert engine.requests[-1].response_format is None, "another mode is core's own program"


def test_the_function_program_mode_forces_a_call() -> None:
    engine, llm = scripted(
        Reply("", tool_calls=[ToolCall("", "City", PARIS.model_dump())]),
        pydantic_program_mode=PydanticProgramMode.FUNCTION,
    )
    assert llm.structured_predict(City, PromptTemplate("About Paris")) == PARIS
    assert engine.requests[0].tool_choice.mode == "required" and engine.requests[0].response_format is None


async def test_structured_calls_tell_their_events(events: Events) -> None:
    _, llm = scripted('{"name": "Paris", "population": 2}')
    prompt = PromptTemplate("About {what}")
    llm.structured_predict(City, prompt, what="Paris")
    await llm.astructured_predict(City, prompt, what="Paris")
    list(llm.stream_structured_predict(City, prompt, what="Paris"))
    assert [item async for item in await llm.astream_structured_predict(City, prompt, what="Paris")][-1] == PARIS
    names = [type(event).__name__ for event in events.seen]
    assert names.count("LLMStructuredPredictStartEvent") == names.count("LLMStructuredPredictEndEvent") == 4
    assert names.count("LLMStructuredPredictInProgressEvent") >= 2
    structured = llm.as_structured_llm(City)
    assert (await structured.achat(USER)).raw == PARIS and list(structured.stream_chat(USER))[-1].raw == PARIS


async def test_calls_are_run_by_core() -> None:
    _, llm = scripted(CALL)
    assert llm.predict_and_call([ADD], "1+2?").response == "3"
    assert (await llm.apredict_and_call([ADD], "1+2?")).response == "3"
    response = await llm.achat_with_tools([ADD], "1+2?")
    assert [call.tool_kwargs for call in llm.get_tool_calls_from_response(response)] == [{"a": 1, "b": 2}]
    *_, last = [item async for item in await llm.astream_chat_with_tools([ADD], "1+2?")]
    assert [call.tool_name for call in llm.get_tool_calls_from_response(last)] == ["add"]


def test_tools_may_be_given_as_objects_of_a_call() -> None:
    engine, llm = scripted()
    llm.chat(USER, tools=[ADD], tool_choice="none")
    assert [tool.name for tool in engine.requests[0].tools] == ["add"]
    for wrong in ([3], [{"x": 1}], [{"type": "function", "function": {}}]):
        with pytest.raises(InvalidRequestError, match="tools"):
            llm.chat(USER, tools=wrong)
        with pytest.raises(InvalidRequestError, match="tools"):
            llm.chat_with_tools(wrong, "hi")


def test_logprobs_by_word_or_number() -> None:
    _, llm = scripted()
    assert llm.chat(USER, logprobs=False).logprobs is None
    assert [len(items) for items in llm.chat(USER, logprobs=True).logprobs] == [1] * 6


def test_the_rest_of_the_blocks(tmp_path: Path) -> None:
    engine, llm = scripted()
    notes = tmp_path / "notes.md"
    notes.write_text("on disk")
    blocks = [
        TextBlock(text="a "),
        CachePoint(cache_control=CacheControl(type="ephemeral")),
        CitableBlock(title="t", source="s", content=[TextBlock(text="b ")]),
        CitationBlock(cited_content=TextBlock(text="c "), source="s", title="t", additional_location_info={}),
        DocumentBlock(path=notes),
    ]
    thought = ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), TextBlock(text="d")])
    call = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs="{}")])
    llm.chat([ChatMessage(role="user", blocks=blocks), thought, *USER, call])
    sent = engine.requests[0].messages
    assert sent[0].text == "a b c on disk" and (sent[1].reasoning, sent[1].text) == ("hm", "d")
    assert sent[3].tool_calls[0].name == "add"
    for block in (ThinkingBlock(content="x"), ToolCallBlock(tool_name="add", tool_kwargs={})):
        with pytest.raises(InvalidRequestError, match=block.block_type):
            llm.chat([ChatMessage(role="user", blocks=[block])])


def test_instances_are_taken_as_they_are() -> None:
    _, llm = scripted()
    assert resolve_llm(llm) is llm


def test_nothing_global_is_set_by_import_or_construction() -> None:
    program = (
        "import llama_index.core as core\n"
        "from llama_index.llms.ninfer import NInfer\n"
        "llm = NInfer(model='demo', engine='x'); llm.metadata\n"
        "assert core.global_tokenizer is None\n"
        "import sys; assert 'torch' not in sys.modules, 'torch was imported'\n"
        "core.set_global_tokenizer(llm.tokenizer)\n"
        "assert len(core.global_tokenizer('Hello')) > 0 and llm._engine().state == 'new'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_a_window_must_be_a_window() -> None:
    for window in (0, -5):
        with pytest.raises(ValueError, match="context_window"):
            NInfer(model="demo", context_window=window)


async def test_an_agent_that_does_not_stream() -> None:
    from llama_index.core.agent.workflow import FunctionAgent

    def answered(request: Request) -> bool:
        return any(message.role == "tool" for message in request.messages)

    engine, llm = scripted(Script("It is 3.", when=answered), CALL)
    result = await FunctionAgent(tools=[add], llm=llm, streaming=False).run("1+2?")
    assert "It is 3." in str(result) and engine.requests[1].messages[1].reasoning == "I add."
