"""The matrix of structured output: `python -m tests.tools.structured_matrix [--outputs 100]`.

In every cell of {thinking on, off} x {0, 3 drafts} x {greedy, temperature 1} x {demo model, random weights} it makes
`--outputs` values over the schemas of `tests/core/agent_schemas.py`, as answers and, where the schema is an object's,
as arguments of a call that must be made. Every one must parse and be valid, or be reported as cut; with drafts the
outputs must be those without. A draft layer of random weights is never right, so there the drafts are what was made
without them, every fifth one changed. Prints a line for each cell; exits with 1 if one output is wrong.
`--models`, `--thinking` and `--temperatures` choose a part. With `--keep FILE` finished cells are written there, and
those that the same sources made are not made again: an hour's work can be stopped, or done by several processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "core"), str(Path(__file__).parents[2])]

import jsonschema  # noqa: E402
from agent_schemas import MATRIX  # noqa: E402
from constrained import FORMATS  # noqa: E402
from tiny import tiny_engine  # noqa: E402

from ninfer_core.engine import Engine  # noqa: E402
from ninfer_core.types import (  # noqa: E402
    Completion,
    Message,
    Request,
    ResponseFormat,
    Sampling,
    Tool,
    ToolChoice,
)

MODELS = ("demo", "random")
BUDGET = {"demo": 320, "random": 512}
"""Tokens of one output, reasoning included."""
THOUGHT = 40
"""Reasoning tokens, but in every tenth output, where only the room that the value needs ends the think block."""


@dataclass
class Cell:
    """The outputs of one cell. `texts` are compared between numbers of drafts; `wrong` says what is not valid."""

    name: str
    valid: int = 0
    cut: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    wrong: list[str] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        rate = f", {self.accepted} of {self.drafted} drafts accepted" if self.drafted else ""
        return (
            f"{self.name:42s} {self.valid:4d} valid, {self.cut} cut, {len(self.wrong)} wrong "
            f"({self.tokens} tokens, {self.seconds:.0f} s{rate})"
        )


def schema_of(index: int) -> tuple[str, Any, bool]:
    """Name and schema of an output, and whether it is to come as the arguments of a call."""
    names = sorted(MATRIX)
    name = names[index % len(names)]
    schema = MATRIX[name]
    as_call = index // len(names) % 2 == 1 and isinstance(schema, dict) and schema.get("type") == "object"
    return name, schema, as_call


def request_of(index: int, *, thinking: bool, temperature: float, budget: int) -> Request:
    """The request of one output: every one has its own question and seed."""
    name, schema, as_call = schema_of(index)
    asked: dict[str, Any] = {"response_format": ResponseFormat("json_schema", schema)}
    if as_call:
        asked = {
            "tools": (Tool("submit", "Hand the result in.", schema, strict=True),),
            "tool_choice": ToolChoice("required"),
            "parallel_tool_calls": False,
        }
    return Request(
        (Message("user", f"Give me an example of {name}, number {index}."),),
        thinking=thinking,
        thinking_budget=THOUGHT if thinking and index % 10 else None,
        sampling=Sampling(temperature=temperature, seed=index),
        max_tokens=budget,
        **asked,
    )


def judge(index: int, completion: Completion) -> str:
    """ "valid", "cut", or what is wrong with an output."""
    name, schema, as_call = schema_of(index)
    cut = completion.finish_reason == "length"
    try:
        if as_call:
            (call,) = completion.message.tool_calls
            assert completion.finish_reason == "tool_calls", completion.finish_reason
            value = call.arguments
        else:
            assert completion.finish_reason == "stop", completion.finish_reason
            value = json.loads(completion.text)
        jsonschema.validate(value, schema, format_checker=FORMATS)
    except (ValueError, AssertionError, jsonschema.ValidationError) as error:
        return "cut" if cut else f"{name} ({'call' if as_call else 'answer'}) {index}: {str(error)[:200]}"
    return "valid"


def run_cell(
    engine: Any, name: str, indices: Sequence[int], *, thinking: bool, temperature: float, budget: int
) -> Cell:
    """All outputs of one cell, several at a time."""
    cell = Cell(name)
    start = time.monotonic()
    requests = [request_of(i, thinking=thinking, temperature=temperature, budget=budget) for i in indices]
    handles = [engine.submit(request) for request in requests]
    for index, handle in zip(indices, handles, strict=True):
        completion = handle.result(3600)
        found = judge(index, completion)
        if found in ("valid", "cut"):
            counted = Counter({found: 1})
            cell.valid += counted["valid"]
            cell.cut += counted["cut"]
        else:
            cell.wrong.append(found)
        if thinking and not completion.message.reasoning:
            cell.wrong.append(f"output {index} has no reasoning")
        usage = completion.usage
        cell.tokens += usage.completion_tokens
        cell.drafted += usage.drafted_tokens
        cell.accepted += usage.accepted_tokens
        calls = [(call.name, call.arguments) for call in completion.message.tool_calls]
        cell.texts.append((completion.message.reasoning, completion.text, calls, completion.finish_reason))
    cell.seconds = time.monotonic() - start
    return cell


@contextmanager
def opened(model: str, drafts: int, sequences: int) -> Iterator[Any]:
    """One of the two models on the CPU."""
    if model == "random":
        with tiny_engine(context=4096, draft_tokens=drafts, max_sequences=sequences, max_queue=1000) as engine:
            yield engine
    else:
        with Engine.load(
            "demo", device="cpu", draft_tokens=drafts, max_sequences=sequences, max_queue=1000, threads=1
        ) as engine:
            yield engine


Tokens = dict[tuple[bool, float | None, int | None], list[int]]
"""The emitted tokens of every output, by thinking, temperature and seed."""


def key_of(sequence: Any) -> tuple[bool, float | None, int | None]:
    """What tells one output of a model from the others."""
    request = sequence.session.request
    return bool(request.thinking), request.sampling.temperature, request.sampling.seed


def record(engine: Any, made: Tokens) -> None:
    """Keep the tokens of every output as its sequence is given back."""
    runner = engine._runner
    close = runner.close

    def keep(sequence: Any) -> None:
        made[key_of(sequence)] = list(sequence.tokens[sequence.prompt_tokens :])
        close(sequence)

    runner.close = keep


def propose(engine: Any, made: Tokens) -> None:
    """Draft what was made without drafts, every fifth token changed."""

    def proposal(sequence: Any, drafts: list[int]) -> list[int]:
        done = sequence.emitted
        ahead = made[key_of(sequence)][done : done + len(drafts)]
        ahead += drafts[len(ahead) :]
        return [token if (done + i) % 5 else drafts[i] for i, token in enumerate(ahead)]

    engine._runner.proposal = proposal


Part = tuple[str, bool, float]
"""A model, thinking, a temperature: two cells, without drafts and with 3, of which the first is the truth."""


def parts(models: Sequence[str], modes: Sequence[bool], temperatures: Sequence[float]) -> list[Part]:
    """Those of a choice, in order."""
    return [(model, thinking, t) for model in models for thinking in modes for t in temperatures]


def run(part: Part, indices: Sequence[int], sequences: int = 8) -> list[Cell]:
    """Both cells of a part; an output that differs from the one without drafts counts as wrong."""
    model, thinking, temperature = part
    cells: list[Cell] = []
    made: Tokens = {}
    for drafts in (0, 3):
        with opened(model, drafts, sequences) as engine:
            if model == "random":
                (propose if drafts else record)(engine, made)
            name = (
                f"{model}, thinking {'on' if thinking else 'off'}, k = {drafts}, "
                f"{'temperature 1' if temperature else 'greedy'}"
            )
            cell = run_cell(engine, name, indices, thinking=thinking, temperature=temperature, budget=BUDGET[model])
        cells.append(cell)
        cell.wrong += [
            f"output {index} differs with drafts"
            for index, a, b in zip(indices, cells[0].texts, cell.texts, strict=True)
            if a != b
        ]
    return cells


def digest(outputs: int) -> str:
    """What the cells depend on: the sources of structured output, the schemas and this file."""
    here = Path(__file__).parent
    runtime, core = here.parents[1] / "ninfer_core" / "runtime", here.parent / "core"
    names = ("arguments", "closing", "compiler", "conditions", "grammar", "language", "sampler", "schema", "sizes")
    files = [runtime / f"{name}.py" for name in (*names, "vocabulary")]
    files += [core / "agent_schemas.py", core / "constrained.py", Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files) + str(outputs).encode()).hexdigest()[:12]


class Kept:
    """Finished cells in a file, a JSON object a line. Several processes may add to it."""

    def __init__(self, path: Path | None, digest: str) -> None:
        self._path, self._digest = path, digest

    def of(self, part: Part) -> list[Cell] | None:
        """The cells of a part, if they are there."""
        if self._path is None or not self._path.exists():
            return None
        for line in reversed(self._path.read_text().splitlines()):
            found = json.loads(line)
            if (found["digest"], tuple(found["part"])) == (self._digest, part):
                return [Cell(**cell) for cell in found["cells"]]
        return None

    def add(self, part: Part, cells: Sequence[Cell]) -> None:
        """Keep the cells of a part, without their texts."""
        if self._path is not None:
            numbers = [{**asdict(cell), "texts": []} for cell in cells]
            with self._path.open("a") as file:
                file.write(json.dumps({"digest": self._digest, "part": part, "cells": numbers}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=100)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--thinking", nargs="+", choices=("off", "on"), default=["off", "on"])
    parser.add_argument("--temperatures", nargs="+", type=float, choices=(0.0, 1.0), default=[0.0, 1.0])
    parser.add_argument("--keep", type=Path, metavar="FILE")
    given = parser.parse_args()
    kept = Kept(given.keep, digest(given.outputs))
    every: list[Cell] = []
    print(f"{len(MATRIX)} schemas, {given.outputs} outputs in every cell", flush=True)
    for part in parts(given.models, [mode == "on" for mode in given.thinking], given.temperatures):
        cells = kept.of(part)
        if cells is None:
            cells = run(part, range(given.outputs))
            kept.add(part, cells)
        for cell in cells:
            print(cell, *cell.wrong, sep="\n  ", flush=True)
        every += cells
    wrong = sum(len(cell.wrong) for cell in every)
    print(f"in all {sum(c.valid for c in every)} valid, {sum(c.cut for c in every)} cut, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
