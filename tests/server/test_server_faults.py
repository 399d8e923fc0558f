"""What clients get wrong or send oddly: bad values, odd bodies, overflow, history in strange shapes."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from typing import Any

import pytest
import zstandard

from ninfer_core.runtime.validation import check_request
from ninfer_core.testing import Reply, Script, ScriptedEngine, Tokens
from ninfer_core.types import ToolCall

from .conftest import Running, text_of

USER: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
BASH = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def refused(server: Running, path: str, body: Any, param: str | None) -> dict[str, Any]:
    """The error of a request that must be refused in its API's shape, quickly, without harm to the next one."""
    began = time.monotonic()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.post(path, content=content)
    assert answer.status_code == 400, answer.text
    assert time.monotonic() - began < 30
    error: dict[str, Any] = answer.json()
    if path.startswith("/api/"):
        assert set(error) == {"error"} and isinstance(error["error"], str)
    elif path.startswith("/v1/messages"):
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert error["request_id"] == answer.headers["request-id"]
    else:
        assert set(error) == {"error"} and error["error"]["type"] == "invalid_request_error"
        assert {"message", "type", "param", "code"} <= set(error["error"])
        if param is not None:
            assert error["error"]["param"] == param, error
    good = server.post(CHAT, chat(max_tokens=3))
    assert good.status_code == 200
    return error


DEEP_JSON = (
    b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
)
DEEP_JSON += b'{"properties":{"x":' * 2000 + b"{}" + b"}}" * 2000 + b"}}]}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(logit_bias={"AI": -100}), "logit_bias"),
        (chat(logit_bias={"99999999": 5}), "logit_bias"),
        (chat(logit_bias={"5": "x"}), "logit_bias.5"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_completion_tokens=-7), "max_completion_tokens"),
        (chat(temperature=999999), "temperature"),
        (chat(temperature="hot"), "temperature"),
        (chat(top_p=-1), "top_p"),
        (chat(repetition_penalty=0), "repetition_penalty"),
        (chat(n=0), "n"),
        (chat(n=9), "n"),
        (chat(n=True), "n"),
        (chat(top_logprobs=21, logprobs=True), "top_logprobs"),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(stop=[""]), "stop"),
        (chat(stop=["x"] * 17), "stop"),
        (chat(seed=1 << 70), "seed"),
        (chat(stream="yes"), "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
        (chat(tools=[{"type": "function", "function": BASH}] * 2), "tools"),
        (chat(tool_choice="always", tools=[]), "tool_choice"),
        (chat(tool_choice={"type": "function", "function": {"name": "absent"}}), "tool_choice"),
        (chat(response_format={"type": "xml"}), "response_format.type"),
        (chat(response_format={"type": "json_schema", "json_schema": 5}), "response_format.json_schema"),
        (chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (chat(guided_json={"type": "object"}, guided_regex="x"), "guided_regex"),
        (chat(structured_outputs={"dance": 1}), "structured_outputs.dance"),
        (chat(modalities=["audio"]), "modalities"),
        (chat(continue_final_message=True), "continue_final_message"),
        (chat(chat_template_kwargs={"enable_thinking": "no"}), "chat_template_kwargs.enable_thinking"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', None),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
        (b"[1, 2]", None),
        (b"", None),
        (b'{"messages": [', None),
        (b"[" * 100_000, None),
        (b'{"seed": ' + b"9" * 5000 + b"}", None),
        (DEEP_JSON, None),
    ],
)
def test_chat_refuses(serve: Any, body: Any, param: str | None) -> None:
    refused(serve(), CHAT, body, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "logprobs": 50}, "logprobs"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/responses", {"input": "x", "background": True}, "background"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ("/v1/messages", {"messages": []}, None),
        ("/v1/messages", {"messages": USER, "max_tokens": 0}, None),
        ("/v1/messages", {"messages": [{"role": "tool", "content": "x"}]}, None),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, None),
        ("/v1/messages", {"messages": USER, "tool_choice": {"type": "some"}}, None),
        ("/v1/messages", {"messages": USER, "thinking": {"type": 5}}, None),
        ("/v1/messages", b"{", None),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, None),
        ("/api/chat", {"messages": USER, "options": {"temperature": "x"}}, None),
        ("/api/chat", {"messages": USER, "format": "xml"}, None),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["not base64!"]}]}, None),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, None),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, None),
        ("/api/chat", b"\xff", None),
        ("/api/create", {"model": "x", "from": "scripted"}, None),
        ("/api/push", {"model": "x"}, None),
        ("/api/embed", {"model": "scripted", "input": "x"}, None),
        ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
    ],
)
def test_other_endpoints_refuse(serve: Any, path: str, body: Any, param: str | None) -> None:
    refused(serve(), path, body, param)


def test_the_field_is_named_once(serve: Any) -> None:
    for change in ({"max_tokens": 0}, {"stop_sequences": [""]}, {"thinking": {"type": "enabled", "budget_tokens": -1}}):
        message = serve().post("/v1/messages", {"messages": USER, **change}).json()["error"]["message"]
        name, value = next(iter(change.items()))
        name = f"{name}.budget_tokens" if isinstance(value, dict) else name
        assert message.startswith(name) and message.count(name) == 1, message


def test_odd_but_valid_values_are_taken(serve: Any) -> None:
    server = serve(ScriptedEngine("Hello!", context_length=1 << 20))
    tools = [{"type": "function", "function": {**BASH, "name": f"tool_{i}"}} for i in range(512)]
    for body in (
        chat(logit_bias={}),
        chat(max_tokens=-1),
        chat(max_tokens=None),
        chat(max_tokens=10**9),
        chat(n=1.0, seed=5.0),
        chat(tools=tools[:21]),
        chat(tools=tools[:512], max_tokens=1),
        {"messages": [{"role": "user", "content": "a" * 20_000}]},
        {"messages": [*USER, *USER]},
        chat(stop=None, tools=None, tool_choice=None, stream_options=None, response_format={"type": "text"}),
        chat(tools=[{"type": "web_search"}, {"type": "code_interpreter"}]),
        chat(store=True, metadata={"a": "b"}, user="u", service_tier="auto", verbosity="low", unknown_field=[1]),
        chat(prediction={"type": "content", "content": "x"}, web_search_options={}, prompt_cache_key="k"),
    ):
        assert server.post(CHAT, body).status_code == 200, body
    assert server.post(CHAT, content=b"\xef\xbb\xbf" + json.dumps(chat()).encode()).status_code == 200
    answer = server.post(CHAT, content=json.dumps(chat()), headers={"content-type": "text/plain"})
    assert answer.status_code == 200
    lone = server.post(CHAT, content=b'{"messages": [{"role": "user", "content": "a\\ud83d b"}]}')
    assert lone.status_code == 200 and text_of(server.last.messages[0]) == "a\ufffd b"


def test_compressed_bodies(serve: Any) -> None:
    server = serve()
    plain = json.dumps(chat()).encode()
    packed = {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "zstd": zstandard.ZstdCompressor().compress(plain),
    }
    for name, data in packed.items():
        assert server.post(CHAT, content=data, headers={"content-encoding": name}).status_code == 200, name
        cut = server.post(CHAT, content=data[: len(data) // 2], headers={"content-encoding": name})
        assert cut.status_code == 400, name
    assert server.post(CHAT, content=plain, headers={"content-encoding": "br"}).status_code == 415
    for name in packed:
        assert server.post(CHAT, content=b"nonsense", headers={"content-encoding": name}).status_code == 400


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
def test_too_large_bodies(serve: Any, path: str) -> None:
    server = serve(max_body_bytes=100_000)
    bomb = gzip.compress(b'{"x": "' + b"a" * 50_000_000 + b'"}')
    cases = [
        {"content": b"x" * 1_000_000},
        {"content": iter([b"x" * 60_000] * 20)},
        {"content": bomb, "headers": {"content-encoding": "gzip"}},
    ]
    for case in cases:
        answer = server.post(path, **case)
        assert answer.status_code == 413
        if path == CHAT:
            assert answer.json()["error"]["code"] == "request_too_large"
        elif path == "/v1/messages":
            assert answer.json()["error"]["type"] == "request_too_large"
        else:
            assert isinstance(answer.json()["error"], str)


def test_unknown_paths_methods_and_models(serve: Any) -> None:
    server = serve()
    assert server.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get("/api/nothing").json() == {"error": "there is nothing at /api/nothing"}
    wrong = server.http.get("/v1/messages")
    assert wrong.status_code == 405 and wrong.json()["type"] == "error" and "POST" in wrong.headers["allow"]
    assert server.post(CHAT, chat(model="absent")).status_code == 404
    missing = server.post("/api/chat", {"model": "absent", "messages": USER})
    assert missing.status_code == 404 and "not found, try pulling it first" in missing.json()["error"]
    for name in ("", None, "scripted", "SCRIPTED:latest", "gpt-5", "claude-opus"):
        answer = server.post(CHAT, chat(model=name))
        assert answer.status_code == 200 and answer.json()["model"] == (name or "scripted"), name
    assert server.http.get("/v1/models/gpt-4o").status_code == 200
    strict = serve("x", strict_models=True)
    assert strict.post(CHAT, chat(model="gpt-5")).status_code == 404


def test_context_overflow_in_every_wording(serve: Any) -> None:
    server = serve()
    long = [{"role": "user", "content": "a" * 40_000}]
    for stream in (False, True):
        answer = server.post(CHAT, {"messages": long, "stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400
        count = error["n_prompt_tokens"]
        assert (error["code"], error["param"], error["n_ctx"]) == ("context_length_exceeded", "messages", 32768)
        assert error["message"] == (
            f"This model's maximum context length is 32768 tokens, but the prompt is too long: {count} tokens > "
            "32768 maximum. Please reduce the length of the messages."
        )
        thinking = {"thinking": {"type": "adaptive"}, "max_tokens": 9}
        other = server.post("/v1/messages", {"messages": long, "stream": stream, **thinking})
        assert other.status_code == 400 and other.json()["error"]["type"] == "invalid_request_error"
        assert other.json()["error"]["message"] == f"prompt is too long: {count} tokens > 32768 maximum"
        third = server.post("/api/chat", {"messages": long, "stream": stream})
        assert third.status_code == 400
        assert third.json()["error"] == f"the input length exceeds the context length: {count} tokens > 32768"
        fourth = server.post("/v1/responses", {"input": long, "stream": stream})
        assert fourth.status_code == 400 and fourth.json()["error"]["code"] == "context_length_exceeded"


def test_max_tokens_is_clamped_to_the_room_left(serve: Any) -> None:
    server = serve(Script(["a" * 40_000], burst=500))
    long = [{"role": "user", "content": "a" * 32_000}]
    answer = server.post(CHAT, {"messages": long, "max_tokens": 32_000}).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 32768
    message = server.post("/v1/messages", {"messages": long, "max_tokens": 32_000}).json()
    assert message["stop_reason"] == "max_tokens"
    beta = {"anthropic-beta": "model-context-window-exceeded-2025-08-26"}
    told = server.post("/v1/messages", {"messages": long, "max_tokens": 32_000}, headers=beta).json()
    assert told["stop_reason"] == "model_context_window_exceeded"


def test_ollama_window_is_an_upper_bound_and_truncation_is_asked_for(serve: Any) -> None:
    server = serve("a" * 500)
    body = {"messages": USER, "stream": False, "think": False}
    short = server.post("/api/chat", {**body, "options": {"num_ctx": 100}}).json()
    assert short["done_reason"] == "length" and short["prompt_eval_count"] + short["eval_count"] == 100
    assert server.post("/api/chat", {**body, "options": {"num_ctx": 10**6}}).json()["done_reason"] == "stop"
    turns = [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "old " * 50},
        {"role": "assistant", "content": "older " * 50},
        {"role": "user", "content": "new"},
    ]
    tight = {**body, "messages": turns, "options": {"num_ctx": 200}}
    assert "exceeds the context length" in server.post("/api/chat", tight).json()["error"]
    kept = server.post("/api/chat", {**tight, "truncate": True}).json()
    assert kept["truncated_messages"] == 2
    assert [text_of(message) for message in server.last.messages] == ["sys", "new"]
    assert server.post("/api/chat", {**body, "messages": turns[1:2], "truncate": True, "options": {"num_ctx": 50}})


# History in strange shapes


def test_tool_arguments_of_earlier_turns(serve: Any) -> None:
    server = serve()
    texts = ['{"city": "Paris", "opts": {"a": 1}}', "", "null", "oops", "[1]"]
    for text in texts:
        call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": text}}
        history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        history.append({"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}]})
        answer = server.post(CHAT, {"messages": history, "tools": [{"type": "function", "function": BASH}]})
        assert answer.status_code == 200, answer.text
        found = server.last.messages[1].tool_calls[0].arguments
        assert found == {"": {}, "null": {}, "oops": "oops", "[1]": "[1]"}.get(
            text, {"city": "Paris", "opts": {"a": 1}}
        )
        assert text_of(server.last.messages[2]) == "ok"


def test_late_and_repeated_system_messages_are_kept_in_place(serve: Any) -> None:
    server = serve()
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "system", "content": "Use metric units."},
        {"role": "user", "content": "How tall?"},
    ]
    prompt = server.post("/apply-template", {"messages": turns}).json()["prompt"]
    for text in ("Be brief.", "Be kind.", "Use metric units."):
        assert prompt.count(text) == 1
    assert prompt.index("Be kind.") < prompt.index("hi") < prompt.index("Use metric units.") < prompt.index("How tall?")
    for path in (CHAT, "/v1/responses"):
        body = {"messages": turns} if path == CHAT else {"input": turns}
        assert server.post(path, body).status_code == 200
        assert server.engine.frontend.render(server.last) == prompt
    late = {
        "system": "Be brief.",
        "messages": [USER[0], {"role": "system", "content": [{"type": "text", "text": "Late."}]}],
        "max_tokens": 9,
    }
    assert server.post("/v1/messages", late).status_code == 200
    assert [message.role for message in server.last.messages] == ["system", "user", "system"]


def test_the_billing_line_is_dropped_from_system_blocks_only(serve: Any) -> None:
    server = serve()
    prompts = set()
    line = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"
    for mark in ("aaaaa", "bbbbb"):
        body = {
            "system": [
                {"type": "text", "text": line.format(mark)},
                {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [{"role": "user", "content": line.format("kept")}],
            "max_tokens": 9,
        }
        assert server.post("/v1/messages?beta=true", body).status_code == 200
        prompts.add(server.engine.frontend.render(server.last))
    (prompt,) = prompts
    assert prompt.count("billing-header") == 1 and "cch=kept" in prompt
    joined = {**body, "system": line.format("x") + "\nYou help."}
    assert server.post("/v1/messages", joined).status_code == 200
    assert server.engine.frontend.render(server.last) == prompt


def test_an_agent_request_with_everything_in_it(serve: Any) -> None:
    server = serve()
    body = {
        "model": "claude-x",
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "container": None,
        "mcp_servers": [],
        "tools": [
            {"name": "a", "input_schema": {"$schema": "x", "type": "object", "propertyNames": {"type": "string"}}},
            {"type": "custom", "name": "b", "input_schema": {"type": "object"}, "strict": True, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "bash_20250124", "name": "bash"},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"title": "t", "url": "u"}]},
                    {"type": "tool_use", "id": "toolu_1", "name": "a", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "after"},
                    {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "it broke"},
                    {"type": "tool_result", "tool_use_id": "toolu_2"},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}},
                ],
            },
            {"role": "assistant", "content": []},
            {"role": "user", "content": "go on"},
        ],
    }
    answer = server.post("/v1/messages?beta=true", body)
    assert answer.status_code == 200, answer.text
    assert "bash_20250124" in answer.headers["x-ninfer-warning"]
    request = server.last
    assert [tool.name for tool in request.tools] == ["a", "b"] and not request.parallel_tool_calls
    assert request.max_tokens == 32000 and request.thinking is True and request.thinking_budget is None
    assert [message.role for message in request.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "assistant",
        "user",
    ]
    assert text_of(request.messages[2]) == "it broke" and text_of(request.messages[4]) == "after\ndoc"


def test_rarer_blocks_of_an_agent(serve: Any) -> None:
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "body"}]}
    result = [{"type": "tool_reference", "tool_name": "a"}, {"type": "text", "text": "seen"}]
    server = serve()
    turns = [
        {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}, found]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "bash", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}]},
    ]
    assert server.post("/v1/messages", {"max_tokens": 9, "messages": turns}).status_code == 200
    first, _, last = server.last.messages
    assert text_of(first) == "T\nS\nbody" and (last.role, text_of(last)) == ("tool", "seen")


def test_constraints_reach_the_engine_or_are_refused_by_it(serve: Any) -> None:
    server = serve()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    cases: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"response_format": {"type": "json_object"}}, ("json", None, None, ())),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
         ("json_schema", schema, None, ())),
        ({"guided_json": schema}, ("json_schema", schema, None, ())),
        ({"guided_json": json.dumps(schema)}, ("json_schema", schema, None, ())),
        ({"guided_regex": "a+"}, ("regex", None, "a+", ())),
        ({"guided_choice": ["a", "b"]}, ("choice", None, None, ("a", "b"))),
        ({"grammar": "start: x"}, ("grammar", None, "start: x", ())),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", None, "a+", ())),
    ]  # fmt: skip
    for fields, expected in cases:
        assert server.post(CHAT, chat(**fields)).status_code == 200
        form = server.last.response_format
        assert (form.kind, form.schema, form.pattern, form.choices) == expected
    tools = [{"type": "function", "function": {**BASH, "name": name}} for name in ("a", "b", "c")]
    server.post(CHAT, chat(tools=tools, tool_choice="required"))
    assert server.last.tool_choice.mode == "required"
    server.post(CHAT, chat(tools=tools, tool_choice={"type": "function", "function": {"name": "b"}}))
    assert (server.last.tool_choice.mode, server.last.tool_choice.names) == ("required", ("b",))
    allowed = [{"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "c"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
    server.post(CHAT, chat(tools=tools, tool_choice=choice))
    assert [tool.name for tool in server.last.tools] == ["a", "c"]
    anthropic_tools = [{"name": "a", "input_schema": {}}]
    server.post(
        "/v1/messages", {"messages": USER, "max_tokens": 9, "tools": anthropic_tools, "tool_choice": {"type": "any"}}
    )
    assert server.last.tool_choice.mode == "required"


def test_an_engine_without_grammars_refuses_by_the_clients_own_field_name(serve: Any) -> None:
    server = serve(ScriptedEngine("Hello!"))
    addressable = server.engine.frontend.tokenizer.addressable
    server.engine._check = lambda request: check_request(  # type: ignore[method-assign]
        request, addressable=addressable, vision=False, grammars=False
    )
    schema = {"type": "object"}
    tools = [{"type": "function", "function": BASH}]
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, chat(response_format=json_schema), "response_format"),
        (CHAT, chat(response_format={"type": "json_object"}, stream=True), "response_format"),
        (CHAT, chat(guided_json=schema), "guided_json"),
        (CHAT, chat(grammar="start: x"), "grammar"),
        (CHAT, chat(structured_outputs={"choice": ["a"]}), "structured_outputs"),
        (CHAT, chat(tools=tools, tool_choice="required"), "tool_choice"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "a"}, "guided_regex"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ]
    for path, body, param in cases:
        error = server.post(path, body)
        assert error.status_code == 400, (path, body)
        found = error.json()["error"]
        assert (found["param"], found["code"]) == (param, "unsupported_parameter")
    ollama = server.post("/api/chat", {"messages": USER, "format": "json"})
    assert ollama.status_code == 400
    output = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    anthropic = server.post("/v1/messages", {"messages": USER, "max_tokens": 9, **output})
    assert anthropic.status_code == 400 and anthropic.json()["error"]["message"].startswith("output_config.format: ")
    strict = chat(tools=[{"type": "function", "function": {**BASH, "strict": True}}])
    assert server.post(CHAT, strict).status_code == 200, "strict is a hint where it cannot be enforced"


@pytest.mark.parametrize(
    ("fields", "thinking", "budget"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "low"}, True, 4096),
        ({"reasoning_effort": "galactic"}, True, None),
        ({"reasoning": {"effort": "minimal"}}, True, 1024),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, True, 50),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"thinking_budget": 7}, None, 7),
        ({"thinking_budget": 0}, None, 0),
        ({"reasoning_budget": -1}, None, None),
    ],
)
def test_ways_to_say_think(serve: Any, fields: dict[str, Any], thinking: bool | None, budget: int | None) -> None:
    server = serve()
    assert server.post(CHAT, chat(**fields)).status_code == 200
    assert (server.last.thinking, server.last.thinking_budget) == (thinking, budget)


# Output


def test_characters_split_over_tokens(serve: Any) -> None:
    server = serve(Script(["x</think>", Tokens(b"ok \xf0\x9f"), Tokens(b"\x98\x80!")]))
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in server.lines(CHAT, chat(stream=True))
        if line.startswith("data: {")
    ]
    assert [delta for delta in deltas if delta] == ["ok ", "😀!"]
    broken = serve(Script([b"A\xf0\x9f", b"B", b"\xc3"]), Script("x"))
    answer = broken.post("/v1/completions", {"prompt": "x"}).json()
    assert answer["choices"][0]["text"] == "A\ufffdB\ufffd" and answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", ["beta gamma", ["beta gamma"]])
def test_stop_strings_over_token_borders(serve: Any, stop: Any) -> None:
    pieces = [Tokens(text) for text in ("alpha", " beta", " gam", "ma", " delta")]
    server = serve(
        Script(["x</think>", *pieces], when=lambda r: not r.prompt and r.thinking is not False), Script(pieces)
    )
    lines = server.lines(CHAT, chat(stream=True, stop=stop))
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines if line[6:7] == "{")
    assert text == "alpha " and sum("beta" in line for line in lines) == 1
    assert '"finish_reason":"stop"' in lines[-2] and '"stop_reason":"beta gamma"' in lines[-2], "told, not written"
    raw = server.post("/v1/completions", {"prompt": "x", "stop": stop}).json()["choices"][0]
    assert (raw["text"], raw["finish_reason"]) == ("alpha ", "stop")
    line = server.post(
        "/api/generate", {"prompt": "x", "think": False, "stream": False, "options": {"stop": stop}}
    ).json()
    assert (line["response"], line["done_reason"]) == ("alpha ", "stop")


def test_a_call_without_text_has_no_empty_text(serve: Any) -> None:
    server = serve(Reply("", tool_calls=[ToolCall("", "bash", {"command": "ls"})]))
    tools = [{"name": "bash", "input_schema": BASH["parameters"]}]
    blocks = server.post("/v1/messages", {"messages": USER, "max_tokens": 99, "tools": tools}).json()["content"]
    assert [block["type"] for block in blocks] == ["tool_use"]
    message = server.post(CHAT, chat(tools=[{"type": "function", "function": BASH}])).json()["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


def test_usage_only_when_asked_for(serve: Any) -> None:
    server = serve(Script([Tokens("a", "b", "c", drafted=4), "</think>", Tokens("d", "e", drafted=3)]))
    lines = [json.loads(x[6:]) for x in server.lines(CHAT, chat(stream=True)) if x[6:7] == "{"]
    assert all("usage" not in line for line in lines)
    lines = [
        json.loads(x[6:])
        for x in server.lines(CHAT, chat(stream=True, stream_options={"include_usage": True}))
        if x[6:7] == "{"
    ]
    assert lines[-1]["choices"] == [] and all(line["usage"] is None for line in lines[:-1])
    usage = lines[-1]["usage"]
    whole = server.post(CHAT, chat()).json()["usage"]
    assert usage == whole and isinstance(usage["prompt_tokens_details"]["cached_tokens"], int)
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 3 and details["rejected_prediction_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert details["reasoning_tokens"] <= usage["completion_tokens"]


def test_images_are_refused_without_a_vision_tower(serve: Any) -> None:
    server = serve()
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    url = f"data:image/png;base64,{pixel}"
    refused(server, CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}, None)
    refused(server, "/api/chat", {"messages": [{"role": "user", "content": "x", "images": [pixel]}]}, None)
    source = {"type": "base64", "media_type": "image/png", "data": pixel}
    block = {"type": "image", "source": source}
    refused(server, "/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 9}, None)
    refused(
        server,
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        None,
    )
