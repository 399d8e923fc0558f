"""The synthetic task generator: tool tasks, the mix of all tasks, and a seeded source of rendered dialogues."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...frontend.template import ChatTemplate
from .chattasks import (
    fact_task,
    introduce_task,
    list_task,
    memory_task,
    phrase_task,
    repeat_task,
    story_task,
    talk_task,
    unknown_task,
)
from .dialogue import Task, answer_text, assistant, prompt_text, user
from .images import caption_task, video_task
from .jsontasks import json_task, nested_task
from .longtasks import Filler, needle_task, talk_long_task
from .sumtasks import sum_task
from .tooltasks import again, choice_set, everyday_tool, random_tool, result_text, shown, tool_set
from .words import Draw, Pools

SYSTEM = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You are a careful assistant. Answer in one sentence.",
    "Be concise.", "You are an AI assistant.", "Answer the question of the user.", "You help people with their work.",
)  # fmt: skip


def call_reasoning(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The think block before calls: the tool and its values restated."""
    said = []
    for name, values in calls:
        rest = ", ".join(f"{key} is {shown(value)}" for key, value in values.items())
        said.append(f"{name} fits" + (f": {rest}." if rest else "."))
    return " ".join(said)


def tool_task(draw: Draw) -> Task:
    """One call among one to six tools."""
    count = draw.one((1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6))
    tools, (case,) = tool_set(draw, count)
    calls = [(case.name, case.values)]
    return Task("tool", [user(case.request)], tools=tools, calls=calls, reasoning=call_reasoning(calls))


def choice_task(draw: Draw) -> Task:
    """One call where two to five tools differ in a verb or a noun, and the request has other words for it."""
    tools, case = choice_set(draw, draw.rng.randint(2, 5))
    calls = [(case.name, case.values)]
    return Task("choice", [user(case.request)], tools=tools, calls=calls, reasoning=call_reasoning(calls))


def integer_task(draw: Draw) -> Task:
    """One call whose values are all whole numbers."""
    while True:
        task = tool_task(draw)
        values = list(task.calls[0][1].values())
        if values and all(type(value) is int for value in values):
            return task


def foreign_task(draw: Draw) -> Task:
    """One call with a value in another script or with accents."""
    while True:
        task = tool_task(draw)
        if any(isinstance(value, str) and not value.isascii() for value in task.calls[0][1].values()):
            return task


def parallel_task(draw: Draw) -> Task:
    """Two or three calls in one answer."""
    wanted = draw.one((2, 2, 3))
    tools, cases = tool_set(draw, draw.rng.randint(wanted, 4), wanted, 5 - wanted)
    if cases[0].spec and draw.chance(0.6):
        cases = [cases[0], again(draw, cases[0])]
    glue = draw.one((" And ", " Also: ", "\n", " Then ", " "))
    requests = [case.request.rstrip(" .") + ("" if case.request.endswith("?") else ".") for case in cases]
    calls = [(case.name, case.values) for case in cases]
    return Task("parallel", [user(glue.join(requests))], tools=tools, calls=calls, reasoning=call_reasoning(calls))


def no_tool_task(draw: Draw) -> Task:
    """Tools are given, but the request is for something else or for plain talk."""
    tools, _ = tool_set(draw, draw.one((1, 1, 2, 2, 3, 4)))
    if draw.chance(0.5):
        inner = draw.one((talk_task, fact_task, repeat_task, memory_task, sum_task, json_task))(draw)
        inner.tools, inner.kind = tools, "no_tool"
        return inner
    names = {tool["function"]["name"] for tool in tools}
    other = random_tool(draw, 2) if draw.chance(0.5) else everyday_tool(draw)
    while other.name in names or any(other.purpose in str(tool).lower() for tool in tools):
        other = random_tool(draw, 2)
    return Task(
        "no_tool", [user(other.request)], "I have no function for that.", "No function fits this request.", tools=tools
    )


def result_task(draw: Draw) -> Task:
    """A tool has answered: say what it returned; at times a further question follows."""
    tools, (case,) = tool_set(draw, draw.one((1, 1, 2, 3)))
    raw, spoken = result_text(draw)
    calls = [(case.name, case.values)]
    think = call_reasoning(calls)
    thinking = draw.chance(0.5)
    messages = [user(case.request), assistant("", think if thinking else "", calls), {"role": "tool", "content": raw}]
    answer, reasoning = f"The result is: {spoken}", f"{case.name} returned {spoken}."
    task = Task("result", messages, answer, reasoning, tools=tools, preserve=draw.chance(0.6))
    if draw.chance(0.3):
        messages.append(assistant(answer, reasoning if thinking else ""))
        if draw.chance(0.4):
            messages.append(
                user(draw.one(("What was the result?", "Say the result again.", "Please repeat the result.")))
            )
        else:
            follow = draw.one((talk_task, fact_task, repeat_task))(draw)
            messages.append(follow.messages[-1])
            task.answer, task.reasoning = follow.answer, follow.reasoning
            task.fixed = follow.fixed
    return task


def chain_task(draw: Draw) -> Task:
    """A second call after the first one's result, or after an earlier finished exchange."""
    tools, (first, second) = tool_set(draw, draw.one((2, 2, 3, 4)), 2)
    raw, spoken = result_text(draw)
    before, calls = [(first.name, first.values)], [(second.name, second.values)]
    thinking = draw.chance(0.5)
    think = call_reasoning(before) if thinking else ""
    if draw.chance(0.4):
        glue = draw.one((" Then ", " After that: ", " And then "))
        messages = [
            user(first.request.rstrip(" .") + "." + glue + second.request),
            assistant("", think, before),
            {"role": "tool", "content": raw},
        ]
        return Task(
            "chain", messages, tools=tools, calls=calls, reasoning=call_reasoning(calls), preserve=draw.chance(0.6)
        )
    messages = [
        user(first.request),
        assistant("", think, before),
        {"role": "tool", "content": raw},
        assistant(f"The result is: {spoken}"),
        user(second.request),
    ]
    return Task("chain", messages, tools=tools, calls=calls, reasoning=call_reasoning(calls), preserve=draw.chance(0.6))


Maker = Callable[[Draw], Task]
MIX: tuple[tuple[float, Maker], ...] = (  # shares of the dialogues, in any unit
    (0.17, tool_task), (0.04, integer_task), (0.04, foreign_task), (0.05, choice_task), (0.07, parallel_task), (0.07, no_tool_task), (0.04, result_task), (0.04, chain_task), (0.07, memory_task),
    (0.012, introduce_task), (0.05, json_task), (0.05, nested_task), (0.08, repeat_task), (0.10, sum_task), (0.06, fact_task), (0.035, talk_task),
    (0.03, unknown_task), (0.01, list_task), (0.015, story_task), (0.80, caption_task), (0.06, video_task),
)  # fmt: skip


class Generator:
    """Draws tasks of the mix from a seed and renders them."""

    def __init__(
        self, text: Path | None, template: ChatTemplate, seed: int, *, test: bool = False, images: bool = True
    ) -> None:
        """`text` is the folder of `fetch_corpus`; None takes the held-out words beside this module."""
        self.rng = random.Random(seed)
        self.draw = Draw(self.rng, Pools.load(text / "words.txt", test) if text else Pools.held_out())
        self.template = template
        self.names: dict[str, list[str]] = json.loads((text / "names.json").read_text(encoding="utf-8")) if text else {}
        kept = [(weight, maker) for weight, maker in MIX if images or maker not in (caption_task, video_task)]
        self.weights, self.makers = [weight for weight, _ in kept], [maker for _, maker in kept]
        self.filler: Filler | None = None

    def long(self) -> Task:
        """A task of up to the whole context."""
        if self.rng.random() < 0.5:
            return needle_task(self.draw, self.filler)
        return talk_long_task(self.draw, lambda text: len(text) // 3)

    def task(self, maker: Maker | None = None, thinking: bool | None = None) -> Task:
        """The next task: of the mix, or of one maker."""
        if maker is None and self.rng.random() < 0.05:
            task = phrase_task(self.draw, self.names)
        elif maker is None and self.rng.random() < 0.02:
            task = self.long()
        else:
            task = (maker or self.rng.choices(self.makers, self.weights)[0])(self.draw)
        task.thinking = self.rng.random() < 0.5 if thinking is None else thinking
        if task.messages[0]["role"] != "system" and self.rng.random() < 0.15:
            task.messages.insert(0, {"role": "system", "content": self.rng.choice(SYSTEM)})
        return task

    def render(self, task: Task) -> tuple[str, str]:
        """Prompt and answer text."""
        return prompt_text(task, self.template), answer_text(task)
