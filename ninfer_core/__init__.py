"""ninfer: run Qwen3.6-27B and Qwen3.6-35B-A3B on one GPU. Public names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineOptions",
    "Event",
    "Finish",
    "Image",
    "Message",
    "ReasoningDelta",
    "Request",
    "RequestHandle",
    "ResponseFormat",
    "Sampling",
    "Text",
    "TextDelta",
    "Timings",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolChoice",
    "Usage",
    "Video",
    "__version__",
    "errors",
    "get_engine",
    "parse_output",
    "render_prompt",
]

_ENGINE = {"Engine", "EngineOptions", "RequestHandle", "get_engine", "parse_output", "render_prompt"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    home = ".engine" if name in _ENGINE else ".types"
    return getattr(importlib.import_module(home, __name__), name)


def __dir__() -> list[str]:
    return __all__
