"""Ollama's model management endpoints over the models on disk, and clear refusals for what two models do not need."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core import __version__
from ninfer_core.errors import InvalidRequestError, ModelNotFoundError
from ninfer_core.store import ModelEntry, describe, installed

from .answer import documented, readable
from .body import read_body, read_request
from .context import Server, normal_name
from .errors import HttpError
from .models import ModelCard, rfc3339
from .schemas import OllamaCopyRequest, OllamaNameRequest
from .wire import NDJSON, JsonResponse, ndjson

# Clients refuse servers that report an older version than the features they use.
OLLAMA_VERSION = "0.13.5"


def details(card: ModelCard) -> dict[str, Any]:
    """What the model lists say about the loaded model."""
    return {
        "parent_model": "",
        "format": "ninfer",
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
        "context_length": card.context_length,
    }


def tag(server: Server, name: str) -> dict[str, Any]:
    """A served name in `/api/tags`."""
    card = server.card
    return {
        "name": name,
        "model": name,
        "modified_at": card.modified_at,
        "size": card.size,
        "digest": card.digest,
        "details": details(card),
        "capabilities": card.capabilities,
    }


def show(server: Server) -> dict[str, Any]:
    """`/api/show` of the loaded model; several clients decide by exactly these fields what it can do."""
    card = server.card
    family = card.family
    sampling = {"num_ctx": card.context_length}
    return {
        "license": card.licence,
        "modelfile": f"FROM {card.name}\nPARAMETER num_ctx {card.context_length}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in sampling.items()),
        "template": server.template,
        "details": details(card),
        "model_info": {
            "general.architecture": family,
            "general.basename": card.name,
            "general.size_label": card.parameter_size,
            f"{family}.context_length": card.context_length,
        },
        "capabilities": card.capabilities,
        "modified_at": card.modified_at,
    }


def _known(server: Server, body: OllamaNameRequest) -> str:
    name = body.model or body.name
    if not name:
        raise InvalidRequestError("model is missing", param="model")
    return server.model_name(name)


def model_routes(routes: APIRouter, server: Server) -> None:
    """Add the routes."""
    _reading_routes(routes, server)
    _managing_routes(routes, server)
    _refusals(routes, server)


def _reading_routes(routes: APIRouter, server: Server) -> None:
    limit = server.settings.max_body_bytes

    @readable(routes, "/api/version")
    async def version() -> JsonResponse:
        """The version of the interface, and ours."""
        return JsonResponse({"version": OLLAMA_VERSION, "ninfer": __version__})

    @readable(routes, "/api/tags")
    async def tags() -> JsonResponse:
        """The served names."""
        return JsonResponse({"models": [tag(server, name) for name in server.names]})

    @routes.post("/api/show", **documented(OllamaNameRequest))
    async def show_model(http: HttpRequest) -> JsonResponse:
        """All about a served model."""
        _known(server, await read_request(http, OllamaNameRequest, limit))
        return JsonResponse(show(server))

    @routes.get("/api/ps", **documented())
    async def loaded() -> JsonResponse:
        """The loaded model; it stays loaded as long as the server runs."""
        card = server.card
        entry = tag(server, card.name)
        never = rfc3339(time.time() + 100 * 365 * 86400)
        entry |= {"expires_at": never, "size_vram": card.size, "context_length": card.context_length}
        return JsonResponse({"models": [entry]})


def _on_disk(server: Server, name: str) -> ModelEntry | None:
    """A model on disk that is not the loaded one."""
    served = {normal_name(name) for name in server.names}
    if normal_name(name) in served:
        return None
    known = {normal_name(entry.name) for entry in installed()}
    return describe(name) if normal_name(name) in known else None


def _managing_routes(routes: APIRouter, server: Server) -> None:
    limit = server.settings.max_body_bytes

    @routes.post("/api/pull", **documented(OllamaNameRequest))
    async def pull(http: HttpRequest) -> Response:
        """A model that is here is "pulled" at once; downloads are the command line's business."""
        body = await read_request(http, OllamaNameRequest, limit)
        name = body.model or body.name or ""
        try:
            _known(server, body)
        except ModelNotFoundError:
            if await asyncio.to_thread(_on_disk, server, name) is None:
                raise HttpError(
                    400, f"model {name[:80]!r} is not on this machine, and this server does not download; "
                    "run 'ninfer pull' on it", code="unsupported_endpoint", param="model",
                ) from None  # fmt: skip
        if body.stream is False:
            return JsonResponse({"status": "success"})
        return Response(ndjson({"status": "pulling manifest"}) + ndjson({"status": "success"}), media_type=NDJSON)

    @routes.delete("/api/delete", **documented(OllamaNameRequest))
    async def delete(http: HttpRequest) -> Response:
        """A copy's name is forgotten; files are removed with the command line, which can ask back."""
        body = await read_request(http, OllamaNameRequest, limit)
        name = (body.model or body.name or "").strip()
        if not name:
            raise InvalidRequestError("model is missing", param="model")
        if name in server.aliases:
            del server.aliases[name]
            return Response(status_code=200)
        loaded = normal_name(name) in {normal_name(item) for item in server.names}
        if not loaded and await asyncio.to_thread(_on_disk, server, name) is None:
            raise ModelNotFoundError(f"model {name[:80]!r} not found", param="model")
        state = "is loaded here" if loaded else "is a model on disk"
        raise HttpError(
            400, f"{name[:80]!r} {state}; models are not removed over HTTP: run 'ninfer rm' on that machine",
            code="unsupported_endpoint", param="model",
        )  # fmt: skip

    @routes.post("/api/copy", **documented(OllamaCopyRequest))
    async def copy(http: HttpRequest) -> Response:
        """A further name for the loaded model, until the server stops."""
        body = await read_request(http, OllamaCopyRequest, limit)
        if normal_name(body.source) not in {normal_name(name) for name in server.names}:
            raise ModelNotFoundError(f"model {body.source[:80]!r} not found", param="source")
        if not body.destination.strip() or len(body.destination) > 200:
            raise InvalidRequestError("destination must be a name of up to 200 characters", param="destination")
        server.aliases[body.destination.strip()] = None
        return Response(status_code=200)


def _refusals(routes: APIRouter, server: Server) -> None:
    async def refuse(http: HttpRequest) -> Response:
        """Not part of this server."""
        await read_body(http, server.settings.max_body_bytes)
        raise HttpError(400, "not supported: ninfer serves two fixed models", code="unsupported_endpoint")

    async def refuse_embeddings(http: HttpRequest) -> Response:
        """These models do not embed."""
        await read_body(http, server.settings.max_body_bytes)
        raise HttpError(
            400, "embeddings are not supported: ninfer serves generative models only", code="unsupported_endpoint"
        )

    for path in ("/api/create", "/api/push"):
        routes.add_api_route(path, refuse, methods=["POST"], **documented())
    routes.add_api_route("/api/blobs/{digest}", refuse, methods=["POST"], **documented())
    routes.add_api_route("/api/blobs/{digest}", refuse, methods=["HEAD"], include_in_schema=False)
    for path in ("/api/embed", "/api/embeddings"):
        routes.add_api_route(path, refuse_embeddings, methods=["POST"], **documented())
