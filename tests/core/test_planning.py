"""Sizes before anything is allocated: equal to what is allocated; a plan fits its budget; a refusal says what to change."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core import footprint
from ninfer_core.artifact import Artifact
from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B, config_from_dict
from ninfer_core.engine import Engine
from ninfer_core.errors import ContentError, InvalidRequestError, MemoryPlanError, UnsupportedError
from ninfer_core.footprint import chunk_for, fused_footprint, reference_footprint
from ninfer_core.inventory import inventory
from ninfer_core.model.fused import workspace_bytes
from ninfer_core.model.fused_prefill import prefill_bytes
from ninfer_core.runtime.options import EngineOptions
from ninfer_core.runtime.planning import VISION_WORKSPACE, budget_of, choose_chunk, free_memory, plan
from ninfer_core.state import FusedState, State
from ninfer_core.store import demo_path
from ninfer_core.weights import load_weights
from tests.core.tiny import tiny_artifact, tiny_config

CARD = 31.5e9
"""Bytes that a 32 GB card gives to one program, with room for the driver's context."""

CONFIGS = {"27b": QWEN36_27B, "35b-a3b": QWEN36_35B_A3B}


@pytest.mark.parametrize("moe", [True, False])
@pytest.mark.parametrize("kv", ["int8", "bf16", "fp32"])
def test_state_is_as_large_as_told(moe, kv):
    config = config_from_dict(tiny_config(moe), "ninfer-demo")
    for drafts in (0, 3, 5):
        state = State(config, slots=2, pages=3, kv_dtype=kv, max_draft=drafts)
        assert state.kv_bytes_per_page == footprint.page_bytes(config, kv)
        assert state.bytes_per_slot == footprint.slot_bytes(config, drafts)
    for kv in ("int8", "bf16"):
        fused = FusedState(config, slots=2, pages=3, kv_dtype=kv, device="cpu")
        assert fused.kv_bytes_per_page == footprint.page_bytes(config, kv)
    assert fused.bytes_per_slot == footprint.fused_slot_bytes(config)


@pytest.mark.parametrize("model", ["demo", "moe", "dense"])
def test_reference_weights_are_as_large_as_told(model):
    path = demo_path() if model == "demo" else tiny_artifact(model == "moe")
    with Artifact.open(path) as artifact:
        objects = {name: (info.shape, info.format) for name, info in artifact.tensors.items()}
        for dtype, mtp, vision in (
            (torch.float32, True, False),
            (torch.bfloat16, False, artifact.config.vision is not None),
        ):
            real = load_weights(artifact, dtype=dtype, mtp=mtp, vision=vision).nbytes
            told = footprint.reference_bytes(objects, dtype.itemsize, mtp=mtp, vision=vision)
            assert abs(told - real) < 0.01 * real + 65536, (dtype, told, real)


@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_are_as_large_as_described(name):
    """Of the published models, at both ends of the context; an engine's plan asks the paths for the exact sizes."""
    config = CONFIGS[name]
    for context in (4_096, 262_144):
        described, real = footprint.decode_workspace_bytes(config, context), workspace_bytes(config, context)
        assert abs(real - described) < 0.1 * real + 50e6, (context, real, described)
        for chunk in footprint.CHUNKS:
            described, real = (of(config, chunk, context) for of in (footprint.prefill_workspace_bytes, prefill_bytes))
            assert abs(real - described) < 1e5, (context, chunk, real, described)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_longest_chunk_that_costs_no_context(name):
    """With the memory a card leaves, and in what an engine plans; a plan says which it is."""
    config, objects = CONFIGS[name], inventory(CONFIGS[name])

    def of(chunk):
        return fused_footprint(config, objects, chunk=chunk)

    def chosen(budget, **options):
        made = EngineOptions(model=name, max_sequences=1, **options)
        foot = choose_chunk(config, made, of, budget=int(budget))
        return foot.chunk, plan(config, made, foot, budget=int(budget))

    most = footprint.chunks_of(config)[0]
    assert chosen(CARD + 9e9)[0] == most == (16_384 if config.is_moe else 8192)
    for gb in range(18, 40):
        chunk, budget = chunk_for(config, of, int(gb * 1e9), 262_144, 2), int(gb * 1e9)
        best = of(2048).longest(budget, 262_144, 2)
        assert of(chunk).longest(budget, 262_144, 2) == best
        longer = [c for c in footprint.chunks_of(config) if c > chunk]
        assert all(of(c).longest(budget, 262_144, 2) < best or not best for c in longer)
    tight = of(2048).total(262_144, 5) + 1
    chunk, made = chosen(tight)
    assert (chunk, made.context_length, made.checkpoints) == (2048, 262_144, 4)
    assert "workspace of a prompt chunk of 2,048 tokens" in made.table() and made.nbytes <= tight
    assert chosen(tight, context_length=65_536)[0] == most
    assert chosen(tight, prefill_chunk=512)[0] == 512
    assert chosen(of(4096).total(262_144, 5) + 1)[0] == 4096


@pytest.mark.parametrize("name", CONFIGS)
def test_the_full_context_fits_a_card_of_32_gb(name):
    """262,144 tokens of INT8 KV and the draft layer; also the longest context of smaller and larger cards."""
    config = CONFIGS[name]
    foot = fused_footprint(config, inventory(config), drafts=3)
    assert config.max_position_embeddings == 262_144
    assert foot.total(262_144, slots=1) < CARD
    assert foot.total(262_144, slots=4) < CARD
    options = EngineOptions(model=name, max_sequences=1)
    made = plan(config, options, foot, budget=int(CARD))
    assert made.context_length == 262_144 and made.nbytes <= CARD
    assert made.checkpoints >= 4
    assert foot.longest(int(16e9), 262_144) == 0
    assert foot.longest(int(80e9), 262_144) == 262_144
    smaller = foot.longest(int(23e9), 262_144)
    assert 0 < smaller < 262_144 and foot.total(smaller) <= 23e9 < foot.total(smaller + 64)
    with pytest.raises(UnsupportedError, match="int8 or bf16") as caught:
        fused_footprint(config, inventory(config), kv_cache="fp32")
    assert caught.value.param == "kv_cache"


def tiny_foot(drafts=3):
    config = config_from_dict(tiny_config(context=4096), "ninfer-demo")
    return config, fused_footprint(config, inventory(config, vision=False), drafts=drafts)


@settings(max_examples=200, deadline=None)
@given(
    spare=st.integers(0, 60_000_000),
    slots=st.integers(1, 9),
    context=st.one_of(st.just("auto"), st.integers(1, 4096)),
    cache=st.one_of(st.booleans(), st.integers(0, 3000)),
    checkpoints=st.one_of(st.just("auto"), st.integers(0, 40)),
    drafts=st.integers(0, 5),
    vision=st.sampled_from([0, 3_000_000]),
)
def test_a_plan_fits_its_budget(spare, slots, context, cache, checkpoints, drafts, vision):
    config, foot = tiny_foot(drafts)
    options = EngineOptions(
        max_sequences=slots, context_length=context, prefix_cache=cache, checkpoints=checkpoints, draft_tokens=drafts
    )
    budget = foot.weights + spare
    try:
        made = plan(config, options, foot, budget=budget, vision_bytes=vision)
    except MemoryPlanError as error:
        longest = re.search(r"fits is ([\d,]+) tokens", str(error))
        if context != "auto" and longest:  # what the refusal offers works, one token more does not
            fits = int(longest[1].replace(",", ""))
            assert fits < context
            for tokens, works in ((fits, True), (fits + 1, False)):
                again = EngineOptions(
                    max_sequences=slots, context_length=tokens, prefix_cache=cache, checkpoints=checkpoints,
                    draft_tokens=drafts,
                )  # fmt: skip
                if works:
                    plan(config, again, foot, budget=budget, vision_bytes=vision)
                else:
                    with pytest.raises(MemoryPlanError):
                        plan(config, again, foot, budget=budget, vision_bytes=vision)
        assert foot.total(64, slots) + vision > budget or context != "auto" or checkpoints != "auto"
        return
    assert made.nbytes <= budget and made.slots == slots
    assert made.workspaces[VISION_WORKSPACE] == vision
    need = foot.pages(made.context_length)
    assert need <= made.pages <= need * slots + (need if cache is True else -(-int(cache) // 64))
    if not cache:
        assert made.checkpoints == 0
    elif checkpoints != "auto":
        assert made.checkpoints == checkpoints
    if context == "auto":
        more = foot.total(made.context_length + 1, slots + made.checkpoints) + vision
        assert made.context_length == 4096 or more > budget or made.checkpoints > 4
    else:
        assert made.context_length == context


def test_a_refusal_names_sizes_settings_and_a_way_out():
    config, foot = tiny_foot()
    options = EngineOptions(context_length=4096, checkpoints=2)
    with pytest.raises(MemoryPlanError) as caught:
        plan(config, options, foot, budget=foot.total(2000, 6))
    text = str(caught.value)
    for setting in ("draft_tokens", "max_sequences", "checkpoints", "context_length", "memory"):
        assert setting in text, setting
    assert "longest context that fits is 2,0" in text and "workspace of a round" in text
    with pytest.raises(MemoryPlanError, match="no context fits"):
        plan(config, options, foot, budget=foot.weights)
    with pytest.raises(InvalidRequestError, match="trained for at most 4096") as refused:
        plan(config, EngineOptions(context_length=4097), foot, budget=1 << 40)
    assert refused.value.param == "context_length"


def test_the_budget_is_what_is_free_or_what_was_asked_for():
    device = torch.device("cpu")
    free = free_memory(device)
    assert 0 < budget_of(EngineOptions(), device) < free
    assert budget_of(EngineOptions(memory=12345), device) == 12345
    with pytest.raises(MemoryPlanError, match="lower memory"):
        budget_of(EngineOptions(memory=1 << 60), device)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read():
    config = QWEN36_35B_A3B
    foot = reference_footprint(config, inventory(config), itemsize=4, kv_cache="int8", drafts=3, chunk=256)
    assert foot.weights > 130e9
    with pytest.raises(MemoryPlanError, match="weights"):
        plan(config, EngineOptions(), foot, budget=64 << 30)


def test_progress_and_digests_while_loading(tmp_path):
    path = shutil.copytree(tiny_artifact(), tmp_path / "tiny")
    seen = []
    options = {"device": "cpu", "threads": 1}
    with Engine.load(str(path), verify=True, progress=lambda *pair: seen.append(pair), **options) as engine:
        assert engine.state == "ready"
    assert len(seen) > 20 and all(0 <= done <= total for done, total in seen) and seen[-1][0] == seen[-1][1]
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ContentError, match="is damaged or was edited: SHA-256"):
        Engine.load(str(path), verify=True, **options)
    Engine.load(str(path), **options).close()
    with pytest.raises(InvalidRequestError, match="verify"):
        Engine.load(str(path), verify="yes", **options)
