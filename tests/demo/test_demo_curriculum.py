"""What the demo's tasks teach: arithmetic that is right, values that stand in the request, packed media, rounded weights."""

import json
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from ninfer_core.demo.make import jsontasks, longtasks, sumtasks, tasks
from ninfer_core.demo.make.images import RGB, SHAPES, caption_task, marks, video_task
from ninfer_core.demo.make.packing import CELL, LONGEST_ANSWER, SIZES, Packer
from ninfer_core.demo.make.rounding import FACTORS, Rounding, format_for, rounded
from ninfer_core.demo.make.tooltasks import SYNONYMS, shown
from ninfer_core.demo.make.words import VERB, Draw, Pools, held_out
from ninfer_core.formats import Q4
from ninfer_core.frontend.media import video_text
from ninfer_core.inventory import RECIPE_DEMO
from ninfer_core.quant import decode, encode

DEMO = Path(__file__).parents[2] / "ninfer_core" / "demo"


@pytest.fixture
def draw():
    return Draw(random.Random(4), Pools.held_out())


@pytest.fixture(scope="module")
def packer():
    return Packer(None, DEMO / "chat_template.jinja", 3, 2, 2052, test=True, natural=0)


def test_columns_of_sums_and_differences_are_right(draw):
    for _ in range(300):
        a, b = draw.rng.randint(0, 999), draw.rng.randint(0, 999)
        for text, whole in ((sumtasks.columns(a, b), a + b), (sumtasks.borrows(max(a, b), min(a, b)), abs(a - b))):
            steps, _, end = text.partition(". So ")
            digits = []
            for step in steps.split("; "):
                left, _, right = step.partition(" = ")
                signs = [
                    int(sign + number)
                    for sign, number in re.findall(r"([+-]?)(?:^| )?(\d+)", left.replace("- ", "-").replace("+ ", "+"))
                ]
                assert sum(signs) == int(right), step
                digits.append(int(right) % 10)
            assert int("".join(map(str, digits[::-1]))) == whole % 10 ** len(digits)
            assert end.endswith(f"= {whole}.")


def test_every_value_of_a_call_stands_in_the_request(draw):
    for maker in (tasks.tool_task, tasks.choice_task, tasks.integer_task, tasks.foreign_task, tasks.parallel_task):
        for _ in range(60):
            task = maker(draw)
            assert {name for name, _ in task.calls} <= {tool["function"]["name"] for tool in task.tools}
            for _, values in task.calls:
                for value in values.values():
                    text = task.messages[-1]["content"]
                    assert shown(value) in text or json.dumps(value, ensure_ascii=False)[1:-1] in text, (value, text)


def test_a_choice_is_never_named(draw):
    asked = []
    for _ in range(80):
        task = tasks.choice_task(draw)
        ((name, _),) = task.calls
        asked.append(name in task.messages[0]["content"])
    assert not any(asked)
    words = [word for text in SYNONYMS.values() for word in text.split("/")]
    assert len(words) == len(set(words)) and set(SYNONYMS) <= set(VERB)


def test_names_of_other_scripts_are_in_normal_form_and_of_many_scripts(draw):
    names = [draw.foreign() for _ in range(3000)]
    assert all(unicodedata.is_normalized("NFC", name) for name in names)
    scripts = {unicodedata.name(letter, "?").split(" ")[0] for name in names for letter in name}
    assert scripts >= {"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "CYRILLIC", "GREEK", "LATIN"}
    # An eighth of all 20,902 characters of the block is seen within these: none is special.
    assert len({c for name in names for c in name if "一" <= c <= "龥"}) > 2500


def test_a_blend_is_no_held_out_word():
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in ("rnol", "stek", "lmin", "nd")]
    draw = Draw(random.Random(1), Pools.split(words, False))
    made = [draw.word() for _ in range(4000)]
    assert any(word not in words for word in made) and not any(held_out(word) for word in made)


def test_nested_json_is_two_deep_and_says_its_values(draw):
    deep = 0
    for _ in range(100):
        task = jsontasks.nested_task(draw)
        values = json.loads(task.answer)
        deep += any(isinstance(value, dict) for value in values.values())
        assert all(key in str(task.messages) for key in values)
    assert deep == 100


def test_long_tasks_fit_the_context_at_every_depth(packer):
    generator = packer.generator
    lengths, depths = [], []
    for i in range(60):
        task = longtasks.needle_task(generator.draw, None) if i % 2 else generator.long()
        document = packer.document(task, (128, 128))
        lengths.append(len(document.ids))
        statement = task.reasoning.split(": ", 1)[1].removesuffix(" " + task.answer)
        text = "".join(str(turn["content"]) for turn in task.messages)
        assert statement in text
        depths.append(text.index(statement) / len(text))
    assert max(lengths) < 4096 and max(lengths) > 2500 and min(lengths) < 700
    assert min(depths) < 0.25 and max(depths) > 0.75


@pytest.mark.parametrize("maker", [caption_task, video_task])
def test_cells_of_media_stand_where_the_engine_puts_them(packer, maker):
    """Positions and text against the engine's own: `positions_of` and `video_text`."""
    from types import SimpleNamespace

    from ninfer_core.runtime.media import positions_of

    for size in packer.rng.sample(SIZES, 12):
        task = packer.generator.task(maker)
        document = packer.document(task, size)
        high, wide = size[0] // CELL, size[1] // CELL
        cells = high * wide
        assert len(document.cells) == cells * len(task.images)
        if task.times:
            text = packer.tokenizer.decode(document.ids, skip_special_tokens=False)
            assert video_text(task.times, cells) in text
        spans = [(first, first + cells) for first in document.cells[::cells]]
        placed = SimpleNamespace(media=SimpleNamespace(grid=(len(spans), 2 * high, 2 * wide)), spans=spans)
        want, _ = positions_of(len(document.ids), [placed], 2)
        assert np.array_equal(document.positions.T, want.numpy())


def test_marks_point_at_the_shapes():
    packer = Packer(None, DEMO / "chat_template.jinja", 9, 1, 516, test=True, natural=0)
    scenes = [scene for _ in range(20) for scene in packer.generator.task(caption_task).images]
    found = marks(scenes, 160, 224, CELL)
    assert len(found) == sum(len(scene.shapes) for scene in scenes)
    at = 0
    for index, scene in enumerate(scenes):
        for kind, colour, x, y, _ in scene.shapes:
            cell, shape, name = found[at]
            assert cell == index * 35 + int(y * 5) * 7 + int(x * 7)
            assert SHAPES[shape] == kind
            assert max(abs(a - b) for a, b in zip(list(RGB.values())[name], colour, strict=True)) <= 14
            at += 1


def test_a_document_too_long_for_its_row_waits_for_the_next(monkeypatch):
    packer = Packer(None, DEMO / "chat_template.jinja", 5, 2, 1028, test=True, natural=0)
    packer.corpus = np.arange(2000, dtype=np.uint16) % 500
    drawn = [document for document in (packer.next_document((128, 128)) for _ in range(400)) if not document.cells]
    assert max(len(d.ids) - d.answer for d in drawn) <= LONGEST_ANSWER
    first, second = sorted((d for d in drawn if len(d.ids) <= 1028), key=lambda d: -len(d.ids))[:2]
    assert len(first.ids) + len(second.ids) > 1028
    after = iter([first, second])
    monkeypatch.setattr(packer, "next_document", lambda size: next(after, None) or packer.text_document())
    batch = packer.batch()
    assert batch.ids[0, : len(first.ids)].tolist() == first.ids
    assert batch.ids[1, : len(second.ids)].tolist() == second.ids
    assert (batch.segments >= 0).all() and batch.spans[1][0] == "text"


def test_rounded_weights_are_those_of_the_codec():
    torch.manual_seed(1)
    weight = torch.randn(64, 128) * 0.05
    for fmt, factors in FACTORS.items():
        plain = rounded(weight.reshape(-1, 64), fmt, (1.0,)).view_as(weight)
        assert torch.equal(plain, decode(encode(weight, fmt), fmt, weight.shape).float())
        best = rounded(weight.reshape(-1, 64), fmt, factors).view_as(weight)
        searched = decode(encode(weight, fmt, search=True), fmt, weight.shape).float()
        worst, found, least = ((y - weight).square().mean() for y in (plain, best, searched))
        assert least <= found < worst


def test_rounding_follows_the_recipe_and_leaves_no_trace():
    from ninfer_core.demo.make.model import Model, Shape

    model = Model(Shape(layers=4, vocab=256, vision=None))
    formats = RECIPE_DEMO.formats
    wanted = {
        "experts.gate_up_proj": "moe/routed_gate_up",
        "experts.down_proj": "moe/routed_down",
        "out_proj.weight": "gdn/output",
    }
    for end, role in (wanted | {"o_proj.weight": "attention/output", "lm_head.weight": "output_head"}).items():
        names = [name for name, _ in model.named_parameters() if name.endswith(end) and not name.startswith("mtp.")]
        assert names and {format_for(name) for name in names} == {formats[role]}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Rounding(model).applied():
        gate = model.language_model.layers[0].mlp.experts.gate_up_proj
        codes = gate.detach().reshape(-1, 64) / gate.detach().reshape(-1, 64).abs().amax(1, keepdim=True)
        assert format_for("language_model.layers.0.mlp.experts.gate_up_proj") == Q4
        assert max(len(group.unique()) for group in codes[:50]) <= 16
        model.lm_head.weight.sum().backward()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.lm_head.weight.grad is not None
