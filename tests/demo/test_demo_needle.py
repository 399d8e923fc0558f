"""What was said at the beginning of a conversation as long as the demo model's context, and in the middle, is found."""

from __future__ import annotations

import pytest

from ninfer_core.demo.make import facts
from ninfer_core.engine import Engine
from ninfer_core.types import Message, Request, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NEEDLES = [
    ("My name is Torben.", "Nice to meet you, Torben!", "What is my name?", "Torben"),
    ("The code word is marmot.", "I will remember marmot.", "What is the code word?", "marmot"),
]
ANSWER = 32


def filler(count: int) -> list[Message]:
    """Questions the model knows, with their answers."""
    known = [pair for pair in facts.PLAIN.items() if pair[0].endswith("?")]
    turns = (known[i % len(known)] for i in range(count))
    return [message for asked, answer in turns for message in (Message("user", asked), Message("assistant", answer))]


def conversation(engine: Engine, needle: tuple[str, str, str, str], share: float) -> Request:
    """As many turns as fit before the question, with the needle behind `share` of them."""
    said, reply, question, _ = needle
    limit = engine.context_length - ANSWER

    def made(count: int) -> Request:
        turns, at = filler(count), 2 * int(count * share)
        turns[at:at] = [Message("user", said), Message("assistant", reply)]
        law = Sampling(temperature=0.0)
        return Request((*turns, Message("user", question)), thinking=False, max_tokens=ANSWER, sampling=law)

    low, high = 1, 1000
    while high - low > 1:
        middle = (low + high) // 2
        fits = len(engine.frontend.prepare(made(middle)).token_ids) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return made(low)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_was_said_long_ago_is_found(share):
    with Engine.load("demo", device="cpu", max_sequences=1) as engine:
        found = []
        for needle in NEEDLES:
            done = engine.submit(conversation(engine, needle, share)).result()
            assert done.usage.prompt_tokens > 0.95 * engine.context_length
            found.append((needle[3] in done.text, done.text))
    assert all(right for right, _ in found), found
