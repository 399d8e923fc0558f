"""Long tasks: one thing among much natural text, and conversations with many turns between what was said and its question."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .chattasks import fact_task, memory_facts, repeat_task, talk_task
from .dialogue import Task, Turn, assistant, user
from .words import Draw

LONGEST = 3600
Filler = Callable[[int], str]


def length(draw: Draw) -> int:
    """Tokens to fill: every order of magnitude as likely, the longest at times on purpose."""
    return LONGEST if draw.chance(0.1) else int(math.exp(draw.rng.uniform(math.log(120), math.log(LONGEST))))


def sentences(draw: Draw, tokens: int) -> str:
    """Statements of one form about different things, about `tokens` long: what natural text does not have."""
    things = draw.words(max(2, min(400, tokens // 9)))
    return " ".join(f"The {thing} is {draw.word()}." for thing in things)


def needle_task(draw: Draw, filler: Filler | None) -> Task:
    """A statement at any depth of a long text; the question stands behind it."""
    (statement, _, questions, answer), *others = draw.rng.sample(memory_facts(draw), 3)
    total = length(draw)
    before = int(total * draw.rng.random())
    made: Any = filler if filler and draw.chance(0.75) else lambda tokens: sentences(draw, tokens)
    parts = [made(max(16, before)), statement, made(max(16, total - before))]
    if draw.chance(0.3):
        parts.insert(draw.rng.choice((0, 1, 3)), others[0][0])
    text = draw.one((" ", "\n", "\n\n")).join(parts)
    question = draw.one(questions)
    lead = draw.one(("Read this text.\n", "Here is a text:\n\n", "Text:\n", ""))
    reasoning = f"The text says: {statement} {answer}"
    if draw.chance(0.25):
        return Task("long", [{"role": "system", "content": lead + text}, user(question)], answer, reasoning)
    if draw.chance(0.2):
        return Task("long", [user(lead + text), assistant("I have read it."), user(question)], answer, reasoning)
    return Task("long", [user(f"{lead}{text}\n\n{question}")], answer, reasoning)


def talk_long_task(draw: Draw, measure: Callable[[str], int]) -> Task:
    """A long conversation: things said early, in the middle or late, many known turns between, one asked at the end."""
    pool = draw.rng.sample(memory_facts(draw), draw.rng.randint(1, 3))
    total, used = length(draw), 0
    turns: list[tuple[Turn, Turn]] = []
    while used < total:
        other = draw.one((talk_task, fact_task, fact_task, repeat_task))(draw)
        turns.append((other.messages[-1], assistant(other.answer)))
        used += measure(other.messages[-1]["content"] + other.answer) + 14
    for statement, reply, _, _ in pool:
        turns.insert(draw.rng.randint(0, len(turns)), (user(statement), assistant(reply)))
    if draw.chance(0.25):
        statement, reply, _, _ = pool[0]
        turns = [(user(statement), assistant(reply)), *[t for t in turns if t[0]["content"] != statement]]
        chosen = pool[0]
    else:
        chosen = draw.one(pool)
    statement, _, questions, answer = chosen
    messages = [turn for pair in turns for turn in pair]
    return Task("long", [*messages, user(draw.one(questions))], answer, f"The user said: {statement} {answer}")
