"""Prefill kernels under Triton's interpreter against torch twins, on tiny shapes. A program: one JSON line a case.

Run with TRITON_INTERPRET=1 in a process of its own: the interpreter is chosen when Triton is first imported. It cuts
bf16 off instead of rounding it, so the tolerances are twice those of the format.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.nn.functional import silu

from ninfer_core.config import ModelConfig
from ninfer_core.kernels import attention_prefill, gated_delta_prefill, linear_prefill, moe_prefill, norm_prefill
from ninfer_core.kernels._order import GROUP, pack_codes
from ninfer_core.kernels._tiles_prefill import Grouped
from ninfer_core.kernels.attention import attention_chunk
from ninfer_core.kernels.gated_delta import chunked_delta
from ninfer_core.kernels.rope import rope_tables
from ninfer_core.model import fused_prefill, prompt_chunk
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.fused_prefill import FusedPrefill, prefill_bytes
from ninfer_core.model.mtp import MTP
from ninfer_core.model.prompt_chunk import layer_operations
from ninfer_core.packed import random_packed, reference_weights
from ninfer_core.state import DeltaState, FusedState, KVLayer, State
from tests.kernels.interpreter import run

NAN = float("nan")
EXACT = 1e-6
"""fp32 sums in another order."""
BF16 = 8e-3
"""One value cut off to bf16, or operands of fp16."""
PRODUCTS = 4e-2
"""A chain of products of bf16 values, each cut off."""


def empty(*shape, dtype=torch.bfloat16):
    return torch.full(shape, NAN, dtype=dtype)


def matrix(rows, columns, fmt):
    low, high = {"W8": (-127, 128), "Q4": (-8, 8), "Q5": (-16, 16), "Q6": (-32, 32)}[fmt]
    codes = torch.randint(low, high, (rows, columns))
    scales = (torch.rand(rows, columns // GROUP[fmt]) * 0.01).half()
    values = (codes.float().view(rows, -1, GROUP[fmt]) * scales.float()[..., None]).view(rows, columns)
    return pack_codes(codes, scales, fmt), values


def near(out, ref, limit, what):
    error = ((out.double() - ref.double()).norm() / ref.double().norm()).item()
    assert error < limit, f"{what}: relative error {error:.2e}, allowed {limit:.0e}"


def opened(fmt):
    weight, values = matrix(48, 128, fmt)
    natural, slots = empty(48, 128), empty(48, 128)
    linear_prefill.dequantize(weight, natural)
    linear_prefill.dequantize(weight, slots, True)
    once = (values.view(torch.int32) & -65536).view(torch.float32)  # the interpreter cuts where a card rounds
    assert torch.equal(natural.float(), once), f"{fmt}: values are rounded once"
    assert torch.equal(slots[:, moe_prefill.slots(128, "cpu")], natural), "operand order"
    out = empty(5, 48)
    x = torch.randn(5, 128).bfloat16()
    linear_prefill.packed_product(x, weight, empty(32 * 128), out)  # the weight in two parts
    near(out, x.float() @ values.T, BF16, "product")


def experts(up_fmt, down_fmt, up_tile=Grouped(32, 16, 4, 1), down_tile=Grouped(32, 16, 4, 1)):
    rows, count, active, width, inner = 21, 4, 2, 64, 64
    up, up_values = matrix(count * 2 * inner, width, up_fmt)
    down, down_values = matrix(count * width, inner, down_fmt)
    logits, x = torch.randn(rows, count + 8), torch.randn(rows, width).bfloat16()
    logits[3, :count] = 0.0  # ties go to the lower experts
    logits[4, :count] = torch.tensor([1.0, 1.0 + 2**-22, 0.5, 1.0 + 2**-21])
    logits[:, 2] = -9.0  # nobody chooses expert 2
    slots = moe_prefill.slots(width, "cpu")
    by_slot = torch.empty_like(x)
    by_slot[:, slots] = x
    routing = moe_prefill.Routing.empty(rows, count, active, up_tile.tokens, "cpu")
    moe_prefill.route(logits, torch.zeros(count, dtype=torch.int32), routing, count, active)
    bits = logits[:, :count].contiguous().view(torch.int32)  # an expert's number takes the place of the last two
    chosen = torch.sort((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -count, descending=True, stable=True)[1][:, :active]
    assert chosen[4].tolist() == [3, 0], "a difference in the last bits does not count"
    best = logits.gather(1, chosen).softmax(-1)
    assert torch.equal(routing.ids.view(rows, active).long(), chosen), "chosen experts"
    near(routing.weights.view(rows, active), best, EXACT, "router weights")
    place = routing.place.view(rows, active).long()
    assert torch.equal(place.flatten().sort().values, torch.arange(rows * active)), "every pair has its own place"
    h, y = empty(rows * active, inner), empty(rows * active, width)
    moe_prefill.expert_gate_up(up, by_slot, routing, h, up_tile)
    moe_prefill.expert_down(down, h, routing, y, down_tile)
    both = torch.einsum("tsie,te->tsi", up_values.view(count, 2 * inner, width)[chosen], x.float())
    hidden = silu(both[..., :inner]) * both[..., inner:]
    near(h[place][..., slots], hidden, PRODUCTS, "inner rows")
    terms = torch.einsum("tsei,tsi->tse", down_values.view(count, width, inner)[chosen], hidden)
    near(y[place], terms, PRODUCTS, "routed rows")
    residual, shared = torch.randn(rows, width), torch.randn(rows, width).bfloat16()
    expected = (
        residual + (y[place].float() * best[..., None]).sum(1) + torch.sigmoid(logits[:, count : count + 1]) * shared
    )
    norm, u = torch.randn(width).bfloat16(), torch.full((rows, width), NAN)
    moe_prefill.combine(y, routing, shared, logits, residual, norm, u, count, 1e-6)
    near(residual, expected, EXACT, "residual")
    factor = torch.rsqrt((expected**2).mean(1, keepdim=True) + 1e-6)
    near(u, expected * factor * (1 + norm.float()), EXACT, "next rows")


def rows():
    table, values = matrix(32, 128, "Q6")
    tokens, norm = torch.tensor([3, 31, 8, 17], dtype=torch.int32), torch.randn(128).bfloat16()
    x = empty(4, 128, dtype=torch.float32)
    norm_prefill.embed_rows(table, tokens, x)
    assert torch.equal(x, values[tokens.long()]), "embedding rows"
    table, values = matrix(32, 128, "W8")
    norm_prefill.embed_rows(table, tokens, x)
    assert torch.equal(x, values[tokens.long()]), "embedding rows, W8"
    y, u = torch.randn(4, 128).bfloat16(), torch.full((4, 128), NAN)
    expected = x + y.float()
    normed = expected * torch.rsqrt((expected**2).mean(1, keepdim=True) + 1e-6) * (1 + norm.float())
    norm_prefill.add_norm(x, y, norm, u, 1e-6, slots=True)
    near(x, expected, EXACT, "sum")
    near(u[:, moe_prefill.slots(128, "cpu")], normed, EXACT, "norm")
    both, out = torch.randn(4, 128).bfloat16(), empty(4, 64)
    norm_prefill.swiglu(both, out, 32)
    gate, up = both.float().view(4, 2, 2, 32).unbind(2)
    near(out, (silu(gate) * up).flatten(1), BF16, "swiglu")


def delta(*plan):
    key_heads, heads, count = 1, 2, sum(plan)
    channels = (2 * key_heads + heads) * 128
    state = DeltaState.empty(2, key_heads, heads, "cpu")
    state.s.fill_(NAN)
    taps, norm = (torch.randn(4, channels) * 0.5).bfloat16(), torch.randn(128).bfloat16()
    a_log, dt_bias = torch.randn(heads) - 2, torch.randn(heads)
    projected, ab = torch.randn(count, channels + heads * 128).bfloat16(), torch.randn(count, 2 * heads)
    found, at = [], 0
    for size in plan:
        work = gated_delta_prefill.DeltaWorkspace.empty(size, key_heads, heads, "cpu")
        for name in work.__dataclass_fields__:
            getattr(work, name).fill_(NAN)
        out, part = empty(size, heads * 128), slice(at, at + size)
        gated_delta_prefill.gated_delta_chunk(
            projected[part].clone(), ab[part].clone(), taps, a_log, dt_bias, norm, state, 1, at, work, out
        )
        found.append(out)
        at += size
    raw = torch.cat((torch.zeros(3, channels), projected[:, :channels].float()))
    mixed = silu(sum(raw[d : d + count] * taps[d].float() for d in range(4)))
    q, k = (mixed[:, i * 128 : i * 128 + 128] for i in (0, 1))
    q, k = (x * torch.rsqrt((x * x).sum(1, keepdim=True) + 1e-6) for x in (q, k))
    pad = -count % 64

    def padded(x):
        return torch.nn.functional.pad(x.double(), (0, 0) * (x.dim() - 1) + (0, pad))

    log_decay = -a_log.exp() * torch.nn.functional.softplus(ab[:, :heads] + dt_bias)
    o, s = chunked_delta(
        *(padded(x) for x in (q[:, None].expand(-1, heads, -1) * 128**-0.5, k[:, None].expand(-1, heads, -1),
          mixed[:, 256:].view(count, heads, 128), log_decay, torch.sigmoid(ab[:, heads:]))),
        torch.zeros(heads, 128, 128, dtype=torch.float64),
    )  # fmt: skip
    o, z = o[:count], projected[:, channels:].double().view(count, heads, 128)
    expected = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-6) * norm.double() * silu(z)
    near(torch.cat(found).view(count, heads, 128), expected, 2 * BF16 if count == 1 else BF16, "output")
    near(state.s[1].transpose(1, 2), s, BF16, "state")
    for row in range(max(0, count - 3), count):
        assert torch.equal(state.conv[1, row % 16], projected[row, :channels]), "rows of the convolution"


@triton.jit
def inverse_kernel(a, out):
    i = tl.arange(0, 64)
    at = i[:, None] * 64 + i[None, :]
    tl.store(out + at, gated_delta_prefill.unit_lower_inverse(tl.load(a + at)))


def inverse():
    same, mixed = torch.ones(64, 64).tril(-1), torch.randn(64, 64).tril(-1) * 0.3
    for a in (same, mixed):  # the same key in all rows: powers of the matrix are large and would cancel
        out = empty(64, 64, dtype=torch.float32)
        inverse_kernel[(1,)](a, out)
        near(out, torch.linalg.inv(a.double() + torch.eye(64)), EXACT, "inverse")


def attend(heads, kv_heads, *plan, kv="int8", capacity=0):
    """Chunks of these lengths against the twin; with `capacity`, by the padded route over that many queries."""
    count, pages = sum(plan), 4
    projected = torch.randn(count, 2 * (heads + kv_heads) * 256).bfloat16()
    q_gain, k_gain = ((torch.randn(256) * 0.1).bfloat16() for _ in range(2))
    cos, sin = rope_tables(torch.arange(count), 64, 1e7)
    shape = (2, kv_heads, pages, 64)
    mine, other = (
        KVLayer(torch.zeros(*shape, 256, dtype=torch.int8), torch.zeros(*shape, 4, dtype=torch.float16))
        if kv == "int8"
        else KVLayer(torch.zeros(*shape, 256, dtype=torch.bfloat16), None)
        for _ in range(2)
    )
    gain = 1 + torch.cat((q_gain.float().expand(heads, 256), k_gain.float().expand(kv_heads, 256)))
    table, found, expected, at = torch.tensor([2, 0, 3, 1], dtype=torch.int32), [], [], 0
    most, room, half = max(plan), attention_prefill.room_for(count), {"dtype": torch.float16}
    for size in plan:
        part = slice(at, at + size)
        work = attention_prefill.AttentionWorkspace(
            empty(capacity or most, heads, 256, **half), empty(2 * kv_heads, room, 256, **half),
            empty(most, heads * 256, dtype=torch.float32), empty(heads * most, dtype=torch.float32),
        )  # fmt: skip
        out, p = empty(size, heads * 256), projected[part].clone()
        turns = cos[part].clone(), sin[part].clone()
        route = attention_prefill.Route.of(at, size, capacity, capacity > 0)
        assert bool(route.padded) == (capacity > 0), route
        queries = work.q[route.lead : route.lead + size]
        attention_prefill.append(
            p, q_gain, k_gain, turns[0], turns[1], mine.codes, mine.scales, table, at, queries, heads=heads
        )
        attention_prefill.attention_chunk(p, mine.codes, mine.scales, table, at, work, out, heads=heads, route=route)
        found.append(out)
        expected.append(attention_chunk(p.float(), gain, other, turns, (table.long(), at, size), heads, kv_heads, 1e-6))
        at += size
    if kv == "int8":
        apart = (mine.codes.int() - other.codes.int()).abs()  # sums in another order: a tie may fall the other way
        assert apart.max() <= 1 and apart.sum() <= 2 and torch.equal(mine.scales, other.scales), "keys and values"
    else:
        near(mine.codes, other.codes, BF16, "keys and values")
    near(torch.cat(found), torch.cat(expected), BF16, "attention")


def padded(heads, kv_heads, *plan):
    """The route of cuDNN's attention, in small parts, with that attention spelled out."""

    def attention(work, rows, first, length, causal):
        query = work.q[:rows].float().transpose(0, 1).unflatten(0, (kv_heads, -1))
        key, value = (work.kv[i : i + kv_heads, first : first + length].float() for i in (0, kv_heads))
        score = query @ key.transpose(1, 2)[:, None]
        if causal:
            score = score.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
        out = (score.softmax(-1) @ value[:, None]).half().flatten(0, 1)
        return out, score.logsumexp(-1).flatten(0, 1)

    small = {"PART": 16, "FINE": 8, "COARSE": 16, "FEWEST": 8, "fused_part": attention}
    with mock.patch.multiple(attention_prefill, **small):
        asked = attention_prefill.planned(64, 256)
        assert len(asked) == len(set(asked)) == 28, asked
        at = 0
        for size in plan:
            route = attention_prefill.Route.of(at, size, 64, True)
            parts = attention_prefill.part_lengths(at - route.lead)
            assert {(route.padded, route.padded, True), *((route.padded, n, False) for n in parts)} <= set(asked)
            at += size
        attend(heads, kv_heads, *plan, capacity=64)


def joined():
    """Softmax over parts of the keys, joined, is the softmax over all: one part, two, three."""
    rows, heads = 5, 2
    score, value = torch.randn(heads, rows, 40) * 3, torch.randn(heads, 40, 256)
    projected = torch.randn(rows, 2 * (heads + 1) * 256).bfloat16()
    gate = torch.sigmoid(projected[:, 768:1280].float())
    whole = (score.softmax(-1) @ value).transpose(0, 1).reshape(rows, 512) * gate
    for cuts in ((0, 40), (0, 7, 40), (0, 7, 20, 40)):
        acc, sums = empty(rows, 512, dtype=torch.float32), empty(heads, rows, dtype=torch.float32)
        out, parts = empty(rows, 512), []
        for first, last in itertools.pairwise(cuts):
            scores = score[..., first:last]
            parts.append(((scores.softmax(-1) @ value[:, first:last]).half(), scores.logsumexp(-1)))
        for number in range(min(1, len(parts) - 1), len(parts)):
            part, before = parts[number], parts[0] if number < 2 else (torch.full_like(x, NAN) for x in parts[0])
            attention_prefill.join_kernel[(heads, 1)](
                *part, *before, acc, sums, projected, out, rows, rows, part[0].stride(0), part[0].stride(1),
                H=heads, KH=1, R=16, BEFORE=min(number, 2), LAST=number + 1 == len(parts),
            )  # fmt: skip
        near(out, whole, BF16, f"joined {cuts}")
    assert attention_prefill.part_lengths(77 * 1024) == [n * 1024 for n in (32, 32, 8, 4, 1)]


def model(moe, *plan, kv="int8"):
    """A whole small model: hidden rows and everything the state holds, against the torch path.

    Before the last step of a chunk the draft layer reads rows of another sequence.
    """
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    config = ModelConfig(
        model_id="", hidden_size=128, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
        num_attention_heads=2, num_key_value_heads=1, head_dim=256, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=256, max_position_embeddings=512,
        **(sizes if moe else {"intermediate_size": 128}),
    )  # fmt: skip
    weights = random_packed(config, seed=1, device="cpu")
    reference, count = reference_weights(weights, config), sum(plan)
    tokens, table = torch.randint(0, 256, (count,)), torch.tensor([3, 1, 2])
    run = FusedPrefill(weights, config, rows=max(plan), context=192)
    assert run.work.nbytes <= prefill_bytes(config, max(plan), 192)
    run.work.memory.fill_(255)
    run.work.out.fill_(NAN)
    fused = FusedState(config, slots=2, pages=4, kv_dtype=kv, device="cpu")
    plain = State(config, slots=2, pages=4, kv_dtype=kv, max_draft=3, device="cpu")
    decoder, drafts = Decoder(reference, config), MTP(reference, config)
    at, found, expected = 0, [], []
    other, hidden, aside = torch.randint(0, 256, (min(plan),)), torch.randn(min(plan), 128), torch.tensor([0])
    drafts.prefill(plain, other, hidden, 0, aside)
    for size in plan:
        part = tokens[at : at + size]
        chunk = run.begin(fused, part, 1, at, table)
        steps = 1 + -(-size // fused_prefill.BLOCK)
        assert len(chunk.left) == steps and min(chunk.left) > 0
        assert abs(sum(chunk.left) / sum(layer_operations(config, at, size)) - 1) < 1e-9
        while len(chunk.left) > 1:
            chunk.advance()
        run.fill_drafts(fused, other, hidden, 0, aside)
        found.append(chunk.finish())
        expected.append(decoder.prefill(plain, part, 1, at, table))
        run.fill_drafts(fused, part, expected[-1], at, table)
        drafts.prefill(plain, part, expected[-1], at, table)
        at += size
    near(torch.cat(found), torch.cat(expected), PRODUCTS, "hidden rows")
    near(fused.gdn[0].s[1].transpose(1, 2), plain.gdn[0].s[1], PRODUCTS, "recurrent state")
    ring = torch.stack([fused.gdn[0].conv[1, row % 16] for row in range(count - 3, count)])
    near(ring, plain.gdn[0].conv[1, :3], PRODUCTS, "rows of the convolution")
    for a, b, what in ((fused.kv[0], plain.kv[0], "keys, values"), (fused.mtp_kv[0], plain.mtp_kv[0], "draft keys")):
        near(*(opened_pages(x) for x in (a, b)), PRODUCTS, what)


def in_blocks(*plan):
    """As `model`, with blocks that a chunk does not fit into."""
    with mock.patch.multiple(fused_prefill, BLOCK=4), mock.patch.multiple(prompt_chunk, LEAST=1):
        model(True, *plan)


def opened_pages(kv):
    """The keys and values of all pages."""
    groups = kv.codes.float().unflatten(-1, (-1, 64))
    return groups if kv.scales is None else groups * kv.scales.float()[..., None]


CASES = {f"opened {fmt}": (opened, fmt) for fmt in ("W8", "Q4", "Q5", "Q6")} | {
    "experts Q4 Q5": (experts, "Q4", "Q5"),
    "experts Q5 Q6": (experts, "Q5", "Q6"),
    "experts W8 W8": (experts, "W8", "W8"),
    "experts, narrow last tiles": (experts, "Q4", "Q5", Grouped(32, 16, 4, 1, 3), Grouped(32, 8, 4, 1, 2)),
    "rows": (rows,),
    "inverse": (inverse,),
    "delta 1": (delta, 1),
    "delta 63 and 2": (delta, 63, 2),
    "delta 64 and 65": (delta, 64, 65),
    "attention 1": (attend, 2, 1, 1),
    "attention 63, 2": (attend, 2, 1, 63, 2),
    "attention 64, 66": (attend, 6, 2, 64, 66),
    "attention bf16": (partial(attend, kv="bf16"), 2, 1, 20, 50),
    "attention padded": (padded, 4, 2, 30, 8, 50),
    "joined": (joined,),
    "sparse model": (model, True, 4),
    "sparse model in blocks": (in_blocks, 6),
    "dense model, bf16 pages": (partial(model, kv="bf16"), False, 6, 3),
}


if __name__ == "__main__":
    run({name: partial(*case) for name, case in CASES.items()}, sys.argv[1:])
