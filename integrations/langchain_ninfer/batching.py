"""Many prompts at once: LangChain's `generate` and `batch` families, each as wide as the engine and no wider."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig, ensure_config

from ninfer_core.adapter import concurrency
from ninfer_core.errors import NinferError
from ninfer_core.types import Request

from .errors import translated

_READY: ContextVar[list[tuple[Request, Any]] | None] = ContextVar("ninfer_ready", default=None)
_GATE: ContextVar[asyncio.Semaphore | None] = ContextVar("ninfer_gate", default=None)


def gate() -> AbstractAsyncContextManager[Any]:
    """What the prompts of one `agenerate` pass a few at a time: a long list would overflow the engine's queue."""
    return _GATE.get() or nullcontext()


def take_ready(request: Request) -> Any:
    """The handle of an equal request that `generate` has submitted already."""
    ready = _READY.get() or []
    for place, (known, handle) in enumerate(ready):
        if known == request:
            del ready[place]
            return handle
    return None


class ManyAtOnce(BaseChatModel):
    """A chat model whose engine runs several requests at once, but lets only so many wait."""

    streaming: bool = False
    """Whether `invoke` goes through a stream, so that callbacks see every piece."""

    @abstractmethod
    def _engine(self, model: str | None = None) -> Any:
        """The engine that serves this model."""

    @abstractmethod
    def _prepare(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> tuple[Any, Request, str]:
        """Engine, request and the name to report."""

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Core's `generate`, with all prompts running at once instead of one after the other."""
        ready: list[tuple[Request, Any]] = []
        if len(messages) > 1 and self.cache is None and self.rate_limiter is None and not self.streaming:
            ready = self._submit_all(messages, stop, kwargs)
        token = _READY.set(ready)
        try:
            return super().generate(messages, stop, callbacks, **kwargs)
        finally:
            _READY.reset(token)
            for _, handle in ready:
                handle.cancel()

    async def agenerate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Core's `agenerate`, with as many prompts at once as the engine has places."""
        if len(messages) < 2:
            return await super().agenerate(messages, stop, callbacks, **kwargs)
        token = _GATE.set(asyncio.Semaphore(self._places()))
        try:
            return await super().agenerate(messages, stop, callbacks, **kwargs)
        finally:
            _GATE.reset(token)

    def _submit_all(
        self, messages: list[list[BaseMessage]], stop: list[str] | None, options: Mapping[str, Any]
    ) -> list[tuple[Request, Any]]:
        """Requests that run already; one that fails to start is left to its turn, where its error belongs."""
        ready: list[tuple[Request, Any]] = []
        if get_llm_cache() is not None:
            return ready
        names = ("tags", "metadata", "run_name", "run_id", "ls_structured_output_format", "structured_output_format")
        rest = {key: value for key, value in options.items() if key not in names}
        for prompt in messages:
            try:
                engine, request, _ = self._prepare(prompt, stop, rest)
                ready.append((request, engine.submit(request)))
            except (NinferError, TypeError):
                continue
        return ready

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Core's `batch`; without `max_concurrency` as many run at once as the engine has places."""
        wide = self._wide(config, len(inputs))
        return super().batch(inputs, wide, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(  # type: ignore[override]
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, AIMessage | Exception]]:
        """Core's `batch_as_completed`, as wide as `batch`."""
        wide = self._wide(config, len(inputs))
        return super().batch_as_completed(inputs, wide, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload, no-any-return]

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Core's `abatch`, as wide as `batch`."""
        wide = self._wide(config, len(inputs))
        return await super().abatch(inputs, wide, return_exceptions=return_exceptions, **kwargs)

    async def abatch_as_completed(  # type: ignore[override]
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, AIMessage | Exception]]:
        """Core's `abatch_as_completed`, as wide as `batch`."""
        wide = self._wide(config, len(inputs))
        made = super().abatch_as_completed(inputs, wide, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]
        async for place, answer in made:
            yield place, answer

    def _places(self) -> int:
        with translated():
            return max(concurrency(self._engine()), 1)

    def _wide(self, config: Any, count: int) -> Any:
        if not count or (isinstance(config, Sequence) and not config):
            return config
        width = self._places()
        # Core reads max_concurrency of the first configuration only.
        first, *others = config if isinstance(config, Sequence) else [config]
        made = ensure_config(first)
        if made.get("max_concurrency") is None:
            made = {**made, "max_concurrency": min(count, width)}
        return [cast(RunnableConfig, made), *others] if isinstance(config, Sequence) else made
