"""Engine results to LangChain messages: whole messages, streamed chunks, and the typed block events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ninfer_core.adapter import logprob_entries, timings_of
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

FIRST_CALL_INDEX = 1000
"""Chunk index of the first tool call. Core numbers text and reasoning blocks from 0 and merges equal numbers, so calls
must lie where no block of a message will ever be."""
CUT = "the call was cut by the length limit; raise max_tokens"
PROVIDER = "ninfer"


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Token counts in LangChain's form."""
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def response_metadata(end: Finish | Completion, model: str, mode: str) -> dict[str, Any]:
    """What a message says about its making; on the last chunk only, since core joins repeated texts."""
    data: dict[str, Any] = {
        "model_name": model,
        "finish_reason": end.reason if isinstance(end, Finish) else end.finish_reason,
        "timings": timings_of(end.timings),
        "seed": end.seed,
        "mode": mode,
    }
    if end.stop_sequence is not None:
        data["stop_sequence"] = end.stop_sequence
    return data


def to_result(completion: Completion, logprobs: Sequence[TokenLogprob] | None, model: str, mode: str) -> ChatResult:
    """The whole answer."""
    message = completion.message
    calls, invalid = [], []
    for i, call in enumerate(message.tool_calls):
        cut = completion.truncated_call and i == len(message.tool_calls) - 1
        if cut or isinstance(call.arguments, str):
            error = CUT if cut else "the arguments are not a JSON object"
            invalid.append(invalid_tool_call(name=call.name, args=_json(call), id=call.id, error=error))
        else:
            calls.append(tool_call(name=call.name, args=dict(call.arguments), id=call.id))
    metadata = {"model_provider": PROVIDER, **response_metadata(completion, model, mode)}
    if logprobs is not None:
        metadata["logprobs"] = {"content": logprob_entries(logprobs)}
    made = AIMessage(
        content=message.text,
        additional_kwargs={"reasoning_content": message.reasoning} if message.reasoning else {},
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=usage_metadata(completion.usage),
        response_metadata=metadata,
    )
    generation = ChatGeneration(message=made, generation_info={"finish_reason": completion.finish_reason})
    usage = completion.usage
    counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return ChatResult(generations=[generation], llm_output={"model_name": model, "token_usage": counts})


def _json(call: ToolCall) -> str:
    arguments = call.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class ChunkMaker:
    """Events to chunks: text or call parts in one chunk, never both; totals on the last chunk alone."""

    def __init__(self, model: str, mode: str) -> None:
        self._model, self._mode = model, mode

    def chunk(self, event: Event) -> ChatGenerationChunk | None:
        """The chunk of an event; None for one that adds nothing to a message."""
        if isinstance(event, TextDelta):
            metadata = {"logprobs": {"content": logprob_entries(event.logprobs)}} if event.logprobs else {}
            return _chunk(event.text, metadata)
        if isinstance(event, ReasoningDelta):
            return _chunk("", {}, additional_kwargs={"reasoning_content": event.text})
        if isinstance(event, ToolCallStart):
            index = FIRST_CALL_INDEX + event.index
            return _chunk(
                "", {}, tool_call_chunks=[tool_call_chunk(name=event.name, args="", id=event.id, index=index)]
            )
        if isinstance(event, ToolCallDelta):
            return _call_part(event.index, event.arguments)
        if isinstance(event, ToolCallEnd):
            # Core completes partial JSON, but not past a bracket that nothing opened: so the sum of the chunks holds an
            # invalid call, as the whole message does.
            return None if event.complete else _call_part(event.index, f"\n] {CUT}")
        last = _chunk("", response_metadata(event, self._model, self._mode), chunk_position="last")
        assert isinstance(last.message, AIMessageChunk)
        last.message.usage_metadata = usage_metadata(event.usage)
        last.generation_info = {"finish_reason": event.reason}
        return last


def _chunk(text: str, metadata: dict[str, Any], **fields: Any) -> ChatGenerationChunk:
    message = AIMessageChunk(content=text, response_metadata={"model_provider": PROVIDER, **metadata}, **fields)
    return ChatGenerationChunk(message=message)


def _call_part(index: int, arguments: str) -> ChatGenerationChunk:
    part = tool_call_chunk(name=None, args=arguments, id=None, index=FIRST_CALL_INDEX + index)
    return _chunk("", {}, tool_call_chunks=[part])


class BlockEvents:
    """Events to the typed block protocol: each block closes as the next one opens, in the order they were made."""

    def __init__(self, message_id: str, model: str, mode: str) -> None:
        self._id, self._model, self._mode = message_id, model, mode
        self._index = -1
        self._kind = ""
        self._text: list[str] = []
        self._call = ToolCall("", "", {})
        self._logprobs: list[dict[str, Any]] = []

    def start(self) -> dict[str, Any]:
        """The opening event."""
        metadata = {"provider": PROVIDER, "model": self._model}
        return {"event": "message-start", "role": "ai", "id": self._id, "metadata": metadata}

    def feed(self, event: Event) -> Iterator[dict[str, Any]]:
        """The protocol events of one engine event."""
        if isinstance(event, TextDelta):
            self._logprobs.extend(logprob_entries(event.logprobs))
            yield from self._delta("text", "text", event.text)
        elif isinstance(event, ReasoningDelta):
            yield from self._delta("reasoning", "reasoning", event.text)
        elif isinstance(event, ToolCallStart):
            self._call = ToolCall(event.id, event.name, {})
            yield from self._open(
                "tool_call", {"type": "tool_call_chunk", "id": event.id, "name": event.name, "args": ""}
            )
        elif isinstance(event, ToolCallDelta):
            yield from self._delta("tool_call", "args", event.arguments)
        elif isinstance(event, ToolCallEnd):
            yield from self._close(event)
        else:
            yield from self._close()
            yield self._finish(event)

    def _delta(self, kind: str, key: str, text: str) -> Iterator[dict[str, Any]]:
        if kind != self._kind:
            yield from self._open(kind, {"type": kind, key: ""})
        if text:
            self._text.append(text)
            name = "tool-call" if kind == "tool_call" else kind
            yield {"event": "content-block-delta", "index": self._index, "delta": {"type": f"{name}-delta", key: text}}

    def _open(self, kind: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._index += 1
        self._kind = kind
        yield {"event": "content-block-start", "index": self._index, "content": content}

    def _close(self, end: ToolCallEnd | None = None) -> Iterator[dict[str, Any]]:
        if not self._kind:
            return
        text = "".join(self._text)
        content: dict[str, Any]
        if self._kind == "tool_call":
            call = end.call if end else self._call
            whole = end is not None and end.complete and not isinstance(call.arguments, str)
            content = {"type": "tool_call" if whole else "invalid_tool_call", "id": call.id, "name": call.name}
            content |= (
                {"args": dict(call.arguments)}
                if whole and not isinstance(call.arguments, str)
                else {
                    "args": text,
                    "error": CUT,
                }
            )
        else:
            content = {"type": self._kind, self._kind: text}
        self._kind, self._text = "", []
        yield {"event": "content-block-finish", "index": self._index, "content": content}

    def _finish(self, end: Finish) -> dict[str, Any]:
        metadata = {"model_provider": PROVIDER, **response_metadata(end, self._model, self._mode)}
        if self._logprobs:
            metadata["logprobs"] = {"content": self._logprobs}
        return {"event": "message-finish", "usage": dict(usage_metadata(end.usage)), "metadata": metadata}
