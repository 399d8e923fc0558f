"""Requests of Anthropic's messages interface as the neutral form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_core.errors import InvalidRequestError, UnsupportedError
from ninfer_core.types import Image, Message, Part, Request, ResponseFormat, Sampling, Text, Tool, ToolCall, ToolChoice

from ..effort import effort_budget
from .common import (
    apply_thinking_object,
    arguments_of,
    function_tool,
    schema_format,
    stop_of,
    unique_tools,
)
from .context import Server
from .media import MediaReader, decode_base64
from .schemas import AnthropicMessage, CountTokensRequest, MessagesRequest

# The first line of one agent's system prompt; parts of it change with every request and would defeat prefix reuse.
BILLING_HEADER = "x-anthropic-billing-header"
TOOL_KINDS = (None, "custom", "function")
# Blocks that carry nothing for the model.
_SKIPPED = frozenset({"redacted_thinking", "container_upload", "compaction", "fallback", "tool_reference"})


def to_request(body: CountTokensRequest, server: Server) -> Request:
    """The neutral request. Both endpoints use it, so counts agree."""
    tools = to_tools(body.tools)
    choice, parallel = to_choice(body.tool_choice)
    messages = [*system_messages(body.system), *to_messages(body.messages, server.media)]
    last = body.messages[-1]
    options: dict[str, Any] = _thinking(body)
    if isinstance(body, MessagesRequest):
        options["max_tokens"] = body.max_tokens
        options["stop"] = stop_of(body.stop_sequences, "stop_sequences")
        options["sampling"] = Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(0, body.top_k),
        )
    return Request(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice if tools or choice.mode != "none" else ToolChoice(),
        parallel_tool_calls=parallel,
        response_format=_output_format(body),
        continue_final_message=last.role == "assistant" and not messages[-1].tool_calls and bool(messages[-1].content),
        **options,
    )


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    effort = (body.output_config or {}).get("effort")
    if isinstance(effort, str):
        budget = effort_budget(effort)
        if budget:
            options["thinking_budget"] = budget
    if body.thinking is None:
        # This API does not think unless asked to.
        options["thinking"] = False
    else:
        apply_thinking_object(options, body.thinking)
    if not options["thinking"]:
        options.pop("thinking_budget", None)
    return options


def _output_format(body: CountTokensRequest) -> ResponseFormat | None:
    form, param = (body.output_config or {}).get("format"), "output_config.format"
    if form is None:
        form, param = body.output_format, "output_format"
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequestError(f"{param}.type must be json_schema", param=f"{param}.type")
    return schema_format({**form, "strict": True}, param)


def system_messages(system: str | Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The system prompt as at most one message: its blocks joined by newlines, a billing line dropped."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    texts = []
    for i, block in enumerate(blocks):
        if block.get("type", "text") != "text" or not isinstance(block.get("text"), str):
            raise InvalidRequestError(f"system[{i}] must be a text block", param=f"system[{i}]")
        text = _without_billing(block["text"])
        if text:
            texts.append(text)
    return [Message("system", "\n".join(texts))] if texts else []


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")


def to_messages(messages: Sequence[AnthropicMessage], media: MediaReader) -> list[Message]:
    """Messages in order; a user turn with tool results becomes tool messages, then its text and images."""
    result: list[Message] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        if message.role == "system":
            result += _system_turn(message, where)
        elif message.role == "assistant":
            result.append(_assistant(message.content, where, media))
        else:
            result += _user(message.content, where, media)
    return result


def _system_turn(message: AnthropicMessage, where: str) -> list[Message]:
    content = message.content
    if isinstance(content, str):
        text = content
    else:
        text = "\n".join(_text_of(block, f"{where}[{i}]") for i, block in enumerate(content or ()))
    text = _without_billing(text)
    return [Message("system", text)] if text else []


def _user(content: str | Sequence[Mapping[str, Any]] | None, where: str, media: MediaReader) -> list[Message]:
    if content is None:
        raise InvalidRequestError(f"{where} is missing; a user message needs it", param=where)
    if isinstance(content, str):
        return [Message("user", content)]
    results: list[Message] = []
    parts: list[Part] = []
    for i, block in enumerate(content):
        path = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            results.append(_tool_result(block, path, media))
        else:
            parts += _parts(block, path, media)
    turn = [Message("user", _compact(parts))] if parts or not results else []
    return [*results, *turn]


def _tool_result(block: Mapping[str, Any], path: str, media: MediaReader) -> Message:
    content = block.get("content")
    identity = block.get("tool_use_id")
    parts: list[Part] = []
    if isinstance(content, str):
        parts.append(Text(content))
    elif isinstance(content, list):
        for i, item in enumerate(content):
            if not isinstance(item, dict):
                raise InvalidRequestError(f"{path}.content[{i}] must be an object", param=f"{path}.content[{i}]")
            parts += _parts(item, f"{path}.content[{i}]", media)
    elif content is not None:
        raise InvalidRequestError(f"{path}.content must be a string or a list of blocks", param=f"{path}.content")
    if block.get("is_error") is True and not parts:
        parts.append(Text("error"))
    return Message("tool", _compact(parts), tool_call_id=identity if isinstance(identity, str) else None)


def _assistant(content: str | Sequence[Mapping[str, Any]] | None, where: str, media: MediaReader) -> Message:
    if content is None or isinstance(content, str):
        return Message("assistant", content or "")
    reasoning: list[str] = []
    parts: list[Part] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(content):
        path, kind = f"{where}[{i}]", block.get("type")
        if kind == "thinking":
            text = block.get("thinking")
            if isinstance(text, str) and text:
                reasoning.append(text)
        elif kind == "tool_use":
            calls.append(_tool_use(block, path))
        else:
            parts += _parts(block, path, media)
    thought = "\n\n".join(reasoning) or None
    return Message("assistant", _compact(parts), reasoning=thought, tool_calls=tuple(calls))


def _tool_use(block: Mapping[str, Any], path: str) -> ToolCall:
    name, identity = block.get("name"), block.get("id")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{path}.name must be a non-empty string", param=f"{path}.name")
    return ToolCall(identity if isinstance(identity, str) else "", name, arguments_of(block.get("input")))


def _parts(block: Mapping[str, Any], path: str, media: MediaReader) -> list[Part]:
    """The parts of a block; hosted tools' blocks of another server are shown as text."""
    kind = block.get("type", "text")
    if kind in _SKIPPED:
        return []
    if kind == "text":
        return [Text(_text_of(block, path))]
    if kind == "image":
        return [_image(block, path, media)]
    if kind == "document":
        return [Text(_document(block, path))]
    if kind == "search_result":
        return [Text(_search_result(block))]
    if kind == "server_tool_use":
        return [Text(f"[{block.get('name')}: {block.get('input')}]")]
    if isinstance(kind, str) and kind.endswith("_tool_result"):
        return [Text(f"[result of {kind.removesuffix('_tool_result')}: {_shown(block.get('content'))}]")]
    raise InvalidRequestError(f"{path}.type is {str(kind)[:40]!r}, which is not supported here", param=f"{path}.type")


def _text_of(block: Mapping[str, Any], path: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.text must be a string", param=f"{path}.text")
    return text


def _source(block: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidRequestError(f"{path}.source must be an object", param=f"{path}.source")
    return source


def _image(block: Mapping[str, Any], path: str, media: MediaReader) -> Part:
    source = _source(block, path)
    kind = source.get("type")
    if kind == "base64" and isinstance(source.get("data"), str):
        return Image(data=decode_base64(source["data"], f"{path}.source.data"))
    if kind == "url" and isinstance(source.get("url"), str):
        return media.part(source["url"], f"{path}.source.url")
    if kind == "file":
        raise UnsupportedError(f"{path}.source.type file needs a file store; send the image itself", param=path)
    raise InvalidRequestError(f"{path}.source must be base64 data or a url", param=f"{path}.source")


def _document(block: Mapping[str, Any], path: str) -> str:
    source = _source(block, path)
    title = f"{block['title']}\n" if isinstance(block.get("title"), str) else ""
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return title + source["data"]
    if source.get("type") == "content":
        content = source.get("content")
        if isinstance(content, str):
            return title + content
        if isinstance(content, list):
            return title + "\n".join(
                _text_of(item, f"{path}.source.content[{i}]")
                for i, item in enumerate(content)
                if isinstance(item, dict)
            )
    raise UnsupportedError(f"{path}: only documents with a text source can be read; send the text", param=path)


def _search_result(block: Mapping[str, Any]) -> str:
    lines = [str(block.get(name)) for name in ("title", "source") if block.get(name)]
    return "\n".join([*lines, _shown(block.get("content"))])


def _shown(content: Any) -> str:
    """Foreign content as text: text blocks as they are, the rest in short."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    lines = []
    for item in content if isinstance(content, list) else []:
        if isinstance(item, dict):
            known = [item.get(name) for name in ("text", "title", "url", "stdout", "stderr")]
            lines.append(" ".join(str(value) for value in known if value))
    return "\n".join(lines)


def _compact(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Text alone is a string: blocks are joined by newlines, the same way each time."""
    if all(isinstance(part, Text) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, Text))
    return tuple(parts)


def to_tools(items: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """Client tools, without those of kinds that are not in `TOOL_KINDS`."""
    kept = ((i, item) for i, item in enumerate(items or ()) if item.get("type") in TOOL_KINDS)
    return unique_tools([function_tool(item, f"tools[{i}]") for i, item in kept])


def to_choice(choice: Mapping[str, Any] | None) -> tuple[ToolChoice, bool]:
    """`tool_choice`, and whether several calls in one turn are allowed."""
    if choice is None:
        return ToolChoice(), True
    parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    if kind == "auto":
        return ToolChoice(), parallel
    if kind == "none":
        return ToolChoice("none"), parallel
    if kind == "any":
        return ToolChoice("required"), parallel
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("tool_choice.name must name a tool", param="tool_choice.name")
        return ToolChoice("required", (name,)), parallel
    raise InvalidRequestError(
        f"tool_choice.type is {str(kind)[:40]!r}; it must be auto, any, tool or none", param="tool_choice.type"
    )
