"""The measurements of one model: decode against depth, drafts, prefill, batches, and gaps while a prompt is read.

The published method: one warm-up, five fixed seeds, mean and sample deviation; the decode rate of a run is
(tokens - 1) / (time from its first to its last token).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from ..errors import InvalidRequestError
from ..runtime.handle import RequestHandle
from ..runtime.options import PAGE
from ..runtime.running import Running
from ..types import Completion
from .floors import step_floor
from .results import Figure, figure_of
from .subject import Subject

SEEDS = (1, 2, 3, 4, 5)
CONTEXTS = (7_680, 64_512, 130_048, 260_096)
PUBLISHED_LIMIT = 262_144
BATCHES = (1, 2, 4, 8, 16, 32, 64)
Fill = Literal["auto", "read", "copy"]
Forced = tuple[float, Sequence[int]] | None
LONGEST_ANSWER = 16_384
"""Tokens of the answer that runs beside a prompt: more than are made while that is read."""
PATIENCE = 60.0
"""Seconds that reading one prompt may take before `fill` "auto" copies pages instead."""


@dataclass(frozen=True, slots=True)
class Method:
    """How to measure. `tokens`: of each answer; `warm`: runs before the counted ones; `fill`: see `Context`."""

    tokens: int = 256
    seeds: tuple[int, ...] = SEEDS
    warm: int = 1
    fill: Fill = "auto"
    bandwidth: float = 0.0
    say: Callable[[str], None] = field(default=lambda text: None)


def contexts_for(limit: int, tokens: int, wanted: Sequence[int] | None = None) -> list[int]:
    """Prompt lengths that leave room for `tokens`: those asked for, or the published ones scaled to the context.

    Raises:
        InvalidRequestError: one that was asked for does not fit.
    """
    most = limit - tokens
    if wanted:
        for length in wanted:
            if not 1 <= length <= most:
                raise InvalidRequestError(
                    f"a context of {length} tokens and {tokens} new ones do not fit: this model was loaded with "
                    f"{limit}; choose from 1 to {most}",
                    param="context",
                )
        return list(wanted)
    if limit >= CONTEXTS[-1] + tokens:
        return list(CONTEXTS)
    scaled = (round(length * limit / PUBLISHED_LIMIT / PAGE) * PAGE for length in CONTEXTS)
    made = sorted({max(PAGE, min(length, most // PAGE * PAGE)) for length in scaled})
    return [length for length in made if length <= most]


class Context:
    """Watches a sequence being read, and shortens that where `copy` is set.

    Then only the first chunk and the last page are read. The pages between are copies of those of the first chunk, and
    the recurrent state is that behind it: the same bytes to move per step as a prompt that was read, other contents.
    """

    def __init__(self, subject: Subject, copy: bool) -> None:
        self._subject, self._copy = subject, copy
        self.sequence: Running | None = None

    def __call__(self, sequence: Running) -> None:
        """After a chunk of `sequence`."""
        self.sequence = sequence
        target = (sequence.prompt_tokens - 1) // PAGE * PAGE
        if not self._copy or not PAGE <= sequence.length < target:
            return
        read = sequence.length // PAGE
        state = self._subject.runner.reuse._state
        for i in range(read, target // PAGE):
            state.copy_page(sequence.pages[i % read], sequence.pages[i])
        sequence.length = target


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: its completion and its token ids."""

    done: Completion
    tokens: list[int]

    @property
    def decode_rate(self) -> float:
        """Tokens a second from the first to the last."""
        return (self.done.usage.completion_tokens - 1) / self.done.timings.decode


def one_run(subject: Subject, context: int, method: Method, seed: int, *, copy: bool, forced: Forced = None) -> Run:
    """One request alone. `forced`: mean of accepted drafts, and the known answer."""
    watch = Context(subject, copy)
    subject.force(*(forced or (None,)))
    with subject.watching(watch):
        done = subject.start(subject.prompt(context, seed), method.tokens, seed).result()
    assert watch.sequence is not None
    if done.usage.completion_tokens != method.tokens:
        raise RuntimeError(f"{done.usage.completion_tokens} tokens came instead of {method.tokens}")
    return Run(done, watch.sequence.tokens[context:])


def decode(
    subject: Subject,
    contexts: Sequence[int],
    method: Method,
    *,
    answers: dict[tuple[int, int], list[int]] | None = None,
    forced: float | None = None,
) -> list[Figure]:
    """Decode rates and, where prompts are read, prefill rates and times to the first token, for each context.

    `answers` collects the tokens of each (context, seed), or, with `forced` (the mean number of accepted drafts),
    provides them.
    """
    made: list[Figure] = []
    slow = False
    for context in contexts:
        copy = (method.fill == "copy" or (method.fill == "auto" and slow)) and _copies(subject, context)
        for i in range(method.warm):
            warm: Forced = (forced, ()) if forced is not None and subject.on_device else None
            run = one_run(subject, context, method, 1000 + i, copy=copy, forced=warm)
        if method.warm and not copy:
            slow = run.done.timings.prefill * 4 > PATIENCE  # the next context is several times as long
        runs = []
        for seed in method.seeds:
            known: Forced = None
            if forced is not None:
                known = (forced, (answers or {}).get((context, seed), ()))
            runs.append(one_run(subject, context, method, seed, copy=copy, forced=known))
            if answers is not None and forced is None:
                answers[context, seed] = runs[-1].tokens
        found = _figures(subject, context, method, runs, copy, forced)
        method.say(f"{found[0].name}: {found[0].value:,.1f} {found[0].unit}")
        made += found
    return made


def _figures(
    subject: Subject, context: int, method: Method, runs: Sequence[Run], copy: bool, forced: float | None
) -> list[Figure]:
    drafts = subject.draft_tokens
    usages = [run.done.usage for run in runs]
    rounds = sum(usage.rounds for usage in usages)
    # The first token comes from the prompt: a round is what made the others.
    per_round = sum(usage.completion_tokens - 1 for usage in usages) / max(1, rounds) if drafts else 1.0
    about: dict[str, Any] = _about(subject, context, copy)
    if drafts:
        positions = [
            sum(u.accepted_by_position[i] for u in usages if i < len(u.accepted_by_position)) for i in range(drafts)
        ]
        about["tokens_per_round"] = round(per_round, 4)
        about["accepted_by_position"] = [round(count / max(1, rounds), 4) for count in positions]
        about["accepted"] = round(
            sum(u.accepted_tokens for u in usages) / max(1, sum(u.drafted_tokens for u in usages)), 4
        )
        if forced is not None:
            about["forced"] = f"{forced:g} of {drafts} drafts are accepted on average, whatever was drawn"
    floor = step_floor(subject.config, subject.formats, context=context, drafts=drafts, kv_cache=subject.kv_cache)
    about["floor_bytes"] = floor.as_dict()
    best = method.bandwidth / floor.total * per_round if method.bandwidth else None
    name = f"mtp{drafts}" + ("-forced" if forced is not None else "")
    made = [
        figure_of(
            f"{subject.label}/decode/{name}/{context}", [r.decode_rate for r in runs], "tok/s", floor=best, **about
        )
    ]
    if not copy and forced is None and drafts == 0:
        about = _about(subject, context, copy)
        rates = [context / run.done.timings.prefill for run in runs]
        made.append(figure_of(f"{subject.label}/prefill/{context}", rates, "tok/s", **about))
        first = [run.done.timings.first_token for run in runs]
        made.append(figure_of(f"{subject.label}/first-token/{context}", first, "s", **about))
    return made


def _copies(subject: Subject, context: int) -> bool:
    """Whether pages lie between the first chunk and the last page of a prompt, which can be copied."""
    return (context - 1) // PAGE * PAGE > subject.runner.chunk


def _about(subject: Subject, context: int, copy: bool) -> dict[str, Any]:
    filled = (
        "copied pages and state: only the first chunk and the last page were read" if copy else "prompt read in full"
    )
    return {
        "context": context,
        "filled": filled,
        "weights": subject.weights,
        "kv_cache": subject.kv_cache,
        "route": subject.route,
    }


def batch(subject: Subject, sizes: Sequence[int], method: Method, *, context: int) -> list[Figure]:
    """Aggregate decode rates with `size` sequences of `context` prompt tokens each, without drafts.

    The clock runs over the answer of the sequence that started last; all the others decode during the whole of it.
    """
    if subject.draft_tokens:
        raise ValueError("batches are measured without drafts, where every step gives each sequence one token")
    made = []
    for size in sizes:
        rates = [
            _batch_run(subject, size, method, context, seed) for seed in (method.seeds[:1] * method.warm + method.seeds)
        ]
        floor = step_floor(subject.config, subject.formats, context=context, sequences=size, kv_cache=subject.kv_cache)
        best = method.bandwidth / floor.total * size if method.bandwidth else None
        about = {
            **_about(subject, context, _copies(subject, context)),
            "sequences": size,
            "floor_bytes": floor.as_dict(),
        }
        name = f"{subject.label}/batch/{context}/{size}"
        made.append(figure_of(name, rates[method.warm :], "tok/s", floor=best, **about))
        method.say(f"{name}: {made[-1].value:,.1f} tok/s")
    return made


def spare_tokens(size: int) -> int:
    """Tokens that the first of `size` sequences makes before the last one starts: two chunks each are read between."""
    return 4 * size + 64


def _batch_run(subject: Subject, size: int, method: Method, context: int, seed: int) -> float:
    spare = spare_tokens(size)
    with subject.watching(Context(subject, copy=True)):
        prompts = [subject.prompt(context, 1000 * seed + i) for i in range(size)]
        others = [subject.start(p, method.tokens + spare, seed) for p in prompts[:-1]]
        last = subject.start(prompts[-1], method.tokens, seed).result()
        early = sum(handle.done for handle in others)
        for handle in others:
            handle.cancel()
        for handle in others:
            handle.wait()
    if early:
        raise RuntimeError(f"{early} of {size} sequences ended before the last one: raise the number of tokens")
    return size * (last.usage.completion_tokens - 1) / last.timings.decode


def gap(subject: Subject, method: Method, *, context: int) -> Figure:
    """The longest wait between two tokens of a running answer while another prompt of `context` tokens is read.

    The waits in which that prompt begins and ends are among them. Before, a prompt of that length is read alone.
    """
    alone = subject.start(subject.prompt(context, 3), 1, 3).result() if method.warm else None
    stamps: list[float] = []
    room = min(LONGEST_ANSWER, subject.context_length - PAGE)
    running, prompt = subject.start(subject.prompt(PAGE, 1), room, 1), subject.prompt(context, 2)
    thread = threading.Thread(target=_Clock(running, stamps).run, daemon=True)
    thread.start()
    while len(stamps) < 8 and not running.done:
        time.sleep(0.002)
    before = [b - a for a, b in pairwise(stamps)]
    begin = time.monotonic()
    done = subject.start(prompt, 1, 2).result()
    end = time.monotonic()
    while stamps[-1] <= end and not running.done:
        time.sleep(0.002)
    running.cancel()
    thread.join()
    waits = [b - a for a, b in pairwise(stamps) if b > begin and a < end]
    if not waits or stamps[-1] <= end:
        raise RuntimeError("the running answer ended while the prompt was read: make the answer longer")
    about = {
        **_about(subject, context, False),
        "median_before_ms": round(statistics.median(before) * 1e3, 3),
        "median_during_ms": round(statistics.median(waits) * 1e3, 3),
        "waits": len(waits),
        "prefill_seconds": round(done.timings.prefill, 3),
        "prefill_tokens_per_second": round(context / done.timings.prefill, 1),
        "first_alone_seconds": round(alone.timings.prefill, 3) if alone else None,
    }
    return Figure(f"{subject.label}/gap/{context}", max(waits) * 1e3, "ms", details=about)


class _Clock:
    """Notes when each piece of a running request's text arrives."""

    def __init__(self, handle: RequestHandle, stamps: list[float]) -> None:
        self._handle, self._stamps = handle, stamps

    def run(self) -> None:
        """Until the request ends."""
        for _ in self._handle.batches():
            self._stamps.append(time.monotonic())
