"""`POST /v1/chat/completions`: request to the neutral form, events to chunks, completions to one object."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.errors import InvalidRequestError, UnsupportedError
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
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
    Usage,
)

from .answer import Prepared, Waiting, answer, documented
from .body import read_request
from .common import (
    call_id,
    constraint_name,
    format_of,
    guided_of,
    left_out,
    limit_of,
    new_id,
    restrict,
    sampling_of,
    stop_of,
    thinking_of,
)
from .context import Server, Target
from .errors import body_of, fault_of
from .generation import in_order, merged_usage
from .openai_messages import TOOL_KINDS, to_choice, to_messages, to_tools
from .schemas import ChatRequest
from .wire import SSE, SSE_COMMENT, SSE_DONE, dumps, sse


def to_request(body: ChatRequest, server: Server, index: int = 0) -> tuple[Request, frozenset[str]]:
    """The neutral request of choice `index`, and the names of free-form tools."""
    if body.modalities and set(body.modalities) - {"text"}:
        raise UnsupportedError("modalities may only be text; these models write text", param="modalities")
    tools, custom = to_tools(body.tools, body.functions)
    tools, choice = restrict(tools, _choice(body))
    if not tools and choice.mode == "none":
        choice = ToolChoice()
    messages = to_messages(body.messages, server.media)
    last = body.messages[-1]
    resumes = last.role == "assistant" and not last.tool_calls and not last.function_call
    if body.continue_final_message and not resumes:
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant without tool calls",
            param="continue_final_message",
        )
    explicit_new = body.continue_final_message is False or bool(body.add_generation_prompt)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    request = Request(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=guided_of(body, format_of(body.response_format)),
        sampling=sampling_of(body, index),
        max_tokens=limit_of(limit, name),
        stop=stop_of(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        continue_final_message=resumes and not explicit_new,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **thinking_of(body),
    )
    return request, custom


def _choice(body: ChatRequest) -> ToolChoice:
    if body.tool_choice is None and body.function_call is not None:
        call = body.function_call
        return to_choice(call if isinstance(call, str) else {"function": call}, "function_call")
    return to_choice(body.tool_choice)


def finish_reason(reason: str) -> str:
    """The reason in this API's words."""
    return reason if reason in ("stop", "length", "tool_calls") else "stop"


def end_fields(end: Finish | Completion) -> dict[str, Any]:
    """What a choice says beyond this API's own fields: the seed it was drawn with, the stop string that ended it."""
    return {"seed": end.seed} | ({"stop_reason": end.stop_sequence} if end.stop_sequence is not None else {})


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage` of chat and completions."""
    more = {"image_tokens": usage.media_tokens, "known_tokens": usage.known_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens} | {k: n for k, n in more.items() if n},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": max(0, usage.drafted_tokens - usage.accepted_tokens),
        },
    }


def timings_of(usage: Usage, timings: Timings) -> dict[str, Any]:
    """llama.cpp's `timings`: milliseconds, and tokens per second."""
    read = usage.prompt_tokens - usage.cached_tokens
    prompt_ms, made_ms = timings.prefill * 1e3, timings.decode * 1e3
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": read,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": round(read / timings.prefill, 3) if timings.prefill > 0 else 0.0,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(made_ms, 3),
        "predicted_per_second": round(usage.completion_tokens / timings.decode, 3) if timings.decode > 0 else 0.0,
        "draft_n": usage.drafted_tokens,
        "draft_n_accepted": usage.accepted_tokens,
    }


def logprob_entries(logprobs: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """Token log-probabilities with their alternatives."""
    return [{**_logprob(item), "top_logprobs": [_logprob(other) for other in item.top]} for item in logprobs]


def _logprob(item: TokenLogprob) -> dict[str, Any]:
    plain = {"token": item.token, "logprob": max(item.logprob, -9999.0), "bytes": list(item.bytes)}
    return {**plain, "id": item.token_id}


def tool_call_object(call: ToolCall, custom: frozenset[str]) -> dict[str, Any]:
    """A complete call; arguments are a JSON text here."""
    identity = call_id(call.id, "call_")
    if call.name in custom:
        return {"id": identity, "type": "custom", "custom": {"name": call.name, "input": custom_input(call.arguments)}}
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": argument_text(call)}}


def argument_text(call: ToolCall) -> str:
    """The arguments as JSON text."""
    arguments = call.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def custom_input(arguments: Mapping[str, Any] | str) -> str:
    """The input of a free-form call."""
    if isinstance(arguments, str):
        return arguments
    value = arguments.get("input", "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def reasoning_fields(text: str, name: str) -> dict[str, str]:
    """Reasoning under the field name the operator chose."""
    names = ("reasoning_content", "reasoning") if name == "both" else (name,)
    return dict.fromkeys(names, text)


class ChatEncoder:
    """Events to `chat.completion.chunk` events: one id and one creation time for all of them."""

    media_type = SSE
    heartbeat = SSE_COMMENT

    def __init__(self, body: ChatRequest, server: Server, custom: frozenset[str], request_id: str) -> None:
        self.choices = body.n or 1
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.logprobs = bool(body.logprobs)
        self.custom = custom
        self.reasoning_field = server.settings.reasoning_field
        self.request_id = request_id
        self._custom_open: set[tuple[int, int]] = set()
        head = {"id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": int(time.time())}
        head |= {"model": body.model, "system_fingerprint": server.card.fingerprint}
        self._head = b"data: " + dumps(head)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null}' if self.include_usage else b"]}") + b"\n\n"

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, end: Finish | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if end is not None:
            choice |= {"finish_reason": finish_reason(end.reason), **end_fields(end)}
        return self._head + dumps(choice) + self._tail

    def start(self) -> bytes:
        """The role chunk of every choice."""
        return b"".join(self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self.choices))

    def event(self, index: int, event: Event) -> bytes:
        """One chunk, or none for an event without news in this API."""
        if isinstance(event, TextDelta):
            shown = self.logprobs and event.logprobs
            logprobs = {"content": logprob_entries(event.logprobs), "refusal": None} if shown else None
            return self._chunk(index, {"content": event.text}, logprobs) if event.text or shown else b""
        if isinstance(event, ReasoningDelta):
            return self._chunk(index, reasoning_fields(event.text, self.reasoning_field)) if event.text else b""
        if isinstance(event, ToolCallStart):
            if event.name in self.custom:
                self._custom_open.add((index, event.index))
                return b""
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": call_id(event.id, "call_"), "type": "function", "function": function}
            return self._chunk(index, {"tool_calls": [call]})
        if isinstance(event, ToolCallDelta):
            if (index, event.index) in self._custom_open or not event.arguments:
                return b""
            call = {"index": event.index, "function": {"arguments": event.arguments}}
            return self._chunk(index, {"tool_calls": [call]})
        if isinstance(event, ToolCallEnd):
            if (index, event.index) not in self._custom_open:
                return b""
            call = {"index": event.index, **tool_call_object(event.call, self.custom)}
            return self._chunk(index, {"tool_calls": [call]})
        return self._chunk(index, {}, None, event)

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """The usage chunk if asked for, then the end mark."""
        if not self.include_usage:
            return SSE_DONE
        usage = merged_usage(in_order(finishes))
        chunk = {"usage": usage_of(usage), "timings": timings_of(usage, finishes[0].timings)}
        return self._head + b"]," + dumps(chunk)[1:] + b"\n\n" + SSE_DONE

    def error(self, error: BaseException) -> bytes:
        """The error event; no end mark follows, so no client can take the stream for complete."""
        return sse(body_of(fault_of(error), "openai", self.request_id))


def complete(
    body: ChatRequest, server: Server, custom: frozenset[str], completions: list[Completion]
) -> dict[str, Any]:
    """The `chat.completion` object."""
    choices = []
    for index, item in enumerate(completions):
        message: dict[str, Any] = {"role": "assistant", "content": item.text, "refusal": None}
        if item.message.reasoning:
            message |= reasoning_fields(item.message.reasoning, server.settings.reasoning_field)
        if item.message.tool_calls:
            message["content"] = item.text or None
            message["tool_calls"] = [tool_call_object(call, custom) for call in item.message.tool_calls]
        logprobs = {"content": logprob_entries(item.logprobs), "refusal": None} if body.logprobs else None
        reason = finish_reason(item.finish_reason)
        choice = {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}
        choices.append(choice | end_fields(item))
    usage = merged_usage(completions)
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": server.card.fingerprint,
        "choices": choices,
        "usage": usage_of(usage),
        "timings": timings_of(usage, completions[0].timings),
    }


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", **documented(ChatRequest))
    async def chat_completions(http: HttpRequest) -> Response:
        """Create a chat completion, streamed or whole."""
        body = await read_request(http, ChatRequest, server.settings.max_body_bytes)
        record = http.scope["state"]["record"]
        record.dropped = left_out(body.tools, TOOL_KINDS)

        async def prepare(target: Target) -> Prepared:
            body.model = target.name
            converted = [to_request(body, server, index) for index in range(body.n or 1)]
            _, custom = converted[0]
            return Prepared(
                [request for request, _ in converted],
                ChatEncoder(body, server, custom, record.request_id) if body.stream else None,
                lambda completions: complete(body, server, custom, completions),
                names={"response_format": constraint_name(body)},
            )

        return await answer(server, http, body.model, prepare, Waiting() if body.stream else None)

    return routes
