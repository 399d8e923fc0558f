"""Images and videos on the command line: paths in prompts, flags, slash commands, and the demo model seeing them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from cli_support import NINFER, environment
from ninfer_cli.chat import Chat, Settings
from ninfer_cli.main import app
from ninfer_cli.pictures import content, find_media, medium
from typer.testing import CliRunner

from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Image, Text, Video
from tests.media_files import clip, drawn, encoded, frames

pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(encoded(drawn(128, 128), "PNG"))
    (tmp_path / "b c.JPG").write_bytes(encoded(drawn(128, 160), "JPEG"))
    (tmp_path / "d.mp4").write_bytes(clip(frames(4, 64, 64), 4))
    return tmp_path


def shown(parts: object) -> list[object]:
    made = []
    for part in parts:  # type: ignore[attr-defined]
        made.append(part.text if isinstance(part, Text) else (type(part).__name__, Path(part.path).name))
    return made


def test_paths_are_found_where_they_stand(folder: Path) -> None:
    text = f'Compare {folder}/a.png with "{folder}/b c.JPG" and file://{folder}/d.mp4, please.'
    parts, missing = find_media(text)
    assert not missing
    assert shown(parts) == [
        "Compare ", ("Image", "a.png"), " with ", ("Image", "b c.JPG"), " and ", ("Video", "d.mp4"), ", please.",
    ]  # fmt: skip
    escaped = str(folder / "b c.JPG").replace(" ", "\\ ")
    assert shown(find_media(f"{escaped}?")[0]) == [("Image", "b c.JPG"), "?"]


@pytest.mark.parametrize(
    "text",
    [
        "See https://example.org/a.png and ftp://x/y.jpg.",
        "Rename a.png to b.png",
        "the ratio 3/4.png is odd",
        "lib/pictures/a.png is inside a word path",
        "/etc/hosts and ./notes.txt",
        "",
    ],
)
def test_what_is_no_path_stays_text(text: str) -> None:
    assert find_media(text)[1] == [] and content((), text, strict=True) == text


def test_missing_files(folder: Path) -> None:
    text = "What is in /nowhere/x.png?"
    assert find_media(text)[1] == ["/nowhere/x.png"]
    with pytest.raises(InvalidRequestError, match=r"no file '/nowhere/x\.png'"):
        content((), text, strict=True)
    assert content((), text, strict=False) == text
    with pytest.raises(InvalidRequestError, match=r"no file 'nothing\.png'"):
        medium("nothing.png")
    assert isinstance(medium(f"'{folder}/b c.JPG'"), Image) and isinstance(medium(str(folder / "d.mp4")), Video)


def test_what_is_attached_goes_with_one_message(folder: Path, tmp_path: Path) -> None:
    chat = Chat(Settings())
    chat.attach("notes.txt", "hello")
    chat.show(medium(str(folder / "a.png"), "image"))
    assert chat.attached == 2
    request = chat.ask("What?")
    kinds = [type(part).__name__ for part in request.messages[-1].content]
    assert kinds == ["Image", "Text", "Text"] and "hello" in request.messages[-1].text
    chat.abandon()
    assert chat.attached == 2
    chat.ask("What?")
    chat.answer(request.messages[-1])
    assert chat.attached == 0 and chat.ask("And?").messages[-1].content == "And?"
    chat.save(tmp_path / "talk.json")
    again = Chat(Settings())
    again.load(tmp_path / "talk.json")
    assert again.messages[0].content[0] == Image(path=str(folder / "a.png"))


def ninfer(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args), input="")
    assert result.exit_code == code, result.stderr
    return result.stdout if not code else result.stderr


def test_the_demo_sees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image as Picture

    monkeypatch.setenv("NINFER_HOST", "127.0.0.1:9")
    Picture.new("RGB", (128, 128), (230, 25, 25)).save(folder / "plain.png")
    run = ("run", "demo", "--no-think", "-q")
    assert "red" in ninfer(*run, f"What colour is the image? {folder}/plain.png")
    assert "red" in ninfer(*run, "--image", str(folder / "plain.png"), "What colour is the image?")
    seen = {
        ninfer(*run, "--temperature", "0", *args, "What is in the video?")
        for args in (("--video", str(folder / "d.mp4")), ())
    }
    assert len(seen) == 2, "a video changes the answer"
    parts = [{"type": "image_url", "image_url": {"url": str(folder / "plain.png")}}]
    parts.append({"type": "text", "text": "What colour is the image?"})
    (folder / "talk.json").write_text(json.dumps([{"role": "user", "content": parts}]))
    assert "red" in ninfer(*run, "--messages", str(folder / "talk.json"))
    assert "no file" in ninfer(*run, "What is in ./gone.png?", code=2)
    assert "not an image of a known format" in ninfer(*run, "--image", str(folder / "talk.json"), "x", code=2)


def test_the_conversation_sees(folder: Path) -> None:
    import pexpect

    child = pexpect.spawn(
        NINFER[0],
        [*NINFER[1:], "run", "demo", "--vision", "--no-think"],
        env=environment(folder),
        timeout=60,
        encoding="utf-8",
    )
    child.logfile_read = log = io.StringIO()
    child.expect("Ctrl-D to leave")
    for line, answer in (
        (f"/image {folder}/gone.png", "error: there is no file"),
        (f"/image {folder}/a.png", "a.png goes with your next message"),
        ("What is in the picture?", "(I see|The image)"),
        (f"/video {folder}/d.mp4", "d.mp4 goes with your next message"),
        ("What is in the video?", "[.]"),
        (f"What do you see? {folder}/gone.png", "the model gets the path as text"),
    ):
        child.sendline(line)
        child.expect(answer)
    child.sendline("/bye")
    child.expect(pexpect.EOF)
    assert log.getvalue().count("error:") == 1
