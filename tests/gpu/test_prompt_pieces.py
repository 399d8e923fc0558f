"""Prompt chunks in pieces on a GPU: a stream beside a long prompt, both with the tokens they have alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from ninfer_core import store
from ninfer_core.artifact import Artifact
from ninfer_core.engine import Engine
from ninfer_core.model import fused_prefill
from ninfer_core.model.fused import FusedDecoder, FusedMTP
from ninfer_core.model.fused_prefill import FusedPrefill
from ninfer_core.packed import load_packed
from ninfer_core.runtime.handle import RequestHandle
from ninfer_core.state import FusedState
from ninfer_core.types import Request, Sampling

CHUNK, LONG = 2048, 3500


def text(n: int, seed: int) -> tuple[int, ...]:
    return tuple((i * i * 31 + i * seed + seed * seed * 7) % 5000 for i in range(n))


def asked(n: int, seed: int, tokens: int, **fields: object) -> Request:
    law = Sampling(temperature=1.0, top_k=20, top_p=0.95, min_p=0.0, seed=seed)
    return Request(prompt=text(n, seed), sampling=law, max_tokens=tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Watched:
    """An engine whose chunks take one layer between two rounds, and the tokens of its requests, also those without text."""

    def __init__(self, drafts: int, **options: object) -> None:
        self.engine = Engine.load(
            "demo",
            device="cuda",
            draft_tokens=drafts,
            max_sequences=3,
            context_length=4096,
            prefill_chunk=CHUNK,
            **options,
        )  # type: ignore[arg-type]
        runner, self.tokens, self.stops = self.engine._runner, {}, 0
        self.reached, self.opened = threading.Event(), threading.Event()
        close, prefill, round_ = runner.close, runner.prefill, runner.round

        def noted(sequence):  # type: ignore[no-untyped-def]
            self.tokens[sequence.session.handle.id] = sequence.tokens[sequence.prompt_tokens :]
            close(sequence)

        def counted(sequence, room):  # type: ignore[no-untyped-def]
            over = prefill(sequence, room)
            self.stops += not over
            return over

        def held(sequences):  # type: ignore[no-untyped-def]
            self.reached.set()
            assert self.opened.wait(60)
            return round_(sequences)

        self.opened.set()
        runner.close, runner.prefill, runner.round = noted, counted, held  # type: ignore[method-assign]
        runner.piece_seconds = lambda decoding: 0.0  # type: ignore[method-assign]

    def made(self, handle: RequestHandle) -> list[int]:
        handle.wait(120)
        until(lambda: handle.id in self.tokens)
        return self.tokens[handle.id]


@pytest.mark.parametrize(("rows", "block"), [(CHUNK, fused_prefill.BLOCK), (2 * CHUNK, CHUNK)])
def test_a_chunk_between_its_steps_bears_rounds_and_draft_rows_of_others(
    rows: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels alone, steps that are layers or blocks of one: bit for bit a chunk that ran through."""
    monkeypatch.setattr(fused_prefill, "BLOCK", block)
    with Artifact.open(store.resolve("demo")) as artifact:
        weights, config = load_packed(artifact, "cuda"), artifact.config
    chunks = FusedPrefill(weights, config, rows=rows, context=4096)
    decoder = FusedDecoder(weights, config, context=4096, chunks=chunks)
    drafts = FusedMTP(decoder)
    tokens = torch.tensor(text(LONG, 1), device="cuda")
    table, other = torch.randperm(60, device="cuda"), torch.arange(60, 64, device="cuda")
    found = []
    for stops in (False, True):
        state = FusedState(config, slots=3, pages=64, max_draft=5)
        before = decoder.prefill(state, tokens[:100], 2, 0, other)
        hidden, start = [], 0
        for part in tokens.split(rows):
            chunk = chunks.begin(state, part, 1, start, table)
            while stops and chunk.left:
                chunk.advance()
                decoder.verify(state, tokens[None, 100:104], [2], [100], [0], other[None], [0])
                drafts.prefill(state, tokens[1:100], before[:-1], 0, other)
            hidden.append(chunk.finish())
            drafts.prefill(state, part, hidden[-1], start, table)
            start += part.shape[0]
        kept = [layer.s[1].clone() for layer in state.gdn] + [layer.conv[1].clone() for layer in state.gdn]
        kept += [t[:, :, :, table[: -(-LONG // 64)]].clone() for t in state.page_tensors]
        found.append([torch.cat(hidden), *kept])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stream_beside_a_long_prompt_is_what_both_are_alone(drafts: int) -> None:
    requests = [asked(40, 1, 600), asked(LONG, 2, 24), asked(LONG - 700, 3, 24)]
    watched = Watched(drafts, prefix_cache=False, adaptive_drafts=drafts > 0)
    with watched.engine as engine:
        alone = [watched.made(engine.submit(request)) for request in requests]
        assert watched.stops == 0, "nobody waited"
        watched.opened.clear()
        watched.reached.clear()
        stream = engine.submit(requests[0])
        assert watched.reached.wait(60)
        others = [engine.submit(request) for request in requests[1:]]
        watched.opened.set()
        assert [watched.made(handle) for handle in (stream, *others)] == alone
        assert watched.stops > 10 and engine.stats()["failed"] == 0


def test_who_leaves_between_the_layers_leaves_no_trace() -> None:
    """Cancelled within a chunk; whoever has its slot and pages then, and whoever asks the same, gets the right tokens."""
    watched = Watched(3, adaptive_drafts=False)
    with watched.engine as engine:
        want = watched.made(engine.submit(asked(LONG, 5, 24)))
        before = engine.stats()
        stream = engine.submit(asked(40, 1, 3000))
        for number in range(4):
            stops = watched.stops
            doomed = engine.submit(asked(LONG, 100 + number, 24))
            until(lambda stops=stops, number=number: watched.stops > stops + number)
            doomed.cancel()
            doomed.wait(60)
            assert not doomed.error
        assert watched.made(engine.submit(asked(LONG, 5, 24))) == want
        stream.cancel()
        stream.wait(60)
        until(lambda: engine.stats()["running"] == 0)
        after = engine.stats()
        assert (after["pages_free"], after["slots_free"]) == (before["pages_free"], before["slots_free"])
        assert after["failed"] == 0 and engine.health()["status"] == "ok"
