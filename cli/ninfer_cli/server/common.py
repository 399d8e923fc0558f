"""Conversions that several APIs share: thinking options, sampling, constraints, tools and tool arguments, ids."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_core.errors import InvalidRequestError, UnsupportedError
from ninfer_core.types import ResponseFormat, Sampling, Tool, ToolChoice

from ..effort import effort_budget
from .schemas import GuidedFields, SamplingFields, ThinkingFields


def new_id(prefix: str) -> str:
    """A unique id such as `chatcmpl-4f...`: 96 random bits."""
    return prefix + secrets.token_hex(12)


def thinking_of(fields: ThinkingFields) -> dict[str, Any]:
    """`thinking`, `thinking_budget`, `preserve_thinking` of a request from all the ways to say them.

    The most explicit one wins: template options, then flags, then the thinking object, then the effort.
    """
    options: dict[str, Any] = {}
    effort = fields.reasoning_effort
    if effort is None and fields.reasoning and isinstance(fields.reasoning.get("effort"), str):
        effort = fields.reasoning["effort"]
    if effort is not None:
        apply_budget(options, effort_budget(effort))
    if fields.reasoning and isinstance(fields.reasoning.get("enabled"), bool):
        options["thinking"] = fields.reasoning["enabled"]
    if isinstance(fields.thinking, bool):
        options["thinking"] = fields.thinking
    elif fields.thinking is not None:
        apply_thinking_object(options, fields.thinking)
    if fields.enable_thinking is not None:
        options["thinking"] = fields.enable_thinking
    for name in ("thinking_budget", "reasoning_budget"):
        budget = getattr(fields, name)
        if budget is not None:
            options["thinking_budget"] = budget if budget >= 0 else None
    if fields.preserve_thinking is not None:
        options["preserve_thinking"] = fields.preserve_thinking
    for name, field_name in (("enable_thinking", "thinking"), ("preserve_thinking", "preserve_thinking")):
        value = (fields.chat_template_kwargs or {}).get(name)
        if value is not None:
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be true or false", param=f"chat_template_kwargs.{name}")
            options[field_name] = value
    if options.get("thinking") is False:
        options.pop("thinking_budget", None)
    return options


def apply_budget(options: dict[str, Any], budget: int | None) -> None:
    """Set thinking from a budget: 0 turns it off."""
    options["thinking"] = budget != 0
    if budget:
        options["thinking_budget"] = budget


def apply_thinking_object(options: dict[str, Any], thinking: Mapping[str, Any]) -> None:
    """Anthropic's form: `{"type": "enabled", "budget_tokens": N}`, `disabled`, `adaptive`, ..."""
    kind = thinking.get("type")
    if not isinstance(kind, str):
        raise InvalidRequestError("thinking.type must be a string such as enabled or disabled", param="thinking.type")
    options["thinking"] = kind != "disabled"
    budget = thinking.get("budget_tokens")
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise InvalidRequestError(
                f"thinking.budget_tokens must be a whole number of at least 0, not {budget!r}",
                param="thinking.budget_tokens",
            )
        if kind == "enabled":
            options["thinking_budget"] = budget


def sampling_of(fields: SamplingFields, index: int = 0) -> Sampling:
    """Sampling of choice `index`: with a seed, each choice gets its own, and choice 0 the given one."""
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=None if fields.top_k is None else max(0, fields.top_k),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=logit_bias_of(fields.logit_bias),
        seed=None if fields.seed is None else fields.seed + index,
    )


def logit_bias_of(bias: Mapping[str, float] | None) -> dict[int, float]:
    """Token ids are JSON object keys, so texts of digits."""
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit():
            raise InvalidRequestError(f"logit_bias keys must be token ids, found {key[:40]!r}", param="logit_bias")
        result[int(key)] = value
    return result


def stop_of(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    """Stop strings as a tuple."""
    items = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not item for item in items):
        raise InvalidRequestError(f"{param} may not hold an empty string", param=param)
    return items


def limit_of(value: int | None, param: str) -> int | None:
    """A token limit: null and -1 mean "to the end of the window"."""
    if value is None or value == -1:
        return None
    if value < 1:
        raise InvalidRequestError(f"{param} is {value}; it must be at least 1 (or -1 for no limit)", param=param)
    return value


def format_of(value: Mapping[str, Any] | None) -> ResponseFormat | None:
    """`response_format` of the chat interface."""
    if value is None:
        return None
    kind = value.get("type")
    if kind in ("text", None):
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return (
            ResponseFormat("json_schema", schema, strict=False) if isinstance(schema, dict) else ResponseFormat("json")
        )
    if kind == "json_schema":
        inner = value.get("json_schema", value if "schema" in value else None)
        return schema_format(inner, "response_format.json_schema")
    raise InvalidRequestError(
        f"response_format.type is {str(kind)[:40]!r}; it must be text, json_object or json_schema",
        param="response_format.type",
    )


def schema_format(value: Any, param: str) -> ResponseFormat:
    """The `{name, schema, strict}` object of a JSON schema format."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be an object with a schema", param=param)
    schema = value.get("schema")
    if schema is None:
        return ResponseFormat("json")
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"{param}.schema must be a JSON schema", param=f"{param}.schema")
    return ResponseFormat("json_schema", schema, strict=value.get("strict") is not False)


def guided_of(fields: GuidedFields, given: ResponseFormat | None) -> ResponseFormat | None:
    """The constraint of a request; two different ones at once are refused."""
    found: list[tuple[str, ResponseFormat]] = [("response_format", given)] if given else []
    extra = dict(fields.structured_outputs or {})
    sources = {
        "guided_json": fields.guided_json if fields.guided_json is not None else extra.get("json"),
        "guided_regex": fields.guided_regex or extra.get("regex"),
        "guided_choice": fields.guided_choice or extra.get("choice"),
        "guided_grammar": fields.guided_grammar or fields.grammar or extra.get("grammar"),
        "json_schema": fields.json_schema,
    }
    unknown = set(extra) - {"json", "regex", "choice", "grammar"}
    if unknown:
        name = f"structured_outputs.{sorted(unknown)[0]}"
        raise UnsupportedError(f"{name} is not supported; use json, regex, choice or grammar", param=name)
    for name, value in sources.items():
        if value is not None and value != []:
            found.append((name, _guided(name, value)))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequestError(f"{names} were both given; an answer can have one form", param=found[1][0])
    return found[0][1] if found else None


def constraint_name(fields: GuidedFields) -> str:
    """The field in which a client gave its constraint."""
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "json_schema")
    given = (name for name in (*names, "structured_outputs") if getattr(fields, name))
    return next(given, "response_format")


def _guided(name: str, value: Any) -> ResponseFormat:
    if name == "guided_regex":
        return ResponseFormat("regex", pattern=str(value))
    if name == "guided_grammar":
        return ResponseFormat("grammar", pattern=str(value))
    if name == "guided_choice":
        return ResponseFormat("choice", choices=tuple(map(str, value)))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name} is not JSON", param=name) from error
    if not isinstance(value, (dict, bool)):
        raise InvalidRequestError(f"{name} must be a JSON schema", param=name)
    return ResponseFormat("json_schema", value)


def arguments_of(value: Any) -> Mapping[str, Any] | str:
    """Tool arguments of an earlier turn: an object where the text is one, else the text as the model wrote it."""
    if value is None:
        return {}
    if isinstance(value, str):
        if not value.strip():
            return {}
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if parsed is None:
            return {}
        return parsed if isinstance(parsed, dict) else value
    if isinstance(value, dict):
        return value
    return json.dumps(value, ensure_ascii=False)


def function_tool(value: Mapping[str, Any], param: str, *, raw: Mapping[str, Any] | None = None) -> Tool:
    """A tool from the `{name, description, parameters, strict}` object of a function."""
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{param}.name must be a non-empty string", param=f"{param}.name")
    description = value.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{param}.description must be a string", param=f"{param}.description")
    parameters = value.get("parameters", value.get("input_schema"))
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidRequestError(f"{param}.parameters must be a JSON schema object", param=f"{param}.parameters")
    return Tool(name, description or "", parameters, strict=value.get("strict") is True, raw=raw)


def custom_tool(value: Mapping[str, Any], param: str) -> Tool:
    """A free-form tool becomes a function with one string; its grammar is told in words, as a hint."""
    description = str(value.get("description") or "")
    form = value.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    if isinstance(form, dict) and isinstance(form.get("grammar"), dict):
        grammar = form["grammar"].get("definition")
    if isinstance(grammar, str):
        description += f"\n\nThe input must follow this grammar:\n{grammar}"
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The whole input of the tool."}},
        "required": ["input"],
    }
    return function_tool(
        {"name": value.get("name"), "description": description.strip(), "parameters": parameters}, param
    )


def left_out(items: Sequence[Mapping[str, Any]] | None, known: tuple[str | None, ...]) -> list[str]:
    """The kinds of tools that nobody here can run; they are left out, and the answer's header and the log say so."""
    return [str(item.get("type"))[:60] for item in items or () if item.get("type") not in known]


def unique_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Two tools of one name cannot be told apart in a call."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequestError(f"tools holds {tool.name!r} twice; names must differ", param="tools")
        seen.add(tool.name)
    return tuple(tools)


def restrict(tools: tuple[Tool, ...], choice: ToolChoice) -> tuple[tuple[Tool, ...], ToolChoice]:
    """`auto` limited to some tools: the model sees only those, which enforces the limit."""
    if choice.mode != "auto" or not choice.names:
        return tools, choice
    missing = set(choice.names) - {tool.name for tool in tools}
    if missing:
        raise InvalidRequestError(
            f"tool_choice names {sorted(missing)[0]!r}, which is not among the tools", param="tool_choice"
        )
    return tuple(tool for tool in tools if tool.name in choice.names), ToolChoice("auto")


def call_id(value: str, prefix: str) -> str:
    """An engine's call id in an API's own form (`call_...`, `toolu_...`)."""
    if value.startswith(prefix):
        return value
    return prefix + (value.partition("_")[2] or value)
