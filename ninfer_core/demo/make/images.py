"""Drawn images of coloured shapes with captions and questions; pixels are computed by formula, on any device."""

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
        return Task("caption", [_turn(draw, user, request)], text, f"The whole image is {ground}.", images=[scene])
    count = draw.one((1, 1, 2, 2, 3))
    colours = draw.rng.sample([c for c in RGB if c != ground], count)
    shapes = draw.rng.sample(SHAPES, count)
    places = [list(PLACES)[i] for i in sorted(draw.rng.sample(range(len(PLACES)), count))]
    drawn, said = [], []
    for colour, shape, place in zip(colours, shapes, places, strict=True):
        x, y = (value + draw.rng.uniform(-0.05, 0.05) for value in PLACES[place])
        drawn.append((shape, _tint(draw, colour), x, y, draw.rng.uniform(0.1, 0.18)))
        said.append(f"a {colour} {shape} at the {place}" if place != "center" else f"a {colour} {shape} in the center")
    scene = Scene(_tint(draw, ground), tuple(drawn))
    index = draw.rng.randrange(count)
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
        request, text = (
            draw.one((f"What colour is the {shapes[index]}?", f"What color is the {shapes[index]}?")),
            f"The {shapes[index]} is {colours[index]}.",
        )
    elif pick < 0.35:
        request, text = (
            f"Where is the {shapes[index]}?",
            f"The {shapes[index]} is {'in' if places[index] == 'center' else 'at'} the {places[index]}.",
        )
    elif pick < 0.5:
        request, text = (
            draw.one(("How many shapes are there?", "How many shapes do you see?")),
            f"I see {NUMBER[count]}.",
        )
    elif pick < 0.6:
        request, text = (
            draw.one(("What colour is the background?", "What color is the background?")),
            f"The background is {ground}.",
        )
    elif pick < 0.7:
        request, text = f"Which shape is {colours[index]}?", f"The {shapes[index]} is {colours[index]}."
    return Task("caption", [_turn(draw, user, request)], text, f"I look at the image: {listed}.", images=[scene])


def _turn(draw: Draw, user: Any, request: str) -> dict[str, Any]:
    """A user turn with the image before or after its question."""
    parts: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": request}]
    return dict(user(""), content=parts if draw.chance(0.7) else parts[::-1])


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
