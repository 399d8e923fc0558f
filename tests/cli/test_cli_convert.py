"""`ninfer convert`: a tiny checkpoint becomes an artifact; refusals, a full disk, interruption and progress."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_support import TINY_CONFIG
from ninfer_cli.display import Console, Progress, cut, loading, table, width
from ninfer_cli.main import app
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import ninfer_core.convert as converter
from ninfer_core.artifact import Artifact
from ninfer_core.testing import scripted_resources

torch.set_num_threads(1)


def write_checkpoint(path: Path) -> Path:
    """A dense four-layer checkpoint without MTP and vision, 512 tokens."""
    h, width, heads, d, keys, values, vocabulary = 128, 256, 2, 256, 128, 256, 512
    root = "model.language_model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{root}embed_tokens.weight": (vocabulary, h),
        f"{root}norm.weight": (h,),
        "lm_head.weight": (vocabulary, h),
    }
    for i in range(4):
        layer = f"{root}layers.{i}."
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (h,)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (width, h)
        shapes[f"{layer}mlp.down_proj.weight"] = (h, width)
        if i == 3:
            a = f"{layer}self_attn."
            shapes |= {f"{a}q_proj.weight": (2 * heads * d, h), f"{a}o_proj.weight": (h, heads * d)}
            shapes |= {f"{a}k_proj.weight": (d, h), f"{a}v_proj.weight": (d, h)}
            shapes |= {f"{a}q_norm.weight": (d,), f"{a}k_norm.weight": (d,)}
        else:
            g = f"{layer}linear_attn."
            shapes |= {f"{g}in_proj_qkv.weight": (2 * keys + values, h), f"{g}in_proj_z.weight": (values, h)}
            shapes |= {f"{g}in_proj_a.weight": (2, h), f"{g}in_proj_b.weight": (2, h)}
            shapes |= {f"{g}conv1d.weight": (2 * keys + values, 1, 4), f"{g}out_proj.weight": (h, values)}
            shapes |= {f"{g}A_log": (2,), f"{g}dt_bias": (2,), f"{g}norm.weight": (128,)}
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(TINY_CONFIG))
    for name, data in scripted_resources().items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


def convert(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["convert", *map(str, args)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output and not result.stdout
    return result


@pytest.mark.parametrize("encoder", ["search", "maxabs"])
def test_a_checkpoint_becomes_an_artifact(checkpoint: Path, tmp_path: Path, encoder: str) -> None:
    result = convert(checkpoint, tmp_path / "out", "--encoder", encoder, "--no-draft-head", "--model-id", "mine")
    assert "mine" in result.stderr and "objects" in result.stderr
    with Artifact.open(tmp_path / "out") as artifact:
        assert (artifact.model_id, artifact.encoder) == ("mine", encoder)
        assert "text/draft_head" not in artifact.tensors
        artifact.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_quiet_says_nothing(checkpoint: Path, tmp_path: Path) -> None:
    assert convert(checkpoint, tmp_path / "out", "--no-draft-head", "--quiet", "--encoder", "maxabs").stderr == ""


def test_refusals_name_the_option_to_use(checkpoint: Path, tmp_path: Path) -> None:
    result = convert(checkpoint, tmp_path / "out", code=6)
    assert "--no-draft-head" in result.stderr and "--counts FILE" in result.stderr and "draft=" not in result.stderr
    assert "original checkpoint" in convert(checkpoint, tmp_path / "out", "--vision", code=6).stderr
    convert(checkpoint, tmp_path / "out", "--encoder", "best", code=2)
    convert(checkpoint, tmp_path / "out", "--form", "gguf", code=2)
    convert(tmp_path / "nothing", tmp_path / "out", code=2)
    assert not list(tmp_path.iterdir())


def test_a_destination_that_exists_is_not_touched(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = convert(checkpoint, tmp_path / "out", "--no-draft-head", code=2)
    assert "already exists" in result.stderr


def test_a_checkpoint_without_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "bad")
    (tmp_path / "bad/tokenizer.json").unlink()
    assert "tokenizer.json" in convert(tmp_path / "bad", tmp_path / "out", "--no-draft-head", code=6).stderr


def test_too_little_space_is_found_before_writing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    result = convert(checkpoint, tmp_path / "out", "--no-draft-head", code=7)
    assert "1,000 are free" in result.stderr and not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_ends_with_7_and_the_next_run_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = converter._put, []

    def put(path: Path, pieces: list) -> int:
        calls.append(path)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, pieces)

    monkeypatch.setattr(converter, "_put", put)
    result = convert(checkpoint, tmp_path / "out", "--no-draft-head", "--workers", "1", code=7)
    assert "not enough disk space" in result.stderr and not (tmp_path / "out").exists()
    monkeypatch.setattr(converter, "_put", real)
    assert "from an earlier run" in convert(checkpoint, tmp_path / "out", "--no-draft-head").stderr
    with Artifact.open(tmp_path / "out") as artifact:
        artifact.verify()


def test_ctrl_c_says_how_to_go_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, pieces: list) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "_put", interrupt)
    result = convert(checkpoint, tmp_path / "out", "--no-draft-head", code=130)
    assert "the same command goes on from here" in result.stderr and not (tmp_path / "out").exists()


class Stream:
    """A text stream that is or is not a terminal."""

    encoding = "utf-8"

    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("terminal", "environ", "live"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    terminal: bool, environ: dict[str, str], live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("ninfer_cli.display.time.monotonic", lambda: clock[0])
    stream = Stream(terminal)
    with Progress(Console(environ, out=Stream(False), err=stream), "work") as progress:
        for i in range(101):
            clock[0] = i / 10
            progress.update(i * 10**9, 100 * 10**9, "object")
    if live:
        assert "[" + "#" * 12 + "." * 12 + "]" in stream.text and stream.text.endswith("\r\x1b[K")
        assert "\n" not in stream.text
    else:
        assert "\x1b" not in stream.text and "\r" not in stream.text
        assert stream.text.splitlines() == [
            "work   50 %  50.0 GB of 100.0 GB  object",
            "work  100 %  100.0 GB of 100.0 GB  object",
        ]


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_progress_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "columns", columns)
    stream = Stream(True)
    with Progress(Console({}, out=Stream(False), err=stream), "\u6a21\u578b" * 3) as progress:
        progress.update(3 * 10**9, 9 * 10**9, "model-00001-of-00009.safetensors")
    lines = stream.text.split("\r\x1b[K")
    assert any("[" in line for line in lines) and all(width(line) < columns for line in lines)


def test_columns_of_wide_characters_line_up() -> None:
    rows = table(("NAME", "SIZE"), [("\u6a21\u578b", "1"), ("e\u0301", "22"), ("plain", "3")], right=[1])
    assert rows == ["NAME   SIZE", "\u6a21\u578b      1", "e\u0301        22", "plain     3"]
    assert len({width(row) for row in rows}) == 1
    assert cut("a\u6a21\u578bb", 4) == "a\u6a21" and cut("ab", 5) == "ab" and cut("ab", 0) == ""


def test_loading_shows_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ninfer_cli.display.time.monotonic", lambda: clock[0])
    stream = Stream(True)
    with loading(Console({}, out=Stream(False), err=stream), "qwen") as progress:
        clock[0] = 2.0
        progress(9 * 10**9, 18 * 10**9)
    assert "loading qwen [############............]  50 %  9.0 GB of 18.0 GB  4.5 GB/s" in stream.text


def test_quiet_progress_shows_nothing() -> None:
    stream = Stream(True)
    with Progress(Console({}, out=Stream(False), err=stream), "work", quiet=True) as progress:
        progress.update(1, 2)
    assert stream.text == ""
