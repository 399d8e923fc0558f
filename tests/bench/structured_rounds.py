"""Structured decode beside unconstrained decode: `python -m tests.bench.structured_rounds [--random-weights 27b]`.

A model's shape with random weights, alone, 0 and 3 drafts. A draft layer of random weights is never right, so with
drafts as many are accepted as `--accepted` says, in both kinds of runs (forced, and labelled so): where rounds run on the
device by its own count, elsewhere, and under a grammar, by proposing what the same request made without drafts. The
answer is a long JSON array of objects (names, enumerations, numbers, text), drawn at temperature 1 among what the
grammar allows; tokens that the grammar forces cost no round. Gives milliseconds a round and tokens a second of both,
and the overhead of a round. Exits with 1 if that is above `--most` percent with drafts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "frontend")]

import real_vocabulary  # noqa: E402
import torch  # noqa: E402

from ninfer_core.benchmarks.subject import (  # noqa: E402
    RANDOM,
    ForcedDrafts,
    RandomSubject,
    Target,
    sampling_params,
)
from ninfer_core.engine import Engine  # noqa: E402
from ninfer_core.frontend.tokenizer import Tokenizer  # noqa: E402
from ninfer_core.runtime.grammar import Grammar, Plan, compile_plan  # noqa: E402
from ninfer_core.runtime.handle import RequestHandle  # noqa: E402
from ninfer_core.runtime.running import Running  # noqa: E402
from ninfer_core.runtime.sampler import Sampler  # noqa: E402
from ninfer_core.runtime.vocabulary import Vocabulary  # noqa: E402
from ninfer_core.types import Message, Request, ResponseFormat  # noqa: E402
from tests.bench.common import Record, parser_of  # noqa: E402

ITEM = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 60},
        "mode": {"enum": ["read", "append", "replace"]},
        "line": {"type": "integer", "minimum": 0, "maximum": 99_999},
        "score": {"type": "number"},
        "text": {"type": "string"},
        "done": {"type": "boolean"},
    },
    "required": ["path", "mode", "line", "score", "text", "done"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 60}
"""No answer of the lengths measured ends by itself."""

LONGEST = 1_000_000
"""Tokens that the grammar may count on: the end of a run must not close the value."""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: seconds from its first to its last token, and what it was made of."""

    tokens: list[int]
    seconds: float
    rounds: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (len(self.tokens) - 1) / self.seconds

    @property
    def round_ms(self) -> float:
        """Milliseconds a round."""
        return self.seconds / self.rounds * 1e3


def vocabulary_of(shape: str) -> Vocabulary:
    """The published vocabulary, or the demo's."""
    if shape == "demo":
        with Engine.load("demo", device="cpu") as engine:
            return Vocabulary.of(engine.tokenizer, engine.frontend.eos_ids)
    files = real_vocabulary.files()
    tokenizer = Tokenizer(files["tokenizer.json"], files["tokenizer_config.json"])
    return Vocabulary.of(tokenizer, [tokenizer.id("<|im_end|>"), tokenizer.id("<|endoftext|>")])


def structured(subject: RandomSubject, plan: Plan, tokens: Sequence[int], limit: int, seed: int) -> RequestHandle:
    """Start a request under the grammar; otherwise like `subject.start`."""
    sampler = Sampler(
        sampling_params(seed),
        addressable=plan.vocabulary.size,
        prompt=tokens,
        grammar=Grammar(plan, thinking=False, limit=LONGEST),
    )
    return subject.enqueue(Request(prompt=tuple(tokens)), tokens, limit, seed, sampler=sampler)


def one_run(
    subject: RandomSubject, plan: Plan | None, given: Any, seed: int, accepted: float | None, answer: Sequence[int]
) -> Run:
    """One request alone; with `accepted`, as many drafts a round are right."""
    seen: list[Running] = []
    if plan is None:
        subject.force(accepted, answer)
    else:
        subject.force(None)
        subject.runner.proposal = None if accepted is None else ForcedDrafts(answer, accepted, plan.vocabulary.size)
    prompt = subject.prompt(given.context, seed)
    with subject.watching(seen.append):
        handle = (
            subject.start(prompt, given.tokens, seed)
            if plan is None
            else structured(subject, plan, prompt, given.tokens, seed)
        )
        done = handle.result()
    subject.runner.proposal = None
    usage = done.usage
    return Run(seen[-1].tokens[given.context :], done.timings.decode, usage.rounds, usage.accepted_tokens)


def measured(
    subject: RandomSubject, plan: Plan | None, given: Any, accepted: float | None, answers: dict[int, list[int]]
) -> list[Run]:
    """A run to warm up, then one for each seed. Without `accepted`, `answers` takes their tokens."""
    runs = []
    for seed in [1, *range(1, given.seeds + 1)]:
        run = one_run(subject, plan, given, seed, accepted, answers.get(seed, ()))
        if accepted is None:
            answers[seed] = run.tokens
        elif subject.on_device is False or plan is not None:
            assert run.tokens == answers[seed], "drafts changed the answer"
        runs.append(run)
    return runs[1:]


def told(record: Record, name: str, runs: Sequence[Run]) -> float:
    """Record a kind of runs; returns milliseconds a round."""
    rounds = sum(run.rounds for run in runs)
    found = {
        "ms_a_round": statistics.median(run.round_ms for run in runs),
        "tokens_a_second": statistics.median(run.rate for run in runs),
        "accepted_a_round": sum(run.accepted for run in runs) / rounds,
        "tokens": sum(len(run.tokens) for run in runs),
        "rounds": rounds,
    }
    record.add(name, found)
    return float(found["ms_a_round"])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--random-weights", choices=sorted(RANDOM), default="35b-a3b")
    parser.add_argument("--context", type=int, default=7680, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--accepted", type=float, default=2.19, help="drafts accepted a round, of 3")
    parser.add_argument("--most", type=float, default=float("inf"), metavar="PERCENT")
    given = parser.parse_args()
    device = "auto"
    if given.tiny:
        given.random_weights, given.context, given.tokens, given.seeds, device = "demo", 64, 48, 1, "cpu"
    vocabulary = vocabulary_of(given.random_weights)
    asked = Request((Message("user", "x"),), response_format=ResponseFormat("json_schema", SCHEMA))
    plan = compile_plan(asked, vocabulary)
    target = Target(random=given.random_weights, device=device)
    answers: tuple[dict[int, list[int]], ...] = ({}, {})
    record, overhead = Record(given.json, "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"), 0.0
    for drafts, accepted in ((0, None), (3, given.accepted)):
        subject = RandomSubject(target, draft_tokens=drafts, max_sequences=1, context=given.context + given.tokens + 8)
        label = f"{accepted} of {drafts} drafts accepted (forced)" if drafts else "no drafts"
        try:
            if not drafts:
                record.add("model", f"{subject.label}, {subject.route}, {given.context} tokens before")
            free = told(record, f"free, {label}", measured(subject, None, given, accepted, answers[0]))
            held = told(record, f"structured, {label}", measured(subject, plan, given, accepted, answers[1]))
        finally:
            subject.release()
        overhead = 100 * (held / free - 1)
        record.add(f"percent a structured round takes longer, {label}", overhead)
    return 1 if overhead > given.most else 0


if __name__ == "__main__":
    sys.exit(main())
