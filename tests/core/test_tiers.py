"""The host tier: what the device gives up comes back from host memory, whole, and never before it is written."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from engine_support import assert_free, run, text
from hash_model import Machine
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config, tiny_engine

from ninfer_core.config import config_from_dict
from ninfer_core.engine import Engine
from ninfer_core.errors import InvalidRequestError, MemoryPlanError
from ninfer_core.hosted import HostState
from ninfer_core.state import FusedState, State
from ninfer_core.types import Message, Request, Sampling

CONFIG = config_from_dict(tiny_config(), "ninfer-demo")


# copies


def noisy(state):
    """Fill a state with bytes that differ everywhere."""
    g = torch.Generator().manual_seed(1)
    for tensor in (*state.page_tensors, *state._slot_tensors):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 120, raw.shape, generator=g, dtype=torch.uint8))
    return state


def held(state, slot, pages):
    parts = [t[:, slot].clone() for t in state._slot_tensors]
    return parts + [t[:, :, :, pages].clone() for t in state.page_tensors]


@pytest.mark.parametrize("make", [
    lambda: State(CONFIG, slots=3, pages=40, kv_dtype="int8", max_draft=2),
    lambda: State(CONFIG, slots=3, pages=40, kv_dtype="bf16", max_draft=0),
    lambda: State(CONFIG, slots=3, pages=40, kv_dtype="fp32", max_draft=5),
    lambda: FusedState(CONFIG, slots=3, pages=40, device="cpu"),
])  # fmt: skip
def test_what_goes_to_the_host_comes_back_bit_for_bit(make):
    """Also into other pages and another slot, through blocks that lie anywhere, and more than one group of pages."""
    state = noisy(make())
    host = HostState(state, 120)
    assert host.state_blocks * state.kv_bytes_per_page >= state.bytes_per_slot
    rng = random.Random(3)
    blocks = rng.sample(range(120), host.state_blocks)
    rest = [b for b in range(120) if b not in blocks]
    for count in (1, 16, 17, 35):
        pages, places = rng.sample(range(40), count), rng.sample(rest, count)
        before = held(state, 1, pages)
        carry = torch.randn(1, 8)
        row, ticket = host.store(1, blocks, pages, places, carry)
        assert ticket.query() and row is not carry
        targets = rng.sample(range(40), count)
        others = [p for p in range(40) if p not in targets]
        kept = held(state, 0, others)
        assert torch.equal(host.restore(blocks, 2, places, targets, row), carry)
        for a, b in zip(before, held(state, 2, targets), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(kept, held(state, 0, others), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# what moves, comes back and goes


def test_a_conversation_that_was_pushed_out_comes_back_from_the_host():
    machine = Machine(pages=16, checkpoints=2, slots=1, blocks=60)
    talk = text(400)
    machine.ask(talk, 4)
    for i in range(6):
        machine.ask(text(300, seed=i + 5), 4)
    machine.audit()
    assert machine.reuse.cache.match(talk, len(talk)).checkpoint is None
    more = (*talk, *text(30, seed=3))
    usage = machine.expect(more, 6)
    assert usage.cached_tokens == 384 and usage.accepted_tokens == usage.drafted_tokens
    stats = machine.scheduler.stats()
    assert stats["host_restored"] == 1 and stats["host_checkpoints"] > 0
    assert 0 < stats["host_bytes"] <= stats["host_bytes_total"] == 60_000
    machine.audit()


def test_what_came_back_is_kept_on_the_device_and_shared():
    machine = Machine(pages=30, checkpoints=3, slots=2, blocks=60)
    system = text(512)
    machine.ask(system, 2)
    for i in range(5):
        machine.ask(text(500, seed=i + 5), 2)
    assert machine.reuse.cache.match(system, len(system)).checkpoint is None
    first, second = machine.submit((*system, 7), 30), machine.submit((*system, 8), 30)
    while not (first.done and second.done):
        machine.scheduler.step()
        machine.audit()
    assert [h.session.cached_tokens for h in (first, second)] == [448, 512]
    assert machine.scheduler.stats()["host_restored"] == 1, "the second resumed on the device"


def test_pages_that_several_checkpoints_share_are_copied_once():
    machine = Machine(pages=60, checkpoints=2, slots=1, blocks=90)
    talk = text(640)
    for turn in range(4):
        machine.ask(talk, 2)
        talk = (*talk, *text(64, seed=turn + 9))
    for i in range(3):
        machine.ask(text(300, seed=i + 40), 2)
    machine.audit()
    tier = machine.reuse.host
    lengths = [c.length for c in tier.cache.checkpoints]
    pages = sum((n - 1) // 64 + 1 for n in lengths)
    assert machine.host.copied < pages - 10, (machine.host.copied, lengths)


def test_pages_still_on_the_device_are_not_copied_again():
    """Of a long conversation the device has only the beginning left: the rest comes from the host, that is shared."""
    machine = Machine(pages=60, checkpoints=8, slots=1, blocks=90)
    talk = text(640)
    machine.ask(talk, 2)
    deepest = machine.reuse.cache.match(talk, 640).checkpoint
    machine.reuse._move(deepest)
    machine.reuse.cache.drop(deepest)
    near = machine.reuse.cache.match(talk, 640).checkpoint
    assert near is not None and 128 < near.length < deepest.length
    scattered = []
    restore = machine.host.restore
    machine.host.restore = lambda a, b, blocks, pages, carry: (
        scattered.extend(pages),
        restore(a, b, blocks, pages, carry),
    )[1]
    more = (*talk, 5, 6)
    assert machine.expect(more, 4).cached_tokens == deepest.length
    assert len(scattered) == len(deepest.pages or range((deepest.length - 1) // 64 + 1)) - (near.length - 1) // 64
    machine.audit()


def test_side_requests_do_not_push_a_conversation_out_of_the_host():
    machine = Machine(pages=90, checkpoints=2, slots=1, blocks=100)
    talk = text(4000)
    machine.ask(talk, 4)
    for i in range(40):
        machine.ask(text(200, seed=i + 5), 8)
        machine.ask(text(210, seed=i + 77), 8)
    more = (*talk, *text(100, seed=4))
    assert machine.expect(more, 4).cached_tokens >= 0.95 * 4000
    assert machine.scheduler.stats()["host_evicted"] > 10


def test_host_memory_that_is_full_gives_up_what_is_worth_least():
    machine = Machine(pages=12, checkpoints=1, slots=1, blocks=24)
    for i in range(30):
        prompt = text(200, seed=i + 3)
        machine.expect(prompt, 4)
        machine.audit()
    stats = machine.scheduler.stats()
    assert stats["host_checkpoints"] >= 3 and stats["host_evicted"] > 15
    recent = text(200, seed=31)
    assert machine.ask(recent, 4)[1].cached_tokens == 192


def test_a_copy_that_is_not_written_is_not_offered():
    machine = Machine(pages=16, checkpoints=1, slots=1, blocks=60, slow=True)
    talk = text(300)
    machine.ask(talk, 4)
    machine.ask(text(310, seed=9), 4)
    assert machine.host.tickets and machine.scheduler.stats()["host_checkpoints"] == 0
    machine.audit()
    assert machine.expect(talk, 4).cached_tokens == 0
    machine.host.end()
    machine.ask(text(310, seed=10), 4)
    machine.host.end()
    assert machine.expect((*talk, 1), 4).cached_tokens == 256
    machine.audit()


def test_a_copy_that_fails_ends_the_tier_and_no_request(caplog):
    machine = Machine(pages=16, checkpoints=1, slots=1, blocks=60)
    machine.ask(text(300), 4)

    def broken(*_):
        raise RuntimeError("no")

    machine.host.store = broken
    for seed in (3, 4):
        prompt = text(310, seed=seed)
        machine.expect(prompt, 4)
    assert machine.reuse.host is None and "host memory takes no more" in caplog.text
    assert machine.scheduler.stats()["host_bytes_total"] == 0
    machine.audit()


def test_a_restore_that_fails_ends_its_request_and_gives_everything_back():
    machine = Machine(pages=16, checkpoints=1, slots=1, blocks=60)
    talk = text(300)
    machine.ask(talk, 4)
    machine.ask(text(310, seed=9), 4)
    restore = machine.host.restore

    def broken(*_):
        raise RuntimeError("no")

    machine.host.restore = broken
    handle = machine.submit(talk, 4)
    machine.scheduler.step()
    assert handle.done and handle.error is not None
    machine.audit()
    assert machine.reuse.slots.free == 1
    machine.host.restore = restore
    machine.expect(talk, 4)


@pytest.mark.parametrize("verb", ["copy_slot", "copy_page", "clear_slot"])
def test_a_seat_that_cannot_be_made_gives_everything_back(verb):
    machine = Machine(pages=16, slots=1)
    prompt = text(100)
    made, _ = machine.ask(prompt, 9)
    before = machine.reuse.pages.free
    original = getattr(machine.state, verb)

    def broken(*_):
        raise RuntimeError("no")

    setattr(machine.state, verb, broken)
    asked = text(90, seed=7) if verb == "clear_slot" else (*prompt, *made, 3)
    handle = machine.submit(asked, 4)
    machine.scheduler.step()
    assert handle.done and handle.error is not None
    assert machine.reuse.pages.free == before and machine.reuse.slots.free == 1
    machine.audit()
    setattr(machine.state, verb, original)
    machine.expect(asked, 4)


def test_what_a_failed_request_kept_does_not_come_back_from_the_host():
    machine = Machine(pages=40, checkpoints=1, slots=2, blocks=90)
    prompt = text(600)
    handle = machine.submit(prompt, 100)
    machine.reach(5, handle)
    machine.ask(text(300, seed=4), 2)  # moves what the running one has kept
    assert machine.reuse.host.cache.match(prompt, 599).checkpoint is not None
    logits = machine.runner._decoder.logits
    machine.runner._decoder.logits = lambda h: logits(h) * float("nan")
    machine.run(handle)
    machine.runner._decoder.logits = logits
    assert handle.error is not None
    assert machine.reuse.host.cache.match(prompt, 599).checkpoint is None
    machine.audit()
    assert machine.expect(prompt, 4).cached_tokens == 0


def test_the_log_names_the_host(caplog):
    machine = Machine(pages=16, checkpoints=1, slots=1, blocks=60)
    machine.ask(text(300), 4)
    machine.ask(text(310, seed=9), 4)
    with caplog.at_level(logging.INFO, "ninfer.engine"):
        machine.ask(text(300), 4)
    assert "256 of 300 prompt tokens from the cache, brought back from host memory" in caplog.messages[-1]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 40), st.integers(4, 60), st.integers(1, 4), st.booleans())
def test_any_sizes_of_both_tiers_serve_any_order(seed, pages, blocks, checkpoints, slow):
    rng = random.Random(seed)
    machine = Machine(pages=pages, checkpoints=checkpoints, slots=2, blocks=blocks, slow=slow)
    prompts = [text(rng.choice((30, 64, 65, 130, 200, 300)), seed=s) for s in (1, 1, 2, 3)]
    for _ in range(14):
        prompt = (*rng.choice(prompts), *text(rng.choice((0, 1, 40, 70)), seed=rng.randint(5, 7)))
        if (len(prompt) + 12) // 64 + 1 > pages:
            continue
        machine.expect(prompt, 6)
        if rng.random() < 0.5 and machine.host.tickets:
            machine.host.end(rng.randint(1, len(machine.host.tickets)))
        machine.audit()


# real models


def request(prompt, seed=1, tokens=8, temperature=1.0):
    law = Sampling(temperature=temperature, top_k=20, top_p=0.95, seed=seed)
    return Request(prompt=tuple(prompt), sampling=law, max_tokens=tokens, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("moe,kv", [(True, "int8"), (False, "bf16")])
def test_outputs_from_the_host_are_those_of_a_cold_run(moe, kv):
    talks = [request((*text(200, seed=s), *text(20, seed=s + 9)), seed=s) for s in (1, 2, 3, 4)]
    following = [request((*talk.prompt, *text(30, seed=8)), seed=7) for talk in talks]
    with tiny_engine(moe, kv_cache=kv, prefix_cache=False) as engine:
        expected = [run(engine, made)[0] for made in (*talks, *following)]
    options = {"max_sequences": 1, "checkpoints": 1, "prefix_cache": 64, "context_length": 320, "cache_answers": False}
    with tiny_engine(moe, kv_cache=kv, host_cache_gb=0.05, **options) as engine:
        assert "prefix cache in host memory" in engine.plan.table()
        for made, want in zip(talks, expected[:4], strict=True):
            assert run(engine, made)[0] == want
        for made, want in zip(following, expected[4:], strict=True):
            output, usage = run(engine, made)
            assert output == want and usage.cached_tokens == 192
        stats = engine.stats()
        assert stats["host_restored"] >= 3 and 0 < stats["host_bytes"] <= stats["host_bytes_total"] <= 50_000_000
        assert_free(engine)


def test_a_second_turn_of_the_demo_comes_from_the_host():
    """A tiny device pool: every conversation pushes the one before out, and goes on with what cold runs say."""

    def talk(**options):
        made, cached = [], []
        with Engine.load("demo", threads=1, max_sequences=1, context_length=320, draft_tokens=1, **options) as engine:
            histories = [
                [Message("system", f"You are helper number {i}. " * 10), Message("user", f"Say the word {word}.")]
                for i, word in enumerate(("tree", "lake"))
            ]
            for _ in range(2):
                for messages in histories:
                    result = engine.generate(
                        Request(tuple(messages), sampling=Sampling(temperature=0.0), thinking=False, max_tokens=4)
                    )
                    made.append(result.text)
                    cached.append(result.usage.cached_tokens / result.usage.prompt_tokens)
                    messages += [Message("assistant", result.text), Message("user", "Again, please.")]
            stats = engine.stats()
        return made, cached, stats

    cold, none, _ = talk(prefix_cache=False)
    warm, cached, stats = talk(prefix_cache=64, checkpoints=1, host_cache_gb=0.1, cache_answers=False, prefill_chunk=64)
    assert none == [0, 0, 0, 0] and cold == warm
    assert min(cached[2:]) > 0.5 and stats["host_restored"] == 2


def test_the_option_is_checked():
    for wrong in (-1, "1", True, float("nan")):
        with pytest.raises(InvalidRequestError, match="host_cache_gb"):
            tiny_engine(host_cache_gb=wrong)
    for off in ({"prefix_cache": False}, {"checkpoints": 0}):
        with pytest.raises(InvalidRequestError, match="is off"):
            tiny_engine(host_cache_gb=1, **off)
    with pytest.raises(MemoryPlanError, match="one short prompt takes"):
        tiny_engine(host_cache_gb=1e-5)
    with pytest.raises(MemoryPlanError, match="lower host_cache_gb"):
        tiny_engine(host_cache_gb=900_000)
