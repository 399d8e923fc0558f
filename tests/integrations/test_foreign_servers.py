"""Reported faults of other adapters, on the very deltas that were reported: what a server of another kind sends is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from langchain_core import exceptions as lc
from langchain_ninfer import ChatNInfer
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ninfer import NInfer

from ninfer_core.client import Client
from ninfer_core.errors import EngineError, NinferError

USAGE = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}


class Server(httpx.AsyncBaseTransport):
    """A server that streams these deltas and keeps what it was asked; without thinking it leaves the reasoning out."""

    def __init__(self, *deltas: dict[str, Any]) -> None:
        self.deltas = deltas
        self.asked: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.asked.append(body)
        thinking = body.get("enable_thinking") is not False

        async def lines() -> AsyncIterator[bytes]:
            for delta in self.deltas:
                if thinking or not delta.get("reasoning_content"):
                    yield self._line({"choices": [{"index": 0, "delta": delta}]})
            yield self._line({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield self._line({"choices": [], "usage": USAGE})
            yield b"data: [DONE]\n\n"

        return httpx.Response(200, content=lines())

    @staticmethod
    def _line(data: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(data).encode() + b"\n\n"


def over(server: Server, kind: Any, **fields: Any) -> Any:
    client = httpx.AsyncClient(transport=server)
    return kind(model="other", base_url="http://server", http_client=client, **fields)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("bound", [False, True], ids=["plain", "with-tools"])
async def test_langchain_reasoning_and_token_streaming_with_tools(bound: bool) -> None:
    """ChatOllama and ChatOpenAI: the field is dropped (langchain-ai/langchain#35059, #34706, #37960), bound tools make one chunk
    of a stream (#26971, #29129), reasoning that is switched off comes all the same (#33993)."""
    deltas = [{"reasoning_content": "15"}, {"reasoning_content": "*23"}, {"content": "3"}, {"content": "45"}]
    server = Server(*deltas)
    chat = over(server, ChatNInfer)
    model = chat.bind_tools([add]) if bound else chat
    whole = await model.ainvoke("What is 15 * 23?")
    assert whole.content == "345" and whole.additional_kwargs["reasoning_content"] == "15*23"
    assert [(block["type"], block[block["type"]]) for block in whole.content_blocks] == [
        ("reasoning", "15*23"),
        ("text", "345"),
    ]
    for chunks in (list(model.stream("What is 15 * 23?")), [c async for c in model.astream("What is 15 * 23?")]):
        said = [(c.additional_kwargs.get("reasoning_content", ""), c.content) for c in chunks]
        assert [pair for pair in said if any(pair)] == [("15", ""), ("*23", ""), ("", "3"), ("", "45")]
        total, *rest = chunks
        for chunk in rest:
            total = total + chunk
        assert (total.content, total.additional_kwargs) == (whole.content, whole.additional_kwargs)
        assert [c.usage_metadata for c in chunks if c.usage_metadata] == [whole.usage_metadata]
        assert whole.usage_metadata["total_tokens"] == USAGE["total_tokens"]
    off = await model.ainvoke("What is 15 * 23?", reasoning=False)
    assert server.asked[-1]["enable_thinking"] is False and server.asked[0].get("enable_thinking") is None
    assert off.content == "345" and "reasoning_content" not in off.additional_kwargs


async def test_llama_index_chunks_that_hold_thinking_alone() -> None:
    """The Ollama LLM skips chunks without content, thinking and all (run-llama/llama_index#21232, #20063)."""
    server = Server(
        {"content": None, "reasoning_content": "hm"}, {"content": "", "reasoning_content": " ok"}, {"content": "4"}
    )
    llm = over(server, NInfer)
    talk = [ChatMessage(role="user", content="2 + 2?")]
    whole = await llm.achat(talk)
    assert llm.chat(talk).message == whole.message
    tools = [FunctionTool.from_defaults(add)]
    for responses in (
        list(llm.stream_chat(talk)),
        [item async for item in await llm.astream_chat(talk)],
        list(llm.stream_chat_with_tools(tools, chat_history=talk)),
    ):
        said = [(item.additional_kwargs.get("thinking_delta", ""), item.delta) for item in responses]
        assert [pair for pair in said if any(pair)] == [("hm", ""), (" ok", ""), ("", "4")]
        assert responses[-1].message == whole.message
    thought, answer = whole.message.blocks
    assert isinstance(thought, ThinkingBlock) and (thought.content, answer.text) == ("hm ok", "4")


@pytest.mark.parametrize("version", ["v0", "v1"])
async def test_text_behind_calls_and_the_calls_survive_merging(version: str) -> None:
    """Core numbers blocks from 0 and merges equal numbers: calls that count from 0 vanish from the blocks, or text does."""

    def call(index: int, **part: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **part}]}

    server = Server(
        {"reasoning_content": "hm"},
        {"content": "A"},
        {"content": "B"},
        call(0, id="c1", function={"name": "add", "arguments": ""}),
        call(0, function={"arguments": '{"a": 1, "b": 2}'}),
        call(1, id="c2", function={"name": "add", "arguments": '{"a": 3, "b": 4}'}),
        {"content": "C"},
    )
    model = over(server, ChatNInfer, output_version=version).bind_tools([add])
    total, *others = [chunk async for chunk in model.astream("hi")]
    for chunk in others:
        total += chunk
    blocks = [
        (block["type"], block.get("text") or block.get("id") or block.get("reasoning"))
        for block in total.content_blocks
    ]
    calls = [("tool_call", "c1"), ("tool_call", "c2")]
    text = [("text", "AB"), *calls, ("text", "C")] if version == "v1" else [("text", "ABC"), *calls]
    assert blocks == [("reasoning", "hm"), *text]
    assert [entry["args"] for entry in total.tool_calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


def call(identity: str, name: str, **more: Any) -> dict[str, Any]:
    return {"id": identity, "function": {"name": name, "arguments": "{}"}, **more}


@pytest.mark.parametrize("place", [{}, {"index": 0}, {"index": None}], ids=["unnumbered", "all-0", "null"])
@pytest.mark.parametrize("together", [True, False])
def test_calls_that_are_not_numbered_stay_apart(place: dict[str, Any], together: bool) -> None:
    """Gemini's and Ollama's OpenAI interfaces: parallel calls without an index, or all of index 0, become one."""
    calls = [call("a", "f", **place), call("b", "g", **place)]
    deltas = [{"tool_calls": calls}] if together else [{"tool_calls": [item]} for item in calls]
    chat = over(Server(*deltas), ChatNInfer)
    whole = chat.invoke("hi")
    total, *rest = chat.stream("hi")
    for chunk in rest:
        total = total + chunk
    for message in (whole, total):
        assert [(item["id"], item["name"]) for item in message.tool_calls] == [("a", "f"), ("b", "g")]
        assert not message.invalid_tool_calls


def test_a_call_in_pieces_stays_one() -> None:
    pieces = [call("a", "f", index=0), {"index": 0, "id": "a", "function": {}}, {"index": 0, "function": {}}]
    pieces[0]["function"]["arguments"] = ""
    for piece, text in zip(pieces[1:], ('{"x":', " 1}"), strict=True):
        piece["function"]["arguments"] = text
    answer = over(Server(*({"tool_calls": [piece]} for piece in pieces)), ChatNInfer).invoke("hi")
    assert [item["args"] for item in answer.tool_calls] == [{"x": 1}]


def test_arguments_that_are_an_object_already() -> None:
    part = {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}
    assert over(Server({"tool_calls": [part]}), ChatNInfer).invoke("hi").tool_calls[0]["args"] == {"x": 1}


class Fixed(httpx.AsyncBaseTransport):
    """A server with one answer to everything."""

    def __init__(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.made = (status, body, headers)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        status, body, headers = self.made
        return httpx.Response(status, content=body, headers=headers)

    def over(self, kind: Any) -> Any:
        client = httpx.AsyncClient(transport=self)
        return kind(model="other", base_url="http://server", http_client=client, max_retries=0)


@pytest.mark.parametrize(
    "line",
    [
        b'{"error": "out of memory"}',
        b'{"error": ["out of memory"]}',
        b'{"error": {"message": "out of memory", "code": [1]}}',
        b'{"error": {"message": "out of memory", "code": "context_length_exceeded", "n_ctx": 8}}',
        b'{"choices": 3}',
        b'{"choices": ["x"]}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"choices": [{"delta": {"content": 3}}]}',
        b'{"choices": [{"delta": {"content": [{"type": "text", "text": "x"}]}}]}',
        b'{"choices": [{"delta": {"reasoning": {"x": 1}}}]}',
        b'{"choices": [{"delta": {"tool_calls": ["x"]}}]}',
        b'{"choices": [{"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x"}]}}]}',
        b'{"choices": [{"delta": {}, "finish_reason": ["stop"]}]}',
        b'{"choices": [], "usage": {"prompt_tokens": Infinity}}',
        b'{"choices": [], "usage": "x"}',
        b"[" * 100_000,
    ],
)
def test_a_line_of_another_form_is_an_engine_error(line: bytes) -> None:
    fixed = Fixed(b"data: " + line + b"\n\ndata: [DONE]\n\n")
    chat, llm = fixed.over(ChatNInfer), fixed.over(NInfer)
    for run in (lambda: chat.invoke("hi"), lambda: list(chat.stream("hi"))):
        with pytest.raises(lc.ModelError) as told:
            run()
        assert b"error" not in line or "out of memory" in str(told.value)
    with pytest.raises(EngineError):
        list(llm.stream_chat([ChatMessage(role="user", content="hi")]))


def test_null_error_and_timings_are_none() -> None:
    line = b'data: {"error": null, "timings": {"prompt_ms": null}, "choices": [{"delta": {"content": "x"}}]}\n\n'
    assert Fixed(line + b"data: [DONE]\n\n").over(ChatNInfer).invoke("hi").content == "x"


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[1]", b'{"status": [1], "tokens": 3, "count": "x", "prompt": null}', b'{"data": [{}]}']
    + [b'{"data": [{"id": "x", "architecture": %b}]}' % part for part in (b'"x"', b'{"input_modalities": 3}')],
)
def test_a_server_that_answers_something_else_to_questions(body: bytes) -> None:
    client = Client("http://server", http_client=httpx.AsyncClient(transport=Fixed(body)))
    assert client.state == "failed" and isinstance(client.health(), dict)
    for ask in (
        lambda: client.tokenizer.encode("x"),
        lambda: client.tokenizer.decode([1]),
        lambda: client.count_tokens("x"),
        lambda: client.render("x"),
    ):
        with pytest.raises(EngineError, match="address of a ninfer server"):
            ask()
    for known in ("served_names", "profile", "context_length"):
        if b'"id"' not in body or known == "context_length":
            with pytest.raises(EngineError):
                getattr(client, known)
        else:
            assert getattr(client, known)


def test_answers_that_are_no_200() -> None:
    with pytest.raises(NinferError, match="points to '/login'"):
        Fixed(b"", 302, location="/login").over(ChatNInfer).invoke("hi")
    for body in (b'{"error": {"code": [1]}}', b"[" * 100_000, b'{"error": {"code": "context_length_exceeded"}}'):
        with pytest.raises(lc.ModelInvalidRequestError):
            Fixed(body, 400).over(ChatNInfer).invoke("hi")
    for seconds in ("nan", "inf", "-1", "soon"):
        with pytest.raises(lc.ModelRateLimitError) as told:
            Fixed(b"{}", 429, **{"retry-after": seconds}).over(ChatNInfer).invoke("hi")
        assert told.value.retry_after in (0.0, 1.0)
