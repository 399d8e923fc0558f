"""LangChain messages and content blocks to the neutral form: every block of the standard, and the older shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ninfer_core.adapter import MediaPolicy, from_base64
from ninfer_core.errors import InvalidRequestError, MediaError, UnsupportedError
from ninfer_core.types import Image, Message, Part, Role, Text, ToolCall, Video

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "text-plain": "text", "refusal": "refusal"}
_REASONING = {"reasoning": "reasoning", "thinking": "thinking", "reasoning_content": "reasoning_content"}
_CALLS = ("tool_call", "tool_use", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta")
_IMAGES = ("image", "image_url", "input_image")
_VIDEOS = ("video", "video_url", "input_video")
# What other providers' servers did on their own side; it means nothing to this model.
_FOREIGN = (
    "redacted_thinking",
    "server_tool_call",
    "server_tool_call_chunk",
    "server_tool_result",
    "server_tool_use",
    "non_standard",
)


class _Content:
    """The content of one message, taken apart."""

    def __init__(self, where: str, role: Role, media: MediaPolicy) -> None:
        self.where, self.role, self.media = where, role, media
        self.parts: list[Part] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.results: list[Message] = []

    @property
    def value(self) -> str | tuple[Part, ...]:
        """Plain text where there is only text."""
        if all(isinstance(part, Text) for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Text))
        return tuple(self.parts)

    def read(self, content: Any) -> None:
        """Take a string or a list of strings and blocks."""
        if isinstance(content, str):
            self.parts.append(Text(content))
            return
        if not isinstance(content, Sequence):
            raise InvalidRequestError(
                f"{self.where} must be a string or a list of blocks, not {type(content).__name__}", param=self.where
            )
        for i, block in enumerate(content):
            if isinstance(block, str):
                self.parts.append(Text(block))
            elif isinstance(block, Mapping):
                self._block(block, f"{self.where}[{i}]")
            else:
                raise InvalidRequestError(
                    f"{self.where}[{i}] must be a string or a block, not {type(block).__name__}", param=self.where
                )

    def _block(self, block: Mapping[str, Any], where: str) -> None:
        kind = block.get("type", "text")
        if not isinstance(kind, str):
            raise InvalidRequestError(f"{where}.type must be a string, not {type(kind).__name__}", param=where)
        assistant = self.role == "assistant"
        if kind in _TEXT:
            self.parts.append(Text(_text_of(block, kind, where)))
        elif kind in _IMAGES:
            self.parts.append(_medium(Image, block, where, self.media))
        elif kind in _VIDEOS:
            self.parts.append(_medium(Video, block, where, self.media))
        elif kind in _REASONING and assistant:
            self.reasoning.append(_reasoning_of(block, kind))
        elif kind in _CALLS and assistant:
            call = _call_of(block)
            if call is not None:
                self.calls.append(call)
        elif kind == "tool_result" and self.role == "user":
            inner = _Content(f"{where}.content", "tool", self.media)
            inner.read(block.get("content") or "")
            self.results.append(Message("tool", inner.value, tool_call_id=str(block.get("tool_use_id", ""))))
        elif kind == "file":
            self.parts.append(Text(_text_file(block, where)))
        elif kind in _FOREIGN and assistant:
            return
        else:
            raise UnsupportedError(
                f"{where}.type is {str(kind)[:40]!r} in a message of the {self.role}; this model reads text, images "
                "and video",
                param=where,
            )


def to_messages(messages: Sequence[BaseMessage], media: MediaPolicy) -> tuple[Message, ...]:
    """All messages in order; the input is not changed.

    Raises:
        InvalidRequestError: a message or block of an unknown kind; `param` says where.
        MediaError: an image or video that may not be read.
    """
    result: list[Message] = []
    for i, message in enumerate(messages):
        result.extend(_message(message, f"messages[{i}].content", media))
    return tuple(result)


def _message(message: BaseMessage, where: str, media: MediaPolicy) -> list[Message]:
    role = _role_of(message, where)
    content = _Content(where, role, media)
    content.read(message.content)
    if role == "assistant":
        return [_assistant(message, content)]
    if isinstance(message, ToolMessage):
        return [Message("tool", content.value, tool_call_id=message.tool_call_id, name=message.name)]
    made = list(content.results)
    if content.parts or not made:
        made.append(Message(role, content.value, name=message.name))
    return made


def _role_of(message: BaseMessage, where: str) -> Role:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, SystemMessage):
        return "developer" if message.additional_kwargs.get("__openai_role__") == "developer" else "system"
    if isinstance(message, ToolMessage | FunctionMessage):
        return "tool"
    if isinstance(message, ChatMessage) and message.role.lower() in _ROLES:
        return _ROLES[message.role.lower()]
    name = f"role {message.role!r}" if isinstance(message, ChatMessage) else type(message).__name__
    raise InvalidRequestError(f"{where}: a message of {name} cannot be given to this model", param=where)


def _assistant(message: BaseMessage, content: _Content) -> Message:
    # After a v3 stream the same reasoning is in a block and in additional_kwargs; it is told once.
    reasoning = "".join(content.reasoning)
    if not reasoning:
        beside = message.additional_kwargs.get("reasoning_content")
        reasoning = beside if isinstance(beside, str) else ""
    calls: list[ToolCall] = []
    if isinstance(message, AIMessage):
        calls = [ToolCall(call["id"] or "", call["name"], call["args"]) for call in message.tool_calls]
        calls += [
            ToolCall(call.get("id") or "", call.get("name") or "", call.get("args") or "")
            for call in message.invalid_tool_calls
            if call.get("name")
        ]
    known = {call.id for call in calls if call.id}
    if not calls or known:
        calls += [call for call in content.calls if call.id and call.id not in known]
    return Message("assistant", content.value, reasoning=reasoning or None, tool_calls=tuple(calls), name=message.name)


def _text_of(block: Mapping[str, Any], kind: str, where: str) -> str:
    text = block.get(_TEXT[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{_TEXT[kind]} must be a string, not {type(text).__name__}", param=where)
    return text


def _reasoning_of(block: Mapping[str, Any], kind: str) -> str:
    text = block.get(_REASONING[kind])
    if isinstance(text, Mapping):
        text = text.get("text")
    if isinstance(text, str):
        return text
    summary = block.get("summary")
    if isinstance(summary, Sequence) and not isinstance(summary, str):
        return "\n".join(str(item.get("text", "")) for item in summary if isinstance(item, Mapping))
    return ""


def _call_of(block: Mapping[str, Any]) -> ToolCall | None:
    name = block.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments: Any = next((block[key] for key in ("args", "input", "arguments") if block.get(key) is not None), {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return ToolCall(str(block.get("id") or block.get("call_id") or ""), name, arguments)


def _medium(kind: Callable[..., Any], block: Mapping[str, Any], where: str, media: MediaPolicy) -> Part:
    """An image or video in any of its shapes: standard (v1, v0), OpenAI's, Anthropic's, or a local path."""
    source = block.get("source")
    options: dict[str, Any] = {}
    if kind is Video:
        options = {name: block[name] for name in ("fps", "frames") if block.get(name) is not None}
    if isinstance(source, Mapping):
        block = source
    data = next((block[key] for key in ("base64", "data") if isinstance(block.get(key), str)), None)
    if data is not None:
        return kind(data=from_base64(data, where), **options)
    if isinstance(data := block.get("data"), bytes):
        return kind(data=data, **options)
    for key in ("url", "path", "image_url", "video_url", "image", "video"):
        value = block.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if isinstance(value, str) and value:
            found = media.from_url(kind, value, where)
            return kind(data=found.data, path=found.path, url=found.url, **options)
    if block.get("file_id") or block.get("id"):
        raise MediaError(f"{where} names an uploaded file; there is no file store here, send base64", param=where)
    raise MediaError(f"{where} has neither base64 data nor a URL", param=where)


def _text_file(block: Mapping[str, Any], where: str) -> str:
    """The text of a file block with a text type; other files cannot be read."""
    mime = str(block.get("mime_type", ""))
    if isinstance(block.get("text"), str):
        return str(block["text"])
    data = block.get("base64") or block.get("data")
    if mime.startswith("text/") and isinstance(data, str):
        return data if block.get("source_type") == "text" else from_base64(data, where).decode(errors="replace")
    raise UnsupportedError(
        f"{where} is a file of type {mime or 'unknown'}; this model reads text, images and video", param=where
    )
