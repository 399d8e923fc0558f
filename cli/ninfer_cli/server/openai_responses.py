"""`POST /v1/responses` and its side endpoints, with an optional bounded store of past responses."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ninfer_core.types import Completion, Finish

from .answer import Prepared, Waiting, answer, documented
from .body import read_request
from .common import left_out
from .context import Server, Target
from .errors import HttpError
from .responses_input import TOOL_KINDS, input_items, is_reference, to_request
from .responses_output import ResponsesEncoder, ResponseShape, failed_early, output_items
from .schemas import ResponsesRequest
from .wire import JsonResponse, sse

Items = list[Mapping[str, Any]]
_NAMES = {"response_format": "text.format", "messages": "input", "max_tokens": "max_output_tokens"}


class ResponseStore:
    """The last `limit` responses for `ttl` seconds, in memory; 0 keeps none."""

    def __init__(self, limit: int, ttl: float) -> None:
        self.limit, self.ttl = limit, ttl
        self._entries: OrderedDict[str, tuple[float, dict[str, Any], Items]] = OrderedDict()

    def put(self, response: dict[str, Any], items: Items) -> None:
        """Keep a finished response with all items that led to it."""
        if self.limit:
            self._entries[response["id"]] = (time.monotonic() + self.ttl, response, items)
            while len(self._entries) > self.limit:
                self._entries.popitem(last=False)

    def get(self, response_id: str) -> tuple[dict[str, Any], Items] | None:
        """A response that is still kept."""
        entry = self._entries.get(response_id)
        if entry is None or entry[0] < time.monotonic():
            self._entries.pop(response_id, None)
            return None
        return entry[1], entry[2]

    def item(self, item_id: Any) -> Mapping[str, Any] | None:
        """An item of a response that is still kept, or of its input."""
        now = time.monotonic()
        for end, response, items in reversed(self._entries.values()):
            for item in (*items, *response["output"]):
                if end > now and item.get("id") == item_id is not None:
                    return item
        return None

    def delete(self, response_id: str) -> bool:
        """Forget a response; False if there was none."""
        return self._entries.pop(response_id, None) is not None


class _StoringEncoder(ResponsesEncoder):
    """Keeps the finished response for later requests."""

    def __init__(self, shape: ResponseShape, request_id: str, store: ResponseStore, items: Items) -> None:
        super().__init__(shape, request_id)
        self._store, self._items = store, items

    def end(self, finishes: dict[int, Finish]) -> bytes:
        """The last event, and the entry in the store."""
        last = super().end(finishes)
        assert self.final is not None
        self._store.put(self.final, self._items)
        return last


def _resolve(server: Server, body: ResponsesRequest) -> None:
    """Put the items that the input only refers to in their places; what is not kept the conversion refuses."""
    if isinstance(body.input, list):
        known = [server.store.item(item.get("id")) if is_reference(item) else None for item in body.input]
        body.input = [dict(found or item) for found, item in zip(known, body.input, strict=True)]


def _history(server: Server, response_id: str | None) -> Items:
    """The items of a stored response and its own input, oldest first."""
    if not response_id:
        return []
    found = server.store.get(response_id)
    if found is None:
        hint = "" if server.store.limit else "; this server keeps none (start it with --store-responses N)"
        raise HttpError(
            400, f"Previous response with id {response_id[:80]!r} not found{hint}. Send the whole input instead.",
            code="previous_response_not_found", param="previous_response_id",
        )  # fmt: skip
    return [*found[1], *found[0]["output"]]


def _stored(server: Server, response_id: str) -> tuple[dict[str, Any], Items]:
    found = server.store.get(response_id)
    if found is None:
        raise HttpError(404, f"Response with id {response_id[:80]!r} not found.", code="not_found", param="response_id")
    return found


def _listed(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """An input item in its full form: the short forms of messages are for requests only."""
    full: dict[str, Any] = {"id": f"item_{index}", "type": "message", "status": "completed", **item}
    if isinstance(full.get("content"), str):
        kind = "output_text" if full.get("role") == "assistant" else "input_text"
        full["content"] = [{"type": kind, "text": full["content"]}]
        if kind == "output_text":
            full["content"][0] |= {"annotations": [], "logprobs": []}
    return full


def router(server: Server) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["OpenAI"])
    limit = server.settings.max_body_bytes

    @routes.post("/v1/responses", **documented(ResponsesRequest))
    async def create(http: HttpRequest) -> Response:
        """Create a response, streamed or whole."""
        body = await read_request(http, ResponsesRequest, limit)
        record = http.scope["state"]["record"]
        record.dropped = left_out(body.tools, TOOL_KINDS)
        history = _history(server, body.previous_response_id)
        _resolve(server, body)

        async def prepare(target: Target) -> Prepared:
            request, toolset = to_request(body, server, history)
            keep = bool(server.store.limit) and body.store is not False
            shape = ResponseShape(body, target.name, toolset, keep)
            items = [*history, *input_items(body.input)]

            def complete(completions: list[Completion]) -> dict[str, Any]:
                response = shape.finished(output_items(shape, completions[0]), completions[0])
                if keep:
                    server.store.put(response, items)
                return response

            encoder: ResponsesEncoder | None = None
            if body.stream:
                encoder = (
                    _StoringEncoder(shape, record.request_id, server.store, items)
                    if keep
                    else ResponsesEncoder(shape, record.request_id)
                )
            return Prepared([request], encoder, complete, names=_NAMES)

        return await answer(server, http, body.model, prepare, Waiting(error=failed_early) if body.stream else None)

    @routes.post("/v1/responses/input_tokens", **documented(ResponsesRequest))
    async def input_tokens(http: HttpRequest) -> JsonResponse:
        """The prompt length of a request, exactly as its later usage."""
        body = await read_request(http, ResponsesRequest, limit)
        _resolve(server, body)
        target = await server.use(http, body.model)
        request, _ = to_request(body, server, _history(server, body.previous_response_id))
        count = await asyncio.to_thread(server.count_tokens, target.filled(request))
        return JsonResponse({"object": "response.input_tokens", "input_tokens": count})

    @routes.get("/v1/responses/{response_id}", **documented())
    async def retrieve(http: HttpRequest, response_id: str) -> Response:
        """A stored response; `?stream=true` plays its last event."""
        response, _ = _stored(server, response_id)
        if http.query_params.get("stream") == "true":
            kind = f"response.{response['status']}"
            event = sse({"type": kind, "sequence_number": 0, "response": response}, kind)
            return Response(event, media_type="text/event-stream")
        return JsonResponse(response)

    @routes.get("/v1/responses/{response_id}/input_items", **documented())
    async def retrieve_items(response_id: str) -> JsonResponse:
        """The items a stored response was made from."""
        _, items = _stored(server, response_id)
        data = [_listed(i, item) for i, item in enumerate(items)]
        ids = [str(item["id"]) for item in data]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return JsonResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False})

    @routes.delete("/v1/responses/{response_id}", **documented())
    async def delete(response_id: str) -> JsonResponse:
        """Forget a stored response."""
        _stored(server, response_id)
        server.store.delete(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    return routes
