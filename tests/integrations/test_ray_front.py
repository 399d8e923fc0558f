"""Front and replica without a cluster: streams, lost replicas, full ones, dead engines, clients that leave. Needs no Ray."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from ninfer_cli.server.app import build_app
from ninfer_cli.server.settings import ServerSettings
from ray_ninfer.front import Front
from ray_ninfer.replica import HttpCall, Replica, ReplicaLostError

from ninfer_core.errors import EngineBusyError, EngineFailedError
from ninfer_core.testing import Fault, Script, ScriptedEngine, Tokens, Wait

SETTINGS = ServerSettings()
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT,
    "/api/chat": CHAT,
}
Play = Callable[[HttpCall], AsyncGenerator[list[dict[str, Any]], None]]
Make = Callable[..., Replica]


@pytest.fixture
def make() -> Iterator[Make]:
    """A factory of replicas with scripted engines; `Hello you!` in two tokens is what they say by default."""
    made: list[Replica] = []

    def one(*steps: Any, name: str = "one", settings: ServerSettings = SETTINGS) -> Replica:
        engine = ScriptedEngine(Script(list(steps) or [Tokens("Hello", " you!")]))
        made.append(Replica(engine, build_app(engine, settings), name))
        return made[-1]

    yield one
    for replica in made:
        replica.close()


class Played:
    """Replicas to a front: `attempts` play in order, the last one for ever."""

    def __init__(self, *attempts: Play) -> None:
        self.attempts, self.calls, self.open = list(attempts), [], 0

    async def call(self, call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        self.calls.append(call)
        attempt = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        self.open += 1
        batches = attempt(call)
        try:
            async for batch in batches:
                yield batch
        finally:
            await batches.aclose()
            self.open -= 1


def lost_before(replica: Replica) -> Play:
    """A replica that dies without a byte; the router knows that it is gone."""

    async def play(call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        raise ReplicaLostError("the process died")
        yield []

    return play


def lost_behind(replica: Replica, mark: bytes | None) -> Play:
    """A replica that dies when it has sent what contains `mark`; None: when it has sent everything."""

    async def play(call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        batches = replica.call(call)
        try:
            async for batch in batches:
                for message in batch:
                    yield [message]
                    if mark in message.get("body", b"") if mark else message.get("more_body") is False:
                        raise ReplicaLostError("the process died")
        finally:
            await batches.aclose()

    return play


class Client:
    """One ASGI client; `leave` makes it disconnect."""

    def __init__(self, path: str, parts: list[bytes], headers: dict[str, str] | None = None) -> None:
        fields = {"host": "127.0.0.1", "content-type": "application/json", **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b"", "http_version": "1.1",
            "client": ("127.0.0.1", 5), "scheme": "http", "asgi": {"version": "3.0"}, "app": object(),
        }  # fmt: skip
        self.parts, self.left, self.messages = parts, asyncio.Event(), []
        self.seen = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.parts:
            body = self.parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self.parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if b"one" in message.get("body", b""):
            self.seen.set()

    @property
    def status(self) -> int:
        starts = [message["status"] for message in self.messages if message["type"] == "http.response.start"]
        assert len(starts) == 1
        return int(starts[0])

    @property
    def text(self) -> str:
        ends = [m for m in self.messages if m["type"] == "http.response.body" and not m.get("more_body", False)]
        assert len(ends) == 1 and ends[0] is self.messages[-1]
        return b"".join(message.get("body", b"") for message in self.messages).decode()


async def ask(replicas: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> Client:
    client = Client(path, [body if isinstance(body, bytes) else json.dumps(body).encode()], headers)
    await asyncio.wait_for(Front(replicas, SETTINGS).forward(client.scope, client.receive, client.send), 60)
    return client


def test_front_and_replica_do_not_import_ray() -> None:
    code = (
        "import sys, ray_ninfer.front, ray_ninfer.replica; print('ray' in {name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_arrives_as_the_replica_made_it(make: Make, path: str, stream: bool) -> None:
    replicas = Played(make().call)
    client = await ask(replicas, path, {**PATHS[path], "stream": stream})
    assert client.status == 200 and "Hello" in client.text and "you!" in client.text and not replicas.open
    assert replicas.calls[0].key is not None and "app" not in replicas.calls[0].scope
    if stream and path == "/v1/completions":
        assert client.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_had_begun_ends_with_the_apis_own_error(make: Make, path: str) -> None:
    replica = make(Tokens("one"), Wait(threading.Event()), Tokens("two"))
    replicas = Played(lost_behind(replica, b"one"))
    client = await ask(replicas, path, {**PATHS[path], "stream": True})
    assert client.status == 200 and len(replicas.calls) == 1 and not replicas.open
    last = [line for line in client.text.splitlines() if line][-2:]
    told = json.loads(last[1].removeprefix("data: "))
    if path == "/v1/messages":
        assert last[0] == "event: error" and told["error"]["type"] == "overloaded_error"
    elif path == "/v1/responses":
        assert last[0] == "event: error" and told["type"] == "error" and told["code"] == "service_unavailable"
    else:
        assert "replica" in json.dumps(told["error"])
    assert "[DONE]" not in client.text and "message_stop" not in client.text and "two" not in client.text
    assert await asyncio.to_thread(replica.engine.wait_idle, 30)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_lost_before_its_first_byte_is_made_up_for(make: Make, stream: bool) -> None:
    replica = make()
    replicas = Played(lost_before(replica), lost_before(replica), replica.call)
    client = await ask(replicas, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert client.status == 200 and "Hello" in client.text and len(replicas.calls) == 3
    assert len(replica.engine.requests) == 1 and not replicas.open


async def test_replicas_that_are_always_lost_end_the_request(make: Make) -> None:
    replicas = Played(lost_before(make()))
    client = await ask(replicas, "/v1/chat/completions", CHAT)
    assert client.status == 503 and len(replicas.calls) == 3
    assert "the replica that answered this request was lost" in client.text


async def test_a_replica_lost_behind_its_last_byte_is_not_missed(make: Make) -> None:
    replicas = Played(lost_behind(make(), None))
    client = await ask(replicas, "/v1/chat/completions", {**CHAT, "stream": True})
    assert client.status == 200 and client.text.endswith("data: [DONE]\n\n") and len(replicas.calls) == 1


async def test_a_dead_engine_is_passed_over_and_named_to_the_router(make: Make) -> None:
    dead, other = make(name="dead"), make(name="other")
    dead.engine.state = "failed"
    replicas = Played(dead.call, other.call)
    client = await ask(replicas, "/v1/chat/completions", CHAT)
    assert client.status == 200 and "Hello" in client.text
    assert [call.avoid for call in replicas.calls] == [(), ("dead",)] and not dead.engine.requests


async def test_an_engine_that_restarts_is_waited_for_only_where_no_other_replica_answers(make: Make) -> None:
    restarting, other = make(name="restarting"), make(name="other")
    restarting.engine.health = lambda: {"status": "restarting"}
    assert (await ask(Played(restarting.call, other.call), "/v1/chat/completions", CHAT)).status == 200
    assert other.engine.requests and not restarting.engine.requests
    alone = Played(restarting.call)
    assert (await ask(alone, "/v1/chat/completions", CHAT)).status == 200
    assert [call.avoid for call in alone.calls] == [(), ("restarting",)] and restarting.engine.requests


async def test_an_engine_that_fails_under_a_stream_says_so_itself(make: Make) -> None:
    replicas = Played(make(Tokens("one"), Fault(RuntimeError("broken"))).call)
    client = await ask(replicas, "/v1/chat/completions", {**CHAT, "stream": True})
    assert client.status == 200 and '"error"' in client.text and len(replicas.calls) == 1


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 503), ("/v1/messages", 529), ("/api/chat", 503)])
async def test_full_replicas_are_said_to_be_busy(path: str, status: int) -> None:
    async def full(call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        raise EngineBusyError("all replicas are full; try again shortly", retry_after=1.0)
        yield []

    client = await ask(Played(full), path, CHAT)
    assert client.status == status and "all replicas are full" in client.text


async def test_what_nobody_expected_is_told_without_its_details() -> None:
    async def broken(call: HttpCall) -> AsyncGenerator[list[dict[str, Any]], None]:
        raise KeyError("secret")
        yield []

    client = await ask(Played(broken), "/v1/chat/completions", CHAT)
    assert client.status == 500 and "secret" not in client.text


@pytest.mark.parametrize("path", ["/metrics", "/api/pull", "/api/copy", "/api/delete"])
async def test_what_only_one_replica_would_do_is_refused(make: Make, path: str) -> None:
    replicas = Played(make().call)
    client = await ask(replicas, path, {})
    assert client.status == 501 and "several replicas" in client.text and not replicas.calls


async def test_wrong_bodies_are_the_replicas_to_refuse(make: Make) -> None:
    replicas = Played(make().call)
    client = await ask(replicas, "/v1/chat/completions", b'{"messages": [')
    assert client.status == 400 and replicas.calls[0].key is None
    packed = await ask(replicas, "/v1/chat/completions", CHAT, headers={"content-encoding": "gzip"})
    assert packed.status == 400 and replicas.calls[1].key is None


async def test_a_body_over_the_limit_is_refused_and_not_kept(make: Make) -> None:
    small = ServerSettings(max_body_bytes=1000)
    replicas = Played(make(settings=small).call)
    client = Client("/v1/chat/completions", [b"x" * 600] * 50)
    await asyncio.wait_for(Front(replicas, small).forward(client.scope, client.receive, client.send), 60)
    assert client.status == 413 and len(replicas.calls[0].body) == 1200


async def test_a_client_that_leaves_before_its_body_is_whole_reaches_nobody(make: Make) -> None:
    replicas = Played(make().call)
    client = Client("/v1/chat/completions", [])
    client.left.set()
    await asyncio.wait_for(Front(replicas, SETTINGS).forward(client.scope, client.receive, client.send), 60)
    assert not replicas.calls and not client.messages


async def test_a_client_that_leaves_ends_its_generation(make: Make) -> None:
    gate = threading.Event()
    replica = make(Tokens("one"), Wait(gate), Tokens("two"))
    replicas = Played(replica.call)
    client = Client("/v1/chat/completions", [json.dumps({**CHAT, "stream": True}).encode()])
    forward = asyncio.ensure_future(Front(replicas, SETTINGS).forward(client.scope, client.receive, client.send))
    await asyncio.wait_for(client.seen.wait(), 60)
    client.left.set()
    await asyncio.wait_for(forward, 60)
    assert not replicas.open
    assert await asyncio.to_thread(replica.engine.wait_idle, 30) and replica.engine.cancelled


@pytest.mark.parametrize("state", ["failed", "checking", "stalled"])
async def test_health_is_the_engines(make: Make, state: str) -> None:
    replica = make()
    await replica.check_health()
    replica.engine.state = state
    with pytest.raises(EngineFailedError, match=f"it is {state}"):
        await replica.check_health()


def test_a_lost_replica_survives_the_way_between_processes() -> None:
    import pickle

    lost = pickle.loads(pickle.dumps(ReplicaLostError("its engine is failed", "r1")))
    assert (lost.reason, lost.replica, str(lost)) == ("its engine is failed", "r1", "its engine is failed")
