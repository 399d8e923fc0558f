"""The last steps of every generating endpoint: its model, then a streamed or a whole answer; and the documentation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.errors import NinferError
from ninfer_core.types import Completion, Request

from .context import RequestRecord, Server, Target
from .errors import body_of, fault_of
from .generation import EncodedStream, Encoder, Generation, collect, start
from .wire import SSE, SSE_COMMENT, JsonResponse, StreamResponse, sse

Handler = Callable[..., Awaitable[Response]]


@dataclass(slots=True)
class Prepared:
    """What an API makes of a request: to be streamed through `encoder`, or told at the end with `complete`'s object.

    `choices` is the number of requests per prompt; None means that all share one. `names` maps fields of the neutral
    request to the API's own, so that an error names what the client wrote.
    """

    requests: Sequence[Request]
    encoder: Encoder | None
    complete: Callable[[list[Completion]], dict[str, Any]]
    choices: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


Prepare = Callable[[Target], Awaitable[Prepared]]
"""Makes the request of a model that is loaded; what its preset adds comes afterwards."""


def _event(error: BaseException, request_id: str) -> bytes:
    return sse(body_of(fault_of(error), "openai", request_id))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stream whose model is not loaded yet: how it is kept alive, and how it says that this failed."""

    media_type: str = SSE
    heartbeat: Callable[[RequestRecord], bytes] = lambda _: SSE_COMMENT
    error: Callable[[BaseException, str], bytes] = _event


async def answer(
    server: Server,
    http: HttpRequest,
    asked: str | None,
    prepare: Prepare,
    waiting: Waiting | None,
    keep_alive: float | str | None = None,
) -> Response:
    """Have the model loaded, run what `prepare` makes of the request and answer; `waiting` None is a whole answer.

    Errors before the first byte are raised and keep their HTTP status. Where the model must be loaded or switched
    first, a stream begins at once and is kept alive meanwhile; a later error is told inside it.
    """
    target = await server.target(http, asked, keep_alive)
    record: RequestRecord = http.scope["state"]["record"]
    record.stream = waiting is not None
    if waiting is not None and server.host.waits_for(target.key):
        settings = server.settings
        beat = waiting.heartbeat(record)
        return StreamResponse(
            beat, _LateStream(server, http, target, prepare, waiting), media_type=waiting.media_type, heartbeat=beat,
            interval=settings.heartbeat, stall_timeout=settings.stall_timeout, headers=_warning(record),
        )  # fmt: skip
    await server.lease(http, target)
    return await _respond(server, http, await prepare(target), target)


async def _start(server: Server, http: HttpRequest, prepared: Prepared, target: Target) -> Generation:
    each = prepared.choices or len(prepared.requests)
    try:
        requests = [target.filled(request, i % each) for i, request in enumerate(prepared.requests)]
        generation = await start(server, http, requests, prepared.choices)
    except NinferError as error:
        error.param = own_name(error.param, prepared.names)
        raise
    encoder = prepared.encoder
    if encoder is not None and hasattr(encoder, "prompt_tokens"):
        encoder.prompt_tokens = generation.prompt_tokens
    return generation


@dataclass(slots=True)
class _LateStream:
    """Waits for the model, then plays the answer: the source of a `StreamResponse` that has begun before."""

    server: Server
    http: HttpRequest
    target: Target
    prepare: Prepare
    waiting: Waiting
    stream: EncodedStream | None = None

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """The whole stream of the API, or its error."""
        record: RequestRecord = self.http.scope["state"]["record"]
        encoder: Encoder | None = None
        try:
            await self.server.lease(self.http, self.target, watch=False)
            prepared = await self.prepare(self.target)
            encoder = prepared.encoder
            assert encoder is not None
            self.stream = EncodedStream(await _start(self.server, self.http, prepared, self.target), encoder)
        except Exception as error:
            record.fail(error)
            if encoder is None:
                yield self.waiting.error(error, record.request_id)
            else:
                yield encoder.start() + encoder.error(error)
            return
        yield encoder.start()
        async with contextlib.aclosing(self.stream.blocks()) as blocks:
            async for block in blocks:
                yield block

    def close(self, reason: str) -> None:
        """End the generation, if there is one."""
        record: RequestRecord = self.http.scope["state"]["record"]
        if self.stream is not None:
            self.stream.close(reason)
        else:
            record.outcome = "error" if record.error and reason == "done" else reason


async def _respond(server: Server, http: HttpRequest, prepared: Prepared, target: Target) -> Response:
    record: RequestRecord = http.scope["state"]["record"]
    generation = await _start(server, http, prepared, target)
    encoder = prepared.encoder
    if encoder is None:
        return JsonResponse(prepared.complete(await collect(http, generation)), headers=_warning(record))
    return StreamResponse(
        encoder.start(),
        EncodedStream(generation, encoder),
        media_type=encoder.media_type,
        heartbeat=encoder.heartbeat,
        interval=server.settings.heartbeat,
        stall_timeout=server.settings.stall_timeout,
        headers=_warning(record),
    )


def own_name(param: str | None, names: Mapping[str, str]) -> str | None:
    """A field path of the neutral request in an API's own words; a list that is built anew loses its indices."""
    for name, own in names.items():
        if param is not None and (param == name or param.startswith((name + ".", name + "["))):
            return own
    return param


def _warning(record: RequestRecord) -> dict[str, str]:
    """The header that tells which kinds of tools were left out, if any."""
    if not record.dropped:
        return {}
    return {"X-Ninfer-Warning": "tools left out: " + ", ".join(sorted(map(_header_text, record.dropped)))}


def _header_text(text: str) -> str:
    return "".join(c for c in text if c.isascii() and c.isprintable())


_STATUSES = {
    400: "The request is wrong; `param` says where.",
    401: "A key is needed or wrong.",
    403: "Host or origin refused.",
    404: "Unknown model or path.",
    405: "Wrong method.",
    408: "The rest of the body did not come.",
    413: "The body is too large.",
    415: "Unknown content encoding.",
    429: "This client has too many requests in flight; see Retry-After.",
    500: "A fault of the server.",
    503: "The queue is full or the model is loading; see Retry-After.",
    529: "The same on Anthropic's paths.",
}


@functools.cache
def documented(model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Route arguments: bodies are read by our own code, so the schema is told to the documentation separately."""
    responses: dict[int | str, dict[str, Any]] = {code: {"description": text} for code, text in _STATUSES.items()}
    options: dict[str, Any] = {"responses": responses}
    if model is not None:
        schema = model.model_json_schema()
        content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
        options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return options


def readable(routes: APIRouter, *paths: str) -> Callable[[Handler], Handler]:
    """A decorator that answers GET and HEAD under each path; only GET is documented."""

    def add(handler: Handler) -> Handler:
        for path in paths:
            routes.add_api_route(path, handler, methods=["GET"], **documented())
            routes.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        return handler

    return add


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its definitions in place; none of ours is recursive."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    reference = node.get("$ref")
    if isinstance(reference, str):
        return _inlined(definitions[reference.rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
