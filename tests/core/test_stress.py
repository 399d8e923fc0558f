"""Thousands of random requests with cancels, deadlines, faults, evictions and resumes, against a model-based checker."""

from __future__ import annotations

import random

import pytest
from hash_model import Machine, answer

REQUESTS = 500


def conversations(rng):
    """Prompts that share beginnings of many lengths: a few systems, turns behind them, answers taken over."""
    systems = [[rng.randrange(250) for _ in range(n)] for n in (17, 63, 64, 65, 130, 300)]
    known = [list(system) for system in systems]

    def prompt():
        base = rng.choice(known if rng.random() < 0.8 else systems)
        if rng.random() < 0.2:
            base = base[: rng.randint(1, len(base))]
        made = base + [rng.randrange(250) for _ in range(rng.choice((0, 1, 5, 30, 64, 100)))]
        made = made[:600] or [1]
        if rng.random() < 0.5:
            tokens = rng.randint(1, 30)
            known.append(made + answer(made, tokens)[: rng.randint(1, tokens)])
            if len(known) > 30:
                known.pop(rng.randrange(len(systems), len(known)))
        return made

    return prompt


@pytest.mark.parametrize(
    "drafts,pages,checkpoints,accept,blocks",
    [(3, 60, 6, 1.0, 0), (5, 24, 3, 0.5, 90), (0, 30, 8, 1.0, 0), (2, 14, 40, 0.2, 30)],
)
def test_random_requests_equal_solo_runs_and_leave_nothing(drafts, pages, checkpoints, accept, blocks):
    """`blocks` of host memory, where copies take their time."""
    rng = random.Random(drafts * 1000 + pages)
    machine = Machine(slots=3, pages=pages, checkpoints=checkpoints, drafts=drafts, blocks=blocks, slow=True, layers=3)
    machine.runner.piece_seconds = lambda decoding: rng.choice((0.0, 1.0))  # one layer, or all whose time is known
    if accept < 1:
        machine.runner.proposal = lambda s, made: [t if rng.random() < accept else (t + 1) % 250 for t in made]
    prompt = conversations(rng)
    verify = machine.runner._decoder.verify
    failing = [0]

    def unsteady(*args):
        if failing[0] and rng.random() < 0.5:
            failing[0] -= 1
            raise RuntimeError("a device fault")
        return verify(*args)

    def layer(rows):
        if rng.random() < 0.002:
            raise RuntimeError("a fault in a layer of a prompt")

    machine.runner._decoder.ran = layer
    logits = machine.runner._decoder.logits

    def poisoned(hidden):
        made = logits(hidden)
        if rng.random() < 0.01:
            made.flatten(0, -2)[0] = float("nan")  # of the first sequence alone
        return made

    machine.runner._decoder.verify, machine.runner._decoder.logits = unsteady, poisoned
    live, ended = [], {"done": 0, "cancelled": 0, "failed": 0}
    submitted = cached = 0
    while submitted < REQUESTS or live:
        if submitted < REQUESTS and len(live) < 8 and rng.random() < 0.6:
            timeout = 1e-4 if rng.random() < 0.02 else None
            live.append(machine.submit(prompt(), rng.randint(1, 24), timeout=timeout))
            submitted += 1
        if live and rng.random() < 0.04:
            rng.choice(live).cancel()
        if rng.random() < 0.005:
            failing[0] = 1
        machine.scheduler.step()
        if blocks and rng.random() < 0.3:
            machine.host.end(rng.randint(1, 3))
        if rng.random() < 0.1:
            machine.audit()
        for handle in [h for h in live if h.done]:
            live.remove(handle)
            made = machine.tokens.get(handle.id, [])
            assert made == answer(handle.request.prompt, len(made))
            usage = handle.session.usage
            cached += usage.cached_tokens
            assert usage.cached_tokens < usage.prompt_tokens
            if handle.error is not None:
                ended["failed"] += 1
            elif handle.cancelled:
                ended["cancelled"] += 1
            else:
                ended["done"] += 1
                assert len(made) == handle.request.max_tokens
                if drafts and accept == 1 and handle.id not in machine.restarted:
                    # a draft layer that is always right: all drafts accepted, whether resumed or not
                    assert usage.rounds == -(-(len(made) - 1) // (drafts + 1))
    machine.audit()
    stats = machine.scheduler.stats()
    assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])
    assert stats["checkpoints"] <= checkpoints and stats["checkpoints_evicted"] > 20
    assert cached > 5000 and ended["done"] > REQUESTS * 0.6 and ended["cancelled"] > 10
    assert 5 < ended["failed"] < REQUESTS * 0.15
    if blocks:
        assert stats["host_restored"] > 10 and stats["host_evicted"] > 10
        machine.reuse.host.clear()
        assert machine.reuse.host.blocks.free == blocks
        assert not machine.reuse.host.cache._root.children
    machine.reuse.cache.clear()
    assert machine.reuse.pages.free == pages and machine.reuse.saves.free == checkpoints
    assert not machine.reuse.cache._root.children


@pytest.mark.parametrize("blocks", [0, 40])
def test_no_request_is_lost_or_stuck_where_pages_hold_little_more_than_one(blocks):
    """A request begins when all that it can need is free, so that nothing that runs ever waits for pages."""
    rng = random.Random(5)
    machine = Machine(slots=4, pages=9, checkpoints=3, drafts=2, blocks=blocks)
    handles = []
    for i in range(40):
        prompt = [rng.randrange(250) for _ in range(rng.choice((3, 60, 200, 400)))]
        tokens = rng.choice((1, 20, 9 * 64 - 400 - 3))
        handles.append(machine.submit(prompt, tokens, priority=i % 3))
    begun = []
    admit = machine.runner.open

    def watched(session, sampler):
        made = admit(session, sampler)
        if made is not None:
            begun.append(session.handle)
        return made

    machine.runner.open = watched
    steps = 0
    while not all(handle.done for handle in handles):
        machine.scheduler.step()
        steps += 1
        assert steps < 20_000, "stuck"
        if steps % 20 == 0:
            machine.audit()
    assert begun == sorted(handles, key=lambda handle: handle.request.priority), "none overtakes"
    for handle in handles:
        assert handle.error is None and machine.tokens[handle.id] == answer(handle.request.prompt, handle.session.limit)
    assert machine.reuse.pages.free + machine.reuse.cache.reclaimable() == 9
