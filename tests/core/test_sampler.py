"""The sampler: order of processing, the draw, random numbers, acceptance, log-probabilities."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core.kernels.sampling import accepted, log_probabilities, pick, pick_ref, process, uniform
from ninfer_core.runtime.sampler import Sampler
from ninfer_core.runtime.validation import SamplingParams, resolve_sampling
from ninfer_core.types import Sampling


def chi_square_p(counts, expected):
    """Upper tail of the chi-square distribution (Wilson-Hilferty), for cells that expect at least 5."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    keep = expected >= 5
    merged_c = np.append(counts[keep], counts[~keep].sum())
    merged_e = np.append(expected[keep], expected[~keep].sum())
    if merged_e[-1] < 5:
        merged_c, merged_e = merged_c[:-1], merged_e[:-1]
    x, df = float(((merged_c - merged_e) ** 2 / merged_e).sum()), len(merged_e) - 1
    z = ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_philox_known_answer():
    # the published vector of Philox 4x32-10 for key 0 and counter 0 begins with 6627e8d5
    assert uniform(0, 0) == float(np.float32(0x6627E8D5) * np.float32(4.6566127342e-10))


def test_uniform_is_the_one_of_triton():
    triton = pytest.importorskip("triton")
    assert triton.__version__
    # values of triton.language.rand(seed, offset) from its interpreter
    import subprocess
    import sys

    program = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
@triton.jit
def draw(out, seed, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.rand(seed, i), mask=i < n)
for seed in (0, 1, 12345678901234567, 2**63 - 1):
    out = torch.zeros(8)
    draw[(1,)](out, seed, 8, 8)
    print(*[v.hex() for v in out.tolist()])
"""
    text = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    theirs = [line.split() for line in text.splitlines()]
    ours = [[uniform(seed, i).hex() for i in range(8)] for seed in (0, 1, 12345678901234567, 2**63 - 1)]
    assert theirs == ours


def test_uniform_is_uniform_and_below_one():
    values = np.array([uniform(7, i) for i in range(20000)])
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, 64, (0, 1))[0]
    assert chi_square_p(counts, np.full(64, len(values) / 64)) > 0.001


def test_uniform_streams_of_two_seeds_differ():
    assert [uniform(1, i) for i in range(4)] != [uniform(2, i) for i in range(4)]
    assert uniform(1 << 40, 0) != uniform(0, 0)  # the high word of the seed counts


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_fast_pick_equals_the_formula(seed, data):
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    size = data.draw(st.sampled_from([1, 2, 3, 50, 300, 5000]))
    z = torch.randn(size, generator=g) * rng.choice([0.05, 1, 6])
    if data.draw(st.booleans()):
        z = (z * 2).round() / 2  # many ties
    law = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 1e-7, 0.2, 1.0, 2.0])),
        top_p=data.draw(st.sampled_from([0.0, 0.3, 0.95, 1.0])),
        top_k=data.draw(st.sampled_from([0, 1, 5, 20, 64, 1000])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    )
    u = uniform(seed, 3)
    assert pick(z, law, u) == pick_ref(z, law, u)


def test_greedy_takes_the_lowest_id_of_a_tie():
    z = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert pick(z, SamplingParams(temperature=0), 0.99) == 1


def test_top_k_keeps_ties_out_by_id():
    z = torch.tensor([1.0, 1.0, 1.0, 1.0])
    law = SamplingParams(top_k=2)
    assert {pick(z, law, u) for u in np.linspace(0, 0.999, 50)} == {0, 1}


def test_top_p_keeps_at_least_one_and_the_smallest_prefix():
    z = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    grid = np.linspace(0, 0.9999, 200)
    assert {pick(z, SamplingParams(top_p=0.0), u) for u in grid} == {0}
    assert {pick(z, SamplingParams(top_p=0.49), u) for u in grid} == {0}
    assert {pick(z, SamplingParams(top_p=0.7), u) for u in grid} == {0, 1}
    assert {pick(z, SamplingParams(top_p=0.81), u) for u in grid} == {0, 1, 2}


def test_top_p_renormalises_inside_top_k():
    z = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    # inside {0, 1} token 0 has 0.571: with top_p 0.5 it stands alone; over all tokens it would need token 1 as well
    assert {pick(z, SamplingParams(top_k=2, top_p=0.5), u) for u in np.linspace(0, 0.9999, 99)} == {0}


def test_min_p_is_relative_to_the_best_after_temperature():
    z = torch.log(torch.tensor([0.6, 0.25, 0.15]))
    grid = np.linspace(0, 0.9999, 99)
    assert {pick(z, SamplingParams(min_p=0.3), u) for u in grid} == {0, 1}
    assert {pick(z, SamplingParams(min_p=0.3, temperature=2.0), u) for u in grid} == {0, 1, 2}


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]])
    law = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias=((4, -1.0),))
    counts = torch.tensor([0, 2, 1, 0, 0], dtype=torch.int32)
    seen = torch.tensor([True, False, False, False, False])
    z = process(logits, law, counts, seen)
    # 0: prompt only, repetition alone; 1: negative and twice emitted; 2: once emitted; 3: new; 4: bias alone
    assert z.tolist() == [[1.0, -4.0 - 0.5 - 0.5, 0.5 - 0.25 - 0.5, 0.5, 2.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5, 3.0]]


def test_rows_behind_drafts_count_them_and_forget_them():
    logits = torch.ones(3, 4)
    law = SamplingParams(frequency_penalty=1.0)
    counts = torch.zeros(4, dtype=torch.int32)
    z = process(logits, law, counts, torch.zeros(4, dtype=torch.bool), [2, 2])
    assert z.tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, -1, 1]]
    assert counts.tolist() == [0, 0, 0, 0]


def test_presence_counts_an_id_once_and_never_the_prompt():
    sampler = Sampler(SamplingParams(temperature=0, presence_penalty=1.0), addressable=3, prompt=[0, 0, 1])
    logits = torch.tensor([[2.0, 1.5, 1.2]])
    assert sampler.sample(logits, [], 0)[0] == [0]
    sampler.observe([0, 0, 0])
    assert sampler.sample(logits, [], 3)[0] == [1]


def test_ids_without_text_are_never_drawn():
    logits = torch.zeros(1, 10)
    logits[0, 7:] = 50
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=3), addressable=7)
        assert all(sampler.sample(logits, [], i)[0][0] < 7 for i in range(50))


def test_acceptance_stops_at_the_first_difference():
    assert accepted([1, 2, 3], [1, 2, 9]) == 2
    assert accepted([1, 2, 3], [9, 2, 3]) == 0
    assert accepted([1, 2, 3, 4], [1, 2, 3]) == 3


def test_sample_and_compare_greedy():
    logits = torch.eye(4)[[2, 0, 3, 1]] * 5
    sampler = Sampler(SamplingParams(temperature=0), addressable=4)
    assert sampler.sample(logits, [2, 0, 3], 0)[0] == [2, 0, 3, 1]  # all accepted and the bonus
    assert sampler.sample(logits, [2, 1, 3], 0)[0] == [2, 0]  # the correction ends the round
    assert sampler.sample(logits[:1], [], 0)[0] == [2]


def test_a_row_that_is_not_finite_is_refused_only_when_it_is_used():
    logits = torch.eye(4)[[2, 0, 3]] * 5
    logits[1, 0] = float("nan")
    sampler = Sampler(SamplingParams(temperature=0), addressable=4)
    assert sampler.sample(logits, [1, 0], 0)[0] == [2]
    with pytest.raises(FloatingPointError, match="output token 6"):
        sampler.sample(logits, [2, 0], 5)
    logits[0, 1] = float("inf")
    with pytest.raises(FloatingPointError):
        sampler.sample(logits, [1, 0], 0)


LAW = SamplingParams(temperature=0.9, top_k=12, top_p=0.97, frequency_penalty=0.3, presence_penalty=0.2)


def chain_logits(vocabulary=16):
    """A Markov chain: the row depends on the token before."""
    return torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(5)) * 1.5


def run_chain(table, seed, length, drafts_per_round, wrong):
    """Generate by rounds; drafts are the chain's argmax, or off by `wrong`."""
    sampler = Sampler(
        SamplingParams(**{f: getattr(LAW, f) for f in LAW.__slots__ if f != "seed"}, seed=seed), addressable=16
    )
    out = [0]
    while len(out) <= length:
        drafts, last = [], out[-1]
        for _ in range(drafts_per_round):
            last = (int(table[last].argmax()) + wrong) % 16
            drafts.append(last)
        logits = table[[out[-1], *drafts]]
        tokens, _ = sampler.sample(logits, drafts, len(out) - 1)
        sampler.observe(tokens)
        out += tokens
    return out[1 : length + 1]


@pytest.mark.parametrize("drafts,wrong", [(1, 0), (3, 0), (5, 0), (3, 1)])
def test_drafts_do_not_change_a_sampled_output(drafts, wrong):
    table = chain_logits()
    for seed in range(20):
        assert run_chain(table, seed, 30, drafts, wrong) == run_chain(table, seed, 30, 0, 0)


@pytest.mark.parametrize("drafts", [0, 1])
def test_sampled_law_with_and_without_drafts(drafts):
    """10,000 draws of the second token of the chain against its exact distribution."""
    table, n = chain_logits(), 10_000

    def law(row, history):
        counts = torch.bincount(torch.tensor(history, dtype=torch.int64), minlength=16).int()
        z = process(row[None], LAW, counts, torch.zeros(16, dtype=torch.bool))[0] / LAW.temperature
        order = np.lexsort((np.arange(16), -z.numpy()))[: LAW.top_k]
        p = torch.softmax(z[order.tolist()].double(), 0).numpy()
        kept = int((np.cumsum(p) < LAW.top_p).sum()) + 1
        full = np.zeros(16)
        full[order[:kept]] = p[:kept] / p[:kept].sum()
        return full

    first = law(table[0], [])
    exact = sum(first[a] * law(table[a], [a]) for a in np.nonzero(first)[0])
    counts = np.zeros(16)
    for seed in range(n):
        counts[run_chain(table, 1000 + seed, 2, drafts, 0)[1]] += 1
    assert (counts[exact == 0] == 0).all()
    assert chi_square_p(counts, exact * n) > 0.001


def test_chi_square_sees_a_wrong_law():
    expected = np.full(10, 1000.0)
    assert chi_square_p([1000] * 10, expected) > 0.9
    assert chi_square_p([1150, 850, *[1000] * 8], expected) < 0.001


def test_log_probabilities_are_those_of_the_raw_row():
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0])
    value, top = log_probabilities(logits, 0, 3)
    exact = torch.log_softmax(logits.double(), 0).tolist()
    assert value == pytest.approx(exact[0])
    assert [i for i, _ in top] == [1, 2, 0]
    assert [v for _, v in top] == pytest.approx([exact[1], exact[2], exact[0]])


def test_log_probabilities_with_a_tie_at_the_cut():
    assert [i for i, _ in log_probabilities(torch.tensor([1.0, 1.0, 1.0]), 2, 2)[1]] == [0, 1]


def test_log_probabilities_follow_the_accepted_rows():
    logits = torch.eye(4)[[2, 0, 3]] * 5
    sampler = Sampler(SamplingParams(temperature=0, logit_bias=((2, 1.0),)), addressable=4, logprobs=1)
    tokens, raw = sampler.sample(logits, [2, 0], 0)
    assert tokens == [2, 0, 3]
    for i, (token, value, top) in enumerate(raw):
        exact = torch.log_softmax(logits[i].double(), 0)
        assert token == tokens[i] and value == pytest.approx(float(exact[token]))
        assert top == [(tokens[i], pytest.approx(float(exact[token])))]


def test_resolve_sampling_takes_the_request_then_the_model_then_neutral():
    params = resolve_sampling(
        Sampling(temperature=0.5, seed=-1, logit_bias={9: 1, 2: -3}), {"temperature": 1.0, "top_k": 20}
    )
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.5, 20, 1.0, 1.0)
    assert params.seed == 2**64 - 1 and params.logit_bias == ((2, -3.0), (9, 1.0))
    assert resolve_sampling(Sampling(top_k=-1), {"top_k": 20}).top_k == 0
    assert resolve_sampling(Sampling(), {}).seed != resolve_sampling(Sampling(), {}).seed
