"""Images and videos in requests: data URLs, files under the media root, and remote ones behind a fetch guard."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ninfer_core.errors import MediaError
from ninfer_core.frontend.fetch import Fetcher
from ninfer_core.types import Image, Message, Part, Request, Video

from .settings import ServerSettings


def decode_base64(text: str, param: str) -> bytes:
    """Bytes of base64 text; line breaks and missing padding are tolerated, anything else is not.

    Raises:
        MediaError: the text is not base64, or empty.
    """
    compact = text.encode("ascii", "replace").translate(None, b" \t\r\n").rstrip(b"=")
    compact = compact.translate(bytes.maketrans(b"-_", b"+/"))
    try:
        data = base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{param} is not valid base64: {error}", param=param) from error
    if not data:
        raise MediaError(f"{param} is empty; it must hold an encoded file", param=param)
    return data


class MediaReader:
    """Turns what clients send for an image or video into parts, within the operator's limits."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.fetcher = None if settings.media_domains is None else Fetcher(settings.media_domains)

    def part(self, url: str, param: str, *, video: bool = False) -> Image | Video:
        """A part from a URL: its bytes (data URL), its path (file URL), or the URL itself, checked but not fetched.

        Raises:
            MediaError: a scheme or place that this server does not read from.
        """
        kind = Video if video else Image
        scheme = url[:12].partition(":")[0].lower()
        if scheme == "data":
            return kind(data=_data_url(url, param))
        if scheme in ("http", "https"):
            if self.fetcher is None:
                raise MediaError(
                    f"{param} is a remote address, and fetching is off; send the file as a data URL, "
                    "or start the server with --allow-remote-media",
                    param=param,
                )
            self.fetcher.check_url(url, param)
            return kind(url=url)
        if scheme == "file" or url.startswith("/"):
            return kind(path=str(self._local(url, param)))
        raise MediaError(
            f"{param} must be a data URL with base64 content, an http(s) address or a file under the media root",
            param=param,
        )

    def _local(self, url: str, param: str) -> Path:
        root = self.settings.media_root
        refused = MediaError(
            f"{param} names a local file; the server reads only below the folder given by --media-root", param=param
        )
        if root is None:
            raise refused
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise refused
        path = Path(unquote(parts.path)).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            raise refused
        return path

    def fetch(self, request: Request, readable: bool) -> Request:
        """The request with its remote media fetched; blocking, for a worker thread.

        `readable` says whether the model has a vision tower: without one nothing is fetched, the engine refuses.
        """
        if not readable or self.fetcher is None or not any(_remote(message) for message in request.messages):
            return request
        return replace(request, messages=tuple(self._fetch_message(i, m) for i, m in enumerate(request.messages)))

    def _fetch_message(self, index: int, message: Message) -> Message:
        if not _remote(message):
            return message
        parts: list[Part] = []
        for place, part in enumerate(message.content):
            if isinstance(part, (Image, Video)) and part.url is not None:
                assert self.fetcher is not None
                data = self.fetcher.get(part.url, f"messages[{index}].content[{place}]")
                part = replace(part, data=data, url=None)
            parts.append(part)  # type: ignore[arg-type]
        return replace(message, content=tuple(parts))


def _remote(message: Message) -> bool:
    return not isinstance(message.content, str) and any(
        isinstance(part, (Image, Video)) and part.url is not None for part in message.content
    )


def _data_url(url: str, param: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise MediaError(f"{param} is a data URL without a comma", param=param)
    if head.lower().endswith(";base64"):
        return decode_base64(unquote(body) if "%" in body[:256] else body, param)
    data = unquote_to_bytes(body)
    if not data:
        raise MediaError(f"{param} is an empty data URL", param=param)
    return data
