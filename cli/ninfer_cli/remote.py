"""A running server, seen from the command line: where it is, what it has loaded, `ps` and `stop`.

The standard library's HTTP client: these calls must be over before another one would have been imported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ninfer_core import store
from ninfer_core.errors import ModelNotFoundError, ServerUnreachableError

from .display import Console, duration, size, table
from .options import AsJson, Host, Quiet

if TYPE_CHECKING:
    from datetime import datetime

_TIMEOUT = 10.0
_PROBE = 0.5
"""Seconds that a command which can do without a server waits for one."""


def server_url(text: str) -> str:
    """The base URL that `NINFER_HOST` or `--host` means for a client; a path prefix stays.

    Raises:
        InvalidRequestError: the text is no address.
    """
    from .server.address import parse_address

    value = text.strip().rstrip("/").removesuffix("/v1")
    scheme, mark, rest = value.partition("://")
    host, slash, path = (rest if mark else value).partition("/")
    address = parse_address(f"{scheme}{mark}{host}" if mark else host)
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address.host, address.shown)
    return f"{scheme.lower() if mark else 'http'}://{shown}:{address.port}{slash}{path}"


def call(
    url: str, path: str, environ: Mapping[str, str], body: Any = None, *, method: str = "", timeout: float = _TIMEOUT
) -> Any:
    """The JSON answer of a server's Ollama interface.

    Raises:
        ServerUnreachableError: nobody answers, or not with JSON.
        ModelNotFoundError: the server does not know the model.
        EngineError: the server refused; its own words.
    """
    import urllib.error
    import urllib.request

    from ninfer_core.errors import AuthenticationError, EngineError

    headers = {"Content-Type": "application/json"}
    key = environ.get("NINFER_API_KEY", "").partition(",")[0].strip()
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers, method=method or ("POST" if data else "GET"))
    # No proxies: a server of this machine or network is meant.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            text = answer.read()
            return json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        message = _message_of(error.read()) or f"status {error.code}"
        kind = {404: ModelNotFoundError, 401: AuthenticationError}.get(error.code, EngineError)
        raise kind(f"the server at {url}: {message}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnreachableError(
            f"no ninfer server answers at {url} ({reason}); start one with: ninfer serve MODEL"
        ) from None


def _message_of(data: bytes) -> str:
    try:
        value = json.loads(data).get("error")
    except (ValueError, AttributeError):
        return ""
    return str(value.get("message", "")) if isinstance(value, dict) else str(value or "")


def find_server(host: str, environ: Mapping[str, str]) -> str | None:
    """The URL of a ninfer server at `host` (or the usual place), or None where nobody or another program answers."""
    url = server_url(host or environ.get("NINFER_HOST", ""))
    try:
        version = call(url, "/api/version", environ, timeout=_PROBE)
    except Exception:
        return None
    return url if isinstance(version, dict) and "ninfer" in version else None


def served_name(url: str, model: str, environ: Mapping[str, str]) -> str | None:
    """The name under which the server at `url` can answer for `model`, loaded or not; None if it cannot."""
    wanted = store.canonical(model)
    try:
        names = [str(entry["name"]) for entry in call(url, "/api/tags", environ, timeout=_TIMEOUT)["models"]]
    except Exception:
        return None
    return next((name for name in names if store.canonical(name) == wanted), None)


def loaded_names(environ: Mapping[str, str]) -> list[str]:
    """Names of the models that a running server of the usual place has loaded; none without a server."""
    url = find_server("", environ)
    try:
        entries = call(url, "/api/ps", environ)["models"] if url else []
    except Exception:
        return []
    return [str(name) for entry in entries for name in entry.get("names", [entry["name"]])]


def unload(model: str, environ: Mapping[str, str], host: str = "") -> None:
    """Ask the server to unload a model once its requests have ended.

    Raises:
        As `call`.
    """
    keep(model, 0, server_url(host or environ.get("NINFER_HOST", "")), environ)


def keep(model: str, time: float | str, url: str, environ: Mapping[str, str]) -> None:
    """Tell the server at `url` how long it is to keep a model from now on. Raises as `call`."""
    call(url, "/api/generate", environ, {"model": model, "keep_alive": time, "stream": False})


def ps(host: Host = "", as_json: AsJson = False) -> None:
    """Show what a running server has loaded and does."""
    console = Console(os.environ)
    models = call(server_url(host), "/api/ps", os.environ)["models"]
    if as_json:
        console.json({"models": models})
        return
    rows = [
        (
            entry["name"],
            entry["digest"][:12],
            size(entry["size"]),
            str(entry.get("processor", "-")),
            f"{entry['context_length']:,}",
            f"{entry.get('running', 0)}+{entry.get('waiting', 0)}",
            f"{entry.get('tokens_per_second') or 0:.1f}",
            _until(entry["expires_at"]),
        )
        for entry in models
    ]
    header = ("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "REQUESTS", "TOK/S", "UNTIL")
    for line in table(header, rows, right=(2, 4, 5, 6)):
        console.line(line)


def _until(text: str) -> str:
    from datetime import datetime

    expires: datetime = datetime.fromisoformat(text)
    left = expires.timestamp() - time.time()
    return "the server stops" if left > 10 * 365 * 86_400 else f"in {duration(left)}" if left > 0 else "unloading"


def stop(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The loaded model.")],
    host: Host = "",
    quiet: Quiet = False,
) -> None:
    """Unload a running server's model once its requests have ended."""
    loaded = call(server_url(host), "/api/ps", os.environ)["models"]
    names = [str(name) for entry in loaded for name in entry.get("names", [entry["name"]])]
    if store.canonical(model) not in map(store.canonical, names):
        raise ModelNotFoundError(f"{model} is not loaded; loaded: {', '.join(names) or 'nothing'}")
    unload(model, os.environ, host)
    if not quiet:
        Console(os.environ).note(f"{model} is unloaded as soon as its requests have ended")
