"""ninfer: run Qwen3.6-27B and Qwen3.6-35B-A3B on one GPU. Public names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "engine",
    "EngineOptions": "engine",
    "RequestHandle": "engine",
    "get_engine": "engine",
    "render_prompt": "engine",
    "parse_output": "engine",
}
_HOMES |= dict.fromkeys(
    (
        "Completion Event Finish Image Message ReasoningDelta Request ResponseFormat Sampling Text TextDelta Timings "
        "TokenLogprob Tool ToolCall ToolCallDelta ToolCallEnd ToolCallStart ToolChoice Usage Video"
    ).split(),
    "types",
)
__all__ = sorted([*_HOMES, "errors"])  # noqa: PLE0604

if TYPE_CHECKING:
    from . import errors
    from .engine import Engine, EngineOptions, RequestHandle, get_engine, parse_output, render_prompt
    from .types import (
        Completion,
        Event,
        Finish,
        Image,
        Message,
        ReasoningDelta,
        Request,
        ResponseFormat,
        Sampling,
        Text,
        TextDelta,
        Timings,
        TokenLogprob,
        Tool,
        ToolCall,
        ToolCallDelta,
        ToolCallEnd,
        ToolCallStart,
        ToolChoice,
        Usage,
        Video,
    )


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return __all__
