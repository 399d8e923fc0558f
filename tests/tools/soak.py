"""Thousands of mixed requests against one engine: outputs equal solo runs, no page or slot is lost, memory stays flat.

    python -m tests.tools.soak [--requests 50000] [--model demo] [--seed 1]
    python -m tests.tools.soak --random 35b-a3b [--requests 50000] [--sequences 32] [--crowd 48]    # needs one GPU

`--model` is "tiny" (random weights, as in the tests), a model's name or a path; `--random` a shape of published size with
random weights, whose tokens are compared as numbers. Where a run has a limit, `--seconds` and another `--seed` each time
make it in pieces. Prompts share beginnings of all lengths. Some requests are cancelled at any time, some run into their
deadline, several have the same prompt at once, some need the host between rounds. Prints one JSON object with what
ended how and the memory at every tenth of the way; exit status 1 where something is wrong, with `faults` saying what.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ninfer_core.benchmarks.subject import CountingMachine, RandomSubject, Target, sampling_params
from ninfer_core.engine import Engine
from ninfer_core.errors import EngineBusyError, InvalidRequestError, RequestTimeoutError
from ninfer_core.runtime.handle import RequestHandle
from ninfer_core.runtime.running import Running
from ninfer_core.runtime.sampler import Sampler
from ninfer_core.runtime.session import Session
from ninfer_core.types import Event, Request, Sampling, TextDelta

CASES = 60
"""Different requests; each is first run alone."""
MARKS = 10
"""Measurements of memory on the way; the first half of them is warming up."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request that can be asked again, and how many of it at once."""

    request: Request
    choices: int = 1


@dataclass(slots=True)
class Report:
    """What came of it. `memory`: MiB of this process and of the device, by requests."""

    requests: int = 0
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    completion_tokens: int = 0
    memory: list[dict[str, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Note what is wrong."""
        self.faults.append(text)


class Spelling(CountingMachine):
    """An output machine for ids without text: their numbers are the text, so that outputs can be compared."""

    def feed(self, ids: Sequence[int], logprobs: Any = None) -> list[Event]:
        """Take all."""
        self.kept = len(ids)
        return [TextDelta("".join(f"{token} " for token in ids))]


class Client:
    """An engine that is given requests. `subject`: an `Engine`, or a `RandomSubject` of the bench."""

    def __init__(self, subject: Any, vocabulary: int, host_kinds: bool) -> None:
        self.subject, self.vocabulary, self.host_kinds = subject, vocabulary, host_kinds
        self.scheduler = subject._scheduler
        self.reuse = (subject._runner if hasattr(subject, "_runner") else subject.runner).reuse

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request."""
        if hasattr(self.subject, "submit"):
            return self.subject.submit(request)
        assert request.max_tokens is not None and isinstance(request.prompt, tuple)
        seed, tokens = request.sampling.seed or 0, request.prompt
        law = replace(sampling_params(seed), temperature=request.sampling.temperature)
        sampler = Sampler(law, addressable=self.subject.addressable, prompt=tokens)
        return self.subject.enqueue(request, tokens, request.max_tokens, seed, machine=Spelling(), sampler=sampler)

    def solo(self, request: Request) -> tuple[Any, ...]:
        """What the request gives when nothing else runs and nothing is known of its prompt."""
        self.settle()
        self.reuse.cache.clear()
        return outcome(self.submit(request))

    def settle(self) -> None:
        """Wait until nothing runs or waits."""
        while not self.scheduler.idle or self.scheduler.stats()["waiting"]:
            time.sleep(0.001)


def outcome(handle: RequestHandle) -> tuple[Any, ...]:
    """All that must be equal when a request is asked again."""
    made = handle.result(600)
    logprobs = tuple((lp.token_id, lp.logprob) for lp in made.logprobs or ())
    return made.text, made.message.reasoning, made.finish_reason, made.usage.completion_tokens, logprobs


def cases(client: Client, rng: random.Random, longest: int, tokens: int) -> list[Case]:
    """Requests whose prompts begin alike in many ways, of all kinds that have one right output."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(client.vocabulary) for _ in range(count))

    trunks = [ids(length) for length in (1, 17, 63, 64, 65, 130, longest // 2)]
    made = []
    for number in range(CASES):
        trunk = rng.choice(trunks)
        if rng.random() < 0.3:
            trunk = trunk[: rng.randint(1, len(trunk))]
        prompt = (*trunk, *ids(rng.choice((0, 1, 9, 64))))
        fields: dict[str, Any] = {}
        if client.host_kinds:
            kind = rng.randrange(5)
            fields = ({}, {"logprobs": 1}, {"stop": ("e",)}, {"thinking_budget": 3, "thinking": True}, {})[kind]
        law = Sampling(temperature=rng.choice((0.0, 1.0)), top_k=20, top_p=0.95, seed=number)
        if client.host_kinds and rng.random() < 0.2:
            law = Sampling(temperature=1.0, top_k=20, presence_penalty=0.5, seed=number)
        request = Request(prompt=prompt[:longest], sampling=law, max_tokens=rng.randint(1, tokens), ignore_eos=True,
                          **fields)  # fmt: skip
        made.append(Case(request, 3 if rng.random() < 0.1 else 1))
    return made


@dataclass(slots=True)
class Live:
    """A request under way. `late`: it was given no time; `patience`: looks until it is cancelled, -1: it is not."""

    handle: RequestHandle
    case: Case
    late: bool
    patience: int


def soak(
    client: Client, *, requests: int, seed: int, longest: int, tokens: int, crowd: int, seconds: float = math.inf
) -> Report:
    """Run `requests` requests, or as many as begin within `seconds`, `crowd` of them at once. Faults are in the report."""
    rng, report = random.Random(seed), Report()
    known = cases(client, rng, longest, tokens)
    right = {id(case): client.solo(case.request) for case in known}
    client.settle()
    before = _held()
    began, live = time.monotonic(), list[Live]()
    while (share := max(report.requests / requests, (time.monotonic() - began) / seconds)) < 1 or live:
        if share * MARKS >= len(report.memory):
            _mark(report)
        while share < 1 and report.requests < requests and len(live) < crowd:
            _ask(client, rng.choice(known), rng, live, report)
        if live:
            live[0].handle.wait(0.002)
        for entry in live:
            entry.patience -= entry.patience >= 0
            if entry.patience == 0:
                entry.handle.cancel()
        for entry in [entry for entry in live if entry.handle.done]:
            live.remove(entry)
            _end(entry, right[id(entry.case)], report)
    report.seconds = round(time.monotonic() - began, 1)
    del live
    _audit(client, report, before)
    return report


def _held() -> Counter[str]:
    """Objects of requests that somebody still holds."""
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects() if type(o) in (Running, Session, RequestHandle))


def _ask(client: Client, case: Case, rng: random.Random, live: list[Live], report: Report) -> None:
    for _ in range(case.choices):
        report.requests += 1
        late = client.host_kinds and rng.random() < 0.03
        request = case.request
        if late:
            request = Request(prompt=request.prompt, max_tokens=request.max_tokens, ignore_eos=True, timeout=1e-4)
        try:
            if client.host_kinds and rng.random() < 0.02:
                client.submit(Request(prompt=(-1,), max_tokens=1))
                report.fault("a prompt of unknown ids was taken")
            patience = rng.choice((1, 2, 5, 20)) if rng.random() < 0.15 else -1
            live.append(Live(client.submit(request), case, late, patience))
        except EngineBusyError:
            report.ends["busy"] += 1
        except InvalidRequestError:
            report.ends["refused"] += 1


def _end(entry: Live, right: tuple[Any, ...], report: Report) -> None:
    handle = entry.handle
    error = handle.error
    if isinstance(error, RequestTimeoutError) and entry.late:
        report.ends["overdue"] += 1
    elif error is not None:
        report.ends["failed"] += 1
        report.fault(f"{handle.id} failed: {type(error).__name__}: {error}")
    elif handle._events[-1].reason == "cancelled":
        report.ends["cancelled"] += 1
        if not handle.cancelled:
            report.fault(f"{handle.id} ended as cancelled, and nobody did that")
    else:
        report.ends["finished"] += 1
        usage = handle.result().usage
        report.cached_tokens += usage.cached_tokens
        report.completion_tokens += usage.completion_tokens
        if not entry.late and outcome(handle) != right and len(report.faults) < 20:
            report.fault(f"{handle.id}: {outcome(handle)!r:.200} instead of {right!r:.200}")


def _audit(client: Client, report: Report, before: Counter[str]) -> None:
    """Nothing may be held, by the engine or by anybody else, once all requests have ended."""
    client.settle()
    stats = client.scheduler.stats()
    for name in ("pages", "slots"):
        if stats[f"{name}_free"] != stats[f"{name}_total"]:
            report.fault(f"{stats[f'{name}_free']} of {stats[f'{name}_total']} {name} are free")
    client.reuse.cache.clear()
    for pool, what in (
        (client.reuse.pages, "pages"),
        (client.reuse.slots, "slots"),
        (client.reuse.saves, "checkpoints"),
    ):
        if pool.free != pool.size:
            report.fault(f"without the cache {pool.free} of {pool.size} {what} are free")
    left = _held() - before
    if sum(left.values()) > 3 * client.scheduler._max_sequences:
        report.fault(f"objects of requests that have ended are still there: {dict(left)}")
    _mark(report)


def _mark(report: Report) -> None:
    gc.collect()
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    report.memory.append(
        {"requests": report.requests, "process": int(fields["VmRSS"].split()[0]) / 1024, "device": device / 2**20}
    )


def check_memory(report: Report, grown: float) -> None:
    """No more than `grown` MiB more at the end than half way."""
    half, end = report.memory[len(report.memory) // 2], report.memory[-1]
    for where in ("process", "device"):
        if end[where] - half[where] > grown:
            report.fault(
                f"memory of the {where} grew from {half[where]:.0f} to {end[where]:.0f} MiB in the second half"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--random", default="")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="ask for nothing more after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crowd", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=6, help="most tokens of an answer")
    parser.add_argument("--context", type=int, default=800, help="prompts have up to half of it")
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens that are read at once: reuse begins there")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--grown", type=float, default=32.0, help="MiB that the second half may add")
    given = parser.parse_args(arguments)
    with open_client(given) as client:
        report = soak(client, requests=given.requests, seed=given.seed, longest=given.context // 2,
                      tokens=given.tokens, crowd=given.crowd, seconds=given.seconds)  # fmt: skip
    check_memory(report, given.grown)
    shown = {name: getattr(report, name) for name in Report.__slots__}
    print(json.dumps(shown, default=dict))
    return 1 if report.faults else 0


@contextmanager
def open_client(given: argparse.Namespace) -> Iterator[Client]:
    """The engine that the command line names, closed behind the block."""
    options = {"max_sequences": given.sequences, "draft_tokens": given.drafts}
    reuse = {"cache_answers": False, "prefill_chunk": given.chunk}
    if given.random:
        target = Target(random=given.random, options={"prefix_cache": True, **reuse})
        subject: Any = RandomSubject(target, context=given.context, **options)
        client = Client(subject, subject.addressable, False)
    else:
        name = given.model
        if name == "tiny":
            sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
            from tiny import tiny_artifact

            name, options = (
                str(tiny_artifact(False, layers=2)),
                {**options, "threads": 1, "device": "cpu"},
            )
        subject = Engine.load(name, context_length=given.context, **reuse, **options)
        client = Client(subject, 250, True)
    try:
        yield client
    finally:
        subject.close()


if __name__ == "__main__":
    sys.exit(main())
