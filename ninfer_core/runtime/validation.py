"""Request checks that need no weights, and the sampling parameters with every default filled in. No torch.

Each check names the field (`param`, a path into `Request`), the limit and the value found. What this build cannot
honour is refused here; nothing is dropped silently.
"""

from __future__ import annotations

import math
import reprlib
import secrets
import sys
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError, UnsupportedError
from ..types import Image, Message, Request, ResponseFormat, Sampling, Text, Tool, ToolCall, ToolChoice, Video

MAX_STOP = 16
MAX_LOGPROBS = 20
MAX_DEPTH = 128
MAX_NODES = 100_000
"""Values in one client JSON, counted as often as they would be written: an object shared by many counts each time."""
MAX_INTEGER_BITS = 4096
"""Size of an integer in client JSON; far larger ones cannot even be written in decimal."""
KINDS = ("json", "json_schema", "regex", "grammar", "choice")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling with every value decided. `top_k` 0 is off; `seed` is unsigned 64-bit; `logit_bias` is sorted by id."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def penalized(self) -> bool:
        """Whether any penalty looks at earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def resolve_sampling(sampling: Sampling, defaults: Mapping[str, Any]) -> SamplingParams:
    """Fill what `sampling` leaves open from the model's `defaults`, then from neutral values; draw a seed if None."""

    def pick(name: str, neutral: float) -> Any:
        value = getattr(sampling, name)
        if value is None:
            value = defaults.get(name)
        return neutral if value is None else value

    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed % (1 << 64)
    return SamplingParams(
        temperature=float(pick("temperature", 1.0)),
        top_p=float(pick("top_p", 1.0)),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=float(pick("min_p", 0.0)),
        presence_penalty=float(pick("presence_penalty", 0.0)),
        frequency_penalty=float(pick("frequency_penalty", 0.0)),
        repetition_penalty=float(pick("repetition_penalty", 1.0)),
        logit_bias=tuple(sorted((int(i), float(v)) for i, v in sampling.logit_bias.items())),
        seed=seed,
    )


def check_request(request: Request, *, addressable: int, vision: bool, grammars: bool) -> None:
    """Check every field of a request against a model with `addressable` token ids.

    `vision`: the model can read images; `grammars`: response formats and required tool calls can be enforced.

    Raises:
        InvalidRequestError: a value is wrong; `param` names it.
        UnsupportedError: the value is right but this model or build cannot honour it.
    """
    if not isinstance(request, Request):
        raise InvalidRequestError(f"submit takes a Request, not {type(request).__name__}")
    _check_prompt(request, addressable, vision)
    _check_tools(request, grammars)
    check_sampling(request.sampling, addressable)
    _integer(request.max_tokens, "max_tokens", 1, None)
    _integer(request.thinking_budget, "thinking_budget", 0, None)
    _integer(request.logprobs, "logprobs", 0, MAX_LOGPROBS)
    _integer(request.priority, "priority", None, None, optional=False)
    _number(request.timeout, "timeout", 0.0, math.inf, open_low=True)
    for name in ("thinking", "preserve_thinking"):
        if getattr(request, name) is not None:
            _flag(getattr(request, name), name, "true, false or null")
    for name in ("parallel_tool_calls", "ignore_eos", "continue_final_message", "add_vision_id"):
        _flag(getattr(request, name), name)
    if len(_sequence(request.stop, "stop")) > MAX_STOP:
        raise InvalidRequestError(f"stop holds {len(request.stop)} strings; the limit is {MAX_STOP}", param="stop")
    for i, text in enumerate(request.stop):
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(
                f"stop[{i}] must be a string of at least one character, not {_show(text)}", param="stop"
            )
        _unicode(text, f"stop[{i}]")
    _token_ids(_sequence(request.stop_token_ids, "stop_token_ids"), "stop_token_ids", addressable)
    if request.response_format is not None:
        _check_format(request.response_format)
        if not grammars:
            raise UnsupportedError(
                f"response_format {request.response_format.kind!r} cannot be enforced by this build; leave it out and "
                "ask for the format in the prompt",
                param="response_format",
            )


def check_sampling(sampling: Sampling, addressable: int) -> None:
    """Check the ranges of `Sampling`: see `check_request`."""
    if not isinstance(sampling, Sampling):
        raise InvalidRequestError(f"sampling must be a Sampling, not {type(sampling).__name__}", param="sampling")
    _number(sampling.temperature, "temperature", 0.0, 2.0)
    _number(sampling.top_p, "top_p", 0.0, 1.0)
    _integer(sampling.top_k, "top_k", -1, None)
    _number(sampling.min_p, "min_p", 0.0, 1.0)
    _number(sampling.presence_penalty, "presence_penalty", -2.0, 2.0)
    _number(sampling.frequency_penalty, "frequency_penalty", -2.0, 2.0)
    _number(sampling.repetition_penalty, "repetition_penalty", 0.0, 10.0, open_low=True)
    _integer(sampling.seed, "seed", -(1 << 63), (1 << 64) - 1)
    if not isinstance(sampling.logit_bias, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
    _token_ids(sampling.logit_bias, "logit_bias", addressable)
    for token, value in sampling.logit_bias.items():
        if value is None:
            raise InvalidRequestError(f"logit_bias of token {token} must be a number, not None", param="logit_bias")
        _number(value, "logit_bias", -100.0, 100.0)


def _check_prompt(request: Request, addressable: int, vision: bool) -> None:
    prompt = request.prompt
    if prompt is not None:
        if _sequence(request.messages, "messages"):
            raise InvalidRequestError("give messages or prompt, not both", param="prompt")
        if isinstance(prompt, str):
            _unicode(prompt, "prompt")
        elif not isinstance(prompt, (tuple, list)):
            raise InvalidRequestError(
                f"prompt must be a text or a sequence of token ids, not {type(prompt).__name__}", param="prompt"
            )
        else:
            _token_ids(prompt, "prompt", addressable)
        if not len(prompt):
            raise InvalidRequestError("prompt is empty; it must hold at least one token", param="prompt")
        return
    if not _sequence(request.messages, "messages"):
        raise InvalidRequestError("messages is empty; at least one message is needed", param="messages")
    for i, message in enumerate(request.messages):
        _check_message(message, f"messages[{i}]", vision)


def _check_message(message: Message, where: str, vision: bool) -> None:
    if not isinstance(message, Message):
        raise InvalidRequestError(f"{where} must be a Message, not {type(message).__name__}", param=where)
    if not isinstance(message.role, str) or message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {_show(message.role)}; it must be one of {', '.join(ROLES)}", param=where
        )
    for name in ("reasoning", "tool_call_id", "name"):
        if getattr(message, name) is not None:
            _text(getattr(message, name), f"{where}.{name}")
    for j, call in enumerate(_sequence(message.tool_calls, f"{where}.tool_calls")):
        _check_call(call, f"{where}.tool_calls[{j}]")
    if isinstance(message.content, str):
        _unicode(message.content, f"{where}.content")
        return
    for j, part in enumerate(_sequence(message.content, f"{where}.content")):
        path = f"{where}.content[{j}]"
        if isinstance(part, Text):
            _text(part.text, path)
        elif not isinstance(part, (Image, Video)):
            raise InvalidRequestError(f"{path} must be Text, Image or Video, not {type(part).__name__}", param=path)
        elif not vision:
            raise UnsupportedError(
                f"{path} is {'an image' if isinstance(part, Image) else 'a video'}, but no vision tower is loaded; "
                "send text only, or load a model that has one with vision=True (on the command line --vision)",
                param=path,
            )
        elif sum(x is not None for x in (part.data, part.path, part.url)) != 1:
            raise InvalidRequestError(f"{path} needs exactly one of data, path and url", param=path)


def _check_call(call: ToolCall, where: str) -> None:
    """A call of an earlier turn. Its id may be missing: only the client's own messages refer to it."""
    if not isinstance(call, ToolCall):
        raise InvalidRequestError(f"{where} must be a ToolCall, not {type(call).__name__}", param=where)
    if call.id is not None:
        _text(call.id, f"{where}.id")
    _text(call.name, f"{where}.name")
    if isinstance(call.arguments, str):
        _unicode(call.arguments, f"{where}.arguments")
    else:
        _check_json(_mapping(call.arguments, f"{where}.arguments"), f"{where}.arguments")


def _check_tools(request: Request, grammars: bool) -> None:
    names: set[str] = set()
    for i, tool in enumerate(_sequence(request.tools, "tools")):
        where = f"tools[{i}]"
        if not isinstance(tool, Tool):
            raise InvalidRequestError(f"{where} must be a Tool, not {type(tool).__name__}", param=where)
        _check_tool_name(tool.name, f"{where}.name", names)
        _text(tool.description, f"{where}.description")
        _check_json(_mapping(tool.parameters, f"{where}.parameters"), f"{where}.parameters")
        _flag(tool.strict, f"{where}.strict")
        if tool.raw is not None:
            _check_json(_mapping(tool.raw, f"{where}.raw"), f"{where}.raw")
        names.add(tool.name)
    _check_choice(request.tool_choice, names, grammars)


def _check_tool_name(name: str, param: str, taken: Collection[str]) -> None:
    """A name must survive its way through `<function=NAME>` in the model's output, and mean one tool."""
    _text(name, param)
    if not name:
        raise InvalidRequestError(f"{param} is empty; a tool needs a name", param=param)
    if name != name.strip() or any(c in "<>" or unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in name):
        raise InvalidRequestError(
            f"{param} is {_show(name)}; it must not hold '<', '>', line breaks or control characters, nor begin or end "
            "with a blank",
            param=param,
        )
    if name in taken:
        raise InvalidRequestError(f"{param} is {_show(name)}, the name of an earlier tool; rename one", param=param)


def _check_choice(choice: ToolChoice, names: Collection[str], grammars: bool) -> None:
    if not isinstance(choice, ToolChoice):
        raise InvalidRequestError(f"tool_choice must be a ToolChoice, not {type(choice).__name__}", param="tool_choice")
    if not isinstance(choice.mode, str) or choice.mode not in ("none", "auto", "required"):
        raise InvalidRequestError(
            f"tool_choice is {_show(choice.mode)}; it must be none, auto or required", param="tool_choice"
        )
    if not isinstance(choice.names, (tuple, list)):
        raise InvalidRequestError(
            f"tool_choice.names must be a sequence of names, not {_show(choice.names)}", param="tool_choice"
        )
    for name in choice.names:
        if not isinstance(name, str) or name not in names:
            raise InvalidRequestError(
                f"tool_choice names {_show(name)}, which is not among the tools {sorted(names)}", param="tool_choice"
            )
    if choice.mode == "required":
        if not names:
            raise InvalidRequestError("tool_choice is 'required' but the request has no tools", param="tool_choice")
        if not grammars:
            what = f"the tool {choice.names[0]!r}" if choice.names else "a call"
            raise UnsupportedError(
                f"tool_choice asks to force {what}, which this build cannot enforce; use 'auto' or 'none'",
                param="tool_choice",
            )


def _check_format(form: ResponseFormat) -> None:
    """The form of a `ResponseFormat`; whether its schema or grammar compiles is found out later."""
    if not isinstance(form, ResponseFormat) or not isinstance(form.kind, str) or form.kind not in KINDS:
        what = _show(form.kind) if isinstance(form, ResponseFormat) else type(form).__name__
        raise InvalidRequestError(
            f"response_format is {what}; its kind must be one of {', '.join(KINDS)}", param="response_format"
        )
    _flag(form.strict, "response_format.strict")
    if form.pattern is not None:
        _text(form.pattern, "response_format.pattern")
    for i, text in enumerate(_sequence(form.choices, "response_format.choices")):
        _text(text, f"response_format.choices[{i}]")
    if form.schema is not None or form.kind == "json_schema":
        if not isinstance(form.schema, (Mapping, bool)):
            raise InvalidRequestError(
                f"response_format.schema must be a JSON schema, not {type(form.schema).__name__}",
                param="response_format.schema",
            )
        _check_json(form.schema, "response_format.schema")
    if form.kind in ("regex", "grammar") and not form.pattern:
        raise InvalidRequestError(
            f"response_format of kind {form.kind} needs a pattern", param="response_format.pattern"
        )
    if form.kind == "choice" and not all(form.choices or ("",)):
        raise InvalidRequestError(
            "response_format of kind choice needs at least one text, none of them empty",
            param="response_format.choices",
        )


def _check_json(value: Any, param: str) -> None:
    """Client JSON must be JSON, and bounded: no recursive renderer may overflow the stack or write without end."""
    level: list[Any] = [value]
    nodes = 1
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, (Mapping, list, tuple)):
                nodes += len(item)
                if nodes > MAX_NODES:
                    raise InvalidRequestError(f"{param} holds more than {MAX_NODES} values; shorten it", param=param)
                below.extend(_children(item, param))
            else:
                _check_leaf(item, param)
        if not below:
            return
        level = below
    raise InvalidRequestError(f"{param} is nested deeper than {MAX_DEPTH} levels; flatten it", param=param)


def _children(item: Mapping[Any, Any] | Sequence[Any], param: str) -> Iterable[Any]:
    if not isinstance(item, Mapping):
        return item
    for key in item:
        if not isinstance(key, str):
            raise InvalidRequestError(f"{param} holds the key {_show(key)}; keys of JSON are strings", param=param)
        _unicode(key, param)
    return item.values()


def _check_leaf(item: Any, param: str) -> None:
    if isinstance(item, str):
        _unicode(item, param)
    elif isinstance(item, float):
        if not math.isfinite(item):
            raise InvalidRequestError(f"{param} holds {item}, which is not JSON", param=param)
    elif isinstance(item, int):
        if item.bit_length() > MAX_INTEGER_BITS:
            raise InvalidRequestError(
                f"{param} holds an integer of {item.bit_length()} bits; the limit is {MAX_INTEGER_BITS}", param=param
            )
    elif item is not None:
        raise InvalidRequestError(f"{param} holds a {type(item).__name__}, which is not JSON", param=param)


def _show(value: Any) -> str:
    """A short form of any value for a message: never long, never an error of its own."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        return _SHORT.repr(value)
    except Exception:
        return f"a {type(value).__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def _flag(value: Any, param: str, allowed: str = "true or false") -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{param} must be {allowed}, not {_show(value)}", param=param)


def _mapping(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{param} must be a JSON object, not {type(value).__name__}", param=param)
    return value


def _sequence(value: Any, param: str) -> Sequence[Any]:
    if not isinstance(value, (tuple, list)):
        raise InvalidRequestError(f"{param} must be a sequence, not {type(value).__name__}", param=param)
    return value


def _text(value: Any, param: str) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{param} must be a string, not {type(value).__name__}", param=param)
    _unicode(value, param)


def _unicode(value: str, param: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate at character {error.start}, which is not valid Unicode", param=param
        ) from None


def _token_ids(ids: Iterable[Any], param: str, addressable: int) -> None:
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < addressable:
            raise InvalidRequestError(
                f"{param}: {_show(token)} is not a token id of this model (integers 0 to {addressable - 1})",
                param=param,
            )


def _number(value: Any, param: str, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{param} must be a number, not {_show(value)}", param=param)
    if not (low < value if open_low else low <= value) or not value <= min(high, sys.float_info.max):
        span = f"greater than {low:g}" if open_low else f"at least {low:g}"
        limit = f"{span} and finite" if high == math.inf else f"{span} and at most {high:g}"
        raise InvalidRequestError(f"{param} is {_show(value)}; it must be {limit}", param=param)


def _integer(value: Any, param: str, low: int | None, high: int | None, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{param} must be an integer, not {_show(value)}", param=param)
    if (low is not None and value < low) or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{param} is {_show(value)}; it must be {limit}", param=param)
