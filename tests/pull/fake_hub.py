"""A hub on loopback: the metadata and file endpoints of the real one, every fault a server can have, and a record."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.serving import wait_for

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 10_000
"""Files above this have a SHA-256 in the metadata, as files in large-file storage do; smaller ones a git blob id."""


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Faults:
    """What goes wrong; each is consulted per file request."""

    cut: int = 0
    """Bytes after which a response breaks off."""
    cuts: int = 10**9
    """How many responses break off."""
    ignore_ranges: bool = False
    flip: dict[int, int] = field(default_factory=dict)
    """Byte position -> how many times it is sent wrong."""
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Answers to give first, one per request."""
    empty: bool = False
    silent: int = 0
    """How many responses send their headers and then nothing, until `gate` opens."""
    redirect: str = ""
    """Host (and port) that file requests are sent to."""
    announced: int = 0
    """A length to claim instead of the true one."""
    pause: float = 0.0
    """Seconds between blocks of 16 KiB."""
    token: str = ""
    """Wanted from everyone; 401 without."""
    no_digests: bool = False


class FakeHub:
    """Serves `repos[repo][file] = bytes`; `requests` is what was asked for, `sent` the bytes of each file sent.

    Bytes count before they go out: whoever has received a file finds all of it counted.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.faults = Faults()
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: list[tuple[str, str | None]] = []
        self.sent: dict[str, int] = {}
        self.gate = threading.Event()
        self.on_file: Callable[[str], None] | None = None
        self.lock = threading.Lock()
        self.reading: set[Any] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                with hub.lock:
                    hub.reading.add(self)
                super().setup()

            def finish(self) -> None:
                with hub.lock:
                    hub.reading.discard(self)
                super().finish()

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815 - the name that the base class calls

            def log_message(self, *args: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                return  # clients that are killed in the middle are what these tests are about

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()

    def environ(self, **more: str) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_TELEMETRY": "1", **more}

    def settle(self) -> None:
        """Wait for the end of downloads in this process that failed or were stopped.

        Their threads end a little later than they do, perhaps with one more request, which a new one must not meet.
        Connections that last asked for metadata do not count: the hub's client keeps them.
        """
        assert wait_for(lambda: not any(t.name.startswith("ninfer-download") for t in threading.enumerate()), 30)
        assert wait_for(lambda: not self.reading, 30)

    def forget(self) -> None:
        """Start counting anew; what is still being sent for earlier requests counts as theirs."""
        with self.lock:
            self.requests, self.sent = [], {}

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        with self.lock:
            sent = self.sent
            self.requests.append((handler.command, path, handler.headers.get("Range")))
            self.tokens.append((handler.headers.get("Host", ""), handler.headers.get("Authorization")))
        if self.faults.token and handler.headers.get("Authorization") != f"Bearer {self.faults.token}":
            return _plain(handler, 401, b'{"error":"unauthorized"}', {"X-Error-Code": "GatedRepo"})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        if found:
            with self.lock:
                self.reading.discard(handler)
            return self.metadata(handler, found[1], found[2] or "main")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found and found[1] in self.repos and unquote(found[3]) in self.repos[found[1]]:
            return self.file(handler, found[1], unquote(found[3]), sent)
        return _plain(handler, 404, b'{"error":"Entry not found"}', {"X-Error-Code": "EntryNotFound"})

    def metadata(self, handler: BaseHTTPRequestHandler, repo: str, revision: str) -> None:
        if repo not in self.repos:
            return _plain(handler, 404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return _plain(handler, 404, b'{"error":"Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for name, data in self.repos[repo].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            if not self.faults.no_digests:
                entry["blobId"] = git_id(data)
                if len(data) > LARGE:
                    sha256 = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        body = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
        return _plain(handler, 200, json.dumps({**body, "siblings": siblings}).encode(), {})

    def file(self, handler: BaseHTTPRequestHandler, repo: str, name: str, sent: dict[str, int]) -> None:
        faults, data = self.faults, self.repos[repo][name]
        if self.on_file is not None:
            self.on_file(name)
        if faults.redirect and handler.headers.get("Host") != faults.redirect:
            return _plain(handler, 302, b"", {"Location": f"http://{faults.redirect}{handler.path}"})
        with self.lock:
            status = faults.statuses.pop(0) if faults.statuses else None
        if status:
            return _plain(handler, status[0], b"later", status[1])
        start, stop, partial = 0, len(data), False
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if found and not faults.ignore_ranges:
            start, stop, partial = int(found[1]), min(int(found[2]) + 1, len(data)), True
        if faults.empty:
            return _plain(handler, 200, b"", {})
        handler.send_response(206 if partial else 200)
        handler.send_header("Content-Length", str(faults.announced or stop - start))
        if partial:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{faults.announced or len(data)}")
        handler.end_headers()
        if handler.command == "HEAD":
            return None
        with self.lock:
            silent, faults.silent = faults.silent > 0, faults.silent - 1
        if silent:
            handler.wfile.flush()
            self.gate.wait(30)
            handler.close_connection = True
            return None
        return self.body(handler, name, data, start, stop, sent)

    def body(
        self, handler: BaseHTTPRequestHandler, name: str, data: bytes, start: int, stop: int, sent: dict[str, int]
    ) -> None:
        faults, first = self.faults, start
        cut = stop
        with self.lock:
            if faults.cut and faults.cuts > 0 and stop - start > faults.cut:
                faults.cuts -= 1
                cut = start + faults.cut
        while start < cut:
            block = bytearray(data[start : min(cut, start + 16384)])
            with self.lock:
                for place, times in faults.flip.items():
                    if times and start <= place < start + len(block):
                        faults.flip[place] = times - 1
                        block[place - start] ^= 0xFF
                sent[name] = sent.get(name, 0) + len(block)
            handler.wfile.write(block)
            start += len(block)
            if faults.pause:
                time.sleep(faults.pause)
        if cut < stop and first != stop:
            handler.wfile.flush()
            handler.close_connection = True


def _plain(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
