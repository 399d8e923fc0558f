"""Inspect tasks over local JSON-lines files: short answers and choices, scored by rules. See docs/evaluation.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import Score, Target, accuracy, choice, scorer, stderr
from inspect_ai.solver import TaskState, generate, multiple_choice

HERE = Path(__file__).parent


def plain(text: str) -> str:
    """Text without case, marks and runs of spaces: what two answers are compared by."""
    return " ".join(re.sub(r"[^\w\s.-]", " ", text.casefold()).split()).rstrip(".")


@scorer(metrics=[accuracy(), stderr()])
def holds_answer() -> Any:
    """Right where the wanted answer stands in the visible text as words of its own; the last number where it is one."""

    async def score(state: TaskState, target: Target) -> Score:
        said, wanted = plain(state.output.completion), plain(target.text)
        if re.fullmatch(r"-?\d+(\.\d+)?", wanted):
            numbers = re.findall(r"-?\d+(?:\.\d+)?", said)
            right = bool(numbers) and float(numbers[-1]) == float(wanted)
        else:
            right = re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", said) is not None
        return Score(value="C" if right else "I", answer=state.output.completion[-200:])

    return score


def sample(record: dict[str, Any]) -> Sample:
    """One line: `input`, `target`, and `choices` for a choice (then `target` is a letter)."""
    return Sample(input=record["input"], target=str(record["target"]), choices=record.get("choices"))


@task
def short_answers(path: str = str(HERE / "demo_questions.jsonl")) -> Task:
    """Questions whose answer is a word or a number."""
    return Task(dataset=json_dataset(path, sample), solver=[generate()], scorer=holds_answer())


@task
def choices(path: str) -> Task:
    """Questions with lettered choices."""
    return Task(dataset=json_dataset(path, sample), solver=[multiple_choice(cot=True)], scorer=choice())
