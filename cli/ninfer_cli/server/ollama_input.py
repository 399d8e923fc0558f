"""Requests of Ollama's chat and generate interfaces as the neutral form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ninfer_core.errors import ContextOverflowError, InvalidRequestError, UnsupportedError
from ninfer_core.types import Image, Message, Part, Request, ResponseFormat, Sampling, Text, ToolCall

from ..effort import effort_budget
from .common import apply_budget, arguments_of, stop_of
from .context import Server
from .gap import gap_ends, gap_prompt
from .media import decode_base64
from .openai_messages import to_tools
from .schemas import OllamaBase, OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, OllamaOptions


def chat_request(body: OllamaChatRequest, server: Server) -> Request:
    """The neutral request of a chat."""
    tools, _ = to_tools(body.tools)
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(body.messages or ()))
    last = messages[-1]
    resumes = last.role == "assistant" and not last.tool_calls and bool(last.content)
    return Request(messages=messages, tools=tools, continue_final_message=resumes, **_common(body))


def generate_request(body: OllamaGenerateRequest, server: Server) -> Request:
    """The neutral request of a generation: a chat of one turn, or the raw prompt."""
    if body.template:
        raise UnsupportedError("template cannot be replaced: the model's own template is used", param="template")
    if body.context:
        raise UnsupportedError(
            "context is not supported: send the conversation to /api/chat, which reuses its prefix", param="context"
        )
    options = _common(body)
    if body.raw or body.suffix:
        for name in ("thinking", "thinking_budget"):
            options.pop(name, None)
        for name in ("system", "images"):
            if getattr(body, name):
                mode = "suffix" if body.suffix else "raw"
                raise UnsupportedError(f"{name} cannot be combined with {mode}: that prompt has no turns", param=name)
    if body.suffix:
        prompt = gap_prompt(server.tokenizer, body.prompt or "", body.suffix)
        return Request(prompt=prompt, stop_token_ids=gap_ends(server.tokenizer), **options)
    if body.raw:
        return Request(prompt=body.prompt or "", **options)
    messages = [Message("system", body.system)] if body.system else []
    messages.append(Message("user", _with_images(body.prompt or "", body.images, "images")))
    return Request(messages=tuple(messages), **options)


def _common(body: OllamaBase) -> dict[str, Any]:
    options = body.options or OllamaOptions()
    result: dict[str, Any] = {
        "response_format": _format(body.format),
        "sampling": _sampling(options),
        "max_tokens": options.num_predict if options.num_predict and options.num_predict > 0 else None,
        "stop": stop_of(options.stop, "options.stop"),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    if isinstance(body.think, bool):
        result["thinking"] = body.think
    elif body.think is not None:
        apply_budget(result, effort_budget(body.think))
    return result


def _sampling(options: OllamaOptions) -> Sampling:
    """In this API a negative seed means "any"."""
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=None if options.top_k is None else max(0, options.top_k),
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repeat_penalty,
        seed=options.seed if options.seed is not None and options.seed >= 0 else None,
    )


def _format(value: str | Mapping[str, Any] | None) -> ResponseFormat | None:
    if value is None or value == "":
        return None
    if value == "json":
        return ResponseFormat("json")
    if isinstance(value, str):
        raise InvalidRequestError(f'format is {value[:40]!r}; it must be "json" or a JSON schema', param="format")
    return ResponseFormat("json_schema", value)


def _with_images(text: str, images: Sequence[str] | None, where: str) -> str | tuple[Part, ...]:
    if not images:
        return text
    parts: list[Part] = [Image(data=_image(item, f"{where}[{i}]")) for i, item in enumerate(images)]
    return (*parts, Text(text)) if text else tuple(parts)


def _image(value: str, where: str) -> bytes:
    """Plain base64; some clients send a data URL in its place."""
    if value.startswith("data:"):
        value = value.partition(",")[2]
    return decode_base64(value, where)


def _message(message: OllamaMessage, where: str) -> Message:
    content = _with_images(message.content or "", message.images, f"{where}.images")
    if message.role == "assistant":
        calls = tuple(_call(item, f"{where}.tool_calls[{i}]") for i, item in enumerate(message.tool_calls or ()))
        return Message("assistant", content, reasoning=message.thinking or None, tool_calls=calls)
    name = message.tool_name or message.name
    return Message(message.role, content, tool_call_id=message.tool_call_id, name=name)


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    function = item.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
    identity = item.get("id")
    return ToolCall(identity if isinstance(identity, str) else "", name, arguments_of(function.get("arguments")))


def bounded(request: Request, body: OllamaBase, server: Server) -> tuple[Request, int]:
    """The request within `options.num_ctx`, an upper bound on prompt plus answer, and the number of dropped messages.

    Messages are dropped (oldest first, never system ones or the last) only where the client says `truncate: true`.

    Raises:
        ContextOverflowError: the prompt does not fit.
    """
    asked = (body.options or OllamaOptions()).num_ctx
    window = server.card.context_length if asked is None or asked <= 0 else min(asked, server.card.context_length)
    if window == server.card.context_length and not body.truncate:
        return request, 0
    dropped = 0
    count = server.engine.count_tokens(request)
    while count >= window:
        shorter = _without_oldest(request) if body.truncate else None
        if shorter is None:
            raise ContextOverflowError(count, window)
        dropped += len(request.messages) - len(shorter.messages)
        request = shorter
        count = server.engine.count_tokens(request)
    room = window - count
    return replace(request, max_tokens=min(request.max_tokens or room, room)), dropped


def _without_oldest(request: Request) -> Request | None:
    """The request without its first turn: a message with everything up to the next user message."""
    messages = request.messages
    first = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    after = next((i for i in range(first + 1, len(messages)) if messages[i].role == "user"), None)
    if after is None:
        return None
    return replace(request, messages=messages[:first] + messages[after:])
