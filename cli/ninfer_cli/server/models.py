"""The model lists of the OpenAI and Anthropic interfaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from ninfer_core.errors import ModelNotFoundError

from .answer import documented
from .card import ModelCard, rfc3339
from .wire import JsonResponse

if TYPE_CHECKING:
    from .context import Server


def openai_entry(card: ModelCard, name: str) -> dict[str, Any]:
    """A model in OpenAI's shape, with the fields that user interfaces look for."""
    return {
        "id": name,
        "object": "model",
        "created": int(card.modified),
        "owned_by": "ninfer",
        "max_model_len": card.context_length,
        "context_length": card.context_length,
        "meta": {"n_ctx_train": card.context_length, "size": card.size},
        "architecture": {"input_modalities": card.modalities, "output_modalities": ["text"]},
    }


def anthropic_entry(card: ModelCard, name: str) -> dict[str, Any]:
    """A model in Anthropic's shape."""
    yes, no = {"supported": True}, {"supported": False}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(int(card.modified)),
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "lifecycle": "active",
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
        "capabilities": {
            "batch": no,
            "citations": no,
            "code_execution": no,
            "context_management": {
                "supported": False,
                "clear_thinking_20251015": no,
                "clear_tool_uses_20250919": no,
                "compact_20260112": no,
            },
            "effort": {
                "supported": card.thinking,
                "low": yes,
                "medium": yes,
                "high": yes,
                "max": yes,
                "xhigh": yes,
            },
            "image_input": yes if card.vision else no,
            "pdf_input": no,
            "structured_outputs": yes if card.structured else no,
            "server_tools": {"supported": False, "code_execution": no, "web_fetch": no, "web_search": no},
            "thinking": {
                "supported": card.thinking,
                "types": {"adaptive": yes, "between_tools": yes, "disabled": yes, "enabled": yes},
            },
        },
    }


def _page(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    data = list(entries)
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def router(server: Server) -> APIRouter:
    """Both model lists; the Anthropic version header chooses the shape."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models", **documented())
    async def list_models(http: HttpRequest) -> JsonResponse:
        """Everything that can be asked for, the loaded model first."""
        listed = await server.listed()
        if "anthropic-version" in http.headers:
            return JsonResponse(_page(anthropic_entry(card, name) for name, card in listed))
        return JsonResponse({"object": "list", "data": [openai_entry(card, name) for name, card in listed]})

    @routes.get("/v1/models/{name:path}", **documented())
    async def get_model(http: HttpRequest, name: str) -> JsonResponse:
        """One served name; names may hold colons and slashes, plain or URL-encoded."""
        name = unquote(name)
        if not name or len(name) > 256:
            raise ModelNotFoundError("the model name is empty or too long", param="model")
        found, card = await server.describe(name)
        shape = anthropic_entry if "anthropic-version" in http.headers else openai_entry
        return JsonResponse(shape(card, found))

    return routes
