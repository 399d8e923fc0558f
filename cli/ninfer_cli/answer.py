"""One turn: submit a request, show its events as they come, and say how fast it went."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ninfer_core.types import (
    Completion,
    Event,
    Finish,
    Message,
    ReasoningDelta,
    Request,
    TextDelta,
    ToolCallEnd,
    Usage,
    completion_from_events,
)

from .display import AnswerView
from .inputs import call_to_json

if TYPE_CHECKING:
    from ninfer_core.runtime.interface import EngineInterface

# How long a cancelled request may take to report its counts: one round or one prompt chunk on a slow machine.
_CANCEL_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one request. `completion` holds what was shown, even when the user `interrupted` it."""

    completion: Completion
    interrupted: bool = False

    @property
    def message(self) -> Message:
        """The assistant's message."""
        return self.completion.message


def take_turn(engine: EngineInterface, request: Request, view: AnswerView) -> Turn:
    """Run `request`, stream it to `view`, and return what was said; Ctrl-C ends the turn, not the program.

    A second Ctrl-C while the cancelled request winds down passes through as `KeyboardInterrupt`. Any other way out
    (an error, a closed pipe) cancels the request too.

    Raises:
        NinferError: the request was refused or failed; what was shown before is ended properly.
    """
    shown: list[Event] = []
    handle = engine.submit(request)
    interrupted = False
    with handle:
        try:
            for event in handle:
                # Kept before it is shown: a Ctrl-C between the two must not lose text that is on the screen.
                shown.append(event)
                _show(event, view)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            with contextlib.suppress(Exception):
                view.end()
        if interrupted:
            handle.cancel()
            handle.wait(_CANCEL_WAIT)
            shown = [event for event in shown if not isinstance(event, Finish)]
            shown.append(_last_finish(handle) or Finish("cancelled", Usage()))
    return Turn(completion_from_events(shown), interrupted)


def _show(event: Event, view: AnswerView) -> None:
    if isinstance(event, TextDelta):
        view.text(event.text)
    elif isinstance(event, ReasoningDelta):
        view.reasoning(event.text)
    elif isinstance(event, ToolCallEnd):
        view.tool_call(call_to_json(event.call, event.complete))


def _last_finish(handle: Iterable[Event]) -> Finish | None:
    if not getattr(handle, "done", False):
        return None
    try:
        return next((event for event in handle if isinstance(event, Finish)), None)
    except Exception:
        # The request failed while it was being cancelled; the user has already left it.
        return None


def statistics(turn: Turn, load_seconds: float | None = None) -> dict[str, Any]:
    """The figures of one turn as plain values: seconds, token counts, rates in tokens per second; None if undefined."""
    completion = turn.completion
    usage, timings = completion.usage, completion.timings
    computed = usage.prompt_tokens - usage.cached_tokens
    proposed = usage.rounds
    return {
        "load_seconds": load_seconds,
        "finish_reason": completion.finish_reason,
        "stop_sequence": completion.stop_sequence,
        "seed": completion.seed,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "queue_seconds": timings.queue,
        "prefill_seconds": timings.prefill,
        "first_token_seconds": timings.first_token,
        "decode_seconds": timings.decode,
        "prompt_tokens_per_second": _ratio(computed, timings.prefill),
        # The first token is the prompt's; decoding makes the others.
        "decode_tokens_per_second": _ratio(usage.completion_tokens - 1, timings.decode),
        "rounds": usage.rounds,
        "tokens_per_round": _ratio(usage.completion_tokens - 1, usage.rounds),
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "acceptance": _ratio(usage.accepted_tokens, usage.drafted_tokens),
        "acceptance_by_position": [_ratio(count, proposed) for count in usage.accepted_by_position],
    }


def statistics_lines(stats: dict[str, Any]) -> list[str]:
    """The figures for people, one per line; what was not measured is left out."""
    lines = []
    if stats["load_seconds"] is not None:
        lines.append(("load", f"{stats['load_seconds']:.2f} s"))
    rate = stats["prompt_tokens_per_second"]
    cached = f" ({stats['cached_tokens']:,} from the cache)" if stats["cached_tokens"] else ""
    lines.append(
        (
            "prompt",
            f"{stats['prompt_tokens']:,} tokens{cached} in {stats['prefill_seconds']:.2f} s" + _per_second(rate),
        )
    )
    lines.append(("first token", f"{stats['first_token_seconds']:.3f} s"))
    thinking = f" ({stats['reasoning_tokens']:,} thinking)" if stats["reasoning_tokens"] else ""
    lines.append(
        (
            "answer",
            f"{stats['completion_tokens']:,} tokens{thinking} in {stats['decode_seconds']:.2f} s"
            + _per_second(stats["decode_tokens_per_second"]),
        )
    )
    if stats["tokens_per_round"] is not None:
        lines.append(("rounds", f"{stats['rounds']:,}, {stats['tokens_per_round']:.2f} tokens per round"))
    if stats["acceptance"] is not None:
        text = f"{stats['accepted_tokens']:,} of {stats['drafted_tokens']:,} drafts, {100 * stats['acceptance']:.0f} %"
        positions = [f"{100 * share:.0f} %" for share in stats["acceptance_by_position"] if share is not None]
        lines.append(("accepted", text + (f"; by position {', '.join(positions)}" if positions else "")))
    seed = "" if stats["seed"] is None else f", seed {stats['seed']}"
    lines.append(("finish", f"{stats['finish_reason']}{seed}"))
    return [f"{label:<12} {text}" for label, text in lines]


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 and top >= 0 else None


def _per_second(rate: float | None) -> str:
    return "" if rate is None else f", {rate:,.1f} tokens/s"
