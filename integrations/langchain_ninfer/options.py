"""Call options of `ChatNInfer` to a neutral request: sampling, tools, tool choice, the answer's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from ninfer_core.adapter import own_options, tool_choice_of
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
_ALIASES = {"model_name": "model", "stop_sequences": "stop", "max_completion_tokens": "max_tokens"}


def to_tool(value: Any, strict: bool | None = None) -> dict[str, Any]:
    """A tool of any kind that LangChain knows, as an OpenAI tool.

    Raises:
        UnsupportedError: a tool that a provider runs on its own servers.
    """
    made = convert_to_openai_tool(value, strict=strict)
    if made.get("type") != "function" or not isinstance(made.get("function"), Mapping):
        raise UnsupportedError(
            f"tools: {str(made.get('type'))[:40]!r} is a tool of a provider's own servers; give a function, a tool "
            "object or a schema",
            param="tools",
        )
    return made


def _neutral_tool(value: Any) -> Tool:
    made = value if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping) else to_tool(value)
    function = made["function"]
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
            return ResponseFormat("json") if schema is None else ResponseFormat("json_schema", dict(schema))
        if kind == "json_schema":
            inner = value.get("json_schema", value)
            schema = inner.get("schema")
            if not isinstance(schema, Mapping | bool):
                raise InvalidRequestError("response_format.json_schema.schema is missing", param="response_format")
            return ResponseFormat("json_schema", schema, strict=inner.get("strict") is not False)
    try:
        return ResponseFormat("json_schema", convert_to_json_schema(value))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequestError(
            f"response_format must be a schema or an OpenAI response_format, not {str(value)[:80]!r}: {error}",
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
    tools = tuple(_neutral_tool(tool) for tool in options.get("tools") or ())
    stop = options.get("stop") or ()
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
            **{name: options.get(name) for name in SAMPLING}, logit_bias=dict(options.get("logit_bias") or {})
        ),
        max_tokens=options.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        thinking=options.get("reasoning"),
        thinking_budget=options.get("reasoning_budget"),
        preserve_thinking=options.get("preserve_reasoning"),
        logprobs=(top or 0) if logprobs or top is not None else None,
        priority=options.get("priority") or 0,
        timeout=options.get("timeout"),
    )
