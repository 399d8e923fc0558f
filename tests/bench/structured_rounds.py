"""Structured decode beside unconstrained decode: `python -m tests.bench.structured_rounds [--random-weights 27b]`.

A model's shape with random weights, alone, 0 and 3 drafts. A draft layer of random weights is never right, so with
drafts as many are right as `--accepted` says, in both kinds of runs (forced, and labelled so): what the same request
made without drafts is proposed, and the rest is wrong. The answer is a long JSON array of objects (names, enumerations,
numbers, text), drawn at temperature 1 among what the grammar allows. Gives milliseconds a round and tokens a second of
both, the overhead of a round, and what a round costs the host: the masks, and all of it from the last results on.
Exits with 1 if a round takes above `--most` percent longer with drafts, or if drafts changed an answer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "frontend")]

import numpy as np  # noqa: E402
import real_vocabulary  # noqa: E402
import torch  # noqa: E402

from ninfer_core.benchmarks.subject import (  # noqa: E402
    PATTERN,
    RANDOM,
    ForcedDrafts,
    RandomSubject,
    Target,
    accepted_in,
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


class Proposals:
    """Makes drafts of a known answer, `accepted` of them right a round; None leaves drafts as they are."""

    def __init__(self, subject: RandomSubject, accepted: float | None, longest: int) -> None:
        self._subject, self._accepted = subject, accepted
        flights = subject.runner._flights
        self._tape: torch.Tensor | None = None
        if flights is not None and accepted is not None:
            lanes: Any = flights.rounds
            self._tape = torch.zeros(len(lanes.lanes), longest, dtype=torch.int32, device=subject.device)
            counts = [accepted_in(i, accepted) for i in range(PATTERN)]
            lanes.replay(self._tape, torch.tensor(counts, dtype=torch.int32, device=subject.device))

    def propose(self, answer: Sequence[int]) -> None:
        """The next request will draw this."""
        if self._tape is not None:
            self._tape.zero_()
            self._tape[:, : len(answer)] = torch.tensor(answer, dtype=torch.int32)
        elif self._accepted is not None:
            self._subject.runner.proposal = ForcedDrafts(answer, self._accepted, self._subject.addressable)


@contextmanager
def timing(subject: RandomSubject, found: dict[str, list[float]]) -> Iterator[None]:
    """Milliseconds of the host in rounds on the device: of an order's masks, and from results read to orders sent."""
    flights: Any = subject.runner._flights
    if flights is None:
        yield
        return
    order, land, began = flights._order, flights._land, [0.0]

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        made = order(*arguments)
        end = time.perf_counter()
        found["masks"].append(1e3 * (end - start))
        found["host"].append(1e3 * (end - began[0]))
        return made

    def landing(*arguments: Any) -> Any:
        for flight in flights._flying:
            flight.launched.read()
        began[0] = time.perf_counter()
        return land(*arguments)

    flights._order, flights._land = timed, landing
    try:
        yield
    finally:
        flights._order, flights._land = order, land


def one_run(subject: RandomSubject, plan: Plan | None, given: Any, seed: int) -> Run:
    """One request alone."""
    seen: list[Running] = []
    lanes: Any = subject.runner._flights and subject.runner._flights.rounds
    before = lanes._launched if lanes else 0
    prompt = subject.prompt(given.context, seed)
    with subject.watching(seen.append):
        handle = (
            subject.start(prompt, given.tokens, seed)
            if plan is None
            else structured(subject, plan, prompt, given.tokens, seed)
        )
        done = handle.result()
    subject.runner.proposal = None
    # Rounds that only take known tokens in are none to the request; on the device they are launches like all others.
    rounds = lanes._launched - before if lanes else done.usage.rounds
    return Run(seen[-1].tokens[given.context :], done.timings.decode, rounds, done.usage.accepted_tokens)


def measured(
    subject: RandomSubject, plan: Plan | None, given: Any, proposals: Proposals, answers: dict[int, list[int]]
) -> tuple[list[Run], int]:
    """A run to warm up, then one for each seed; and how many are not what `answers` says, which takes what is new."""
    runs, wrong = [], 0
    for seed in [1, *range(1, given.seeds + 1)]:
        proposals.propose(answers.get(seed, ()))
        run = one_run(subject, plan, given, seed)
        wrong += answers.setdefault(seed, run.tokens) != run.tokens
        runs.append(run)
    return runs[1:], wrong


def told(record: Record, name: str, runs: Sequence[Run], wrong: int) -> float:
    """Record a kind of runs; returns milliseconds a round."""
    rounds = sum(run.rounds for run in runs)
    found = {
        "ms_a_round": statistics.median(run.round_ms for run in runs),
        "tokens_a_second": statistics.median(run.rate for run in runs),
        "accepted_a_round": sum(run.accepted for run in runs) / rounds,
        "tokens": sum(len(run.tokens) for run in runs),
        "rounds": rounds,
        "answers_that_differ": wrong,
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
    record = Record(given.json, "cuda" if torch.cuda.is_available() and not given.tiny else "cpu")
    overhead, wrong = 0.0, 0
    for drafts, accepted in ((0, None), (3, given.accepted)):
        subject = RandomSubject(target, draft_tokens=drafts, max_sequences=1, context=given.context + given.tokens + 8)
        label = f"{accepted} of {drafts} drafts accepted (forced)" if drafts else "no drafts"
        try:
            if not drafts:
                record.add("model", f"{subject.label}, {subject.route}, {given.context} tokens before")
            proposals = Proposals(subject, accepted, given.tokens)
            times: dict[str, list[float]] = {"masks": [], "host": []}
            runs, differ = measured(subject, None, given, proposals, answers[0])
            free = told(record, f"free, {label}", runs, differ)
            with timing(subject, times):
                runs, more = measured(subject, plan, given, proposals, answers[1])
            held = told(record, f"structured, {label}", runs, more)
        finally:
            subject.release()
        for what, spent in times.items():
            if spent:
                shares = {f"p{p}": float(np.percentile(spent, p)) for p in (50, 90, 99, 100)}
                record.add(f"ms of the host a round, {what}, {label}", shares)
        overhead, wrong = 100 * (held / free - 1), wrong + differ + more
        record.add(f"percent a structured round takes longer, {label}", overhead)
    return 1 if overhead > given.most or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
