"""Opens image and video files. Runs in a process of its own, since the files come from anywhere; imports no numpy.

`media.py` starts it, sends jobs over a pipe, and ends it when a job takes too long. Also here, used by both sides: how
large a picture becomes and which frames of a video are taken.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, BinaryIO

MAX_RATIO = 200
MAX_PIXELS = 100_000_000
"""Pixels of a picture or frame as stored; checked before anything is decoded."""

MAX_SECONDS = 3600.0
"""Length of a video."""

MAX_STORED_FRAMES = 250_000
"""Frames of a video that are looked at."""

MAX_BYTES = 2 << 30
"""Address space of the process."""

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "AVIF", "BMP")
_VIDEOS = (("mov", 4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")), ("matroska", 0, (b"\x1aE\xdf\xa3",)))
_TURNS = {2: ("FLIP_LEFT_RIGHT",), 3: ("ROTATE_180",), 4: ("FLIP_TOP_BOTTOM",), 5: ("TRANSPOSE",), 6: ("ROTATE_270",)}
_TURNS |= {7: ("TRANSVERSE",), 8: ("ROTATE_90",)}


class RefusedError(Exception):
    """A file that is not read; the message says why, to its sender."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a picture may become: sides are multiples of `factor`, areas (of all frames together) `least` to `most`."""

    factor: int
    temporal: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which frames of a video: `frames` of them or `fps` a second, at least `low` and at most `high` if there are."""

    fps: float
    frames: int | None
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Pictures:
    """Decoded and resized RGB frames: `pixels` row by row; of a video the frame numbers and the file's frame rate."""

    height: int
    width: int
    pixels: bytes
    numbers: tuple[int, ...] = (0,)
    rate: float = 0.0


def picture_size(height: int, width: int, sizes: Sizes) -> tuple[int, int]:
    """The size an image is scaled to, near its own.

    Raises:
        RefusedError: it is more than 200 times as long as wide, or the other way round.
    """
    return _fit(height, width, 1, 1, sizes)


def frame_size(count: int, height: int, width: int, sizes: Sizes) -> tuple[int, int]:
    """The size the `count` frames of a video are scaled to.

    Raises:
        RefusedError: see `picture_size`.
    """
    count = max(count, sizes.temporal)  # a single frame stands twice
    if min(height, width) < sizes.factor:
        scale = max(sizes.factor / height, sizes.factor / width)
        height, width = int(height * scale), int(width * scale)
    return _fit(height, width, count, round(count / sizes.temporal) * sizes.temporal, sizes)


def _fit(height: int, width: int, count: int, rounded: int, sizes: Sizes) -> tuple[int, int]:
    f = sizes.factor
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RefusedError(f"it has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other")
    high, wide = round(height / f) * f, round(width / f) * f
    if rounded * high * wide > sizes.most:
        scale = math.sqrt(count * height * width / sizes.most)
        return max(f, math.floor(height / scale / f) * f), max(f, math.floor(width / scale / f) * f)
    if rounded * high * wide < sizes.least:
        scale = math.sqrt(sizes.least / (count * height * width))
        return math.ceil(height * scale / f) * f, math.ceil(width * scale / f) * f
    return high, wide


def frame_numbers(total: int, rate: float, sampling: Sampling) -> list[int]:
    """The frames to take of `total`, evenly from the first to the last. `frames` asks for at most that many."""
    if sampling.frames is not None:
        count = min(sampling.frames, total)
    else:
        count = min(max(int(total / rate * sampling.fps), sampling.low), sampling.high, total)
    if count == 1:
        return [0]
    # the doubles of numpy's linspace, so that halves fall alike
    step = (total - 1) / (count - 1)
    return [round(i * step) for i in range(count - 1)] + [total - 1]


def decode_image(data: bytes | bytearray, sizes: Sizes) -> Pictures:
    """The first picture of an image file, upright, without alpha, scaled.

    Raises:
        RefusedError: not one of `FORMATS`, damaged, or too large.
    """
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # our own limit comes before any pixel
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        picture = Image.open(io.BytesIO(data), formats=known)
    except Image.UnidentifiedImageError:
        names = ", ".join(name for name in known if name != "MPO")
        raise RefusedError(f"it is not an image of a known format ({names})") from None
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise RefusedError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are read")
    if min(width, height) < 1:
        raise RefusedError(f"it has {width} x {height} pixels")
    try:
        turn = int(picture.getexif().get(0x0112, 1))
    except Exception:
        turn = 1  # a damaged note beside the picture does not spoil the picture
    if turn in (5, 6, 7, 8):
        width, height = height, width
    wanted = picture_size(height, width, sizes)
    made = _rgb(picture)
    for name in _TURNS.get(turn, ()):
        made = made.transpose(getattr(Image.Transpose, name))
    made = _scaled(made, wanted)
    return Pictures(*wanted, made.tobytes())


def _rgb(picture: Any) -> Any:
    """RGB with 8 bits; 16-bit levels are divided by 257, alpha is dropped."""
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        levels = picture.convert("I")
        return levels.point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")
    return picture.convert("RGB")


def _scaled(picture: Any, size: tuple[int, int]) -> Any:
    from PIL import Image

    height, width = size
    return picture if picture.size == (width, height) else picture.resize((width, height), Image.Resampling.BICUBIC)


def video_format(head: bytes) -> str | None:
    """The container a file's first bytes tell, None if it is none that is read. Others could name further files."""
    for name, start, marks in _VIDEOS:
        if any(head[start : start + len(mark)] == mark for mark in marks):
            return name
    return None


def decode_video(source: str | bytes | bytearray, sizes: Sizes, sampling: Sampling) -> Pictures:
    """Frames of a video file (its path or its bytes), upright and scaled alike.

    Frame numbers count the frames that decode, whatever the header says.

    Raises:
        RefusedError: not a known container, without a picture, damaged, or too long.
    """
    container = video_format(_head(source))
    if container is None:
        raise RefusedError("it is not a video of a known format (MP4, MOV, WebM, MKV)")
    total, rate = _count_packets(source, container)
    tried: set[int] = set()
    while True:
        tried.add(total)
        numbers = frame_numbers(total, rate, sampling)
        frames, decoded = _frames(source, container, numbers, sizes)
        if decoded == total:
            break
        if not decoded or decoded in tried:
            raise RefusedError("no frame of it can be decoded" if not decoded else "it decodes differently each time")
        total = decoded
    height, width = frames[0][0]
    pixels = b"".join(data for _, data in frames)
    return Pictures(height, width, pixels, tuple(numbers), rate)


def _head(source: str | bytes | bytearray) -> bytes:
    if isinstance(source, str):
        with open(source, "rb") as file:
            return file.read(16)
    return bytes(source[:16])


def _open(source: str | bytes | bytearray, container: str) -> Any:
    import av

    av.logging.set_level(None)
    # the container is fixed and no protocol allowed: no file can make the library open another one
    options = {"protocol_whitelist": "file" if isinstance(source, str) else "", "enable_drefs": "0"}
    file = source if isinstance(source, str) else io.BytesIO(source)
    opened = av.open(file, format=container, options=options, metadata_errors="replace")
    if not opened.streams.video:
        opened.close()
        raise RefusedError("it has no video track")
    stream = opened.streams.video[0]
    size = (stream.codec_context.width, stream.codec_context.height)
    if size[0] * size[1] > MAX_PIXELS:
        opened.close()
        raise RefusedError(f"its frames have {size[0]} x {size[1]} pixels; at most {MAX_PIXELS:,} are read")
    stream.thread_type = "AUTO"
    stream.codec_context.thread_count = 4
    return opened


def _count_packets(source: str | bytes | bytearray, container: str) -> tuple[int, float]:
    """How many frames the file seems to hold, and how many a second."""
    with _open(source, container) as opened:
        stream = opened.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate or Fraction(24)
        total = 0
        for packet in opened.demux(stream):
            total += packet.size > 0
            if total > MAX_STORED_FRAMES:
                raise RefusedError(f"it has more than {MAX_STORED_FRAMES:,} frames")
    rate = float(rate)
    if not 1e-3 <= rate <= 1e4:
        raise RefusedError(f"its frame rate is {rate:g}; 0.001 to 10,000 a second are read")
    if not total:
        raise RefusedError("it has no frames")
    if total / rate > MAX_SECONDS:
        raise RefusedError(f"it is {total / rate:.0f} s long; at most {MAX_SECONDS:.0f} s are read")
    return total, rate


def _frames(
    source: str | bytes | bytearray, container: str, numbers: Sequence[int], sizes: Sizes
) -> tuple[list[tuple[tuple[int, int], bytes]], int]:
    """The frames of the given numbers, scaled to one size, and how many frames there are."""
    made: list[tuple[tuple[int, int], bytes]] = []
    wanted = set(numbers)
    size: tuple[int, int] | None = None
    count = 0
    with _open(source, container) as opened:
        for frame in _decoded(opened):
            if count in wanted:
                picture = frame.to_image()
                if turn := int(getattr(frame, "rotation", 0) or 0):
                    picture = picture.rotate(turn, expand=True)
                size = size or frame_size(len(numbers), picture.height, picture.width, sizes)
                made.append((size, _scaled(picture, size).tobytes()))
            count += 1
            if count > MAX_STORED_FRAMES:
                raise RefusedError(f"it has more than {MAX_STORED_FRAMES:,} frames")
    return made, count


def _decoded(opened: Any) -> Iterator[Any]:
    """All frames up to the first damage; none at all is an error of the caller's."""
    import av

    try:
        for frame in opened.decode(video=0):
            if frame.width * frame.height > MAX_PIXELS:
                raise RefusedError(f"a frame has {frame.width} x {frame.height} pixels; {MAX_PIXELS:,} are read")
            yield frame
    except (av.FFmpegError, EOFError):
        return


# --- the process -------------------------------------------------------------------------------------------------


def send(stream: BinaryIO, head: dict[str, Any], body: bytes = b"") -> None:
    """Write one message: two lengths, a JSON object, bytes."""
    text = json.dumps(head).encode()
    stream.write(struct.pack("<QQ", len(text), len(body)) + text)
    stream.write(body)
    stream.flush()


def receive(stream: BinaryIO, most: int) -> tuple[dict[str, Any], bytearray] | None:
    """Read one message with at most `most` bytes of body; None at the end of the stream.

    Raises:
        ValueError: not a message, or too long a one.
    """
    lengths = stream.read(16)
    if len(lengths) < 16:
        return None
    head, body = struct.unpack("<QQ", lengths)
    if head > 1 << 20 or body > most:
        raise ValueError(f"a message of {head} and {body} bytes")
    text, data = stream.read(head), bytearray(body)
    view, filled = memoryview(data), 0
    while filled < body and (count := stream.readinto(view[filled:])):  # type: ignore[attr-defined]
        filled += count
    if len(text) < head or filled < body:
        return None
    made = json.loads(text)
    if not isinstance(made, dict):
        raise ValueError("a message that is no object")
    return made, data


def work(job: dict[str, Any], data: bytes | bytearray) -> Pictures:
    """Decode one file: `job` names the kind, the sizes, the sampling and, without `data`, the path."""
    sizes = Sizes(**job["sizes"])
    if job["kind"] == "video":
        return decode_video(job.get("path") or data, sizes, Sampling(**job["sampling"]))
    if job.get("path"):
        with open(job["path"], "rb") as file:
            return decode_image(file.read(), sizes)
    return decode_image(data, sizes)


def serve() -> None:
    """Take jobs from stdin and answer on stdout, one after the other, until stdin ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing else may write into the answers
    _confine()
    with contextlib.suppress(ImportError):  # before the first file comes
        from PIL import Image

        Image.init()
    while (message := receive(source, 1 << 40)) is not None:
        job, data = message
        try:
            made = work(job, data)
        except MemoryError:
            send(target, {"error": f"decoding it takes more than {MAX_BYTES >> 20} MiB of memory"})
        except RefusedError as error:
            send(target, {"error": str(error)})
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            send(target, {"error": f"it is damaged ({type(error).__name__}: {text})"})
        else:
            about = asdict(made)
            send(target, about, about.pop("pixels"))


def _confine() -> None:
    """Bounds that a damaged or hostile file cannot pass: memory, files written, core dumps."""
    try:
        import resource
    except ImportError:  # not a Unix: the limits on pixels and time remain
        return
    for name, value in (("RLIMIT_AS", MAX_BYTES), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        try:
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        except (AttributeError, OSError, ValueError):
            continue  # a system without this limit


if __name__ == "__main__":
    serve()
