"""Ollama's model management endpoints over the models on disk, and clear refusals for what two models do not need."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core import __version__
from ninfer_core.errors import InvalidRequestError, ModelNotFoundError, NinferError
from ninfer_core.library import add_alias, remove

from ..presets import Preset
from .answer import documented, readable
from .body import ClientGoneError, read_body, read_request
from .card import ModelCard, rfc3339
from .context import Server, normal_name
from .errors import HttpError, body_of, fault_of
from .schemas import OllamaCopyRequest, OllamaNameRequest
from .wire import NDJSON, JsonResponse, StreamResponse, ndjson, wait_for_disconnect

# Clients refuse servers that report an older version than the features they use.
OLLAMA_VERSION = "0.13.5"
_FOR_EVER = 100 * 365 * 86_400.0


# Parameters under the names of this API; the others have the same here.
_PARAMETERS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}


def details(card: ModelCard, parent: str = "") -> dict[str, Any]:
    """What the model lists say about a model; `parent` is the one that a preset is made of."""
    return {
        "parent_model": parent,
        "format": "ninfer",
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
        "context_length": card.context_length,
    }


def tag(card: ModelCard, name: str, preset: Preset | None = None) -> dict[str, Any]:
    """A model in `/api/tags`."""
    return {
        "name": name,
        "model": name,
        "modified_at": card.modified_at,
        "size": card.size,
        "digest": card.digest,
        "details": details(card, preset.model if preset else ""),
        "capabilities": card.capabilities,
    }


def show(card: ModelCard, preset: Preset | None = None) -> dict[str, Any]:
    """`/api/show`; several clients decide by exactly these fields what a model can do."""
    family = card.family
    parameters = [f"num_ctx {card.context_length}", *(_parameter_lines(preset) if preset else ())]
    system = preset.system if preset else None
    modelfile = [f"FROM {card.name}", *(f"PARAMETER {line}" for line in parameters)]
    modelfile += [f"SYSTEM {json.dumps(system, ensure_ascii=False)}"] if system else []
    return {
        "license": card.licence,
        "modelfile": "\n".join(modelfile) + "\n",
        "parameters": "\n".join(parameters),
        # Editors look for this word before they ask for what belongs into a gap.
        "template": card.template + ("{#- .Suffix -#}" if card.infill else ""),
        **({"system": system} if system else {}),
        "details": details(card, preset.model if preset else ""),
        "model_info": {
            "general.architecture": family,
            "general.basename": card.name,
            "general.size_label": card.parameter_size,
            f"{family}.context_length": card.context_length,
        },
        "capabilities": card.capabilities,
        "modified_at": card.modified_at,
    }


def _parameter_lines(preset: Preset) -> Iterator[str]:
    for name, value in preset.parameters.items():
        for item in value if isinstance(value, tuple) else (value,):
            yield f"{_PARAMETERS.get(name, name)} {json.dumps(item, ensure_ascii=False)}"


def loaded_entry(server: Server) -> dict[str, Any]:
    """The loaded model in `/api/ps`, with what `ninfer ps` shows beside Ollama's own fields."""
    host, card, stats = server.host, server.card, server.host.stats()
    expires = host.expires if host.expires is not None else time.time() + _FOR_EVER
    series = server.metrics.current
    seconds, made = series.total("predicted_seconds"), series.total("generation_tokens")
    return tag(card, card.name) | {
        "expires_at": rfc3339(expires),
        "size_vram": card.size,
        "context_length": card.context_length,
        "names": server.names,
        "processor": str(getattr(host.engine, "route", "")).partition(":")[0] or "cpu",
        "running": int(stats.get("running", 0)),
        "waiting": int(stats.get("waiting", 0)),
        "tokens_per_second": made / seconds if seconds else None,
    }


def _asked(body: OllamaNameRequest) -> str:
    name = (body.model or body.name or "").strip()
    if not name:
        raise InvalidRequestError("model is missing", param="model")
    return name


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
        """Everything that can be asked for."""
        return JsonResponse(
            {"models": [tag(card, name, server.presets.get(name)) for name, card in await server.listed()]}
        )

    @routes.post("/api/show", **documented(OllamaNameRequest))
    async def show_model(http: HttpRequest) -> JsonResponse:
        """All about a model."""
        name = _asked(await read_request(http, OllamaNameRequest, limit))
        _, card = await server.describe(name)
        return JsonResponse(show(card, server.presets.get(name)))

    @routes.get("/api/ps", **documented())
    async def loaded() -> JsonResponse:
        """The loaded model, if one is."""
        return JsonResponse({"models": [loaded_entry(server)] if server.host.current is not None else []})


@dataclass(slots=True)
class _PullStream:
    """A pull as the source of a streamed answer."""

    server: Server
    name: str
    request_id: str

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Status lines; a failure is the last of them."""
        try:
            async with contextlib.aclosing(self.server.pulls.watch(self.name)) as lines:
                async for line in lines:
                    yield ndjson(line)
        except NinferError as error:
            yield ndjson(body_of(fault_of(error), "ollama", self.request_id))

    def close(self, reason: str) -> None:
        """Watching has ended by itself."""


async def _pulled(server: Server, http: HttpRequest, name: str) -> dict[str, Any]:
    """The last line of a pull that nobody follows; a client that leaves counts as one watcher less."""

    async def work() -> dict[str, Any]:
        last: dict[str, Any] = {}
        async with contextlib.aclosing(server.pulls.watch(name)) as lines:
            async for line in lines:
                last = line
        return last

    worker = asyncio.ensure_future(work())
    watcher = asyncio.ensure_future(wait_for_disconnect(http.receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _pull(server: Server, http: HttpRequest, body: OllamaNameRequest) -> Response:
    name = _asked(body)
    preset = server.presets.get(name)
    name = name if preset is None else preset.model
    record = http.scope["state"]["record"]
    if not server.host.switches:
        if server.known_name(name) is None:
            raise HttpError(
                400, f"this server has one model for good; run 'ninfer pull' to download {name[:80]!r}",
                code="unsupported_endpoint", param="model",
            )  # fmt: skip
        if body.stream is False:
            return JsonResponse({"status": "success"})
        return Response(ndjson({"status": "pulling manifest"}) + ndjson({"status": "success"}), media_type=NDJSON)
    if body.stream is False:
        return JsonResponse(await _pulled(server, http, name))
    settings = server.settings
    return StreamResponse(
        b"", _PullStream(server, name, record.request_id), media_type=NDJSON,
        heartbeat=ndjson({"status": "pulling manifest"}), interval=settings.heartbeat,
        stall_timeout=settings.stall_timeout,
    )  # fmt: skip


def _no_preset(server: Server, name: str, param: str) -> None:
    if server.presets.get(name) is not None:
        raise HttpError(
            400, f"{name[:80]!r} is a preset: it is changed in {server.presets.path}", code="unsupported_endpoint",
            param=param,
        )  # fmt: skip


async def _delete(server: Server, name: str) -> None:
    _no_preset(server, name, "model")
    if name in server.aliases:
        del server.aliases[name]
        return
    loaded = server.known_name(name) is not None and normal_name(name) in map(normal_name, server.names)
    if not server.host.switches:
        if not loaded:
            raise ModelNotFoundError(f"model {name[:80]!r} not found", param="model")
        raise HttpError(
            400, f"{name[:80]!r} is loaded here for good and is not removed over HTTP", code="unsupported_endpoint",
            param="model",
        )  # fmt: skip
    entry = await server.find(name)
    if entry is None:
        raise ModelNotFoundError(f"model {name[:80]!r} not found", param="model")
    if loaded and not entry.alias_of and server.host.current is not None:
        if server.host.leases:
            raise HttpError(
                409, f"{name[:80]!r} answers {server.host.leases} requests right now; try again when they have ended",
                code="model_in_use", param="model",
            )  # fmt: skip
        await server.host.unload(wait=True)
    await asyncio.to_thread(remove, entry.name)


def _managing_routes(routes: APIRouter, server: Server) -> None:
    limit = server.settings.max_body_bytes

    @routes.post("/api/pull", **documented(OllamaNameRequest))
    async def pull(http: HttpRequest) -> Response:
        """Download a model, with progress; a second request for the same one joins the first."""
        return await _pull(server, http, await read_request(http, OllamaNameRequest, limit))

    @routes.delete("/api/delete", **documented(OllamaNameRequest))
    async def delete(http: HttpRequest) -> Response:
        """Delete a model, or a further name of one."""
        await _delete(server, _asked(await read_request(http, OllamaNameRequest, limit)))
        return Response(status_code=200)

    @routes.post("/api/copy", **documented(OllamaCopyRequest))
    async def copy(http: HttpRequest) -> Response:
        """A further name for a model; with one model for good it lasts until the server stops."""
        body = await read_request(http, OllamaCopyRequest, limit)
        if not body.destination.strip() or len(body.destination) > 200:
            raise InvalidRequestError("destination must be a name of up to 200 characters", param="destination")
        _no_preset(server, body.source, "source")
        known = normal_name(body.source) in map(normal_name, server.names)
        if server.host.switches:
            entry = await server.find(body.source)
            if entry is not None:
                await asyncio.to_thread(add_alias, entry.name, body.destination)
                return Response(status_code=200)
        elif known:
            server.aliases[body.destination.strip()] = None
            return Response(status_code=200)
        raise ModelNotFoundError(f"model {body.source[:80]!r} not found", param="source")


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
