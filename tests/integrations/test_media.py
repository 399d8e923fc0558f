"""Images and videos through both adapters: every shape of a block to the engine, and drawn files to the demo model's tower."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ninfer import ChatNInfer
from llama_index.core.base.llms.types import CitableBlock, ImageBlock, TextBlock, ToolCallBlock, VideoBlock
from llama_index.core.llms import ChatMessage
from llama_index.llms.ninfer import NInfer

from ninfer_core import Engine
from ninfer_core.adapter import share
from ninfer_core.errors import InvalidRequestError, MediaError
from ninfer_core.testing import ScriptedEngine
from ninfer_core.types import Image, Text, Video

CLIP = b"\x00\x00\x00\x18ftypmp42 moving"
PIXELS = b"\x89PNG\r\n\x1a\n"
MODES = pytest.mark.parametrize("mode", ["in-process", "http"])


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


MP4 = f"data:video/mp4;base64,{b64(CLIP)}"


@pytest.fixture
def adapters(seeing: ScriptedEngine, serve: Callable[..., str]) -> Callable[[str], tuple[ChatNInfer, NInfer]]:
    """Both adapters over the same engine, here or behind a server."""

    def made(mode: str) -> tuple[ChatNInfer, NInfer]:
        if mode == "in-process":
            return ChatNInfer.from_engine(seeing), NInfer.from_engine(seeing)
        address = serve(seeing)
        return ChatNInfer(model="scripted", base_url=address), NInfer(model="scripted", base_url=address)

    return made


# --- LangChain ---


@MODES
@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ({"type": "video", "base64": b64(CLIP), "mime_type": "video/mp4"}, Video(data=CLIP)),
        ({"type": "video", "base64": b64(CLIP), "mime_type": "video/mp4", "fps": 1.5}, Video(data=CLIP, fps=1.5)),
        ({"type": "video", "source_type": "base64", "data": b64(CLIP), "frames": 8}, Video(data=CLIP, frames=8)),
        ({"type": "video", "url": MP4}, Video(data=CLIP)),
        ({"type": "video_url", "video_url": {"url": MP4}}, Video(data=CLIP)),
        ({"type": "input_video", "video_url": MP4}, Video(data=CLIP)),
        ({"type": "image", "base64": b64(PIXELS), "mime_type": "image/png"}, Image(data=PIXELS)),
    ],
    ids=["v1", "fps", "v0-frames", "data-url", "openai", "short", "image"],
)
async def test_blocks_of_langchain_reach_the_engine(
    mode: str, block: dict[str, Any], wanted: Any, seeing: ScriptedEngine, adapters: Any
) -> None:
    chat, _ = await asyncio.to_thread(adapters, mode)
    talk = [HumanMessage([{"type": "text", "text": "See: "}, block, {"type": "text", "text": " What is it?"}])]
    assert (await asyncio.to_thread(chat.invoke, talk)).content == "ok"
    assert "".join([chunk.text async for chunk in chat.astream(talk)]) == "ok"
    for request in seeing.requests:
        assert request.messages[0].content == (Text("See: "), wanted, Text(" What is it?"))
    assert f"<|{'video' if isinstance(wanted, Video) else 'image'}_pad|>" in seeing.render(seeing.requests[0])


@MODES
def test_a_tool_may_answer_with_a_video(mode: str, seeing: ScriptedEngine, adapters: Any) -> None:
    chat, _ = adapters(mode)
    call = AIMessage("", tool_calls=[{"name": "record", "args": {}, "id": "c1", "type": "tool_call"}])
    result = ToolMessage([{"type": "video", "base64": b64(CLIP), "mime_type": "video/mp4"}], tool_call_id="c1")
    chat.invoke([HumanMessage("Record."), call, result])
    last = seeing.requests[0].messages[-1]
    assert last.role == "tool" and last.content == (Video(data=CLIP),) and last.tool_call_id == "c1"


def test_a_video_by_path_lies_below_the_media_root(seeing: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(CLIP)
    chat = ChatNInfer.from_engine(seeing, media_root=str(tmp_path))
    chat.invoke([HumanMessage([{"type": "video", "path": "clip.mp4"}])])
    assert seeing.requests[0].messages[0].content == (Video(path=str(tmp_path / "clip.mp4")),)
    with pytest.raises(MediaError, match="media_root"):
        chat.invoke([HumanMessage([{"type": "video", "path": "../clip.mp4"}])])
    with pytest.raises(MediaError, match="allow_remote_media"):
        chat.invoke([HumanMessage([{"type": "video", "url": "https://example.org/x.mp4"}])])


def test_a_rate_that_is_none_is_refused_by_the_server(adapters: Any) -> None:
    chat, _ = adapters("http")
    for name, value in (("fps", -1), ("fps", "2"), ("frames", 1.5)):
        with pytest.raises(InvalidRequestError, match=name):
            chat.invoke([HumanMessage([{"type": "video", "base64": b64(CLIP), name: value}])])


# --- LlamaIndex ---


@MODES
async def test_blocks_of_llama_index_reach_the_engine(
    mode: str, seeing: ScriptedEngine, adapters: Any, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_bytes(PIXELS)
    _, llm = await asyncio.to_thread(adapters, mode)
    blocks: list[tuple[Any, Any]] = [
        (ImageBlock(image=PIXELS), Image(data=PIXELS)),
        (ImageBlock(path=tmp_path / "x.png"), Image(data=PIXELS)),
        (ImageBlock(url=f"data:image/png;base64,{b64(PIXELS)}"), Image(data=PIXELS)),
        (VideoBlock(video=CLIP), Video(data=CLIP)),
        (VideoBlock(video=CLIP, fps=2), Video(data=CLIP, fps=2)),
        (CitableBlock(title="t", source="s", content=[ImageBlock(image=PIXELS)]), Image(data=PIXELS)),
    ]
    for block, wanted in blocks:
        talk = [ChatMessage(role="user", blocks=[TextBlock(text="See: "), block])]
        before = len(seeing.requests)
        assert (await asyncio.to_thread(llm.chat, talk)).message.content == "ok"
        *_, last = [item async for item in await llm.astream_chat(talk)]
        assert last.message.content == "ok"
        for request in seeing.requests[before:]:
            assert request.messages[0].content == (Text("See: "), wanted)


@MODES
def test_a_tool_of_llama_index_may_answer_with_an_image(mode: str, seeing: ScriptedEngine, adapters: Any) -> None:
    _, llm = adapters(mode)
    call = ToolCallBlock(tool_call_id="c1", tool_name="draw", tool_kwargs={})
    result = ChatMessage(
        role="tool",
        blocks=[TextBlock(text="Here: "), ImageBlock(image=PIXELS)],
        additional_kwargs={"tool_call_id": "c1"},
    )
    llm.chat([ChatMessage(role="user", content="Draw."), ChatMessage(role="assistant", blocks=[call]), result])
    last = seeing.requests[0].messages[-1]
    assert (last.role, last.content, last.tool_call_id) == ("tool", (Text("Here: "), Image(data=PIXELS)), "c1")


def test_remote_media_of_llama_index_are_refused_unless_allowed(seeing: ScriptedEngine) -> None:
    for kind, block in (("x.png", ImageBlock), ("x.mp4", VideoBlock)):
        talk = [ChatMessage(role="user", blocks=[block(url=f"https://example.org/{kind}")])]
        with pytest.raises(MediaError, match="allow_remote_media"):
            NInfer.from_engine(seeing).chat(talk)
        NInfer.from_engine(seeing, allow_remote_media=True).chat(talk)
        assert seeing.requests[-1].messages[0].content[0].url == f"https://example.org/{kind}"


# --- files to a tower ---


@MODES
def test_a_drawn_file_changes_what_the_demo_model_says(
    mode: str, tower: Engine, request: pytest.FixtureRequest, plain: Callable[[str], bytes]
) -> None:
    """Both adapters and both ways there give the same prompt, so the same greedy answer; colours are told apart."""
    address = request.getfixturevalue("served_tower") if mode == "http" else None
    where: dict[str, Any] = {"base_url": address} if address else {"engine": share(tower)}
    chat = ChatNInfer(model="demo", temperature=0, max_tokens=24, reasoning=False, **where)
    llm = NInfer(model="demo", temperature=0, max_tokens=24, thinking=False, **where)
    question = "What colour is the image?"
    right = 0
    for colour in ("red", "green", "blue", "yellow"):
        data = plain(colour)
        block = {"type": "image", "base64": b64(data), "mime_type": "image/png"}
        talk = [HumanMessage([block, {"type": "text", "text": question}])]
        said = chat.invoke(talk)
        blocks = [ImageBlock(image=data), TextBlock(text=question)]
        other = llm.chat([ChatMessage(role="user", blocks=blocks)])
        assert other.message.content == said.text
        counts = {said.usage_metadata["input_tokens"], chat.get_num_tokens_from_messages(talk)}
        counts |= {other.raw["usage"]["prompt_tokens"], llm.count_tokens([ChatMessage(role="user", blocks=blocks)])}
        assert len(counts) == 1 and counts.pop() > 16
        right += colour in said.text
    assert right >= 3


def test_the_profile_tells_of_the_tower(tower: Engine) -> None:
    named = ChatNInfer(model="demo", engine="never-loaded-tower", engine_options={"vision": True})
    remote = ChatNInfer.from_engine(tower, allow_remote_media=True)
    assert remote.profile["image_url_inputs"] and named.profile["image_url_inputs"] is False
    for profile in (named.profile, ChatNInfer.from_engine(tower).profile):
        assert profile["image_inputs"] and profile["image_tool_message"] and profile["video_inputs"] is False
    blind = ChatNInfer(model="demo", engine="never-loaded-blind").profile
    assert blind["image_inputs"] is False and blind["image_tool_message"] is False
