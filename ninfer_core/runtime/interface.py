"""What every engine offers (the local one, the scripted one, the HTTP twin): submit, generate, stream and their kin.

Only `submit` differs between them; the conveniences here are written once on top of it. No torch.
"""

from __future__ import annotations

import asyncio
import difflib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, Unpack, cast

from .. import store
from ..errors import InvalidRequestError
from ..types import (
    Completion,
    Event,
    Message,
    Request,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
    ToolChoice,
)
from .handle import RequestHandle

Prompt = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]] | Request


class RequestOptions(TypedDict, total=False):
    """Keyword options of `generate`, `stream` and `make_request`: the fields of `Request` and of `Sampling`, flat."""

    prompt: str | tuple[int, ...] | None
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    response_format: ResponseFormat | None
    sampling: Sampling
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    thinking: bool | None
    thinking_budget: int | None
    preserve_thinking: bool | None
    continue_final_message: bool
    add_vision_id: bool
    logprobs: int | None
    priority: int
    timeout: float | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    seed: int | None


_SAMPLING = frozenset(f.name for f in fields(Sampling))
_TUPLES = ("tools", "stop", "stop_token_ids")
_MESSAGE_KEYS = frozenset(f.name for f in fields(Message))


def as_message(value: Message | Mapping[str, Any]) -> Message:
    """A `Message`, from itself or from a mapping with the fields of `Message` (`role` and `content` at least).

    Raises:
        InvalidRequestError: another type, or an unknown key.
    """
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"a message must be a Message or a mapping with role and content, not {type(value).__name__}",
            param="messages",
        )
    unknown = sorted(set(map(str, value)) - _MESSAGE_KEYS)
    if unknown or "role" not in value:
        what = f"unknown key {unknown[0]!r}" if unknown else "no role"
        raise InvalidRequestError(
            f"a message mapping has {what}; known keys: {sorted(_MESSAGE_KEYS)}", param="messages"
        )
    data = dict(value)
    calls = data.get("tool_calls")
    if calls is None or isinstance(calls, (list, tuple)):
        data["tool_calls"] = tuple(_as_call(call) for call in calls or ())
    if isinstance(data.get("content"), list):
        data["content"] = tuple(data["content"])
    return Message(**data)


def _as_call(value: Any) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    if not isinstance(value, Mapping) or set(value) != {"id", "name", "arguments"}:
        raise InvalidRequestError(
            "a tool call of a message must be a ToolCall or a mapping with id, name and arguments", param="messages"
        )
    return ToolCall(**value)


def make_request(messages: Prompt | None = None, **options: Unpack[RequestOptions]) -> Request:
    """A `Request` from messages and flat keyword options.

    `messages` is one user text, one message, a sequence of messages (also as mappings), or a ready `Request`
    (then no option may be given). Raw text or token ids go into `prompt=`.

    Raises:
        TypeError: an unknown option; the message names the nearest one.
        InvalidRequestError: messages of the wrong type.
    """
    if isinstance(messages, Request):
        if options:
            raise TypeError(f"options {sorted(options)} given beside a ready Request; set them in the Request")
        return messages
    known = set(RequestOptions.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    turns: tuple[Message, ...]
    if messages is None:
        turns = ()
    elif isinstance(messages, str):
        turns = (Message("user", messages),)
    elif isinstance(messages, Message | Mapping):
        turns = (as_message(messages),)
    elif isinstance(messages, Sequence):
        turns = tuple(as_message(message) for message in cast("Sequence[Message | Mapping[str, Any]]", messages))
    else:
        raise InvalidRequestError(
            f"messages must be a text, a Message or a sequence of them, not {type(messages).__name__}", param="messages"
        )
    flat: dict[str, Any] = dict(options)
    own = {name: flat.pop(name) for name in list(flat) if name in _SAMPLING}
    if own:
        if "sampling" in flat:
            raise TypeError(f"sampling= and {sorted(own)} were both given; use one of the two")
        flat["sampling"] = Sampling(**own)
    if isinstance(flat.get("stop"), str):
        flat["stop"] = (flat["stop"],)
    for name in _TUPLES:
        if flat.get(name, ()) is None:
            del flat[name]
        elif isinstance(flat.get(name), Sequence) and not isinstance(flat[name], str):
            flat[name] = tuple(flat[name])
    return Request(turns, **flat)


OUTPUT_LIMIT = 65536
"""Tokens of an answer that the public data set states for the models; an engine goes on to the end of its context."""
RELEASED = {"qwen3.6:27b": "2026-04-22", "qwen3.6:35b-a3b": "2026-04-17"}


def model_profile(name: str, context_length: int | None, *, vision: bool = False) -> dict[str, Any]:
    """What a model can do, with the keys of the public model-profile data set; limits only where they are known."""
    profile: dict[str, Any] = {
        "name": name,
        "text_inputs": True,
        "image_inputs": vision,
        "image_url_inputs": False,
        "image_tool_message": vision,
        "attachment": vision,
        "pdf_inputs": False,
        "audio_inputs": False,
        "video_inputs": False,
        "text_outputs": True,
        "image_outputs": False,
        "audio_outputs": False,
        "video_outputs": False,
        "reasoning_output": True,
        "tool_calling": True,
        "tool_call_streaming": True,
        "tool_choice": True,
        "structured_output": True,
        "temperature": True,
        "open_weights": True,
    }
    if released := RELEASED.get(store.canonical(name)):
        profile |= {"release_date": released, "last_updated": released}
    if context_length is not None:
        profile |= {"max_input_tokens": context_length, "max_output_tokens": min(context_length, OUTPUT_LIMIT)}
    return profile


class EngineInterface(ABC):
    """The interface of an engine. Subclasses implement `submit`, `count_tokens`, `close` and the properties.

    All methods are thread-safe. An engine is a context manager that closes itself.
    """

    nonblocking = False
    """Whether `submit` does no work that could hold up an event loop."""

    @property
    @abstractmethod
    def served_names(self) -> tuple[str, ...]:
        """Names this engine answers to; the first is the main one."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Tokens of prompt plus answer one request may hold."""

    @property
    @abstractmethod
    def profile(self) -> dict[str, Any]:
        """What the model and this engine can do, as plain values (keys of the public model-profile data set)."""

    @property
    @abstractmethod
    def state(self) -> str:
        """`new`, `loading`, `ready`, `restarting`, `stalled`, `failed` or `closed`."""

    @abstractmethod
    def submit(self, request: Request) -> RequestHandle:
        """Validate and queue a request; returns at once with its handle.

        Raises:
            InvalidRequestError: a field is wrong (`param` says which); ContextOverflowError, UnsupportedError,
                MediaError and SchemaError are kinds of it.
            EngineBusyError: the queue is full.
            EngineClosedError, EngineFailedError: the engine cannot serve.
        """

    @abstractmethod
    def count_tokens(
        self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None
    ) -> int:
        """Tokens of the prompt that these messages and tools render to: exactly what `usage.prompt_tokens` will say."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """`{"status": "ok" | "loading" | "failed" | "closed", ...}`; `ok` only when a token can be made."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain numbers: running, waiting, free pages and slots, token and request totals."""

    @abstractmethod
    def close(self) -> None:
        """End all requests with `EngineClosedError` and free everything. Idempotent."""

    def generate(self, messages: Prompt | None = None, **options: Unpack[RequestOptions]) -> Completion:
        """Run one request and return the whole completion. Arguments as in `make_request`, errors as in `submit`."""
        with self.submit(make_request(messages, **options)) as handle:
            return handle.result()

    async def asubmit(self, request: Request) -> RequestHandle:
        """`submit` for coroutines: loading, templating, tokenising and compiling a grammar run in a thread.

        Cancelling the task cancels a request that was being submitted.
        """
        if self.nonblocking:
            return self.submit(request)
        work = asyncio.ensure_future(asyncio.to_thread(self.submit, request))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel_late)
            raise

    async def agenerate(self, messages: Prompt | None = None, **options: Unpack[RequestOptions]) -> Completion:
        """`generate` for coroutines; cancelling the task cancels the request."""
        async with await self.asubmit(make_request(messages, **options)) as handle:
            return await handle.aresult()

    def stream(self, messages: Prompt | None = None, **options: Unpack[RequestOptions]) -> Iterator[Event]:
        """Submit now and iterate over the events; leaving the iterator cancels."""
        return iter(self.submit(make_request(messages, **options)))

    def astream(self, messages: Prompt | None = None, **options: Unpack[RequestOptions]) -> AsyncIterator[Event]:
        """`stream` for coroutines: `async for event in engine.astream(...)`; submits when the iteration begins."""
        return self._asubmitted(make_request(messages, **options))

    async def _asubmitted(self, request: Request) -> AsyncIterator[Event]:
        async with await self.asubmit(request) as handle:
            async for event in handle:
                yield event

    def __enter__(self) -> EngineInterface:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cancel_late(work: asyncio.Future[RequestHandle]) -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().cancel()
