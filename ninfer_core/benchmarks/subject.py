"""What is measured: an engine with a model's weights, or the same scheduler and runner over random weights."""

from __future__ import annotations

import gc
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..artifact import Artifact, TensorInfo
from ..config import PUBLISHED, ModelConfig
from ..engine import Engine
from ..errors import InvalidRequestError
from ..inventory import TOKEN_IDS, default_recipe, inventory
from ..runtime.handle import RequestHandle
from ..runtime.options import EngineOptions
from ..runtime.runner import Runner
from ..runtime.running import Running
from ..runtime.sampler import Sampler
from ..runtime.session import Session
from ..runtime.validation import SamplingParams
from ..types import Event, FinishReason, Request, Sampling, TextDelta
from .floors import Formats

if TYPE_CHECKING:
    from ..packed import PackedWeights

SAMPLING = Sampling(temperature=1.0, top_p=0.95, top_k=20)
"""How every measured token is drawn: the models' own setting for thinking."""
RANDOM = {"35b-a3b": "qwen3.6-35b-a3b", "27b": "qwen3.6-27b", "demo": "ninfer-demo"}
"""Names of `--random-weights`."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to measure: `model` is a name or path; or, with `random`, a shape of `RANDOM` with random weights."""

    model: str = ""
    random: str = ""
    device: str = "auto"
    kv_cache: str = "int8"
    options: Mapping[str, Any] = field(default_factory=dict)


class Subject(ABC):
    """Something that generates. Attributes: what the measurements need to know of it.

    `label` begins the names of its figures; `weights` is "artifact" or "random"; `addressable`: ids that can be drawn.
    """

    label: str
    weights: str
    config: ModelConfig
    formats: Formats
    device: torch.device
    route: str
    kv_cache: str
    draft_tokens: int
    context_length: int
    addressable: int
    runner: Runner
    _forced: float | None = None

    @abstractmethod
    def start(self, tokens: Sequence[int], limit: int, seed: int) -> RequestHandle:
        """Submit a prompt of token ids whose answer has exactly `limit` tokens, if it fits."""

    @abstractmethod
    def prompt(self, length: int, seed: int) -> list[int]:
        """A prompt of exactly `length` tokens that no other seed begins with."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""

    def release(self) -> None:
        """`close`, and give the device's memory back."""
        self.close()
        del self.runner
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def on_device(self) -> bool:
        """Whether rounds run on the device without the host."""
        return self.runner._flights is not None

    def force(self, mean: float | None, answer: Sequence[int] = ()) -> None:
        """From now on have `mean` drafts a round accepted on average; None: those that are right, as always.

        Where rounds run on the device, it is told how many to accept, whatever it drew. Elsewhere drafts are replaced
        by what will be drawn: `answer`, the tokens of the same request without drafts.

        Raises:
            InvalidRequestError: the answer is needed and not known.
        """
        flights = self.runner._flights
        if flights is None:
            if mean is not None and not answer:
                raise InvalidRequestError(
                    "forced acceptance replays the answer of a pass without drafts here: let --drafts hold 0 too",
                    param="forced",
                )
            self.runner.proposal = None if mean is None else ForcedDrafts(answer, mean, self.addressable)
        elif mean != self._forced:
            lanes: Any = flights.rounds
            counts = None if mean is None else [accepted_in(i, mean) for i in range(PATTERN)]
            lanes.pattern = None if counts is None else torch.tensor(counts, dtype=torch.int32, device=self.device)
            lanes._graphs.clear()  # those at hand were captured for another pattern
            self._forced = mean

    @contextmanager
    def watching(self, watch: Callable[[Running], None]) -> Iterator[None]:
        """Call `watch` with the sequence after every prompt chunk."""
        self.runner.after_chunk = watch
        try:
            yield
        finally:
            self.runner.after_chunk = None


PATTERN = 64
"""Rounds after which the device takes the same forced counts again."""


def accepted_in(i: int, mean: float) -> int:
    """Forced drafts of round `i`: whole numbers around `mean`, evenly spread."""
    return int((i + 1) * mean + 1e-9) - int(i * mean + 1e-9)


class ForcedDrafts:
    """Replaces drafts by tokens of a known answer, `mean` right ones a round; the others are made wrong."""

    def __init__(self, answer: Sequence[int], mean: float, addressable: int) -> None:
        self._answer, self._mean, self._addressable = answer, mean, addressable
        self._rounds = 0

    def __call__(self, sequence: Running, made: list[int]) -> list[int]:
        """The drafts for the next round of `sequence`."""
        right = accepted_in(self._rounds, self._mean)
        self._rounds += 1
        at = sequence.emitted
        known = list(self._answer[at : at + len(made)])
        known += [0] * (len(made) - len(known))
        return [token if j < right else (token + 1) % self._addressable for j, token in enumerate(known)]


class EngineSubject(Subject):
    """A model in the public engine: everything a caller waits for is measured."""

    weights = "artifact"

    def __init__(self, target: Target, *, draft_tokens: int, max_sequences: int, context: int | None) -> None:
        options = EngineOptions(
            model=target.model,
            device=target.device,  # type: ignore[arg-type]
            kv_cache=target.kv_cache,  # type: ignore[arg-type]
            draft_tokens=draft_tokens,
            max_sequences=max_sequences,
            max_queue=4 * max_sequences + 8,
            context_length="auto" if context is None else context,
            prefix_cache=False,
            adaptive_drafts=False,
            **target.options,
        )
        self._engine = engine = Engine.load(options=options)
        with Artifact.open(engine._path) as artifact:
            self.formats = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}
        self.label, self.config, self.route = engine.model_id, engine.config, engine.route
        self.device = engine._runner._device
        self.kv_cache, self.draft_tokens = target.kv_cache, engine.draft_tokens
        self.context_length = engine.context_length
        self.addressable = engine.tokenizer.addressable
        self.runner = engine._runner

    def start(self, tokens: Sequence[int], limit: int, seed: int) -> RequestHandle:
        """See `Subject.start`."""
        sampling = Sampling(SAMPLING.temperature, SAMPLING.top_p, SAMPLING.top_k, seed=seed)
        request = Request(prompt=tuple(tokens), max_tokens=limit, ignore_eos=True, sampling=sampling, thinking=False)
        return self._engine.submit(request)

    def prompt(self, length: int, seed: int) -> list[int]:
        """Prose of our own in an order that the seed chooses."""
        from .workloads import prose

        return prose(self._engine.tokenizer.encode, length, seed)

    def close(self) -> None:
        """See `Subject.close`."""
        self._engine.close()


PATCHES = 1 << 16
"""Patch rows of the largest image by the published models' settings: 16,777,216 pixels."""


class RandomSource:
    """Random tensors under the object names of an artifact: what `load_weights` reads.

    Matrices have a standard deviation of columns ** -0.5, so that activations keep their size through all layers.
    """

    def __init__(self, config: ModelConfig, seed: int, vision: bool = False) -> None:
        self.config = config
        self.formats: Formats = inventory(config, default_recipe(config), vision=vision)
        self.tensors = {name: TensorInfo(name, shape, fmt, 0) for name, (shape, fmt) in self.formats.items()}
        self._seed = seed

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One object, the same for every call."""
        shape, _ = self.formats[name]
        generator = torch.Generator().manual_seed(self._seed + sum(name.encode()) * 7919 + len(name))
        if name.endswith("token_ids"):
            return torch.randperm(self.config.vocab_size, generator=generator)[: shape[0]]
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def packed(self, device: torch.device, mtp: bool, host_embedding: bool = False) -> PackedWeights:
        """All weights in kernel order, made on the device."""
        from ..packed import random_packed

        return random_packed(self.config, seed=self._seed, device=device, mtp=mtp, host_embedding=host_embedding)


class RandomSubject(Subject):
    """Random weights in the recipe's formats, behind the engine's own scheduler and runner, without text."""

    weights = "random"

    def __init__(self, target: Target, *, draft_tokens: int, max_sequences: int, context: int | None) -> None:
        from ..runtime.loading import load_model
        from ..runtime.loop import start_loop

        config = random_config(target.random)
        options = EngineOptions(
            model=target.random,
            device=target.device,  # type: ignore[arg-type]
            kv_cache=target.kv_cache,  # type: ignore[arg-type]
            draft_tokens=draft_tokens,
            max_sequences=max_sequences,
            context_length="auto" if context is None else context,
            **{"prefix_cache": False, "adaptive_drafts": False, **target.options},
        )
        source, patches = RandomSource(config, seed=7, vision=options.vision), PATCHES if options.vision else 0
        loaded = load_model(source, options, patches, TOKEN_IDS.get(config.model_id, 0))  # type: ignore[arg-type]
        self.formats, self.config, self.device, self.route = source.formats, config, loaded.device, loaded.route
        self.label = f"{config.model_id}-random"
        self.kv_cache, self.draft_tokens = target.kv_cache, loaded.draft_tokens
        self.plan = loaded.plan
        self.context_length = loaded.plan.context_length
        self.addressable = TOKEN_IDS.get(config.model_id, config.vocab_size)
        self.runner = loaded.runner(lambda raw: [], adaptive=options.adaptive_drafts)
        self._scheduler, self._loop = start_loop(
            self.runner,
            max_sequences=max_sequences,
            max_queue=4 * max_sequences + 8,
            threads=loaded.threads,
            name=self.label,
        )

    def start(self, tokens: Sequence[int], limit: int, seed: int) -> RequestHandle:
        """See `Subject.start`."""
        return self.enqueue(Request(prompt=tuple(tokens)), tokens, limit, seed)

    def enqueue(
        self,
        request: Request,
        tokens: Sequence[int],
        limit: int,
        seed: int,
        *,
        machine: CountingMachine | None = None,
        sampler: Sampler | None = None,
        media: tuple[Any, ...] = (),
    ) -> RequestHandle:
        """As `start`, for a request that reads as these tokens; with an output machine, a sampler, media of its own."""
        handle = RequestHandle(request, on_cancel=self._scheduler.notify)
        session = Session(
            handle, TokenPrompt(tuple(tokens), media=media), machine or CountingMachine(), limit=limit, seed=seed
        )
        sampler = sampler or Sampler(sampling_params(seed), addressable=self.addressable, prompt=tokens)
        self._scheduler.enqueue(session, sampler)
        return handle

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random ids."""
        return random.Random(seed).choices(range(self.addressable), k=length)

    def close(self) -> None:
        """See `Subject.close`."""
        self._loop.stop()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is token ids alone."""

    token_ids: tuple[int, ...]
    thinking: bool = False
    media: tuple[Any, ...] = ()
    checkpoints: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()


class CountingMachine:
    """An output machine for ids without text: keeps everything, writes nothing."""

    stopped = False
    ends: tuple[int, ...] = ()
    kept = 0
    in_reasoning = False
    reasoning_tokens = 0
    stop_sequence: str | None = None

    def feed(self, ids: Sequence[int], logprobs: Any = None) -> list[Event]:
        """Take all, and say that something came."""
        self.kept = len(ids)
        return [TextDelta("")]

    def forced_close(self) -> list[int]:
        """There is nothing to close."""
        return []

    def finish(self, reason: FinishReason) -> list[Event]:
        """There is nothing to flush."""
        return []

    def finish_reason(self, default: FinishReason) -> FinishReason:
        """The reason as given."""
        return default


def sampling_params(seed: int) -> SamplingParams:
    """`SAMPLING` with every field set."""
    from ..runtime.validation import resolve_sampling

    given = Sampling(SAMPLING.temperature, SAMPLING.top_p, SAMPLING.top_k, seed=seed)
    rest = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
    return resolve_sampling(given, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **rest})


def random_config(name: str) -> ModelConfig:
    """The configuration of a shape of `RANDOM`.

    Raises:
        InvalidRequestError: an unknown name.
    """
    if name not in RANDOM:
        raise InvalidRequestError(
            f"--random-weights is {name!r}; it must be one of {', '.join(RANDOM)}", param="random_weights"
        )
    if name == "demo":
        from .. import store

        with Artifact.open(store.demo_path()) as artifact:
            return artifact.config
    return PUBLISHED[RANDOM[name]]


def open_subject(target: Target, *, draft_tokens: int, max_sequences: int = 1, context: int | None = None) -> Subject:
    """Load what `target` says.

    Raises:
        ModelNotFoundError, ArtifactError, DeviceError, MemoryPlanError: see `Engine.load`.
        InvalidRequestError: both a model and random weights, or neither.
    """
    if bool(target.model) == bool(target.random):
        raise InvalidRequestError("name either a model or --random-weights, not both and not neither", param="model")
    made = RandomSubject if target.random else EngineSubject
    return made(target, draft_tokens=draft_tokens, max_sequences=max_sequences, context=context)
