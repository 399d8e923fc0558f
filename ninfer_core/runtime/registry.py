"""Named engines of this process: made on first use, loaded once, shared by all that ask for the name. No torch."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import EngineClosedError, EngineConflictError, EngineForkError
from ..types import Request, Tool
from .handle import RequestHandle
from .interface import EngineInterface, Prompt
from .options import EngineOptions


class NamedEngine(EngineInterface):
    """The handle of a named engine. Making it loads nothing; the first request, or `load`, loads the model.

    While one caller loads, others wait; a failed load raises the same error for all of them and for later requests,
    until `load` is called again.
    """

    def __init__(self, name: str, spec: EngineOptions, registry: Registry) -> None:
        self.name = name
        self.spec = spec
        self._registry = registry
        self._engine: EngineInterface | None = None
        self._card: EngineInterface | None = None
        self._error: BaseException | None = None
        self._state = "new"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)

    def load(self) -> EngineInterface:
        """Load the model, or wait for the caller that is loading it; returns the loaded engine.

        Raises:
            EngineConflictError: another named engine is loaded in this process; close it first.
            EngineForkError: it was loaded in a parent process.
            EngineClosedError: it was closed.
        """
        self._check_process()
        with self._lock:
            if self._state == "loading":
                self._turn.wait_for(lambda: self._state != "loading")
                if self._error is not None:
                    raise self._error
            if self._state == "ready" and self._engine is not None:
                return self._engine
            if self._state == "closed":
                raise EngineClosedError(f"engine {self.name!r} was closed; ask get_engine for a new one")
            self._state, self._error, self._pid = "loading", None, os.getpid()
        try:
            self._registry.claim(self)
            engine = self._registry.loader(self.spec)
        except BaseException as error:
            with self._lock:
                self._state, self._error = "failed", error
                self._turn.notify_all()
            self._registry.disclaim(self)
            raise
        with self._lock:
            self._engine, self._state = engine, "ready"
            self._turn.notify_all()
        return engine

    async def aload(self) -> EngineInterface:
        """`load` in a worker thread."""
        return await asyncio.to_thread(self.load)

    def _check_process(self) -> None:
        if self._state in ("loading", "ready") and os.getpid() != self._pid:
            raise EngineForkError(
                f"engine {self.name!r} was loaded in process {self._pid}, which forked this one; load models after "
                "forking, or start processes with the spawn method"
            )

    def _loaded(self) -> EngineInterface:
        self._check_process()
        if self._state == "ready" and self._engine is not None:
            return self._engine
        if self._state == "failed" and self._error is not None:
            raise self._error
        return self.load()

    def _description(self) -> EngineInterface:
        """The loaded engine, or one that knows the model's files only (no weights)."""
        if self._engine is not None:
            return self._engine
        with self._lock:
            if self._card is None:
                self._card = self._registry.describer(self.spec)
            return self._card

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names this engine answers to; known without weights."""
        return self._description().served_names

    @property
    def context_length(self) -> int:
        """The served context; before loading, the model's own limit unless the options set one."""
        return self._description().context_length

    @property
    def profile(self) -> dict[str, Any]:
        """Capabilities; known without weights."""
        return self._description().profile

    @property
    def state(self) -> str:
        """`new`, `loading`, `ready`, `failed` or `closed`."""
        return self._engine.state if self._state == "ready" and self._engine is not None else self._state

    def submit(self, request: Request) -> RequestHandle:
        """Load if needed, then queue the request."""
        return self._loaded().submit(request)

    def count_tokens(
        self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None
    ) -> int:
        """Tokens of the rendered prompt; needs the tokenizer and the template only."""
        return self._description().count_tokens(messages, tools, thinking=thinking)

    @property
    def frontend(self) -> Any:
        """Tokenizer and template of the model; known without weights."""
        return self._description().frontend  # type: ignore[attr-defined]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.frontend.tokenizer

    def render(self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None) -> str:
        """The prompt text; needs the template only."""
        return self._description().render(messages, tools, thinking=thinking)  # type: ignore[attr-defined]

    def health(self) -> dict[str, Any]:
        """The loaded engine's health, else the state."""
        return self._engine.health() if self._engine is not None else {"status": self._state}

    def stats(self) -> dict[str, Any]:
        """The loaded engine's stats; empty before."""
        return self._engine.stats() if self._engine is not None else {}

    def close(self) -> None:
        """Close the engine and free its name. Idempotent."""
        with self._lock:
            if self._state == "loading":
                self._turn.wait_for(lambda: self._state != "loading")
            engine, self._engine, self._state = self._engine, None, "closed"
        if engine is not None and os.getpid() == self._pid:
            engine.close()
        self._registry.forget(self)


class Registry:
    """Names to engines. `loader` makes a loaded engine from options, `describer` one that reads no weights."""

    def __init__(
        self,
        loader: Callable[[EngineOptions], EngineInterface],
        describer: Callable[[EngineOptions], EngineInterface],
    ) -> None:
        self.loader = loader
        self.describer = describer
        self._engines: dict[str, NamedEngine] = {}
        self._holder: NamedEngine | None = None
        self._lock = threading.Lock()

    def get(self, name: str, spec: EngineOptions | None) -> NamedEngine:
        """The engine of that name, made if new.

        Raises:
            EngineConflictError: the name is taken with other options.
        """
        with self._lock:
            known = self._engines.get(name)
            if known is None:
                known = self._engines[name] = NamedEngine(name, spec or EngineOptions(), self)
            elif spec is not None and spec != known.spec:
                raise EngineConflictError(
                    f"engine {name!r} exists with other options ({'; '.join(spec.differences(known.spec))}); "
                    "use another name, equal options, or close it first"
                )
            return known

    def claim(self, engine: NamedEngine) -> None:
        """Take the process's place for a loaded engine."""
        with self._lock:
            holder = self._holder
            if holder is not None and holder is not engine:
                raise EngineConflictError(
                    f"engine {holder.name!r} ({holder.spec.model}) is loaded in this process and {engine.name!r} "
                    f"({engine.spec.model}) cannot be loaded beside it; close the first"
                )
            self._holder = engine

    def disclaim(self, engine: NamedEngine) -> None:
        """Give that place back."""
        with self._lock:
            if self._holder is engine:
                self._holder = None

    def forget(self, engine: NamedEngine) -> None:
        """The engine was closed: its name and its place are free."""
        self.disclaim(engine)
        with self._lock:
            if self._engines.get(engine.name) is engine:
                del self._engines[engine.name]
