"""Adaptive drafting: when it rests, when it resumes, and that the output and the drafts do not notice."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from tiny import Alternating, tiny_engine

from ninfer_core.runtime.pace import LONGEST, REST, SETTLE, Pace, Pacer, _crowd
from ninfer_core.types import Request, Sampling


def play(pacer, full, single, tokens, rounds):
    """Rounds of one sequence that cost `full` at any depth; `tokens(i)` per drafting round, as far as the depth goes.

    Returns (seconds, tokens, history).
    """
    pace, seconds, made, history = Pace(), 0.0, 0, []
    for i in range(rounds):
        drafting = pace.drafting
        pacer.look([pace])
        depth = pacer.depth if drafting else 0
        cost, got = (full, min(tokens(i), depth + 1)) if drafting else (single, 1)
        pacer.measured(depth, 1, cost)
        pacer.update(pace, got, 1, depth)
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
        pacer.measured(3 * drafting, 1, 500.0 if i == 30 else (1.8 if drafting else 1.0))
        pacer.update(pace, 3, 1, 3 * drafting)
    assert pace.drafting


def test_switched_off_it_never_rests():
    _, _, history = play(Pacer(3, enabled=False), 9.0, 1.0, lambda i: 1, 100)
    assert all(history)


# depth


def costs(fixed, row, step):
    """Seconds of a round: of its launch, per row beyond what is free, and per step of the draft layer."""
    return lambda k, n: fixed + row * max(0, n * (k + 1) - 8) + step * k


def serve(pacer, cost, sequences, shares, rounds, paces=None, seed=0):
    """Rounds of `sequences` that accept by `shares`: chances of the first, second, ... draft being right, if reached.

    Returns (seconds, tokens, depths). All of it follows from `seed` and the costs; no clock is asked.
    """
    rng = random.Random(seed)
    paces = paces or [Pace() for _ in range(sequences)]
    seconds, made, depths, held = 0.0, 0, [], [pacer.depth] * sequences
    for _ in range(rounds):
        pacer.look(paces)
        groups = {}
        for i, pace in enumerate(paces):
            groups.setdefault((held[i] if pace.drafting else 0, pacer.depth if pace.drafting else 0), []).append(i)
        depths.append(pacer.depth)
        for (verified, drafts), members in groups.items():
            took = cost(verified, len(members))
            seconds += took
            if verified == drafts:
                pacer.measured(drafts, len(members), took)
            for i in members:
                accepted = next((j for j in range(verified) if rng.random() >= shares[j]), verified)
                made += accepted + 1
                pacer.update(paces[i], accepted + 1, len(members), verified)
                held[i] = drafts
    return seconds, made, depths


def steady(depths):
    return Counter(depths[len(depths) // 2 :]).most_common(1)[0][0]


def best_depth(cost, sequences, shares, most):
    def rate(k):
        chance, tokens = 1.0, 1.0
        for share in shares[:k]:
            chance *= share
            tokens += chance
        return sequences * tokens / cost(k, sequences)

    return max(range(1, most + 1), key=rate)


SHARES = (0.85, 0.7, 0.6, 0.5, 0.45)
DEAR_ROWS = costs(1.0, 0.02, 0.08)


@pytest.mark.parametrize("most", [3, 5])
@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16, 32, 64])
def test_the_depth_is_the_one_that_is_fastest_at_the_load(most, sequences):
    _, _, depths = serve(Pacer(most), DEAR_ROWS, sequences, SHARES, 800)
    best = best_depth(DEAR_ROWS, sequences, SHARES, most)
    found = steady(depths)
    cost = DEAR_ROWS
    if found != best:  # a neighbour that is as good within what is worth a change

        def rate(k):
            return sum(math.prod(SHARES[:i]) for i in range(k + 1)) / cost(k, sequences)

        assert rate(found) > 0.94 * rate(best)


def test_the_depth_falls_as_the_batch_grows_and_rises_again():
    pacer = Pacer(5)
    seen = [steady(serve(pacer, DEAR_ROWS, n, SHARES, 600)[2]) for n in (1, 8, 32, 64, 1)]
    assert seen[0] > seen[2] >= seen[3] and seen[4] > seen[3]
    assert seen[:4] == sorted(seen[:4], reverse=True)


def test_where_rows_are_free_no_other_depth_is_kept():
    _, _, depths = serve(Pacer(3), costs(1.0, 0.0, 0.01), 4, (0.95, 0.95, 0.95), 600)
    assert steady(depths) == 3 and depths.count(3) > 0.95 * len(depths)


def test_right_drafts_are_never_given_up_to_look_around():
    _, _, depths = serve(Pacer(3), costs(1.0, 0.0, 0.0), 2, (1.0, 1.0, 1.0), 300)
    assert set(depths) == {3}


def test_short_loads_do_not_look_around():
    _, _, depths = serve(Pacer(3), DEAR_ROWS, 64, SHARES, SETTLE)
    assert set(depths) == {3}


def test_looking_around_costs_little():
    """A depth that is best from the start: what trials of its neighbours cost."""
    cost = costs(1.0, 0.0, 0.12)
    seconds, made, depths = serve(Pacer(3), cost, 1, (0.9, 0.8, 0.2), 3000)
    best = best_depth(cost, 1, (0.9, 0.8, 0.2), 3)
    assert best == 2 == steady(depths)
    assert made / seconds > 0.96 * (1 + 0.9 + 0.72) / cost(2, 1)


def test_drafts_that_pay_for_few_and_not_for_many_rest_and_come_back():
    """Rows so dear that at 64 sequences single steps are fastest: all rest; with the load gone they draft again."""
    cost, pacer, paces = costs(1.0, 0.2, 0.3), Pacer(3), [Pace() for _ in range(64)]
    serve(pacer, cost, 64, (0.5, 0.3, 0.2), 400, paces)
    assert sum(pace.drafting for pace in paces) < 24
    few = paces[:2]
    cheap = costs(1.0, 0.0, 0.05)
    serve(pacer, cheap, 2, (0.9, 0.9, 0.9), 60, few)
    assert all(pace.drafting for pace in few)


@pytest.mark.parametrize("sequences", range(1, 70))
def test_loads_that_count_as_one_are_alike(sequences):
    same = [n for n in range(1, 200) if _crowd(n) == _crowd(sequences)]
    assert sequences in same and max(same) <= 1.25 * min(same) and same == list(range(same[0], same[-1] + 1))


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
