"""The Gated DeltaNet mixer in rows and chunks against the recurrence written out in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from ninfer_core.kernels._op import RowCall
from ninfer_core.kernels.gated_delta import gated_delta_chunk, gated_delta_commit, gated_delta_rows
from ninfer_core.weights import GdnMixer, Matrix
from tests.cases import tiny_config
from tests.support import ONE_OP, error, poisoned_state, same_bits

torch.set_num_threads(1)
CONFIG = tiny_config("dense")
HK, HV, DIM, C = 2, 6, 16, 160
WIDTH = C + HV * DIM + 32


@pytest.fixture(scope="module")
def case():
    g = torch.Generator().manual_seed(0)
    a_log, bias = torch.randn(HV, generator=g), torch.randn(HV, generator=g)
    scale, shift = torch.zeros(32), torch.zeros(32)
    scale[:HV], shift[:HV] = -a_log.exp(), bias
    qk_scale = torch.ones(2 * HK, 1)
    qk_scale[:HK] = DIM**-0.5
    nothing = Matrix(torch.empty(0), 0)
    conv, norm = torch.randn(4, C, generator=g), 1 + torch.randn(DIM, generator=g) * 0.3
    weights = GdnMixer(nothing, conv, scale, shift, qk_scale, norm, nothing)
    proj = torch.randn(200, WIDTH, generator=g)
    return weights, proj, oracle(weights, a_log, bias, proj)


def oracle(weights, a_log, bias, proj):
    """Results `[T, V d]` and the states after every row, from the formulas, head by head."""
    p = proj.double()
    c, z = p[:, :C], p[:, C : C + HV * DIM].unflatten(1, (HV, DIM))
    a, b = p[:, C + HV * DIM :][:, :HV], p[:, C + HV * DIM :][:, HV : 2 * HV]
    state = torch.zeros(HV, DIM, DIM, dtype=torch.float64)
    outs, states = [], []
    for t in range(len(p)):
        s = sum(weights.conv[j].double() * c[t - 3 + j] for j in range(4) if t - 3 + j >= 0)
        s = s * torch.sigmoid(s)
        q, k, v = s.split((HK * DIM, HK * DIM, HV * DIM))
        row = []
        for j in range(HV):
            head = j // (HV // HK)
            qh, kh = (x[DIM * head : DIM * head + DIM] for x in (q, k))
            qh, kh = (x / math.sqrt(float(x @ x) + 1e-6) for x in (qh, kh))
            step = float(a[t, j] + bias[j])
            softplus = max(step, 0) + math.log1p(math.exp(-abs(step)))
            state[j] *= math.exp(-math.exp(a_log[j]) * softplus)
            e = torch.sigmoid(b[t, j]) * (v[DIM * j : DIM * j + DIM] - state[j].t() @ kh)
            state[j] += torch.outer(kh, e)
            o = state[j].t() @ qh / math.sqrt(DIM)
            o = o / math.sqrt(float((o * o).mean()) + 1e-6) * weights.norm
            row.append(o * z[t, j] * torch.sigmoid(z[t, j]))
        outs.append(torch.cat(row))
        states.append(state.clone())
    return torch.stack(outs), states


def call(rows, slots=(1,), commit=(0,)):
    none = torch.zeros(len(slots), dtype=torch.int64)
    return RowCall(torch.tensor(slots), none, torch.tensor(commit), none[:, None], none, none, rows)


def layer(max_draft=5):
    return poisoned_state(CONFIG, slots=4, pages=1, kv_dtype="fp32", max_draft=max_draft).gdn[0]


def chunk(weights, state, proj, real, fresh):
    padded = torch.nn.functional.pad(proj[:real], (0, 0, 0, -real % 64), value=9.0)
    return gated_delta_chunk(padded, weights, state, (1, real, fresh), HK, 1e-6)[:real]


@pytest.mark.parametrize("rows", [1, 2, 3, 63, 64, 65, 128, 200])
def test_chunks(case, rows):
    """Padding rows hold large values here: they must not reach the state."""
    weights, proj, (want, states) = case
    state = layer()
    assert error(chunk(weights, state, proj, rows, True), want[:rows]) < ONE_OP * 10
    assert error(state.s[1], states[rows - 1]) < ONE_OP
    past = torch.cat((torch.zeros(3, C), proj[:rows, :C]))[-3:]
    assert same_bits(state.conv[1, :3], past)


def test_windows_with_a_late_commit(case):
    """Windows of 1 to 6 rows, of which some are thrown away, behind a chunk."""
    weights, proj, (want, states) = case
    state = layer()
    chunk(weights, state, proj, 67, True)
    at, commit = 67, 0
    for rows, kept in ((1, 1), (4, 1), (4, 4), (6, 3), (2, 2), (3, 0), (5, 5)):
        window = proj[at : at + rows].clone()
        window[kept:] += 1  # wrong drafts
        got = gated_delta_rows(window, weights, state, call(rows, commit=(commit,)), HK, 1e-6)
        assert error(state.s[1], states[at - 1]) < ONE_OP
        if kept:
            assert error(got[:kept], want[at : at + kept]) < ONE_OP * 10
        at, commit = at + kept, kept
    gated_delta_commit(state, [1], [commit])
    assert error(state.s[1], states[at - 1]) < ONE_OP
    assert same_bits(state.conv[1, :3], proj[at - 3 : at, :C])


def test_late_commit_has_the_bits_of_the_plain_recurrence(case):
    """`S <- exp(g) S + k e^T` row by row, with the same numbers: no other order of operations."""
    weights, proj, _ = case
    state = layer()
    chunk(weights, state, proj, 64, True)
    plain = state.s[1].clone()
    gated_delta_rows(proj[64:70], weights, state, call(6), HK, 1e-6)
    assert same_bits(state.s[1], plain)
    for i in range(4):
        k = state.k[1, i].repeat_interleave(HV // HK, 0)
        faded = state.decay[1, i][:, None, None] * plain
        plain = torch.addcmul(faded, k[:, :, None], state.e[1, i][:, None])
    gated_delta_commit(state, [1], [4])
    assert same_bits(state.s[1], plain)


def test_sequences_of_a_call_are_apart(case):
    weights, proj, _ = case
    together, alone = layer(), layer()
    for state in (together, alone):
        state.s.normal_(generator=torch.Generator().manual_seed(1))
        state.conv.normal_(generator=torch.Generator().manual_seed(2))
    got = gated_delta_rows(proj[:9], weights, together, call(3, (2, 0, 3), (0, 0, 0)), HK, 1e-6)
    for number, slot in enumerate((2, 0, 3)):
        own = slice(3 * number, 3 * number + 3)
        assert same_bits(gated_delta_rows(proj[own], weights, alone, call(3, (slot,)), HK, 1e-6), got[own])
    assert same_bits(together.s, alone.s)


def test_strong_decay_stays_finite(case):
    """A decay to zero inside a chunk: differences of sums are used, never exp(-G) alone."""
    weights, proj, _ = case
    hard = proj[:128].clone()
    hard[::3, C + HV * DIM : C + HV * DIM + HV] = 500.0
    state, rows = layer(), layer()
    got = chunk(weights, state, hard, 128, True)
    rows.s.zero_()
    rows.conv.zero_()
    want = []
    for i in range(128):
        want.append(gated_delta_rows(hard[i : i + 1], weights, rows, call(1, commit=(int(i > 0),)), HK, 1e-6))
    assert error(got, torch.cat(want)) < ONE_OP * 10
