"""What the server says about a model, loaded or not: one card for all interfaces."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ninfer_core import __version__
from ninfer_core.errors import ArtifactError

from .gap import fills_gaps


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model for people and programs. `size` in bytes; `modified` in seconds since the epoch."""

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
    template: str
    infill: bool = False

    @classmethod
    def of(cls, engine: Any, path: Path | None = None, name: str = "") -> ModelCard:
        """The card of an engine, loaded or described; `path` is its artifact, for size and digest."""
        profile = engine.profile
        name = name or str(engine.served_names[0])
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
            template=str(engine.frontend.template.source),
            infill=fills_gaps(engine.frontend.tokenizer),
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
        flags["insert"] = self.infill
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
