"""`with_structured_output`: three methods, each enforced while decoding and parsed afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessageChunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ValidationError

from ninfer_core.errors import InvalidRequestError

from .errors import translated

if TYPE_CHECKING:
    from .chat_models import ChatNInfer

METHODS = ("json_schema", "function_calling", "json_mode")


def structured(
    model: ChatNInfer, schema: Any, method: str, include_raw: bool, strict: bool | None, options: dict[str, Any]
) -> Runnable[Any, Any]:
    """The runnable behind `ChatNInfer.with_structured_output`; see there."""
    with translated():
        if method not in METHODS:
            raise InvalidRequestError(f"method is {method!r}; it must be one of {', '.join(METHODS)}", param="method")
        if schema is None and method != "json_mode":
            raise InvalidRequestError(f"method {method!r} needs a schema", param="schema")
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    details = {"method": method} if strict is None else {"method": method, "strict": strict}
    tracing = {"ls_structured_output_format": {"kwargs": details, "schema": schema}} if schema is not None else {}
    parser: Runnable[Any, Any]
    if method == "function_calling":
        name = convert_to_openai_tool(schema)["function"]["name"]
        bound = model.bind_tools(
            [schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **tracing, **options
        )
        inner: BaseOutputParser[Any] = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
        parser = _demanding(inner)
    else:
        bound = model.bind(response_format=_format(schema, strict), **tracing, **options)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _format(schema: Any, strict: bool | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    made = convert_to_json_schema(schema)
    inner: dict[str, Any] = {"name": str(made.get("title", "answer")), "schema": made}
    if strict is not None:
        inner["strict"] = strict
    return {"type": "json_schema", "json_schema": inner}


def _demanding(parser: BaseOutputParser[Any]) -> Runnable[Any, Any]:
    """A tool parser that fails where the answer has no complete call, instead of returning None."""

    def partial(seen: Any) -> Any:
        return parser.parse_result([ChatGeneration(message=seen)], partial=True)

    def final(seen: Any) -> Any:
        try:
            found = parser.parse_result([ChatGeneration(message=seen)])
        except ValidationError as error:
            raise OutputParserException(f"the call does not fit the schema: {error}", llm_output=seen.text) from error
        if found is None:
            reason = seen.response_metadata.get("finish_reason")
            raise OutputParserException(
                f"the answer holds no complete call of the schema (finish_reason {reason!r}); raise max_tokens or use "
                f"include_raw=True to see it. Its text: {seen.text[:200]!r}",
                llm_output=seen.text,
            )
        return found

    def run(messages: Iterator[Any]) -> Iterator[Any]:
        seen, last = None, None
        for message in messages:
            seen = message if seen is None else seen + message
            found = partial(seen) if isinstance(message, AIMessageChunk) else None
            if found is not None and found != last:
                last = found
                yield found
        found = final(seen)
        if found != last:
            yield found

    async def arun(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        seen, last = None, None
        async for message in messages:
            seen = message if seen is None else seen + message
            found = partial(seen) if isinstance(message, AIMessageChunk) else None
            if found is not None and found != last:
                last = found
                yield found
        found = final(seen)
        if found != last:
            yield found

    return RunnableGenerator(run, arun)
