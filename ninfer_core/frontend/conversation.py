"""The messages of a request, made fit for the chat template.

The template is strict (one system message, in front; arguments as mappings; at least one user query), clients are not.
What it would refuse is rendered through a stand-in that it accepts, and the stand-in is replaced in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ..errors import InvalidRequestError
from ..types import Image, Message, Part, Request, Text, ToolCall, Video
from .tokenizer import replace_surrogates

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
SYSTEM = IM_START + "system\n"
ROLES = ("system", "developer", "user", "assistant", "tool")

MARK = "\ufdd0"
"""A noncharacter that no input keeps (it becomes U+FFFD), so what carries it is ours."""

OPEN = f"{MARK}c{MARK}"
"""Where an assistant message is to be continued."""

_STOOD_IN = re.compile(f"{MARK}([sq])([0-9]*){MARK}")
_VERBATIM = re.compile(f"<parameter={MARK}>\n{MARK}([0-9]+){MARK}\n</parameter>\n")


class Conversation:
    """The messages of a request in the form the template takes, and what was put in their place."""

    def __init__(self, request: Request, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self.systems: list[str] = []
        self.verbatim: list[str] = []
        self.media: list[Image | Video] = []
        messages = list(request.messages)
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one message", param="messages")
        for i, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidRequestError(
                    f"messages[{i}].role is {message.role!r}; it must be one of {', '.join(ROLES)}", param="messages"
                )
        first = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
        if first < len(messages) and messages[first].role == "tool":
            raise InvalidRequestError(
                f"messages[{first}] is a tool result with no call before it; put the assistant's tool_calls first",
                param="messages",
            )
        self.messages: list[dict[str, Any]] = []
        if first:
            texts = [self._system(messages[i], i) for i in range(first)]
            self.messages.append({"role": "system", "content": "\n\n".join(text for text in texts if text.strip())})
        if not any(map(_is_query, messages)):
            self.messages.append({"role": "user", "content": f"{MARK}q{MARK}"})
        for i in range(first, len(messages)):
            self.messages.append(self._message(messages[i], i))

    def _system(self, message: Message, i: int) -> str:
        if not isinstance(message.content, str) and any(not isinstance(part, Text) for part in message.content):
            raise InvalidRequestError(f"messages[{i}]: a system message can hold text only", param="messages")
        return self._clean(message.text)

    def _message(self, message: Message, i: int) -> dict[str, Any]:
        if message.role in ("system", "developer"):
            # Not a query for the template, so reasoning before it stays as it was.
            self.systems.append(self._system(message, i).strip())
            return {"role": "user", "content": f"<tool_response>{MARK}s{len(self.systems) - 1}{MARK}</tool_response>"}
        trusted = message.role == "assistant"
        made: dict[str, Any] = {"role": message.role, "content": self._content(message.content, i, trusted)}
        if trusted:
            if message.reasoning is not None:
                made["reasoning_content"] = unmark(message.reasoning)
            if message.tool_calls:
                made["tool_calls"] = [self._call(call, i) for call in message.tool_calls]
        return made

    def _content(self, content: str | tuple[Part, ...], i: int, trusted: bool) -> str | list[dict[str, Any]]:
        clean = unmark if trusted else self._clean
        if isinstance(content, str):
            return clean(content)
        parts: list[dict[str, Any]] = []
        for part in content:
            if isinstance(part, Text):
                parts.append({"type": "text", "text": clean(part.text)})
            elif isinstance(part, Image | Video):
                # The mark behind it tells this placeholder from one that a user typed.
                self.media.append(part)
                parts += [
                    {"type": "image" if isinstance(part, Image) else "video"},
                    {"type": "text", "text": MARK},
                ]
            else:
                raise InvalidRequestError(
                    f"messages[{i}].content holds a {type(part).__name__}; parts are Text, Image or Video",
                    param="messages",
                )
        return parts

    def _call(self, call: ToolCall, i: int) -> dict[str, Any]:
        if not isinstance(call.name, str) or not call.name:
            raise InvalidRequestError(f"messages[{i}]: a tool call has no function name", param="messages")
        arguments: Any = call.arguments
        if isinstance(arguments, str):
            parsed = parse_arguments(arguments)
            if parsed is None:
                self.verbatim.append(self._clean(arguments))
                arguments = {MARK: f"{MARK}{len(self.verbatim) - 1}{MARK}"}
                return {"type": "function", "function": {"name": self._clean(call.name), "arguments": arguments}}
            arguments = parsed
        values = {
            self._clean(str(key)): self._clean(value) if isinstance(value, str) else value
            for key, value in (arguments or {}).items()
        }
        return {"type": "function", "function": {"name": self._clean(call.name), "arguments": values}}

    def leave_open(self, message: Message) -> bool:
        """Mark where the final assistant message is to be continued; True if that is inside its think block."""
        if message.role != "assistant" or message.tool_calls:
            raise InvalidRequestError(
                "continue_final_message needs an assistant message without tool calls at the end", param="messages"
            )
        made = self.messages[-1]
        if message.reasoning is not None and not message.content:
            made["reasoning_content"] = message.reasoning + OPEN
            return True
        if isinstance(made["content"], str):
            made["content"] += OPEN
        else:
            made["content"].append({"type": "text", "text": OPEN})
        return False

    def put_back(self, text: str) -> str:
        """Replace the turns that stand in for late system messages and a missing query, and unparsable arguments."""
        if self.verbatim:
            text = _VERBATIM.sub(lambda match: self.verbatim[int(match.group(1))] + "\n", text)
        pieces: list[str] = []
        done = seen = 0
        for match in _STOOD_IN.finditer(text):
            start = text.rfind(IM_START, done, match.start())
            end = text.find(IM_END, match.end())
            if start < 0 or end < 0:
                raise InvalidRequestError("the chat template cannot print a late system message", param="messages")
            end += len(IM_END)
            end += text.startswith("\n", end)
            pieces.append(text[done:start])
            if match.group(1) == "s":
                pieces.append(f"{SYSTEM}{self.systems[int(match.group(2))]}{IM_END}\n")
                seen += 1
            done = end
        if seen != len(self.systems):
            raise InvalidRequestError("the chat template cannot print a late system message", param="messages")
        return "".join([*pieces, text[done:]])


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The arguments in a JSON string; `""` and `"null"` are none; None if it is not an object."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return {} if found is None else found if isinstance(found, dict) else None


def _is_query(message: Message) -> bool:
    """Whether the template takes this message for the user's question."""
    text = message.text.strip() if message.role == "user" else ""
    return message.role == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def unmark(text: str) -> str:
    """Text from outside without lone surrogates and without marks of ours."""
    return replace_surrogates(text).replace(MARK, "\ufffd")
