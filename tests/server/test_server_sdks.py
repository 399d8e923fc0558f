"""The vendors' own clients against the server: strict response validation, accumulators, errors, retries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import ollama
import openai
import pytest
from pydantic import BaseModel

from ninfer_core.errors import EngineBusyError
from ninfer_core.testing import Delay, Fault, Refuse, Reply, Script
from ninfer_core.types import Text, ToolCall

from .conftest import Running, text_of

USER: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
CALL = Reply("Let me look.", reasoning="Hm.", tool_calls=[ToolCall("", "bash", {"command": "ls"})])
BUSY = Script(Refuse(EngineBusyError("full", retry_after=0.01)), times=2)


def openai_client(server: Running, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", _strict_response_validation=True, **{"max_retries": 0, **options}
    )


def anthropic_client(server: Running, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", _strict_response_validation=True, **{"max_retries": 0, **options}
    )


class City(BaseModel):
    name: str
    people: int


# OpenAI chat and completions


def test_openai_chat(serve: Any) -> None:
    client = openai_client(serve(CALL))
    answer = client.chat.completions.create(model="scripted", messages=USER, tools=CHAT_TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert choice.message.model_extra and choice.message.model_extra["reasoning_content"] == "Hm."
    assert choice.message.tool_calls and choice.message.tool_calls[0].type == "function"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"command": "ls"}
    usage = answer.usage
    assert usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens


def test_openai_chat_accumulator(serve: Any) -> None:
    client = openai_client(serve(Script(CALL, burst=5)))
    with client.chat.completions.stream(
        model="scripted", messages=USER, tools=CHAT_TOOLS, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and "tool_calls.function.arguments.delta" in kinds
    message = final.choices[0].message
    assert message.content == "Let me look." and final.usage and final.usage.completion_tokens > 0
    assert message.tool_calls and json.loads(message.tool_calls[0].function.arguments) == {"command": "ls"}


def test_openai_chat_parse_with_a_schema(serve: Any) -> None:
    server = serve('{"name": "Oslo", "people": 700000}')
    answer = openai_client(server).chat.completions.parse(model="scripted", messages=USER, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Oslo", people=700000)
    form = server.last.response_format
    assert form.kind == "json_schema" and form.schema["properties"]["people"]["type"] == "integer" and form.strict


def test_openai_chat_several_choices_and_seeds(serve: Any) -> None:
    server = serve(Script(lambda request: f"seed {request.sampling.seed}"))
    answer = openai_client(server).chat.completions.create(model="scripted", messages=USER, n=3, seed=7)
    assert [choice.message.content for choice in answer.choices] == ["seed 7", "seed 8", "seed 9"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    usage = answer.usage
    assert usage and usage.completion_tokens > usage.total_tokens - usage.prompt_tokens - 1
    stream = openai_client(server).chat.completions.create(model="scripted", messages=USER, n=2, seed=7, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "seed 7", 1: "seed 8"}


def test_openai_chat_logprobs(serve: Any) -> None:
    client = openai_client(serve(Reply("ok 😀", reasoning="hm")))
    answer = client.chat.completions.create(model="scripted", messages=USER, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content
    assert b"".join(bytes(item.bytes or ()) for item in logprobs.content) == "ok 😀".encode()
    assert all(len(item.top_logprobs) == 2 for item in logprobs.content)
    streamed = [
        item
        for chunk in client.chat.completions.create(model="scripted", messages=USER, logprobs=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for item in choice.logprobs.content or ()
    ]
    assert [item.token for item in streamed] == [item.token for item in logprobs.content]


def test_openai_completions(serve: Any) -> None:
    server = serve("raw text")
    client = openai_client(server)
    answer = client.completions.create(model="scripted", prompt=["a", "bc"], max_tokens=100, echo=True, n=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["araw text"] * 2 + ["bcraw text"] * 2
    assert answer.usage and answer.usage.prompt_tokens == 3
    logprobs = answer.choices[0].logprobs
    assert logprobs and "".join(logprobs.tokens or ()) == "raw text" and (logprobs.text_offset or [])[:2] == [1, 2]
    assert server.last.prompt == "bc"
    # The SDK's strict model of a chunk refuses the null finish_reason that its own service sends.
    lenient = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    chunks = list(lenient.completions.create(model="scripted", prompt=[104, 105], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "raw text"
    assert server.last.prompt == (104, 105) and server.last.max_tokens == 16
    assert client.completions.create(model="scripted", prompt="hi", best_of=0).choices[0].text == "raw text"


def test_openai_models(serve: Any) -> None:
    client = openai_client(serve())
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("absent")
    assert error.value.code == "model_not_found" and error.value.param == "model"


# OpenAI responses


def test_openai_responses(serve: Any) -> None:
    client = openai_client(serve(CALL))
    tools: list[Any] = [{"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}]
    answer = client.responses.create(input="hi", tools=tools, include=["reasoning.encrypted_content"])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "Let me look." and answer.status == "completed" and answer.model == "scripted"
    assert answer.usage and answer.usage.output_tokens_details.reasoning_tokens
    count = client.responses.input_tokens.count(input="hi", tools=tools)
    assert count.input_tokens == answer.usage.input_tokens


def test_openai_responses_without_input(serve: Any) -> None:
    """The client may leave everything out; the model then answers an empty message."""
    server = serve("Hello!")
    answer = openai_client(server).responses.create()
    assert answer.output_text == "Hello!" and answer.model == "scripted"
    assert [(message.role, message.text) for message in server.last.messages] == [("user", "")]


def test_openai_responses_accumulator_and_replay(serve: Any) -> None:
    server = serve(Script(CALL, burst=4))
    client = openai_client(server)
    tools: list[Any] = [{"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}]
    with client.responses.stream(
        model="scripted",
        input="hi",
        tools=tools,
        reasoning={"summary": "auto"},
        include=["reasoning.encrypted_content"],
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [getattr(event, "sequence_number", None) for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    call = final.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"command": "ls"}
    replay: list[Any] = [
        {"role": "user", "content": "hi"},
        *[item.model_dump(exclude_none=True) for item in final.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "a.py"}]},
    ]
    for item in replay:
        item.pop("parsed_arguments", None)
    client.responses.create(input=replay, tools=tools)
    _, assistant, result = server.last.messages
    assert assistant.reasoning == "Hm." and text_of(assistant) == "Let me look."
    assert assistant.tool_calls[0].arguments == {"command": "ls"} and assistant.tool_calls[0].id == call.call_id
    assert result.role == "tool" and text_of(result) == "a.py" and result.tool_call_id == call.call_id
    sealed = [{**item} for item in replay[:2]]
    sealed[1].update(content=[], summary=[])
    client.responses.create(input=[*sealed, *replay[2:]], tools=tools)
    assert server.last.messages[1].reasoning == "Hm.", "our own encrypted_content is readable to us"


def test_openai_responses_parse(serve: Any) -> None:
    client = openai_client(serve('{"name": "Oslo", "people": 1}'))
    answer = client.responses.parse(model="scripted", input="hi", text_format=City)
    assert answer.output_parsed == City(name="Oslo", people=1)


def test_openai_responses_namespaces_and_free_form_tools(serve: Any) -> None:
    patch = ToolCall("", "apply_patch", {"input": "*** Begin\n+x\n"})
    server = serve(Script(Reply("", tool_calls=[ToolCall("", "git.log", {"n": "1"}), patch]), burst=7))
    tools: list[Any] = [
        {
            "type": "namespace",
            "name": "git",
            "description": "Git.",
            "tools": [{"type": "function", "name": "log", "parameters": {"type": "object", "properties": {}}}],
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Patch.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
        },
        {"type": "web_search"},
    ]
    client = openai_client(server)
    answer = client.responses.with_raw_response.create(input="hi", tools=tools)
    assert answer.headers["x-ninfer-warning"] == "tools left out: web_search"
    output = answer.parse().output
    log, custom = output[-2], output[-1]
    assert log.type == "function_call" and (log.namespace, log.name) == ("git", "log")
    assert custom.type == "custom_tool_call" and custom.name == "apply_patch" and custom.input == "*** Begin\n+x\n"
    assert [tool.name for tool in server.last.tools] == ["git.log", "apply_patch"]
    with client.responses.stream(model="scripted", input="hi", tools=tools) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("response.custom_tool_call_input.done") == 1
    item = {"type": "function_call", "namespace": "git", "name": "log", "call_id": "call_1", "arguments": "{}"}
    client.responses.create(input=[{"role": "user", "content": "x"}, item], tools=tools)  # type: ignore[list-item]
    assert server.last.messages[-1].tool_calls[0].name == "git.log"


def test_openai_responses_store(serve: Any) -> None:
    server = serve("Hello!", stored_responses=5)
    client = openai_client(server)
    first = client.responses.create(input="one")
    second = client.responses.create(input="two", previous_response_id=first.id)
    assert [text_of(message) for message in server.last.messages] == ["one", "Hello!", "two"]
    assert client.responses.retrieve(second.id).output_text == "Hello!"
    assert len(client.responses.input_items.list(second.id).data) == 3
    told = {"type": "item_reference", "id": first.output[0].id}
    later: list[Any] = [{"role": "user", "content": "one"}, told, {"role": "user", "content": "three"}]
    client.responses.create(input=later)
    assert [text_of(message) for message in server.last.messages] == ["one", "Hello!", "three"]
    client.responses.create(input=[{"id": told["id"]}, later[-1]])  # type: ignore[list-item]
    assert [text_of(message) for message in server.last.messages] == ["Hello!", "three"]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="does not keep"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_gone"}])
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(input="x", previous_response_id=first.id)
    assert error.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_openai_responses_incomplete_and_failed(serve: Any) -> None:
    server = serve(Reply("a long answer"))
    client = openai_client(server)
    answer = client.responses.create(input="hi", max_output_tokens=5)
    assert answer.status == "incomplete" and answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"
    server = serve(Script(["x", Fault(RuntimeError("boom"))]))
    events = list(openai_client(server).responses.create(input="hi", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error
    assert events[-1].response.error.code == "server_error"


# Anthropic


def test_anthropic_messages(serve: Any) -> None:
    server = serve(CALL)
    client = anthropic_client(server)
    tools: list[Any] = [{"name": "bash", "input_schema": PARAMETERS}]
    body: dict[str, Any] = {"model": "scripted", "messages": USER, "tools": tools, "thinking": {"type": "adaptive"}}
    answer = client.messages.create(max_tokens=1000, **body)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    call = answer.content[-1]
    assert call.type == "tool_use" and call.input == {"command": "ls"} and call.id.startswith("toolu_")
    assert answer.stop_reason == "tool_use" and answer.id.startswith("msg_")
    assert client.messages.count_tokens(**body).input_tokens == answer.usage.input_tokens
    replay = [
        *USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and now?"},
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a.py"}]},
            ],
        },
    ]
    client.messages.create(max_tokens=10, **{**body, "messages": replay})
    _, assistant, result, user = server.last.messages
    assert assistant.reasoning == "Hm." and assistant.tool_calls[0].id == call.id
    assert (result.role, text_of(result), result.tool_call_id) == ("tool", "a.py", call.id)
    assert text_of(user) == "and now?"


def test_anthropic_accumulator(serve: Any) -> None:
    client = anthropic_client(serve(Script(CALL, burst=3)))
    with client.messages.stream(
        model="scripted",
        messages=USER,
        max_tokens=1000,
        tools=[{"name": "bash", "input_schema": PARAMETERS}],  # type: ignore[list-item]
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Let me look." and [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[-1].input == {"command": "ls"} and final.stop_reason == "tool_use"  # type: ignore[union-attr]
    assert final.usage.output_tokens > 0


def test_anthropic_models_and_errors(serve: Any) -> None:
    server = serve("Hello!")
    client = anthropic_client(server)
    models = client.models.list()
    assert [(model.id, model.lifecycle) for model in models] == [("scripted", "active")]
    assert client.models.retrieve("scripted").max_input_tokens == 32768
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="absent", messages=USER, max_tokens=10)
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id  # type: ignore[index]
    answer = client.messages.create(model="claude-any-name", messages=USER, max_tokens=10)
    assert answer.model == "claude-any-name"


def test_anthropic_stop_sequence(serve: Any) -> None:
    client = anthropic_client(serve("alpha beta gamma delta"))
    answer = client.messages.create(model="scripted", messages=USER, max_tokens=99, stop_sequences=["beta"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "beta")
    assert answer.content[0].text == "alpha "  # type: ignore[union-attr]


def test_anthropic_mid_stream_error_is_raised(serve: Any) -> None:
    client = anthropic_client(serve(Script(["x</think>text", Fault(RuntimeError("boom"))])))
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model="scripted", messages=USER, max_tokens=99, thinking={"type": "adaptive"}) as stream,
    ):
        list(stream)


# Ollama


def test_ollama_chat(serve: Any) -> None:
    server = serve(Script(CALL, burst=4))
    client = ollama.Client(host=server.url)
    answer = client.chat(model="scripted", messages=USER, tools=CHAT_TOOLS)
    assert answer.message.content == "Let me look." and answer.message.thinking == "Hm."
    assert answer.message.tool_calls and answer.message.tool_calls[0].function.arguments == {"command": "ls"}
    assert answer.done_reason == "stop" and answer.eval_duration and answer.total_duration
    parts = list(client.chat(model="scripted", messages=USER, tools=CHAT_TOOLS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Let me look."
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert [part.done for part in parts].count(True) == 1 and parts[-1].prompt_eval_count == answer.prompt_eval_count
    replay = [*USER, answer.message, {"role": "tool", "tool_name": "bash", "content": "a.py"}]
    client.chat(model="scripted", messages=replay, think=False)
    _, assistant, result = server.last.messages
    assert assistant.reasoning == "Hm." and assistant.tool_calls[0].arguments == {"command": "ls"}
    assert result.name == "bash" and text_of(result) == "a.py" and server.last.thinking is False


def test_ollama_generate_and_models(serve: Any) -> None:
    server = serve("Hello!")
    client = ollama.Client(host=server.url)
    assert client.generate(model="scripted", prompt="hi", system="be brief").response == "Hello!"
    assert [message.role for message in server.last.messages] == ["system", "user"]
    raw = client.generate(model="scripted", prompt="hi", raw=True, options={"num_predict": 3, "seed": 5})
    assert raw.response == "Hel" and raw.done_reason == "length" and server.last.sampling.seed == 5
    assert client.list().models[0].model == "scripted" and client.ps().models[0].name == "scripted"
    shown = client.show("scripted")
    architecture = shown.modelinfo["general.architecture"]  # type: ignore[index]
    assert shown.modelinfo[f"{architecture}.context_length"] == 32768  # type: ignore[index]
    assert shown.capabilities == ["completion", "tools", "thinking"] and "tools" in (shown.template or "")
    assert client.pull("scripted").status == "success"
    with pytest.raises(ollama.ResponseError, match="not found, try pulling it first"):
        client.show("absent")
    with pytest.raises(ollama.ResponseError, match="embeddings are not supported"):
        client.embed(model="scripted", input="x")
    loaded = client.generate(model="scripted")
    assert loaded.done_reason == "load" and client.chat(model="scripted", keep_alive=0).done_reason == "unload"


def test_ollama_format_and_stream_error(serve: Any) -> None:
    server = serve('{"name": "Oslo", "people": 1}')
    answer = ollama.Client(host=server.url).chat(model="scripted", messages=USER, format=City.model_json_schema())
    assert City.model_validate_json(answer.message.content or "") == City(name="Oslo", people=1)
    assert server.last.response_format.kind == "json_schema"
    server = serve(Script(["x", Fault(RuntimeError("boom"))]))
    with pytest.raises(ollama.ResponseError, match="failed to process"):
        list(ollama.Client(host=server.url).chat(model="scripted", messages=USER, stream=True))


# all


def test_sdks_retry_after_a_busy_answer(serve: Any) -> None:
    server = serve(BUSY, "Hello!")
    answer = openai_client(server, max_retries=2).chat.completions.create(model="scripted", messages=USER)
    assert answer.choices[0].message.content == "Hello!"
    server = serve(Script(Refuse(EngineBusyError("full", retry_after=0.01)), times=2), "Hello!")
    message = anthropic_client(server, max_retries=2).messages.create(model="scripted", messages=USER, max_tokens=9)
    assert message.content[0].text == "Hello!"  # type: ignore[union-attr]
    server = serve(Script(Refuse(EngineBusyError("full"))))
    with pytest.raises(openai.InternalServerError) as busy:
        openai_client(server).chat.completions.create(model="scripted", messages=USER)
    assert busy.value.status_code == 503 and busy.value.response.headers["retry-after"] == "1"
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        anthropic_client(server).messages.create(model="scripted", messages=USER, max_tokens=9)
    assert overloaded.value.status_code == 529
    assert overloaded.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


def test_async_clients(serve: Any) -> None:
    server = serve(Script(["ok</think>Hello!", Delay(0.01)]))

    async def run() -> tuple[str, str, str]:
        async with (
            openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as first,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as second,
        ):
            third = ollama.AsyncClient(host=server.url)
            chat, message, line = await asyncio.gather(
                first.chat.completions.create(model="scripted", messages=USER),
                second.messages.create(model="scripted", messages=USER, max_tokens=99, thinking={"type": "adaptive"}),
                third.chat(model="scripted", messages=USER),
            )
            return (
                chat.choices[0].message.content or "",
                message.content[-1].text,  # type: ignore[union-attr]
                line.message.content or "",
            )

    assert asyncio.run(run()) == ("Hello!",) * 3


def test_leaving_an_sdk_stream_cancels_the_request(serve: Any) -> None:
    server = serve(Script(["word " * 1000], rate=200))
    stream = openai_client(server).chat.completions.create(model="scripted", messages=USER, stream=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert server.idle()
    assert len(server.engine.cancelled) == 1


def test_the_same_prompt_counts_the_same_in_every_api(serve: Any) -> None:
    server = serve("Hello!")
    system, user = "Be brief.", "Grüße 😀"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    chat = server.post("/v1/chat/completions", {"messages": messages, "enable_thinking": False}).json()["usage"]
    responses = server.post(
        "/v1/responses", {"instructions": system, "input": user, "reasoning": {"effort": "none"}}
    ).json()["usage"]
    body = {"system": [{"type": "text", "text": system}], "messages": [{"role": "user", "content": user}]}
    anthropic_usage = server.post("/v1/messages", {**body, "max_tokens": 99}).json()["usage"]
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    line = server.post("/api/chat", {"messages": messages, "think": False, "stream": False}).json()
    totals = {
        chat["prompt_tokens"],
        responses["input_tokens"],
        sum(anthropic_usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_")),
        counted,
        line["prompt_eval_count"],
    }
    assert len(totals) == 1
    made = {chat["completion_tokens"], responses["output_tokens"], anthropic_usage["output_tokens"], line["eval_count"]}
    assert len(made) == 1
    assert isinstance(server.last.messages[0].content, (str, Text))
