"""Reads one tool call as the model writes it, from `<function=NAME>` to its end, into fragments of JSON arguments.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value may contain any of these tags as text. A closing tag counts only if what follows it could follow it in a call;
an opening tag inside a value (the closing one was forgotten) counts only at the start of a line and if it makes sense
there. Everything is decided on the text alone, so the split into tokens cannot matter.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .tools import STRING, ToolSet, dumps

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAGS = (CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

NAME_LIMIT = 256
"""Characters of a function or parameter name, and of the blanks before one; longer is not a call."""

_AFTER_VALUE = (PARAMETER, FUNCTION_END, CALL_END, CALL, FUNCTION)
_INSIDE = (PARAMETER, FUNCTION_END)
_AFTER_FUNCTION = (CALL_END, CALL, FUNCTION)
_BLANKS = " \t\r\n"
_BLANK_RUN = re.compile(f"[{_BLANKS}]*")

MORE = -1
"""Position meaning: the text so far does not decide it."""

NO = -2
"""Position meaning: not there."""


def skip_blanks(text: str, at: int) -> int:
    """The first position from `at` that is not a blank."""
    found = _BLANK_RUN.match(text, at)
    return found.end() if found else at


def is_partial(text: str, at: int, tags: tuple[str, ...]) -> bool:
    """Whether `text` from `at` on is a proper beginning of one of `tags`."""
    rest = text[at : at + 16]
    return len(text) - at < 16 and any(len(rest) < len(tag) and tag.startswith(rest) for tag in tags)


def _name(text: str, at: int, tag: str) -> tuple[int, str]:
    """The name in `tag` NAME `>` at `at`: (end, name), or (MORE, "") or (NO, "")."""
    start = at + len(tag)
    end = text.find(">", start, start + NAME_LIMIT + 1)
    name = text[start : end if end >= 0 else start + NAME_LIMIT + 1]
    if "\n" in name or "<" in name or len(name) > NAME_LIMIT or (end >= 0 and not name.strip(_BLANKS)):
        return NO, ""
    return (MORE, "") if end < 0 else (end + 1, name.strip(_BLANKS))


def header(text: str, at: int) -> tuple[int, str]:
    """The opening of a call at `at`, with or without `<tool_call>`: (end, function name), or (MORE | NO, "")."""
    if text.startswith(CALL, at):
        after = at + len(CALL)
        at = skip_blanks(text, after)
        if at - after > NAME_LIMIT:
            return NO, ""
        if at == len(text) or is_partial(text, at, (FUNCTION,)):
            return MORE, ""
    return _name(text, at, FUNCTION) if text.startswith(FUNCTION, at) else (NO, "")


def surely(text: str, at: int, tools: ToolSet) -> tuple[int, str]:
    """`header`, if it names one of `tools` and the inside of a call follows: for places where prose is as likely."""
    end, name = header(text, at)
    if end < 0:
        return end, ""
    inside = _followed(text, end, _INSIDE, eof=False) if name in tools else NO
    return (inside, "") if inside < 0 else (end, name)


def _followed(text: str, at: int, tags: tuple[str, ...], eof: bool) -> int:
    """Where one of `tags` starts after blanks from `at` (the end of the output also counts), or MORE or NO."""
    at = skip_blanks(text, at)
    if at == len(text) or is_partial(text, at, tags):
        return at if eof else MORE
    return at if text.startswith(tags, at) else NO


class OpenCall:
    """One call being read. Feed it through `step`, close it with `end`.

    Attributes:
        done: the function was closed; the text from there on is not the call's.
        values: the arguments so far, in order of first appearance.
    """

    def __init__(self, name: str, tools: ToolSet) -> None:
        self.name = name
        self.done = False
        self.values: dict[str, Any] = {}
        self._tools = tools
        self._known = tools.parameters(name)
        self._key: str | None = None
        self._streamed = False
        self._fresh = False
        self._raw: list[str] = []
        self._stray: list[str] = []

    def step(self, text: str, eof: bool = False) -> tuple[int, str]:
        """Read as much of `text` as is decided: (characters used, argument fragment).

        Args:
            text: what follows the characters used so far.
            eof: nothing follows `text`.
        """
        at, waiting = 0, False
        out: list[str] = []
        while not self.done and not waiting:
            before = at
            at, waiting = self._body(text, at, eof, out) if self._key is None else self._value(text, at, eof, out)
            waiting = waiting or (at == before and at == len(text))
        return at, "".join(out)

    def end(self, complete: bool) -> str:
        """The last fragment. An open argument is kept if the call is `complete` or it was streamed already."""
        out: list[str] = []
        if self._key is not None:
            if self._streamed or complete:
                self._close(out)
            self._key = None
        if not self.values:
            found = self._object() if complete else {}
            self.values = found
            out.append(dumps(found))
        else:
            out.append("}")
        return "".join(out)

    def _object(self) -> dict[str, Any]:
        """Arguments that the model wrote as a JSON object instead of parameters."""
        try:
            found = json.loads("".join(self._stray))
            dumps(found)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _body(self, text: str, at: int, eof: bool, out: list[str]) -> tuple[int, bool]:
        """Between parameters: the new position and whether more text is needed."""
        at = skip_blanks(text, at)
        if at == len(text):
            return at, True
        if text.startswith(PARAMETER, at):
            end, key = _name(text, at, PARAMETER)
            if end >= 0:
                self._open(key, out)
                return end, False
            if end == MORE and not eof:
                return at, True
        elif text.startswith(FUNCTION_END, at):
            self.done = True
            return at + len(FUNCTION_END), False
        elif text.startswith(CALL_END, at):
            self.done = True
            return at, False
        elif text.startswith((CALL, FUNCTION), at):
            end, _ = header(text, at)
            if end == MORE and not eof:
                return at, True
            if end >= 0:
                self.done = True
                return at, False
        elif is_partial(text, at, TAGS):
            return (len(text), True) if eof else (at, True)
        end = text.find("<", at + 1)
        end = len(text) if end < 0 else end
        self._stray.append(text[at:end])
        return end, False

    def _open(self, key: str, out: list[str]) -> None:
        self._key = key
        self._raw = []
        self._fresh = True
        self._streamed = self._tools.types(self.name, key) == STRING
        if self._streamed:
            out.append(self._lead(key) + '"')
            self.values.setdefault(key, "")

    def _lead(self, key: str) -> str:
        return ("{" if not self.values else ", ") + dumps(key) + ": "

    def _take(self, text: str, out: list[str]) -> None:
        if text:
            self._fresh = False
            self._raw.append(text)
            if self._streamed:
                out.append(dumps(text)[1:-1])

    def _close(self, out: list[str]) -> None:
        key, text = self._key, "".join(self._raw)
        assert key is not None
        if self._streamed:
            self.values[key] = text
            out.append('"')
        else:
            value = self._tools.value(self.name, key, text)
            try:
                written = dumps(value)
            except ValueError:
                value, written = text, dumps(text)
            out.append(self._lead(key) + written)
            self.values[key] = json.loads(written) if isinstance(value, dict | list) else value
        self._key = None

    def _value(self, text: str, at: int, eof: bool, out: list[str]) -> tuple[int, bool]:
        """Inside a value: the new position and whether more text is needed."""
        if self._fresh and not self._raw:
            if at == len(text):
                return at, True
            if text[at] == "\n":
                at += 1
            self._raw.append("")
        scan = at
        while (i := text.find("<", scan)) >= 0:
            line = text[i - 1] == "\n" if i > at else self._fresh
            end = self._terminator(text, i, line, eof)
            if end == NO:
                scan = i + 1
                continue
            stop = i - 1 if i > at and text[i - 1] == "\n" else i
            self._take(text[at:stop], out)
            if end == MORE:
                return stop, True
            self._close(out)
            return end, False
        stop = len(text) - 1 if len(text) > at and text[-1] == "\n" else len(text)
        self._take(text[at:stop], out)
        return stop, True

    def _terminator(self, text: str, i: int, line: bool, eof: bool) -> int:
        """If the tag at `i` ends the value: the position after what it consumes. Else MORE or NO.

        `line`: the tag starts a line.
        """
        if text.startswith(PARAMETER_END, i):
            return _followed(text, i + len(PARAMETER_END), _AFTER_VALUE, eof)
        if text.startswith(FUNCTION_END, i):
            end = _followed(text, i + len(FUNCTION_END), _AFTER_FUNCTION, eof)
            return i if end >= 0 else end
        if text.startswith(CALL_END, i):
            end = _followed(text, i + len(CALL_END), (CALL,), eof)
            return i if end >= 0 else end
        if text.startswith(PARAMETER, i):
            end, key = _name(text, i, PARAMETER) if line else (NO, "")
            new = key not in self.values and key != self._key and (key in self._known or not self._known)
            return self._opening(i, end, new, eof)
        if text.startswith((CALL, FUNCTION), i):
            end, name = header(text, i) if line else (NO, "")
            if end >= 0 and name in self._tools:
                end = _followed(text, end, _INSIDE, eof)
            return self._opening(i, end, name in self._tools, eof)
        if is_partial(text, i, TAGS):
            return MORE if not eof else len(text) if line and len(text) - i > 1 else NO
        return NO

    @staticmethod
    def _opening(i: int, end: int, sensible: bool, eof: bool) -> int:
        """The verdict on an opening tag inside a value."""
        if end == MORE:
            return i if eof else MORE
        return i if end >= 0 and sensible else NO
