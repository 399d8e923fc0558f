"""Feeds mutated PNG, JPEG, WebP, GIF, MP4 and WebM files to the media loader: no crash of ours, no leak, no hang.

    python -m tests.tools.fuzz_media --seconds 600 --seed 1

Every file must be read or refused with `MediaError`. At the end: how many of each, how many decoding processes there were,
how far the memory of this process grew beyond the pixels that the loader keeps, how large its decoders became, and which
file descriptors and processes were left. The exit status is 1 where something leaks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

from ninfer_core.config import VisionConfig
from ninfer_core.errors import MediaError
from ninfer_core.frontend.media import MediaLoader
from ninfer_core.types import Image, Video
from tests.media_files import clip, drawn, encoded, frames

SETTINGS = b'{"size": {"shortest_edge": 4096, "longest_edge": 65536}}'
VISION = VisionConfig(depth=1, hidden_size=64, num_heads=2, intermediate_size=64, out_hidden_size=64)


def seeds() -> list[tuple[str, bytes]]:
    """Whole files of every kind."""
    made = [(form, encoded(drawn(70, 90), form)) for form in ("PNG", "JPEG", "WEBP", "GIF")]
    made.append(("PNG", encoded(drawn(40, 40, "RGBA"), "PNG")))
    made.append(("MP4", clip(frames(6, 48, 64), 5)))
    made.append(("MP4", clip(frames(6, 48, 64), 5, codec="mjpeg")))
    made.append(("WEBM", clip(frames(4, 48, 64), 5, codec="ffv1", form="matroska")))
    return made


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with some bytes changed, cut, doubled or moved; headers most often."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        near = rng.randrange(min(len(made), 64)) if rng.random() < 0.4 else rng.randrange(len(made))
        pick = rng.random()
        if pick < 0.5:
            made[near] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif pick < 0.65:
            size = rng.choice((2, 4))
            made[near : near + size] = rng.choice((b"\xff", b"\x00", b"\x7f")) * size
        elif pick < 0.8:
            del made[near : near + rng.randrange(1, 64)]
        elif pick < 0.9:
            made[near:near] = made[near : near + rng.randrange(1, 64)]
        else:
            made = made[: max(1, near)]
        if not made:
            break
    return bytes(made)


def resident(pid: int | str = "self") -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


LEAK = 16 << 20
"""Bytes by which this process may have grown beyond what is kept: the allocator's own."""


def children() -> list[int]:
    """Processes that this one has started and not yet seen end."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(stat.parent.name))
    return found


def descriptors() -> int:
    """Open files and pipes of this process."""
    return len(os.listdir("/proc/self/fd"))


def run(rng: random.Random, seconds: float, count: int | None = None) -> dict[str, object]:
    """Mutate and load until the time is over, or `count` files."""
    open_before, before = descriptors(), set(children())
    loader = MediaLoader(
        dict.fromkeys(("preprocessor_config.json", "video_preprocessor_config.json"), SETTINGS), VISION
    )
    found: Counter[str] = Counter()
    pids: set[int] = set()
    files, begun = seeds(), time.monotonic()
    early = largest = 0
    done = 0
    try:
        while time.monotonic() - begun < seconds and (count is None or done < count):
            kind, data = files[done % len(files)]
            data = mutated(data, rng)
            done += 1
            part = (Video if kind in ("MP4", "WEBM") else Image)(data=data)
            try:
                loader.load(part)
                found[kind + " read"] += 1
            except MediaError as error:
                lost = "made its decoder fail" in str(error) or "takes more than" in str(error)
                found[kind + (" ended the decoder" if lost else " refused")] += 1
            for worker in loader._workers._free:
                pids.add(worker._process.pid)
                largest = max(largest, resident(worker._process.pid))
            if done == 50:
                early = resident() - loader._size
        grown = resident() - loader._size - early if early else 0
    finally:
        loader.close()
    return {
        "files": done,
        "found": dict(sorted(found.items())),
        "processes": len(pids),
        "grown": grown,
        "largest": largest,
        "descriptors left": descriptors() - open_before,
        "processes left": len(set(children()) - before),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    made = run(random.Random(args.seed), args.seconds)
    for key, value in made.items():
        print(f"{key}: {value}")
    leaks = int(made["grown"]) > LEAK or made["descriptors left"] or made["processes left"]  # type: ignore[call-overload]
    print("leaks" if leaks else "no leak")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
