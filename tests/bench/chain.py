"""All launches of one greedy 35B-A3B decode step, and its parts alone, as CUDA graphs."""

from __future__ import annotations

import torch

from ninfer_core.kernels import _tiles
from ninfer_core.kernels import attention_decode as attention
from ninfer_core.kernels import embedding_decode as embedding
from ninfer_core.kernels import gated_delta_decode as delta
from ninfer_core.kernels import head_decode as heads
from ninfer_core.kernels import linear_decode as linear
from ninfer_core.kernels import moe_decode as moe
from ninfer_core.kernels import residual_decode as residual
from ninfer_core.kernels._order import Activation
from ninfer_core.kernels._parts import PartialSums
from tests.bench.kernel_inputs import DEVICE, graph_time, random_activation, random_matrix

CONTEXT = 7680
CHAIN_ROWS = (1, 4)
PARTS = "eimaorudh"
"""Embedding, input projections, DeltaNet, attention, output projections, router, experts up, down, head."""


def kv_pages(pages):
    """Random INT8 pages of 2 KV heads."""
    codes = torch.randint(-127, 128, (2, 2, pages, 64, 256), dtype=torch.int8, device=DEVICE)
    return codes, (torch.rand(2, 2, pages, 64, 4, device=DEVICE) * 0.02).half()


class Chain:
    """All launches of one greedy 35B-A3B decode step at `CONTEXT` tokens: published weight formats, random values."""

    def __init__(self, T, layers=range(40)):
        self.T = T
        self.layers = []
        for i in layers:
            full = i % 4 == 3
            down = "Q6" if i in (34, 38, 39) else "Q5"
            self.layers.append({
                "attention": full,
                "in": random_matrix(9216 if full else 12288, 2048, "W8"),
                "ab": None if full else (torch.randn(64, 2048, device=DEVICE) * 0.02).bfloat16(),
                "out": random_matrix(2048, 4096, "W8"),
                "router": (torch.randn(257, 2048, device=DEVICE) * 0.05).bfloat16(),
                "shared_up": random_matrix(1024, 2048, "W8"), "shared_down": random_matrix(2048, 512, "W8"),
                "up": random_matrix(262144, 2048, "Q4"), "down": random_matrix(524288, 512, down),
                "norm": (torch.randn(2048, device=DEVICE) * 0.1).bfloat16(),
                "taps": torch.randn(4, 8192, device=DEVICE).bfloat16(),
                "a_log": torch.randn(32, device=DEVICE) * 0.3, "dt": torch.randn(32, device=DEVICE),
                "gnorm": torch.ones(128, device=DEVICE).bfloat16(),
                "kv": kv_pages(CONTEXT // 64 + 2) if full else None,
                "state": None if full else delta.DeltaState.empty(1, 16, 32, DEVICE),
            })  # fmt: skip
        self.table_rows = random_matrix(248320, 2048, "W8")
        self.head = random_matrix(248320, 2048, "Q6")
        self.buffers()

    def buffers(self):
        """Working buffers of one step."""
        T = self.T
        self.x = [torch.randn(T, 2048, device=DEVICE) for _ in range(2)]
        self.u = self.x[0].clone()
        self.a = random_activation(T, 2048)
        self.mid = random_activation(T, 4096)
        self.sums = PartialSums.empty(T, 2048, 4, DEVICE)
        self.proj = torch.zeros(T, 12288, dtype=torch.bfloat16, device=DEVICE)
        self.attn = torch.zeros(T, 9216, dtype=torch.bfloat16, device=DEVICE)
        self.ab = torch.zeros(T, 64, device=DEVICE)
        self.logits = torch.zeros(T, 257, device=DEVICE)
        self.shared = torch.zeros(T, 1024, device=DEVICE)
        self.h = moe.ExpertRows.empty(T, 8, 512, DEVICE, experts=256, width=2048)
        self.ids = torch.zeros(T, 8, dtype=torch.int32, device=DEVICE)
        self.weights = torch.zeros(T, 8, device=DEVICE)
        self.vocabulary = torch.empty(T, 248320, device=DEVICE)
        self.candidates = heads.Candidates.empty(T, 248320, DEVICE)
        self.tokens = torch.arange(T, dtype=torch.int32, device=DEVICE)
        self.cos, self.sin = torch.ones(T, 64, device=DEVICE), torch.zeros(T, 64, device=DEVICE)
        self.gain = torch.zeros(256, device=DEVICE).bfloat16()
        self.table = torch.arange(CONTEXT // 64 + 2, dtype=torch.int32, device=DEVICE)[None]
        most = _tiles.most_splits(torch.device(DEVICE, 0), 2)
        self.work = attention.AttentionWorkspace.empty(T, CONTEXT + 64, 16, DEVICE, most)
        self.slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.full((1,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.commits = torch.full((1,), 1, dtype=torch.int32, device=DEVICE)

    def tensors(self):
        """All that a step changes and a later one reads."""
        states = [t for w in self.layers if w["state"] for t in (w["state"].s, w["state"].conv, w["state"].k)]
        states += [t for w in self.layers if w["state"] for t in (w["state"].e, w["state"].g)]
        return [*states, *(t for w in self.layers if w["kv"] for t in w["kv"]), *self.x, self.u, self.tokens]

    def step(self, parts=PARTS, routings=None):
        """One greedy step; `parts` leaves launches out to place the time. `routings`: router logits of every layer."""
        x, y = self.x
        if "e" in parts:
            embedding.embed(self.table_rows, self.tokens, self.layers[0]["norm"], x, self.u, self.a)
        for i, w in enumerate(self.layers):
            logits = self.logits if routings is None else routings[i]
            if "i" in parts:
                if w["attention"]:
                    linear.project(w["in"], self.a, self.attn)
                else:
                    linear.project(w["in"], self.a, self.proj, u=self.u, side=w["ab"], side_out=self.ab)
            if "m" in parts and not w["attention"]:
                delta.gated_delta(
                    self.proj, self.ab, w["taps"], w["a_log"], w["dt"], w["gnorm"], w["state"], self.slots,
                    self.lengths, self.commits, self.mid,
                )  # fmt: skip
            if "a" in parts and w["attention"]:
                attention.attention(
                    self.attn, self.gain, self.gain, self.cos, self.sin, *w["kv"], self.table, self.lengths, self.work,
                    self.mid, heads=16,
                )  # fmt: skip
            if "o" in parts:
                norm = "none" if w["attention"] else "head"
                residual.project_residual(w["out"], self.mid, x, w["norm"], y, self.u, self.a, self.sums, norm=norm)
            if "r" in parts:
                moe.route_and_shared(w["shared_up"], w["router"], self.a, self.u, self.shared, self.logits)
            if "u" in parts:
                moe.expert_gate_up(
                    w["up"], self.a, logits, self.shared, self.h, self.ids, self.weights,
                    ahead=w["down"],
                )  # fmt: skip
            if "d" in parts:
                moe.expert_down(
                    w["down"], w["shared_down"], self.h, self.ids, self.weights, logits, y, w["norm"], x, self.u,
                    self.a,
                )  # fmt: skip
        if "h" in parts:
            heads.head(self.head, self.a, self.candidates, self.vocabulary, addressable=248077)
            heads.greedy(self.candidates, self.tokens)

    def bytes(self):
        """Least bytes of one step with T rows of distinct experts (state read and written once)."""
        total = self.head.nbytes
        for w in self.layers:
            total += w["in"].nbytes + w["out"].nbytes + w["shared_up"].nbytes + w["shared_down"].nbytes
            total += w["router"].numel() * 2 + (w["up"].nbytes + w["down"].nbytes) / 256 * 8 * self.T
            if w["attention"]:
                total += CONTEXT * 1056
            else:
                total += 2 * w["state"].s.numel() * 4 + w["ab"].numel() * 2
        return total


def run_chain(bandwidth, T, chain=None):
    """Time of a step with T rows, whole and by part."""
    chain = chain or Chain(T)
    entry = {"T": T, "us": graph_time(chain.step), "floor_us": chain.bytes() / bandwidth / 1e6}
    entry["finite"] = bool(torch.isfinite(chain.vocabulary).all())
    for part in PARTS:
        entry[part] = graph_time(lambda part=part: chain.step(part), 9)
    return entry


def routing_cost(chain, steps=16):
    """Microseconds of the experts' two launches in all layers: the same experts in every step, and others each time.

    Same number of experts, same bytes. Greedy steps of random weights repeat a token, and with it the experts.
    """
    shape = (steps, len(chain.layers), chain.T, 257)
    logits = torch.randn(shape, device=DEVICE)
    found = {}
    for name, at in (("the same experts", [0] * steps), ("other experts", range(steps))):
        took = graph_time(lambda at=at: [chain.step("ud", logits[i]) for i in at], 9)
        found[name] = took / steps
    return found


def context_times(T, bandwidth, tokens, most=None):
    """Microseconds of one attention layer over `tokens` tokens, its combine included, and the pages' floor."""
    pages = -(-(tokens + 8) // 64)
    copies = [kv_pages(pages) for _ in range(4)]  # more bytes than the cache
    most = most or _tiles.most_splits(torch.device(DEVICE, 0), 2)
    work = attention.AttentionWorkspace.empty(T, tokens + 8, 16, DEVICE, most)
    projected = torch.randn(T, 9216, device=DEVICE).bfloat16()
    gain, out = torch.zeros(256, device=DEVICE).bfloat16(), Activation.empty(T, 4096, 1, DEVICE)
    cos, sin = torch.ones(T, 64, device=DEVICE), torch.zeros(T, 64, device=DEVICE)
    table = torch.randperm(pages, device=DEVICE).int()[None]
    lengths = torch.full((1,), tokens, dtype=torch.int32, device=DEVICE)

    def run():
        for codes, scales in copies * 2:
            attention.attention(projected, gain, gain, cos, sin, codes, scales, table, lengths, work, out, heads=16)

    return {"us": graph_time(run, 9) / 8, "floor_us": tokens * 1056 / bandwidth / 1e6}
