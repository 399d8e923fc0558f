"""Requests of the responses interface as the neutral form: input items, tools with namespaces, text formats."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ninfer_core.errors import InvalidRequestError, UnsupportedError
from ninfer_core.types import Message, Part, Request, ResponseFormat, Role, Tool, ToolCall, ToolChoice

from ..effort import effort_budget
from .common import (
    apply_budget,
    arguments_of,
    custom_tool,
    function_tool,
    limit_of,
    restrict,
    sampling_of,
    schema_format,
    stop_of,
    unique_tools,
)
from .context import Server
from .errors import HttpError
from .media import MediaReader
from .openai_messages import content_of, to_choice
from .schemas import ResponsesRequest

TOOL_KINDS = ("function", "custom", "namespace")
_ROLES = ("user", "assistant", "system", "developer")
# Marks reasoning that this server wrote into `encrypted_content`; anything else there is opaque to us.
REASONING_TAG = "ninfer-reasoning-1:"


@dataclass(slots=True)
class ToolSet:
    """The tools of a request and how their names map back to the client's own."""

    tools: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)


def to_tools(items: Sequence[Mapping[str, Any]] | None) -> ToolSet:
    """Functions, free-form tools and namespaces of functions; without those of kinds that are not in `TOOL_KINDS`."""
    result = ToolSet()
    tools: list[Tool] = []
    custom: set[str] = set()
    for i, item in enumerate(items or ()):
        path, kind = f"tools[{i}]", item.get("type")
        if kind == "function":
            tools.append(function_tool(item, path))
        elif kind == "custom":
            tools.append(custom_tool(item, path))
            custom.add(tools[-1].name)
        elif kind == "namespace":
            tools += _namespace(item, path, result, custom)
    result.tools, result.custom = unique_tools(tools), frozenset(custom)
    return result


def _namespace(item: Mapping[str, Any], path: str, result: ToolSet, custom: set[str]) -> list[Tool]:
    space, members = item.get("name"), item.get("tools")
    if not isinstance(space, str) or not space or not isinstance(members, list):
        raise InvalidRequestError(f"{path} needs a name and a list of tools", param=path)
    tools = []
    for j, member in enumerate(members):
        if not isinstance(member, dict):
            raise InvalidRequestError(f"{path}.tools[{j}] must be an object", param=f"{path}.tools[{j}]")
        make = custom_tool if member.get("type") == "custom" else function_tool
        plain = make(member, f"{path}.tools[{j}]")
        flat = f"{space}.{plain.name}"
        tools.append(Tool(flat, plain.description, plain.parameters, plain.strict))
        result.namespaces[flat] = (space, plain.name)
        if member.get("type") == "custom":
            custom.add(flat)
    return tools


def to_request(
    body: ResponsesRequest, server: Server, history: Sequence[Mapping[str, Any]] = ()
) -> tuple[Request, ToolSet]:
    """The neutral request; `history` holds the items of an earlier, stored response."""
    for name in ("background", "conversation", "prompt"):
        if getattr(body, name):
            raise UnsupportedError(f"{name} is not supported by this server; leave it out", param=name)
    toolset = to_tools(body.tools)
    tools, choice = restrict(toolset.tools, _choice(body, toolset))
    items = [*history, *input_items(body.input)]
    if not items:
        raise InvalidRequestError("input is an empty list; it must hold an item, or be a text", param="input")
    messages = to_messages(items, body.instructions, server.media)
    options: dict[str, Any] = {}
    if body.reasoning and body.reasoning.effort is not None:
        apply_budget(options, effort_budget(body.reasoning.effort))
    request = Request(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_text_format(body.text),
        sampling=sampling_of(body),
        max_tokens=limit_of(body.max_output_tokens, "max_output_tokens"),
        stop=stop_of(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs(body),
        **options,
    )
    return request, toolset


def _choice(body: ResponsesRequest, toolset: ToolSet) -> ToolChoice:
    choice = to_choice(body.tool_choice)
    flat = {name: key for key, (_, name) in toolset.namespaces.items()}
    known = {tool.name for tool in toolset.tools}
    if isinstance(body.tool_choice, dict) and isinstance(body.tool_choice.get("namespace"), str):
        return ToolChoice(choice.mode, tuple(f"{body.tool_choice['namespace']}.{name}" for name in choice.names))
    return ToolChoice(choice.mode, tuple(name if name in known else flat.get(name, name) for name in choice.names))


def _text_format(text: Mapping[str, Any] | None) -> ResponseFormat | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidRequestError("text.format must be an object with a type", param="text.format")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json")
    if kind == "json_schema":
        return schema_format(form, "text.format")
    raise InvalidRequestError(
        f"text.format.type is {str(kind)[:40]!r}; it must be text, json_object or json_schema", param="text.format.type"
    )


def _logprobs(body: ResponsesRequest) -> int | None:
    wanted = "message.output_text.logprobs" in (body.include or ())
    if body.top_logprobs is not None and (wanted or body.top_logprobs > 0):
        return body.top_logprobs
    return 0 if wanted else None


def input_items(value: str | Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """The input as a list of items; a request without any is an empty user turn, as the official client may send."""
    if value is None or isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value or ""}]
    return list(value)


def is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item only names another one; clients may leave its type out."""
    return item.get("type") == "item_reference" or (item.get("type") is None and set(item) - {"type"} == {"id"})


def to_messages(
    items: Sequence[Mapping[str, Any]], instructions: str | None, media: MediaReader
) -> tuple[Message, ...]:
    """Messages from items; what one assistant turn consists of is gathered again into one message."""
    turns = _Turns(media)
    if instructions:
        turns.messages.append(Message("system", instructions))
    for i, item in enumerate(items):
        turns.add(item, f"input[{i}]")
    turns.flush()
    return tuple(turns.messages)


class _Turns:
    """Collects items into messages."""

    def __init__(self, media: MediaReader) -> None:
        self.media = media
        self.messages: list[Message] = []
        self._reasoning: str | None = None
        self._content: str | tuple[Part, ...] = ""
        self._calls: list[ToolCall] = []
        self._open = False

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            if self._open and (self._content or self._calls):
                self.flush()
            self._reasoning, self._open = reasoning_text(item), True
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, where, kind)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self.flush()
            content, _ = content_of(_output(item, where), f"{where}.output", self.media)
            self.messages.append(Message("tool", content, tool_call_id=_text(item, "call_id", where)))
        elif is_reference(item):
            raise HttpError(
                400, f"{where} refers to an item that this server does not keep; send the item itself",
                code="previous_response_not_found", param=where,
            )  # fmt: skip
        # Items of hosted tools and kinds made after this server are skipped: they are not part of the dialogue.

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequestError(
                f"{where}.role is {str(role)[:40]!r}; it must be one of {', '.join(_ROLES)}", param=f"{where}.role"
            )
        value = item.get("content")
        if isinstance(value, list) and not all(isinstance(part, dict) for part in value):
            raise InvalidRequestError(f"{where}.content must hold objects", param=f"{where}.content")
        if not isinstance(value, (str, list)) and not (value is None and role == "assistant"):
            raise InvalidRequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
        content, reasoning = content_of(value, f"{where}.content", self.media)
        if role != "assistant":
            self.flush()
            self.messages.append(Message(cast(Role, role), content))
            return
        if self._open and (self._content or self._calls):
            self.flush()
        self._content, self._open = content, True
        self._reasoning = self._reasoning or reasoning

    def _call(self, item: Mapping[str, Any], where: str, kind: str) -> None:
        name = _text(item, "name", where)
        space = item.get("namespace")
        if isinstance(space, str) and space:
            name = f"{space}.{name}"
        if kind == "custom_tool_call":
            arguments: Mapping[str, Any] | str = {"input": item.get("input", "")}
        else:
            arguments = arguments_of(item.get("arguments"))
        self._calls.append(ToolCall(_text(item, "call_id", where), name, arguments))
        self._open = True

    def flush(self) -> None:
        """End the assistant turn being gathered."""
        if self._open and (self._content or self._calls or self._reasoning):
            self.messages.append(
                Message("assistant", self._content, reasoning=self._reasoning, tool_calls=tuple(self._calls))
            )
        self._reasoning, self._content, self._calls, self._open = None, "", [], False


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{where}.{name} must be a non-empty string", param=f"{where}.{name}")
    return value


def _output(item: Mapping[str, Any], where: str) -> str | list[Mapping[str, Any]]:
    output = item.get("output")
    if output is None:
        return ""
    if isinstance(output, list) and all(isinstance(part, dict) for part in output):
        return output
    if isinstance(output, str):
        return output
    raise InvalidRequestError(f"{where}.output must be a string or a list of parts", param=f"{where}.output")


def reasoning_text(item: Mapping[str, Any]) -> str | None:
    """The thought of a reasoning item: its content, else what we put into `encrypted_content`, else the summary."""
    for name in ("content", "summary"):
        if name == "summary":
            sealed = unseal(item.get("encrypted_content"))
            if sealed:
                return sealed
        parts = item.get(name)
        if isinstance(parts, list):
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            joined = "\n\n".join(text for text in texts if isinstance(text, str) and text)
            if joined:
                return joined
    return None


def seal(text: str) -> str:
    """Reasoning as self-describing text for `encrypted_content`."""
    return REASONING_TAG + base64.b64encode(text.encode()).decode()


def unseal(value: Any) -> str | None:
    """The reasoning of `seal`; None for anything that is not ours."""
    if not isinstance(value, str) or not value.startswith(REASONING_TAG):
        return None
    try:
        return base64.b64decode(value[len(REASONING_TAG) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return None
