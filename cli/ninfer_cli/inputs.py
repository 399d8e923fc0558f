"""What the user hands in as files and flags, turned into the neutral types: messages and tools."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Image, Message, Part, ResponseFormat, Role, Text, Tool, ToolCall, Video

_MESSAGE_KEYS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
}


def argument_text(text: str, what: str) -> str:
    """A text from the command line as proper Unicode, also under a locale that is not UTF-8.

    Raises:
        InvalidRequestError: the bytes are not UTF-8; `what` names the argument.
    """
    if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise InvalidRequestError(f"{what} is not UTF-8 text") from None


def read_json(path: Path) -> Any:
    """The JSON value in a file; operating-system errors pass through.

    Raises:
        InvalidRequestError: the file is not UTF-8 JSON; the message names file, line and column.
    """
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None


def read_messages(path: Path) -> tuple[Message, ...]:
    """A conversation from a JSON file: a list of chat messages, or an object with such a list under `messages`.

    Raises:
        InvalidRequestError: the file is not JSON or a message is not well formed; the message says which.
    """
    value = read_json(path)
    listed = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        raise InvalidRequestError(f"{path} holds no messages: expected a list, or an object with a list 'messages'")
    return tuple(message_from_json(item, f"{path}: message {i + 1}") for i, item in enumerate(listed))


def read_format(text: str) -> ResponseFormat:
    """What `--format` means: `json`, or the path of a file with a JSON schema.

    Raises:
        InvalidRequestError: the file holds no schema. OSError: there is no such file.
    """
    if text.strip().casefold() == "json":
        return ResponseFormat("json")
    schema = read_json(Path(text).expanduser())
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"{text} is not a JSON schema: it holds {type(schema).__name__}, not an object")
    return ResponseFormat("json_schema", schema)


def message_from_json(value: Any, where: str) -> Message:
    """One message in the common chat form (`role`, `content` as text or parts, `tool_calls`, `reasoning_content`).

    Raises:
        InvalidRequestError: a key is unknown, missing or of the wrong type; the message starts with `where`.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} is not an object")
    unknown = sorted(set(value) - _MESSAGE_KEYS)
    if unknown:
        raise InvalidRequestError(
            f"{where} has an unknown key {unknown[0]!r}; known: {', '.join(sorted(_MESSAGE_KEYS))}"
        )
    role: Any = value.get("role")
    if role not in get_args(Role):
        raise InvalidRequestError(f"{where} has role {role!r}; use one of {', '.join(get_args(Role))}")
    content = value.get("content")
    if isinstance(content, list):
        content = tuple(_part(item, where) for item in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{where}: content must be text or a list of parts, not {type(content).__name__}")
    calls = value.get("tool_calls") or ()
    return Message(
        role,
        content,
        reasoning=_optional_text(value, "reasoning_content", where) or _optional_text(value, "reasoning", where),
        tool_calls=tuple(_call(item, i, where) for i, item in enumerate(calls)),
        tool_call_id=_optional_text(value, "tool_call_id", where),
        name=_optional_text(value, "name", where),
    )


def message_to_json(message: Message) -> dict[str, Any]:
    """The form that `message_from_json` reads. Media parts are stored by path or URL; raw bytes are not stored."""
    value: dict[str, Any] = {"role": message.role, "content": message.content}
    if not isinstance(message.content, str):
        value["content"] = [_part_to_json(part) for part in message.content]
    if message.reasoning:
        value["reasoning_content"] = message.reasoning
    if message.tool_calls:
        value["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if getattr(message, key) is not None:
            value[key] = getattr(message, key)
    return value


def call_to_json(call: ToolCall, complete: bool) -> str:
    """One tool call as one JSON line: `{"id", "name", "arguments"}`, and `"complete": false` when it was cut."""
    value: dict[str, Any] = {"id": call.id, "name": call.name, "arguments": call.arguments}
    if isinstance(call.arguments, Mapping):
        value["arguments"] = dict(call.arguments)
    if not complete:
        value["complete"] = False
    return json.dumps(value, ensure_ascii=False)


def read_tools(path: Path) -> tuple[Tool, ...]:
    """Tools from a JSON file: a list of `{"type": "function", "function": {...}}`, or of the functions themselves.

    Raises:
        InvalidRequestError: the file is not JSON, or a tool has no name or no object as parameters.
    """
    value = read_json(path)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{path} holds no tools: expected a list of function tools")
    tools = []
    for i, item in enumerate(value):
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"{path}: tool {i + 1} is not a function with a name")
        parameters = function.get("parameters", {"type": "object", "properties": {}})
        if not isinstance(parameters, dict):
            raise InvalidRequestError(f"{path}: tool {function['name']!r}: parameters must be a JSON Schema object")
        raw = item if "function" in item else {"type": "function", "function": item}
        tools.append(
            Tool(
                function["name"],
                str(function.get("description") or ""),
                parameters,
                strict=bool(function.get("strict", False)),
                raw=raw,
            )
        )
    return tuple(tools)


def _optional_text(value: Mapping[str, Any], key: str, where: str) -> str | None:
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise InvalidRequestError(f"{where}: {key} must be text, not {type(found).__name__}")
    return found


def _part(value: Any, where: str) -> Part:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and isinstance(value.get("text"), str):
        return Text(value["text"])
    if kind in ("image_url", "video_url"):
        source = value.get(kind)
        url = source.get("url") if isinstance(source, dict) else source
        if isinstance(url, str) and url:
            make = Image if kind == "image_url" else Video
            remote = url.startswith(("data:", "http:", "https:"))
            return make(url=url) if remote else make(path=url.removeprefix("file://"))
    raise InvalidRequestError(f"{where}: a content part must be text, image_url or video_url, found {kind!r}")


def _part_to_json(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    kind = "image_url" if isinstance(part, Image) else "video_url"
    return {"type": kind, kind: {"url": part.url or part.path}}


def _call(value: Any, index: int, where: str) -> ToolCall:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}: tool call {index + 1} has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # A string that is not an object stays as it is: the model's own malformed call of an earlier turn.
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where}: tool call {index + 1}: arguments must be an object or its JSON text")
    return ToolCall(str(value.get("id") or f"call_{index}"), function["name"], arguments)


def _arguments(call: ToolCall) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps(dict(call.arguments), ensure_ascii=False)
