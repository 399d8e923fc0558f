"""Engine results to LlamaIndex responses, whole and streamed (each streamed one holds the message so far)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from ninfer_core.adapter import timings_of
from ninfer_core.types import (
    Completion,
    Event,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)


def raw_of(end: Finish | Completion, model: str, mode: str) -> dict[str, Any]:
    """What `raw` holds: token usage in the form that the token counters read, and how the answer was made."""
    usage = end.usage
    return {
        "model": model,
        "mode": mode,
        "finish_reason": end.reason if isinstance(end, Finish) else end.finish_reason,
        "stop_sequence": end.stop_sequence,
        "seed": end.seed,
        "timings": timings_of(end.timings),
        "usage": {
            **_counts(usage),
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def logprobs_of(logprobs: Sequence[TokenLogprob]) -> list[list[LogProb]]:
    """For each token the alternatives, the token itself first."""
    return [[_logprob(item), *map(_logprob, item.top)] for item in logprobs]


def _logprob(item: TokenLogprob) -> LogProb:
    return LogProb(token=item.token, logprob=item.logprob, bytes=list(item.bytes))


def chat_response(
    completion: Completion, logprobs: Sequence[TokenLogprob] | None, model: str, mode: str
) -> ChatResponse:
    """The whole answer."""
    message = completion.message
    blocks: list[Any] = []
    if message.reasoning:
        blocks.append(ThinkingBlock(content=message.reasoning, num_tokens=completion.usage.reasoning_tokens))
    if message.text or not message.tool_calls:
        blocks.append(TextBlock(text=message.text))
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=_kwargs(call.arguments))
        for call in message.tool_calls
    ]
    extra: dict[str, Any] = dict(_counts(completion.usage))
    if completion.truncated_call:
        extra["truncated_call"] = True
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks),
        raw=raw_of(completion, model, mode),
        logprobs=None if logprobs is None else logprobs_of(logprobs),
        additional_kwargs=extra,
    )


def _kwargs(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else dict(arguments)


def completion_response(response: ChatResponse) -> CompletionResponse:
    """A chat response as the response to a prompt."""
    extra = dict(response.additional_kwargs)
    thoughts = [block.content for block in response.message.blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        extra["thinking"] = "".join(text or "" for text in thoughts)
    return CompletionResponse(
        text=response.message.content or "",
        delta=response.delta,
        raw=response.raw,
        logprobs=response.logprobs,
        additional_kwargs=extra,
    )


class ResponseMaker:
    """Events to streamed responses: the blocks in the order they were made, and the news as delta."""

    def __init__(self, model: str, mode: str) -> None:
        self._model, self._mode = model, mode
        self._blocks: list[Any] = []
        self._calls: dict[int, int] = {}

    def feed(self, event: Event) -> ChatResponse:
        """The response after an event; `delta` is never None."""
        if isinstance(event, TextDelta):
            self._extend(TextBlock, "text", event.text)
            return self._response(event.text, logprobs=logprobs_of(event.logprobs) or None)
        if isinstance(event, ReasoningDelta):
            self._extend(ThinkingBlock, "content", event.text)
            return self._response("", {"thinking_delta": event.text})
        if isinstance(event, ToolCallStart):
            self._calls[event.index] = len(self._blocks)
            self._blocks.append(ToolCallBlock(tool_call_id=event.id, tool_name=event.name, tool_kwargs=""))
        elif isinstance(event, ToolCallDelta):
            place = self._calls[event.index]
            block = self._blocks[place]
            self._blocks[place] = block.model_copy(update={"tool_kwargs": block.tool_kwargs + event.arguments})
        elif isinstance(event, ToolCallEnd):
            place = self._calls[event.index]
            self._blocks[place] = self._blocks[place].model_copy(update={"tool_kwargs": _kwargs(event.call.arguments)})
            return self._response("", {} if event.complete else {"truncated_call": True})
        elif isinstance(event, Finish):
            return self._finish(event)
        return self._response("")

    def _extend(self, kind: Any, name: str, text: str) -> None:
        last = self._blocks[-1] if self._blocks else None
        if isinstance(last, kind):
            # A new block each time: earlier responses keep the text they had.
            self._blocks[-1] = last.model_copy(update={name: (getattr(last, name) or "") + text})
        else:
            self._blocks.append(kind(**{name: text}))

    def _finish(self, end: Finish) -> ChatResponse:
        for place, block in enumerate(self._blocks):
            if isinstance(block, ThinkingBlock):
                self._blocks[place] = block.model_copy(update={"num_tokens": end.usage.reasoning_tokens})
                break
        if not self._blocks:
            self._blocks.append(TextBlock(text=""))
        response = self._response("", dict(_counts(end.usage)))
        response.raw = raw_of(end, self._model, self._mode)
        return response

    def _response(
        self, delta: str, extra: dict[str, Any] | None = None, logprobs: list[list[LogProb]] | None = None
    ) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, blocks=list(self._blocks))
        return ChatResponse(message=message, delta=delta, logprobs=logprobs, additional_kwargs=extra or {})
