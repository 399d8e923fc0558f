"""Images and videos against transformers' processors, odd and hostile files, and the process that decodes them."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import subprocess
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from ninfer_core.config import VisionConfig
from ninfer_core.errors import ContentError, EngineClosedError, MediaError
from ninfer_core.frontend import media as module
from ninfer_core.frontend.decode import Sampling, Sizes, frame_numbers, frame_size, picture_size
from ninfer_core.frontend.media import MediaLoader, pair_times, video_text
from ninfer_core.kernels.vision import patch_rows
from ninfer_core.types import Image, Video
from tests.media_files import clip, drawn, encoded, frames
from tests.tools.fuzz_media import run

PIL = pytest.importorskip("PIL.Image")
VISION = VisionConfig(depth=1, hidden_size=64, num_heads=2, intermediate_size=64, out_hidden_size=64)
GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "video_goldens.json").read_text())
PUBLISHED = {
    "preprocessor_config.json": {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    "video_preprocessor_config.json": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
}
SIZES = Sizes(32, 2, 65536, 16777216)
VIDEO = Sizes(32, 2, 4096, 25165824)


def files(**changes) -> dict[str, bytes]:
    common = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3}
    common |= {"image_std": [0.5] * 3, **changes}
    return {name: json.dumps(common | own).encode() for name, own in PUBLISHED.items()}


@pytest.fixture(scope="module")
def loader():
    made = MediaLoader(files(), VISION)
    yield made
    made.close()


def rows_of(medium):
    return patch_rows(torch.as_tensor(medium.frames), 16, 2, 2, medium.mean, medium.std)


# parity


@pytest.fixture(scope="module")
def oracle():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = [0.5] * 3
    size = dict(PUBLISHED["preprocessor_config.json"]["size"])
    return Qwen2VLImageProcessorPil(size=size, patch_size=16, merge_size=2, image_mean=half, image_std=half)


@pytest.mark.parametrize(
    ("height", "width", "mode", "form"),
    [
        (256, 256, "RGB", "PNG"), (301, 403, "RGB", "JPEG"), (30, 305, "RGB", "PNG"), (1, 1, "RGB", "PNG"), (700, 300, "L", "PNG"),
        (255, 257, "RGB", "WEBP"), (333, 222, "CMYK", "JPEG"), (97, 401, "L", "JPEG"), (120, 90, "RGBA", "PNG"), (64, 900, "P", "GIF"),
        (480, 640, "RGB", "BMP"), (5, 900, "RGB", "PNG"), (260, 300, "LA", "PNG"), (400, 401, "1", "PNG"), (288, 320, "RGBA", "WEBP"),
        (301, 256, "RGB", "AVIF"),
    ],
)  # fmt: skip
def test_images_equal_transformers(loader, oracle, height, width, mode, form):
    if form == "AVIF" and "AVIF" not in PIL.registered_extensions().values():
        pytest.skip("this Pillow was built without AVIF")
    data = encoded(drawn(height, width, mode), form)
    want = oracle(images=[PIL.open(io.BytesIO(data))], return_tensors="np")
    got = loader.load(Image(data=data))
    assert list(got.grid) == want["image_grid_thw"][0].tolist()
    rows = rows_of(got).numpy()
    assert rows.shape == want["pixel_values"].shape
    assert np.abs(rows - want["pixel_values"]).max() < 1e-6
    pads = want["image_grid_thw"][0].prod() // 4
    assert got.text == "<|vision_start|>" + "<|image_pad|>" * pads + "<|vision_end|>"


@pytest.mark.parametrize(
    ("height", "width", "want"),
    [
        (1, 1, (256, 256)), (48, 48, (256, 256)), (255, 257, (256, 256)), (100, 30, (480, 160)), (1080, 1920, (1088, 1920)),
        (2160, 3840, (2176, 3840)), (4320, 7680, (3072, 5440)), (5000, 5000, (4096, 4096)), (30, 305, (96, 832)),
    ],
)  # fmt: skip
def test_sizes_of_images(height, width, want):
    assert picture_size(height, width, SIZES) == want


@pytest.mark.parametrize("case", GOLDENS["sampled"], ids=lambda c: f"{c['total']}-{c['rate']}-{c['fps']}-{c['frames']}")
def test_frames_and_times_equal_transformers(case):
    numbers = frame_numbers(case["total"], case["rate"], Sampling(case["fps"] or 2.0, case["frames"], 4, 768))
    assert numbers == case["numbers"]
    times = pair_times(numbers, case["rate"], 2)
    text = video_text(times, 1)
    assert [part.rpartition(">")[2] + f"<{time:.1f} seconds>" for part, time in zip([""] * len(times), times)] == case[
        "times"
    ]
    assert [text.count(time) > 0 for time in case["times"]] == [True] * len(times)


@pytest.mark.parametrize("case", GOLDENS["sized"])
def test_sizes_of_videos_equal_transformers(case):
    count, height, width, *want = case
    assert list(frame_size(count, height, width, VIDEO)) == want


@pytest.mark.parametrize("case", GOLDENS["pixels"])
def test_pixels_of_videos_equal_transformers(loader, case):
    """A lossless file. Torchvision and Pillow differ by a level where a resize rounds; the order must be the same."""
    count, height, width = case["shape"]
    got = loader.load(Video(data=clip(frames(count, height, width), case["rate"], codec="ffv1", form="matroska")))
    assert list(got.grid) == case["grid"]
    want = np.frombuffer(zlib.decompress(base64.b64decode(case["rows"])), np.uint8).reshape(-1, 1536).astype(int)
    levels = np.round(rows_of(got).numpy() * 127.5 + 127.5).astype(int)
    assert levels.shape == want.shape
    assert np.abs(levels - want).max() <= 2 and np.abs(levels - want).mean() < 0.2


def test_a_frame_count_of_one_stands_twice(loader):
    got = loader.load(Video(data=clip(frames(1, 64, 96), 10)))
    assert (
        got.grid[0] == 1 and got.frames.shape[0] == 1 and got.text.startswith("<|vision_start|><0.0 seconds><|vision")
    )
    rows = rows_of(got).view(-1, 3, 2, 256)
    assert torch.equal(rows[:, :, 0], rows[:, :, 1])


# odd files


def test_sixteen_bits_become_eight(loader):
    ramp = (np.arange(256, dtype=np.uint16) * 257)[None].repeat(256, 0)
    got = loader.load(Image(data=encoded(PIL.fromarray(ramp), "PNG")))
    assert np.abs(got.frames[0, 0, :, 0].astype(int) - np.arange(256)).max() <= 1
    assert (got.frames[..., 0] == got.frames[..., 2]).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_is_applied(loader, turn):
    from PIL import ImageOps

    picture = drawn(256, 320)
    exif = PIL.Exif()
    exif[0x0112] = turn
    file = io.BytesIO()
    picture.save(file, "PNG", exif=exif)
    want = np.asarray(ImageOps.exif_transpose(PIL.open(io.BytesIO(file.getvalue()))).convert("RGB"))
    assert (loader.load(Image(data=file.getvalue())).frames[0] == want).all()


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animated_file_the_first_picture_counts(loader, form):
    red, blue = PIL.new("RGB", (256, 256), (250, 5, 5)), PIL.new("RGB", (256, 256), (5, 5, 250))
    file = io.BytesIO()
    red.save(file, form, save_all=True, append_images=[blue, blue], duration=100)
    got = loader.load(Image(data=file.getvalue()))
    assert got.frames.shape == (1, 256, 256, 3) and got.frames[..., 0].min() > 200 and got.frames[..., 2].max() < 60


def test_a_turned_video_stands_upright(loader):
    """The display matrix in the track header of a phone's MP4: 90 degrees."""
    data = clip(frames(4, 64, 128), 4)
    at = data.index(b"tkhd") + 4 + 40
    one = 0x00010000
    turned = b"".join((v & 0xFFFFFFFF).to_bytes(4, "big") for v in (0, one, 0, -one, 0, 0, 0, 0, 1 << 30))
    turned = data[:at] + turned + data[at + 36 :]
    plain, upright = loader.load(Video(data=data)), loader.load(Video(data=turned))
    assert upright.grid == (plain.grid[0], plain.grid[2], plain.grid[1])
    want = np.rot90(plain.frames, -1, (1, 2)).astype(int)  # the matrix says: turn clockwise to show
    assert np.abs(upright.frames.astype(int) - want).mean() < 3


def test_what_decodes_counts_not_the_header(loader):
    """The last frames are cut off in the file, while its header still has them."""
    data = bytearray(clip(frames(20, 64, 64), 10, codec="mjpeg"))
    whole = loader.load(Video(data=bytes(data), fps=10))
    assert whole.grid[0] == 10
    at = data.index(b"stsz") + 4 + 12  # version, uniform size and count; then one size per frame
    last = int.from_bytes(data[at - 4 : at], "big")
    assert last == 20
    for i in (18, 19):  # sizes of nothing: header frames that do not exist
        data[at + 4 * i : at + 4 * i + 4] = bytes(4)
    got = loader.load(Video(data=bytes(data), fps=10))
    assert got.grid[0] == 9 and got.text.count("seconds>") == 9


@pytest.mark.parametrize("options", [{}, {"fps": 0.5}, {"frames": 20}])
def test_time_stamps_of_a_long_clip(loader, options):
    got = loader.load(Video(data=clip(frames(177 * 3, 32, 32), 3), **options))
    times = [float(part.rpartition("<")[2]) for part in got.text.split(" seconds>")[:-1]]
    assert len(times) == got.grid[0] and times == sorted(times)
    assert 170 < times[-1] <= 177


@pytest.mark.parametrize(
    ("part", "match"),
    [
        (Image(data=b"just some text"), "not an image of a known format .PNG, JPEG"),
        (Image(data=b""), "empty"),
        (Video(data=b""), "empty"),
        (Video(data=b"x" * 100), "not a video of a known format"),
        (Image(data=encoded(drawn(20, 4001), "PNG")), "4001 x 20 pixels; one side may be at most 200 times"),
        (Image(data=encoded(drawn(300, 300), "PNG")[:700]), "cannot be read: it is damaged"),
        (Image(data=encoded(drawn(300, 300), "JPEG")[:2000]), "cannot be read: it is damaged"),
        (Image(path="/nowhere/x.png"), "image /nowhere/x.png cannot be opened: No such file"),
        (Image(path="/tmp"), "/tmp is not a file"),
        (Image(path="a\0b"), "cannot be opened"),
        (Image(url="ftp://example.org/x.png"), "must be a data URL, http or https"),
        (Image(url="data:image/png;base64,@@@@"), "not valid base64"),
        (Image(url="data:image/png"), "no comma"),
        (Image(url="http://127.0.0.1/x.png"), "does not name a public host"),
        (Video(data=b"#EXTM3U\n#EXT-X-TARGETDURATION:9\nfile:///etc/hostname\n"), "not a video of a known format"),
        (Video(data=b"ffconcat version 1.0\nfile /etc/hostname\n"), "not a video of a known format"),
        (Video(data=clip(frames(4, 32, 32), 4), fps=1, frames=2), "fps and frames; give one"),
        (Video(data=clip(frames(4, 32, 32), 4), frames=769), "frames is 769; it must be 1 to 768"),
        (Video(data=clip(frames(4, 32, 32), 4), fps=0.0), "fps is 0.0; it must be above 0"),
    ],
)
def test_refusals_say_why(loader, part, match):
    with pytest.raises(MediaError, match=match) as error:
        loader.load(part)
    assert error.value.param == "messages" or part.url
    assert loader.load(Image(data=encoded(drawn(40, 40), "PNG"))).grid == (1, 16, 16)


def test_a_sound_file_is_no_video(loader):
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    with pytest.raises(MediaError, match="no video track"):
        loader.load(Video(data=file.getvalue()))


def test_data_urls_and_paths_give_the_same(loader, tmp_path):
    data = encoded(drawn(300, 280), "PNG")
    (tmp_path / "a b.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    parts = [Image(data=data), Image(path=str(tmp_path / "a b.png")), Image(url="data:image/png;base64," + text)]
    made = [loader.load(part) for part in parts]
    assert len({m.digest for m in made}) == 1
    assert made[2] is made[0], "the same bytes are decoded once"
    other = loader.load(Image(data=encoded(drawn(300, 281), "PNG")))
    assert other.digest != made[0].digest


# the process


def pid_of(loader):
    (worker,) = loader._workers._free
    return worker._process.pid


def test_a_decoder_that_dies_is_replaced(loader):
    loader.load(Image(data=encoded(drawn(41, 40), "PNG")))
    before = pid_of(loader)
    os.kill(before, 9)
    data = encoded(drawn(44, 40), "PNG")
    with pytest.raises(MediaError, match="made its decoder fail"):
        loader.load(Image(data=data))
    assert loader.load(Image(data=data)).grid[0] == 1
    assert pid_of(loader) != before


def test_endless_files_end_at_the_memory_limit():
    workers = module._Workers()
    job = {"kind": "image", "path": "/dev/zero", "sizes": {"factor": 32, "temporal": 2, "least": 1, "most": 9}}
    with pytest.raises(MediaError, match="takes more than 2048 MiB of memory"):
        workers.run(job, b"", 60, 1 << 20, "the image")
    workers.close()


def test_decoding_that_takes_too_long_is_ended(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    workers = module._Workers()
    job = {
        "kind": "image",
        "path": str(tmp_path / "pipe"),
        "sizes": {"factor": 32, "temporal": 2, "least": 1, "most": 9},
    }
    with pytest.raises(MediaError, match="takes more than 1 s to decode"):
        workers.run(job, b"", 1.0, 1 << 20, "the image")
    workers.close()
    with pytest.raises(EngineClosedError):
        workers.run(job, b"", 0.5, 1 << 20, "the image")


def test_a_bomb_is_refused_before_it_is_decoded(loader):
    """A PNG of 30,000 x 30,000 pixels in a few kilobytes."""

    def chunk(kind, body):
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = (30000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    body = zlib.compress(bytes(30001 * 3), 9)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    with pytest.raises(MediaError, match="30000 x 30000 pixels; at most 100,000,000"):
        loader.load(Image(data=data))


def test_many_threads_share_few_processes(loader):
    made, failed = {}, []

    def work(i):
        try:
            made[i] = loader.load(Image(data=encoded(drawn(50 + i, 60), "PNG"))).frames.shape
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(made) == 8
    assert len(loader._workers._free) <= module.WORKERS


def test_a_process_waits_for_the_first_file():
    made = MediaLoader(files(), VISION)
    assert not made._workers._free, "counting tokens of text starts none"
    made.start()
    made.start()
    (ready,) = made._workers._free
    made.load(Image(data=encoded(drawn(40, 40), "PNG")))
    assert made._workers._free == [ready]
    made.close()
    made.start()
    assert not made._workers._free and ready._process.poll() is not None


def test_close_ends_the_processes():
    made = MediaLoader(files(), VISION)
    made.load(Image(data=encoded(drawn(40, 40), "PNG")))
    pid = pid_of(made)
    made.close()
    made.close()
    assert subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode != 0
    with pytest.raises(EngineClosedError):
        made.load(Image(data=encoded(drawn(41, 41), "PNG")))


# settings


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"patch_size": 14}, "patch_size is 14; the vision tower needs 16"),
        ({"merge_size": 1}, "merge_size is 1"),
        ({"rescale_factor": 0.01}, "rescale_factor is 0.01"),
        ({"image_mean": [0.5]}, "image_mean is .0.5.; it must be three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({"fps": "2"}, "fps is '2'"),
        ({"min_frames": 9, "max_frames": 8}, "max_frames is 8; it must be a number from 9"),
    ],
)
def test_settings_that_the_tower_cannot_have_are_refused(changes, match):
    with pytest.raises(ContentError, match=match):
        MediaLoader(files(**changes), VISION)


def test_missing_settings_and_sizes():
    with pytest.raises(ContentError, match=r"no preprocessor_config\.json"):
        MediaLoader({}, VISION)
    with pytest.raises(ContentError, match="not valid JSON"):
        MediaLoader(files() | {"preprocessor_config.json": b"{"}, VISION)
    with pytest.raises(ContentError, match="shortest_edge is None"):
        MediaLoader(files() | {"preprocessor_config.json": b"{}"}, VISION)
    older = json.dumps({"min_pixels": 1024, "max_pixels": 4096}).encode()
    made = MediaLoader(files() | {"preprocessor_config.json": older}, VISION)
    assert made.image.sizes == Sizes(32, 2, 1024, 4096) and made.image.mean == (0.5, 0.5, 0.5)
    assert made.most_patches == 25165824 // 256


def test_mutated_files_are_read_or_refused():
    """A short run of `tests/tools/fuzz_media.py`."""
    made = run(random.Random(7), 60, 240)
    found = made["found"]
    assert made["files"] >= 80
    assert sum(count for name, count in found.items() if name.endswith("refused")) > 20
    assert sum(count for name, count in found.items() if name.endswith("read")) > 5
    assert made["grown"] < 32 << 20 and made["largest"] < 600 << 20
    assert made["descriptors left"] <= 0 and made["processes left"] == 0
