"""The decode mixers on one GPU: `python -m tests.bench.mixers --json FILE`. 35B shapes, random values, INT8 pages.

Attention (its two launches, both, the floor: pages read once) and Gated DeltaNet (the floor: state read and written once)
for rows of one sequence and for one row of many, in graphs over more bytes than the cache. Each case is compared with its
twin; `faults` lists what differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ninfer_core.kernels import _tiles
from ninfer_core.kernels import attention_decode as attention
from ninfer_core.kernels import gated_delta_decode as delta
from ninfer_core.kernels._order import Activation
from tests.bench.common import Record
from tests.bench.kernel_checks import CHECKS, LIMITS, faults
from tests.bench.kernel_inputs import DEVICE, graph_time, read_bandwidth, relative

HEADS, KV_HEADS = 16, 2
KEY_HEADS, VALUE_HEADS = 16, 32
CONTEXTS = (1_024, 7_680, 130_048, 260_096)
SHAPES = ((1, 1), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1), (8, 4))
"""Sequences and rows of each."""
COLD = 150e6
"""Bytes that a graph goes over: more than any cache."""
MOST = 40e9
"""Bytes of pages that a case may take."""


class Attend:
    """One attention layer over `tokens` old tokens of `batch` sequences, as often as it takes to be cold."""

    def __init__(self, batch: int, rows: int, tokens: int) -> None:
        self.batch, self.rows, self.tokens = batch, rows, tokens
        own = -(-(tokens + rows) // 64)
        self.bytes = batch * own * 64 * 1056
        self.copies = max(1, min(24, round(COLD / self.bytes)))
        shape = (2, KV_HEADS, batch * own, 64)
        self.pages = [
            (
                torch.randint(-127, 128, (*shape, 256), dtype=torch.int8, device=DEVICE),
                (torch.rand(*shape, 4, device=DEVICE) * 0.02).half(),
            )
            for _ in range(self.copies)
        ]
        total = batch * rows
        self.table = torch.randperm(batch * own, device=DEVICE).int().view(batch, own)
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
        self.projected = torch.randn(total, 2 * (HEADS + KV_HEADS) * 256, device=DEVICE).bfloat16()
        self.gain = (torch.randn(256, device=DEVICE) * 0.1).bfloat16()
        angle = torch.rand(total, 32, device=DEVICE) * 6
        self.cos = torch.cat([angle.cos()] * 2, 1)
        self.sin = torch.cat([-angle.sin(), angle.sin()], 1)
        most = _tiles.most_splits(torch.device(DEVICE, 0), KV_HEADS)
        self.work = attention.AttentionWorkspace.empty(total, tokens + rows, HEADS, DEVICE, most)
        self.out = Activation.empty(total, HEADS * 256, 1, DEVICE)

    def split(self, copy: int = 0) -> None:
        """The first launch."""
        attention.attend_splits(
            self.projected, self.gain, self.gain, self.cos, self.sin, *self.pages[copy], self.table, self.lengths,
            self.work, heads=HEADS,
        )  # fmt: skip

    def combine(self, copy: int = 0) -> None:
        """The second launch."""
        attention.combine_splits(self.projected, self.lengths, self.work, self.out, heads=HEADS)

    def both(self, copy: int = 0) -> None:
        """Both launches."""
        self.split(copy)
        self.combine(copy)

    def error(self) -> float:
        """Relative error of the first and the last sequence against torch on the pages' values."""
        self.both()
        got = self.out.values(self.batch * self.rows).view(self.batch, self.rows, HEADS, 256)
        found = 0.0
        for b in {0, self.batch - 1}:
            codes, scales = (t[:, :, self.table[b].long()].flatten(2, 3) for t in self.pages[0])
            near = slice(b * self.rows, (b + 1) * self.rows)
            q, _, gate, _ = self.projected[near].float().view(self.rows, -1, 256).split([HEADS, KV_HEADS] * 2, 1)
            q = q * torch.rsqrt((q * q).mean(-1, keepdim=True) + 1e-6) * (1 + self.gain.float())
            turn = torch.cat([q[..., 32:64], q[..., :32]], -1)
            turned = q[..., :64] * self.cos[near, None] + turn * self.sin[near, None]
            q = torch.cat([turned, q[..., 64:]], -1)
            for head in range(HEADS):
                own = head // (HEADS // KV_HEADS)
                key, value = (
                    (codes[i, own].view(-1, 4, 64).float() * scales[i, own].float()[..., None]).flatten(1)
                    for i in range(2)
                )
                for row in range(self.rows):
                    seen = self.tokens + row + 1
                    weight = (key[:seen] @ q[row, head] / 16).softmax(0)
                    want = weight @ value[:seen] * torch.sigmoid(gate[row, head])
                    found = max(found, relative(got[b, row, head], want))
        return found

    def measure(self, bandwidth: float) -> dict:
        """Microseconds of a layer, and the floor."""
        entry: dict = {}
        for name in ("split", "combine", "both"):
            call = getattr(self, name)
            entry[f"{name} us"] = graph_time(lambda call=call: [call(i) for i in range(self.copies)], 7) / self.copies
        entry["floor us"] = self.batch * self.tokens * 1056 / bandwidth / 1e6
        return entry


class Mix:
    """One Gated DeltaNet layer for `batch` sequences, as often as it takes to be cold."""

    def __init__(self, batch: int, rows: int) -> None:
        self.batch, self.rows = batch, rows
        self.bytes = 2 * batch * VALUE_HEADS * 128 * 128 * 4
        self.copies = max(1, min(40, round(COLD / self.bytes)))
        self.state = delta.DeltaState.empty(batch * self.copies, KEY_HEADS, VALUE_HEADS, DEVICE)
        self.state.s.normal_(std=0.05)
        total, channels = batch * rows, (2 * KEY_HEADS + VALUE_HEADS) * 128
        self.projected = torch.randn(total, channels + VALUE_HEADS * 128, device=DEVICE).bfloat16()
        self.ab = torch.randn(total, 2 * VALUE_HEADS, device=DEVICE)
        self.taps = torch.randn(4, channels, device=DEVICE).bfloat16()
        self.a_log, self.bias = torch.randn(VALUE_HEADS, device=DEVICE) * 0.3, torch.randn(VALUE_HEADS, device=DEVICE)
        self.norm = torch.rand(128, device=DEVICE).bfloat16()
        self.slots = torch.arange(batch * self.copies, dtype=torch.int32, device=DEVICE).view(-1, batch)
        self.lengths = torch.full((batch,), 100, dtype=torch.int32, device=DEVICE)
        self.commits = torch.full((batch,), max(1, rows - 1), dtype=torch.int32, device=DEVICE)
        self.out = Activation.empty(total, VALUE_HEADS * 128, VALUE_HEADS * 4, DEVICE)

    def run(self, copy: int) -> None:
        """The launch."""
        delta.gated_delta(
            self.projected, self.ab, self.taps, self.a_log, self.bias, self.norm, self.state, self.slots[copy],
            self.lengths, self.commits, self.out,
        )  # fmt: skip

    def measure(self, bandwidth: float) -> dict:
        """Microseconds of a layer, and the floor."""
        took = graph_time(lambda: [self.run(i) for i in range(self.copies)], 7) / self.copies
        return {"us": took, "floor us": self.bytes / bandwidth / 1e6}


def main() -> int:
    """All cases, and the checks of both kernels; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--delta", action="store_true", help="Gated DeltaNet only")
    options = parser.parse_args()
    torch.manual_seed(0)
    record = Record(options.json, DEVICE)
    wrong = []
    for name in ("delta",) if options.delta else ("delta", "attention", "attention bf16"):
        found = CHECKS[name]()
        record.add(f"check {name}", found)
        wrong += [f"{name}: {fault}" for fault in faults(found)]
    bandwidth = read_bandwidth()
    record.add("read bandwidth TB/s", bandwidth)
    for batch, rows in SHAPES:
        case = Mix(batch, rows)
        record.add(f"delta, {batch} x {rows}", case.measure(bandwidth))
        del case
    if options.delta:
        record.add("faults", wrong)
        return int(bool(wrong))
    for tokens in CONTEXTS:
        for batch, rows in SHAPES:
            if batch * tokens * 1056 > MOST:
                continue
            case = Attend(batch, rows, tokens)
            entry = case.measure(bandwidth) | {"error": case.error()}
            record.add(f"attention, {tokens} tokens, {batch} x {rows}", entry)
            if not entry["error"] < LIMITS["int8"]:
                wrong.append(f"attention, {tokens} tokens, {batch} x {rows}: error {entry['error']:.3g}")
            del case
    record.add("faults", wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
