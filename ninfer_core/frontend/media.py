"""Images and videos of requests: where they come from, their size as tokens, and the process that decodes them."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

from ..config import VisionConfig
from ..errors import ContentError, EngineClosedError, MediaError, MissingDependencyError
from ..types import Image, Video
from .decode import Sampling, Sizes, receive, send
from .fetch import Fetcher

MAX_FILE = {"image": 100 << 20, "video": 1 << 30}
"""Bytes of a file."""

SECONDS = {"image": 20.0, "video": 120.0}
"""Time that decoding one may take."""

WORKERS = 2
JOBS = 200
"""Files that one process decodes before a fresh one takes its place."""

KEPT = 128 << 20
"""Bytes of decoded media kept for the next turn of a conversation, which sends them again."""


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """A prepared image or video.

    Attributes:
        text: what stands for it in the prompt: vision markers, one pad per feature, and the times of a video's frames.
        frames: pixels `[F, H, W, 3]` uint8, resized; one frame of an image.
        grid: slices (an image, or pairs of frames), patch rows, patch columns.
        mean, std: normalisation per channel, as shares of 255.
        digest: names pixels and grid.
    """

    text: str
    frames: Any
    grid: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Processor:
    """What a checkpoint's `preprocessor_config.json` or `video_preprocessor_config.json` says."""

    sizes: Sizes
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fps: float
    low: int
    high: int

    @classmethod
    def read(cls, name: str, data: bytes | None, vision: VisionConfig) -> Processor:
        """Read and check one of the two files.

        Raises:
            ContentError: missing, not JSON, out of range, or not what the tower was made for.
        """
        if data is None:
            raise ContentError(f"the model has no {name}, without which its vision tower cannot be used")
        try:
            found = json.loads(data)
        except ValueError as error:
            raise ContentError(f"{name} is not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ContentError(f"{name} holds a {type(found).__name__}; it must be an object")
        shape = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }
        for key, wanted in shape.items():
            if found.get(key, wanted) != wanted:
                raise ContentError(f"{name}: {key} is {found[key]!r:.80}; the vision tower needs {wanted}")
        scale = _number(found, "rescale_factor", name, 1 / 255, 1e-9, 1.0)
        if abs(scale * 255 - 1) > 1e-6:
            raise ContentError(f"{name}: rescale_factor is {scale}; this engine computes 1/255 only")
        size: Any = found.get("size")
        size = size if isinstance(size, dict) else {}
        given = {
            "shortest_edge": size.get("shortest_edge", found.get("min_pixels")),
            "longest_edge": size.get("longest_edge", found.get("max_pixels")),
        }
        least = int(_number(given, "shortest_edge", name, None, 1, 1 << 31))
        most = int(_number(given, "longest_edge", name, None, least, 1 << 31))
        return cls(
            Sizes(vision.patch_size * vision.spatial_merge_size, vision.temporal_patch_size, least, most),
            vision.patch_size,
            _channels(found, "image_mean", name, 0.0),
            _channels(found, "image_std", name, 1e-6),
            float(_number(found, "fps", name, 2.0, 1e-3, 1e3)),
            low := int(_number(found, "min_frames", name, 4, 1, 1 << 16)),
            int(_number(found, "max_frames", name, 768, low, 1 << 16)),
        )

    @property
    def most_patches(self) -> int:
        """Patch rows of the largest medium."""
        return -(-self.sizes.most // self.patch**2)


def _number(found: Mapping[str, Any], key: str, name: str, default: float | None, low: float, high: float) -> float:
    value = found.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ContentError(f"{name}: {key} is {value!r:.80}; it must be a number from {low:g} to {high:g}")
    return value


def _channels(found: Mapping[str, Any], key: str, name: str, low: float) -> tuple[float, ...]:
    value = found.get(key, (0.5, 0.5, 0.5))
    fine = isinstance(value, list | tuple) and len(value) == 3
    if not fine or not all(isinstance(v, int | float) and low <= v <= 1 for v in value):
        raise ContentError(f"{name}: {key} is {value!r:.80}; it must be three numbers from {low:g} to 1")
    return tuple(float(v) for v in value)


class MediaLoader:
    """Prepares the images and videos of requests. Thread-safe; `close` ends its processes.

    Args:
        resources: the model's frontend files.
        vision: the shape of its tower.

    Raises:
        ContentError: see `Processor.read`. MissingDependencyError: Pillow or PyAV is not installed.
    """

    def __init__(self, resources: Mapping[str, bytes], vision: VisionConfig) -> None:
        for module, package in (("PIL", "pillow"), ("av", "av")):
            if find_spec(module) is None:
                raise MissingDependencyError(package, "vision", "reading images and videos")
        self.image, self.video = (
            Processor.read(name, dict(resources).get(name), vision)
            for name in ("preprocessor_config.json", "video_preprocessor_config.json")
        )
        self._vision = vision
        self._workers = _Workers()
        self._fetcher = Fetcher()
        self._kept: OrderedDict[tuple[Any, ...], Medium] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    @property
    def most_patches(self) -> int:
        """Patch rows of the largest image or video."""
        return max(self.image.most_patches, self.video.most_patches)

    def start(self) -> None:
        """Start one process ahead of the first file, which then need not wait for it."""
        self._workers.start()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._workers.close()

    def load(self, part: Image | Video) -> Medium:
        """Prepare one image or video.

        Raises:
            MediaError: it cannot be had or read, or is outside the limits.
        """
        kind = "video" if isinstance(part, Video) else "image"
        data, path = self._source(part, kind)
        wish = (part.fps, part.frames) if isinstance(part, Video) else ()
        key = (kind, *wish, _file_digest(data, path))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = self._decode(part, kind, data, path)
        with self._lock:
            if key not in self._kept and made.frames.nbytes <= KEPT:
                self._kept[key] = made
                self._size += made.frames.nbytes
                while self._size > KEPT:
                    self._size -= self._kept.popitem(last=False)[1].frames.nbytes
        return made

    def _source(self, part: Image | Video, kind: str) -> tuple[bytes, str | None]:
        """The bytes of a file, or its path."""
        data, path = part.data, part.path
        if part.url is not None:
            scheme = part.url[:12].partition(":")[0].lower()
            if scheme == "data":
                data = data_url(part.url)
            elif scheme in ("http", "https"):
                data = self._fetcher.get(part.url, "messages")
            else:
                raise MediaError(
                    f"the {kind}'s url begins with {part.url[:12]!r}; it must be a data URL, http or https; give a "
                    "file by its path",
                    param="messages",
                )
        if data is not None:
            size, shown = len(data), f"the {kind}"
        else:
            assert path is not None
            shown = f"the {kind} {path}"
            try:
                size = os.stat(path).st_size
                if not os.path.isfile(path):
                    raise MediaError(f"{shown} is not a file", param="messages")
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else str(error)
                raise MediaError(f"{shown} cannot be opened: {why}", param="messages") from error
        if not size:
            raise MediaError(f"{shown} is empty; it must hold an encoded file", param="messages")
        if size > MAX_FILE[kind]:
            limit = MAX_FILE[kind]
            raise MediaError(f"{shown} has {size:,} bytes; at most {limit:,} are read", param="messages")
        return data or b"", str(Path(path).resolve()) if path is not None and data is None else None

    def _decode(self, part: Image | Video, kind: str, data: bytes, path: str | None) -> Medium:
        processor = self.video if kind == "video" else self.image
        job: dict[str, Any] = {"kind": kind, "path": path, "sizes": asdict(processor.sizes)}
        if isinstance(part, Video):
            job["sampling"] = asdict(self._sampling(part, processor))
        shown = f"the {kind} {part.path}" if part.path is not None else f"the {kind}"
        head, pixels = self._workers.run(job, data, SECONDS[kind], processor.sizes.most * 6 + (1 << 22), shown)
        frames, rate = _checked(head, pixels, processor.sizes, shown)
        count, height, width = frames.shape[:3]
        temporal, side = processor.sizes.temporal, processor.patch
        grid = (-(-count // temporal), height // side, width // side)
        digest = hashlib.sha256(repr((grid, processor.mean, processor.std)).encode())
        digest.update(pixels)
        pads = grid[1] * grid[2] // self._vision.spatial_merge_size**2
        if kind == "image":
            text = f"<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>"
        else:
            text = video_text(pair_times(head["numbers"], rate, temporal), pads)
        return Medium(text, frames, grid, processor.mean, processor.std, digest.digest())

    def _sampling(self, part: Video, processor: Processor) -> Sampling:
        high = processor.high
        if part.fps is not None and part.frames is not None:
            raise MediaError("a video has fps and frames; give one of them", param="messages")
        if part.fps is not None and not (isinstance(part.fps, int | float) and 0 < part.fps <= 1000):
            raise MediaError(f"a video's fps is {part.fps!r}; it must be above 0 and at most 1000", param="messages")
        frames = part.frames
        if frames is not None and not (isinstance(frames, int) and 1 <= frames <= high):
            raise MediaError(f"a video's frames is {frames!r}; it must be 1 to {high}", param="messages")
        return Sampling(float(part.fps or processor.fps), frames, processor.low, high)


def data_url(url: str) -> bytes:
    """The bytes of a data URL.

    Raises:
        MediaError: it is not base64, or empty.
    """
    head, comma, body = url.partition(",")
    if not comma:
        raise MediaError("a data URL has no comma before its data", param="messages")
    raw = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"a data URL is not valid base64: {error}", param="messages") from error


def pair_times(numbers: Sequence[int], rate: float, temporal: int) -> list[float]:
    """Seconds of every slice: the mean of its first and last frame; the last frame is repeated to fill a slice."""
    seconds = [number / rate for number in numbers]
    seconds += [seconds[-1]] * (-len(seconds) % temporal)
    return [(seconds[i] + seconds[i + temporal - 1]) / 2 for i in range(0, len(seconds), temporal)]


def video_text(times: Sequence[float], pads: int) -> str:
    """What stands for a video: every slice with its time. The template's own markers stay around the whole."""
    slices = (f"<{time:.1f} seconds><|vision_start|>{'<|video_pad|>' * pads}<|vision_end|>" for time in times)
    return f"<|vision_start|>{''.join(slices)}<|vision_end|>"


def _file_digest(data: bytes, path: str | None) -> bytes:
    """Names a file's bytes; a file on disk by its place, size and time."""
    if path is None:
        return hashlib.sha256(data).digest()
    found = os.stat(path)
    return hashlib.sha256(repr((path, found.st_ino, found.st_size, found.st_mtime_ns)).encode()).digest()


def _checked(head: Mapping[str, Any], pixels: bytearray, sizes: Sizes, shown: str) -> tuple[Any, float]:
    """The answer of a process as an array and a frame rate. The process has read a stranger's file: trust nothing."""
    values = [head.get("height"), head.get("width"), *(head.get("numbers") or [None])]
    rate = head.get("rate")
    fine = all(isinstance(v, int) and 0 <= v < 1 << 31 for v in values) and isinstance(rate, float)
    if fine:
        height, width, *numbers = values
        fine = height > 0 < width and not (height % sizes.factor or width % sizes.factor)
        fine = fine and len(pixels) == len(numbers) * height * width * 3
    if not fine:
        raise MediaError(f"{shown} made its decoder answer nonsense; it is damaged", param="messages")
    return np.frombuffer(pixels, np.uint8).reshape(len(numbers), height, width, 3), float(rate or 1.0)


class _Workers:
    """A few decoding processes, started when needed, one job at a time each."""

    def __init__(self) -> None:
        self._free: list[_Worker] = []
        self._room = threading.Semaphore(WORKERS)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def run(
        self, job: dict[str, Any], data: bytes, seconds: float, most: int, shown: str
    ) -> tuple[dict[str, Any], bytearray]:
        """The answer to one job; a process that dies or takes too long is replaced.

        Raises:
            MediaError: the file is refused, or was the end of the process.
        """
        with self._worker() as worker:
            answer = worker.ask(job, data, seconds, most)
        if answer is None:
            why = f"takes more than {seconds:.0f} s to decode" if worker.overdue else "made its decoder fail"
            raise MediaError(f"{shown} {why}; it is damaged or made to do harm", param="messages")
        head, body = answer
        if "error" in head:
            raise MediaError(f"{shown} cannot be read: {str(head['error'])[:500]}", param="messages")
        return head, body

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        if os.getpid() != self._pid:  # a forked child shares no pipes with its parent
            self._free, self._room, self._lock = [], threading.Semaphore(WORKERS), threading.Lock()
            self._pid = os.getpid()
        with self._room:
            with self._lock:
                if self._closed:
                    raise EngineClosedError("the engine is closed; load it again")
                worker = self._free.pop() if self._free else None
            worker = worker or _Worker()
            try:
                yield worker
            except BaseException:
                worker.end()
                raise
            with self._lock:
                if worker.usable and not self._closed:
                    self._free.append(worker)
                else:
                    worker.end()

    def start(self) -> None:
        with self._lock:
            if not self._free and not self._closed:
                self._free.append(_Worker())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for worker in free:
            worker.end()


class _Worker:
    """One decoding process. It inherits no environment but the path to its libraries, and sees only its jobs."""

    def __init__(self) -> None:
        start = "import sys; sys.path[:] = sys.argv[1:]; from ninfer_core.frontend.decode import serve; serve()"
        paths = [os.path.abspath(path) for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={key: os.environ[key] for key in ("SYSTEMROOT", "LD_LIBRARY_PATH") if key in os.environ},
            cwd=os.path.abspath(os.sep),
        )
        self._jobs = 0
        self._broken = self.overdue = False

    @property
    def usable(self) -> bool:
        """Whether it can take another job."""
        return not self._broken and self._jobs < JOBS and self._process.poll() is None

    def ask(
        self, job: dict[str, Any], data: bytes, seconds: float, most: int
    ) -> tuple[dict[str, Any], bytearray] | None:
        """The answer to a job; None if the process died, answered nonsense, or had to be ended."""
        self._jobs += 1
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            send(self._process.stdin, job, data)  # type: ignore[arg-type]
            answer = receive(self._process.stdout, most)  # type: ignore[arg-type]
        except (OSError, ValueError):
            answer = None
        finally:
            timer.cancel()
        self._broken = answer is None
        return answer

    def _expire(self) -> None:
        self.overdue = True
        self._process.kill()

    def end(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()
