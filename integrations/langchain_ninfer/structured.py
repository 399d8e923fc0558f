"""`with_structured_output`: three methods, each enforced while decoding and parsed afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessageChunk, BaseMessage, message_chunk_to_message
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration
from langchain_core.runnables import AddableDict, Runnable, RunnableConfig, RunnableGenerator
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ValidationError

from ninfer_core.errors import InvalidRequestError

from .errors import translated
from .options import is_json_schema, schema_of, to_tool

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
        if method == "function_calling" and is_json_schema(schema):
            schema = _callable(schema)
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    details = {"method": method} if strict is None else {"method": method, "strict": strict}
    tracing = {"ls_structured_output_format": {"kwargs": details, "schema": schema}} if schema is not None else {}
    parser: Runnable[Any, Any]
    if method == "function_calling":
        with translated():
            name = to_tool(schema)["function"]["name"]
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
        with translated():
            form = _format(schema, strict)
        bound = model.bind(response_format=form, **tracing, **options)
        parser = PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()
    if not include_raw:
        return bound | parser
    return bound | _with_raw(parser)


def _with_raw(parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """A parser that keeps the answer beside what it finds, and hands over its errors.

    Core's own form, a parser with a fallback, catches an error of `invoke` only: in a stream the answer has been passed
    on by then, and the error is raised. It also holds the answer back until it is whole, and a `RunnableMap` around the
    model would drop the options of the call (`reasoning=False`).
    """

    def run(messages: Iterator[Any], config: RunnableConfig) -> Iterator[Any]:
        parts = []
        for message in messages:
            yield AddableDict(raw=message)
            parts.append(message)
        try:
            found = parser.invoke(_whole(parts), config)
        except Exception as error:
            yield AddableDict(parsed=None, parsing_error=error)
        else:
            yield AddableDict(parsed=found, parsing_error=None)

    async def arun(messages: AsyncIterator[Any], config: RunnableConfig) -> AsyncIterator[Any]:
        parts = []
        async for message in messages:
            yield AddableDict(raw=message)
            parts.append(message)
        try:
            found = await parser.ainvoke(_whole(parts), config)
        except Exception as error:
            yield AddableDict(parsed=None, parsing_error=error)
        else:
            yield AddableDict(parsed=found, parsing_error=None)

    # Core gives the config to a function that takes one.
    return RunnableGenerator(run, arun, name="raw_and_parsed")  # type: ignore[arg-type]


def _whole(parts: list[Any]) -> BaseMessage:
    """The message that came whole or in chunks."""
    first, *rest = parts
    return message_chunk_to_message(first + rest if rest else first)


def _format(schema: Any, strict: bool | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    made = schema_of(schema)
    inner: dict[str, Any] = {"name": str(made.get("title", "answer")), "schema": made}
    if strict is not None:
        inner["strict"] = strict
    return {"type": "json_schema", "json_schema": inner}


def _callable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema with what a tool needs: properties, and a title to be its name."""
    if not isinstance(schema.get("properties"), Mapping):
        raise InvalidRequestError(
            "method 'function_calling' needs a schema with properties, since a call has named arguments; use "
            "method='json_schema' for other values",
            param="schema",
        )
    return {"title": "answer", **schema}


def _demanding(parser: BaseOutputParser[Any]) -> Runnable[Any, Any]:
    """A tool parser that fails where the answer has no complete call, instead of returning None."""

    def run(messages: Iterator[Any]) -> Iterator[Any]:
        growing = _Growing(parser)
        for message in messages:
            yield from growing.feed(message)
        yield from growing.end()

    async def arun(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        growing = _Growing(parser)
        async for message in messages:
            for found in growing.feed(message):
                yield found
        for found in growing.end():
            yield found

    return RunnableGenerator(run, arun, name="whole_call")


class _Growing:
    """The object in an answer that is still being made: each value once, and the last one whole."""

    def __init__(self, parser: BaseOutputParser[Any]) -> None:
        self._parser = parser
        self._seen: Any = None
        self._last: Any = None

    def feed(self, message: Any) -> Iterator[Any]:
        """Take a message or the next chunk of one."""
        self._seen = message if self._seen is None else self._seen + message
        if isinstance(message, AIMessageChunk):
            yield from self._new(self._parser.parse_result([ChatGeneration(message=self._seen)], partial=True))

    def end(self) -> Iterator[Any]:
        """The answer is whole."""
        seen = self._seen
        try:
            found = self._parser.parse_result([ChatGeneration(message=seen)])
        except ValidationError as error:
            raise OutputParserException(f"the call does not fit the schema: {error}", llm_output=seen.text) from error
        if found is None:
            reason = seen.response_metadata.get("finish_reason")
            raise OutputParserException(
                f"the answer holds no complete call of the schema (finish_reason {reason!r}); raise max_tokens or use "
                f"include_raw=True to see it. Its text: {seen.text[:200]!r}",
                llm_output=seen.text,
            )
        yield from self._new(found)

    def _new(self, found: Any) -> Iterator[Any]:
        if found is not None and found != self._last:
            self._last = found
            yield found
