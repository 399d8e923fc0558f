"""Call options of `ChatNInfer` to a neutral request: sampling, tools, tool choice, the answer's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from ninfer_core.adapter import (
    closed,
    copied_mapping,
    format_of_envelope,
    own_options,
    stop_strings,
    tool_choice_of,
    tool_list,
)
from ninfer_core.errors import InvalidRequestError, UnsupportedError
from ninfer_core.types import Message, Request, ResponseFormat, Sampling, Tool

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
FIELDS = (
    *SAMPLING,
    "max_tokens",
    "stop",
    "logprobs",
    "top_logprobs",
    "reasoning",
    "reasoning_budget",
    "preserve_reasoning",
    "parallel_tool_calls",
    "timeout",
)
"""Fields of the model that a call may override by keyword."""
CALL_ONLY = ("model", "tools", "tool_choice", "response_format", "priority", "logit_bias", "stream")
_KEYWORDS = {"type", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_FUNCTION = {"name", "function", "input_schema", "toolSpec"}
_ALIASES = {"model_name": "model", "stop_sequences": "stop", "max_completion_tokens": "max_tokens"}


def to_tool(value: Any, strict: bool | None = None) -> dict[str, Any]:
    """A tool of any kind that LangChain knows, as an OpenAI tool.

    Raises:
        InvalidRequestError: no tool at all, or one without a name.
        UnsupportedError: a tool that a provider runs on its own servers.
    """
    try:
        made = convert_to_openai_tool(value, strict=strict)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(
            f"tools: {str(value)[:80]!r} is no tool; give a function, a tool object, a class or a schema with a name "
            f"({type(error).__name__}: {str(error)[:200]})",
            param="tools",
        ) from error
    if made.get("type") != "function" or not isinstance(made.get("function"), Mapping):
        raise UnsupportedError(
            f"tools: {str(made.get('type'))[:40]!r} is a tool of a provider's own servers; give a function, a tool "
            "object or a schema",
            param="tools",
        )
    return _named(made)


def _named(tool: Mapping[str, Any]) -> Any:
    if not isinstance(tool["function"].get("name"), str):
        raise InvalidRequestError(f"tools: {str(tool)[:80]!r} has no function name", param="tools")
    return tool


def _neutral_tool(value: Any) -> Tool:
    made = value if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping) else to_tool(value)
    function = _named(made)["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    strict = function.get("strict") is True
    return Tool(function["name"], function.get("description") or "", parameters, strict=strict, raw=dict(made))


def response_format_of(value: Any) -> ResponseFormat | None:
    """The form of an answer: OpenAI's envelope, a schema of any kind that LangChain knows, or a `ResponseFormat`.

    Raises:
        InvalidRequestError: neither of these.
    """
    if value is None or isinstance(value, ResponseFormat):
        return value
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            schema = value.get("schema")
            return ResponseFormat("json") if schema is None else ResponseFormat("json_schema", closed(schema))
        if kind == "json_schema":
            return format_of_envelope(value)
    return ResponseFormat("json_schema", closed(schema_of(value)))


def is_json_schema(value: Any) -> bool:
    """Whether it is a JSON schema, and not a function or tool in the form of some provider."""
    return isinstance(value, Mapping) and bool(_KEYWORDS & set(value)) and not _FUNCTION & set(value)


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema of any kind of schema that LangChain knows.

    A JSON schema is taken as it is: core wants a title of it, and keeps nothing of one without properties.

    Raises:
        InvalidRequestError: no schema.
    """
    if is_json_schema(value):
        return dict(value)
    try:
        return convert_to_json_schema(value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequestError(
            f"{str(value)[:80]!r} is no schema; give a Pydantic class, a TypedDict, a JSON schema or an OpenAI "
            f"function ({type(error).__name__}: {str(error)[:200]})",
            param="response_format",
        ) from error


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Call options by their own names.

    Raises:
        TypeError: an unknown one, with the nearest known.
    """
    return own_options(options, (*FIELDS, *CALL_ONLY), _ALIASES)


def build_request(messages: Sequence[Message], options: Mapping[str, Any]) -> Request:
    """A request from messages and complete options (the model's fields and those of the call)."""
    tools = tuple(_neutral_tool(tool) for tool in tool_list(options.get("tools")))
    logprobs = options.get("logprobs")
    top = options.get("top_logprobs")
    if top is not None and logprobs is False:
        raise InvalidRequestError("top_logprobs needs logprobs=True", param="top_logprobs")
    return Request(
        messages=tuple(messages),
        tools=tools,
        tool_choice=tool_choice_of(options.get("tool_choice"), [tool.name for tool in tools]),
        parallel_tool_calls=options.get("parallel_tool_calls") is not False,
        response_format=response_format_of(options.get("response_format")),
        sampling=Sampling(
            **{name: options.get(name) for name in SAMPLING}, logit_bias=copied_mapping(options.get("logit_bias") or {})
        ),
        max_tokens=options.get("max_tokens"),
        stop=stop_strings(options.get("stop")),
        thinking=options.get("reasoning"),
        thinking_budget=options.get("reasoning_budget"),
        preserve_thinking=options.get("preserve_reasoning"),
        logprobs=(top or 0) if logprobs or top is not None else None,
        priority=options.get("priority") or 0,
        timeout=options.get("timeout"),
    )
