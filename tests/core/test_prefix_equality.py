"""Outputs with the prefix cache are those without it, bit for bit where the kept state was made by prompt chunks."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from engine_support import assert_free, run, text, until
from tiny import tiny_engine

from ninfer_core.engine import Engine
from ninfer_core.errors import InvalidRequestError, MemoryPlanError
from ninfer_core.types import Message, Request, Sampling


def request(prompt, seed=1, tokens=10, temperature=1.0, **fields) -> Request:
    law = Sampling(temperature=temperature, top_k=20, top_p=0.95, seed=seed, presence_penalty=0.3)
    return Request(prompt=tuple(prompt), sampling=law, max_tokens=tokens, ignore_eos=True, logprobs=2, **fields)


REQUESTS = {
    (length, seed): request(text(length), seed=seed, temperature=0.0 if seed == 1 else 1.0)
    for length in (63, 64, 65, 131, 200)
    for seed in (1, 2)
}


@cache
def cold(moe=True, drafts=0):
    with tiny_engine(moe, draft_tokens=drafts, prefix_cache=False) as engine:
        return {key: run(engine, made)[0] for key, made in REQUESTS.items()}


@pytest.mark.parametrize("moe,drafts", [(True, 0), (True, 1), (True, 3), (False, 3)])
def test_a_b_a_equals_a_cold_run(moe, drafts):
    with tiny_engine(moe, draft_tokens=drafts, max_sequences=2) as engine:
        for key, made in REQUESTS.items():
            first, _ = run(engine, made)
            run(engine, request(text(key[0] + 20, seed=4), seed=4, tokens=12))
            neighbour = engine.submit(request(text(90, seed=6), tokens=200))
            until(lambda: engine.stats()["running"] == 1)
            again, usage = run(engine, made)
            neighbour.cancel()
            assert first == again == cold(moe)[key], key
            assert usage.cached_tokens == (key[0] - 1) // 64 * 64
        assert_free(engine)


def test_drafts_behind_a_resume_are_those_of_a_cold_run():
    made = request(text(300), tokens=30, temperature=0.0)
    with tiny_engine(draft_tokens=3, prefix_cache=False) as engine:
        outcome, cold_usage = run(engine, made)
    with tiny_engine(draft_tokens=3) as engine:
        run(engine, made)
        again, usage = run(engine, made)
    assert again == outcome and usage.cached_tokens == 256
    assert usage.drafted_tokens == cold_usage.drafted_tokens
    assert usage.accepted_by_position == cold_usage.accepted_by_position


def conversation(turns):
    messages = [Message("system", "Answer in few words. " * 8)]
    for i in range(turns):
        messages.append(Message("user", f"Question number {i}: " + "why? " * (5 + 7 * (i % 3))))
        yield Request(
            tuple(messages), sampling=Sampling(seed=i), thinking=False, max_tokens=6, ignore_eos=True, logprobs=1
        )
        messages.append(Message("assistant", "Because. " * (1 + i % 4)))


def test_a_growing_conversation_equals_cold_runs():
    """Every turn resumes where the turn before could first differ, and has the bits of reading all of it anew."""
    with tiny_engine(context=4096, prefix_cache=False) as engine:
        expected = [run(engine, made)[0] for made in conversation(12)]
    with tiny_engine(context=4096, cache_answers=False, max_sequences=1) as engine:
        before = 0
        for turn, made in enumerate(conversation(12)):
            output, usage = run(engine, made)
            assert output == expected[turn], turn
            if turn:  # all of the former prompt but its last piece
                assert usage.cached_tokens >= before - 64
            before = usage.prompt_tokens


def follow_ups(drafts, **options):
    """A conversation that goes on from its own answers, stop strings inside bursts included."""
    outputs = []
    with tiny_engine(draft_tokens=drafts, **options) as engine:
        kept, close = {}, engine._runner.close

        def keep(sequence):
            kept[sequence.session.handle.id] = list(sequence.tokens)
            close(sequence)

        engine._runner.close = keep
        if drafts:  # wrong drafts after one or two that are right
            engine._runner.proposal = lambda s, made: [made[0], *((t + 1) % 250 for t in made[1:])]
        prompt = text(100)
        for turn in range(4):
            handle = engine.submit(request(prompt, seed=turn, tokens=40, stop=("e",)))
            result = handle.result(120)
            until(lambda handle=handle: handle.id in kept)
            tokens = kept[handle.id]
            logprobs = torch.tensor([lp.logprob for lp in result.logprobs])
            outputs.append((tokens, logprobs, result.usage.cached_tokens))
            prompt = (*tokens, *text(20, seed=turn + 2))
    return outputs


def test_states_behind_answers_are_the_same_with_any_drafts():
    """Rejected drafts and stops inside a burst leave no trace in what is kept."""
    plain = follow_ups(0)
    assert any(cached % 64 for _, _, cached in plain)
    for drafts in (1, 3):
        for a, b in zip(plain, follow_ups(drafts), strict=True):
            assert a[0] == b[0] and torch.equal(a[1], b[1]) and a[2] == b[2]


def test_a_state_made_by_decoding_is_that_of_a_prompt_within_rounding():
    for a, b in zip(follow_ups(3, kv_cache="fp32"), follow_ups(0, kv_cache="fp32", prefix_cache=False), strict=True):
        assert a[0] == b[0]
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=2e-4)


def test_eight_at_once_with_cache_and_drafts_equal_their_solo_runs():
    """Five times, all at once and one after the other has begun: no text, figure or id of one is another's."""
    documents = [request((*text(70), *text(40 + 9 * i, seed=i + 3)), seed=i, tokens=12) for i in range(8)]
    with tiny_engine(draft_tokens=0, prefix_cache=False) as engine:
        alone = [run(engine, made)[0] for made in documents]
    with tiny_engine(draft_tokens=3, max_sequences=8, cache_answers=False) as engine:
        for turn in range(5):
            handles = []
            for made in documents:
                handles.append(engine.submit(made))
                if turn % 2:  # the next one comes while this one decodes
                    until(lambda handle=handles[-1]: handle.done or handle._events)
            for handle, made, expected in zip(handles, documents, alone, strict=True):
                result = handle.result(120)
                assert [(lp.token_id, lp.logprob, lp.top) for lp in result.logprobs] == expected
                assert result.seed == made.sampling.seed and result.usage.prompt_tokens == len(made.prompt)
            assert len({handle.id for handle in handles}) == 8
        assert engine.stats()["cached_tokens"] > 0
        assert_free(engine)


@pytest.mark.parametrize("moe", [True, False])
def test_a_second_turn_behind_a_small_side_request(moe):
    """2,000 tokens, a side request of 53, the next turn: 95 % of the first prompt are not read again, to the same bits."""
    talk = text(2000)
    turns = [request(talk, seed=3, tokens=6), request((*talk, *text(60, seed=9)), seed=4, tokens=6)]
    options = {"context": 4096, "context_length": 2304, "max_sequences": 1, "draft_tokens": 1}
    with tiny_engine(moe, prefix_cache=False, **options) as engine:
        expected = [run(engine, made)[0] for made in turns]
    with tiny_engine(moe, cache_answers=False, **options) as engine:
        assert run(engine, turns[0])[0] == expected[0]
        assert run(engine, request(text(53, seed=7), tokens=5))[1].cached_tokens == 0
        again, usage = run(engine, turns[1])
        assert again == expected[1]
        assert usage.cached_tokens >= 0.95 * len(talk) and usage.known_tokens >= usage.cached_tokens


def test_usage_and_counts():
    with tiny_engine(max_sequences=2) as engine:
        run(engine, request(text(200)))
        usage = run(engine, request((*text(200), *text(9, 2))))[1]
        assert (usage.prompt_tokens, usage.cached_tokens) == (209, 192)
        assert_free(engine)
        stats = engine.stats()
        assert (stats["prefix_queries"], stats["prefix_hits"], stats["cached_tokens"]) == (3, 1, 192)
        assert 0 < stats["checkpoints"] <= stats["checkpoints_total"] == engine.plan.checkpoints
        assert 0 < stats["pages_cached"] < stats["pages_free"]


def test_the_room_is_planned():
    with tiny_engine(max_sequences=2, context_length=256, draft_tokens=0) as engine:
        assert (engine.plan.checkpoints, engine.plan.pages) == (16, 4 * 3)
        assert "16 checkpoints" in engine.plan.table()
    with tiny_engine(max_sequences=2, context_length=256, draft_tokens=0, prefix_cache=1000, checkpoints=3) as engine:
        assert (engine.plan.checkpoints, engine.plan.pages) == (3, 4 * 2 + 16)
    with tiny_engine(max_sequences=2, context_length=256, draft_tokens=0, prefix_cache=False) as engine:
        assert (engine.plan.checkpoints, engine.plan.pages) == (0, 4 * 2)
        assert run(engine, request(text(100)))[1].cached_tokens == run(engine, request(text(100)))[1].cached_tokens == 0
    with pytest.raises(MemoryPlanError, match="500 checkpoints"):
        tiny_engine(checkpoints=500, memory=20_000_000)
    for wrong in ({"prefix_cache": -1}, {"checkpoints": -1}, {"checkpoints": "many"}, {"prefix_cache": "on"}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            tiny_engine(**wrong)


def test_the_demo_drafts_as_well_behind_a_resume():
    """Acceptance within five points of cold runs, by the turn's state and by the answer's."""

    def rate(**options):
        drafted = accepted = cached = 0
        with Engine.load("demo", adaptive_drafts=False, threads=1, max_sequences=1, **options) as engine:
            messages = [Message("system", "You are a helpful assistant. " * 12)]
            for question in ("Count from one to twenty.", "Write a story about a fox.", "Count from one to ten."):
                messages.append(Message("user", question))
                made = engine.generate(
                    Request(tuple(messages), sampling=Sampling(temperature=0.0), thinking=False, max_tokens=90)
                )
                drafted += made.usage.drafted_tokens
                accepted += made.usage.accepted_tokens
                cached += made.usage.cached_tokens
                messages.append(Message("assistant", made.text))
        return accepted / drafted, cached

    (fresh, none), (resumed, cached) = rate(prefix_cache=False), rate()
    assert none == 0 < cached and abs(fresh - resumed) < 0.05
