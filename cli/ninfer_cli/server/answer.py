"""The last step of every generating endpoint: a streamed or a whole answer, and how it is documented."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.errors import NinferError
from ninfer_core.types import Completion, Request

from .context import Server
from .generation import EncodedStream, Encoder, collect, start
from .wire import JsonResponse, StreamResponse

Handler = Callable[..., Awaitable[Response]]


async def respond(
    server: Server,
    http: HttpRequest,
    requests: Sequence[Request],
    *,
    encoder: Encoder | None,
    complete: Callable[[list[Completion]], dict[str, Any]],
    choices: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Response:
    """Run the requests and answer: through `encoder` as they go, or with `complete`'s object at the end.

    Errors before the first byte are raised and keep their HTTP status; `names` maps fields of the neutral request to
    the API's own, so that an error names what the client wrote.
    """
    record = http.scope["state"]["record"]
    try:
        generation = await start(server, http, requests, choices)
    except NinferError as error:
        error.param = own_name(error.param, names or {})
        raise
    headers = {}
    if record.dropped:
        headers["X-Ninfer-Warning"] = "tools left out: " + ", ".join(sorted(map(_header_text, record.dropped)))
    if encoder is None:
        completions = await collect(http, generation)
        return JsonResponse(complete(completions), headers=headers)
    if hasattr(encoder, "prompt_tokens"):
        encoder.prompt_tokens = generation.prompt_tokens
    return StreamResponse(
        encoder.start(),
        EncodedStream(generation, encoder),
        media_type=encoder.media_type,
        heartbeat=encoder.heartbeat,
        interval=server.settings.heartbeat,
        stall_timeout=server.settings.stall_timeout,
        headers=headers,
    )


def own_name(param: str | None, names: Mapping[str, str]) -> str | None:
    """A field path of the neutral request in an API's own words; a list that is built anew loses its indices."""
    for name, own in names.items():
        if param is not None and (param == name or param.startswith((name + ".", name + "["))):
            return own
    return param


def _header_text(text: str) -> str:
    return "".join(c for c in text if c.isascii() and c.isprintable())


_STATUSES = {
    400: "The request is wrong; `param` says where.",
    401: "A key is needed or wrong.",
    403: "Host or origin refused.",
    404: "Unknown model or path.",
    405: "Wrong method.",
    413: "The body is too large.",
    415: "Unknown content encoding.",
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
