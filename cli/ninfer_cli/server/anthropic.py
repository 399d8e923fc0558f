"""`POST /v1/messages` and `/v1/messages/count_tokens`: blocks, events with their names, Anthropic's usage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.types import (
    Completion,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

from .answer import Prepared, Waiting, answer, documented
from .anthropic_input import TOOL_KINDS, to_request
from .body import read_request
from .common import call_id, left_out, new_id
from .context import Server, Target
from .errors import body_of, fault_of
from .schemas import CountTokensRequest, MessagesRequest
from .wire import SSE, JsonResponse, sse

PING = sse({"type": "ping"}, "ping")
_WINDOW_BETA = "model-context-window-exceeded"


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage`: what was read anew, what came from the cache, what was made."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def stop_reason(end: Finish | Completion, window: int, beta: str) -> str:
    """Why the answer ended; the reason for a full window is told to clients that declared to know it."""
    reason = end.finish_reason if isinstance(end, Completion) else end.reason
    if end.stop_sequence is not None:
        return "stop_sequence"
    if reason == "tool_calls":
        return "tool_use"
    if reason == "length":
        full = end.usage.total_tokens >= window and _WINDOW_BETA in beta
        return "model_context_window_exceeded" if full else "max_tokens"
    return "end_turn"


def input_object(call: ToolCall) -> dict[str, Any]:
    """The input of a call, always an object."""
    if not isinstance(call.arguments, str):
        return dict(call.arguments)
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"input": call.arguments}


def complete(model: str, completion: Completion, window: int, beta: str) -> dict[str, Any]:
    """The `message` object."""
    message = completion.message
    content: list[dict[str, Any]] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if completion.text:
        content.append({"type": "text", "text": completion.text})
    for call in message.tool_calls:
        identity = call_id(call.id, "toolu_")
        content.append({"type": "tool_use", "id": identity, "name": call.name, "input": input_object(call)})
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason(completion, window, beta),
        "stop_sequence": completion.stop_sequence,
        "usage": usage_of(completion.usage),
    }


class MessagesEncoder:
    """Events to named stream events; every block is opened, filled and closed before the next."""

    media_type = SSE
    heartbeat = PING

    def __init__(self, model: str, window: int, beta: str, request_id: str) -> None:
        self.model, self.window, self.beta, self.request_id = model, window, beta, request_id
        self.prompt_tokens = 0
        self._index = -1
        self._open: str | None = None

    def start(self) -> bytes:
        """`message_start` with the counted prompt, and a first ping."""
        message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(prompt_tokens=self.prompt_tokens)),
        }
        return sse({"type": "message_start", "message": message}, "message_start") + PING

    def _start_block(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._stop_block()
        self._index += 1
        self._open = kind
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + sse(data, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse(data, "content_block_delta")

    def _stop_block(self) -> bytes:
        if self._open is None:
            return b""
        signature = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = None
        return signature + sse({"type": "content_block_stop", "index": self._index}, "content_block_stop")

    def event(self, index: int, event: Event) -> bytes:
        """The events of one engine event."""
        if isinstance(event, ReasoningDelta):
            if not event.text:
                return b""
            block = {"type": "thinking", "thinking": "", "signature": ""}
            opened = b"" if self._open == "thinking" else self._start_block("thinking", block)
            return opened + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, TextDelta):
            if not event.text:
                return b""
            opened = b"" if self._open == "text" else self._start_block("text", {"type": "text", "text": ""})
            return opened + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, ToolCallStart):
            call = {"type": "tool_use", "id": call_id(event.id, "toolu_"), "name": event.name, "input": {}}
            return self._start_block("tool_use", call)
        if isinstance(event, ToolCallDelta):
            return (
                self._delta({"type": "input_json_delta", "partial_json": event.arguments}) if event.arguments else b""
            )
        if isinstance(event, ToolCallEnd):
            return self._stop_block()
        return b""

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """`message_delta` with the final usage, then `message_stop`."""
        end = finishes[0]
        reason = stop_reason(end, self.window, self.beta)
        data = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": end.stop_sequence},
            "usage": usage_of(end.usage),
        }
        return self._stop_block() + sse(data, "message_delta") + sse({"type": "message_stop"}, "message_stop")

    def error(self, error: BaseException) -> bytes:
        """The error event."""
        return _error_event(error, self.request_id)


def _error_event(error: BaseException, request_id: str) -> bytes:
    return sse(body_of(fault_of(error), "anthropic", request_id), "error")


_WAITING = Waiting(heartbeat=lambda _: PING, error=_error_event)


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Anthropic"])
    limit = server.settings.max_body_bytes

    @routes.post("/v1/messages", **documented(MessagesRequest))
    async def messages(http: HttpRequest) -> Response:
        """Create a message, streamed or whole."""
        body = await read_request(http, MessagesRequest, limit)
        record = http.scope["state"]["record"]
        record.dropped = left_out(body.tools, TOOL_KINDS)
        beta = http.headers.get("anthropic-beta", "")

        async def prepare(target: Target) -> Prepared:
            model = target.name
            request = to_request(body, server)
            window = server.card.context_length
            return Prepared(
                [request],
                MessagesEncoder(model, window, beta, record.request_id) if body.stream else None,
                lambda done: complete(model, done[0], window, beta),
                names={"response_format": "output_config.format", "stop": "stop_sequences"},
            )

        return await answer(server, http, body.model, prepare, _WAITING if body.stream else None)

    @routes.post("/v1/messages/count_tokens", **documented(CountTokensRequest))
    async def count_tokens(http: HttpRequest) -> JsonResponse:
        """The prompt length of a request, exactly as its later usage."""
        body = await read_request(http, CountTokensRequest, limit)
        target = await server.use(http, body.model)
        request = target.filled(to_request(body, server))
        return JsonResponse({"input_tokens": await asyncio.to_thread(server.count_tokens, request)})

    return routes
