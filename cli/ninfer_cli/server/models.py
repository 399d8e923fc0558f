"""What the server says about its model: one card, and the model lists of the OpenAI and Anthropic interfaces."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest

from ninfer_core import __version__
from ninfer_core.errors import ArtifactError, ModelNotFoundError

from .answer import documented
from .context import Server
from .wire import JsonResponse


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The loaded model for people and programs. `size` in bytes; `modified` in seconds since the epoch."""

    name: str
    context_length: int
    vision: bool
    video: bool
    tools: bool
    thinking: bool
    structured: bool
    size: int
    digest: str
    modified: float
    family: str
    parameter_size: str
    quantization: str
    licence: str

    @classmethod
    def of(cls, engine: Any, path: Path | None = None) -> ModelCard:
        """The card of a loaded engine; `path` is its artifact, for size and digest."""
        profile = engine.profile
        name = str(engine.served_names[0])
        entry = None
        if path is not None:
            from ninfer_core.store import inspect_path

            try:
                entry = inspect_path(path, name)
            except (ArtifactError, OSError):
                entry = None
        seed = f"{name}/{__version__}/{engine.context_length}"
        known = entry.known if entry else None
        return cls(
            name=name,
            context_length=engine.context_length,
            vision=bool(profile.get("image_inputs")),
            video=bool(profile.get("video_inputs")),
            tools=bool(profile.get("tool_calling")),
            thinking=bool(profile.get("reasoning_output")),
            structured=bool(profile.get("structured_output")),
            size=entry.size if entry else 0,
            digest=entry.digest if entry else hashlib.sha256(seed.encode()).hexdigest(),
            modified=entry.modified if entry else time.time(),
            family="qwen36moe" if "35b" in name.lower() else "qwen36",
            parameter_size=_parameter_size(name),
            quantization="mixed Q4-W8",
            licence=known.licence if known else "",
        )

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same seed could give other text: engine version, weights, window."""
        text = f"{__version__}/{self.digest}/{self.context_length}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def capabilities(self) -> list[str]:
        """Ollama's words for what the model can do."""
        flags = {"completion": True, "tools": self.tools, "thinking": self.thinking, "vision": self.vision}
        return [name for name, present in flags.items() if present]

    @property
    def modified_at(self) -> str:
        """RFC 3339 time of the artifact."""
        return rfc3339(self.modified)

    @property
    def modalities(self) -> list[str]:
        """Kinds of input."""
        return ["text", *(["image"] if self.vision else []), *(["video"] if self.video else [])]


def _parameter_size(name: str) -> str:
    lowered = name.lower()
    for mark, size in (("35b", "35B"), ("27b", "27B")):
        if mark in lowered:
            return size
    return "small"


def rfc3339(seconds: float) -> str:
    """UTC time with microseconds, as every client's date parser accepts it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def openai_entry(server: Server, name: str) -> dict[str, Any]:
    """A model in OpenAI's shape, with the fields that user interfaces look for."""
    card = server.card
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


def anthropic_entry(server: Server, name: str) -> dict[str, Any]:
    """A model in Anthropic's shape."""
    card = server.card
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
        """The served names."""
        names = server.names
        if "anthropic-version" in http.headers:
            return JsonResponse(_page(anthropic_entry(server, name) for name in names))
        return JsonResponse({"object": "list", "data": [openai_entry(server, name) for name in names]})

    @routes.get("/v1/models/{name:path}", **documented())
    async def get_model(http: HttpRequest, name: str) -> JsonResponse:
        """One served name; names may hold colons and slashes, plain or URL-encoded."""
        name = unquote(name)
        if not name or len(name) > 256:
            raise ModelNotFoundError("the model name is empty or too long", param="model")
        found = server.model_name(name)
        shape = anthropic_entry if "anthropic-version" in http.headers else openai_entry
        return JsonResponse(shape(server, found))

    return routes
