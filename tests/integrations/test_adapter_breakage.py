"""Adapters where things break: nobody answers, a server dies, loops close, processes fork, engines are not what they were."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from langchain_core import exceptions as lc
from langchain_core.load import dumpd
from langchain_core.messages import HumanMessage
from langchain_ninfer import ChatNInfer
from langchain_ninfer.messages import to_messages
from llama_index.core.llms import ChatMessage
from llama_index.llms.ninfer import NInfer
from pydantic import SecretStr

from ninfer_core import adapter
from ninfer_core.client import Client
from ninfer_core.engine import EngineOptions
from ninfer_core.errors import (
    EngineClosedError,
    EngineConflictError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    ServerUnreachableError,
)
from ninfer_core.runtime.registry import Registry
from ninfer_core.testing import Script, ScriptedEngine, Tokens, Wait

USER = [ChatMessage(role="user", content="hi")]
NOBODY = "http://127.0.0.1:9"
Serve = Callable[..., str]


def text_of(answer: Any) -> str:
    return str(answer.content if hasattr(answer, "content") else answer.message.content)


# --- servers ---


async def test_nobody_answers() -> None:
    chat = ChatNInfer(model="demo", base_url=NOBODY, max_retries=0)
    llm = NInfer(model="demo", base_url=NOBODY, max_retries=0)
    calls: list[Callable[[], Any]] = [
        lambda: chat.invoke("hi"),
        lambda: list(chat.stream("hi")),
        lambda: list(chat.stream_events("hi", version="v3")),
        lambda: chat.get_num_tokens("hi"),
        lambda: chat.load(),
    ]
    for call in calls:
        with pytest.raises(lc.ModelConnectionError, match="ninfer serve") as told:
            await asyncio.to_thread(call)
        assert isinstance(told.value, ServerUnreachableError | ConnectionError) and told.value.is_retryable
    with pytest.raises(lc.ModelConnectionError, match=NOBODY):
        await chat.ainvoke("hi")
    for other in (lambda: llm.chat(USER), lambda: list(llm.stream_chat(USER)), lambda: llm.count_tokens(USER)):
        with pytest.raises(ServerUnreachableError, match="ninfer serve"):
            await asyncio.to_thread(other)
    assert llm.metadata.context_window > 0, "metadata asks nobody"


class Dying(httpx.AsyncBaseTransport):
    """A server that dies after its first words, or answers with something else altogether."""

    def __init__(self, body: bytes | None = None, status: int = 200) -> None:
        self.asked = 0
        self.body, self.status = body, status

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        return httpx.Response(self.status, content=self.body if self.body is not None else self.words())

    async def words(self) -> AsyncIterator[bytes]:
        delta = {"choices": [{"index": 0, "delta": {"content": "half"}}]}
        yield b"data: " + json.dumps(delta).encode() + b"\n\n"
        raise httpx.ReadError("connection reset by peer")


async def test_asking_a_server_for_its_limits_holds_up_no_loop() -> None:
    """The answer comes from this very loop: a call that waited on it would never end."""

    async def models(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"data": [{"id": "x", "max_model_len": 99}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(models, "127.0.0.1", 0)
    async with server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        chat, llm = ChatNInfer(model="x", base_url=address), NInfer(model="x", base_url=address)
        assert (await asyncio.wait_for(chat.aload(), 120)).profile["max_input_tokens"] == 99
        assert (await asyncio.wait_for(llm.aload(), 120)).metadata.context_window == 99


async def test_a_server_that_dies_amid_a_stream() -> None:
    """What was said is seen, the error is one that passes, and no second attempt doubles the words."""
    server = Dying()
    client = httpx.AsyncClient(transport=server)
    chat = ChatNInfer(model="x", base_url="http://server", http_client=client)
    llm = NInfer(model="x", base_url="http://server", http_client=client)
    said = []
    with pytest.raises(lc.ModelConnectionError, match="connection reset"):
        async for chunk in chat.astream("hi"):
            said.append(chunk.text)
    assert "".join(said) == "half" and server.asked == 1
    said = []
    with pytest.raises(ServerUnreachableError):
        async for item in await llm.astream_chat(USER):
            said.append(item.delta)
    assert "".join(said) == "half" and server.asked == 2
    with pytest.raises(lc.ModelConnectionError):
        await chat.ainvoke("hi")


def test_a_server_of_another_kind_need_not_know_its_context() -> None:
    def models(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"object": "list", "data": [{"id": "other", "object": "model"}]})

    fields = {"model": "other", "base_url": "http://server"}
    client = httpx.AsyncClient(transport=httpx.MockTransport(models))
    chat = ChatNInfer(**fields, http_client=client).load()
    assert "max_input_tokens" not in chat.profile and chat.profile["tool_calling"]
    assert NInfer(**fields, http_client=client).load().metadata.context_window > 0


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>not a model</html>"), (404, b"<html>no such page</html>"), (502, b"bad gateway"), (200, b"")],
)
def test_an_address_of_something_else(status: int, body: bytes) -> None:
    client = httpx.AsyncClient(transport=Dying(body, status))
    chat = ChatNInfer(model="x", base_url="http://server", http_client=client, max_retries=0)
    for call in (lambda: chat.invoke("hi"), lambda: list(chat.stream("hi")), lambda: chat.load()):
        with pytest.raises(lc.ModelError):
            call()


def test_a_stream_line_that_is_no_json() -> None:
    client = httpx.AsyncClient(transport=Dying(b"data: {broken\n\ndata: [DONE]\n\n"))
    with pytest.raises(lc.ModelError, match="stream"):
        ChatNInfer(model="x", base_url="http://server", http_client=client).invoke("hi")


@pytest.mark.parametrize("kind", [ChatNInfer, NInfer, Client])
def test_addresses_and_clients_that_cannot_be(kind: Any) -> None:
    fields: dict[str, Any] = {} if kind is Client else {"model": "demo"}
    for wrong in ("127.0.0.1:11434", "nonsense", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="http://"):
            kind(base_url=wrong, **fields)
    with httpx.Client() as client, pytest.raises(ValueError, match="AsyncClient"):
        kind(base_url=NOBODY, http_client=client, **fields)
    if kind is not Client:
        with pytest.raises(ValueError, match="empty"):
            kind(model=" ")


def test_both_names_of_the_client() -> None:
    server = Dying()
    chat = ChatNInfer(model="x", base_url="http://server", http_async_client=httpx.AsyncClient(transport=server))
    with pytest.raises(lc.ModelConnectionError):
        chat.invoke("hi")
    assert server.asked == 1


def test_instances_of_one_address_share_connections(serve: Serve) -> None:
    address = serve(ScriptedEngine("ok"))
    one, two = ChatNInfer(model="scripted", base_url=address), NInfer(model="scripted", base_url=address + "/v1/")
    assert one._engine()._link is ChatNInfer(model="other", base_url=address)._engine()._link
    assert one.invoke("hi").content == two.chat(USER).message.content == "ok"
    one.close()
    assert one.invoke("hi").content == "ok", "a closed client is made anew"


# --- event loops, threads, processes ---


@pytest.mark.parametrize("mode", ["in-process", "http"])
def test_a_loop_that_closes_amid_a_stream_frees_the_sequence(mode: str, serve: Serve) -> None:
    engine = ScriptedEngine(Script(["</think>\n\n", Tokens("a"), Wait(threading.Event())], times=2), "ok")
    where: dict[str, Any] = {"base_url": serve(engine)} if mode == "http" else {"engine": adapter.share(engine)}
    chat, llm = ChatNInfer(model="scripted", **where), NInfer(model="scripted", **where)

    async def leave(stream: Any) -> Any:
        await anext(stream)
        return stream  # not closed: the loop ends first

    async def leave_other() -> Any:
        return await leave(await llm.astream_chat(USER))

    kept = [asyncio.run(leave(chat.astream("hi"))), asyncio.run(leave_other())]
    assert engine.wait_idle(60) and len(engine.cancelled) == 2 and kept
    for _ in range(2):  # a new loop each time
        assert asyncio.run(chat.ainvoke("hi")).content == "ok"
        assert asyncio.run(llm.achat(USER)).message.content == "ok"


FORKING = """
import os, sys
from ninfer_core.client import Client
client = Client(sys.argv[1])
assert client.generate("hi").text == "ok"
child = os.fork()
if child == 0:
    os._exit(0 if client.generate("hi").text == "ok" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert client.generate("hi").text == "ok"
"""


def test_a_forked_process_makes_connections_of_its_own(serve: Serve) -> None:
    address = serve(ScriptedEngine("ok"))
    subprocess.run([sys.executable, "-c", FORKING, address], check=True, timeout=240)


# --- packages ---


@pytest.mark.parametrize(
    ("module", "absent", "extra"),
    [
        ("langchain_ninfer", "langchain_core", "langchain"),
        ("llama_index.llms.ninfer", "llama_index.core", "llama-index"),
    ],
)
def test_a_framework_that_is_not_installed_is_named(module: str, absent: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{absent!r}] = None\ntry:\n    import {module}\nexcept ImportError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=240, capture_output=True, text=True)
    assert f'pip install "ninfer[{extra}]"' in done.stdout


def test_the_core_needs_no_framework_and_no_gpu_stack() -> None:
    program = (
        "import sys, ninfer_core, ninfer_core.client, ninfer_core.adapter\n"
        "assert not {'langchain_core', 'llama_index', 'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


# --- engines ---


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Engines by name, as a process has them, with scripted engines in place of models."""

    def loader(spec: EngineOptions) -> ScriptedEngine:
        return ScriptedEngine(f"{spec.model} answers", name=spec.model)

    made = Registry(loader, loader)
    monkeypatch.setattr("ninfer_core.engine.get_engine", lambda name, spec=None: made.get(name, spec))
    return made


def test_two_engines_in_one_process(registry: Registry) -> None:
    one = ChatNInfer(model="demo", engine="one")
    two = ChatNInfer(model="demo", engine="two")
    three = NInfer(model="demo", engine="two")
    assert one.invoke("hi").content == "demo answers"
    with pytest.raises(lc.ModelAPIError, match=r"'one'.*close the first"):
        two.invoke("hi")
    with pytest.raises(EngineConflictError, match="'one'"):
        three.chat(USER)
    one.close()
    two.load()
    assert two.invoke("hi").content == "demo answers" == three.chat(USER).message.content


def test_an_engine_of_other_options_or_another_model(registry: Registry) -> None:
    one = ChatNInfer(model="demo", engine_options={"max_sequences": 2})
    assert one.invoke("hi").content == "demo answers"
    assert ChatNInfer(model="demo").invoke("hi").content == "demo answers", "no options: the engine as it is"
    with pytest.raises(lc.ModelAPIError, match="max_sequences"):
        ChatNInfer(model="demo", engine_options={"max_sequences": 3}).invoke("hi")
    with pytest.raises(ModelNotFoundError, match="demo"):
        NInfer(model="other").chat(USER)
    with pytest.raises(lc.ModelInvalidRequestError, match="string"):
        one.invoke("hi", model=3)
    with pytest.raises(InvalidRequestError, match="string"):
        NInfer(model="demo").chat(USER, model=3)


def test_a_name_is_not_taken_by_a_model_that_never_loaded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(spec: EngineOptions) -> ScriptedEngine:
        if spec.model == "mistyped":
            raise ModelNotFoundError("model 'mistyped' is unknown")
        return ScriptedEngine("ok", name=spec.model)

    monkeypatch.setattr(registry, "loader", loader)
    monkeypatch.setattr(registry, "describer", loader)
    wrong = ChatNInfer(model="mistyped", engine_options={"max_sequences": 3})
    with pytest.raises(lc.ModelNotFoundError, match="mistyped"):
        wrong.invoke("hi")
    NInfer(model="only spoken of").metadata
    assert ChatNInfer(model="right").invoke("hi").content == "ok"
    with pytest.raises(lc.ModelAPIError, match=r"other options.*mistyped"):
        wrong.invoke("hi")
    with pytest.raises(ModelNotFoundError, match="right"):
        NInfer(model="only spoken of").chat(USER)


def test_an_engine_that_is_closed_or_gone(registry: Registry) -> None:
    chat = ChatNInfer(model="demo")
    chat.invoke("hi")
    chat.close()
    assert chat.invoke("hi").content == "demo answers", "the name makes a new one"
    engine = ScriptedEngine("ok")
    own = ChatNInfer.from_engine(engine)
    engine.close()
    with pytest.raises(lc.ModelAPIError, match="closed"):
        own.invoke("hi")
    with pytest.raises(lc.ModelAPIError, match="from_engine"):
        ChatNInfer(model="scripted", engine="@dead").invoke("hi")
    with pytest.raises(EngineClosedError, match="from_engine"):
        NInfer(model="scripted", engine="@dead").chat(USER)


# --- odd inputs ---


@pytest.mark.parametrize("mode", ["in-process", "http"])
def test_messages_without_content(mode: str, serve: Serve) -> None:
    engine = ScriptedEngine("ok")
    where: dict[str, Any] = {"base_url": serve(engine)} if mode == "http" else {"engine": adapter.share(engine)}
    chat, llm = ChatNInfer(model="scripted", **where), NInfer(model="scripted", **where)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talks: list[Any] = [
        "",
        [{"role": "user", "content": None}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": None, "tool_call_id": "a"},
        ],
    ]
    for talk in talks:
        assert chat.invoke(talk).content == "ok"
    assert llm.chat([ChatMessage(role="user", content=None)]).message.content == "ok"
    assert llm.complete("").text == "ok"
    with pytest.raises(lc.ModelInvalidRequestError, match="messages"):
        chat.invoke([])
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat([])


@pytest.mark.parametrize(
    "tools",
    [
        ["no tool"],
        [3],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
        [{"type": "function", "function": {"name": "f g<", "parameters": {}}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}] * 2,
    ],
    ids=lambda tools: str(tools)[:40],
)
def test_tools_that_are_none(tools: list[Any]) -> None:
    chat = ChatNInfer.from_engine(ScriptedEngine("ok"))
    with pytest.raises(lc.ModelInvalidRequestError, match="tools"):
        chat.bind_tools(tools).invoke("hi")


NOT_JSON = {"type": "object", "properties": {"x": {"default": object()}}}


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": float("nan")},
        {"stop": 3},
        {"stop": ["\ud800"]},
        {"logit_bias": [1]},
        {"priority": "x"},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": "x"},
        {"tools": 3},
        {"tools": "f"},
        {"tool_choice": "any"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": NOT_JSON}}]},
        {"response_format": NOT_JSON},
    ],
)
def test_wrong_options_are_the_same_error_in_both_modes(options: dict[str, Any], serve: Serve) -> None:
    """Over HTTP too, where a wrong value would fail to be written, or not travel at all."""
    with ScriptedEngine("Hello!", name="same-errors") as engine:
        url = serve(engine)
        chats = (ChatNInfer.from_engine(engine), ChatNInfer(model="same-errors", base_url=url))
        llms = (NInfer.from_engine(engine), NInfer(model="same-errors", base_url=url))
        for told_by in (
            [lambda m=m: m.invoke("hi", **options) for m in chats],
            [lambda m=m: m.chat(USER, **options) for m in llms],
        ):
            texts = []
            for run in told_by:
                with pytest.raises(InvalidRequestError) as told:
                    run()
                texts.append((str(told.value), told.value.param))
            assert texts[0] == texts[1]
        assert not engine.requests


@pytest.mark.parametrize("mode", ["in-process", "http"])
def test_text_that_is_not_unicode(mode: str, serve: Serve) -> None:
    with ScriptedEngine("Hello!", name="not-unicode") as engine:
        chat = (
            ChatNInfer.from_engine(engine)
            if mode != "http"
            else ChatNInfer(model="not-unicode", base_url=serve(engine))
        )
        for run in (lambda: chat.invoke("\ud800"), lambda: chat.get_num_tokens_from_messages([HumanMessage("\ud800")])):
            with pytest.raises(lc.ModelInvalidRequestError, match="surrogate"):
                run()
        with pytest.raises((lc.ModelInvalidRequestError, lc.ModelNotFoundError)):
            chat.invoke("hi", model="\ud800")
        assert not engine.requests


@pytest.mark.parametrize("block", [{"type": ["x"]}, {"type": None, "text": "x"}, {"type": "tool_result", "content": 3}])
def test_blocks_of_no_type(block: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\]"):
        to_messages([HumanMessage([block])], adapter.MediaPolicy())


@pytest.mark.parametrize(
    "url", ["http://host:port", "http://host:99999", "http://host:0", "http://[::1", "http://:80", "host:80"]
)
def test_an_address_that_cannot_be(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="base_url"):
        Client(url)
    for kind in (ChatNInfer, NInfer):
        with pytest.raises(ValueError, match="base_url"):
            kind(model="demo", base_url=url)


@pytest.mark.parametrize("key", ["secret\n", "secr\u00e9t", "secret\ud800"])
def test_a_key_that_no_header_carries(key: str) -> None:
    """It is refused before it is sent, and not shown."""
    for run in (
        lambda: ChatNInfer(model="demo", base_url=NOBODY, api_key=SecretStr(key)).invoke("hi"),
        lambda: NInfer(model="demo", base_url=NOBODY, api_key=key).chat(USER),
    ):
        with pytest.raises(InvalidRequestError, match="api_key") as told:
            run()
        assert "secr" not in str(told.value)


def test_a_password_in_an_address_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NINFER_API_KEY", raising=False)
    url = NOBODY.replace("//", "//me:s3cr%40t@")
    chat = ChatNInfer(model="demo", base_url=url, max_retries=0)
    llm = NInfer(model="demo", base_url=url, max_retries=0)
    shown: list[Any] = [repr(chat), dumpd(chat), chat.model_dump(), chat._identifying_params, repr(llm), llm.to_json()]
    client = Client(url, max_retries=0)
    calls: list[Callable[[], Any]] = [lambda: chat.invoke("hi"), lambda: llm.chat(USER), lambda: client.generate("hi")]
    for call in (*calls, lambda: client.served_names):
        with pytest.raises(ServerUnreachableError, match=NOBODY) as told:
            call()
        shown.append(told.value)
    shown += [client.base_url, client.health()]
    for kind in (ChatNInfer, NInfer):
        for wrong in ({"base_url": url + "x"}, {"base_url": "me:s3cr%40t@host"}, {"base_url": url, "nonsense": 1}):
            with pytest.raises(ValueError, match=r"base_url|nonsense") as refused:
                kind(model="demo", api_key="s3cret", **wrong)
            shown.append(refused.value)
    assert not any("s3cr" in str(text) or "me:" in str(text) for text in shown)
    assert pickle.loads(pickle.dumps(chat)).base_url == pickle.loads(pickle.dumps(llm)).base_url == url
    with pytest.raises(InvalidRequestError, match="leave out one of the two"):
        Client(url, api_key="k")


def test_a_proxy_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "nonsense://proxy")
    client = Client("http://server.invalid")
    with pytest.raises(EngineError, match="HTTP_PROXY"):
        client.generate("hi")
    assert client.state == "failed" and "HTTP_PROXY" in client.health()["error"]
