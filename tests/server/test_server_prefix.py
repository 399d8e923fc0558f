"""Agent sessions over each API: every turn's prompt must extend the one before and what the model then wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ninfer_core.testing import Reply, Script, ScriptedEngine
from ninfer_core.types import Request, ToolCall

from .conftest import Running

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
COMMANDS = ["ls -la", "cat 'a b.txt'\n  indented\n", 'echo "ünïcode 😀"', "true"]
RESULTS = ["a b.txt", "", "ünïcode 😀\n", "  spaces  "]
Session = Callable[[Running], None]


def chat(server: Running) -> None:
    messages: list[Any] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Do it."}]
    tools = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": PARAMETERS}}]
    for result in RESULTS:
        message = server.post("/v1/chat/completions", {"messages": messages, "tools": tools}).json()["choices"][0][
            "message"
        ]
        messages.append({key: message[key] for key in ("role", "content", "reasoning_content", "tool_calls")})
        messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result})
    server.post("/v1/chat/completions", {"messages": messages, "tools": tools})


def responses(server: Running) -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You help."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]},
    ]
    tools = [{"type": "function", "name": "bash", "description": "Run.", "parameters": PARAMETERS, "strict": False}]
    include = ["reasoning.encrypted_content"]
    for result in RESULTS:
        body = {"input": items, "tools": tools, "include": include, "reasoning": {"summary": "auto"}}
        output = server.post("/v1/responses", body).json()["output"]
        items += output
        items.append({"type": "function_call_output", "call_id": output[-1]["call_id"], "output": result})
    server.post("/v1/responses", {"input": items, "tools": tools})


def messages(server: Running) -> None:
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Do it.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "A reminder that comes late."},
    ]
    fixed = {"max_tokens": 32000, "thinking": {"type": "adaptive"}}
    fixed["tools"] = [{"name": "bash", "description": "Run.", "input_schema": PARAMETERS}]
    for number, result in enumerate(RESULTS):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        body = {"system": [billing, {"type": "text", "text": "You help."}], "messages": turns, **fixed}
        content = server.post("/v1/messages", body).json()["content"]
        turns.append({"role": "assistant", "content": content})
        block = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": [{"type": "text", "text": result}]}
        turns[0]["content"][0].pop("cache_control", None)
        turns.append({"role": "user", "content": [{**block, "cache_control": {"type": "ephemeral"}}]})
    server.post("/v1/messages", {"system": "You help.", "messages": turns, **fixed})


def lines(server: Running) -> None:
    turns: list[Any] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Do it."}]
    tools = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": PARAMETERS}}]
    for result in RESULTS:
        message = server.post("/api/chat", {"messages": turns, "tools": tools, "stream": False}).json()["message"]
        turns += [message, {"role": "tool", "tool_name": "bash", "content": result}]
    server.post("/api/chat", {"messages": turns, "tools": tools, "stream": False})


def answer(request: Request) -> Reply:
    number = sum(message.role == "tool" for message in request.messages)
    if number == len(COMMANDS):
        return Reply("Done.", reasoning="All ran.")
    call = ToolCall("", "bash", {"command": COMMANDS[number]})
    return Reply(f"Step {number}." if number % 2 else "", reasoning=f"Thought {number}.", tool_calls=[call])


@pytest.mark.parametrize("session", [chat, responses, messages, lines])
def test_prompts_only_grow(serve: Any, session: Session) -> None:
    server = serve(ScriptedEngine(Script(answer, burst=16)))
    session(server)
    engine = server.engine
    requests = engine.requests
    assert len(requests) == len(RESULTS) + 1
    prompts = [engine.frontend.render(request) for request in requests]
    for request, prompt, following in zip(requests, prompts, prompts[1:], strict=False):
        written = answer(request).raw(True).rstrip("\n")
        assert following.startswith(prompt + written), json.dumps([prompt + written, following], indent=1)
        kept, whole = engine.frontend.prepare(request).token_ids, engine.frontend.tokenizer.encode(following)
        assert tuple(whole[: len(kept)]) == tuple(kept)


def test_the_four_apis_render_the_same_session_alike(serve: Any) -> None:
    prompts = set()
    for session in (chat, responses, lines):
        server = serve(ScriptedEngine(Script(answer, burst=16)))
        session(server)
        prompts.add(server.engine.frontend.render(server.last))
    assert len(prompts) == 1
