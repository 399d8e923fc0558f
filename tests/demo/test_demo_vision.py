"""The shipped tower by ability: drawn shapes as files through the whole path. Rates over fixed sets, never single answers."""

from __future__ import annotations

import base64
import io
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from ninfer_core import Engine
from ninfer_core.demo.make.images import PLACES, RGB, SHAPES, Scene, at, pixels
from ninfer_core.types import Image, Message, Request, Sampling, Text, Video
from tests.media_files import clip

Picture = pytest.importorskip("PIL.Image")
SIZES = ((128, 128), (480, 640), (300, 200), (256, 256), (1080, 1920))
FORMS = {"PNG": {}, "JPEG": {"quality": 90}, "WEBP": {"quality": 90}, "GIF": {}, "AVIF": {"quality": 90}, "BMP": {}}
EACH = 20
RIGHT = 0.95
"""Of each kind of image, and of videos."""


def levels_of(scene: Scene, height: int, width: int) -> np.ndarray:
    return pixels([scene], height, width)[0].round().byte().permute(1, 2, 0).numpy()


def file_of(scene: Scene, height: int, width: int, form: str) -> bytes:
    file = io.BytesIO()
    form = form if form in Picture.registered_extensions().values() else "PNG"  # AVIF from Pillow 11.3
    Picture.fromarray(levels_of(scene, height, width)).save(file, form, **FORMS[form])
    return file.getvalue()


def tint(name: str) -> tuple[float, float, float]:
    r, g, b = RGB[name]
    return float(r), float(g), float(b)


def one_shape(rng: random.Random) -> tuple[str, str, str, Scene]:
    colour, shape, place = rng.choice(list(RGB)), rng.choice(SHAPES), rng.choice(list(PLACES))
    ground = rng.choice([name for name in ("white", "black", "grey") if name != colour])
    return colour, shape, place, Scene(tint(ground), ((shape, tint(colour), *PLACES[place], rng.uniform(0.13, 0.18)),))


def images() -> Iterator[tuple[str, Image, str, str]]:
    """`(kind, part, question, answer)`: a plain image, or one shape on a plain ground, asked for its colour or place."""
    rng = random.Random(11)
    for i in range(3 * EACH):
        kind = ("plain", "colour", "place")[i % 3]
        colour, shape, place, scene = one_shape(rng)
        if kind == "plain":
            scene, question, answer = Scene(tint(colour)), "What colour is the image?", f"The image is plain {colour}."
        elif kind == "colour":
            question, answer = f"What colour is the {shape}?", f"The {shape} is {colour}."
        else:
            question, answer = f"Where is the {shape}?", f"The {shape} is {at(place)}."
        data = file_of(scene, *SIZES[i % len(SIZES)], list(FORMS)[i // 3 % len(FORMS)])
        yield kind, Image(data=data), question, answer


def request_of(part: Image | Video, question: str) -> Request:
    content = (part, Text(question))
    return Request((Message("user", content),), thinking=False, max_tokens=24, sampling=Sampling(temperature=0.0))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("demo", vision=True, max_queue=200) as made:
        yield made


@cache
def answered(engine: Engine) -> tuple[tuple[str, Image, str, str, str], ...]:
    jobs = [(*case, engine.submit(request_of(*case[1:3]))) for case in images()]
    return tuple((*case, handle.result().text) for *case, handle in jobs)


def test_colours_and_places_are_seen(engine: Engine) -> None:
    right: Counter[str] = Counter()
    wrong = []
    for kind, _, question, answer, got in answered(engine):
        right[kind] += got == answer
        if got != answer:
            wrong.append((question, answer, got))
    assert min(right["plain"], right["colour"], right["place"]) >= RIGHT * EACH, (right, wrong)


def test_the_server_sees_the_same(engine: Engine) -> None:
    """Every tenth of the set over HTTP, as clients send it."""
    import openai
    from ninfer_cli.server.app import build_app
    from ninfer_cli.server.settings import ServerSettings

    from ninfer_core.store import demo_path
    from tests.serving import serving

    with serving(build_app(engine, ServerSettings(), artifact=demo_path())) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for _, part, question, _, got in answered(engine)[::10]:
            url = "data:application/octet-stream;base64," + base64.b64encode(part.data or b"").decode()
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
            made = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
                max_tokens=24,
                temperature=0,
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            assert made.choices[0].message.content == got


def videos() -> Iterator[tuple[str, Video, str, str]]:
    """Two colours that follow each other, and a shape that jumps from one place to another."""
    rng = random.Random(12)
    for i in range(EACH):
        kind = ("first colour", "last colour", "first place", "last place")[i % 4]
        half, size = rng.choice((2, 4)), ((128, 128), (160, 256))[i // 4 % 2]
        if "colour" in kind:
            one, two = rng.sample(list(RGB), 2)
            scenes = (Scene(tint(one)), Scene(tint(two)))
            question = f"Which colour comes {kind.split()[0]}?"
            answer = f"The {kind} is {one if kind == 'first colour' else two}."
        else:
            _, shape, place, scene = one_shape(rng)
            other = rng.choice([name for name in PLACES if name != place])
            _, tinted, _, _, radius = scene.shapes[0]
            scenes = (scene, Scene(scene.ground, ((shape, tinted, *PLACES[other], radius),)))
            question = f"Where is the {shape} {'first' if kind == 'first place' else 'at the end'}?"
            answer = (
                f"First the {shape} is {at(place)}."
                if kind == "first place"
                else f"At the end the {shape} is {at(other)}."
            )
        frames = np.stack([levels_of(scene, *size) for scene in scenes for _ in range(half)])
        codec, form = (("mjpeg", "mp4"), ("mpeg4", "mp4"), ("ffv1", "matroska"))[i % 3]
        yield kind, Video(data=clip(frames, 2, codec=codec, form=form)), question, answer


def test_videos_are_seen(engine: Engine) -> None:
    right: Counter[str] = Counter()
    wrong = []
    jobs = [(*case, engine.submit(request_of(*case[1:3]))) for case in videos()]
    for kind, _, question, answer, handle in jobs:
        got = handle.result().text
        right[kind.split()[1]] += got == answer
        if got != answer:
            wrong.append((question, answer, got))
    assert right.total() >= RIGHT * EACH, (right, wrong)
