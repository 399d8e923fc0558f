"""Prefill at long contexts against the torch path in fp32, on random weights of two layers of the 35B's shape.

    python tests/tools/long_context.py [--chunk 8192] [--marks 8192,65536,131072,262144]

Needs one GPU. At every mark: relative errors of the hidden rows of the last chunk, the recurrent state, the keys and
values of all pages (INT8 in both), and the draft layer's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ninfer_core.config import ModelConfig
from ninfer_core.model.decoder import Decoder
from ninfer_core.model.fused_prefill import FusedPrefill
from ninfer_core.model.mtp import MTP
from ninfer_core.packed import random_packed, reference_weights
from ninfer_core.state import FusedState, State

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


@torch.inference_mode()
def main() -> None:
    """Run both paths to the last mark and print one JSON line a mark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--marks", default="8192,65536,131072,262144")
    options = parser.parse_args()
    marks = [int(m) for m in options.marks.split(",")]
    count, device, began = marks[-1], torch.device("cuda"), time.time()
    weights = random_packed(CONFIG, seed=0, device=device)
    reference = reference_weights(weights, CONFIG)
    generator = torch.Generator(device).manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (count,), device=device, generator=generator)
    pages = count // 64 + 3
    table = torch.randperm(pages, device=device, generator=generator)
    run = FusedPrefill(weights, CONFIG, rows=options.chunk, context=pages * 64)
    fused = FusedState(CONFIG, slots=2, pages=pages, device=device)
    plain = State(CONFIG, slots=2, pages=pages, max_draft=0, device=device)
    decoder, drafts = Decoder(reference, CONFIG), MTP(reference, CONFIG)
    for first in range(0, count, options.chunk):
        part = tokens[first : first + options.chunk]
        hidden = run.chunk(fused, part, 1, first, table)
        run.fill_drafts(fused, part, hidden, first, table)
        rows = []
        for start in range(first, first + part.shape[0], REFERENCE_ROWS):
            piece = tokens[start : min(start + REFERENCE_ROWS, first + part.shape[0])]
            rows.append(decoder.prefill(plain, piece, 1, start, table))
            drafts.prefill(plain, piece, rows[-1], start, table)
        end = first + part.shape[0]
        if end in marks:
            used = table[: end // 64]
            line = {"tokens": end, "hidden": relative(hidden, torch.cat(rows))}
            line["last row"] = relative(hidden[-1], rows[-1][-1])
            line["state"] = relative(fused.gdn[0].s[1].transpose(1, 2), plain.gdn[0].s[1])
            for name, a, b in (("trunk", fused.kv[0], plain.kv[0]), ("draft", fused.mtp_kv[0], plain.mtp_kv[0])):
                for half, kind in enumerate(("keys", "values")):
                    line[f"{name} {kind}"] = relative(values(a, used, half), values(b, used, half))
            print(json.dumps(line | {"seconds": round(time.time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
