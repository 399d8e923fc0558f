"""The demo model by every route to its logits: `python -m tests.bench.agreement [--device cpu]`.

A conversation of its own answers, as long as its context, scored token by token: the torch path in fp32 in one piece
is the reference for prompts in chunks, for single steps, and on a GPU for the kernels of rounds (int8 activations) and
of prompts (bf16): agreement of the likeliest token, KL, relative error. Then the acceptance of its drafts by position
on both devices, and the longest prompt split where it was read before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ninfer_core import store
from ninfer_core.artifact import Artifact
from ninfer_core.config import ModelConfig
from ninfer_core.engine import Engine
from ninfer_core.model.decoder import Decoder
from ninfer_core.state import FusedState, State
from ninfer_core.types import Message, Request, Sampling
from ninfer_core.weights import load_weights
from tests.bench.common import Record, compare, parser_of

QUESTIONS = (
    "Tell me about the sea.", "What is two plus three?", "Write a short list of colours.", "Who are you?",
    "Count from one to ten.", "Say hello in three ways.", "Why is the sky blue?", "Name a fruit.",
    "What do you do when it rains?", "Write a story about a cat.", "What is a poem?", "How do I make tea?",
)  # fmt: skip
GREEDY = Sampling(temperature=0.0)
CHUNKS = (512, 1024, 4096)
TOP1, KL = 0.995, 1e-3
"""What every way of reading a prompt must reach against the reference."""


def conversation(engine: Engine, limit: int) -> list[int]:
    """Tokens of questions and the model's own greedy answers, at most `limit`."""
    messages: list[Message] = []
    found: list[int] = []
    while True:
        messages.append(Message("user", QUESTIONS[len(messages) // 2 % len(QUESTIONS)]))
        asked = Request(tuple(messages), max_tokens=120, thinking=False, sampling=GREEDY)
        ids = list(engine.frontend.prepare(asked).token_ids)
        if len(ids) + 140 > limit:
            return found
        found = ids
        messages.append(Message("assistant", engine.submit(asked).result(600).text or "."))


class Routes:
    """The demo model's logits `[T, V]` of a text, by every route of a device."""

    def __init__(self, ids: Sequence[int], device: str, addressable: int) -> None:
        self.ids, self.device, self.addressable = torch.tensor(ids, device=device), device, addressable
        self.table = torch.arange(-(-len(ids) // 64) + 1, device=device)
        with Artifact.open(store.resolve("demo")) as artifact:
            self.config: ModelConfig = artifact.config
            self.weights = load_weights(artifact, device, torch.float32)
            if device == "cuda":
                from ninfer_core.packed import load_packed

                self.packed = load_packed(artifact, device)
        self.decoder = Decoder(self.weights, self.config)

    def _state(self) -> State:
        return State(self.config, slots=1, pages=len(self.table), max_draft=0, device=self.device)

    def _cut(self, logits: list[Tensor]) -> Tensor:
        return torch.cat(logits)[:, : self.addressable].float().cpu()

    def chunks(self, size: int) -> Tensor:
        """The torch path, `size` rows a piece."""
        state, found = self._state(), []
        for start in range(0, len(self.ids), size):
            part = self.ids[start : start + size]
            hidden = self.decoder.prefill(state, part, 0, start, self.table)
            found += [self.decoder.logits(rows) for rows in hidden.split(512)]
        return self._cut(found)

    def steps(self) -> Tensor:
        """The torch path, one row a call, as in decoding."""
        state, found = self._state(), []
        state.clear_slot(0)
        for i, token in enumerate(self.ids):
            hidden = self.decoder.verify(state, token.view(1, 1), [0], [i], [min(i, 1)], self.table[None], [0])
            found.append(self.decoder.logits(hidden[0]))
        return self._cut(found)

    def fused(self, size: int) -> Tensor:
        """The kernels: prompts in chunks of `size`, or with 0 the rows of rounds."""
        from ninfer_core.model.fused import FusedDecoder
        from ninfer_core.model.fused_prefill import FusedPrefill

        pages, found = len(self.table), []
        reader = FusedPrefill(self.packed, self.config, rows=size, context=pages * 64) if size else None
        decoder = FusedDecoder(self.packed, self.config, context=pages * 64, chunks=reader)
        state = FusedState(self.config, slots=1, pages=pages, max_draft=3, device=self.device)
        for start in range(0, len(self.ids), size or len(self.ids)):
            part = self.ids[start : start + (size or len(self.ids))]
            hidden = decoder.prefill(state, part, 0, start, self.table)
            found += [decoder.logits(rows) for rows in hidden.split(512)]
        return self._cut(found)


def judged(found: dict[str, float]) -> dict[str, Any]:
    """With whether both bars are met."""
    return {**found, "passes": found["top1"] >= TOP1 and found["kl"] <= KL}


def acceptance(device: str, questions: Sequence[str], tokens: int) -> list[float]:
    """Share of the drafts at each position that were right."""
    with Engine.load("demo", device=device, draft_tokens=3, adaptive_drafts=False, prefix_cache=False) as engine:
        rounds, right = 0, [0, 0, 0]
        for text in questions:
            asked = Request((Message("user", text),), max_tokens=tokens, thinking=False, sampling=GREEDY)
            usage = engine.submit(asked).result(600).usage
            rounds += usage.rounds
            right = [a + b for a, b in zip(right, [*usage.accepted_by_position, 0, 0, 0], strict=False)]
    return [count / max(1, rounds) for count in right]


def main() -> int:
    """Every route, then the drafts."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=4000, help="of the conversation")
    options: argparse.Namespace = parser.parse_args()
    device = "cpu" if options.tiny else options.device
    length = min(options.tokens, 400) if options.tiny else options.tokens
    record = Record(options.json, device)
    with Engine.load("demo", device="cpu", prefix_cache=True) as engine:
        ids, addressable = conversation(engine, length), engine.tokenizer.addressable
    record.add("tokens", len(ids))
    routes = Routes(ids, device, addressable)
    with torch.inference_mode():
        want = routes.chunks(8192)
        for size in CHUNKS:
            record.add(f"torch, chunks of {size} against one piece", judged(compare(routes.chunks(size), want)))
        record.add("torch, single steps against one piece", judged(compare(routes.steps(), want)))
        if device == "cuda":
            whole = routes.fused(4096)
            record.add("kernels of prompts against torch", judged(compare(whole, want)))
            for size in CHUNKS:
                record.add(f"kernels, chunks of {size} against one piece", judged(compare(routes.fused(size), whole)))
            rows = routes.fused(0)
            record.add("kernels of rounds (int8 activations) against torch", judged(compare(rows, want)))
            record.add("kernels of rounds against those of prompts", judged(compare(rows, whole)))
    asked = QUESTIONS[:2] if options.tiny else QUESTIONS
    for place in ("cpu", "cuda") if device == "cuda" else ("cpu",):
        record.add(f"drafts accepted by position, {place}", acceptance(place, asked, 24 if options.tiny else 160))
    return 0


if __name__ == "__main__":
    sys.exit(main())
