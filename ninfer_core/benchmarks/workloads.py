"""Speed by kind of text: prompt sets of our own for reasoning, code, translation, stories and structured output."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ..errors import InvalidRequestError
from ..runtime.interface import EngineInterface, make_request
from ..types import Completion, ResponseFormat, Sampling
from .harness import PUBLISHED_LIMIT, SEEDS
from .results import Figure, figure_of

TOKENS, REASONING_TOKENS = 4_096, 65_536
"""Longest answers at the published context of 262,144 tokens; smaller contexts scale them down."""
SHORTEST = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of text: its prompts, whether the model thinks first, and the schema its answers follow."""

    name: str
    thinking: bool
    prompts: tuple[str, ...]
    schema: dict[str, Any] | None = None
    long: bool = False

    def limit(self, context: int) -> int:
        """Tokens an answer may have in a context of so many."""
        full = REASONING_TOKENS if self.long else TOKENS
        return full if context >= PUBLISHED_LIMIT else max(SHORTEST, full * context // PUBLISHED_LIMIT)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("workloads.json").read_text(encoding="utf-8"))
    return found


def workloads(names: Sequence[str] | None = None) -> list[Workload]:
    """The prompt sets, all or some.

    Raises:
        InvalidRequestError: an unknown name.
    """
    made = {
        name: Workload(name, entry["thinking"], tuple(entry["prompts"]), entry.get("schema"), entry.get("long", False))
        for name, entry in _data()["workloads"].items()
    }
    for name in names or ():
        if name not in made:
            raise InvalidRequestError(f"there is no workload {name!r}; there are {', '.join(made)}", param="only")
    return [made[name] for name in names or made]


def prose(encode: Callable[[str], Sequence[int]], length: int, seed: int) -> list[int]:
    """Exactly `length` tokens of prose, its sentences in an order that the seed chooses."""
    sentences: list[str] = _data()["sentences"]
    order = random.Random(seed)
    ids = list(encode(f"Notes, part {seed}."))
    while len(ids) < length:
        ids += encode(" " + " ".join(order.sample(sentences, len(sentences))))
    return ids[:length]


def run_workload(
    engine: EngineInterface, label: str, work: Workload, *, context: int, seeds: Sequence[int] = SEEDS, warm: int = 1
) -> list[Figure]:
    """Every prompt with every seed, one after the other, ended by the model or the limit.

    Returns the decode rate over all runs, with acceptance by position and tokens per round.
    """
    limit = work.limit(context)
    runs: list[Completion] = []
    jobs = [(work.prompts[0], 1000 + i, min(limit, 256)) for i in range(warm)]
    jobs += [(prompt, seed, limit) for prompt in work.prompts for seed in seeds]
    shape = ResponseFormat("json_schema", schema=work.schema) if work.schema is not None else None
    for prompt, seed, tokens in jobs:
        request = make_request(
            prompt, thinking=work.thinking, max_tokens=tokens, response_format=shape, sampling=Sampling(seed=seed)
        )
        runs.append(engine.submit(request).result())
    runs = [run for run in runs[warm:] if run.usage.completion_tokens > 1]
    if not runs:
        raise RuntimeError(f"no answer of {work.name} has more than one token")
    rates = [(run.usage.completion_tokens - 1) / run.timings.decode for run in runs]
    return [figure_of(f"{label}/workload/{work.name}", rates, "tok/s", **_details(work, runs, limit))]


def _details(work: Workload, runs: Sequence[Completion], limit: int) -> dict[str, Any]:
    usages = [run.usage for run in runs]
    made: dict[str, Any] = {
        "limit": limit,
        "thinking": work.thinking,
        "prompts": len(work.prompts),
        "tokens": sum(usage.completion_tokens for usage in usages),
        "ended": sum(run.finish_reason != "length" for run in runs),
    }
    rounds, drafted = sum(usage.rounds for usage in usages), sum(usage.drafted_tokens for usage in usages)
    if drafted:
        count = max(len(usage.accepted_by_position) for usage in usages)
        hits = [sum(u.accepted_by_position[i] for u in usages if i < len(u.accepted_by_position)) for i in range(count)]
        made["accepted"] = round(sum(usage.accepted_tokens for usage in usages) / drafted, 4)
        made["accepted_by_position"] = [round(hit / rounds, 4) for hit in hits]
        made["tokens_per_round"] = round(sum(usage.completion_tokens - 1 for usage in usages) / rounds, 4)
    return made
