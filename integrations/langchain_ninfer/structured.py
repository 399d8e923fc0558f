"""`with_structured_output`: three methods, each enforced while decoding and parsed afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

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
        inner: Runnable[Any, Any] = (
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


def _demanding(parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A tool parser that fails where the answer has no complete call, instead of returning None."""

    def check(result: Any, seen: Any) -> None:
        if result is None:
            message = seen if isinstance(seen, AIMessage) else None
            text = message.text if message is not None else ""
            reason = message.response_metadata.get("finish_reason") if message is not None else None
            raise OutputParserException(
                f"the answer holds no complete call of the schema (finish_reason {reason!r}); raise max_tokens or use "
                f"include_raw=True to see it. Its text: {text[:200]!r}",
                llm_output=text,
            )

    def run(inputs: Iterator[Any]) -> Iterator[Any]:
        seen, result = None, None

        def watched() -> Iterator[Any]:
            nonlocal seen
            for item in inputs:
                seen = item if seen is None else seen + item
                yield item

        for result in parser.transform(watched()):
            if result is not None:
                yield result
        check(result, seen)

    async def arun(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        seen, result = None, None

        async def watched() -> AsyncIterator[Any]:
            nonlocal seen
            async for item in inputs:
                seen = item if seen is None else seen + item
                yield item

        async for result in parser.atransform(watched()):
            if result is not None:
                yield result
        check(result, seen)

    return RunnableGenerator(run, arun)
