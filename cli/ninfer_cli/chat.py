"""The state of an interactive conversation, without any input or output: turns, parameters, undo, save and load."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Message, Part, Request, ResponseFormat, Sampling, Text, Tool

from .effort import EFFORT_BUDGETS
from .inputs import message_from_json, message_to_json, read_json

_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting of generation: how to read it from text, its inclusive limits, and what it does."""

    parse: Callable[[str], Any]
    low: float
    high: float
    help: str
    open_low: bool = False


PARAMETERS: dict[str, Parameter] = {
    "temperature": Parameter(float, 0, 2, "randomness; 0 always takes the likeliest token"),
    "top_p": Parameter(float, 0, 1, "keep the likeliest tokens up to this total probability"),
    "top_k": Parameter(int, -1, math.inf, "keep this many of the likeliest tokens; 0 keeps all"),
    "min_p": Parameter(float, 0, 1, "drop tokens less likely than this share of the likeliest"),
    "presence_penalty": Parameter(float, -2, 2, "against tokens that occurred at all"),
    "frequency_penalty": Parameter(float, -2, 2, "against tokens, by how often they occurred"),
    "repetition_penalty": Parameter(float, 0, 10, "divides the score of earlier tokens; 1 is off", open_low=True),
    "seed": Parameter(int, 0, _SEED_MASK, "same seed, same answer"),
    "max_tokens": Parameter(int, 1, math.inf, "longest answer, in tokens"),
    "thinking_budget": Parameter(int, 0, math.inf, "longest thinking, in tokens; 0 turns it off"),
    "stop": Parameter(str, 0, 0, "end the answer before this text; may be set several times"),
}


def parse_parameter(name: str, text: str) -> Any:
    """The value of a parameter given as text.

    Raises:
        InvalidRequestError: no such parameter, or not a value of it; the message says what is allowed.
    """
    if name not in PARAMETERS:
        from difflib import get_close_matches

        near = get_close_matches(name, PARAMETERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(PARAMETERS)}"
        raise InvalidRequestError(f"unknown parameter {name!r}{hint}", param=name)
    parameter = PARAMETERS[name]
    try:
        value = parameter.parse(text)
    except ValueError:
        kind = "an integer" if parameter.parse is int else "a number"
        raise InvalidRequestError(f"{name} must be {kind}, not {text!r}", param=name) from None
    check_parameter(name, value)
    return value


def check_parameter(name: str, value: Any) -> None:
    """Check a parsed value against the limits of its parameter.

    Raises:
        InvalidRequestError: it lies outside; the message names the limits.
    """
    parameter = PARAMETERS[name]
    if isinstance(value, str):
        if not value:
            raise InvalidRequestError(f"{name} must hold at least one character", param=name)
        return
    above = value > parameter.low if parameter.open_low else value >= parameter.low
    if not (above and value <= parameter.high) or math.isinf(value):
        word = "above" if parameter.open_low else "at least"
        limit = f"{word} {parameter.low:g}" + ("" if parameter.high == math.inf else f" and at most {parameter.high:g}")
        raise InvalidRequestError(f"{name} is {value:g}; it must be {limit}", param=name)


@dataclass(slots=True)
class Settings:
    """What applies to every turn. `thinking` None is the model's default; `parameters` holds only what was set."""

    system: str | None = None
    thinking: bool | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    response_format: ResponseFormat | None = None

    def request(self, messages: tuple[Message, ...]) -> Request:
        """A request of these settings; `system` comes first, before any system message of a file."""
        values = dict(self.parameters)
        stop = values.pop("stop", ())
        max_tokens = values.pop("max_tokens", None)
        budget = values.pop("thinking_budget", None)
        if self.system:
            messages = (Message("system", self.system), *messages)
        return Request(
            messages,
            tools=self.tools,
            sampling=Sampling(**values),
            max_tokens=max_tokens,
            stop=tuple(stop),
            thinking=self.thinking,
            thinking_budget=None if self.thinking is False else budget,
            response_format=self.response_format,
        )

    def think(self, level: str) -> None:
        """Let the model think, up to what a level allows ("" leaves the limit as it is; `high` has none).

        Raises:
            InvalidRequestError: there is no such level.
        """
        word = level.strip().lower()
        if word and word not in EFFORT_BUDGETS:
            raise InvalidRequestError(f"unknown level {level!r}; known: {', '.join(EFFORT_BUDGETS)}", param="think")
        budget = EFFORT_BUDGETS[word] if word else self.parameters.get("thinking_budget")
        self.thinking = budget != 0
        self.parameters.pop("thinking_budget", None)
        if budget:
            self.parameters["thinking_budget"] = budget

    def set(self, name: str, text: str) -> Any:
        """Set a parameter from text (`default` takes it back); returns the value now in force, None for the default.

        Raises:
            InvalidRequestError: as `parse_parameter`.
        """
        if text == "default" and name in PARAMETERS:
            self.parameters.pop(name, None)
            return None
        value = parse_parameter(name, text)
        self.parameters[name] = (*self.parameters.get("stop", ()), value) if name == "stop" else value
        return self.parameters[name]


class Chat:
    """A conversation under some settings. Turns come in pairs: a user message and the answer to it."""

    def __init__(self, settings: Settings, messages: tuple[Message, ...] = ()) -> None:
        self.settings = settings
        self.messages: list[Message] = list(messages)
        self._attached: list[str] = []
        self._shown: list[Part] = []
        self._regenerations = 0

    @property
    def attached(self) -> int:
        """How many texts, images and videos wait to go in front of the next user message."""
        return len(self._attached) + len(self._shown)

    def attach(self, name: str, text: str) -> None:
        """Put a text, under its name, in front of the next user message."""
        self._attached.append(f"{name}:\n```\n{text.rstrip()}\n```\n")

    def show(self, medium: Part) -> None:
        """Put an image or video in front of the next user message."""
        self._shown.append(medium)

    def ask(self, content: str | tuple[Part, ...]) -> Request:
        """The request for a new user message; `answer` or `abandon` must follow."""
        if isinstance(content, str) and not self._shown:
            content = "\n".join([*self._attached, content])
        else:
            parts = (Text(content),) if isinstance(content, str) else content
            content = (*self._shown, *(Text(text + "\n") for text in self._attached), *parts)
        self.messages.append(Message("user", content))
        self._regenerations = 0
        return self.request()

    def request(self) -> Request:
        """The request for the conversation as it stands."""
        request = self.settings.request(tuple(self.messages))
        seed = request.sampling.seed
        if seed is None or not self._regenerations:
            return request
        # A fixed seed would give the same answer again: every repetition takes the next one.
        return replace(request, sampling=replace(request.sampling, seed=(seed + self._regenerations) & _SEED_MASK))

    def answer(self, message: Message) -> None:
        """Store the answer. An interrupted answer of no text at all keeps only the question."""
        self._forget_attached()
        if message.text or message.tool_calls or message.reasoning:
            self.messages.append(message)

    def abandon(self) -> None:
        """Forget the last user message after an error; what was attached waits for the next one."""
        if self.messages and self.messages[-1].role == "user":
            self.messages.pop()

    def regenerate(self) -> Request | None:
        """Drop the last answer and ask again; None if there is nothing to answer."""
        kept = len(self.messages)
        while kept and self.messages[kept - 1].role != "user":
            kept -= 1
        if not kept:
            return None
        del self.messages[kept:]
        self._regenerations += 1
        return self.request()

    def undo(self) -> bool:
        """Drop the last user message and all that followed it; False if there is none."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i].role == "user":
                del self.messages[i:]
                return True
        return False

    def clear(self) -> None:
        """Forget all turns and what was attached; settings stay."""
        self.messages.clear()
        self._forget_attached()

    def _forget_attached(self) -> None:
        self._attached.clear()
        self._shown.clear()

    def save(self, path: Path) -> None:
        """Write the conversation as JSON that `load` and `ninfer run --messages` read; replaces the file as a whole."""
        messages = [message_to_json(message) for message in self.messages]
        if self.settings.system:
            messages.insert(0, {"role": "system", "content": self.settings.system})
        value: dict[str, Any] = {"messages": messages}
        if self.settings.parameters:
            value["parameters"] = {
                name: list(v) if isinstance(v, tuple) else v for name, v in self.settings.parameters.items()
            }
        if self.settings.thinking is not None:
            value["thinking"] = self.settings.thinking
        partial = path.with_name(path.name + ".part")
        try:
            # A conversation is private, like the history file.
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2, ensure_ascii=False)
                file.write("\n")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def load(self, path: Path) -> None:
        """Replace the conversation by a saved one, with its parameters if the file holds any.

        Raises:
            InvalidRequestError: the file is not such a conversation; nothing is changed then.
        """
        value = read_json(path)
        if isinstance(value, list):
            value = {"messages": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("messages"), list):
            raise InvalidRequestError(f"{path} is not a saved conversation: it has no list of messages")
        messages = [message_from_json(item, f"{path}: message {i + 1}") for i, item in enumerate(value["messages"])]
        parameters = _saved_parameters(value.get("parameters", {}), path)
        thinking = value.get("thinking", self.settings.thinking)
        if thinking not in (None, True, False):
            raise InvalidRequestError(f"{path}: thinking must be true or false, not {thinking!r}")
        system = None
        if messages and messages[0].role == "system" and isinstance(messages[0].content, str):
            system = messages.pop(0).text
        self.settings.system, self.settings.thinking = system, thinking
        if "parameters" in value:
            self.settings.parameters = parameters
        self.messages = messages
        self._forget_attached()


def _saved_parameters(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{path}: parameters must be an object")
    result: dict[str, Any] = {}
    for name, item in value.items():
        if name == "stop" and isinstance(item, list):
            result[name] = tuple(parse_parameter(name, str(text)) for text in item)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            result[name] = parse_parameter(name, str(item))
        else:
            raise InvalidRequestError(f"{path}: parameter {name!r} is {item!r}, which is not a value of it")
    return result
