"""Windows of rows: verify and late commit against single steps, independence of rows bit for bit, the draft layer."""

from __future__ import annotations

import math

import pytest
import torch

from ninfer_core.errors import InvalidRequestError
from ninfer_core.kernels.gated_delta import chunked_delta
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.mtp import MTP
from ninfer_core.weights import from_state_dict
from tests.cases import DEMO, tiny_config, tiny_dict
from tests.support import (
    GDN_STATE,
    LOGITS_DENSE,
    LOGITS_MOE,
    error,
    mtp_tensors,
    poisoned_state,
    random_weights,
    reference_model,
    same_bits,
)

torch.set_num_threads(1)
BOUND = {"dense": LOGITS_DENSE, "moe": LOGITS_MOE}
TABLE = torch.tensor([7, 2, 9, 0, 5, 10, 1, 3])


@pytest.fixture(scope="module", params=["dense", "moe"])
def tiny(request):
    kind = request.param
    config = tiny_config(kind)
    tensors = dict(reference_model(tiny_dict(kind)).state_dict())
    tensors |= mtp_tensors(config, tensors)
    return kind, tensors, from_state_dict(tensors, config), config


@pytest.fixture(scope="module")
def demo():
    """The demo's shape with random weights: the row products the product really runs."""
    return random_weights(DEMO), DEMO


def new_state(config, kv_dtype="fp32", slots=3, pages=11):
    return poisoned_state(config, slots=slots, pages=pages, kv_dtype=kv_dtype, max_draft=5)


def tokens_of(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 290, (count,), generator=torch.Generator().manual_seed(seed))


def steps(decoder, state, tokens, start):
    """Hidden rows of single steps after a prefill of `start` tokens; everything committed."""
    rows = []
    for i in range(start, len(tokens)):
        one = tokens[None, i : i + 1]
        rows.append(decoder.verify(state, one, [1], [i], [int(i > start)], TABLE[None], [0])[0])
    decoder.flush(state, [1], [1], [len(tokens)])
    return torch.cat(rows)


@pytest.mark.parametrize("accepted", range(4))
def test_window_with_rejected_drafts_equals_single_steps(tiny, accepted):
    """Anchor and three drafts, of which `accepted` are right; then the next window. All bits as in single steps."""
    _, _, weights, config = tiny
    decoder = Decoder(weights, config)
    tokens = tokens_of(70)
    right = tokens.clone()
    plain, fast = new_state(config, "int8"), new_state(config, "int8")
    for state in (plain, fast):
        decoder.prefill(state, tokens[:61], 1, 0, TABLE)
    want = steps(decoder, plain, right[: 62 + accepted + 4], 61)
    window = right[61:65].clone()
    window[1 + accepted :] += 7
    first = decoder.verify(fast, window[None], [1], [61], [0], TABLE[None], [0])[0]
    assert same_bits(first[: accepted + 1], want[: accepted + 1])
    at = 62 + accepted
    second = decoder.verify(fast, right[None, at : at + 4], [1], [at], [accepted + 1], TABLE[None], [0])[0]
    assert same_bits(second, want[accepted + 1 :])
    decoder.flush(fast, [1], [4], [at + 4])
    assert same_bits(fast.s[:, 1], plain.s[:, 1])
    assert same_bits(fast.conv[:, 1, :3], plain.conv[:, 1, :3])
    for token in range(at + 4):
        place = (slice(None), slice(None), slice(None), TABLE[token // 64], token % 64)
        assert torch.equal(fast.kv_codes[: len(fast.kv)][place], plain.kv_codes[: len(plain.kv)][place])
        assert torch.equal(fast.kv_scales[: len(fast.kv)][place], plain.kv_scales[: len(plain.kv)][place])


def test_rows_equal_prefill(tiny):
    """The recurrence of single rows and the chunk form agree: hidden rows, state, convolution rows."""
    kind, _, weights, config = tiny
    decoder = Decoder(weights, config)
    tokens = tokens_of(140)
    whole, stepped = new_state(config), new_state(config)
    want = decoder.prefill(whole, tokens, 1, 0, TABLE)
    stepped.clear_slot(1)
    got = steps(decoder, stepped, tokens, 0)
    assert error(got, want) < BOUND[kind]
    assert error(stepped.s[:, 1], whole.s[:, 1]) < GDN_STATE
    assert error(stepped.conv[:, 1, :3], whole.conv[:, 1, :3]) < GDN_STATE


def test_prefill_in_blocks_of_64_keeps_the_bits_of_the_state(tiny):
    """A prompt cut at a multiple of 64 leaves the same state as an uncut one, up to the shape of its products."""
    kind, _, weights, config = tiny
    decoder = Decoder(weights, config)
    tokens = tokens_of(150)
    whole, cut = new_state(config), new_state(config)
    want = decoder.prefill(whole, tokens, 1, 0, TABLE)
    got = [decoder.prefill(cut, tokens[a:b], 1, a, TABLE) for a, b in ((0, 64), (64, 128), (128, 150))]
    assert error(torch.cat(got), want) < BOUND[kind]
    assert error(cut.s[:, 1], whole.s[:, 1]) < GDN_STATE


def test_chunk_form_is_the_recurrence_in_fp64():
    generator = torch.Generator().manual_seed(0)
    rows, heads, dk, dv = 192, 3, 16, 8

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(rand(rows, heads, dk), dim=-1) for _ in range(2))
    v, beta = rand(rows, heads, dv), torch.sigmoid(rand(rows, heads))
    log_decay = -torch.nn.functional.softplus(rand(rows, heads) * 4)  # some decays are near zero
    start = rand(heads, dk, dv)
    state, out = start.clone(), []
    for t in range(rows):
        state = state * log_decay[t].exp()[:, None, None]
        e = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * e[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    got, end = chunked_delta(q, k, v, log_decay, beta, start)
    assert error(got, torch.stack(out)) < 1e-13
    assert error(end, state) < 1e-13


def scenario(config, decoder, mtp, kv_dtype):
    """Four sequences of different lengths, prefilled: their page tables and lengths."""
    state = poisoned_state(config, slots=5, pages=14, kv_dtype=kv_dtype, max_draft=5)
    tables = torch.tensor([[3, 8, 11], [1, 0, 2], [9, 4, 5], [6, 7, 10]])
    lengths = [5, 61, 128, 63]
    for slot, length in enumerate(lengths):
        tokens = tokens_of(length, slot)
        hidden = decoder.prefill(state, tokens, slot, 0, tables[slot])
        mtp.prefill(state, tokens[1:], hidden[:-1], 0, tables[slot])
    return state, tables, lengths


EVERY = [
    (order[:b], r) for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)) for b in range(1, 5) for r in (1, 2, 3, 4, 6)
]
SOME = [((0,), 6), ((1,), 6), ((2,), 6), ((3,), 6), ((3, 1), 4), ((2, 0, 3, 1), 1)]


@pytest.mark.parametrize(("kv_dtype", "threads", "calls"), [("int8", 1, EVERY), ("fp32", 1, SOME), ("int8", 2, SOME)])
def test_a_row_never_depends_on_others(demo, kv_dtype, threads, calls):
    """Rows in calls of B = 1..4 sequences x R = 1..6 rows, in any place: trunk, logits, draft layer, bit for bit."""
    torch.set_num_threads(threads)
    try:
        weights, config = demo
        decoder, mtp = Decoder(weights, config), MTP(weights, config)
        state, tables, lengths = scenario(config, decoder, mtp, kv_dtype)
        window = torch.stack([tokens_of(6, 20 + s) for s in range(4)])
        known: dict[tuple[int, int], list[torch.Tensor]] = {}
        for who, rows in calls:
            pick = list(who)
            at = [lengths[s] for s in pick]
            none, some = [0] * len(pick), window[pick, :rows]
            hidden = decoder.verify(state, some, pick, at, none, tables[pick], none)
            logits = decoder.logits(hidden)
            drafts = mtp.rows(state, some, hidden, pick, at, tables[pick], none)
            last = mtp.rows(state, some, hidden, pick, at, tables[pick], none, only=[rows - 1] * len(pick))
            assert same_bits(last[:, 0], drafts[:, -1])
            for b, s in enumerate(pick):
                for r in range(rows):
                    got = [hidden[b, r], logits[b, r], drafts[b, r]]
                    for a, w in zip(got, known.setdefault((s, r), got), strict=True):
                        assert same_bits(a, w), (who, rows, s, r)
        assert len(known) == 24
    finally:
        torch.set_num_threads(1)


def test_commits_differ_between_sequences(demo):
    """Sequences of one call may commit different numbers of rows; each gets what it gets alone."""
    weights, config = demo
    decoder, mtp = Decoder(weights, config), MTP(weights, config)
    window = torch.stack([tokens_of(4, 20 + s) for s in range(4)])
    commit = [1, 4, 2, 3]
    together, tables, lengths = scenario(config, decoder, mtp, "int8")
    alone, _, _ = scenario(config, decoder, mtp, "int8")
    none = [0] * 4
    decoder.verify(together, window, [0, 1, 2, 3], lengths, none, tables, none)
    later = [n + c for n, c in zip(lengths, commit, strict=True)]
    got = decoder.verify(together, window, [0, 1, 2, 3], later, commit, tables, none)
    for s in range(4):
        one = slice(s, s + 1)
        decoder.verify(alone, window[one], [s], [lengths[s]], [0], tables[one], [0])
        want = decoder.verify(alone, window[one], [s], [later[s]], [commit[s]], tables[one], [0])
        assert same_bits(got[s], want[0])
    assert same_bits(together.s[:, :4], alone.s[:, :4])


def test_checkpoint_resumes_with_the_same_bits(demo):
    """Flush, copy the slot, go on elsewhere: the copy continues like the original."""
    weights, config = demo
    decoder, mtp = Decoder(weights, config), MTP(weights, config)
    state, tables, lengths = scenario(config, decoder, mtp, "int8")
    window = tokens_of(4, 9)[None]
    decoder.verify(state, window, [1], [lengths[1]], [0], tables[1:2], [0])
    decoder.flush(state, [1], [2], [lengths[1] + 2])
    state.copy_slot(1, 4)
    at = lengths[1] + 2
    want = decoder.verify(state, window, [1], [at], [0], tables[1:2], [0])
    got = decoder.verify(state, window, [4], [at], [0], tables[1:2], [0])
    assert same_bits(got, want)


def test_fresh_sequence_ignores_the_old_content_of_its_slot(demo):
    weights, config = demo
    decoder = Decoder(weights, config)
    tokens = tokens_of(20)
    used, clean = new_state(config), new_state(config)
    decoder.prefill(used, tokens_of(90, 8), 1, 0, TABLE)
    want = decoder.prefill(clean, tokens, 1, 0, TABLE)
    assert same_bits(decoder.prefill(used, tokens, 1, 0, TABLE), want)


def test_limits_are_refused(demo):
    weights, config = demo
    decoder, state = Decoder(weights, config), new_state(config)
    with pytest.raises(InvalidRequestError, match="max_draft=6"):
        decoder.verify(state, torch.zeros(1, 7, dtype=torch.int64), [0], [0], [0], TABLE[None], [0])
    with pytest.raises(InvalidRequestError, match="1 pages hold 64 tokens"):
        decoder.prefill(state, tokens_of(65), 0, 0, [3])


# the draft layer against plain loops


def norm1(x, w):
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * (1 + w)


def mtp_oracle(t, config, tokens, hidden, positions):
    """The draft layer from its formulas, one row and one head at a time, in fp64. All rows from 0."""
    t = {name: value.double() for name, value in t.items()}
    layer = "mtp.layers.0."
    heads, ratio = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    embed = t["model.language_model.embed_tokens.weight"]
    keys, values, outs = [], [], []
    for row, (token, position) in enumerate(zip(tokens.tolist(), positions, strict=True)):
        h = outs[-1] if hidden[row] is None else hidden[row].double()
        both = torch.cat(
            (norm1(embed[token], t["mtp.pre_fc_norm_embedding.weight"]), norm1(h, t["mtp.pre_fc_norm_hidden.weight"]))
        )
        f = t["mtp.fc.weight"] @ both
        u = norm1(f, t[layer + "input_layernorm.weight"])

        def turned(x, weight, position=position):
            x = norm1(x, weight)
            y = x.clone()
            for i in range(32):
                a = position * 1e7 ** (-i / 32)
                y[i] = x[i] * math.cos(a) - x[i + 32] * math.sin(a)
                y[i + 32] = x[i + 32] * math.cos(a) + x[i] * math.sin(a)
            return y

        qg = t[layer + "self_attn.q_proj.weight"] @ u
        kv_k, kv_v = t[layer + "self_attn.k_proj.weight"] @ u, t[layer + "self_attn.v_proj.weight"] @ u
        keys.append([turned(k, t[layer + "self_attn.k_norm.weight"]) for k in kv_k.split(256)])
        values.append(kv_v.split(256))
        mixed = []
        for head in range(heads):
            q = turned(qg[512 * head : 512 * head + 256], t[layer + "self_attn.q_norm.weight"])
            gate = qg[512 * head + 256 : 512 * head + 512]
            score = torch.stack([q @ k[head // ratio] / 16 for k in keys])
            weight = torch.softmax(score, 0)
            o = sum(w * v[head // ratio] for w, v in zip(weight, values, strict=True))
            mixed.append(o * torch.sigmoid(gate))
        f = f + t[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        u = norm1(f, t[layer + "post_attention_layernorm.weight"])
        f = f + ffn_oracle(t, layer + "mlp.", config, u)
        outs.append(norm1(f, t["mtp.norm.weight"]))
    return torch.stack(outs)


def ffn_oracle(t, mlp, config, u):
    silu = torch.nn.functional.silu
    if not config.is_moe:
        hidden = silu(t[mlp + "gate_proj.weight"] @ u) * (t[mlp + "up_proj.weight"] @ u)
        return t[mlp + "down_proj.weight"] @ hidden
    p = torch.softmax(t[mlp + "gate.weight"] @ u, 0)
    chosen = sorted(range(config.num_experts), key=lambda e: -float(p[e]))[: config.num_experts_per_tok]
    total = sum(float(p[e]) for e in chosen)
    width = config.moe_intermediate_size
    y = torch.zeros_like(u)
    for e in chosen:
        both = t[mlp + "experts.gate_up_proj"][e] @ u
        y = y + float(p[e]) / total * (t[mlp + "experts.down_proj"][e] @ (silu(both[:width]) * both[width:]))
    shared = mlp + "shared_expert."
    hidden = silu(t[shared + "gate_proj.weight"] @ u) * (t[shared + "up_proj.weight"] @ u)
    gate = torch.sigmoid(t[mlp + "shared_expert_gate.weight"] @ u)
    return y + gate * (t[shared + "down_proj.weight"] @ hidden)


def test_draft_layer_against_plain_loops(tiny):
    """Prefill rows, an aligned row, two chained rows; positions shifted as behind an image; then realignment."""
    kind, tensors, weights, config = tiny
    mtp, state = MTP(weights, config), new_state(config)
    generator = torch.Generator().manual_seed(11)
    tokens = tokens_of(76)
    trunk = torch.randn(76, config.hidden_size, generator=generator)
    delta = -3
    places = [t + delta if t > 9 else t for t in range(76)]
    positions = torch.tensor(places)
    mtp.prefill(state, tokens[:70], trunk[:70], 0, TABLE, positions[None, :70].expand(3, -1))
    hidden = [*trunk[:71], None, None]
    want = mtp_oracle(tensors, config, tokens[:73], hidden, places[:73])
    got = mtp.rows(state, tokens[None, 70:71], trunk[None, 70:71], [1], [70], TABLE[None], [delta])
    rows = [got]
    for at in (71, 72):
        rows.append(mtp.rows(state, tokens[None, at : at + 1], rows[-1], [1], [at], TABLE[None], [delta]))
    assert error(torch.cat(rows, 1)[0], want[70:]) < BOUND[kind]
    # the chained rows 71, 72 are rewritten from trunk rows
    want = mtp_oracle(tensors, config, tokens[:75], list(trunk[:75]), places[:75])
    got = mtp.rows(state, tokens[None, 71:75], trunk[None, 71:75], [1], [71], TABLE[None], [delta])
    assert error(got[0], want[71:]) < BOUND[kind]
    head = tensors["lm_head.weight"]
    assert torch.equal(mtp.draft(got[0]), (got[0] @ head.t()).argmax(-1))


def test_draft_rows_of_a_prompt_can_run_as_one_call(tiny):
    """More rows than a window: the chunk route, with the results of the row route up to rounding."""
    kind, _, weights, config = tiny
    mtp = MTP(weights, config)
    tokens, trunk = tokens_of(20), torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(2))
    a, b = new_state(config), new_state(config)
    got = mtp.rows(a, tokens[None], trunk[None], [0], [0], TABLE[None], [0])
    want = []
    for i in range(0, 20, 4):
        rows = slice(i, i + 4)
        want.append(mtp.rows(b, tokens[None, rows], trunk[None, rows], [0], [i], TABLE[None], [0]))
    assert error(got, torch.cat(want, 1)) < BOUND[kind]


def test_reduced_draft_head_maps_rows_to_ids(demo):
    weights, config = demo
    mtp = MTP(weights, config)
    hidden = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(4))
    head = weights.draft_head
    rows = (hidden @ head.weight.dense)[:, : head.weight.rows].argmax(-1)
    assert torch.equal(mtp.draft(hidden), head.ids[rows])


def test_without_a_draft_layer_it_is_refused(tiny):
    _, tensors, _, config = tiny
    bare = from_state_dict({n: t for n, t in tensors.items() if not n.startswith("mtp.")}, config)
    assert bare.mtp is None
    with pytest.raises(InvalidRequestError, match="no draft layer"):
        MTP(bare, config)
