"""The shipped tower by ability: drawn shapes as files through the whole path. Rates over a fixed set, never single answers."""

from __future__ import annotations

import io
import random
from collections import Counter

import pytest

from ninfer_core import Engine
from ninfer_core.demo.make.images import PLACES, RGB, SHAPES, Scene, pixels
from ninfer_core.types import Image, Message, Request, Text

Picture = pytest.importorskip("PIL.Image")
SIZES = ((128, 128), (480, 640), (300, 200), (256, 256))
EACH = 40


def file_of(scene: Scene, height: int, width: int, form: str) -> bytes:
    levels = pixels([scene], height, width)[0].round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Picture.fromarray(levels).save(file, form, **({"quality": 90} if form == "JPEG" else {}))
    return file.getvalue()


def cases():
    """`(kind, file, question, answer)`: one shape on a plain ground, asked for its colour or place; plain images too."""
    rng = random.Random(11)
    grounds = ("white", "black", "grey")
    for i in range(3 * EACH):
        kind = ("plain", "colour", "place")[i % 3]
        colour, shape, place = rng.choice(list(RGB)), rng.choice(SHAPES), rng.choice(list(PLACES))
        ground = rng.choice([name for name in grounds if name != colour])
        level = tuple(float(v) for v in RGB[colour])
        if kind == "plain":
            scene, question, answer = Scene(level), "What colour is the image?", f"The image is plain {colour}."
        else:
            x, y = PLACES[place]
            shapes = ((shape, level, x, y, rng.uniform(0.13, 0.18)),)
            scene = Scene(tuple(float(v) for v in RGB[ground]), shapes)
            question = f"What colour is the {shape}?" if kind == "colour" else f"Where is the {shape}?"
            where = "in the center" if place == "center" else f"at the {place}"
            answer = f"The {shape} is {colour if kind == 'colour' else where}."
        size = SIZES[i % len(SIZES)]
        yield kind, file_of(scene, *size, "PNG" if i % 2 else "JPEG"), question, answer


def test_colours_and_places_are_seen():
    right: Counter[str] = Counter()
    wrong = []
    with Engine.load("demo", vision=True, max_queue=200) as engine:
        jobs = []
        for kind, data, question, answer in cases():
            content = (Image(data=data), Text(question))
            request = Request((Message("user", content),), thinking=False, max_tokens=24)
            jobs.append((kind, question, answer, engine.submit(request)))
        for kind, question, answer, handle in jobs:
            got = handle.result().text
            right[kind] += got == answer
            if got != answer:
                wrong.append((question, answer, got))
    assert min(right["plain"], right["colour"]) >= 0.95 * EACH, (right, wrong)
    assert right["place"] >= 0.85 * EACH, (right, wrong)
