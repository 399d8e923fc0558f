"""Health, metrics and the llama.cpp-style endpoints: properties, slots, tokenising, the template."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from ninfer_core import __version__
from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Request

from . import page
from .answer import documented, readable
from .body import read_request
from .common import thinking_of
from .context import Server
from .errors import HttpError
from .metrics import CONTENT_TYPE
from .openai_messages import to_messages, to_tools
from .schemas import ApplyTemplateRequest, DetokenizeRequest, TokenizeRequest
from .wire import JsonResponse


def _health(server: Server) -> JsonResponse:
    state = server.host.state
    if state == "idle" or (state == "ready" and server.engine.health().get("status") == "ok"):
        return JsonResponse({"status": "ok"})
    if state in ("new", "loading"):
        error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        return JsonResponse({"status": "loading", "error": error}, status_code=503, headers={"Retry-After": "2"})
    if state == "ready":  # it was asked to find out whether a token can be made
        state = server.engine.health()["status"]
    return JsonResponse({"status": str(state)}, status_code=503)


def _health_routes(routes: APIRouter, server: Server) -> None:
    @readable(routes, "/")
    async def root(http: HttpRequest) -> Response:
        """The chat page for browsers, for everyone else what Ollama's clients look for."""
        return page.root(http.headers)

    @readable(routes, *page.FILES)
    async def page_file(http: HttpRequest) -> Response:
        """A file of the chat page."""
        return page.page_file(http.url.path)

    @readable(routes, "/health", "/v1/health", "/healthz")
    async def health() -> JsonResponse:
        """200 when a token can be made, else 503: `loading`, `checking`, `restarting`, `stalled` or `failed`."""
        return _health(server)

    @readable(routes, "/ready", "/readyz")
    async def ready() -> JsonResponse:
        """Like health, and 503 during shutdown."""
        if server.stopping:
            return JsonResponse({"status": "stopping"}, status_code=503)
        return _health(server)

    @readable(routes, "/ping")
    async def ping() -> PlainTextResponse:
        """The process answers."""
        return PlainTextResponse("pong")

    @routes.get("/version", **documented())
    async def version() -> JsonResponse:
        """The engine's version."""
        return JsonResponse({"version": __version__})

    @routes.get("/load", **documented())
    async def load() -> JsonResponse:
        """How many requests run or wait."""
        return JsonResponse({"server_load": server.fairness.in_flight})

    @routes.get("/metrics", **documented())
    async def metrics() -> Response:
        """Prometheus exposition."""
        return Response(server.metrics.render(), media_type=CONTENT_TYPE)


def _property_routes(routes: APIRouter, server: Server) -> None:
    @routes.get("/props", **documented())
    async def props() -> JsonResponse:
        """The loaded model and its window."""
        card = server.card
        return JsonResponse(
            {
                "default_generation_settings": {"n_ctx": card.context_length},
                "n_ctx": card.context_length,
                "total_slots": server.settings.slots,
                "model_alias": card.name,
                "chat_template": server.template,
                "modalities": {"vision": card.vision, "audio": False, "video": card.video},
                "build_info": f"ninfer {__version__}",
                "is_sleeping": server.host.state == "idle",
            }
        )

    @routes.get("/slots", **documented())
    async def slots() -> JsonResponse:
        """One entry per place; which request sits where is nobody's business."""
        running = int(server.metrics.gauges()["num_requests_running"])
        window = server.card.context_length
        entries = [{"id": i, "n_ctx": window, "is_processing": i < running} for i in range(server.settings.slots)]
        return JsonResponse(entries)


def _token_routes(routes: APIRouter, server: Server) -> None:
    limit = server.settings.max_body_bytes

    @routes.post("/tokenize", **documented(TokenizeRequest))
    @routes.post("/v1/tokenize", **documented(TokenizeRequest))
    async def tokenize(http: HttpRequest) -> JsonResponse:
        """Token ids of raw text, or of messages through the template."""
        body = await read_request(http, TokenizeRequest, limit)
        target = await server.use(http, body.model)

        def work() -> list[int]:
            if body.messages:
                messages, tools = to_messages(body.messages, server.media), to_tools(body.tools)[0]
                request = target.filled(Request(messages, tools=tools, **thinking_of(body)))
                return list(server.engine.frontend.prepare(request).token_ids)
            text = body.content if body.content is not None else body.prompt
            if text is None:
                raise InvalidRequestError("content is missing; send content, prompt or messages", param="content")
            return list(server.tokenizer.encode(text))

        ids = await asyncio.to_thread(work)
        tokens: list[Any] = ids
        if body.with_pieces:
            tokens = [{"id": i, "piece": _piece(server.tokenizer.token_bytes(i))} for i in ids]
        return JsonResponse({"tokens": tokens, "count": len(ids), "max_model_len": server.card.context_length})

    @routes.post("/detokenize", **documented(DetokenizeRequest))
    @routes.post("/v1/detokenize", **documented(DetokenizeRequest))
    async def detokenize(http: HttpRequest) -> JsonResponse:
        """The text of token ids."""
        body = await read_request(http, DetokenizeRequest, limit)
        await server.use(http, body.model)
        addressable = server.tokenizer.addressable
        for i, token in enumerate(body.tokens):
            if not 0 <= token < addressable:
                raise InvalidRequestError(
                    f"tokens[{i}] is {token}; this model has ids 0 to {addressable - 1}", param=f"tokens[{i}]"
                )
        text = server.tokenizer.decode(body.tokens)
        return JsonResponse({"content": text, "prompt": text})

    @routes.post("/apply-template", **documented(ApplyTemplateRequest))
    async def apply_template(http: HttpRequest) -> JsonResponse:
        """The prompt text of messages."""
        body = await read_request(http, ApplyTemplateRequest, limit)
        target = await server.use(http, body.model)
        messages, tools = to_messages(body.messages, server.media), to_tools(body.tools)[0]
        request = target.filled(Request(messages, tools=tools, **thinking_of(body)))
        return JsonResponse({"prompt": await asyncio.to_thread(server.engine.frontend.render, request)})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def router(server: Server) -> APIRouter:
    """All routes of this module."""
    routes = APIRouter(tags=["server"])
    _health_routes(routes, server)
    _property_routes(routes, server)
    _token_routes(routes, server)

    @routes.post("/v1/embeddings", **documented())
    async def embeddings() -> JsonResponse:
        """These models do not embed; a clear refusal instead of a missing path."""
        raise HttpError(
            400, "embeddings are not supported: ninfer serves generative models only", code="unsupported_endpoint",
            headers={"x-should-retry": "false"},
        )  # fmt: skip

    return routes
