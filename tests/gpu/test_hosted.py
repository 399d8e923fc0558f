"""The host tier on a GPU: copies on a stream of their own, beside running work, come back bit for bit."""

from __future__ import annotations

import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from ninfer_core import store
from ninfer_core.artifact import Artifact
from ninfer_core.engine import Engine
from ninfer_core.hosted import HostState
from ninfer_core.state import FusedState
from ninfer_core.types import Request, Sampling

PAGES, SLOTS = 200, 3


def held(state: FusedState, slot: int, pages: list[int]) -> list[torch.Tensor]:
    parts = [t[:, slot].clone() for t in state._slot_tensors]
    return parts + [t[:, :, :, pages].clone() for t in (state.kv_codes, state.kv_scales)]


def test_copies_do_not_mix_with_what_runs_before_and_behind_them() -> None:
    """Writes to the same pages are queued before and behind every copy, without waiting on the host."""
    with Artifact.open(store.resolve("demo")) as artifact:
        state = FusedState(artifact.config, slots=SLOTS, pages=PAGES, max_draft=3)
    host = HostState(state, 600)
    pages, slot = list(range(0, 180, 2)), 1
    blocks = list(range(host.state_blocks, host.state_blocks + len(pages)))
    big = torch.randn(4096, 4096, device="cuda")
    try:
        for turn in range(5):
            for tensor in state._slot_tensors:
                tensor[:, slot].normal_()
            state.kv_codes.random_(-100, 100)
            state.kv_scales.normal_()
            before = held(state, slot, pages)
            for _ in range(20):
                big = (big @ big).tanh()
            state.kv_codes[:, :, :, pages] += 1  # the last write: what must be stored
            before[-2] = before[-2] + 1
            row, ticket = host.store(slot, range(host.state_blocks), pages, blocks, big[:1])
            want = big[:1].clone()
            state.kv_codes.zero_()  # the pages have a new owner at once
            state.kv_scales.zero_()
            for tensor in state._slot_tensors:
                tensor.zero_()
            end = time.monotonic() + 60
            while not ticket.query():
                assert time.monotonic() < end
            targets = list(range(1, 181, 2))
            back = host.restore(range(host.state_blocks), 2, blocks, targets, row)
            after = held(state, 2, targets)
            assert torch.equal(back, want), turn
            for a, b in zip(before, after, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), turn
    finally:
        torch.cuda.synchronize()
        host.free()


def test_outputs_from_the_host_are_those_of_a_cold_run() -> None:
    def text(n: int, seed: int) -> tuple[int, ...]:
        return tuple((i * i * 31 + i * seed + seed * seed * 7) % 250 for i in range(n))

    def ask(engine: Engine, prompt: tuple[int, ...], seed: int):
        law = Sampling(temperature=1.0, top_k=20, seed=seed)
        result = engine.submit(Request(prompt=prompt, sampling=law, max_tokens=12, ignore_eos=True, logprobs=1)).result(
            120
        )
        return [lp.token_id for lp in result.logprobs], result.usage

    options = {"device": "cuda", "max_sequences": 1, "context_length": 640, "prefill_chunk": 64, "draft_tokens": 3}
    prompts = [text(400, s) for s in (1, 2, 3, 4)]
    prompts += [(*p, *text(30, 9)) for p in prompts]
    with Engine.load("demo", prefix_cache=False, **options) as engine:
        cold = [ask(engine, p, i)[0] for i, p in enumerate(prompts)]
    cached = []
    small = {"checkpoints": 1, "prefix_cache": 64, "cache_answers": False}
    with Engine.load("demo", host_cache_gb=0.5, **small, **options) as engine:
        for i, prompt in enumerate(prompts):
            tokens, usage = ask(engine, prompt, i)
            assert tokens == cold[i], i
            cached.append(usage.cached_tokens)
        assert engine.stats()["host_restored"] >= 3
    assert min(cached[4:]) >= 320
