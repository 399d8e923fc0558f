"""Call options of `NInfer` to a neutral request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.tools.types import BaseTool
from pydantic import BaseModel

from ninfer_core.adapter import closed, copied_mapping, format_of_envelope, stop_strings, tool_choice_of, tool_list
from ninfer_core.errors import InvalidRequestError
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
FIELDS = (*SAMPLING, "max_tokens", "stop", "thinking", "thinking_budget", "preserve_thinking", "timeout")
"""Fields of the LLM that a call may override by keyword."""
CALL_ONLY = (
    "model",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "logprobs",
    "logit_bias",
    "priority",
)
ALIASES = {
    "model_name": "model",
    "allow_parallel_tool_calls": "parallel_tool_calls",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}


def response_format_of(value: Any) -> ResponseFormat | None:
    """The form of an answer: a Pydantic class, a JSON schema, OpenAI's envelope, or a `ResponseFormat`.

    Raises:
        InvalidRequestError: neither of these.
    """
    if value is None or isinstance(value, ResponseFormat):
        return value
    if isinstance(value, type) and issubclass(value, BaseModel):
        return ResponseFormat("json_schema", closed(value.model_json_schema()))
    if isinstance(value, Mapping):
        kind = value.get("type")
        if kind == "text":
            return None
        if kind == "json_object" and "properties" not in value:
            return ResponseFormat("json")
        if kind == "json_schema":
            return format_of_envelope(value)
        return ResponseFormat("json_schema", closed(value))
    raise InvalidRequestError(
        f"response_format must be a Pydantic class, a JSON schema or an OpenAI response_format, not {value!r}",
        param="response_format",
    )


def build_request(messages: Sequence[Message], prompt: str | None, options: Mapping[str, Any]) -> Request:
    """A request from messages (or a raw prompt) and complete options."""
    tools = tuple(_tool(spec) for spec in tool_list(options.get("tools")))
    logprobs = options.get("logprobs")
    return Request(
        messages=tuple(messages),
        prompt=prompt,
        tools=tools,
        tool_choice=tool_choice_of(options.get("tool_choice"), [tool.name for tool in tools]),
        parallel_tool_calls=options.get("parallel_tool_calls") is not False,
        response_format=response_format_of(options.get("response_format")),
        sampling=Sampling(
            **{name: options.get(name) for name in SAMPLING}, logit_bias=copied_mapping(options.get("logit_bias") or {})
        ),
        max_tokens=options.get("max_tokens"),
        stop=stop_strings(options.get("stop")),
        thinking=options.get("thinking") if prompt is None else None,
        thinking_budget=options.get("thinking_budget") if prompt is None else None,
        preserve_thinking=options.get("preserve_thinking"),
        logprobs=(0 if logprobs else None) if isinstance(logprobs, bool) else logprobs,
        priority=options.get("priority") or 0,
        timeout=options.get("timeout"),
    )


def tool_body(tool: Any) -> Mapping[str, Any]:
    """A tool object of LlamaIndex as an OpenAI tool; one in that form already stays as it is.

    Raises:
        InvalidRequestError: neither of these, or a tool without a name.
    """
    spec = tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool
    function = spec.get("function") if isinstance(spec, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"tools: {str(tool)[:80]!r} is no tool; give a tool object of LlamaIndex or an OpenAI function with a name",
            param="tools",
        )
    return spec  # type: ignore[no-any-return]


def _tool(tool: Any) -> Tool:
    spec = tool_body(tool)
    function = spec["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function["name"], function.get("description") or "", parameters, raw=dict(spec))
