"""Ollama's `/api/chat` and `/api/generate`: JSON lines, whole tool calls, durations in nanoseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.types import (
    Completion,
    Event,
    Finish,
    ReasoningDelta,
    Request,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallEnd,
    Usage,
)

from .answer import Prepared, Waiting, answer, documented
from .anthropic import input_object
from .body import read_request
from .card import rfc3339
from .common import call_id, left_out
from .context import RequestRecord, Server, Target
from .durations import parse_duration
from .errors import body_of, fault_of
from .ollama_input import bounded, chat_request, generate_request
from .ollama_models import model_routes
from .openai_messages import TOOL_KINDS
from .schemas import OllamaBase, OllamaChatRequest, OllamaGenerateRequest
from .wire import NDJSON, JsonResponse, ndjson

_NAMES = {"response_format": "format", "stop": "options.stop", "max_tokens": "options.num_predict"}


def done_fields(reason: str, usage: Usage, timings: Timings, record: RequestRecord) -> dict[str, Any]:
    """The fields of a last line. Durations are never zero: clients divide by them."""
    return {
        "done": True,
        "done_reason": "length" if reason == "length" else "stop",
        "total_duration": _nanoseconds(record.elapsed()),
        "load_duration": _nanoseconds(record.load_seconds),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(timings.prefill),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(timings.decode),
    }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def call_object(call: ToolCall, index: int) -> dict[str, Any]:
    """A whole call; arguments are an object here."""
    function = {"index": index, "name": call.name, "arguments": input_object(call)}
    return {"id": call_id(call.id, "call_"), "function": function}


def logprob_entries(logprobs: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """Token log-probabilities."""

    def plain(item: TokenLogprob) -> dict[str, Any]:
        found = {"token": item.token, "logprob": max(item.logprob, -9999.0), "bytes": list(item.bytes)}
        return {**found, "id": item.token_id}

    return [{**plain(item), "top_logprobs": [plain(other) for other in item.top]} for item in logprobs]


class OllamaShape:
    """How a piece of output looks: in `message` for a chat, at the top level for a generation."""

    def __init__(self, record: RequestRecord, chat: bool, logprobs: bool) -> None:
        self.record, self.chat, self.logprobs = record, chat, logprobs

    def line(
        self,
        text: str = "",
        thinking: str = "",
        calls: list[dict[str, Any]] | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> dict[str, Any]:
        """One object, not the last one yet."""
        body: dict[str, Any] = {"role": "assistant", "content": text} if self.chat else {"response": text}
        if thinking:
            body["thinking"] = thinking
        if calls:
            body["tool_calls"] = calls
        line: dict[str, Any] = {"model": self.record.model, "created_at": rfc3339(time.time())}
        line |= {"message": body} if self.chat else body
        if self.logprobs and logprobs:
            line["logprobs"] = logprob_entries(logprobs)
        line["done"] = False
        return line


class OllamaEncoder:
    """Events to JSON lines; every line has its message, also the heartbeat."""

    media_type = NDJSON

    def __init__(self, shape: OllamaShape, request_id: str, truncated: int = 0) -> None:
        self.shape, self.request_id, self.truncated = shape, request_id, truncated

    @property
    def heartbeat(self) -> bytes:
        """A line without content: a blank line would break this API's own client."""
        return ndjson(self.shape.line())

    def start(self) -> bytes:
        """An empty line before the prompt is read."""
        return self.heartbeat

    def event(self, index: int, event: Event) -> bytes:
        """The line of one event."""
        if isinstance(event, TextDelta):
            shown = event.logprobs if self.shape.logprobs else ()
            return ndjson(self.shape.line(text=event.text, logprobs=shown)) if event.text or shown else b""
        if isinstance(event, ReasoningDelta):
            return ndjson(self.shape.line(thinking=event.text)) if event.text else b""
        if isinstance(event, ToolCallEnd):
            return ndjson(self.shape.line(calls=[call_object(event.call, event.index)]))
        return b""

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """The last line."""
        end = finishes[0]
        line = self.shape.line() | done_fields(end.reason, end.usage, end.timings, self.shape.record)
        if self.truncated:
            line["truncated_messages"] = self.truncated
        return ndjson(line)

    def error(self, error: BaseException) -> bytes:
        """The error line."""
        return _error_line(error, self.request_id)


def complete(shape: OllamaShape, completion: Completion, truncated: int) -> dict[str, Any]:
    """The answer to `stream: false`."""
    message = completion.message
    calls = [call_object(call, index) for index, call in enumerate(message.tool_calls)]
    line = shape.line(completion.text, message.reasoning or "", calls, completion.logprobs)
    line |= done_fields(completion.finish_reason, completion.usage, completion.timings, shape.record)
    if truncated:
        line["truncated_messages"] = truncated
    return line


async def _empty(server: Server, http: HttpRequest, body: OllamaBase, chat: bool) -> Response:
    """No prompt: Ollama's way to load a model, or with `keep_alive` 0 to unload it once its requests have ended."""
    record = http.scope["state"]["record"]
    if body.keep_alive is not None and parse_duration(body.keep_alive) == 0:
        record.model, _ = await server.describe(body.model or "")
        if server.known_name(body.model) is not None:
            await server.host.unload()
        reason = "unload"
    else:
        await server.use(http, body.model, body.keep_alive)
        reason = "load"
    shape = OllamaShape(record, chat, False)
    line = shape.line() | {"done": True, "done_reason": reason}
    if body.stream is False:
        return JsonResponse(line)
    return Response(ndjson(line), media_type=NDJSON)


async def _answer(
    server: Server, http: HttpRequest, body: OllamaBase, chat: bool, make: Callable[[], Request]
) -> Response:
    stream = body.stream is not False
    record = http.scope["state"]["record"]
    shape = OllamaShape(record, chat, bool(body.logprobs))

    async def prepare(target: Target) -> Prepared:
        request = target.filled(make())

        def fit() -> tuple[Request, int]:
            return bounded(request, body, server)

        fitting, truncated = await asyncio.get_running_loop().run_in_executor(server.workers, fit)
        return Prepared(
            [fitting],
            OllamaEncoder(shape, record.request_id, truncated) if stream else None,
            lambda done: complete(shape, done[0], truncated),
            names=_NAMES,
        )

    waiting = Waiting(NDJSON, lambda _: ndjson(shape.line()), _error_line) if stream else None
    return await answer(server, http, body.model, prepare, waiting, body.keep_alive)


def _error_line(error: BaseException, request_id: str) -> bytes:
    return ndjson(body_of(fault_of(error), "ollama", request_id))


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["Ollama"])
    limit = server.settings.max_body_bytes
    model_routes(routes, server)

    @routes.post("/api/chat", **documented(OllamaChatRequest))
    async def chat(http: HttpRequest) -> Response:
        """A chat turn, streamed unless `stream` is false."""
        body = await read_request(http, OllamaChatRequest, limit)
        if not body.messages:
            return await _empty(server, http, body, True)
        http.scope["state"]["record"].dropped = left_out(body.tools, TOOL_KINDS)
        return await _answer(server, http, body, True, lambda: chat_request(body, server))

    @routes.post("/api/generate", **documented(OllamaGenerateRequest))
    async def generate(http: HttpRequest) -> Response:
        """A generation from one prompt, streamed unless `stream` is false."""
        body = await read_request(http, OllamaGenerateRequest, limit)
        if not body.prompt and not body.images and not body.suffix:
            return await _empty(server, http, body, False)
        return await _answer(server, http, body, False, lambda: generate_request(body, server))

    return routes
