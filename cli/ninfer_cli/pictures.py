"""Images and videos that the user names: `--image`, `--video`, `/image`, `/video`, and paths inside a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ninfer_core.errors import InvalidRequestError
from ninfer_core.types import Image, Part, Text, Video

IMAGES = ("png", "jpg", "jpeg", "webp", "gif", "avif", "bmp")
VIDEOS = ("mp4", "mov", "webm", "mkv", "m4v")
_END = rf"\.(?:{'|'.join(IMAGES + VIDEOS)})"
_PATH = re.compile(
    rf"""(?P<mark>["'])(?P<quoted>(?:file://|~?/|\.{{1,2}}[\\/]|[A-Za-z]:[\\/])[^"'\n]*?{_END})(?P=mark)
    |(?<![\w.:/\\~])(?P<bare>(?:file://)?(?:~|\.{{1,2}})?/(?:\\.|[^\s"'\\])*?{_END})(?![\w/.]\w)
    |(?<!\w)(?P<drive>[A-Za-z]:[\\/][^\s"']*?{_END})(?!\w)""",
    re.IGNORECASE | re.VERBOSE,
)


def medium(text: str, kind: str | None = None) -> Image | Video:
    """The image or video at a path (`~`, quotes and `file://` are understood).

    Args:
        text: the path.
        kind: "image" or "video"; None: what the name's ending says.

    Raises:
        InvalidRequestError: there is no such file.
    """
    name = text.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    if name.lower().startswith("file://"):
        name = unquote(urlsplit(name).path)
    path = Path(name).expanduser()
    if not path.is_file():
        raise InvalidRequestError(f"there is no file {name!r} to show the model")
    video = kind == "video" or (kind is None and path.suffix.lower().lstrip(".") in VIDEOS)
    return (Video if video else Image)(path=str(path.resolve()))


def find_media(text: str) -> tuple[list[Part], list[str]]:
    """A prompt in parts, each path of an image or video in it replaced by the file, and the paths without a file.

    Only what begins like a path counts (`/`, `./`, `../`, `~/`, `file://`, a drive letter); names with blanks go in
    quotes, or with a backslash before each blank. Web addresses are text.
    """
    parts: list[Part] = []
    missing: list[str] = []
    end = 0
    for match in _PATH.finditer(text):
        named = match.group("quoted") or match.group("drive") or re.sub(r"\\(.)", r"\1", match.group("bare"))
        try:
            found = medium(named)
        except InvalidRequestError:
            missing.append(named)
            continue
        parts += [Text(text[end : match.start()]), found]
        end = match.end()
    parts.append(Text(text[end:]))
    return [part for part in parts if not isinstance(part, Text) or part.text.strip()], missing


def content(media: Sequence[Part], text: str, *, strict: bool) -> str | tuple[Part, ...]:
    """The content of a user message: media handed in, then the text with the files its paths name.

    Raises:
        InvalidRequestError: `strict`, and a path in the text has no file.
    """
    parts, missing = find_media(text)
    if missing and strict:
        raise InvalidRequestError(
            f"there is no file {missing[0]!r}; a path of an image or video in the prompt must exist "
            "(text on stdin is not searched for paths)"
        )
    if not media and all(isinstance(part, Text) for part in parts):
        return text
    return (*media, *parts)
