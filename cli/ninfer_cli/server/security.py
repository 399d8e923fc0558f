"""Who may talk to the server: Host check against DNS rebinding, origins, and API keys, as pure ASGI middleware."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from . import page
from .errors import HttpError
from .settings import ServerSettings

HEALTH_PATHS = frozenset({"/health", "/v1/health", "/healthz", "/ready", "/readyz"})
OPEN_PATHS = frozenset({"/", *page.FILES, *HEALTH_PATHS, "/ping"})
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
_APP_SCHEMES = frozenset({"app", "tauri", "vscode-webview", "vscode-file"})
_ALLOWED_HEADERS = (
    "authorization, content-type, content-encoding, accept, user-agent, x-api-key, x-request-id, x-requested-with, "
    "anthropic-version, anthropic-beta, anthropic-dangerous-direct-browser-access, openai-beta, openai-organization, "
    "openai-project"
)
_SDK_HEADERS = ("x-stainless-", "anthropic-", "openai-", "x-goog-", "x-client-")
_EXPOSED_HEADERS = "x-request-id, request-id, retry-after, x-should-retry"


class HostGuard:
    """On a loopback bind, refuses names that a foreign page could have pointed at this machine."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.active = settings.loopback
        self.machine = socket.gethostname().lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or raise the 403."""
        if scope["type"] == "http" and self.active:
            host = host_name(Headers(scope=scope).get("host", ""))
            if host and not self._local(host):
                raise HttpError(
                    403,
                    f"the Host header names {host!r}, but this server listens on loopback only",
                    code="host_refused",
                )
        await self.app(scope, receive, send)

    def _local(self, host: str) -> bool:
        if host == "localhost" or host == self.machine or host.endswith(_LOCAL_SUFFIXES):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or address.is_private or address.is_unspecified


def host_name(header: str) -> str:
    """The name of a Host header without its port, lower case, brackets removed."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


class Origins:
    """CORS for local pages and apps; a browser request from any other origin is refused before it can act."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.extra = frozenset(origin.rstrip("/").lower() for origin in settings.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer preflights, mark answers for their origin, refuse foreign origins."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self.app(scope, receive, send)
            return
        if not self.allowed(origin, headers.get("host", "")):
            raise HttpError(
                403, f"the origin {origin[:100]!r} may not use this server; the operator can allow it with --origins",
                code="origin_refused",
            )  # fmt: skip
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(origin, headers, send)
            return

        # Written into every answer of this request by `tag_answer`, also into errors that are made further out.
        scope.setdefault("state", {})["origin"] = origin
        await self.app(scope, receive, send)

    def allowed(self, origin: str, host: str) -> bool:
        """Local pages, local app shells, what the operator added, and the server's own pages."""
        if "*" in self.extra or origin.rstrip("/").lower() in self.extra:
            return True
        try:
            parts = urlsplit(origin)
            name = (parts.hostname or "").lower()
        except ValueError:
            return False
        if parts.scheme in _APP_SCHEMES:
            return True
        if parts.scheme not in ("http", "https"):
            return False
        return name in ("localhost", "127.0.0.1", "::1") or parts.netloc.lower() == host.lower()

    async def _preflight(self, origin: str, headers: Headers, send: Send) -> None:
        asked = [name.strip().lower() for name in headers.get("access-control-request-headers", "").split(",")]
        known = set(_ALLOWED_HEADERS.split(", "))
        extra = sorted({name for name in asked if name.startswith(_SDK_HEADERS) and name not in known})
        answer = MutableHeaders()
        answer["Access-Control-Allow-Origin"] = origin
        answer["Access-Control-Allow-Methods"] = "GET, HEAD, POST, DELETE, OPTIONS"
        answer["Access-Control-Allow-Headers"] = ", ".join([_ALLOWED_HEADERS, *extra])
        answer["Access-Control-Max-Age"] = "600"
        answer["Vary"] = "Origin"
        if headers.get("access-control-request-private-network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        await send({"type": "http.response.start", "status": 204, "headers": answer.raw})
        await send({"type": "http.response.body", "body": b""})


def tag_answer(headers: MutableHeaders, origin: str | None) -> None:
    """Let a page of an allowed origin read an answer."""
    if origin is not None:
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Expose-Headers"] = _EXPOSED_HEADERS
        headers.add_vary_header("Origin")


class ApiKeys:
    """Accepts `Authorization: Bearer` and `x-api-key`; every key is compared, in constant time."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an authorised request on, or raise the 401."""
        if scope["type"] == "http" and self.digests and scope["path"] not in OPEN_PATHS:
            given = presented_key(Headers(scope=scope))
            if not given:
                raise HttpError(
                    401, "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
            if not self._known(given):
                raise HttpError(
                    401, "the API key is not valid for this server", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
        await self.app(scope, receive, send)

    def _known(self, given: Iterable[str]) -> bool:
        # Header text is the raw bytes read as Latin-1: compare the bytes, so that any UTF-8 key works.
        found = [_digest(key.encode("latin-1", "replace")) for key in given]
        matches = [hmac.compare_digest(key, digest) for key in found for digest in self.digests]
        return any(matches)


def presented_key(headers: Headers) -> list[str]:
    """The keys a request presents, in no particular order."""
    keys = [headers.get("x-api-key", "").strip()]
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        keys.append(token.strip())
    return [key for key in keys if key]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
