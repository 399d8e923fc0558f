"""Prompt chunks that stop between their layers: what runs meanwhile, who may end there, and what is left of it.

Over the hash model, whose state is torn while a chunk has run in some of its layers. Steps are counted, not seconds.
"""

from __future__ import annotations

import pytest
import torch
from engine_support import Gate
from hash_model import Machine, answer
from tiny import Alternating, tiny_engine

from ninfer_core.errors import EngineFailedError, RequestTimeoutError
from ninfer_core.runtime.loop import Loop
from ninfer_core.types import Request, Sampling

LONG = [(i * 37 + i // 5) % 250 for i in range(600)]
SHORT = [(i * 11) % 250 for i in range(40)]
LAYERS = 4


def reading(lanes=False, steps=2, tokens=200, **options):
    """A machine that takes one layer a step, with a stream and a long prompt that has stopped `steps` layers on."""
    options = {"slots": 3, "pages": 80, **options}
    machine = Machine(lanes=lanes, layers=LAYERS, **options)
    machine.runner.piece_seconds = lambda decoding: 0.0
    stream = machine.submit(SHORT, tokens)
    machine.reach(3, stream)
    prompt = machine.submit(LONG, 12)
    for _ in range(steps):
        machine.scheduler.step()
    return machine, stream, prompt


def torn(machine):
    """Layers left of the chunk under way; None if there is none."""
    made = machine.runner.pieces.reading
    return None if made is None else len(made.chunk.left)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("lanes", [False, True])
def test_rounds_run_between_the_layers(lanes, drafts):
    machine, stream, prompt = reading(lanes, steps=0, drafts=drafts, tokens=400)
    seen, chunks = [], machine.scheduler.totals.chunks
    while not prompt.session.completion_tokens:
        rounds, made = machine.scheduler.totals.rounds, stream.session.completion_tokens
        machine.scheduler.step()
        seen.append(torn(machine))
        assert machine.scheduler.totals.rounds == rounds + 1 and stream.session.completion_tokens > made
        assert stream.session.completion_tokens < 400
    count = machine.scheduler.totals.chunks - chunks
    assert seen == [3, 2, 1, 0, None] * count and count == 10, (
        "four layers, and what follows them behind one more round"
    )
    assert machine.run(stream, prompt) == [answer(SHORT, 400), answer(LONG, 12)]
    machine.scheduler.step()
    machine.audit()


def test_the_draft_layer_of_a_stream_catches_up_between_the_layers():
    machine, stream, prompt = reading(True, steps=0, drafts=3, tokens=400)
    machine.runner._flights._pacer = pacer = Alternating(2, 3)
    while not prompt.session.completion_tokens:
        machine.scheduler.step()
    assert pacer.resumed > 5
    assert machine.run(stream, prompt) == [answer(SHORT, 400), answer(LONG, 12)]


def test_a_chunk_that_stopped_goes_on_at_once_where_nothing_decodes_any_more():
    machine, stream, prompt = reading()
    stream.cancel()
    machine.scheduler.step()
    assert torn(machine) is None and stream.done
    assert machine.run(prompt) == [answer(LONG, 12)]


def test_prompts_take_turns_by_whole_chunks():
    machine, _, first = reading(steps=0, tokens=480)
    second = machine.submit(LONG[::-1], 12)
    order = []
    while not second.session.completion_tokens:
        machine.scheduler.step()
        made = machine.runner.pieces.reading
        owner = None if made is None else made.sequence.session
        if owner is not None and (not order or order[-1] is not owner):
            order.append(owner)
    assert order == [first.session, second.session] * 10
    assert machine.run(first, second) == [answer(LONG, 12), answer(LONG[::-1], 12)]


@pytest.mark.parametrize("steps", [1, 3, 4, 7, 13])
@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("way", ["cancelled", "overdue"])
def test_whoever_leaves_between_two_layers_leaves_nothing(way, lanes, steps):
    """Pages and slot are back one piece later, and what is kept of it are states behind whole chunks."""
    machine, stream, prompt = reading(lanes, steps, slots=2)
    reuse, chunks = machine.reuse, machine.scheduler.totals.chunks
    assert torn(machine) is not None and reuse.slots.free == 0
    (owner,) = machine.scheduler._prefilling
    own, ends = owner.slot, owner.ends
    if way == "cancelled":
        prompt.cancel()
    else:
        prompt.session.deadline = 0.0
    machine.scheduler.step()
    assert torn(machine) is None and machine.scheduler.totals.chunks == chunks
    assert prompt.session.outcome == "cancelled" if way == "cancelled" else type(prompt.error) is RequestTimeoutError
    assert reuse.slots.free == 1 and [s.session for s in machine.scheduler._decoding] == [stream.session]
    assert {c.length for c in reuse.cache.checkpoints if c.kind == "ladder"} <= set(ends)
    machine.audit()
    again = machine.submit(LONG, 12)
    machine.scheduler.step()
    assert machine.scheduler._prefilling[0].slot == own, "the torn slot has a new owner, and was written anew"
    assert machine.run(again, stream) == [answer(LONG, 12), answer(SHORT, 200)]
    machine.scheduler.step()
    machine.audit()


def test_states_are_kept_behind_whole_chunks_alone():
    machine, stream, prompt = reading(steps=0, checkpoints=12, tokens=400)
    kept = set()
    while not prompt.session.completion_tokens:
        machine.scheduler.step()
        machine.audit()
        found = {c.length for c in machine.reuse.cache.checkpoints}
        assert found == kept or torn(machine) is None
        kept = found
    assert 512 in kept and all(length % 64 == 0 for length in kept if length > len(SHORT) + 400)
    stream.cancel()
    machine.scheduler.step()
    assert machine.expect(LONG, 12).cached_tokens == max(kept)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_fault_in_a_layer_ends_its_request_alone(layer):
    machine, stream, prompt = reading(steps=layer)

    def fails(rows):
        raise OSError("no")

    machine.runner._decoder.ran = fails
    machine.scheduler.step()
    machine.runner._decoder.ran = lambda rows: None
    assert type(prompt.error) is EngineFailedError and torn(machine) is None
    machine.audit()
    again = machine.submit(LONG, 12)
    assert machine.run(again, stream) == [answer(LONG, 12), answer(SHORT, 200)]


@pytest.mark.parametrize("lanes", [False, True])
def test_a_fault_in_a_round_leaves_the_chunk_as_it_is(lanes):
    """And the engine looks whether a token can be made when the chunk is over: it would take the chunk's workspace."""
    machine, stream, prompt = reading(lanes, slots=4)
    loop = Loop(machine.scheduler, machine.runner, threads=1, name="pieces", limit=0.0)
    verify = machine.runner._decoder.verify

    def fails(*args):
        machine.runner._decoder.verify = verify
        raise RuntimeError("a device fault")

    machine.runner._decoder.verify = fails
    while not stream.done:
        machine.scheduler.step()
    assert machine.scheduler.suspect and torn(machine) and machine.runner.probe() is False
    loop._check_health()
    assert machine.scheduler.suspect and loop.restarts == 0
    while torn(machine) is not None:
        machine.scheduler.step()
    loop._check_health()
    assert not machine.scheduler.suspect
    assert machine.run(prompt) == [answer(LONG, 12)]
    machine.scheduler.step()
    machine.audit()


def test_an_engine_that_begins_anew_forgets_the_chunk():
    machine, stream, prompt = reading()
    machine.scheduler.abandon(EngineFailedError("anew"))
    machine.runner.renew()
    assert torn(machine) is None and stream.done and prompt.done
    assert machine.run(machine.submit(LONG, 12)) == [answer(LONG, 12)]
    machine.audit()


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_bits_of_a_model_do_not_change(moe, drafts):
    """Tokens and log-probabilities of both, layer by layer beside each other and alone."""

    def asked(n, seed, tokens):
        prompt = tuple((i * 31 + seed) % 250 for i in range(n))
        return Request(prompt=prompt, sampling=Sampling(seed=seed), max_tokens=tokens, ignore_eos=True, logprobs=2)

    def told(result):
        return [(entry.token_id, entry.logprob, entry.top) for entry in result.logprobs]

    requests = [asked(20, 1, 120), asked(400, 2, 6)]
    with tiny_engine(moe, draft_tokens=drafts, max_sequences=2, prefix_cache=False) as engine:
        alone = [told(engine.submit(request).result(120)) for request in requests]
        stopped, prefill = [], engine._runner.prefill
        engine._runner.piece_seconds = lambda decoding: 0.0

        def noted(sequence, room):
            over = prefill(sequence, room)
            stopped.append(not over)
            return over

        engine._runner.prefill = noted
        gate = Gate(engine, "round")
        stream = engine.submit(requests[0])
        assert gate.reached.wait(60)
        beside = engine.submit(requests[1])
        gate.opened.set()
        assert [told(handle.result(120)) for handle in (stream, beside)] == alone
        assert sum(stopped) > 20 and torch.is_inference_mode_enabled() is False
