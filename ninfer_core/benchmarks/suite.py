"""The whole measurement of one model, as `ninfer bench MODEL` runs it: bandwidth first, then every part asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import InvalidRequestError
from . import harness
from .bandwidth import read_bandwidth
from .harness import Fill, Method
from .results import Device, Figure, device_of
from .subject import Subject, Target, open_subject

Answers = dict[tuple[int, int], list[int]]
PARTS = ("decode", "batch", "gap")
BATCH_CONTEXT = 1_024


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Numbers left None are the published ones, scaled to a smaller context.

    drafts: tokens drafted per round, one pass each. forced: mean number of accepted drafts of a further pass with the
    most of them (`Subject.force`). batches: sequences at once.
    """

    target: Target
    parts: tuple[str, ...] = ("decode",)
    contexts: tuple[int, ...] | None = None
    drafts: tuple[int, ...] = (0, 3)
    forced: float | None = None
    batches: tuple[int, ...] = harness.BATCHES
    batch_context: int | None = None
    gap_context: int | None = None
    tokens: int | None = None
    seeds: int = 5
    fill: Fill = "auto"
    say: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise InvalidRequestError(f"there is no part {part!r}; there are {', '.join(PARTS)}", param="parts")
        if self.fill not in ("auto", "read", "copy"):
            raise InvalidRequestError(f"fill is {self.fill!r}; it must be auto, read or copy", param="fill")
        if not self.drafts or any(not 0 <= k <= 5 for k in self.drafts) or len(set(self.drafts)) != len(self.drafts):
            raise InvalidRequestError(f"drafts are {self.drafts}; give different numbers from 0 to 5", param="drafts")
        if self.forced is not None and not 0 <= self.forced <= max(self.drafts):
            raise InvalidRequestError(
                f"{self.forced:g} accepted drafts are more than the drafts of a round: they are {self.drafts}",
                param="forced",
            )
        if self.seeds < 1:
            raise InvalidRequestError(f"seeds is {self.seeds}; it must be at least 1", param="seeds")


def run(plan: Plan) -> tuple[Device, list[Figure]]:
    """Measure; figures come in the order of the parts, the bandwidth first.

    Raises:
        InvalidRequestError: a context or batch that does not fit. NinferError: the model cannot be loaded.
    """
    drafts = sorted(plan.drafts)
    first = drafts[0] if "decode" in plan.parts else 0
    gap_alone = plan.parts == ("gap",)
    with _opened(plan, drafts=first, sequences=2 if gap_alone else 1) as subject:
        device, limit = device_of(subject.device.type), subject.context_length
        bandwidth = read_bandwidth(subject.device)
        plan.say(f"read bandwidth: {bandwidth / 1e9:,.1f} GB/s")
        tokens = plan.tokens or (256 if limit >= harness.PUBLISHED_LIMIT // 2 else 64)
        seeds = harness.SEEDS[: plan.seeds] if plan.seeds <= 5 else tuple(range(1, plan.seeds + 1))
        method = Method(tokens=tokens, seeds=seeds, fill=plan.fill, bandwidth=bandwidth, say=plan.say)
        figures = [Figure(f"{subject.label}/bandwidth/read", bandwidth / 1e9, "GB/s")]
        answers: Answers = {}
        if "decode" in plan.parts:
            contexts = harness.contexts_for(limit, tokens + drafts[-1], plan.contexts)
            figures += _decode(plan, subject, contexts, method, answers)
        if gap_alone:
            figures.append(_gap(plan, subject, method, limit))
    if "decode" in plan.parts:
        for count in drafts[1:]:
            with _opened(plan, drafts=count, context=min(limit, max(contexts) + tokens + count)) as subject:
                figures += _decode(plan, subject, contexts, method, answers)
    if "batch" in plan.parts:
        figures += _batch(plan, method, limit)
    if "gap" in plan.parts and not gap_alone:
        with _opened(plan, drafts=0, sequences=2) as subject:
            figures.append(_gap(plan, subject, method, limit))
    return device, figures


def _decode(plan: Plan, subject: Subject, contexts: Sequence[int], method: Method, answers: Answers) -> list[Figure]:
    """One pass, and one more with forced drafts behind that with the most of them."""
    made = harness.decode(subject, contexts, method, answers=None if subject.draft_tokens else answers)
    if plan.forced is not None and subject.draft_tokens == max(plan.drafts):
        made += harness.decode(subject, contexts, method, answers=answers, forced=plan.forced)
    return made


def _gap(plan: Plan, subject: Subject, method: Method, limit: int) -> Figure:
    context = plan.gap_context or harness.contexts_for(limit, method.tokens)[-2 if limit > 2048 else -1]
    return harness.gap(subject, method, context=context)


def _batch(plan: Plan, method: Method, limit: int) -> list[Figure]:
    most = max(plan.batches)
    spare = method.tokens + harness.spare_tokens(most)
    context = plan.batch_context or min(BATCH_CONTEXT, max(64, (limit - spare) // 128 * 64))
    if context + spare > limit:
        raise InvalidRequestError(
            f"{most} sequences of {context} tokens need room for {spare} more each, and this model's context is "
            f"{limit}; lower --batch or --batch-context",
            param="batch",
        )
    with _opened(plan, drafts=0, sequences=most, context=context + spare) as subject:
        return harness.batch(subject, plan.batches, method, context=context)


@contextmanager
def _opened(plan: Plan, *, drafts: int, sequences: int = 1, context: int | None = None) -> Iterator[Subject]:
    subject = open_subject(plan.target, draft_tokens=drafts, max_sequences=sequences, context=context)
    try:
        yield subject
    finally:
        subject.release()


def lists(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers separated by commas.

    Raises:
        InvalidRequestError: something else.
    """
    try:
        return tuple(int(part) for part in text.replace("_", "").split(",") if part.strip())
    except ValueError:
        raise InvalidRequestError(f"{what} is {text!r}; it must be whole numbers separated by commas") from None


def numbers(text: str, what: str) -> Sequence[float]:
    """Numbers separated by commas.

    Raises:
        InvalidRequestError: something else.
    """
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidRequestError(f"{what} is {text!r}; it must be numbers separated by commas") from None
