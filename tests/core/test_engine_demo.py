"""The engine with the embedded demo model: real text, real drafts."""

from __future__ import annotations

import pytest
from engine_support import assert_free
from tiny import Alternating

from ninfer_core.engine import Engine

QUESTIONS = ("Count from one to ten.", "Write a short story about a fox.", "What is a mixture of experts?")


def answers(engine):
    made = []
    for question in QUESTIONS:
        for temperature in (0.0, 1.0):
            made.append(engine.generate(question, thinking=False, max_tokens=40, temperature=temperature, seed=3))
    return made


def acceptance(made):
    return sum(c.usage.accepted_tokens for c in made) / sum(c.usage.drafted_tokens for c in made)


@pytest.fixture(scope="module")
def plain():
    with Engine.load("demo", draft_tokens=0) as engine:
        return [(c.text, c.finish_reason) for c in answers(engine)]


def test_drafts_are_good_and_change_nothing(plain):
    with Engine.load("demo", draft_tokens=3, adaptive_drafts=False) as engine:
        made = answers(engine)
        assert [(c.text, c.finish_reason) for c in made] == plain
        cold = acceptance(made)
        assert cold > 0.5
        # after rests the draft layer is as good as without: it has seen every token
        engine._runner._pacer = pacer = Alternating(2, 3)
        rested = answers(engine)
        assert [(c.text, c.finish_reason) for c in rested] == plain and pacer.resumed
        assert acceptance(rested) > cold - 0.1
        assert_free(engine)


def test_many_at_once_with_drafts_that_differ_in_length(plain):
    with Engine.load("demo", draft_tokens=5, max_sequences=4) as engine:
        handles = [
            engine.stream(question, thinking=False, max_tokens=40, temperature=temperature, seed=3)
            for question in QUESTIONS
            for temperature in (0.0, 1.0)
        ]
        texts = ["".join(event.text for event in handle if hasattr(event, "text")) for handle in handles]
        assert texts == [text for text, _ in plain]
        assert_free(engine)
