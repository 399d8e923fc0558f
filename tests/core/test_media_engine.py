"""Images and videos through the engine: positions, features across chunks, drafts, the prefix cache, faults."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_support import assert_free

from ninfer_core.engine import Engine
from ninfer_core.errors import ContextOverflowError, InvalidRequestError, MediaError, UnsupportedError
from ninfer_core.model.vision import VisionTower
from ninfer_core.runtime import media as module
from ninfer_core.runtime.media import positions_of
from ninfer_core.types import Image, Message, Request, Text, TextDelta, Tool, ToolCall, Video
from tests.cases import tiny_config, tiny_dict
from tests.media_files import clip, drawn, encoded, frames
from tests.support import reference_model

pytest.importorskip("PIL.Image")
PICTURE = Image(data=encoded(drawn(256, 256), "PNG"))
OTHER = Image(data=encoded(drawn(255, 256), "PNG"))
MOVIE = Video(data=clip(frames(8, 128, 192), 4, codec="mjpeg"))
QUESTION = "What is in the picture?"


def ask(*parts, **fields):
    content = tuple(Text(part) if isinstance(part, str) else part for part in parts)
    return Request((Message("user", content),), **({"thinking": False, "max_tokens": 24} | fields))


@pytest.fixture(scope="module")
def engine():
    with Engine.load("demo", vision=True, prefill_chunk=64, max_sequences=4, adaptive_drafts=False) as made:
        yield made


@pytest.fixture
def begun(monkeypatch):
    """How often the tower began on a medium."""
    seen = []
    original = VisionTower.begin

    def begin(self, pixels, grid):
        seen.append(grid)
        return original(self, pixels, grid)

    monkeypatch.setattr(VisionTower, "begin", begin)
    return seen


# positions


def layout(*runs):
    """Token kinds, and media, of a list of: a number of text tokens, ("image", h, w) or ("video", t, h, w) in cells."""
    kinds, media, images, videos = [], [], [], []
    for run in runs:
        if isinstance(run, int):
            kinds += [0] * run
            continue
        name, *grid = run
        slices, (height, width) = (grid[0] if name == "video" else 1), grid[-2:]
        spans = []
        for number in range(slices):
            if number:
                kinds += [0] * 5  # a time and the markers between
            spans.append((len(kinds), len(kinds) + height * width))
            kinds += [1 if name == "image" else 2] * height * width
        patches = (slices, 2 * height, 2 * width)
        media.append(SimpleNamespace(media=SimpleNamespace(grid=patches), spans=tuple(spans)))
        (images if name == "image" else videos).append(list(patches))
    return torch.tensor(kinds), media, images, videos


@pytest.mark.parametrize(
    "runs",
    [
        (6, ("image", 2, 3), 5),
        (1, ("image", 4, 1), 2, ("image", 1, 6), 3),
        (3, ("video", 3, 2, 2), 4, ("image", 5, 5), 1),
        (2, ("video", 1, 1, 7), 9, ("video", 2, 3, 1), 2),
        (40,),
    ],
)
def test_positions_equal_transformers(runs):
    kinds, media, images, videos = layout(*runs)
    model = reference_model(tiny_dict("dense"))
    want, delta = model.model.get_rope_index(
        torch.zeros_like(kinds)[None],
        mm_token_type_ids=kinds[None],
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
    )
    got, shift = positions_of(len(kinds), media, tiny_config("dense").vision.spatial_merge_size)
    assert torch.equal(got, want[:, 0]) and shift == int(delta)


# answers


@pytest.mark.parametrize("options", [{"draft_tokens": 0}, {"prefill_chunk": 128}, {"draft_tokens": 5}])
def test_the_answer_depends_on_no_setting(engine, options):
    """Drafts, and chunks that cut an image elsewhere; each image longer than a chunk."""
    requests = [ask(PICTURE, QUESTION), ask("Look:", OTHER, "and", PICTURE, "What?"), ask(MOVIE, "What do you see?")]
    want = [engine.submit(request).result() for request in requests]
    settings = {"prefill_chunk": 64, "adaptive_drafts": False} | options
    with Engine.load("demo", vision=True, **settings) as other:
        handles = [other.submit(request) for request in requests]
        for handle, expected in zip(handles, want, strict=True):
            assert handle.result().text == expected.text
    assert len({completion.text for completion in want}) > 1


def test_tokens_are_counted_exactly(engine):
    shown = Message("tool", (Text("shot:"), PICTURE), tool_call_id="a")
    call = Message("assistant", "", tool_calls=(ToolCall("a", "screen", {}),))
    talk = (Message("user", "Look."), call, shown)
    tools = (Tool("screen", "Takes a picture of the screen."),)
    for request in (
        ask(PICTURE, QUESTION),
        ask(MOVIE, OTHER, "x"),
        Request(talk, tools=tools, thinking=False, max_tokens=4),
    ):
        completion = engine.submit(request).result()
        assert engine.count_tokens(request) == completion.usage.prompt_tokens > 64
    assert engine.render(Request(talk, tools=tools)).count("<|image_pad|>") == 1


def test_the_next_turn_does_not_encode_the_image_again(engine, begun):
    first = ask(Image(data=encoded(drawn(254, 256), "PNG")), QUESTION)
    answer = engine.submit(first).result()
    assert len(begun) == 1 and answer.usage.cached_tokens == 0
    follow = Request((*first.messages, answer.message, Message("user", "Again?")), thinking=False, max_tokens=8)
    second = engine.submit(follow).result()
    assert len(begun) == 1 and second.usage.cached_tokens > 64
    with Engine.load("demo", vision=True, prefill_chunk=64, prefix_cache=False) as fresh:
        assert fresh.submit(follow).result().text == second.text
    begun.clear()
    changed = ask(Image(data=encoded(drawn(253, 256), "PNG")), QUESTION)
    assert engine.submit(changed).result().usage.cached_tokens < 64, "another image of the same size is another prompt"
    assert len(begun) == 1


def test_streams_go_on_while_an_image_is_encoded(engine, monkeypatch):
    """The tower takes one block per step of the loop here; a stream gets tokens between them."""
    monkeypatch.setattr(module, "STEP", 1)
    encoding, between, counting = threading.Event(), [], threading.Event()
    original = module.PromptMedia.work

    def work(self, start, stop):
        encoding.set()
        made = original(self, start, stop)
        if not made:
            counting.set()
        return made

    monkeypatch.setattr(module.PromptMedia, "work", work)
    stream = engine.stream("Count from one to twenty.", thinking=False, max_tokens=60, ignore_eos=True)
    next(stream)
    handle = engine.submit(ask(Image(data=encoded(drawn(252, 256), "PNG")), QUESTION))
    assert encoding.wait(30)
    for event in stream:
        if isinstance(event, TextDelta) and encoding.is_set() and not counting.is_set():
            between.append(event)
    assert handle.result().text and between
    assert_free(engine)


def test_a_fault_in_a_shared_call_reads_the_images_again(engine, monkeypatch):
    requests = [ask(PICTURE, QUESTION, ignore_eos=True), ask(OTHER, QUESTION, ignore_eos=True)]
    want = [engine.submit(request).result().text for request in requests]
    original, failed = engine._runner._rounds.verify, []

    def verify(windows, *rest):
        if len(windows) > 1 and not failed:
            failed.append(len(windows))
            raise RuntimeError("made up")
        return original(windows, *rest)

    monkeypatch.setattr(engine._runner._rounds, "verify", verify)
    handles = [engine.submit(request) for request in requests]
    assert [handle.result().text for handle in handles] == want
    assert failed == [2]
    assert_free(engine)


# refusals


def test_refusals(engine):
    with pytest.raises(MediaError, match="not an image of a known format"):
        engine.submit(ask(Image(data=b"no"), "x"))
    with pytest.raises(InvalidRequestError, match="exactly one of data, path and url"):
        engine.submit(ask(Image(), "x"))
    with pytest.raises(ContextOverflowError):
        engine.submit(ask(*[PICTURE] * 70, "x"))
    with pytest.raises(InvalidRequestError, match="vision is 1; it must be true or false"):
        Engine.load("demo", vision=1)
    assert engine.submit(ask(PICTURE, QUESTION)).result().text


def test_without_the_option_there_is_no_tower_and_no_image():
    with Engine.load("demo", context_length=256) as blind:
        assert blind._runner._tower is None and blind.profile["image_inputs"] is False
        with pytest.raises(
            UnsupportedError, match=r"no vision tower is loaded.*vision=True .on the command line --vision"
        ):
            blind.submit(ask(PICTURE, "x"))
        assert blind.generate("Hello", thinking=False).text


def test_a_model_without_a_tower_says_so():
    from tiny import tiny_artifact

    with pytest.raises(InvalidRequestError, match="the model has no vision tower"):
        Engine.load(str(tiny_artifact()), vision=True)


def test_the_plan_keeps_room_for_the_tower(engine):
    assert "workspace of the vision tower" in engine.plan.table()
    tower = engine._runner._tower
    small, large = tower.workspace(64), tower.workspace(1 << 16)
    assert small < large
    pixels = SimpleNamespace(frames=np.zeros((1, 128, 128, 3), np.uint8), mean=(0.5,) * 3, std=(0.5,) * 3)
    encoding = tower.begin(pixels, (1, 8, 8))
    assert not encoding.advance(1) and encoding.advance(1)
    assert encoding.features.shape == (16, engine.config.hidden_size)


def test_large_media_go_through_the_wide_layers_in_tiles(engine, monkeypatch):
    from ninfer_core.model import vision

    tower = engine._runner._tower
    pixels = SimpleNamespace(frames=np.array(drawn(160, 192))[None], mean=(0.5,) * 3, std=(0.5,) * 3)
    whole = tower.begin(pixels, (1, 10, 12))
    assert whole.advance(1 << 40)
    monkeypatch.setattr(vision, "TILE", 32)  # 120 patch rows: the last tile is not full
    tiled = tower.begin(pixels, (1, 10, 12))
    assert tiled.advance(1 << 40)
    assert torch.allclose(tiled.features, whole.features, atol=1e-4, rtol=1e-4)


def test_the_plan_counts_the_tower_itself(engine):
    """On a GPU too, where its matrices lie opened in bf16 beside the packed text model."""
    from ninfer_core import store
    from ninfer_core.artifact import Artifact
    from ninfer_core.footprint import fused_footprint
    from ninfer_core.weights import load_tower

    with Artifact.open(store.demo_path()) as artifact:
        config, objects = artifact.config, {name: (i.shape, i.format) for name, i in artifact.tensors.items()}
        weights = load_tower(artifact, config.vision, "cpu", torch.bfloat16)
    linears = [weights.patch, weights.merger_fc1, weights.merger_fc2]
    norms = [weights.merger_norm]
    for block in weights.blocks:
        linears += [block.qkv, block.output, block.fc1, block.fc2]
        norms += [block.norm1, block.norm2]
    tensors = [t for part in linears for t in (part.dense, part.bias)]
    tensors += [t for part in norms for t in (part.weight, part.bias)] + [weights.position]
    seen, blind = (fused_footprint(config, objects, vision=vision).weights for vision in (True, False))
    assert seen - blind == sum(t.nbytes for t in tensors)


def test_a_step_counts_attention_too(engine):
    """A large image costs more a patch row than a small one: a step takes fewer of its blocks."""
    tower = engine._runner._tower
    depth, even = len(tower.weights.blocks), 2 * tower.config.hidden_size + tower.config.intermediate_size
    steps = {}
    for side in (8, 32):
        pixels = SimpleNamespace(
            frames=np.zeros((1, side * 16, side * 16, 3), np.uint8), mean=(0.5,) * 3, std=(0.5,) * 3
        )
        encoding = tower.begin(pixels, (1, side, side))
        steps[side] = 1
        while not encoding.advance(depth * side * side):
            steps[side] += 1
    assert 64 / even < 1 < 1024 / even and steps == {8: 2, 32: depth}
