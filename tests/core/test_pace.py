"""Adaptive drafting: when it rests, when it resumes, and that the output and the drafts do not notice."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tiny import Alternating, tiny_engine

from ninfer_core.runtime.pace import LONGEST, REST, Pace, Pacer
from ninfer_core.types import Request, Sampling


def play(pacer, full, single, tokens, rounds):
    """Rounds of one sequence with fixed costs; `tokens(i)` per drafting round. Returns (seconds, tokens, history)."""
    pace, seconds, made, history = Pace(), 0.0, 0, []
    for i in range(rounds):
        drafting = pace.drafting
        cost, got = (full, tokens(i)) if drafting else (single, 1)
        pacer.measured(drafting, 1, cost)
        pacer.update(pace, got, 1)
        seconds, made = seconds + cost, made + got
        history.append(drafting)
    return seconds, made, history


def test_drafts_that_pay_go_on():
    seconds, made, history = play(Pacer(3), 1.8, 1.0, lambda i: 3, 300)
    assert all(history)
    assert made / seconds > 1.5


def test_drafts_that_never_pay_cost_little():
    seconds, made, history = play(Pacer(3), 1.8, 1.0, lambda i: 1, 3000)
    assert made / seconds > 0.95  # plain decoding makes 1 per second
    assert sum(now and not before for before, now in pairwise(history)) >= 5  # but tried again


@pytest.mark.parametrize("rounds", [200, 300, 600, 1500])
def test_short_answers_without_a_right_draft_lose_little_too(rounds):
    seconds, made, _ = play(Pacer(3), 1.9, 1.0, lambda i: 1, rounds)
    assert made / seconds > 0.95


def test_drafts_that_nearly_pay_at_high_acceptance_are_found_out():
    """Two tokens per round at thrice the cost: acceptance is fair, the round is still not worth it."""
    seconds, made, _ = play(Pacer(3), 3.0, 1.0, lambda i: 2, 3000)
    assert made / seconds > 0.95


def test_drafting_comes_back_when_the_text_becomes_predictable():
    _, _, history = play(Pacer(3), 1.8, 1.0, lambda i: 1 if i < 400 else 4, 1500)
    assert not all(history[:400]) and all(history[-200:])


def test_rests_grow_to_a_limit():
    _, _, history = play(Pacer(3), 1.8, 1.0, lambda i: 1, 6000)
    rests = [len(run) for run in "".join("d" if drafting else "." for drafting in history).split("d") if run]
    assert max(rests) <= LONGEST + REST and rests[-2] >= LONGEST // 2
    assert rests[:-1] == sorted(rests[:-1])


def test_one_long_pause_is_not_taken_for_a_cost():
    pacer, pace = Pacer(3), Pace()
    for i in range(60):
        drafting = pace.drafting
        pacer.measured(drafting, 1, 500.0 if i == 30 else (1.8 if drafting else 1.0))
        pacer.update(pace, 3, 1)
    assert pace.drafting


def test_switched_off_it_never_rests():
    _, _, history = play(Pacer(3, enabled=False), 9.0, 1.0, lambda i: 1, 100)
    assert all(history)


@pytest.mark.parametrize("on,off", [(1, 1), (2, 3), (3, 20)])
def test_output_and_drafts_are_those_of_a_run_without_rests(on, off):
    r = Request(
        prompt=tuple((i * 37) % 250 for i in range(90)),
        sampling=Sampling(temperature=1.0, seed=4),
        max_tokens=60,
        ignore_eos=True,
    )
    runs = []
    for rests in (False, True):
        with tiny_engine(draft_tokens=3) as engine:
            drafts = {}

            def note(sequence, made, drafts=drafts):
                drafts[sequence.length] = made
                return made

            engine._runner.proposal = note
            if rests:
                engine._runner._pacer = pacer = Alternating(on, off)
            runs.append((engine.generate(r).text, drafts))
    (text, always), (same, sometimes) = runs
    assert text == same and pacer.resumed >= 2
    shared = sometimes.keys() & always.keys()
    assert len(shared) >= 3
    # the draft layer saw every token: its drafts are those of the run that never rested
    assert all(sometimes[at] == always[at] for at in shared)
