"""A ninfer server over a real socket for the adapters' tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings

from ninfer_core import Engine, get_engine
from ninfer_core.runtime.validation import check_request
from ninfer_core.testing import ScriptedEngine
from ninfer_core.types import Image, Request, Video
from tests.serving import serving, wait_for


@contextlib.contextmanager
def address(engine: Any, **settings: Any) -> Iterator[str]:
    """The address of a server over an engine; the caller closes the engine."""
    with serving(build_app(engine, ServerSettings(**settings))) as port:
        yield f"http://127.0.0.1:{port}"


async def cancelled_amid(engine: ScriptedEngine, work: Coroutine[Any, Any, Any]) -> None:
    """Cancel a coroutine once its request has reached the engine."""
    before = len(engine.requests)
    task = asyncio.ensure_future(work)
    assert await asyncio.to_thread(wait_for, lambda: len(engine.requests) > before, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """A factory of servers: `serve(engine, api_keys=("k",))` returns the address."""
    with contextlib.ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(address(engine, **settings))


@pytest.fixture(scope="session")
def demo_server() -> Iterator[str]:
    """The demo model behind a server; it is the same engine that the in-process tests use."""
    engine = get_engine("default", None)
    with address(engine.load()) as url:
        yield url


@pytest.fixture(scope="session")
def tower() -> Iterator[Engine]:
    """The demo model with its vision tower, an engine of its own."""
    with Engine.load("demo", vision=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def served_tower(tower: Engine) -> Iterator[str]:
    """The same behind a server that may fetch media."""
    with address(tower, media_domains=()) as url:
        yield url


@pytest.fixture(scope="session")
def plain() -> Callable[[str], bytes]:
    """A factory of PNG files of one colour."""
    pictures = pytest.importorskip("PIL.Image")

    def made(colour: str) -> bytes:
        file = io.BytesIO()
        pictures.new("RGB", (128, 128), colour).save(file, "PNG")
        return file.getvalue()

    return made


class SeenMedium:
    """What stands for an image or a video in a prompt that no tower reads."""

    def __init__(self, part: Image | Video) -> None:
        self.part = part
        kind = "image" if isinstance(part, Image) else "video"
        self.text = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
        self.digest = repr(part).encode()


class SeeingEngine(ScriptedEngine):
    """A scripted engine of a model with a vision tower: media reach the requests; their bytes are not decoded."""

    vision = True

    def __init__(self, *scripts: Any, **options: Any) -> None:
        super().__init__(*scripts, **options)
        self.frontend.media = self

    def load_medium(self, part: Image | Video) -> SeenMedium:
        return SeenMedium(part)

    load = load_medium  # the frontend's name for it; a scripted engine has nothing else to load

    def _check(self, request: Request) -> None:
        check_request(request, addressable=self.tokenizer.addressable, vision=True, grammars=True)


@pytest.fixture
def seeing() -> SeeingEngine:
    """An engine that answers "ok" to whatever it is shown."""
    return SeeingEngine("ok")
