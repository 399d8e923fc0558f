"""Time: heartbeats, first bytes, disconnects, queues, deadlines, shutdown, and a crowd of rude clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
from functools import partial
from typing import Any

import pytest
from ninfer_cli.server.context import Fairness, Ticket
from ninfer_cli.server.generation import EncodedStream, Generation
from ninfer_cli.server.wire import StreamResponse

from ninfer_core.errors import DeviceFaultError, EngineBusyError, NotFiniteError
from ninfer_core.testing import Delay, Fault, Refuse, Reply, Script, ScriptedEngine, Wait
from ninfer_core.wire import decode_error
from tests import serving

from .conftest import Running
from .crowd import STREAMS, crowd

USER: list[Any] = [{"role": "user", "content": "hi"}]


def raw_request(server: Running, path: str, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
    """A connection with a whole request sent and nothing read; `buffer` bounds what may wait for the reader."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(5)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


wait_for = partial(serving.wait_for, seconds=30.0)


@pytest.fixture(scope="module")
def beating() -> Any:
    from .conftest import running

    with running(ScriptedEngine(""), heartbeat=0.05) as server:
        yield server


@pytest.mark.parametrize("path", STREAMS)
def test_first_bytes_before_the_prompt_is_read_and_heartbeats_after(beating: Running, path: str) -> None:
    gate = threading.Event()
    beating.engine._scripts = [Script([Wait(gate), "ok</think>\n\ndone"], burst=99)]
    with beating.http.stream("POST", path, json=STREAMS[path]) as answer:
        assert answer.status_code == 200
        chunks = answer.iter_raw()
        first = next(chunks)
        assert first and not gate.is_set()
        beats = [next(chunks) for _ in range(4)]
        assert not gate.is_set()
        gate.set()
        rest = b"".join(chunks).decode()
    text = b"".join([first, *beats]).decode()
    if path == "/v1/messages":
        assert text.startswith("event: message_start\n") and text.count("event: ping\n") >= 5
    elif path.startswith("/api/"):
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) >= 5 and not any(line["done"] for line in lines)
        assert all(("message" in line) if path == "/api/chat" else ("response" in line) for line in lines)
        assert "" not in (text + rest).split("\n")[:-1], "a blank line breaks the ollama client"
    else:
        assert text.count(": waiting\n") >= 4
    assert "done" in rest
    assert beating.idle()


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_leaves_cancels_its_request(serve: Any, path: str, how: str) -> None:
    gate = threading.Event()
    server = serve(Script(["x</think>some text", Wait(gate)]))
    connection = raw_request(server, path, STREAMS[path])
    assert wait_for(lambda: server.engine.handles)
    assert connection.recv(100)
    leave(connection, how)
    assert wait_for(lambda: server.engine.cancelled), "still running after its client left"
    assert server.idle()
    connection.close()


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("path", STREAMS)
def test_the_same_without_streaming(serve: Any, path: str, how: str) -> None:
    gate = threading.Event()
    server = serve(Script(["x</think>some text", Wait(gate)]))
    connection = raw_request(server, path, {**STREAMS[path], "stream": False})
    assert wait_for(lambda: server.engine.handles)
    leave(connection, how)
    assert wait_for(lambda: server.engine.cancelled)
    assert server.idle()


def leave(connection: socket.socket, how: str) -> None:
    if how == "rst":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()


def test_a_waiting_request_is_cancelled_too(serve: Any) -> None:
    gate = threading.Event()
    engine = ScriptedEngine(Script([Wait(gate)]), max_sequences=1)
    server = serve(engine)
    first = raw_request(server, "/v1/chat/completions", STREAMS["/v1/chat/completions"])
    assert wait_for(lambda: engine.stats()["running"] == 1)
    second = raw_request(server, "/v1/chat/completions", STREAMS["/v1/chat/completions"])
    assert wait_for(lambda: engine.stats()["waiting"] == 1)
    second.close()
    assert wait_for(lambda: engine.stats()["waiting"] == 0)
    first.close()
    assert server.idle()


def test_the_queue_is_bounded_and_fair(serve: Any) -> None:
    gate = threading.Event()
    engine = ScriptedEngine(Script(lambda r: [Wait(gate), "ok</think>", r.messages[-1].text]), max_sequences=1)
    server = serve(engine, slots=1, max_queue=4, api_keys=("one", "two"))
    connections = []

    def send(key: str, text: str) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True}).encode()
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nHost: 127.0.0.1\r\n"
        head = head.replace("Host: x\r\n", "") + f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connections.append(connection)
        assert wait_for(lambda: len(engine.requests) == len(connections))

    for text in ("a1", "a2", "a3", "a4"):
        send("one", text)
    send("two", "b1")
    waiting = [entry[0].request.messages[-1].text for entry in engine._waiting]
    assert waiting == ["a2", "b1", "a3", "a4"], "a backlog costs another client one place; order stays within one"
    full = server.post("/v1/chat/completions", {"messages": USER}, headers={"x-api-key": "one"})
    assert full.status_code == 503 and full.headers["retry-after"] == "1"
    assert full.json()["error"]["type"] == "service_unavailable"
    other = server.post("/v1/messages", {"messages": USER, "max_tokens": 9}, headers={"x-api-key": "one"})
    assert other.status_code == 529 and other.json()["error"]["type"] == "overloaded_error"
    assert int(other.headers["retry-after"]) >= 1
    third = server.post("/api/chat", {"messages": USER}, headers={"authorization": "Bearer two"})
    assert third.status_code == 503 and "server busy, please try again" in third.json()["error"]
    gate.set()
    for connection in connections:
        with contextlib.suppress(TimeoutError):
            while b"[DONE]" not in (connection.recv(65536) or b"[DONE]"):
                pass
        connection.close()
    assert server.idle()


def test_nobody_starves_behind_a_steady_visitor() -> None:
    fairness = Fairness(100)
    running = fairness.enter("a")
    running.waits = lambda: False
    patient = fairness.enter("a")
    for _ in range(50):
        visitor = fairness.enter("b")
        assert patient.priority <= visitor.priority, "who came first goes first among equals"
        visitor.waits = lambda: False
        fairness.leave(visitor)
    alone = [fairness.enter("c").priority for _ in range(10)]
    assert alone == sorted(set(alone))
    assert fairness.in_flight == 12
    with pytest.raises(EngineBusyError, match="the limit is 100"):
        for _ in range(100):
            fairness.enter("d")


def test_states_of_the_engine(serve: Any) -> None:
    engine = ScriptedEngine("Hello!")
    server = serve(engine)
    for state, status in (("ready", 200), ("loading", 503), ("failed", 503)):
        engine.state = state
        assert server.http.get("/health").status_code == status
        assert server.http.get("/ready").status_code == status
        answer = server.post("/v1/chat/completions", {"messages": USER})
        assert answer.status_code == {"ready": 200, "loading": 503, "failed": 500}[state]
        assert ("retry-after" in answer.headers) == (state == "loading")
    for state in ("restarting", "stalled"):
        engine.state = state
        for path in ("/health", "/healthz", "/ready", "/readyz"):
            answer = server.http.get(path)
            assert (answer.status_code, answer.json()) == (503, {"status": state})
    engine.state = "ready"
    assert server.http.get("/readyz").status_code == 200
    assert server.http.get("/ping").text == "pong" and server.http.head("/").status_code == 200
    engine.close()
    answer = server.post("/v1/chat/completions", {"messages": USER})
    assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"


def test_a_fault_of_the_device_asks_for_another_attempt(serve: Any) -> None:
    """Unlike other faults of the engine: the message is ours, and clients with retries send the request again."""
    errors = (DeviceFaultError("the device failed; send it again"), NotFiniteError("the logits are not finite"))
    failed, sick = (serve(Script([Fault(error)])).post("/v1/chat/completions", {"messages": USER}) for error in errors)
    assert failed.status_code == 503 and int(failed.headers["retry-after"]) >= 1
    assert failed.json()["error"]["code"] == "device_fault" and "send it again" in failed.json()["error"]["message"]
    assert sick.status_code == 500 and sick.headers["x-should-retry"] == "false"
    assert sick.json()["error"]["code"] == "not_finite"
    for answer, kind in ((failed, DeviceFaultError), (sick, NotFiniteError)):
        assert type(decode_error(answer.status_code, answer.content, answer.headers)) is kind


def test_a_deadline_is_an_error_never_a_success(serve: Any) -> None:
    server = serve(Script([Delay(30)]), request_timeout=0.2)
    answer = server.post("/v1/chat/completions", {"messages": USER})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
    lines = server.lines("/v1/chat/completions", STREAMS["/v1/chat/completions"])
    assert "timeout" in lines[-1] and "[DONE]" not in "".join(lines)
    lines = server.lines("/v1/messages", STREAMS["/v1/messages"])
    assert lines[-2] == "event: error"


def test_waiting_has_a_limit_too(serve: Any) -> None:
    gate = threading.Event()
    engine = ScriptedEngine(Script([Wait(gate), "ok</think>done"], burst=99), max_sequences=1)
    server = serve(engine, queue_timeout=0.2)
    first = raw_request(server, "/v1/chat/completions", STREAMS["/v1/chat/completions"])
    assert wait_for(lambda: engine.stats()["running"] == 1)
    answer = server.post("/v1/chat/completions", {"messages": USER})
    assert answer.status_code == 503 and "0.2 s in the queue" in answer.json()["error"]["message"]
    assert "server busy" in json.loads(server.lines("/api/chat", STREAMS["/api/chat"])[-1])["error"]
    assert engine.stats()["running"] == 1 and engine.stats()["waiting"] == 0
    gate.set()
    received = b""
    while b"[DONE]" not in received:
        received += first.recv(65536)
    assert b"done" in received, "the running request is not touched"
    first.close()
    assert server.idle()


def test_stopping_ends_streams_with_an_error_event(serve: Any) -> None:
    gate = threading.Event()
    server = serve(Script(["x</think>text", Wait(gate)]))
    with server.http.stream("POST", "/v1/chat/completions", json=STREAMS["/v1/chat/completions"]) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert wait_for(lambda: server.state.active)
        server.state.stop_generations()
        rest = [line for line in lines if line]
    server.state.stopping = False
    assert json.loads(rest[-1][6:])["error"]["code"] == "cancelled"
    assert server.idle()


def test_a_client_that_does_not_read_is_given_up(serve: Any) -> None:
    engine = ScriptedEngine(Script(["x</think>" + "word " * 4000], burst=50, rate=None), Script("x"))
    server = serve(engine, stall_timeout=0.3)
    body = {**STREAMS["/v1/chat/completions"], "logprobs": True, "top_logprobs": 20}
    connection = raw_request(server, "/v1/chat/completions", body, buffer=4096)
    assert wait_for(lambda: 'outcome="stalled"' in server.http.get("/metrics").text, seconds=25)
    assert server.idle()
    connection.close()


def test_a_busy_engine_after_validation_is_told_by_status(serve: Any) -> None:
    server = serve(Script(Refuse(EngineBusyError("full", retry_after=7))))
    for path, status in (("/v1/chat/completions", 503), ("/v1/messages", 529), ("/api/chat", 503)):
        answer = server.post(path, STREAMS[path])
        assert answer.status_code == status and answer.headers["retry-after"] == "7"


def test_validation_keeps_the_event_loop_free(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    engine = ScriptedEngine("Hello!")
    prepare = engine.frontend.prepare

    def slow(request: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        return prepare(request)

    monkeypatch.setattr(engine.frontend, "prepare", slow)
    server = serve(engine)
    answers: list[int] = []
    worker = threading.Thread(
        target=lambda: answers.append(server.post("/v1/chat/completions", {"messages": USER}).status_code)
    )
    worker.start()
    assert begun.wait(60)
    assert server.http.get("/ping").status_code == 200
    assert not answers
    gate.set()
    worker.join(60)
    assert answers == [200]


def test_a_crowd_of_rude_clients_leaves_nothing_behind(serve: Any) -> None:
    engine = ScriptedEngine(Script(Reply("word " * 40, reasoning="hm " * 10), burst=4, rate=400), max_sequences=8)
    server = serve(engine, slots=8, max_queue=40, heartbeat=0.05)
    before = _kept()
    seen = asyncio.run(crowd(server.url, 64, 6))
    assert seen["done"] > 50 and seen.get("broken", 0) == 0, seen
    assert server.idle()
    assert not server.state.active and engine.stats()["running"] == engine.stats()["waiting"] == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scripted-")]
    assert server.post("/v1/chat/completions", {"messages": USER}).status_code == 200
    assert wait_for(lambda: _kept() <= before, seconds=30), (before, _kept())


def _kept() -> int:
    """Objects that belong to single requests, and must be gone with them."""
    gc.collect()
    return sum(type(item) in (Generation, EncodedStream, StreamResponse, Ticket) for item in gc.get_objects())
