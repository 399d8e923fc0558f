"""`NInfer` member by member: the eight calls, thinking, tools, structured output, blocks, metadata, callbacks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ninfer import NInfer
from pydantic import BaseModel

from ninfer_core.errors import ContextOverflowError, InvalidRequestError, MediaError, UnsupportedError
from ninfer_core.testing import Delay, End, Reply, Script, ScriptedEngine, Tokens, Wait
from ninfer_core.types import ToolCall
from tests.integrations.conftest import cancelled_amid

USER = [ChatMessage(role="user", content="hi")]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADD = FunctionTool.from_defaults(add)
CALLS = Reply("", tool_calls=[ToolCall("", "add", {"a": 1, "b": 2}), ToolCall("", "add", {"a": 1, "b": 2})])


class City(BaseModel):
    name: str
    population: int


def scripted(*scripts: Any, **options: Any) -> tuple[ScriptedEngine, NInfer]:
    fields = options.pop("fields", {})
    engine = ScriptedEngine(*(scripts or ("Hello!",)), **options)
    return engine, NInfer.from_engine(engine, **fields)


def test_class_hierarchy() -> None:
    assert BaseLLM.__name__ in [kind.__name__ for kind in NInfer.__mro__]
    assert NInfer.class_name() == "NInfer_llm"


def test_chat_complete_and_their_streams() -> None:
    _, llm = scripted()
    assert llm.chat(USER).message.content == "Hello!"
    assert llm.complete("hi").text == "Hello!"
    chat = list(llm.stream_chat(USER))
    assert "".join(item.delta for item in chat) == "Hello!" == chat[-1].message.content
    complete = list(llm.stream_complete("hi"))
    assert "".join(item.delta for item in complete) == "Hello!" == complete[-1].text


async def test_the_four_async_twins() -> None:
    _, llm = scripted()
    assert (await llm.achat(USER)).message.content == "Hello!"
    assert (await llm.acomplete("hi")).text == "Hello!"
    chat = [item async for item in await llm.astream_chat(USER)]
    assert "".join(item.delta for item in chat) == "Hello!" == chat[-1].message.content
    complete = [item async for item in await llm.astream_complete("hi")]
    assert complete[-1].text == "Hello!"


def test_thinking_comes_first_in_deltas_and_block_and_never_in_content() -> None:
    engine, llm = scripted([Tokens("hm"), Delay(0.02), " ok", "</think>", "\n\n", "4"])
    whole = llm.chat(USER)
    block = whole.message.blocks[0]
    assert isinstance(block, ThinkingBlock)
    assert (block.content, block.num_tokens, whole.message.content) == (
        "hm ok",
        whole.raw["usage"]["completion_tokens_details"]["reasoning_tokens"],
        "4",
    )
    assert block.num_tokens
    items = list(llm.stream_chat(USER))
    thoughts = [
        item.additional_kwargs["thinking_delta"] for item in items if "thinking_delta" in item.additional_kwargs
    ]
    assert thoughts[0] == "hm" and "".join(thoughts) == "hm ok"
    assert all(item.delta is not None for item in items)
    assert items[-1].message.blocks == whole.message.blocks
    assert engine.requests[0].thinking is None


@pytest.mark.parametrize(("own", "call", "sent"), [(True, False, False), (False, True, True), (None, None, None)])
def test_thinking_of_the_call_wins(own: bool | None, call: bool | None, sent: bool | None) -> None:
    engine, llm = scripted(fields={"thinking": own})
    llm.chat(USER, **({} if call is None else {"thinking": call}))
    assert engine.requests[0].thinking is sent


def test_past_thinking_calls_and_results_come_back_once() -> None:
    engine, llm = scripted(Script(CALLS, times=1), "Done.")
    history = [ChatMessage(role="user", content="1+2?")]
    first = llm.chat_with_tools([ADD], chat_history=history, allow_parallel_tool_calls=True, thinking=False)
    first.message.blocks.insert(0, ThinkingBlock(content="I add."))
    calls = llm.get_tool_calls_from_response(first)
    results = [
        ChatMessage(role=MessageRole.TOOL, content="3", additional_kwargs={"tool_call_id": call.tool_id})
        for call in calls
    ]
    llm.chat([*history, first.message, *results])
    sent = engine.requests[1].messages
    assert sent[1].reasoning == "I add." and [call.arguments for call in sent[1].tool_calls] == [{"a": 1, "b": 2}] * 2
    assert [message.tool_call_id for message in sent[2:]] == [call.tool_id for call in calls]


def test_equal_calls_are_kept_with_ids_of_their_own() -> None:
    _, llm = scripted(CALLS)
    response = llm.chat_with_tools([ADD], "1+2?", allow_parallel_tool_calls=True)
    calls = llm.get_tool_calls_from_response(response)
    assert [call.tool_kwargs for call in calls] == [{"a": 1, "b": 2}] * 2
    assert len({call.tool_id for call in calls}) == 2 and "add" not in {call.tool_id for call in calls}
    streamed = list(llm.stream_chat_with_tools([ADD], "1+2?", allow_parallel_tool_calls=True))
    for item in streamed:  # agents ask after every piece
        for call in llm.get_tool_calls_from_response(item, error_on_no_tool_call=False):
            assert call.tool_name == "add" and set(call.tool_kwargs) <= {"a", "b"}
    assert len(llm.get_tool_calls_from_response(streamed[-1])) == 2


def test_one_call_only_unless_parallel() -> None:
    engine, llm = scripted(CALLS)
    response = llm.chat_with_tools([ADD], "1+2?")
    assert len(llm.get_tool_calls_from_response(response)) == 1
    assert len(llm.get_tool_calls_from_response(list(llm.stream_chat_with_tools([ADD], "1+2?"))[-1])) == 1
    assert engine.requests[0].parallel_tool_calls is False


def test_tool_choice_reaches_the_engine_and_the_history_stays_as_it_was() -> None:
    engine, llm = scripted(CALLS)
    history = [ChatMessage(role="user", content="1+2?")]
    llm.chat_with_tools([ADD], user_msg="Well?", chat_history=history, tool_required=True)
    assert engine.requests[0].tool_choice.mode == "required" and len(history) == 1
    llm.chat_with_tools([ADD], chat_history=history, tool_choice="add")
    assert engine.requests[1].tool_choice.names == ("add",)
    with pytest.raises(InvalidRequestError, match="subtract"):
        llm.chat_with_tools([ADD], chat_history=history, tool_choice="subtract")


def test_no_call_is_an_empty_list_or_an_error() -> None:
    _, llm = scripted()
    response = llm.chat_with_tools([ADD], "hi")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="Hello!"):
        llm.get_tool_calls_from_response(response)
    assert llm.chat_with_tools([], "hi").message.content == "Hello!"


def test_a_call_cut_by_the_limit_is_never_run() -> None:
    _, llm = scripted(["<tool_call>\n<function=add>\n<parameter=a>\n1", End("length")], fields={"thinking": False})
    response = llm.chat_with_tools([ADD], "1+2?")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="max_tokens"):
        llm.get_tool_calls_from_response(response)
    _, llm = scripted(["<tool_call>\n<function=ad", End("length")], fields={"thinking": False})
    for response in (llm.chat_with_tools([ADD], "1+2?"), list(llm.stream_chat_with_tools([ADD], "1+2?"))[-1]):
        assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
        with pytest.raises(ValueError, match="cut by the length limit; raise max_tokens"):
            llm.get_tool_calls_from_response(response)


def test_predict_and_call_runs_the_tool() -> None:
    _, llm = scripted(CALLS)
    assert llm.predict_and_call([ADD], "1+2?").response == "3"


async def test_structured_predict_and_its_streams() -> None:
    engine, llm = scripted('{"name": "Paris", "population": 2}', fields={"system_prompt": "Be exact."})
    prompt = PromptTemplate("About {what}")
    assert llm.structured_predict(City, prompt, what="Paris") == City(name="Paris", population=2)
    assert (await llm.astructured_predict(City, prompt, what="Paris")).population == 2
    partial = list(llm.stream_structured_predict(City, prompt, what="Paris"))
    assert partial[-1] == City(name="Paris", population=2) and len(partial) > 2
    last = [item async for item in await llm.astream_structured_predict(City, prompt, what="Paris")][-1]
    assert last == partial[-1]
    form = engine.requests[0].response_format
    assert form is not None and form.kind == "json_schema" and "population" in form.schema["properties"]
    assert form.schema["additionalProperties"] is False
    assert engine.requests[0].messages[0].text == "Be exact."
    assert llm.as_structured_llm(City).chat(USER).raw == City(name="Paris", population=2)


def test_structured_predict_names_the_reason_of_a_failure() -> None:
    _, llm = scripted(['{"name": "Par', End("length")], fields={"thinking": False})
    with pytest.raises(ValueError, match=r"length.*max_tokens"):
        llm.structured_predict(City, PromptTemplate("hi"))


def test_formatted_prompts_are_raw() -> None:
    engine, llm = scripted()
    llm.complete("Once upon", formatted=True)
    llm.complete("Once upon")
    assert engine.requests[0].prompt == "Once upon" and engine.requests[1].messages[0].text == "Once upon"
    other = NInfer.from_engine(engine, completion_to_prompt=lambda text: f"Q: {text}\nA:")
    other.complete("why")
    assert engine.requests[2].prompt == "Q: why\nA:"


def test_blocks_that_can_be_read_and_those_that_cannot() -> None:
    engine, llm = scripted()
    text = DocumentBlock(data=b"a,b", document_mimetype="text/csv")
    llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="See "), text])])
    assert engine.requests[0].messages[0].text == "See a,b"
    cases: list[tuple[Any, type[Exception], str]] = [
        (AudioBlock(audio=b"RIFF"), UnsupportedError, r"blocks\[0\].*audio"),
        (ImageBlock(url="http://127.0.0.1:9/x.png"), MediaError, "allow_remote_media"),
        (DocumentBlock(data=b"%PDF", document_mimetype="application/pdf"), UnsupportedError, "application/pdf"),
        (ImageBlock(image=b"not an image"), UnsupportedError, "no vision"),
    ]
    for block, kind, match in cases:
        with pytest.raises(kind, match=match):
            llm.chat([ChatMessage(role="user", blocks=[block])])


def test_metadata_and_construction_load_nothing() -> None:
    llm = NInfer(model="demo", engine="never-loaded", engine_options={"context_length": 512})
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (512, -1, "demo")
    assert metadata.is_chat_model and metadata.is_function_calling_model
    assert NInfer(model="demo", context_window=100, max_tokens=7).metadata.context_window == 100
    remote = NInfer(model="qwen3.6-27b", base_url="http://127.0.0.1:9")
    assert remote.metadata.context_window == 262144


def test_unknown_fields_and_options_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'max_tokens'"):
        NInfer(model="demo", max_token=3)
    with pytest.raises(ValueError, match="engine_options"):
        NInfer(model="demo", engine_options={"contextlength": 3})
    _, llm = scripted()
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        llm.chat(USER, temprature=1)


def test_secrets_stay_out_of_serialized_forms() -> None:
    llm = NInfer(model="demo", api_key="s3cret", base_url="http://127.0.0.1:9")
    assert "s3cret" not in llm.to_json() and "s3cret" not in repr(llm) and "s3cret" not in str(llm.to_dict())
    again = NInfer.from_dict(llm.to_dict())
    assert again.base_url == llm.base_url


def test_usage_reaches_the_token_counter_whole_and_streamed() -> None:
    counter = TokenCountingHandler()
    _, llm = scripted(fields={"callback_manager": CallbackManager([counter])})
    response = llm.chat(USER)
    assert response.raw["usage"]["prompt_tokens"] == llm.count_tokens(USER) > 0
    assert counter.total_llm_token_count == response.raw["usage"]["total_tokens"]
    last = list(llm.stream_chat(USER))[-1]
    assert last.raw["usage"] == response.raw["usage"]
    assert counter.total_llm_token_count == 2 * response.raw["usage"]["total_tokens"]
    assert llm.tokenizer("abc") == [97, 98, 99] or len(llm.tokenizer("abc")) == 3


def test_token_counts_include_tools() -> None:
    _, llm = scripted()
    response = llm.chat_with_tools([ADD], "hi")
    assert response.raw["usage"]["prompt_tokens"] == llm.count_tokens(USER, [ADD])


def test_sampling_fields_of_llm_and_call() -> None:
    engine, llm = scripted(fields={"temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "max_tokens": 5})
    llm.chat(USER, temperature=0.0, stop=["y"], logprobs=2)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.0, 3, 1)
    assert engine.requests[0].stop == ("y",) and engine.requests[0].max_tokens == 5


def test_logprobs() -> None:
    _, llm = scripted()
    whole = llm.chat(USER, logprobs=2)
    assert "".join(items[0].token for items in whole.logprobs) == "Hello!" and len(whole.logprobs[0]) == 3
    streamed = [items for part in llm.stream_chat(USER, logprobs=2) for items in part.logprobs or ()]
    assert streamed == whole.logprobs


def test_a_prompt_that_is_too_long_says_both_numbers() -> None:
    _, llm = scripted(context_length=64)
    with pytest.raises(ContextOverflowError, match="64") as caught:
        llm.chat([ChatMessage(role="user", content="x" * 100)])
    assert caught.value.n_ctx == 64 < caught.value.n_prompt_tokens


async def test_leaving_cancels() -> None:
    never = threading.Event()
    engine, llm = scripted(Script(["</think>", "a", Wait(never)]), fields={})
    await cancelled_amid(engine, llm.achat(USER))
    stream = await llm.astream_chat(USER)
    await anext(stream)
    await stream.aclose()
    sync = llm.stream_chat(USER)
    next(sync)
    sync.close()
    # The framework drops inner generators instead of closing them; the event loop ends those at its next turns.
    assert await asyncio.to_thread(engine.wait_idle, 60) and len(engine.cancelled) == 3


def test_two_instances_share_the_engine_of_a_name() -> None:
    one, two = NInfer(model="demo", engine="shared-by-name"), NInfer(model="demo", engine="shared-by-name", top_k=3)
    assert one._engine() is two._engine()
    one.close()


def test_calls_of_other_models_in_the_history_are_read() -> None:
    engine, llm = scripted()
    old = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    llm.chat([*USER, ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [old]})])
    assert engine.requests[0].messages[1].tool_calls == (ToolCall("c1", "add", {"a": 1, "b": 2}),)
    block = ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 1, "b": 2})
    llm.chat([*USER, ChatMessage(role="assistant", blocks=[block], additional_kwargs={"tool_calls": [old]})])
    assert len(engine.requests[1].messages[1].tool_calls) == 1
