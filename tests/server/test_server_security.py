"""Who may talk to the server, and what requests may make it read."""

from __future__ import annotations

import base64
import ipaddress
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ninfer_cli.server.media import MediaReader, decode_base64
from ninfer_cli.server.security import host_name
from ninfer_cli.server.settings import ServerSettings

from ninfer_core.errors import InvalidRequestError, MediaError
from ninfer_core.frontend import fetch
from ninfer_core.frontend.fetch import Fetcher, globally_reachable
from ninfer_core.types import Image, Message, Request, Text
from tests.serving import wait_for

USER: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


# Keys


def test_keys_in_every_spelling(serve: Any) -> None:
    server = serve("Hello!", api_keys=("one", "zwei-ü"))
    body = {"messages": USER}
    good: list[Any] = [
        {"authorization": "Bearer one"},
        {"authorization": "bearer one"},
        {"x-api-key": "one"},
        {"x-api-key": "one", "authorization": "Bearer other"},
        {"x-api-key": "zwei-ü".encode()},
    ]
    for headers in good:
        assert server.post(CHAT, body, headers=headers).status_code == 200, headers
    bad: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer two"},
        {"authorization": "Basic one"},
        {"x-api-key": "on"},
    ]
    for headers in bad:
        answer = server.post(CHAT, body, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", headers
        assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
        other = server.post("/v1/messages", body, headers=headers)
        assert other.status_code == 401 and other.json()["error"]["type"] == "authentication_error"
        assert isinstance(server.post("/api/chat", body, headers=headers).json()["error"], str)
    for path in ("/", "/health", "/v1/health", "/ready", "/ping"):
        assert server.http.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/props", "/api/tags", "/slots", "/openapi.json"):
        assert server.http.get(path).status_code == 401, path
    assert not server.engine.requests[len(good) :]


def test_a_network_bind_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(InvalidRequestError, match="without an API key"):
            ServerSettings(host=host)
        assert not ServerSettings(host=host, api_keys=("k",)).loopback
        assert not ServerSettings(host=host, insecure_no_auth=True).loopback
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"):
        assert ServerSettings(host=host).loopback
    with pytest.raises(InvalidRequestError, match="may not be empty"):
        ServerSettings(api_keys=("",))
    with pytest.raises(InvalidRequestError, match="vllm and llamacpp"):
        ServerSettings(metrics_compat=frozenset({"tgi"}))


# Host and origin


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:11434", 200),
        ("[::1]:11434", 200),
        ("192.168.1.7", 200),
        ("box.local", 200),
        ("host.docker.internal:11434", 200),
        ("a.localhost", 200),
        ("evil.example", 403),
        ("evil.example:11434", 403),
        ("127.0.0.1.evil.example", 403),
        ("8.8.8.8", 403),
    ],
)
def test_host_names(serve: Any, host: str, status: int) -> None:
    server = serve()
    assert server.http.get("/v1/models", headers={"host": host}).status_code == status
    assert server.http.get("/health", headers={"host": host}).status_code == status


def test_host_header_forms() -> None:
    forms = {"LocalHost:80": "localhost", "[::1]:8": "::1", "[fe80::1]": "fe80::1", "a.b": "a.b", "::1": "::1", "": ""}
    assert {form: host_name(form) for form in forms} == forms


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8080", True),
        ("app://obsidian.md", True),
        ("tauri://localhost", True),
        ("vscode-webview://abc", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("null", False),
        ("file://", False),
        ("http://[", False),
    ],
)
def test_origins(serve: Any, origin: str, allowed: bool) -> None:
    server = serve()
    before = len(server.engine.requests)
    headers = {"origin": origin, "content-type": "text/plain"}
    answer = server.post(CHAT, {"messages": USER}, headers=headers)
    assert answer.status_code == (200 if allowed else 403)
    assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
    assert len(server.engine.requests) == before + allowed, "a refused page must not start anything"
    preflight = server.http.options(
        CHAT,
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type, x-api-key, x-stainless-os, anthropic-beta, x-evil",
        },
    )
    assert preflight.status_code == (204 if allowed else 403)
    if allowed:
        granted = preflight.headers["access-control-allow-headers"]
        for name in ("authorization", "x-api-key", "x-stainless-os", "anthropic-beta"):
            assert name in granted
        assert "x-evil" not in granted and "origin" in preflight.headers["vary"].lower()


def test_origins_of_the_operator_and_preflight_without_a_key(serve: Any) -> None:
    server = serve("x", origins=("https://chat.example",), api_keys=("k",))
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    assert server.http.options(CHAT, headers=headers).status_code == 204
    answer = server.post(CHAT, {"messages": USER}, headers={"origin": "https://chat.example"})
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert server.post(CHAT, {}, headers={"origin": "https://other.example", "x-api-key": "k"}).status_code == 403


# Request ids and the log


def test_request_ids(serve: Any) -> None:
    server = serve()
    for path in ("/health", "/v1/nothing"):
        answer = server.http.get(path)
        assert answer.headers["x-request-id"] == answer.headers["request-id"] != ""
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 200, "<script>"):
        assert server.http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_the_request_log_holds_figures_and_no_secrets(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    server = serve("Hello!", api_keys=("sk-secret",), request_log=str(file))
    headers = {"authorization": "Bearer sk-secret"}
    server.post(CHAT, {"messages": [{"role": "user", "content": "private words"}]}, headers=headers)
    server.post("/v1/messages?x=sk-secret", {"messages": []}, headers={"x-api-key": "sk-secret"})
    server.post(CHAT, {"messages": USER}, headers={"x-api-key": "sk-wrong"})
    assert wait_for(lambda: file.exists() and file.read_text().count("\n") == 3, 30), "a line follows its answer"
    server.state.log.close()
    text = file.read_text()
    assert not any(word in text for word in ("sk-", "private", "Hello"))
    first, second, third = map(json.loads, text.splitlines())
    assert first["status"] == 200 and first["path"] == CHAT and first["client"].startswith("key-")
    assert first["prompt_tokens"] > 0 and first["completion_tokens"] > 0 and first["finish"] == ["stop"]
    assert first["outcome"] == "done" and first["first_token_ms"] <= first["ms"]
    assert second["status"] == 400 and second["error"]["param"] == "messages"
    assert third["status"] == 401 and third["error"]["code"] == "invalid_api_key"


def test_a_log_that_cannot_be_written_stops_nothing(serve: Any, tmp_path: Path) -> None:
    server = serve("Hello!", request_log=str(tmp_path / "absent" / "log"))
    for _ in range(3):
        assert server.post(CHAT, {"messages": USER}).status_code == 200
    assert wait_for(lambda: server.state.log.lost == 3, 30)
    server.state.log.close()


# Media


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("198.18.0.1", False),
        ("198.126.5.5", True),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("::7f00:1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b:1::1", False),
        ("2002:7f00:1::", False),
        ("2002:a00:1::", False),
        ("2001:0:5ef5:79fd:0:59d:80ff:fffe", False),
        ("ff02::1", False),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert globally_reachable(ipaddress.ip_address(address)) is public


class Site(BaseHTTPRequestHandler):
    """A small site that counts its visitors."""

    seen: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        Site.seen.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/endless":
            try:
                while True:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                return
        self.wfile.write(b"picture")

    def log_message(self, *arguments: Any) -> None:
        return


@pytest.fixture(scope="module")
def site() -> Any:
    web = HTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield web.server_port
    web.shutdown()
    web.server_close()


REMOTE = [
    "http://127.0.0.1/x",
    "http://[::1]/x",
    "http://localhost/x",
    "http://169.254.169.254/latest/meta-data",
    "http://0.0.0.0/",
    "http://2130706433/",
    "http://user:secret@93.184.216.34/x",
    "http://93.184.216.34:22/x",
    "https://93.184.216.34:8443/x",
    "ftp://93.184.216.34/x",
    "gopher://127.0.0.1:11211/_stats",
    "file:///etc/hostname",
    "file://server/share",
    "/etc/hostname",
    "../../etc/hostname",
    "etc/hostname",
    "javascript:alert(1)",
    "http://",
    "",
]


@pytest.mark.parametrize("url", REMOTE)
def test_unwelcome_addresses(serve: Any, url: str) -> None:
    server = serve()
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400, "remote media is off by default"
    reader = MediaReader(ServerSettings(media_domains=()))
    with pytest.raises(MediaError):
        made = reader.part(url, "image")
        reader.fetch(Request((Message("user", (made,)),)), True)


def test_remote_media_goes_through_the_guard(site: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(fetch, "TOTAL_SECONDS", 5.0)
    names = {"cdn.example": "93.184.216.34", "inside.example": "10.0.0.8", "mixed.example": "93.184.216.34"}
    resolved: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        resolved.append(host)
        if host not in names:
            raise socket.gaierror("unknown")
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[host], port))]
        if host == "mixed.example":
            found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)))
        return found

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address == ("93.184.216.34", 80), "connects to the checked address and nowhere else"
        made = socket.socket()
        made.settimeout(timeout)
        made.connect(("127.0.0.1", site))
        return made

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    fetcher = Fetcher()
    Site.seen.clear()
    assert fetcher.get("http://cdn.example/a.png?b", "image") == b"picture"
    assert fetcher.get("http://cdn.example/to/http://cdn.example/b", "image") == b"picture"
    assert Site.seen == ["/a.png?b", "/to/http://cdn.example/b", "/b"]
    assert resolved == ["cdn.example"] * 3, "one look-up per hop: no second answer can differ"
    Site.seen.clear()
    for url in ("http://inside.example/", "http://mixed.example/", "http://unknown.example/", "http://cdn.example:81/"):
        with pytest.raises(MediaError):
            fetcher.get(url, "image")
    assert not Site.seen
    for target in ("http://inside.example/", "http://127.0.0.1/", "file:///etc/passwd", "http://cdn.example:22/"):
        with pytest.raises(MediaError):
            fetcher.get(f"http://cdn.example/to/{target}", "image")
    loop = "http://cdn.example" + "/to/http://cdn.example" * 7 + "/x"
    with pytest.raises(MediaError, match="redirects more than 5"):
        fetcher.get(loop, "image")
    for path in ("/endless", "/none"):
        with pytest.raises(MediaError, match=r"could not be fetched$"):
            fetcher.get("http://cdn.example" + path, "image")
    limited = Fetcher(("example.org", ".cdn.example"))
    with pytest.raises(MediaError, match="not among the allowed"):
        limited.get("http://evilcdn.example/x", "image")
    assert limited.get("http://cdn.example/x", "image") == b"picture"
    reader = MediaReader(ServerSettings(media_domains=("cdn.example",)))
    part = reader.part("http://cdn.example/a.png", "image")
    assert part == Image(url="http://cdn.example/a.png")
    request = Request((Message("user", (Text("x"), part)),))
    assert reader.fetch(request, True).messages[0].content == (Text("x"), Image(data=b"picture"))
    assert reader.fetch(request, False) is request, "without a vision tower nothing is fetched"


def test_local_files_only_below_the_media_root(tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "a b.png").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"x")
    (root / "link").symlink_to(tmp_path / "secret")
    reader = MediaReader(ServerSettings(media_root=root))
    assert reader.part(f"file://{root}/a%20b.png", "image") == Image(path=str(root / "a b.png"))
    for path in (tmp_path / "secret", root / ".." / "secret", root / "link", root, root / "absent"):
        with pytest.raises(MediaError, match="media-root"):
            reader.part(f"file://{path}", "image")


def test_base64_and_data_urls() -> None:
    reader = MediaReader(ServerSettings())
    data = bytes(range(256))
    text = base64.b64encode(data).decode()
    for form in (text, text.rstrip("="), text[:40] + "\r\n" + text[40:], base64.urlsafe_b64encode(data).decode()):
        assert decode_base64(form, "x") == data
    assert reader.part(f"data:image/png;base64,{text}", "x") == Image(data=data)
    assert reader.part("data:text/plain,a%20b", "x") == Image(data=b"a b")
    for bad in ("", "a", "a*b=", "äöü"):
        with pytest.raises(MediaError):
            decode_base64(bad, "x")
    for bad in ("data:image/png;base64", "data:image/png;base64,", "data:,"):
        with pytest.raises(MediaError):
            reader.part(bad, "x")
