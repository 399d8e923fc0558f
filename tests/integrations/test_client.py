"""`Client`, the HTTP twin of the engine: the same results, cancellation, retries, and errors of the same types."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from ninfer_core.client import Client
from ninfer_core.errors import (
    AuthenticationError,
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    NinferError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerUnreachableError,
    UnsupportedError,
)
from ninfer_core.testing import Delay, End, Fault, Refuse, Reply, Script, ScriptedEngine, Tokens, Wait
from ninfer_core.types import (
    Image,
    Message,
    ReasoningDelta,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallEnd,
    ToolChoice,
)
from tests.integrations.conftest import cancelled_amid

Serve = Callable[..., str]
USER = (Message("user", "hi"),)
ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture
def client_of(serve: Serve) -> Iterator[Callable[..., tuple[ScriptedEngine, Client]]]:
    made: list[Client] = []

    def make(*scripts: Any, **options: Any) -> tuple[ScriptedEngine, Client]:
        engine = ScriptedEngine(*(scripts or ("Hello!",)))
        client = Client(serve(engine, **options.pop("settings", {})), **options)
        made.append(client)
        return engine, client

    yield make
    for client in made:
        client.close()


def same(request: Request, *scripts: Any, client_of: Any) -> tuple[Any, Any, Request]:
    """The completion over HTTP and in-process, and what reached the server's engine."""
    engine, client = client_of(*scripts)
    remote = client.generate(request)
    return remote, ScriptedEngine(*scripts).generate(request), engine.requests[0]


def test_a_whole_answer_equals_the_local_one(client_of: Any) -> None:
    script = [Tokens("hm"), " ok", "</think>", "\n\n", "Text with \u2028 and \u00e9."]
    remote, local, _ = same(Request(USER, sampling=Sampling(seed=3)), script, client_of=client_of)
    assert remote.message == local.message and remote.finish_reason == local.finish_reason
    for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", "accepted_tokens"):
        assert getattr(remote.usage, name) == getattr(local.usage, name), name
    assert remote.seed == 3


def test_tool_calls_equal_the_local_ones(client_of: Any) -> None:
    reply = Reply("I call.", tool_calls=[ToolCall("", "add", {"a": 1}), ToolCall("", "add", {"a": 1})])
    remote, local, got = same(Request(USER, tools=(ADD,), thinking=False), reply, client_of=client_of)
    assert [(c.name, c.arguments) for c in remote.message.tool_calls] == [("add", {"a": 1})] * 2
    assert remote.text == local.text and remote.finish_reason == "tool_calls"
    assert len({call.id for call in remote.message.tool_calls}) == 2
    assert got.tools[0].parameters == ADD.parameters


def test_a_cut_call_stays_a_cut_call(client_of: Any) -> None:
    script = ["<tool_call>\n<function=add>\n<parameter=a>\n1", End("length")]
    remote, local, _ = same(Request(USER, tools=(ADD,), thinking=False), script, client_of=client_of)
    assert remote.truncated_call and local.truncated_call and remote.finish_reason == "length"


def test_every_field_travels(client_of: Any) -> None:
    engine, client = client_of()
    request = Request(
        messages=(
            Message("system", "Be brief."),
            Message("user", (Text("a"), Text("b"))),
            Message("assistant", "c", reasoning="why", tool_calls=(ToolCall("call_1", "add", {"a": 1}),)),
            Message("tool", "1", tool_call_id="call_1"),
            Message("assistant", "So"),
        ),
        tools=(ADD,),
        tool_choice=ToolChoice("none"),
        parallel_tool_calls=False,
        response_format=ResponseFormat("json_schema", {"type": "object"}, strict=False),
        sampling=Sampling(0.5, 0.9, 7, 0.1, 0.2, 0.3, 1.1, {5: -1.0}, 11),
        max_tokens=9,
        stop=("x", "y"),
        stop_token_ids=(3,),
        ignore_eos=True,
        thinking=True,
        thinking_budget=40,
        preserve_thinking=True,
        continue_final_message=False,
        logprobs=2,
    )
    client.generate(request)
    got = engine.requests[0]
    for name in Request.__dataclass_fields__:
        if name not in ("messages", "tools", "priority"):
            assert getattr(got, name) == getattr(request, name), name
    assert [m.role for m in got.messages] == [m.role for m in request.messages]
    assert got.messages[2] == request.messages[2] and got.messages[3].tool_call_id == "call_1"


@pytest.mark.parametrize(
    "form",
    [
        ResponseFormat("json"),
        ResponseFormat("regex", pattern="a+"),
        ResponseFormat("choice", choices=("a", "b")),
        ResponseFormat("grammar", pattern='start: "a"'),
    ],
    ids=lambda form: form.kind,
)
def test_other_formats_travel(client_of: Any, form: ResponseFormat) -> None:
    engine, client = client_of()
    client.generate(Request(USER, response_format=form))
    assert engine.requests[0].response_format == form


@pytest.mark.parametrize(
    "choice", [ToolChoice("required"), ToolChoice("required", ("add",)), ToolChoice("auto")], ids=str
)
def test_tool_choices_travel(client_of: Any, choice: ToolChoice) -> None:
    engine, client = client_of()
    client.generate(Request(USER, tools=(ADD,), tool_choice=choice))
    assert engine.requests[0].tool_choice == choice


def test_raw_prompts(client_of: Any) -> None:
    remote, local, got = same(Request(prompt="Once", max_tokens=4), "upon a time", client_of=client_of)
    assert remote.text == local.text == "upon" and got.prompt == "Once"


def test_what_cannot_travel_is_refused() -> None:
    client = Client("http://127.0.0.1:9")
    with pytest.raises(UnsupportedError, match="add_vision_id"):
        client.submit(Request(USER, add_vision_id=True))


def test_media_travel_inline(client_of: Any) -> None:
    _, client = client_of()
    with pytest.raises(UnsupportedError, match="no vision"):
        client.generate(Request((Message("user", (Image(data=b"x"),)),)))


async def test_events_come_one_by_one_in_sync_and_async(client_of: Any) -> None:
    _, client = client_of([Tokens("a"), Delay(0.05), "</think>", Tokens("b"), Delay(0.05), Tokens("c")])
    events = [event async for event in client.astream(Request(USER))]
    assert [event.text for event in events if isinstance(event, ReasoningDelta)] == ["a"]
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["b", "c"]
    again = await asyncio.to_thread(lambda: list(client.stream(Request(USER))))
    assert [type(event) for event in again] == [type(event) for event in events]


def test_counting_and_rendering_agree_with_the_engine(client_of: Any) -> None:
    engine, client = client_of()
    for thinking in (True, False):
        assert client.count_tokens(USER, [ADD], thinking=thinking) == engine.count_tokens(
            USER, [ADD], thinking=thinking
        )
        assert client.render(USER, [ADD], thinking=thinking) == engine.render(USER, [ADD], thinking=thinking)
    assert client.tokenizer.decode(client.tokenizer.encode("abc")) == "abc"


def test_what_is_known_of_the_server(client_of: Any) -> None:
    engine, client = client_of()
    assert client.known_context is None
    assert (client.served_names, client.context_length) == (engine.served_names, engine.context_length)
    assert client.profile["max_input_tokens"] == client.known_context == engine.context_length
    assert client.state == "ready" and client.stats()["running"] == 0
    assert client.with_model("other")._link is client._link


def test_cancel_frees_the_sequence_of_the_server(client_of: Any) -> None:
    never = threading.Event()
    engine, client = client_of(["</think>a", Wait(never)])
    handle = client.submit(Request(USER))
    assert isinstance(next(iter(handle)), TextDelta)
    handle.cancel()
    with pytest.raises(RequestCancelledError):
        handle.result(timeout=60)
    assert engine.wait_idle(60) and len(engine.cancelled) == 1
    at_once = client.submit(Request(USER))
    at_once.cancel()
    assert at_once.wait(60)


async def test_a_cancelled_task_frees_it_too(client_of: Any) -> None:
    never = threading.Event()
    engine, client = client_of(["</think>a", Wait(never)])
    await cancelled_amid(engine, client.agenerate(Request(USER)))
    assert await asyncio.to_thread(engine.wait_idle, 60) and len(engine.cancelled) == 1


def test_errors_keep_their_types_and_numbers(client_of: Any, serve: Serve) -> None:
    _, client = client_of()
    with pytest.raises(InvalidRequestError, match="temperature"):
        client.generate(Request(USER, sampling=Sampling(temperature=9.0)))
    with pytest.raises(ModelNotFoundError, match="nonsense"):
        client.with_model("nonsense").generate(Request(USER))
    small = ScriptedEngine("x", context_length=32)
    with pytest.raises(ContextOverflowError) as caught:
        Client(serve(small)).generate(Request((Message("user", "x" * 99),)))
    assert caught.value.n_ctx == 32
    keyed = serve(ScriptedEngine("x"), api_keys=("secret",))
    with pytest.raises(AuthenticationError):
        Client(keyed).generate(Request(USER))
    assert Client(keyed, api_key="secret").generate(Request(USER)).text == "x"


def test_a_fault_in_the_middle_follows_the_events_before_it(client_of: Any) -> None:
    _, client = client_of(["</think>", Tokens("a"), Delay(0.05), Fault(RuntimeError("x"))])
    handle = client.submit(Request(USER))
    events: list[Any] = []
    with pytest.raises(EngineError):
        events.extend(event for event in handle if not events.append(event))  # type: ignore[func-returns-value]
    assert isinstance(events[0], TextDelta)


def test_a_full_queue_is_tried_again_and_then_reported(client_of: Any) -> None:
    busy = Refuse(EngineBusyError("full", retry_after=0.01))
    _, client = client_of(Script(busy, times=2), "Hello!")
    assert client.generate(Request(USER)).text == "Hello!"
    _, client = client_of(Script(busy), max_retries=1)
    with pytest.raises(EngineBusyError):
        client.generate(Request(USER))


class Loading(httpx.AsyncBaseTransport):
    """A server that loads its model while it is asked six times, and then answers."""

    def __init__(self) -> None:
        self.asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(503, json={"status": "loading"})
        self.asked += 1
        if self.asked <= 6:
            error = {"message": "the model is still loading", "code": "service_unavailable"}
            return httpx.Response(503, json={"error": error}, headers={"retry-after-ms": "1"})
        chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
        return httpx.Response(200, content=chunk + b"data: [DONE]\n\n")


def test_loading_is_waited_for() -> None:
    server = Loading()
    client = Client("http://server", http_client=httpx.AsyncClient(transport=server))
    assert client.generate(Request(USER)).text == "a" and server.asked == 7
    once = Client("http://server", http_client=httpx.AsyncClient(transport=Loading()), max_retries=0)
    with pytest.raises(EngineBusyError, match="loading"):
        once.generate(Request(USER))


class Gateway(httpx.AsyncBaseTransport):
    """A gateway whose server is away for the first two requests."""

    def __init__(self, status: int) -> None:
        self.status, self.asked, self.sent = status, 0, ""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        self.sent = request.headers.get("authorization", "")
        if self.asked <= 2:
            return httpx.Response(self.status, content=b"<html>nginx</html>")
        chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
        return httpx.Response(200, content=chunk + b"data: [DONE]\n\n")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_without_its_server_is_tried_again(status: int) -> None:
    gateway = Gateway(status)
    client = Client("http://server", http_client=httpx.AsyncClient(transport=gateway))
    assert client.generate(Request(USER)).text == "a" and gateway.asked == 3
    once = Client("http://server", http_client=httpx.AsyncClient(transport=Gateway(status)), max_retries=0)
    with pytest.raises(EngineError, match=f"answered {status}.*nginx") as told:
        once.generate(Request(USER))
    assert told.value.retryable


def test_a_user_in_the_address_is_basic_authentication() -> None:
    gateway = Gateway(503)
    client = Client("http://me:a%3Ab@server/v1", http_client=httpx.AsyncClient(transport=gateway))
    assert client.generate(Request(USER)).text == "a" and client.base_url == "http://server"
    assert gateway.sent == "Basic " + base64.b64encode(b"me:a:b").decode()


def test_nobody_there() -> None:
    client = Client("http://127.0.0.1:9", max_retries=0)
    with pytest.raises(ServerUnreachableError, match="ninfer serve"):
        client.generate(Request(USER))
    assert client.state == "failed"
    with pytest.raises(ServerUnreachableError):
        client.count_tokens(USER)


def test_a_timeout_of_the_request(client_of: Any) -> None:
    never = threading.Event()
    engine, client = client_of(["</think>a", Wait(never)])
    with pytest.raises(RequestTimeoutError, match=r"0\.2"):
        client.generate(Request(USER, timeout=0.2))
    assert engine.wait_idle(60)


def test_a_closed_client_refuses(client_of: Any) -> None:
    never = threading.Event()
    _, client = client_of(["</think>a", Wait(never)])
    handle = client.submit(Request(USER))
    client.close()
    with pytest.raises(NinferError):
        handle.result(timeout=60)
    with pytest.raises(EngineClosedError):
        client.submit(Request(USER))


class Cut(httpx.AsyncBaseTransport):
    """A server whose stream ends without the end mark."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            yield b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'

        return httpx.Response(200, content=body())


def test_a_stream_without_its_end_is_an_error_and_not_an_answer() -> None:
    client = Client("http://server", http_client=httpx.AsyncClient(transport=Cut()))
    with pytest.raises(ServerUnreachableError, match="before the answer was complete"):
        client.generate(Request(USER))


def test_many_at_once(client_of: Any) -> None:
    gate = threading.Event()
    engine, client = client_of(["</think>a", Wait(gate)])
    handles = [client.submit(Request(USER)) for _ in range(12)]
    for handle in handles:
        assert isinstance(next(iter_of(handle)), TextDelta)
    assert len(engine.requests) == 12
    gate.set()
    assert {handle.result(60).text for handle in handles} == {"a"}


def iter_of(handle: Any) -> Any:
    """An iterator that outlives this line: dropping it would cancel the request."""
    handle.kept = iter(handle)
    return handle.kept


def test_tool_ends_follow_their_parts(client_of: Any) -> None:
    reply = Reply("", tool_calls=[ToolCall("", "add", {"a": 1}), ToolCall("", "add", {"a": 2})])
    _, client = client_of(reply)
    events = list(client.stream(Request(USER, tools=(ADD,), thinking=False)))
    kinds = [type(event).__name__ for event in events]
    assert kinds.index("ToolCallEnd") < len(kinds) - kinds[::-1].index("ToolCallStart") - 1
    assert [event.call.arguments for event in events if isinstance(event, ToolCallEnd)] == [{"a": 1}, {"a": 2}]
