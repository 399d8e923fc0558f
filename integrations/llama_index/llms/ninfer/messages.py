"""LlamaIndex chat messages and blocks to the neutral form; the caller's messages are never changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    VideoBlock,
)

from ninfer_core.adapter import MediaPolicy
from ninfer_core.errors import InvalidRequestError, MediaError, UnsupportedError
from ninfer_core.types import Image, Message, Part, Role, Text, ToolCall, Video

_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "developer",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/toml", "application/x-yaml")
_TEXT_SUFFIXES = ("txt", "md", "rst", "csv", "tsv", "json", "xml", "html", "yaml", "yml", "toml", "ini", "log", "py")


def to_messages(messages: Sequence[ChatMessage], media: MediaPolicy) -> tuple[Message, ...]:
    """All messages in order.

    Raises:
        InvalidRequestError: a block that this model cannot read; `param` says where.
        MediaError: an image, video or document that may not be read.
    """
    return tuple(_message(message, f"messages[{i}]", media) for i, message in enumerate(messages))


def _message(message: ChatMessage, where: str, media: MediaPolicy) -> Message:
    role = _ROLES[message.role]
    parts: list[Part] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(message.blocks):
        path = f"{where}.blocks[{i}]"
        if isinstance(block, ThinkingBlock) and role == "assistant":
            reasoning.append(block.content or "")
        elif isinstance(block, ToolCallBlock) and role == "assistant":
            calls.append(ToolCall(block.tool_call_id or "", block.tool_name, block.tool_kwargs))
        else:
            parts.extend(_parts(block, path, role, media))
    if role == "assistant" and not calls:
        calls = _older_calls(message.additional_kwargs.get("tool_calls"))
    text_only = all(isinstance(part, Text) for part in parts)
    content = "".join(part.text for part in parts if isinstance(part, Text)) if text_only else tuple(parts)
    identity = message.additional_kwargs.get("tool_call_id")
    return Message(
        role,
        content,
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(calls),
        tool_call_id=str(identity) if role == "tool" and identity is not None else None,
        name=message.additional_kwargs.get("name"),
    )


def _parts(block: Any, where: str, role: str, media: MediaPolicy) -> list[Part]:
    if isinstance(block, TextBlock):
        return [Text(block.text)]
    if isinstance(block, ImageBlock):
        return [_medium(Image, block, block.resolve_image, where, media)]
    if isinstance(block, VideoBlock):
        made = _medium(Video, block, block.resolve_video, where, media)
        return [Video(made.data, made.path, made.url, fps=block.fps)]
    if isinstance(block, DocumentBlock):
        return [Text(_document(block, where))]
    if isinstance(block, CitableBlock):
        return [part for inner in block.content for part in _parts(inner, where, role, media)]
    if isinstance(block, CitationBlock):
        return _parts(block.cited_content, where, role, media)
    if isinstance(block, CachePoint):
        return []  # a hint to providers that bill by it; the prefix cache here needs none
    raise UnsupportedError(
        f"{where} is a block of type {block.block_type!r} in a message of the {role}; this model reads text, images, "
        "video and text documents",
        param=where,
    )


def _medium(kind: Callable[..., Any], block: Any, resolve: Callable[[], Any], where: str, media: MediaPolicy) -> Any:
    url = str(block.url) if block.url else None
    if url is not None and not (getattr(block, "image", None) or getattr(block, "video", None) or block.path):
        return media.from_url(kind, url, where)
    try:
        return kind(data=resolve().read())
    except (OSError, ValueError) as error:
        raise MediaError(f"{where} cannot be read: {error}", param=where) from error


def _document(block: DocumentBlock, where: str) -> str:
    """The text of a text document."""
    kind = block.document_mimetype or ""
    if block.url and not (block.data or block.path):
        raise MediaError(f"{where} is a document at an address, which is not fetched; give its data", param=where)
    if not (kind.startswith("text/") or kind in _TEXT_TYPES or (block.guess_format() or "").lower() in _TEXT_SUFFIXES):
        raise UnsupportedError(
            f"{where} is a document of type {kind or 'unknown'}; convert it to text first",
            param=where,
        )
    try:
        return bytes(block.resolve_document().read()).decode()
    except (OSError, ValueError) as error:
        raise MediaError(f"{where} cannot be read as text: {error}", param=where) from error


def _older_calls(values: Any) -> list[ToolCall]:
    """Calls as other models leave them beside the blocks: OpenAI's objects or mappings."""
    calls = []
    for value in values or ():
        item = value if isinstance(value, Mapping) else getattr(value, "model_dump", lambda: {})()
        function = item.get("function") or item
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("a tool call in additional_kwargs has no function name", param="messages")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        calls.append(ToolCall(str(item.get("id") or ""), name, arguments))
    return calls
