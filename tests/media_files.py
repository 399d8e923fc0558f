"""Image and video files made for tests, by formula."""

from __future__ import annotations

import io

import numpy as np


def drawn(height: int, width: int, mode: str = "RGB"):
    """A picture with gradients, edges and some noise, as a Pillow image."""
    from PIL import Image

    rng = np.random.default_rng(height * 10007 + width)
    y, x = np.mgrid[:height, :width]
    levels = np.stack([x * 255 // max(width, 2), y * 255 // max(height, 2), (x // 7 + y // 5) % 2 * 200], -1)
    levels = (levels + rng.integers(0, 20, levels.shape)).clip(0, 255).astype(np.uint8)
    made = Image.fromarray(levels)
    if mode in ("RGBA", "LA"):
        made.putalpha(Image.fromarray((x * 255 // max(width, 2)).astype(np.uint8)))
    return made.convert(mode) if made.mode != mode else made


def encoded(picture, form: str) -> bytes:
    """The bytes of a file of that format."""
    file = io.BytesIO()
    picture.save(file, form, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


def frames(count: int, height: int, width: int) -> np.ndarray:
    """Smooth moving colours `[count, height, width, 3]` uint8; those of `tests/tools/make_video_goldens.py`."""
    f, y, x, c = np.meshgrid(np.arange(count), np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    wave = np.sin(x * 0.11 + f * 0.3 + c) + np.cos(y * 0.07 - f * 0.2 + 2 * c)
    return np.round(127.5 + 60 * wave).astype(np.uint8)


def clip(pictures: np.ndarray, rate: float, codec: str = "mpeg4", form: str = "mp4") -> bytes:
    """A video file of the frames; codec ffv1 in matroska keeps every level."""
    from fractions import Fraction

    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=Fraction(rate).limit_denominator(1001))
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = {"ffv1": "bgr0", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        for picture in pictures:
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode(None):
            out.mux(packet)
    return file.getvalue()
