"""The options of an engine: what to load, where, and how much of it. No torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, TypedDict

from ..errors import InvalidRequestError

MAX_DRAFT = 5
PAGE = 64
_AUTO = ("context_length", "prefill_chunk", "checkpoints", "threads", "memory", "watchdog")
"""Numbers that may be "auto"."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything that defines an engine; two engines with equal options are interchangeable.

    model: a model name known to `ninfer_core.store`, or the path of an artifact.
    device: "auto" takes a CUDA device where this build has kernels for it, else the CPU.
    dtype: compute type of the torch path: "float32" or "bfloat16"; "auto" is float32 on the CPU.
    context_length: tokens of prompt plus answer per request; "auto" is the model's own, or what fits in memory.
    max_sequences: requests that run at once. One begins when the pages of its prompt and its max_tokens are free (or of
    the rest of the context without max_tokens), so none runs out of them later. max_queue: requests that may wait.
    draft_tokens: tokens drafted per round (0 to 5). It changes speed, never the output.
    adaptive_drafts: draft less deep where that is faster, by measured times (the more sequences, the dearer rows); a
    sequence for which drafting does not pay goes on without it, and tries again later.
    kv_cache: element type of the KV cache. prefill_chunk: prompt tokens per step, a multiple of 64;
    "auto" is 256 on the CPU, and on a GPU the longest of 16,384 (experts only), 8,192, 4,096 and
    2,048 that costs no context.
    prefix_cache: keep what was read and written for later prompts that begin the same; a number is the room kept for
    that beside the running requests, in tokens (True: one context). checkpoints: states kept at most; "auto" is some
    per sequence, as memory allows. cache_answers: keep states behind answers too. These were made by decoding, so a
    later output can differ from that of a fresh engine within rounding; without them no output depends on earlier ones.
    host_cache_gb: host memory, GB of 10^9 bytes, for states and pages that the prefix cache would give up for others.
    They are copied there and back, pinned on a GPU; 0 keeps nothing. All of it is taken when the model is loaded.
    threads: CPU threads of the model's arithmetic; "auto" is what was measured best.
    memory: bytes the engine may take on its device, weights included; "auto" is most of what is free at load time.
    embedding: where the embedding table lies. "host" keeps it in pinned host memory, which frees 0.5 to 1 GB of a GPU;
    kernels fetch the rows they need over the bus. On the CPU both are the same.
    verify: check the SHA-256 of the artifact's files while they are read.
    vision: load the vision tower and read images and videos. Off, the tower takes no memory and media are refused.
    watchdog: seconds after which a step that has not come back (at most one chunk of a prompt and one round) counts as
    hung: its requests end and health says so. 0 is never; "auto" is 600 on a GPU and 1,800 on the CPU.
    """

    model: str = "demo"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    context_length: int | Literal["auto"] = "auto"
    max_sequences: int = 4
    max_queue: int = 64
    draft_tokens: int = 3
    adaptive_drafts: bool = True
    kv_cache: Literal["int8", "bf16", "fp32"] = "int8"
    prefill_chunk: int | Literal["auto"] = "auto"
    prefix_cache: bool | int = True
    checkpoints: int | Literal["auto"] = "auto"
    cache_answers: bool = True
    host_cache_gb: float = 0.0
    threads: int | Literal["auto"] = "auto"
    memory: int | Literal["auto"] = "auto"
    embedding: Literal["device", "host"] = "device"
    verify: bool = False
    vision: bool = False
    watchdog: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _choice(self, "device", ("auto", "cpu", "cuda"))
        _choice(self, "dtype", ("auto", "float32", "bfloat16"))
        _choice(self, "kv_cache", ("int8", "bf16", "fp32"))
        _choice(self, "embedding", ("device", "host"))
        _range(self, "context_length", 1, None)
        _range(self, "max_sequences", 1, 1024)
        _range(self, "max_queue", 0, None)
        _range(self, "draft_tokens", 0, MAX_DRAFT)
        _range(self, "prefill_chunk", PAGE, None)
        if not isinstance(self.prefix_cache, bool):
            _range(self, "prefix_cache", 0, None)
        _range(self, "checkpoints", 0, 4096)
        _range(self, "threads", 1, None)
        _range(self, "memory", 1, None)
        _number(self, "watchdog", math.inf, '"auto", or seconds from 0 on')
        for name in ("verify", "vision"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} is {getattr(self, name)!r}; it must be true or false", param=name)
        _number(self, "host_cache_gb", 1e6, "a number from 0")
        if self.host_cache_gb and (not self.prefix_cache or self.checkpoints == 0):
            raise InvalidRequestError(
                f"host_cache_gb is {self.host_cache_gb!r}, but the prefix cache it extends is off (prefix_cache, "
                "checkpoints)",
                param="host_cache_gb",
            )
        if self.prefill_chunk != "auto" and self.prefill_chunk % PAGE:
            raise InvalidRequestError(
                f"prefill_chunk is {self.prefill_chunk}; it must be a multiple of {PAGE}", param="prefill_chunk"
            )

    def differences(self, other: EngineOptions) -> list[str]:
        """One line for each field that differs: `name: mine != theirs`."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} != {getattr(other, f.name)!r}"
            for f in dataclass_fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


class EngineFields(TypedDict, total=False):
    """The fields of `EngineOptions` but `model`, as keyword arguments."""

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16"]
    context_length: int | Literal["auto"]
    max_sequences: int
    max_queue: int
    draft_tokens: int
    adaptive_drafts: bool
    kv_cache: Literal["int8", "bf16", "fp32"]
    prefill_chunk: int | Literal["auto"]
    prefix_cache: bool | int
    checkpoints: int | Literal["auto"]
    cache_answers: bool
    host_cache_gb: float
    threads: int | Literal["auto"]
    memory: int | Literal["auto"]
    embedding: Literal["device", "host"]
    verify: bool
    vision: bool
    watchdog: float | Literal["auto"]


def engine_options(model: str, fields: Mapping[str, Any]) -> EngineOptions:
    """Options from keyword arguments.

    Raises:
        TypeError: an unknown option; the message names the nearest one.
    """
    names = [f.name for f in dataclass_fields(EngineOptions)]
    for name in fields:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(names)}"
            raise TypeError(f"unknown engine option {name!r}{hint}")
    return EngineOptions(model=model, **fields)


def _choice(options: EngineOptions, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(options, name)
    if value not in allowed:
        raise InvalidRequestError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}", param=name)


def _range(options: EngineOptions, name: str, low: int, high: int | None) -> None:
    value: Any = getattr(options, name)
    if value == "auto" and name in _AUTO:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer {limit}", param=name)


def _number(options: EngineOptions, name: str, below: float, what: str) -> None:
    """A number from 0 and below this, in words: `what`."""
    value: Any = getattr(options, name)
    if value == "auto" and name in _AUTO:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise InvalidRequestError(f"{name} is {value!r}; it must be {what}", param=name)
