"""Numbers that are not finite: their request ends and is named, nothing of it is used again, others notice nothing."""

from __future__ import annotations

import pytest
import torch
from engine_support import assert_free, raw, until
from tiny import tiny_engine

from ninfer_core.errors import EngineFailedError, NotFiniteError
from ninfer_core.runtime.loop import Restarts

SICK, WELL = raw(n=150, seed=1, tokens=12), raw(n=90, seed=2, tokens=12)


def output(handle):
    return handle.result(120).text


def state_of(engine):
    """All that sequences leave on the device, as one tuple of tensors."""
    state = engine._runner._state
    return state.kv_scales, state.s, state.conv, state.window_k, state.window_e, state.window_decay


def spoil(engine, request, emitted, where):
    """Not a number in the state of this request, once it has so many tokens; `where(state, sequence)` writes it."""
    round_ = engine._runner.round

    def watch(group):
        for sequence in group:
            if sequence.session.request is request and sequence.emitted >= emitted:
                where(engine._runner._state, sequence)
        return round_(group)

    engine._runner.round = watch
    return lambda: setattr(engine._runner, "round", round_)


def recurrent(state, sequence):
    state.s[:, sequence.slot] = float("nan")


def keys(state, sequence):
    state.kv_scales[:, 0, :, sequence.pages[1]] = float("inf")


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("where", [recurrent, keys])
def test_a_state_that_is_not_finite_ends_its_request_and_is_cleaned(drafts, where):
    with tiny_engine(draft_tokens=drafts, max_sequences=2, kv_cache="int8") as engine:
        alone = [output(engine.submit(request)) for request in (SICK, WELL)]
        mend = spoil(engine, SICK, 4, where)
        sick, well = engine.submit(SICK), engine.submit(WELL)
        with pytest.raises(NotFiniteError, match="not finite") as caught:
            sick.result(60)
        assert sick.id in str(caught.value) and "others go on" in str(caught.value)
        assert output(well) == alone[1]
        mend()
        assert_free(engine)
        kept = engine._runner.reuse.cache.match(SICK.prompt, len(SICK.prompt)).checkpoint
        assert kept is None, "neither what it kept nor what it resumed from"
        assert not any(tensor.isnan().any() or tensor.isinf().any() for tensor in state_of(engine)[:1])
        again = engine.submit(SICK)
        assert output(again) == alone[0] and again.result().usage.cached_tokens == 0
        assert all(tensor[:, 0].isfinite().all() for tensor in state_of(engine)[1:]), "the slot was cleaned"


def test_a_checkpoint_that_went_bad_fails_one_request_not_all():
    with tiny_engine(draft_tokens=2, max_sequences=2) as engine:
        alone = output(engine.submit(SICK))
        until(lambda: engine._scheduler.idle)
        for checkpoint in engine._runner.reuse.cache.checkpoints:
            engine._runner._state.s[:, checkpoint.slot] = float("nan")
        with pytest.raises(NotFiniteError):
            engine.submit(SICK).result(60)
        again = engine.submit(SICK)
        assert output(again) == alone and again.result().usage.cached_tokens == 0
        assert_free(engine)


def test_a_chunk_that_is_not_finite_keeps_nothing():
    """In the middle of a prompt: what comes behind is not finite either, and no state of it is kept on the way."""
    with tiny_engine(draft_tokens=2, max_sequences=2) as engine:
        alone = output(engine.submit(SICK))
        until(lambda: engine._scheduler.idle)
        engine._runner.reuse.cache.clear()

        def rot(sequence):
            if sequence.session.request is SICK and sequence.length == 64:
                engine._runner._state.s[:, sequence.slot] = float("inf")

        engine._runner.after_chunk = rot
        with pytest.raises(NotFiniteError, match="output token 0"):
            engine.submit(SICK).result(60)
        until(lambda: engine._scheduler.idle)
        assert not len(engine._runner.reuse.cache)
        engine._runner.after_chunk = None
        assert output(engine.submit(SICK)) == alone
        assert_free(engine)


def test_weights_that_are_not_finite_are_not_healthy():
    """Every row is bad: it is not the requests' fault, and the engine must not say that it is well."""
    with tiny_engine(draft_tokens=0, max_sequences=1) as engine:
        engine._loop.rules = Restarts(pauses=(0.0,))
        engine._runner._decoder.weights.head.dense.fill_(float("nan"))
        with pytest.raises(NotFiniteError):
            engine.submit(SICK).result(60)
        until(lambda: engine.health()["status"] == "failed", seconds=60)
        with pytest.raises(EngineFailedError, match="FloatingPointError"):
            engine.submit(WELL)


def test_rows_behind_a_rejected_draft_may_be_anything():
    """A row that does not count is not looked at: its request goes on."""
    with tiny_engine(draft_tokens=3, max_sequences=1) as engine:
        alone = output(engine.submit(SICK))
        engine._runner.proposal = lambda sequence, made: [(token + 1) % 250 for token in made]
        verify = engine._runner._rounds.verify

        def spoiled(windows, *rest):
            hidden, logits = verify(windows, *rest)
            if logits.shape[1] > 1:
                logits[:, 2:] = torch.nan  # behind the first draft, which is always wrong here or judged alone
            return hidden, logits

        engine._runner._rounds.verify = spoiled
        handle = engine.submit(SICK)
        rejected = handle.result(60).usage
        assert handle.result().text == alone and rejected.accepted_tokens < rejected.drafted_tokens
