"""Makes tests/data/video_goldens.json with transformers' own video processor, which needs torchvision.

The test environment has no torchvision. In a throwaway one:

    python -m venv /tmp/goldens && /tmp/goldens/bin/pip install torch torchvision transformers==5.17.0
    /tmp/goldens/bin/python tests/tools/make_video_goldens.py
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "tests" / "data" / "video_goldens.json"
SAMPLED = [
    (30, 30.0, None, None), (301, 25.0, None, None), (9, 3.0, None, None), (3, 1.0, None, None), (40000, 30.0, None, None), (1, 30.0, None, None),
    (2, 30.0, None, None), (5310, 30.0, None, None), (5310, 29.97, None, None), (100, 24.0, 1.0, None), (100, 24.0, 4.0, None), (77, 12.5, None, 8),
    (77, 12.5, None, 7), (500, 60.0, None, 33), (1225, 30.0, None, None), (48, 23.976, 0.5, None),
]  # fmt: skip
SIZED = [
    (16, 1080, 1920), (768, 1080, 1920), (6, 90, 160), (4, 480, 640), (5, 20, 500), (7, 31, 31), (64, 2160, 3840),
    (3, 33, 47), (2, 240, 320), (24, 719, 1281), (9, 8, 8), (100, 100, 101),
]  # fmt: skip
SIZE = {"shortest_edge": 4096, "longest_edge": 25165824}
PIXELS = [(5, 40, 56, 25.0), (6, 90, 75, 12.0)]


def frames(count: int, height: int, width: int) -> np.ndarray:
    """Smooth moving colours [count, height, width, 3] uint8, by formula."""
    f, y, x, c = np.meshgrid(np.arange(count), np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    wave = np.sin(x * 0.11 + f * 0.3 + c) + np.cos(y * 0.07 - f * 0.2 + 2 * c)
    return np.round(127.5 + 60 * wave).astype(np.uint8)


def main() -> None:
    from transformers import Qwen3VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
    from transformers.video_utils import VideoMetadata

    half = [0.5, 0.5, 0.5]
    processor = Qwen3VLVideoProcessor(size=dict(SIZE), image_mean=half, image_std=half, patch_size=16, merge_size=2)
    out: dict[str, Any] = {"sampled": [], "sized": [], "pixels": []}

    def times(numbers: list[int], rate: float) -> list[str]:
        made = Qwen3VLProcessor._calculate_timestamps(None, list(numbers), rate, 2)  # type: ignore[arg-type]
        return [f"<{time:.1f} seconds>" for time in made]

    for total, rate, fps, wanted in SAMPLED:
        about = VideoMetadata(total_num_frames=total, fps=rate)
        numbers = [int(i) for i in processor.sample_frames(about, num_frames=wanted, fps=fps)]
        out["sampled"].append({"total": total, "rate": rate, "fps": fps, "frames": wanted, "numbers": numbers})
        out["sampled"][-1]["times"] = times(numbers, rate)
    for count, height, width in SIZED:
        high, wide = smart_resize(count, height, width, 2, 32, SIZE["shortest_edge"], SIZE["longest_edge"])
        out["sized"].append([count, height, width, high, wide])
    for count, height, width, rate in PIXELS:
        video = frames(count, height, width).transpose(0, 3, 1, 2)
        about = VideoMetadata(total_num_frames=count, fps=rate)
        made = processor(videos=[video], video_metadata=[about], return_metadata=True, return_tensors="np")
        rows = np.asarray(made["pixel_values_videos"], np.float64)
        levels = np.round(rows * 127.5 + 127.5)
        assert np.abs(levels - (rows * 127.5 + 127.5)).max() < 1e-3
        packed = base64.b64encode(zlib.compress(levels.astype(np.uint8).tobytes(), 9)).decode()
        grid = [int(v) for v in np.asarray(made["video_grid_thw"])[0]]
        numbers = [int(i) for i in made["video_metadata"][0].frames_indices]
        out["pixels"].append({"shape": [count, height, width], "rate": rate, "grid": grid, "numbers": numbers})
        out["pixels"][-1]["rows"] = packed
    TARGET.write_text(json.dumps(out, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
