"""The chat page at `/` for browsers: four files of this package, served with a policy that lets nothing else load."""

from __future__ import annotations

from importlib import resources

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = {
    "/ui/chat.css": "chat.css",
    "/ui/chat.js": "chat.js",
    "/ui/icon.svg": "icon.svg",
    "/ui/markdown.js": "markdown.js",
}
"""Path to file; a page of a server with keys asks for one, so these are open like `/` itself."""
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def wants_page(headers: Headers) -> bool:
    """Whether a browser asks; every other client of `/` looks for Ollama's greeting."""
    return "text/html" in headers.get("accept", "")


def root(headers: Headers) -> Response:
    """The answer at `/`."""
    if wants_page(headers):
        answer = _file("index.html")
    else:
        answer = PlainTextResponse("Ollama is running (served by ninfer)")
    answer.headers["Vary"] = "Accept"
    return answer


def page_file(path: str) -> Response:
    """One of `FILES`."""
    return _file(FILES[path])


def answer_for(scope: Scope) -> Response | None:
    """The page or a file of it, if that is what a request is for; it needs no model."""
    if scope["method"] not in ("GET", "HEAD"):
        return None
    if scope["path"] in FILES:
        return page_file(scope["path"])
    return root(Headers(scope=scope)) if scope["path"] == "/" else None


def _file(name: str) -> Response:
    data = resources.files("ninfer_cli.server").joinpath("ui", name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(data, media_type=kind, headers=_HEADERS)
