"""OpenAI chat messages and tools as the neutral types; also used by the tokenise and template endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from ninfer_core.errors import InvalidRequestError, UnsupportedError
from ninfer_core.types import Message, Part, Role, Text, Tool, ToolCall, ToolChoice

from .common import arguments_of, custom_tool, function_tool, unique_tools
from .media import MediaReader
from .schemas import ChatMessage

Mode = Literal["none", "auto", "required"]
TOOL_KINDS = (None, "function", "custom")

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text"}


def to_messages(messages: Sequence[ChatMessage], media: MediaReader) -> tuple[Message, ...]:
    """All messages, in order; paths in errors count as the client does."""
    return tuple(_message(message, f"messages[{i}]", media) for i, message in enumerate(messages))


def _message(message: ChatMessage, where: str, media: MediaReader) -> Message:
    role: Role = "tool" if message.role == "function" else message.role
    content, inner_reasoning = content_of(message.content, f"{where}.content", media)
    if role in ("system", "developer", "user") and message.content is None:
        raise InvalidRequestError(f"{where}.content is missing; a {role} message needs it", param=f"{where}.content")
    if role == "assistant":
        reasoning = _reasoning(message) or inner_reasoning
        if message.refusal and not content:
            content = message.refusal
        return Message(role, content, reasoning=reasoning, tool_calls=_calls(message, where), name=message.name)
    return Message(role, content, tool_call_id=message.tool_call_id, name=message.name)


def _reasoning(message: ChatMessage) -> str | None:
    for value in (message.reasoning_content, message.reasoning):
        if isinstance(value, str) and value:
            return value
    return None


def content_of(
    content: str | Sequence[Mapping[str, Any]] | None, where: str, media: MediaReader
) -> tuple[str | tuple[Part, ...], str | None]:
    """Content as text (when there is only text) or parts, and the text of reasoning parts beside it."""
    if content is None:
        return "", None
    if isinstance(content, str):
        return content, None
    parts: list[Part] = []
    reasoning: list[str] = []
    for i, item in enumerate(content):
        kind, path = item.get("type", "text"), f"{where}[{i}]"
        if kind in _REASONING_PARTS:
            reasoning.append(_string(item, _REASONING_PARTS[kind], path))
        elif kind in _TEXT_PARTS:
            parts.append(Text(_string(item, _TEXT_PARTS[kind], path)))
        else:
            parts.append(_media_part(item, kind, path, media))
    joined = "\n".join(text for text in reasoning if text) or None
    if all(isinstance(part, Text) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text)), joined
    return tuple(parts), joined


def _media_part(item: Mapping[str, Any], kind: Any, path: str, media: MediaReader) -> Part:
    if kind in ("image_url", "input_image", "image"):
        return media.part(_url(item, ("image_url", "image", "url"), path), path)
    if kind in ("video_url", "input_video", "video"):
        found = media.part(_url(item, ("video_url", "video", "url"), path), path, video=True)
        return replace(found, **_rates(item, path))
    if kind in ("input_audio", "audio", "file", "input_file"):
        raise UnsupportedError(f"{path}.type is {kind!r}; these models read text, images and video", param=path)
    raise InvalidRequestError(
        f"{path}.type is {str(kind)[:40]!r}; it must be text, image_url or video_url", param=f"{path}.type"
    )


def _url(item: Mapping[str, Any], names: Sequence[str], path: str) -> str:
    for name in names:
        value = item.get(name)
        if isinstance(value, dict):
            value = value.get("url")
        if isinstance(value, str) and value:
            return value
    raise InvalidRequestError(f"{path}.{names[0]} must hold a URL", param=f"{path}.{names[0]}")


def _rates(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    """How a video is sampled, beside its address or inside `video_url`: `fps` a second, or `frames` in all."""
    inner = item.get("video_url")
    places = (item, inner) if isinstance(inner, dict) else (item,)
    rates = {name: value for place in places for name in ("fps", "frames") if (value := place.get(name)) is not None}
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float if name == "fps" else int) or value <= 0:
            kind = "number" if name == "fps" else "whole number"
            raise InvalidRequestError(f"{path}.{name} must be a {kind} above 0", param=f"{path}.{name}")
    return rates


def _string(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return value


def _calls(message: ChatMessage, where: str) -> tuple[ToolCall, ...]:
    calls = []
    for i, item in enumerate(message.tool_calls or ()):
        calls.append(_call(item, f"{where}.tool_calls[{i}]"))
    if message.function_call:
        calls.append(_call({"function": message.function_call}, f"{where}.function_call"))
    return tuple(calls)


def _call(item: Mapping[str, Any], path: str) -> ToolCall:
    custom = item.get("custom")
    inner = custom if isinstance(custom, dict) else item.get("function", item)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{path}.function.name must be a non-empty string", param=f"{path}.function.name")
    if isinstance(custom, dict):
        arguments: Mapping[str, Any] | str = {"input": custom.get("input", "")}
    else:
        arguments = arguments_of(inner.get("arguments"))
    identity = item.get("id")
    return ToolCall(identity if isinstance(identity, str) else "", name, arguments)


def to_tools(
    tools: Sequence[Mapping[str, Any]] | None, functions: Sequence[Mapping[str, Any]] | None = None
) -> tuple[tuple[Tool, ...], frozenset[str]]:
    """Tools and the names of free-form ones, without those of kinds that are not in `TOOL_KINDS`."""
    result: list[Tool] = []
    custom: set[str] = set()
    for i, item in enumerate(tools or ()):
        path, kind = f"tools[{i}]", item.get("type")
        if kind in (None, "function"):
            inner = item.get("function")
            if isinstance(inner, dict):
                result.append(function_tool(inner, f"{path}.function", raw=item))
            else:
                result.append(function_tool(item, path))
        elif kind == "custom":
            inner = item.get("custom")
            tool = custom_tool(inner if isinstance(inner, dict) else item, f"{path}.custom")
            result.append(tool)
            custom.add(tool.name)
    # The old spelling beside the new one is the same list again.
    for i, item in enumerate(functions or () if not result else ()):
        result.append(function_tool(item, f"functions[{i}]"))
    return unique_tools(result), frozenset(custom)


def to_choice(choice: str | Mapping[str, Any] | None, param: str = "tool_choice") -> ToolChoice:
    """`tool_choice` in all its forms: a word, one named tool, or a list of allowed tools."""
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidRequestError(f"{param} is {choice[:40]!r}; it must be none, auto or required", param=param)
        return ToolChoice(cast(Mode, choice))
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
        tools = inner.get("tools") if isinstance(inner, dict) else None
        if mode not in ("auto", "required") or not isinstance(tools, list):
            raise InvalidRequestError(f"{param} needs a mode (auto or required) and a list of tools", param=param)
        return ToolChoice(mode, tuple(_chosen(tool, param) for tool in tools))
    if kind in ("function", "custom", "tool"):
        return ToolChoice("required", (_chosen(choice, param),))
    raise UnsupportedError(f"{param}.type {str(kind)[:40]!r} names a hosted tool, which is not available", param=param)


def _chosen(item: Any, param: str) -> str:
    if isinstance(item, dict):
        for holder in (item.get("function"), item.get("custom"), item):
            if isinstance(holder, dict) and isinstance(holder.get("name"), str) and holder["name"]:
                return str(holder["name"])
    raise InvalidRequestError(f"{param} does not name a tool", param=f"{param}.function.name")
