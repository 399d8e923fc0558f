"""What the tests of the engine share: requests of a known length, waiting, and a gate in its loop."""

from __future__ import annotations

import threading

from ninfer_core.types import Request, Sampling, Tool
from tests.serving import wait_for

TOOL = Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}})


def raw(n=20, seed=1, tokens=8, **fields) -> Request:
    """A request whose output has exactly `tokens` tokens."""
    prompt = tuple((i * 31 + seed) % 250 for i in range(n))
    sampling = fields.pop("sampling", Sampling(seed=seed))
    return Request(prompt=prompt, sampling=sampling, max_tokens=tokens, ignore_eos=True, **fields)


def text(n, seed=1):
    """Token ids; a longer text of the same seed begins with a shorter one."""
    return tuple((i * i * 31 + i * seed + seed * seed * 7) % 250 for i in range(n))


def run(engine, made):
    """Tokens with their log-probabilities, and usage."""
    result = engine.submit(made).result(120)
    return [(lp.token_id, lp.logprob, lp.top) for lp in result.logprobs], result.usage


def until(condition, seconds=20.0):
    assert wait_for(condition, seconds), "the condition did not come true in time"


def assert_free(engine):
    """All pages and slots are back, and a request still works."""
    until(lambda: engine.stats()["running"] == 0 and engine.stats()["waiting"] == 0)
    stats = engine.stats()
    assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])
    assert engine.health()["status"] == "ok"
    assert engine.generate(raw(tokens=2)).usage.completion_tokens == 2


class Gate:
    """Holds the engine's loop before a verb until it is opened."""

    def __init__(self, engine, verb):
        self.reached, self.opened = threading.Event(), threading.Event()
        original = getattr(engine._runner, verb)

        def wait(*args):
            self.reached.set()
            assert self.opened.wait(20)
            return original(*args)

        setattr(engine._runner, verb, wait)
