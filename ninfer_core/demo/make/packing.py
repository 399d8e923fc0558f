"""Packs rendered tasks and natural text into training rows, and serves batches from worker processes."""

from __future__ import annotations

import lzma
import multiprocessing
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...frontend.media import video_text
from ...frontend.template import ChatTemplate
from .dialogue import Task
from .images import Scene
from .tasks import Generator
from .tokenizer import token_id

CELL, LEAST, MOST = 32, 16384, 65536
SIZES = [
    (h, w)
    for h in range(64, 545, CELL)
    for w in range(64, 545, CELL)
    if LEAST <= h * w <= MOST and max(h, w) <= 4 * min(h, w)
]
PROMPT_WEIGHT, TEXT_WEIGHT = 0.1, 0.6
LONGEST_ANSWER = 250


@dataclass
class Document:
    """Token ids, loss weight of each id as a target, three-axis positions, places of image cells, scenes."""

    ids: list[int]
    weights: np.ndarray
    positions: np.ndarray
    answer: int
    scenes: list[Scene]
    cells: list[int]
    kind: str = "text"


@dataclass
class Batch:
    """Arrays [rows, length]; `places` are flat indices of image cells; `size` is the image size of this batch."""

    ids: np.ndarray
    weights: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    scenes: list[Scene]
    places: np.ndarray
    size: tuple[int, int]
    spans: list[tuple[str, int, int, int]]


def natural_tokens(text: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All natural text as ids, and the held-out part (every 50th run of 100 paragraphs of the Python manual)."""
    train: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for name in ("pydoc", "pylib", "postgres", "rust", "web", "wordnet"):
        lines = (text / f"{name}.txt").read_text(encoding="utf-8").split("\n")
        for start in range(0, len(lines), 100):
            block = "\n".join(lines[start : start + 100]).replace("\x01", "\n") + "\n"
            ids = np.array(tokenizer.encode(block, add_special_tokens=False).ids, dtype=np.uint16)
            (held if name == "pydoc" and start % 5000 == 0 else train).append(ids)
    return np.concatenate(train), np.concatenate(held)


def save_tokens(path: Path, tokens: np.ndarray) -> None:
    """Write uint16 ids, compressed."""
    path.write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), preset=6))


def load_tokens(path: Path) -> np.ndarray:
    """Read what `save_tokens` wrote."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


class Packer:
    """An endless stream of batches from one seed."""

    def __init__(
        self,
        folder: Path | None,
        template: Path,
        seed: int,
        rows: int,
        length: int,
        *,
        test: bool = False,
        natural: float = 0.2,
    ) -> None:
        """`folder` holds words, tokenizer and natural text; None is enough for captions: the shipped tokenizer."""
        text = folder / "text" if folder else None
        self.generator = Generator(text, ChatTemplate(template.read_text(encoding="utf-8")), seed, test=test)
        tokenizer = folder / "tok" if folder else template.parent / "artifact"
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self.rng = random.Random(seed * 7919 + 1)
        self.rows, self.length, self.natural = rows, length, natural
        self.end = token_id("<|endoftext|>")
        self.pads = {token_id("<|image_pad|>"), token_id("<|video_pad|>")}
        self.corpus = load_tokens(folder / "corpus.xz") if folder and natural else np.zeros(0, np.uint16)
        self.generator.filler = self.filler if len(self.corpus) else None
        self.pending: Document | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a text with its specials."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def filler(self, count: int) -> str:
        """About `count` tokens of natural text, without specials."""
        start = self.rng.randrange(len(self.corpus) - count)
        return str(self.tokenizer.decode(self.corpus[start : start + count].tolist())).replace("\ufffd", "")

    def text_document(self, room: int = 512) -> Document:
        """A window of natural text, seldom as long as the room."""
        count = max(128, room - 1) if self.rng.random() < 0.04 else self.rng.choice((128, 256, 512))
        start = self.rng.randrange(len(self.corpus) - count)
        ids = [*self.corpus[start : start + count].tolist(), self.end]
        weights = np.full(len(ids), TEXT_WEIGHT, np.float16)
        positions = np.repeat(np.arange(len(ids), dtype=np.int32)[:, None], 3, 1)
        return Document(ids, weights, positions, 0, [], [])

    def document(self, task: Task, size: tuple[int, int]) -> Document:
        """Tokens, weights and positions of a task."""
        prompt, answer = self.generator.render(task)
        height, width = size[0] // CELL, size[1] // CELL
        cells: list[int] = []
        if task.images:
            kind = "video" if task.times else "image"
            bare = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
            full = bare.replace(f"<|{kind}_pad|>", f"<|{kind}_pad|>" * (height * width))
            prompt = prompt.replace(bare, video_text(task.times, height * width) if task.times else full)
        head, tail = self.encode(prompt), self.encode(answer)
        ids = head + tail
        weights = np.full(len(ids), PROMPT_WEIGHT, np.float16)
        weights[len(head) :] = 1.0
        positions = np.repeat(np.arange(len(ids), dtype=np.int32)[:, None], 3, 1)
        if task.images:
            count, span = height * width, max(height, width)
            cells = [i for i, token in enumerate(head) if token in self.pads]
            if len(cells) != count * len(task.images):
                raise ValueError(f"{len(cells)} cells stand for {len(task.images)} images of {count} cells each")
            for at in cells[::count]:
                first = int(positions[at, 0])
                positions[at : at + count] = first
                positions[at : at + count, 1] += np.arange(count, dtype=np.int32) // width
                positions[at : at + count, 2] += np.arange(count, dtype=np.int32) % width
                positions[at + count :] += span - count
                weights[at : at + count] = 0
        elif len(ids) < 900 and self.rng.random() < 0.05:
            # A question far behind its text, in positions alone.
            cut = self.rng.randrange(len(head))
            positions[cut:] += self.rng.randrange(3000)
        return Document(
            ids, weights, positions, len(head), task.images, cells, task.kind if task.fixed else task.kind + "_free"
        )

    def next_document(self, size: tuple[int, int]) -> Document:
        """The next document of the mix. `natural` is about the share of tokens; text windows are longer than tasks."""
        if self.rng.random() < self.natural * 0.4:
            return self.text_document(self.length)
        while True:
            document = self.document(self.generator.task(), size)
            if len(document.ids) - document.answer <= LONGEST_ANSWER:
                return document

    def _fitting(self, size: tuple[int, int], used: int) -> Document:
        """A document for the place `used` of a row; one that is too long waits for a new row, and text fills this one."""
        room = self.length - used
        document, self.pending = self.pending if not used else None, None if not used else self.pending
        while document is None or len(document.ids) > self.length:
            document = self.next_document(size)
        if len(document.ids) <= room or not (document.cells or document.answer):
            return document
        if self.pending is None and not document.cells:
            self.pending = document
        return self.text_document()

    def batch(self, documents: list[Document] | None = None, size: tuple[int, int] | None = None) -> Batch:
        """Rows filled from the stream, or from given documents (then nothing is cut; what does not fit is left out)."""
        size = size or self.rng.choice(SIZES)
        shape = (self.rows, self.length)
        out = Batch(
            np.full(shape, self.end, np.int32),
            np.zeros(shape, np.float16),
            np.full(shape, -1, np.int16),
            np.zeros((*shape, 3), np.int32),
            [],
            np.zeros(0, np.int64),
            size,
            [],
        )
        places: list[int] = []
        given = list(documents)[::-1] if documents is not None else None
        for row in range(self.rows):
            used, segment = 0, 0
            while used < self.length:
                room = self.length - used
                if given is not None:
                    if not given or len(given[-1].ids) > room:
                        break
                    document = given.pop()
                else:
                    document = self._fitting(size, used)
                count = min(room, len(document.ids))
                where = slice(used, used + count)
                out.ids[row, where] = document.ids[:count]
                out.weights[row, where] = document.weights[:count]
                out.weights[row, used] = 0
                out.segments[row, where] = segment
                out.positions[row, where] = document.positions[:count]
                out.scenes += document.scenes
                places += [row * self.length + used + cell for cell in document.cells]
                out.spans.append((document.kind, row, used + document.answer, used + count))
                used, segment = used + count, segment + 1
        if documents is not None:
            documents[:] = given[::-1] if given else []
        out.places = np.array(places, np.int64)
        return out


def _work(queue: Any, folder: Path, template: Path, seed: int, rows: int, length: int, natural: float) -> None:
    packer = Packer(folder, template, seed, rows, length, natural=natural)
    while True:
        queue.put(packer.batch())


class Workers:
    """Worker processes, each with its own seed and queue; batches are taken in turn, so a run can be repeated."""

    def __init__(
        self, count: int, folder: Path, template: Path, seed: int, rows: int, length: int, natural: float
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.queues = [context.Queue(6) for _ in range(count)]
        self.processes = [
            context.Process(
                target=_work, args=(queue, folder, template, seed * 1000 + i, rows, length, natural), daemon=True
            )
            for i, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self.turn = 0

    def next(self) -> Batch:
        """The next batch."""
        batch = self.queues[self.turn % len(self.queues)].get(timeout=120)
        self.turn += 1
        return batch  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.terminate()
