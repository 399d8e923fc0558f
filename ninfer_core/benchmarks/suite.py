"""The whole measurement of one model, as `ninfer bench MODEL` runs it: bandwidth first, then every part asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import InvalidRequestError
from . import harness
from .bandwidth import read_bandwidth
from .harness import Fill, Method
from .results import Device, Figure, device_of
from .subject import Target, open_subject

PARTS = ("decode", "batch", "gap")
BATCH_CONTEXT = 1_024


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Numbers left None are the published ones, scaled to a smaller context.

    drafts: tokens drafted per round, one pass each. forced: mean number of accepted drafts of a further pass, whose
    drafts are replaced by known tokens; it needs a pass without drafts before it. batches: sequences at once.
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
        if any(not 0 <= k <= 5 for k in self.drafts) or len(set(self.drafts)) != len(self.drafts):
            raise InvalidRequestError(f"drafts are {self.drafts}; give different numbers from 0 to 5", param="drafts")
        most = max(self.drafts, default=0)
        if self.forced is not None and (0 not in self.drafts or not 0 <= self.forced <= most or not most):
            raise InvalidRequestError(
                f"forced acceptance of {self.forced:g} drafts needs a pass without drafts, whose answer it replays, "
                f"and one with at least that many; drafts are {self.drafts}",
                param="forced",
            )
        if self.seeds < 1:
            raise InvalidRequestError(f"seeds is {self.seeds}; it must be at least 1", param="seeds")


def run(plan: Plan) -> tuple[Device, list[Figure]]:
    """Measure; figures come in the order of the parts, the bandwidth first.

    Raises:
        InvalidRequestError: a context or batch that does not fit. NinferError: the model cannot be loaded.
    """
    subject = open_subject(plan.target, draft_tokens=0)
    try:
        device, limit, torch_device = device_of(subject.device.type), subject.context_length, subject.device
        label = subject.label
    finally:
        subject.close()
    del subject
    bandwidth = read_bandwidth(torch_device)
    plan.say(f"read bandwidth: {bandwidth / 1e9:,.1f} GB/s")
    tokens = plan.tokens or (256 if limit >= harness.PUBLISHED_LIMIT // 2 else 64)
    seeds = harness.SEEDS[: plan.seeds] if plan.seeds <= 5 else tuple(range(1, plan.seeds + 1))
    method = Method(tokens=tokens, seeds=seeds, fill=plan.fill, bandwidth=bandwidth, say=plan.say)
    figures = [Figure(f"{label}/bandwidth/read", bandwidth / 1e9, "GB/s")]
    for part in plan.parts:
        figures += {"decode": _decode, "batch": _batch, "gap": _gap}[part](plan, method, limit)
    return device, figures


def _decode(plan: Plan, method: Method, limit: int) -> list[Figure]:
    contexts = harness.contexts_for(limit, method.tokens + max(plan.drafts, default=0), plan.contexts)
    need = max(contexts) + method.tokens
    answers: dict[tuple[int, int], list[int]] = {}
    made = []
    for drafts in sorted(plan.drafts):
        subject = open_subject(plan.target, draft_tokens=drafts, context=min(limit, need))
        try:
            if drafts and not subject.draft_tokens:
                plan.say(f"{subject.label} has no draft layer: no figures with drafts")
                continue
            made += harness.decode(subject, contexts, method, answers=answers if drafts == 0 else None)
            if drafts and plan.forced is not None and drafts == max(plan.drafts):
                made += harness.decode(subject, contexts, method, answers=answers, forced=plan.forced)
        finally:
            subject.close()
    return made


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
    subject = open_subject(plan.target, draft_tokens=0, max_sequences=most, context=context + spare)
    try:
        return harness.batch(subject, plan.batches, method, context=context)
    finally:
        subject.close()


def _gap(plan: Plan, method: Method, limit: int) -> list[Figure]:
    context = plan.gap_context or harness.contexts_for(limit, method.tokens)[-2 if limit > 2048 else -1]
    subject = open_subject(plan.target, draft_tokens=0, max_sequences=2)
    try:
        return [harness.gap(subject, replace(method), context=context)]
    finally:
        subject.close()


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
