"""The engine: one loaded model, thread-safe, with a synchronous core and an asynchronous shell. Public entry point.

    from ninfer_core import Engine

    with Engine.load("demo") as engine:
        print(engine.generate("Say hello.", thinking=False).text)
        for event in engine.stream("What is the capital of France?"):
            ...

Importing this module does not import torch; loading an engine does.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from . import store
from .errors import (
    ContextOverflowError,
    EngineClosedError,
    EngineFailedError,
    EngineForkError,
    InvalidRequestError,
    NinferError,
)
from .frontend.output import parse_text
from .frontend.prompt import Frontend
from .runtime.handle import RequestHandle
from .runtime.interface import EngineInterface, Prompt, make_request, model_profile
from .runtime.options import EngineFields, EngineOptions, engine_options
from .runtime.registry import NamedEngine, Registry
from .runtime.session import Session
from .runtime.validation import check_request, resolve_sampling
from .types import Message, Request, TokenLogprob, Tool

if TYPE_CHECKING:
    from .artifact import Artifact
    from .runtime.grammar import Grammar
    from .runtime.sampler import RawLogprob

__all__ = ["Engine", "EngineOptions", "ModelCard", "RequestHandle", "get_engine", "parse_output", "render_prompt"]

log = logging.getLogger("ninfer.engine")
WATCHDOG = {"cpu": 1800.0, "cuda": 600.0}
"""Seconds after which a step counts as hung where `watchdog` is "auto". The first steps on a GPU compile kernels."""


class ModelCard(EngineInterface):
    """What is known of a model without its weights: names, limits, capabilities, tokenizer, template.

    It counts and renders, and cannot generate.
    """

    def __init__(self, options: EngineOptions, artifact: Artifact | None = None) -> None:
        self.spec = options
        self._path = store.resolve(options.model)
        if artifact is None:
            artifact = _open(self._path)
        self.config = artifact.config
        self.model_id = artifact.model_id
        self.frontend = _frontend(self._path, artifact)
        if options.vision:
            self.frontend = self.frontend.seeing(artifact.resources)
        limit = self.config.max_position_embeddings
        self._context = limit if options.context_length == "auto" else min(options.context_length, limit)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The name it was loaded by, its canonical name and the model's id."""
        names = (self.spec.model, store.canonical(self.spec.model), self.model_id)
        plain = tuple(name for name in dict.fromkeys(names) if "/" not in name and os.sep not in name)
        return plain or (self.model_id,)

    @property
    def context_length(self) -> int:
        """The model's own limit, or the context asked for."""
        return self._context

    @property
    def vision(self) -> bool:
        """Whether images and videos can be read: asked for, and the model has a vision tower."""
        return self.spec.vision

    @property
    def profile(self) -> dict[str, Any]:
        """Capabilities, with the keys of the public model-profile data set."""
        return model_profile(self.served_names[0], self.context_length, vision=self.vision)

    @property
    def state(self) -> str:
        """Always `new`."""
        return "new"

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: `encode`, `decode`, `token_bytes`."""
        return self.frontend.tokenizer

    def submit(self, request: Request) -> RequestHandle:
        """Always refuses: there are no weights."""
        raise EngineClosedError(f"{self.spec.model} is described, not loaded; use Engine.load or get_engine")

    def check(self, request: Request) -> None:
        """Validate a request as `submit` does, short of its length."""
        check_request(request, addressable=self.frontend.tokenizer.addressable, vision=self.vision, grammars=True)

    def prepare(self, request: Request, limit: int | None = None) -> Any:
        """Validate, render and tokenize. A text longer than `limit` tokens in any case is refused before it is encoded.

        Raises:
            InvalidRequestError: see `submit`.
        """
        self.check(request)
        try:
            return self.frontend.prepare(request, limit)
        except NinferError:
            raise
        except RecursionError as error:
            raise InvalidRequestError("the request is nested too deeply to be rendered", param="messages") from error
        except Exception as error:
            raise EngineFailedError(f"the prompt could not be prepared ({type(error).__name__}: {error})") from error

    def count_tokens(
        self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None
    ) -> int:
        """Tokens of the prompt these render to: what `usage.prompt_tokens` will say."""
        if isinstance(messages, Request):
            return len(self.prepare(messages).token_ids)
        return len(self.prepare(make_request(messages, tools=tuple(tools or ()), thinking=thinking)).token_ids)

    def render(self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None) -> str:
        """The prompt text these render to."""
        if isinstance(messages, Request):
            request = messages
        else:
            request = make_request(messages, tools=tuple(tools or ()), thinking=thinking)
        self.check(request)
        return self.frontend.render(request)

    def health(self) -> dict[str, Any]:
        """`{"status": "new"}`."""
        return {"status": self.state}

    def stats(self) -> dict[str, Any]:
        """Nothing to count."""
        return {}

    def close(self) -> None:
        """End the processes that have read media for counting, if any."""
        if self.frontend.media is not None:
            self.frontend.media.close()


class Engine(ModelCard):
    """One loaded model. Make it with `Engine.load`; close it, or use it as a context manager.

    Many requests run at once; all methods may be called from any thread and any event loop.
    """

    def __init__(self, options: EngineOptions, progress: Callable[[int, int], None] | None = None) -> None:
        from .runtime.loading import load_model
        from .runtime.loop import start_loop

        artifact = _open(store.resolve(options.model))
        super().__init__(options, artifact)
        media = self.frontend.media
        patches = media.most_patches if media is not None else 0
        with artifact:
            loaded = load_model(artifact, options, patches, self.frontend.tokenizer.addressable, progress)
        self.route = loaded.route
        self.plan = loaded.plan
        self.draft_tokens = loaded.draft_tokens
        self._context = loaded.plan.context_length
        self._runner = loaded.runner(
            partial(_decorate, self.frontend.tokenizer),
            adaptive=options.adaptive_drafts,
            answers=options.cache_answers,
            describe=self.frontend.tokenizer.decode,
        )
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._scheduler, self._loop = start_loop(
            self._runner,
            max_sequences=options.max_sequences,
            max_queue=options.max_queue,
            threads=loaded.threads,
            name=self.model_id,
            limit=WATCHDOG[loaded.device.type] if options.watchdog == "auto" else options.watchdog,
        )
        warm = (self.frontend.tokenizer, self.frontend.eos_ids)  # a large vocabulary takes seconds to prepare
        warming = threading.Thread(target=_warm_grammars, args=warm, name="ninfer-grammars", daemon=True)
        warming.start()
        self._finalizer = weakref.finalize(self, _stop, self._pid, self._loop, media, loaded, warming)
        if media is not None:
            media.start()

    @classmethod
    def load(
        cls,
        model: str = "demo",
        *,
        options: EngineOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
        **fields: Unpack[EngineFields],
    ) -> Engine:
        """Load a model: a name known to the store, or a path. `fields` are those of `EngineOptions`.

        `progress` is called with (bytes done, bytes in all) while the weights are read, on this thread.

        Raises:
            ModelNotFoundError, ArtifactError: no such model, or one that cannot be used.
            MemoryPlanError, DeviceError: it does not fit, or there is no such device.
            InvalidRequestError: an option out of range. TypeError: an unknown option.
        """
        if options is None:
            options = engine_options(str(model), fields)
        elif fields:
            raise TypeError(f"options= and {sorted(fields)} were both given; use one of the two")
        return cls(options, progress)

    @property
    def state(self) -> str:
        """`ready`, `restarting` after a fault, `stalled` where the device does not answer, `failed` or `closed`."""
        if self._closed:
            return "closed"
        status = self._loop.status
        return "ready" if status in ("ok", "checking") else status

    def submit(self, request: Request) -> RequestHandle:
        """Validate and queue a request; see `EngineInterface.submit`."""
        self._check_usable()
        prompt = self.prepare(request, self._context)
        tokens = prompt.token_ids
        if len(tokens) > self._context:
            raise ContextOverflowError(len(tokens), self._context)
        from .runtime.sampler import Sampler

        params = resolve_sampling(request.sampling, self.frontend.generation_defaults(prompt.thinking))
        room = max(1, self._context - len(tokens))
        limit = min(request.max_tokens or room, room)
        grammar = self._grammar(request, prompt, limit)
        session = Session(
            RequestHandle(request, on_cancel=self._scheduler.notify, position=self._scheduler.position),
            prompt,
            self.frontend.machine(request, prompt),
            limit=limit,
            seed=params.seed,
            reserve=grammar.reserve if grammar is not None else 0,
        )
        addressable = self.frontend.tokenizer.addressable
        sampler = Sampler(params, addressable=addressable, prompt=tokens, logprobs=request.logprobs, grammar=grammar)
        self._scheduler.enqueue(session, sampler)
        return session.handle

    def _grammar(self, request: Request, prompt: Any, limit: int) -> Grammar | None:
        """What constrains the output of a request; None for most."""
        from .runtime.grammar import Grammar, needed, plan_for
        from .runtime.vocabulary import Vocabulary

        if not needed(request):
            return None
        plan = plan_for(request, Vocabulary.of(self.frontend.tokenizer, self.frontend.eos_ids))
        prefix = request.messages[-1].text if prompt.continued else ""
        return Grammar(plan, thinking=prompt.thinking, limit=limit, stop_ids=request.stop_token_ids, prefix=prefix)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise EngineForkError(
                f"this engine was loaded in process {self._pid}, which forked this one; load models after forking, or "
                "start processes with the spawn method"
            )
        if self._closed:
            raise EngineClosedError("the engine is closed; load it again")
        if self._loop.failure is not None:
            raise EngineFailedError(str(self._loop.failure))

    def health(self) -> dict[str, Any]:
        """`status` is `ok` only when a token can be made: the loop runs, and the model worked when last used or tried.

        Else it is `checking` (after a fault: whether a token can be made), or what `state` says. `restarts`: how often
        the engine has begun anew by itself.
        """
        status = "closed" if self._closed else self._loop.status
        found = {"status": status, "model": self.served_names[0], "route": self.route, "restarts": self._loop.restarts}
        if self._loop.failure is not None:
            found["error"] = str(self._loop.failure)
        return found

    def stats(self) -> dict[str, Any]:
        """Requests running and waiting, pages, slots and checkpoints free and in all, and totals since loading."""
        return {**self._scheduler.stats(), "restarts": self._loop.restarts}

    def close(self) -> None:
        """End all requests with `EngineClosedError`, stop the thread and give a GPU's memory back.

        Idempotent; does nothing in a forked child. Loading again is fast while the files are in the page cache.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            self._closed = True
            self._finalizer()


def _stop(pid: int, loop: Any, media: Any, loaded: Any, warming: threading.Thread) -> None:
    """What closing an engine ends: its threads, the processes that decode media, and its hold on a GPU's memory."""
    loop.stop()
    if media is not None:
        media.close()
    if os.getpid() == pid and warming is not threading.current_thread():
        warming.join()  # the interpreter's shutdown would abort on a thread that is inside native code
    if os.getpid() == pid and not loop.alive:
        loaded.free()


def _warm_grammars(tokenizer: Any, eos_ids: Sequence[int]) -> None:
    """Prepare the vocabulary for grammars before the first request that needs it."""
    from .runtime.vocabulary import Vocabulary

    Vocabulary.of(tokenizer, eos_ids)


def _decorate(tokenizer: Any, raw: Sequence[RawLogprob]) -> list[TokenLogprob]:
    """Log-probabilities with the text and bytes of their tokens."""

    def entry(token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = tokenizer.token_bytes(token)
        return TokenLogprob(token, data.decode(errors="replace"), value, data, top)

    return [entry(token, value, tuple(entry(*other) for other in top)) for token, value, top in raw]


def _open(path: Path) -> Artifact:
    from .artifact import Artifact

    return Artifact.open(path)


_FRONTENDS: dict[Path, tuple[tuple[int, ...], Frontend]] = {}
"""The last frontend of each path, with what identifies the files it was made from."""


def _frontend(path: Path, artifact: Artifact) -> Frontend:
    """The frontend of an artifact, made once per process: reading a large vocabulary takes about a second.

    A model that was replaced at the same path gets a new one, and the old one is dropped.
    """
    found = (path / "manifest.json" if path.is_dir() else path).stat()
    stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
    kept = _FRONTENDS.get(path)
    if kept is None or kept[0] != stamp:
        kept = _FRONTENDS[path] = (stamp, Frontend(artifact.resources, artifact.config))
    return kept[1]


@lru_cache(maxsize=8)
def _card(options: EngineOptions) -> ModelCard:
    return ModelCard(options)


_REGISTRY = Registry(lambda options: Engine.load(options=options), _card)


def get_engine(name: str = "default", spec: EngineOptions | None = None) -> NamedEngine:
    """The named engine of this process, made on first use and not loaded until used.

    Raises:
        EngineConflictError: the name is taken with other options; the message lists the fields that differ.
    """
    return _REGISTRY.get(name, spec)


def render_prompt(
    messages: Prompt, tools: Sequence[Tool] | None = None, thinking: bool | None = True, model: str = "demo"
) -> str:
    """The text a conversation is given to the model as. Reads the template and the tokenizer, no weights."""
    return _card(EngineOptions(model=model)).render(messages, tools, thinking=thinking)


def parse_output(text: str, tools: Sequence[Tool] | None = None, thinking: bool = False) -> Message:
    """The message in a model's raw output: reasoning, answer and tool calls apart.

    `thinking`: the prompt had opened a think block, so the text begins inside it. Without `tools` no calls are parsed.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"text is {type(text).__name__}; it must be the model's output as a str", param="text"
        )
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, Tool):
            raise InvalidRequestError(f"tools[{i}] is {type(tool).__name__}; it must be a Tool", param="tools")
    return parse_text(text, tuple(tools or ()), thinking)[0]
