"""Answers of the responses interface: output items, and the numbered events that build them in a stream."""

from __future__ import annotations

import time
from typing import Any

from ninfer_core.types import (
    Completion,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

from .common import call_id, new_id
from .errors import body_of, fault_of
from .openai_chat import argument_text, custom_input, logprob_entries
from .responses_input import ToolSet, seal
from .schemas import ResponsesRequest
from .wire import SSE, SSE_COMMENT, sse

_ERROR_CODES = ("server_error", "rate_limit_exceeded", "invalid_prompt", "context_length_exceeded")


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage` of this API."""
    written = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


class ResponseShape:
    """Everything about one response object that does not depend on what the model says."""

    def __init__(self, body: ResponsesRequest, model: str, toolset: ToolSet, stored: bool) -> None:
        self.id = new_id("resp_")
        self.toolset = toolset
        self.summaries = bool(body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary))
        self.sealed = "reasoning.encrypted_content" in (body.include or ())
        self.logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
        reasoning = body.reasoning
        self.fixed: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": stored,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
            "background": False,
            "service_tier": "default",
        }

    def object(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The response object in a state."""
        state = {"status": status, "error": None, "incomplete_details": None, "output": output, "usage": None}
        return {**self.fixed, **state, **more}

    def finished(self, output: list[dict[str, Any]], end: Finish | Completion) -> dict[str, Any]:
        """The response object of a complete or cut answer."""
        reason = end.finish_reason if isinstance(end, Completion) else end.reason
        usage = usage_of(end.usage)
        if reason == "length":
            details = {"reason": "max_output_tokens"}
            return self.object("incomplete", output, usage=usage, incomplete_details=details)
        return self.object("completed", output, usage=usage, completed_at=int(time.time()))

    def reasoning_item(self, item_id: str, text: str, status: str) -> dict[str, Any]:
        """A thought."""
        item: dict[str, Any] = {"id": item_id, "type": "reasoning", "status": status}
        item["summary"] = [{"type": "summary_text", "text": text}] if self.summaries and text else []
        item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
        if self.sealed:
            item["encrypted_content"] = seal(text) if status != "in_progress" else None
        return item

    def message_item(self, item_id: str, text: str, logprobs: list[dict[str, Any]], status: str) -> dict[str, Any]:
        """An answer."""
        content = [] if status == "in_progress" else [text_part(text, logprobs)]
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def call_item(self, item_id: str, call: ToolCall, status: str, arguments: str) -> dict[str, Any]:
        """A call, under the client's own tool name; `arguments` is JSON text, or the input of a free-form tool."""
        space, name = self.toolset.namespaces.get(call.name, (None, call.name))
        custom = call.name in self.toolset.custom
        item: dict[str, Any] = {"id": item_id, "type": "custom_tool_call" if custom else "function_call"}
        item |= {"status": status, "call_id": call_id(call.id, "call_"), "name": name}
        item["input" if custom else "arguments"] = arguments
        if space is not None:
            item["namespace"] = space
        return item

    def item_prefix(self, name: str) -> str:
        """The id prefix of a call item."""
        return "ctc_" if name in self.toolset.custom else "fc_"


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def output_items(shape: ResponseShape, completion: Completion) -> list[dict[str, Any]]:
    """The output of a complete answer."""
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    message = completion.message
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(shape.reasoning_item(new_id("rs_"), message.reasoning, "completed"))
    if completion.text or not message.tool_calls:
        logprobs = logprob_entries(completion.logprobs) if shape.logprobs else []
        items.append(shape.message_item(new_id("msg_"), completion.text, logprobs, status))
    for call in message.tool_calls:
        custom = call.name in shape.toolset.custom
        arguments = custom_input(call.arguments) if custom else argument_text(call)
        items.append(shape.call_item(new_id(shape.item_prefix(call.name)), call, "completed", arguments))
    return items


class _Open:
    """The output item being written."""

    def __init__(self, kind: str, item_id: str, index: int) -> None:
        self.kind, self.id, self.index = kind, item_id, index
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.call: ToolCall | None = None


class ResponsesEncoder:
    """Events to numbered response events; exactly one of completed, incomplete and failed comes last."""

    media_type = SSE
    heartbeat = SSE_COMMENT

    def __init__(self, shape: ResponseShape, request_id: str) -> None:
        self.shape = shape
        self.request_id = request_id
        self.output: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None
        self._sequence = 0
        self._open: _Open | None = None

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return sse({"type": kind, "sequence_number": number, **data}, kind)

    def _item_event(self, kind: str, item: _Open, **data: Any) -> bytes:
        return self._event(kind, item_id=item.id, output_index=item.index, **data)

    def start(self) -> bytes:
        """The response before any output."""
        response = self.shape.object("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, index: int, event: Event) -> bytes:
        """The events of one engine event."""
        if isinstance(event, ReasoningDelta):
            return self._reasoning(event.text) if event.text else b""
        if isinstance(event, TextDelta):
            return self._text(event.text, event.logprobs)
        if isinstance(event, ToolCallStart):
            return self._close() + self._begin_call(ToolCall(event.id, event.name, {}))
        if isinstance(event, ToolCallDelta):
            return self._call_delta(event.arguments)
        if isinstance(event, ToolCallEnd):
            return self._end_call(event.call, event.complete)
        return self._finish(event)

    def _begin(self, kind: str, item: dict[str, Any]) -> tuple[_Open, bytes]:
        self._open = _Open(kind, item["id"], len(self.output))
        return self._open, self._event("response.output_item.added", output_index=self._open.index, item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        assert self._open is not None
        index, self._open = self._open.index, None
        self.output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _reasoning(self, text: str) -> bytes:
        opened = b""
        if self._open is None or self._open.kind != "reasoning":
            opened = self._close()
            current, added = self._begin("reasoning", self.shape.reasoning_item(new_id("rs_"), "", "in_progress"))
            opened += added
            if self.shape.summaries:
                part = {"type": "summary_text", "text": ""}
                opened += self._item_event("response.reasoning_summary_part.added", current, summary_index=0, part=part)
        current = self._current()
        current.text.append(text)
        if self.shape.summaries:
            opened += self._item_event("response.reasoning_summary_text.delta", current, summary_index=0, delta=text)
        return opened + self._item_event("response.reasoning_text.delta", current, content_index=0, delta=text)

    def _text(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> bytes:
        entries = logprob_entries(logprobs) if self.shape.logprobs else []
        if not text and not entries:
            return b""
        opened = b""
        if self._open is None or self._open.kind != "message":
            opened = self._close() + self._begin_message()
        current = self._current()
        current.text.append(text)
        current.logprobs += entries
        return opened + self._item_event(
            "response.output_text.delta", current, content_index=0, delta=text, logprobs=entries
        )

    def _begin_message(self) -> bytes:
        current, added = self._begin("message", self.shape.message_item(new_id("msg_"), "", [], "in_progress"))
        return added + self._item_event("response.content_part.added", current, content_index=0, part=text_part("", []))

    def _begin_call(self, call: ToolCall) -> bytes:
        item = self.shape.call_item(new_id(self.shape.item_prefix(call.name)), call, "in_progress", "")
        current, added = self._begin("call", item)
        current.call = call
        return added

    def _call_delta(self, fragment: str) -> bytes:
        current = self._current()
        assert current.call is not None
        if not fragment or current.call.name in self.shape.toolset.custom:
            return b""
        current.text.append(fragment)
        return self._item_event("response.function_call_arguments.delta", current, delta=fragment)

    def _end_call(self, call: ToolCall, complete: bool) -> bytes:
        current = self._current()
        status = "completed" if complete else "incomplete"
        if call.name in self.shape.toolset.custom:
            text = custom_input(call.arguments)
            events = self._item_event("response.custom_tool_call_input.delta", current, delta=text)
            events += self._item_event("response.custom_tool_call_input.done", current, input=text)
        else:
            text = "".join(current.text) or argument_text(call)
            events = self._item_event("response.function_call_arguments.done", current, arguments=text, name=call.name)
        return events + self._done(self.shape.call_item(current.id, call, status, text))

    def _close(self, status: str = "completed") -> bytes:
        """End the thought or message being written, if any."""
        current = self._open
        if current is None or current.kind == "call":
            return b""
        text = "".join(current.text)
        if current.kind == "message":
            events = self._item_event(
                "response.output_text.done", current, content_index=0, text=text, logprobs=current.logprobs
            )
            part = text_part(text, current.logprobs)
            events += self._item_event("response.content_part.done", current, content_index=0, part=part)
            return events + self._done(self.shape.message_item(current.id, text, current.logprobs, status))
        events = b""
        if self.shape.summaries:
            events += self._item_event("response.reasoning_summary_text.done", current, summary_index=0, text=text)
            part = {"type": "summary_text", "text": text}
            events += self._item_event("response.reasoning_summary_part.done", current, summary_index=0, part=part)
        events += self._item_event("response.reasoning_text.done", current, content_index=0, text=text)
        return events + self._done(self.shape.reasoning_item(current.id, text, status))

    def _finish(self, end: Finish) -> bytes:
        """Close what is open; an answer without text and calls still gets its (empty) message."""
        if end.reason in ("cancelled", "error"):
            return b""
        status = "incomplete" if end.reason == "length" else "completed"
        events = self._close(status)
        if not any(item["type"] != "reasoning" for item in self.output):
            events += self._begin_message() + self._close(status)
        return events

    def _current(self) -> _Open:
        assert self._open is not None, "an event for an item that was not opened"
        return self._open

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """The last event of a stream that ran to its end."""
        self.final = self.shape.finished(self.output, finishes[0])
        return self._event(f"response.{self.final['status']}", response=self.final)

    def error(self, error: BaseException) -> bytes:
        """The last event of a stream that failed."""
        self.final = self.shape.object("failed", self.output, error=_error_object(error, self.request_id))
        return self._event("response.failed", response=self.final)


def _error_object(error: BaseException, request_id: str) -> dict[str, str]:
    fault = body_of(fault_of(error), "openai", request_id)["error"]
    return {"code": fault["code"] if fault["code"] in _ERROR_CODES else "server_error", "message": fault["message"]}


def failed_early(error: BaseException, request_id: str) -> bytes:
    """The only event of a stream whose model could not be loaded."""
    response = {
        "id": new_id("resp_"),
        "object": "response",
        "status": "failed",
        "output": [],
        "error": _error_object(error, request_id),
    }
    return sse({"type": "response.failed", "sequence_number": 0, "response": response}, "response.failed")
