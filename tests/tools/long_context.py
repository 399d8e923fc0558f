"""Prefill at long contexts against the torch path in fp32, on random weights of two layers of the 35B's shape.

    python -m tests.tools.long_context [--chunk 8192] [--marks 8192,65536,131072,262144]

Needs one GPU. At every mark: relative errors of the hidden rows of the last chunk, the recurrent state, the keys and
values of all pages (INT8 in both), and the draft layer's; and of a round of decoding behind it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ninfer_core.config import ModelConfig
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.fused import FusedDecoder
from ninfer_core.model.fused_prefill import FusedPrefill
from ninfer_core.model.mtp import MTP
from ninfer_core.packed import random_packed, reference_weights
from ninfer_core.state import FusedState, State
from tests.bench.common import Record, config_of, device_of, parser_of, recipe_of

CONFIG = ModelConfig(
    model_id="", hidden_size=2048, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"),
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=8192, max_position_embeddings=262144,
    intermediate_size=1024,
)  # fmt: skip
REFERENCE_ROWS = 2048
"""Rows of a chunk of the torch path."""


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp32 sums of fp32 values."""
    return ((out.float() - ref.float()).norm() / ref.float().norm()).item()


def values(kv, pages: torch.Tensor, half: int) -> torch.Tensor:
    """Keys (0) or values (1) of the pages, opened."""
    codes, scales = kv.codes[half].index_select(1, pages), kv.scales[half].index_select(1, pages)
    return codes.float().unflatten(-1, (-1, 64)) * scales.float()[..., None]


class Both:
    """The same random model on both paths, with the state of one sequence."""

    def __init__(self, count: int, chunk: int, tiny: bool, device: str) -> None:
        self.config = config = config_of("27b", True) if tiny else CONFIG
        weights = random_packed(config, seed=0, device=device, recipe=recipe_of(tiny))
        reference = reference_weights(weights, config)
        generator, pages = torch.Generator(device).manual_seed(1), count // 64 + 3
        self.tokens = torch.randint(0, config.vocab_size, (count + 1,), device=device, generator=generator)
        self.table = torch.randperm(pages, device=device, generator=generator)
        self.run = FusedPrefill(weights, config, rows=chunk, context=pages * 64)
        self.rounds = FusedDecoder(weights, config, context=pages * 64, chunks=self.run)
        self.fused = FusedState(config, slots=2, pages=pages, device=device)
        self.plain = State(config, slots=2, pages=pages, max_draft=0, device=device)
        self.decoder, self.drafts = Decoder(reference, config), MTP(reference, config)

    def read(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a chunk on both paths; the hidden rows of both."""
        part = self.tokens[first : first + count]
        hidden = self.run.begin(self.fused, part, 1, first, self.table).finish()
        self.run.fill_drafts(self.fused, part, hidden, first, self.table)
        rows = []
        for start in range(first, first + count, REFERENCE_ROWS):
            piece = self.tokens[start : min(start + REFERENCE_ROWS, first + count)]
            rows.append(self.decoder.prefill(self.plain, piece, 1, start, self.table))
            self.drafts.prefill(self.plain, piece, rows[-1], start, self.table)
        return hidden, torch.cat(rows)

    def next_row(self, end: int) -> float:
        """The error of one row of decoding behind `end` tokens; the state of neither path keeps it."""
        token, place = self.tokens[end : end + 1].view(1, 1), ([1], [end], [0])
        got, want = (
            decoder.verify(state, token, *place, self.table[None], [0])
            for decoder, state in ((self.rounds, self.fused), (self.decoder, self.plain))
        )
        return relative(got, want)


def errors(both: Both, end: int, hidden: torch.Tensor, rows: torch.Tensor) -> dict[str, Any]:
    """Relative errors behind `end` tokens."""
    used = both.table[: -(-end // 64)]
    found: dict[str, Any] = {"hidden": relative(hidden, rows), "last row": relative(hidden[-1], rows[-1])}
    found["state"] = relative(both.fused.gdn[0].s[1].transpose(1, 2), both.plain.gdn[0].s[1])
    pairs = (("trunk", both.fused.kv[0], both.plain.kv[0]), ("draft", both.fused.mtp_kv[0], both.plain.mtp_kv[0]))
    for name, a, b in pairs:
        for half, kind in enumerate(("keys", "values")):
            found[f"{name} {kind}"] = relative(values(a, used, half), values(b, used, half))
    found["next row"] = both.next_row(end)
    return found


@torch.inference_mode()
def main() -> int:
    """Run both paths to the last mark; errors at each."""
    parser = parser_of(__doc__)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--marks", default="8192,65536,131072,262144")
    options = parser.parse_args()
    device = device_of(options)
    marks = [4, 6] if options.tiny else [int(m) for m in options.marks.split(",")]
    chunk = 4 if options.tiny else options.chunk
    record = Record(options.json, device)
    both = Both(marks[-1], chunk, options.tiny, device)
    for first in range(0, marks[-1], chunk):
        count = min(chunk, marks[-1] - first)
        hidden, rows = both.read(first, count)
        if first + count in marks:
            record.add(f"{first + count} tokens", errors(both, first + count, hidden, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
