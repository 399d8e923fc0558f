"""A draft layer that is always right is always accepted, in every state a sequence can be in. Over the hash model.

Drafts that fall behind after a resume, an eviction or in a full pool show at once: they are the first to see a row of the
draft layer, a hidden row or a page that is not the sequence's.
"""

from __future__ import annotations

import pytest
from hash_model import Machine, answer

PROMPT = [(i * 37 + i // 3) % 250 for i in range(200)]


def others(count, length, seed=0):
    return [[(i * i * 7 + i * (k + seed) + 11 * k) % 250 for i in range(length)] for k in range(count)]


def all_accepted(machine, handle, drafts):
    tokens, usage = handle.request.max_tokens, handle.session.usage
    assert machine.tokens[handle.id] == answer(handle.request.prompt, tokens)
    rounds = -(-(tokens - 1) // (drafts + 1))
    assert usage.rounds == rounds, f"{usage.accepted_tokens} of {usage.drafted_tokens} drafts"
    assert usage.accepted_tokens >= (rounds - 1) * drafts  # the limit cuts the last burst


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_cold_resumed_and_behind_its_own_answer(drafts, lanes):
    machine = Machine(drafts=drafts, lanes=lanes)
    talk, cached = list(PROMPT), []
    for _ in range(4):
        handle = machine.submit(talk, 49)
        (made,) = machine.run(handle)
        all_accepted(machine, handle, drafts)
        cached.append(handle.session.cached_tokens)
        talk += [*made, *PROMPT[:7]]
        machine.audit()
    assert cached[0] == 0 and cached == sorted(set(cached))


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.95])
def test_while_the_pool_is_nearly_full(share, lanes):
    """Other sequences hold so much of it; what is cached makes room, and the rest is used to the last page."""
    drafts = 3
    machine = Machine(slots=8, pages=100, checkpoints=20, drafts=drafts, lanes=lanes)
    neighbours = [machine.submit(prompt, 600) for prompt in others(7, 100)]
    while machine.reuse.pages.free > (1 - share) * machine.reuse.pages.size:
        if all(handle.session.completion_tokens for handle in neighbours):
            break
        machine.scheduler.step()
    used = 1 - machine.reuse.pages.free / machine.reuse.pages.size
    assert used >= 0.6
    if share > 0.9:
        held = machine.reuse.pages.take(machine.reuse.pages.free - 5)
        assert held is not None and machine.reuse.pages.free == 5
    for _ in range(3):
        handle = machine.submit(PROMPT, 49)
        machine.run(handle)
        all_accepted(machine, handle, drafts)
    machine.run(*neighbours)
    for handle in neighbours:
        all_accepted(machine, handle, drafts)


@pytest.mark.parametrize("lanes", [False, True])
def test_after_everything_was_evicted_and_read_again(lanes):
    machine = Machine(slots=2, pages=16, checkpoints=3, drafts=3, lanes=lanes)
    first = machine.submit(PROMPT, 49)
    machine.run(first)
    for prompt in others(8, 300):
        machine.expect(prompt, 5)
    again = machine.submit(PROMPT, 49)
    machine.run(again)
    assert again.session.cached_tokens == 0 and machine.scheduler.stats()["checkpoints_evicted"] > 5
    for handle in (first, again):
        all_accepted(machine, handle, 3)
    machine.audit()


def test_over_a_long_run_beside_others_that_come_and_go():
    machine = Machine(slots=3, pages=80, drafts=3, lanes=True)
    long = machine.submit(PROMPT, 1500)
    for prompt in others(30, 90, seed=5):
        short = machine.submit(prompt, 17)
        while not short.done:
            machine.scheduler.step()
        all_accepted(machine, short, 3)
    machine.run(long)
    all_accepted(machine, long, 3)
    machine.audit()
