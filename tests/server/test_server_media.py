"""Images and videos through every API and adapter, with the demo model's own tower: plain colours, which it never misses."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.engine import Engine
from ninfer_core.store import demo_path
from ninfer_core.types import Image, Message, Request, Text, Video
from tests.media_files import clip
from tests.serving import serving

Picture = pytest.importorskip("PIL.Image")
COLOURS = {"red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220), "yellow": (240, 220, 40)}
ASK = "What colour is the image?"


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Picture.new("RGB", (128, 128), COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


def b64(colour: str) -> str:
    return base64.b64encode(png(colour)).decode()


def url_of(colour: str) -> str:
    return "data:image/png;base64," + b64(colour)


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[str, Engine]]:
    engine = Engine.load("demo", device="cpu", max_sequences=2, threads=1, vision=True)
    with serving(build_app(engine, ServerSettings(slots=2), artifact=demo_path())) as port:
        yield f"http://127.0.0.1:{port}", engine
    engine.close()


def test_openai(demo: tuple[str, Engine]) -> None:
    client = openai.OpenAI(base_url=demo[0] + "/v1", api_key="none")
    part = {"type": "image_url", "image_url": {"url": url_of("red"), "detail": "high"}}
    messages: list[Any] = [{"role": "user", "content": [part, {"type": "text", "text": ASK}]}]
    made = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=40, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert made.choices[0].message.content == "The image is plain red." and made.usage and made.usage.prompt_tokens > 30
    assert made.usage.prompt_tokens_details.image_tokens == 16, "128 x 128 points are 16 tokens"  # type: ignore[union-attr]
    given: Any = [{"type": "input_image", "image_url": url_of("blue")}, {"type": "input_text", "text": ASK}]
    response = client.responses.create(model="demo", input=[{"role": "user", "content": given}], max_output_tokens=80)
    assert "blue" in response.output_text
    for bad, code in ((url_of("red")[:60], 400), ("http://127.0.0.1/x.png", 400), ("file:///etc/hostname", 400)):
        part = {"type": "image_url", "image_url": {"url": bad}}
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [part]}])  # type: ignore[list-item,misc]
        assert error.value.status_code == code


def test_anthropic_counts_what_it_uses(demo: tuple[str, Engine]) -> None:
    client = anthropic.Anthropic(base_url=demo[0], api_key="none")
    source = {"type": "base64", "media_type": "image/png", "data": b64("green")}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": ASK}]
    messages: Any = [{"role": "user", "content": content}]
    counted = client.messages.count_tokens(model="demo", messages=messages).input_tokens
    made = client.messages.create(model="demo", messages=messages, max_tokens=60)
    assert made.content[-1].text == "The image is plain green." and made.usage.input_tokens == counted  # type: ignore[union-attr]


def test_anthropic_tool_results_hold_images(demo: tuple[str, Engine]) -> None:
    client = anthropic.Anthropic(base_url=demo[0], api_key="none")
    tools: Any = [{"name": "screen", "description": "A picture.", "input_schema": {"type": "object", "properties": {}}}]
    source = {"type": "base64", "media_type": "image/png", "data": b64("red")}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "screen", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    counted = client.messages.count_tokens(model="demo", messages=messages, tools=tools).input_tokens
    made = client.messages.create(model="demo", messages=messages, tools=tools, max_tokens=8)
    assert made.usage.input_tokens == counted > 16


def test_ollama(demo: tuple[str, Engine]) -> None:
    client = ollama.Client(host=demo[0])
    message = {"role": "user", "content": ASK, "images": [b64("yellow")]}
    assert client.chat("demo", [message], think=False).message.content == "The image is plain yellow."
    assert "blue" in client.generate("demo", ASK, images=[png("blue")], think=False).response
    assert "vision" in (client.show("demo").capabilities or [])


def test_the_server_says_that_it_sees(demo: tuple[str, Engine]) -> None:
    props = httpx.get(demo[0] + "/props").json()
    assert props["modalities"]["vision"] is True


def test_adapters(demo: tuple[str, Engine]) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_ninfer import ChatNInfer
    from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.ninfer import NInfer

    url, engine = demo
    for model in (
        ChatNInfer.from_engine(engine, reasoning=False),
        ChatNInfer(model="demo", base_url=url, reasoning=False),
    ):
        block = {"type": "image", "base64": b64("red"), "mime_type": "image/png"}
        message = HumanMessage([block, {"type": "text", "text": ASK}])
        assert model.invoke([message]).content == "The image is plain red."
    local = ChatNInfer.from_engine(engine, reasoning=False)
    counted = local.get_num_tokens_from_messages([message])
    usage = local.invoke([message]).usage_metadata
    assert usage and usage["input_tokens"] == counted
    assert isinstance(ToolMessage([block], tool_call_id="x").content, list)
    talk = [
        ChatMessage(
            role="user", blocks=[ImageBlock(image=png("green"), image_mimetype="image/png"), TextBlock(text=ASK)]
        )
    ]
    assert NInfer.from_engine(engine, thinking=False).chat(talk).message.content == "The image is plain green."


def test_the_client_sends_files(demo: tuple[str, Engine], tmp_path: Any) -> None:
    from ninfer_core.client import Client

    (tmp_path / "a.png").write_bytes(png("blue"))
    client = Client(demo[0], model="demo")
    content = (Image(path=str(tmp_path / "a.png")), Text(ASK))
    made = client.submit(Request((Message("user", content),), thinking=False, max_tokens=40)).result()
    assert made.text == "The image is plain blue."
    client.close()


def movie(*colours: str) -> str:
    """A data URL of two seconds in which colours follow each other, four frames each."""
    import numpy as np

    levels = np.concatenate([np.full((4, 128, 128, 3), COLOURS[colour], np.uint8) for colour in colours])
    return "data:video/mp4;base64," + base64.b64encode(clip(levels, 4, codec="mjpeg")).decode()


def test_openai_takes_videos(demo: tuple[str, Engine]) -> None:
    """As `video_url` and `input_video`; two frames a second unless the request says otherwise, counted exactly."""
    client = openai.OpenAI(base_url=demo[0] + "/v1", api_key="none")
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    counts = []
    for more in ({}, {"frames": 8}, {"fps": 4.0}):
        part = {"type": "video_url", "video_url": {"url": movie("red", "blue")}, **more}
        messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What is in the video?"}]}]
        made = client.chat.completions.create(model="demo", messages=messages, max_tokens=20, extra_body=off)
        counts.append(made.usage.prompt_tokens_details.image_tokens)  # type: ignore[union-attr]
        parts = (Video(url=movie("red", "blue"), **more), Text("What is in the video?"))
        request = Request((Message("user", parts),), thinking=False, max_tokens=20)
        assert made.usage and made.usage.prompt_tokens == demo[1].count_tokens(request)
        assert made.choices[0].message.content == demo[1].submit(request).result().text
    assert counts == [2 * 16, 4 * 16, 4 * 16], "slices of two frames, 16 tokens each"
    content: Any = [{"type": "input_video", "video_url": movie("green")}, {"type": "input_text", "text": "What moves?"}]
    response = client.responses.create(model="demo", input=[{"role": "user", "content": content}], max_output_tokens=16)
    assert response.usage and response.usage.input_tokens > 2 * 16


def test_openai_tool_results_hold_images(demo: tuple[str, Engine]) -> None:
    client = openai.OpenAI(base_url=demo[0] + "/v1", api_key="none")
    call: Any = {"id": "t1", "type": "function", "function": {"name": "screen", "arguments": "{}"}}
    shown = {"type": "image_url", "image_url": {"url": url_of("red")}}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": [shown]},
    ]
    made = client.chat.completions.create(model="demo", messages=messages, max_tokens=4)
    assert made.usage.prompt_tokens_details.image_tokens == 16  # type: ignore[union-attr]
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "t1", "name": "screen", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "t1",
            "output": [{"type": "input_image", "image_url": url_of("red")}],
        },
    ]
    response = client.responses.create(model="demo", input=items, max_output_tokens=16)
    assert response.usage and response.usage.input_tokens == made.usage.prompt_tokens  # type: ignore[union-attr]
    counted = httpx.post(demo[0] + "/v1/responses/input_tokens", json={"model": "demo", "input": items}).json()
    assert counted["input_tokens"] == response.usage.input_tokens


def test_ollama_counts_what_it_uses(demo: tuple[str, Engine]) -> None:
    """In user messages and in what a tool answers."""
    client = ollama.Client(host=demo[0])
    call = {"function": {"name": "screen", "arguments": {}}}
    talk: Any = [
        {"role": "user", "content": ASK, "images": [b64("yellow")]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "screen", "content": "shot", "images": [b64("red"), b64("blue")]},
    ]
    counts = []
    for length in (1, 3):
        made = client.chat("demo", talk[:length], think=False, options={"num_predict": 2})
        counts.append(made.prompt_eval_count or 0)
    parts = (Image(data=png("yellow")), Text(ASK))
    own = demo[1].count_tokens(Request((Message("user", parts),), thinking=False))
    assert counts[0] == own and counts[1] > counts[0] + 32
