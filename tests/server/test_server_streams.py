"""Every stream order, byte by byte against recorded files. UPDATE_GOLDEN=1 records them anew: read the difference."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from ninfer_core.testing import End, Fault, Reply, Script
from ninfer_core.types import ToolCall

from .conftest import DATA

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": PARAMETERS}}]
USER = [{"role": "user", "content": "hi"}]
TURN = Reply(
    "Let me look.",
    reasoning="They want a list.",
    tool_calls=[ToolCall("", "bash", {"command": "ls"}), ToolCall("", "bash", {"command": "pwd"})],
)
SCRIPTS: dict[str, Any] = {
    "turn": TURN,
    "text": Reply("Grüße, 😀!"),
    "cut": Script(["An answer that is cu", End("length")], burst=8),
    "fault": Script(["Half an ans", Fault(RuntimeError("secret detail"))], burst=8),
    "stop": Reply("alpha beta gamma delta"),
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "tools": CHAT_TOOLS, "stream_options": {"include_usage": True}, "stop": ["beta gamma"]},
    ),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 500, "stop": "beta gamma"}),
    "responses": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **CHAT_TOOLS[0]["function"]}], "reasoning": {"summary": "auto"}},
    ),
    "messages": (
        "/v1/messages?beta=true",
        {
            "messages": USER,
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": "bash", "description": "Run.", "input_schema": PARAMETERS}],
            "stop_sequences": ["beta gamma"],
        },
    ),
    "ollama": ("/api/chat", {"messages": USER, "tools": CHAT_TOOLS, "options": {"stop": ["beta gamma"]}}),
    "generate": ("/api/generate", {"prompt": "hi", "think": False, "options": {"stop": "beta gamma"}}),
}
_ID = re.compile(r"\b(chatcmpl-|cmpl-|resp_|msg_|rs_|fc_|call_|toolu_|req_)([0-9a-f]{24})\b")
_TIMES = re.compile(
    r'"(seed|created|created_at|completed_at|total_duration|prompt_eval_duration|eval_duration)":("[^"]*"|\d+)'
)


def normal(text: str) -> str:
    """Ids numbered in order of appearance; times, and counts that depend on the template's wording, zero."""
    seen: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return seen.setdefault(match[0], f"{match[1]}{len(seen) + 1}")

    text = _TIMES.sub(r'"\1":0', _ID.sub(number, text))
    text = re.sub(
        r'"(prompt_tokens|input_tokens|total_tokens|prompt_eval_count|cache_write_tokens)":\d+', r'"\1":0', text
    )
    text = re.sub(r'"fp_[0-9a-f]{12}"', '"fp"', text)
    return re.sub(r'"timings":\{[^}]*\}', '"timings":{}', text)


@pytest.mark.parametrize("api", CALLS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_stream_equals_the_recorded_one(serve: Any, api: str, script: str) -> None:
    path, body = CALLS[api]
    if api in ("completions", "generate") and script == "turn":
        body = {**body, "stop": None} if api == "completions" else body
    steps = SCRIPTS[script]
    server = serve(steps if isinstance(steps, Script) else Script(steps, burst=8))
    with server.http.stream("POST", path, json={**body, "stream": True}) as answer:
        kind = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream; charset=utf-8"
        assert answer.headers["content-type"] == kind
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers and "content-length" not in answer.headers
        text = normal(b"".join(answer.iter_raw()).decode())
    assert "secret" not in text
    file = DATA / f"{api}_{script}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    assert server.idle()


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_the_joined_stream_does_not_depend_on_the_burst(serve: Any, burst: int) -> None:
    server = serve(Script(TURN, burst=burst))
    path, body = CALLS["chat"]
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}}
    for line in server.lines(path, {**body, "stream": True}):
        if line == "data: [DONE]":
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            found["reasoning"] += delta.get("reasoning_content", "")
            found["content"] += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                entry = found["calls"].setdefault(call["index"], {"names": [], "ids": [], "arguments": ""})
                entry["arguments"] += call["function"]["arguments"]
                if "name" in call["function"]:
                    entry["names"].append(call["function"]["name"])
                    entry["ids"].append(call["id"])
    assert found["reasoning"] == "They want a list." and found["content"] == "Let me look."
    assert [json.loads(call["arguments"])["command"] for call in found["calls"].values()] == ["ls", "pwd"]
    assert [call["names"] for call in found["calls"].values()] == [["bash"], ["bash"]]
    assert list(found["calls"]) == [0, 1]
    assert len({call["ids"][0] for call in found["calls"].values()}) == 2
