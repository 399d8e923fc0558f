"""Connections that misbehave below the level of requests: silence, half a request, endless headers, no HTTP at all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from ninfer_cli.server import body
from ninfer_cli.server.app import build_app
from ninfer_cli.server.boot import config_of
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.testing import ScriptedEngine
from tests.serving import serving

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
WHOLE = HEAD + str(len(BODY)).encode() + b"\r\n\r\n" + BODY


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server with the options of `ninfer serve`, which gives up on silence after one second."""
    engine = ScriptedEngine("Hello!")
    settings = ServerSettings(keep_alive=1)
    app = build_app(engine, settings)
    try:
        with serving(app, config_of(app, settings)) as port:
            yield port
            assert app.state.server.fairness.in_flight == 0
    finally:
        engine.close()


def talk(port: int, *parts: bytes, close: bool = False) -> bytes:
    """Send bytes and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            if close:
                connection.shutdown(socket.SHUT_WR)
            while block := connection.recv(1 << 16):
                received += block
        except ConnectionError:
            pass  # closed with what it had not read: what was sent before that counts
        return received


def fine(port: int) -> bool:
    """Whether a proper request is answered."""
    return b'"content":"Hello!"' in talk(port, WHOLE.replace(b"Host", b"Connection: close\r\nHost"))


@pytest.mark.parametrize(
    "begun", [b"", b"POST /v1/chat", HEAD, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\nGET /pi"],
    ids=["nothing", "half a line", "half a head", "a second head"],
)  # fmt: skip
def test_a_head_that_does_not_end(port: int, begun: bytes) -> None:
    assert (b"pong" in talk(port, begun)) == begun.startswith(b"GET"), "the server closes the connection by itself"
    assert fine(port)


def test_a_body_that_does_not_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SILENCE_SECONDS", 0.2)
    answer = talk(port, HEAD + b"100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
    assert talk(port, HEAD + b"100\r\n\r\n{", close=True) == b"", "whoever hangs up is told nothing"
    assert fine(port)


@pytest.mark.parametrize(
    "lines", [b"X-Long: " + b"a" * (1 << 20), b"\r\n".join(b"X-%d: a" % i for i in range(20_000))], ids=["long", "many"]
)
def test_endless_headers(port: int, lines: bytes) -> None:
    answer = talk(port, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n\r\n")
    assert b"pong" not in answer and (not answer or answer.startswith(b"HTTP/1.1 4"))
    assert fine(port)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"\x00" * 1000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"-5\r\n\r\n",
        HEAD + b"5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["tls", "zeros", "long path", "negative length", "wrong chunk", "http2"],
)
def test_what_is_no_http(port: int, data: bytes) -> None:
    answer = talk(port, data)
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert fine(port)


@pytest.mark.parametrize(
    "path", [b"//etc/passwd", b"/ui/../../etc/passwd", b"/ui/%2e%2e/app.py", b"/%00", b"/%ff", b"*"]
)
def test_odd_paths(port: int, path: bytes) -> None:
    answer = talk(port, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 4"), answer[:200]


def test_requests_in_one_packet_are_answered_in_order(port: int) -> None:
    other = WHOLE.replace(b"chat/completions", b"messages").replace(b"Host", b"Connection: close\r\nHost")
    answer = talk(port, WHOLE + other)
    assert answer.count(b"HTTP/1.1 200 ") == 2 and answer.index(b"chat.completion") < answer.index(b'"type":"message"')


def test_many_silent_connections_hold_nobody_up(port: int) -> None:
    silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(200)]
    try:
        assert fine(port)
        for connection in silent:
            assert connection.recv(1) == b""
    finally:
        for connection in silent:
            connection.close()
