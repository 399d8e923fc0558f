"""Equal tokens, bit for bit: any number of drafts, any neighbours, any acceptance, streamed or not (CPU path)."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from tiny import Alternating, Wandering, tiny_engine

from ninfer_core.types import Finish, Request, Sampling, TextDelta

PROMPT = tuple((i * 37 + i // 7) % 250 for i in range(150))  # two and a third chunks
SHORT = tuple((i * 11) % 250 for i in range(9))
TOKENS = 20


def request(prompt=PROMPT, seed=1, temperature=1.0, tokens=TOKENS, **fields) -> Request:
    law = Sampling(
        temperature=temperature, top_k=20, top_p=0.95, min_p=0.0, seed=seed, presence_penalty=0.3, frequency_penalty=0.1
    )
    return Request(prompt=prompt, sampling=law, max_tokens=tokens, ignore_eos=True, logprobs=2, **fields)


def output(handle):
    """Tokens with their log-probabilities: the bits of the computation, not just its choices."""
    return [(lp.token_id, lp.logprob, lp.top) for lp in handle.result(120).logprobs]


VARIANTS = {
    "greedy": request(temperature=0.0),
    "sampled": request(seed=2),
    "short": request(SHORT, seed=3),
    "short greedy": request(SHORT, temperature=0.0, tokens=24),
}


def record(engine) -> dict[int, list[int]]:
    """All output tokens by id of the request, those without text included."""
    tokens, close = {}, engine._runner.close

    def keep(sequence):
        tokens[id(sequence.session.request)] = sequence.tokens[sequence.prompt_tokens :]
        close(sequence)

    engine._runner.close = keep
    return tokens


@cache
def plain_run(moe: bool = True):
    """(outputs, tokens) without drafts, one request at a time."""
    with tiny_engine(moe, draft_tokens=0) as engine:
        tokens = record(engine)
        outputs = {name: output(engine.submit(r)) for name, r in VARIANTS.items()}
    return outputs, {name: tokens[id(r)] for name, r in VARIANTS.items()}


def plain(moe: bool = True):
    return plain_run(moe)[0]


def oracle(pattern):
    """Drafts that are right for pattern[i % len] positions and wrong after: forced acceptance, taken from `plain`."""
    rounds = {}

    def propose(sequence, drafts):
        known = plain_run()[1][names[id(sequence.session.request)]]
        count = rounds[sequence.session.handle.id] = rounds.get(sequence.session.handle.id, -1) + 1
        right = pattern[count % len(pattern)]
        at = sequence.emitted
        truth = known[at : at + len(drafts)]
        truth += [0] * (len(drafts) - len(truth))
        return [t if i < right else (t + 1) % 250 for i, t in enumerate(truth)]

    names = {id(r): name for name, r in VARIANTS.items()}
    return propose


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
def test_own_drafts_change_nothing(drafts):
    with tiny_engine(draft_tokens=drafts) as engine:
        for name, r in VARIANTS.items():
            assert output(engine.submit(r)) == plain()[name], name


def test_dense_model_too():
    with tiny_engine(False, draft_tokens=3) as engine:
        for name, r in VARIANTS.items():
            assert output(engine.submit(r)) == plain(False)[name], name


@pytest.mark.parametrize(
    "drafts,pattern", [(3, [3]), (3, [0]), (3, [1]), (3, [2, 0, 3, 1]), (5, [5, 0, 2]), (1, [1, 0])]
)
def test_forced_acceptance_changes_nothing(drafts, pattern):
    with tiny_engine(draft_tokens=drafts) as engine:
        engine._runner.proposal = oracle(pattern)
        for name, r in VARIANTS.items():
            handle = engine.submit(r)
            assert output(handle) == plain()[name], name
            usage = handle.result().usage
            assert usage.completion_tokens == r.max_tokens
            assert usage.accepted_tokens == sum(usage.accepted_by_position) <= usage.drafted_tokens
            # one token by prefill; every round gives its accepted drafts and one more, unless the limit cuts that
            assert usage.completion_tokens in (n := usage.rounds + usage.accepted_tokens, n + 1)
            if pattern == [drafts]:
                assert usage.rounds == -(-(r.max_tokens - 1) // (drafts + 1))
            if pattern == [0]:
                assert usage.accepted_tokens == 0


@pytest.mark.parametrize("on,off", [(1, 1), (2, 3)])
def test_steps_without_drafts_after_accepting_rounds_change_nothing(on, off):
    with tiny_engine(draft_tokens=3) as engine:
        engine._runner.proposal = oracle([2, 3, 0])
        engine._runner._pacer = pacer = Alternating(on, off)
        for name, r in VARIANTS.items():
            assert output(engine.submit(r)) == plain()[name], name
        assert pacer.resumed


@pytest.mark.parametrize("depths,pattern", [((5, 1, 3), None), ((1, 2, 5, 5, 4), [3, 0, 5])])
def test_any_depth_from_round_to_round_changes_nothing(depths, pattern):
    with tiny_engine(draft_tokens=5, max_sequences=4) as engine:
        if pattern:
            engine._runner.proposal = oracle(pattern)
        engine._runner._pacer = pacer = Wandering(5, depths)
        handles = {name: engine.submit(r) for name, r in VARIANTS.items()}
        for name, handle in handles.items():
            assert output(handle) == plain()[name], name
        assert pacer.looks > len(depths) and all(
            handle.result().usage.drafted_tokens > 0 for handle in handles.values()
        )


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("stagger", [0.0, 0.05])
def test_neighbours_change_nothing(drafts, stagger):
    with tiny_engine(draft_tokens=drafts, max_sequences=4) as engine:
        if drafts:
            engine._runner.proposal = oracle([2, 0, 3])
        handles = {}
        for name, r in VARIANTS.items():
            handles[name] = engine.submit(r)
            time.sleep(stagger)
        for name, handle in handles.items():
            assert output(handle) == plain()[name], name


def test_streamed_equals_whole():
    r = VARIANTS["sampled"]
    with tiny_engine(draft_tokens=3) as engine:
        events = list(engine.stream(r))
        assert isinstance(events[-1], Finish)
        streamed = [lp for e in events if isinstance(e, TextDelta) for lp in e.logprobs]
        assert [(lp.token_id, lp.logprob, lp.top) for lp in streamed] == plain()["sampled"]
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == engine.generate(r).text


def test_state_after_a_round_is_that_of_a_plain_run():
    """GDN state and keys after rounds with partial acceptance equal those of single steps."""
    states = []
    for drafts, pattern in ((0, [0]), (3, [2, 0, 3, 1])):
        with tiny_engine(draft_tokens=drafts) as engine:
            if drafts:
                engine._runner.proposal = oracle(pattern)
            runner, kept = engine._runner, {}

            def close(sequence, runner=runner, kept=kept):
                runner._decoder.flush(runner._state, [sequence.slot], [sequence.commit], [sequence.length])
                kept["length"] = sequence.length
                kept["s"] = runner._state.s[:, sequence.slot].clone()
                kept["conv"] = runner._state.conv[:, sequence.slot, :3].clone()
                index = torch.tensor(sequence.pages[: -(-sequence.length // 64)])
                codes = runner._state.kv_codes[:-1, :, :, index].flatten(3, 4)
                kept["kv"] = codes[:, :, :, : sequence.length].clone()
                return original(sequence)

            original = runner.close
            runner.close = close
            output(engine.submit(VARIANTS["sampled"]))
            engine.close()
            states.append(kept)
    a, b = states
    shared = min(a["length"], b["length"])
    assert shared >= len(PROMPT) + TOKENS - 1
    assert torch.equal(a["kv"][:, :, :, :shared], b["kv"][:, :, :, :shared])
    assert a["length"] == b["length"]
    assert torch.equal(a["s"], b["s"]) and torch.equal(a["conv"], b["conv"])


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_same_prompt_again_after_another_one(drafts):
    """A, B, A: nothing of B is left in slots or pages that A uses again (also with lengths around a page)."""
    with tiny_engine(draft_tokens=drafts, max_sequences=1) as engine:
        for length in (63, 64, 65, 131):
            a = request(PROMPT[:length], seed=9, tokens=12)
            first = output(engine.submit(a))
            output(engine.submit(request(PROMPT[::-1][: length + 20], seed=4, tokens=20)))
            assert output(engine.submit(a)) == first


def test_up_to_the_end_of_the_context():
    """The last tokens before the context limit are those of a run without drafts, and the reason is length."""
    results = []
    for drafts in (0, 3, 5):
        with tiny_engine(draft_tokens=drafts, context_length=192) as engine:
            handle = engine.submit(request(PROMPT, tokens=1000))
            results.append(output(handle))
            completion = handle.result()
            assert completion.finish_reason == "length"
            assert completion.usage.total_tokens == 192
    assert results[0] == results[1] == results[2]
