"""Drawn images and videos of coloured shapes with captions and questions; pixels are computed by formula, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .dialogue import Task
    from .words import Draw

RGB = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220), "yellow": (240, 220, 40), "orange": (245, 140, 30),
    "purple": (140, 50, 170), "white": (250, 250, 250), "black": (15, 15, 15), "grey": (128, 128, 128), "pink": (250, 150, 190),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = {
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "center": (0.5, 0.5),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}
NUMBER = ("no shapes", "one shape", "two shapes", "three shapes")


@dataclass(frozen=True)
class Scene:
    """A background colour and shapes (kind, colour, place, x, y, radius), the last three as fractions of the side."""

    ground: tuple[float, float, float]
    shapes: tuple[tuple[str, tuple[float, float, float], float, float, float], ...] = ()


def _tint(draw: Draw, name: str) -> tuple[float, float, float]:
    """A colour near its name, as 0..255."""
    r, g, b = (min(255.0, max(0.0, value + draw.rng.uniform(-14, 14))) for value in RGB[name])
    return r, g, b


def caption_task(draw: Draw) -> Task:
    """A question about one drawn image."""
    from .dialogue import Task, user

    ground = draw.one(("white", "black", "grey", "white", *RGB)) if draw.chance(0.5) else "white"
    if draw.chance(0.2):
        ground = draw.one(list(RGB))
        scene = Scene(_tint(draw, ground))
        request = draw.one(
            (
                "What colour is the image?",
                "What color is this image?",
                "What is in the picture?",
                "Describe the image.",
                "What do you see?",
            )
        )
        text = f"The image is plain {ground}."
        thought = f"The whole image is {ground}."
        return Task("caption", [_turn(draw, user, request)], text, thought, images=[scene], detail="plain")
    count = draw.one((1, 1, 2, 2, 3))
    colours = draw.rng.sample([c for c in RGB if c != ground], count)
    shapes = draw.rng.sample(SHAPES, count)
    places = [list(PLACES)[i] for i in sorted(draw.rng.sample(range(len(PLACES)), count))]
    drawn, said = [], []
    for colour, shape, place in zip(colours, shapes, places, strict=True):
        x, y = (value + draw.rng.uniform(-0.05, 0.05) for value in PLACES[place])
        drawn.append((shape, _tint(draw, colour), x, y, draw.rng.uniform(0.1, 0.18)))
        said.append(f"a {colour} {shape} {at(place)}")
    scene = Scene(_tint(draw, ground), tuple(drawn))
    index, detail = draw.rng.randrange(count), "caption"
    pick = draw.rng.random()
    listed = said[0] if count == 1 else " and ".join(said) if count == 2 else f"{said[0]}, {said[1]} and {said[2]}"
    request, text = (
        draw.one(
            (
                "What is in the picture?",
                "Describe the image.",
                "What do you see?",
                "What is in this image?",
                "What does the picture show?",
            )
        ),
        f"I see {listed}.",
    )
    if pick < 0.2:
        detail = "colour"
        request, text = (
            draw.one((f"What colour is the {shapes[index]}?", f"What color is the {shapes[index]}?")),
            f"The {shapes[index]} is {colours[index]}.",
        )
    elif pick < 0.4:
        detail = "place"
        request, text = f"Where is the {shapes[index]}?", f"The {shapes[index]} is {at(places[index])}."
    elif pick < 0.45:
        detail = "shape"
        request, text = f"Which shape is {at(places[index])}?", f"The {shapes[index]} is {at(places[index])}."
    elif pick < 0.52:
        detail = "number"
        request, text = (
            draw.one(("How many shapes are there?", "How many shapes do you see?")),
            f"I see {NUMBER[count]}.",
        )
    elif pick < 0.6:
        detail = "ground"
        request, text = (
            draw.one(("What colour is the background?", "What color is the background?")),
            f"The background is {ground}.",
        )
    elif pick < 0.7:
        detail = "shape"
        request, text = f"Which shape is {colours[index]}?", f"The {shapes[index]} is {colours[index]}."
    thought = f"I look at the image: {listed}."
    return Task("caption", [_turn(draw, user, request)], text, thought, images=[scene], detail=detail)


def at(place: str) -> str:
    """A place with its preposition."""
    return f"{'in' if place == 'center' else 'at'} the {place}"


def video_task(draw: Draw) -> Task:
    """A question about a drawn video of two to six slices: colours that follow each other, or a shape that moves."""
    from .dialogue import Task, user

    count = draw.one((2, 2, 3, 3, 4, 4, 5, 6))
    rate = draw.one((1, 2, 2, 2, 4))
    times = [(2 * i + 0.5) / rate for i in range(count)]
    if draw.chance(0.5):
        colours = draw.rng.sample(list(RGB), draw.rng.randint(2, min(count, 3)))
        cuts = [0, *sorted(draw.rng.sample(range(1, count), len(colours) - 1)), count]
        scenes = [
            Scene(_tint(draw, c), ()) for c, a, b in zip(colours, cuts, cuts[1:], strict=False) for _ in range(b - a)
        ]
        listed = ", then ".join(colours)
        request, text = draw.one(
            (
                (
                    draw.one(("Which colour comes first?", "Which color comes first?")),
                    f"The first colour is {colours[0]}.",
                ),
                (
                    draw.one(("Which colour comes last?", "Which color comes last?")),
                    f"The last colour is {colours[-1]}.",
                ),
                (
                    draw.one(("Which colours does the video show?", "Which colors does the video show?")),
                    f"The video shows {listed}.",
                ),
                (
                    draw.one(("What is in the video?", "Describe the video.", "What happens in the video?")),
                    f"The video shows {listed}.",
                ),
            )
        )
        thought = f"I look at the video: {listed}."
    else:
        ground, colour = draw.rng.sample(list(RGB), 2)
        shape, (first, last) = draw.one(SHAPES), draw.rng.sample(list(PLACES), 2)
        tints, radius = (_tint(draw, ground), _tint(draw, colour)), draw.rng.uniform(0.1, 0.18)
        steps = [i / (count - 1) for i in range(count)]
        if draw.chance(0.3):
            half = draw.rng.randint(1, count - 1)
            steps = [0.0] * half + [1.0] * (count - half)
        (x0, y0), (x1, y1) = PLACES[first], PLACES[last]
        scenes = [Scene(tints[0], ((shape, tints[1], x0 + s * (x1 - x0), y0 + s * (y1 - y0), radius),)) for s in steps]
        moves = f"A {colour} {shape} moves from the {first} to the {last}."
        request, text = draw.one(
            (
                (f"Where is the {shape} first?", f"First the {shape} is {at(first)}."),
                (f"Where is the {shape} at the end?", f"At the end the {shape} is {at(last)}."),
                (
                    draw.one((f"What colour is the {shape}?", f"What color is the {shape}?")),
                    f"The {shape} is {colour}.",
                ),
                (
                    draw.one(
                        ("What moves?", "What happens in the video?", "Describe the video.", "What is in the video?")
                    ),
                    moves,
                ),
            )
        )
        thought = f"I look at the video: {moves}"
    turn = _turn(draw, user, request, "video")
    return Task("video", [turn], text, thought, images=scenes, times=times)


def _turn(draw: Draw, user: Any, request: str, medium: str = "image") -> dict[str, Any]:
    """A user turn with the medium before or after its question."""
    parts: list[dict[str, Any]] = [{"type": medium}, {"type": "text", "text": request}]
    return dict(user(""), content=parts if draw.chance(0.7) else parts[::-1])


def colour_index(colour: tuple[float, float, float]) -> int:
    """The nearest named colour."""
    return min(
        range(len(RGB)), key=lambda i: sum((a - b) ** 2 for a, b in zip(colour, list(RGB.values())[i], strict=True))
    )


def marks(scenes: list[Scene], height: int, width: int, cell: int) -> list[tuple[int, int, int]]:
    """(index of the cell in its middle over all images, shape, colour) of every shape."""
    high, wide = height // cell, width // cell
    return [
        (
            (i * high + min(high - 1, int(y * high))) * wide + min(wide - 1, int(x * wide)),
            SHAPES.index(kind),
            colour_index(colour),
        )
        for i, scene in enumerate(scenes)
        for kind, colour, x, y, _ in scene.shapes
    ]


def pixels(scenes: list[Scene], height: int, width: int, device: Any = "cpu") -> torch.Tensor:
    """Images [n, 3, height, width] as 0..255 float32, edges softened over about one pixel."""
    import torch

    y = (torch.arange(height, device=device, dtype=torch.float32) + 0.5) / height
    x = (torch.arange(width, device=device, dtype=torch.float32) + 0.5) / width
    grounds = torch.tensor([scene.ground for scene in scenes], device=device)
    out = grounds[:, :, None, None].expand(-1, 3, height, width).clone()
    most = max((len(scene.shapes) for scene in scenes), default=0)
    for slot in range(most):
        rows = [i for i, scene in enumerate(scenes) if slot < len(scene.shapes)]
        chosen = [scenes[i].shapes[slot] for i in rows]
        table = torch.tensor([[SHAPES.index(s[0]), *s[1], *s[2:]] for s in chosen], device=device)
        kind, colour = table[:, 0, None, None], table[:, 1:4]
        dx = (x[None, None, :] - table[:, 4, None, None]).expand(-1, height, width)
        dy = (y[None, :, None] - table[:, 5, None, None]).expand(-1, height, width)
        r = table[:, 6, None, None]
        box = torch.maximum(dx.abs(), dy.abs())
        circle = (dx**2 + dy**2).sqrt() - r
        square = box - 0.85 * r
        triangle = torch.maximum(dx.abs() * 0.89 - dy * 0.45 - r * 0.45, dy - 0.9 * r)
        cross = torch.maximum(torch.minimum(dx.abs(), dy.abs()) - 0.3 * r, box - r)
        distance = torch.where(
            kind == 0, circle, torch.where(kind == 1, square, torch.where(kind == 2, triangle, cross))
        )
        cover = (0.5 - distance * min(height, width)).clamp(0, 1)[:, None]
        index = torch.tensor(rows, device=device)
        out[index] = out[index] * (1 - cover) + colour[:, :, None, None] * cover
    return out
