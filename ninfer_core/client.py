"""The HTTP twin of `Engine`: the same submit interface over a running ninfer server, for any thread and event loop.

    from ninfer_core.client import Client

    with Client("http://127.0.0.1:11434") as client:
        print(client.generate("Say hello.", thinking=False).text)

All traffic runs on one background event loop per process, so that a request can be cancelled at once from anywhere:
its connection closes, and the server frees the sequence. Answers are always streamed; what `submit` of a local engine
raises at once, such as a prompt that is too long, reaches the reader of the handle here.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from .errors import (
    EngineBusyError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    NinferError,
    RequestTimeoutError,
    ServerUnreachableError,
)
from .runtime.handle import RequestHandle
from .runtime.interface import EngineInterface, Prompt, make_request, model_profile
from .runtime.validation import check_request
from .types import Finish, Request, Tool, Usage
from .wire import (
    ChatReader,
    TextReader,
    check_address,
    decode_error,
    json_object,
    messages_body,
    request_body,
    tool_body,
)

T = TypeVar("T")

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 120.0
"""A ninfer server sends a heartbeat every few seconds, so a longer silence means a dead connection."""
MAX_PAUSE_SECONDS = 8.0
ANY_TOKEN = 1 << 31
"""Token ids below this may be some model's."""


class _Background:
    """The event loop thread that all clients of this process share."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None
    _pid = 0

    @classmethod
    def run(cls, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; the future can be waited for, and cancelled, from any thread."""
        with cls._lock:
            if cls._loop is None or cls._pid != os.getpid():
                loop = cls._loop = asyncio.new_event_loop()
                cls._pid = os.getpid()
                threading.Thread(target=loop.run_forever, name="ninfer-client", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, cls._loop)


class _Link:
    """Connections to one server and what runs over them; shared by clients that differ in the model only."""

    def __init__(self, given: httpx.AsyncClient | None) -> None:
        self.closed = False
        self.running: set[RequestHandle] = set()
        self.models: list[dict[str, Any]] | None = None
        self.lock = threading.Lock()
        self._given = given
        self._own: httpx.AsyncClient | None = None
        self._pid = 0

    def session(self) -> httpx.AsyncClient:
        """The caller's client, else one of this process's own."""
        if self._given is not None:
            return self._given
        with self.lock:
            if self._own is None or self._pid != os.getpid():
                self._pid = os.getpid()
                try:
                    self._own = httpx.AsyncClient(
                        timeout=httpx.Timeout(IDLE_SECONDS, connect=CONNECT_SECONDS, pool=None),
                        limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
                    )
                except (ValueError, ImportError, OSError) as error:
                    raise EngineError(
                        "the proxies or certificates that the environment names (HTTP_PROXY, ALL_PROXY, "
                        f"SSL_CERT_FILE) cannot be used: {error}"
                    ) from error
            return self._own

    def close(self) -> None:
        """Cancel what runs and close our own connections."""
        self.closed = True
        for handle in list(self.running):
            handle.cancel()
        own, self._own = self._own, None
        if own is not None and self._pid == os.getpid():
            _Background.run(own.aclose()).result(CONNECT_SECONDS)


class RemoteTokenizer:
    """The server's tokenizer; each call is one HTTP request."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text."""
        return list(self._client._post("/tokenize", {"content": text}, "tokens", list)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._client._post("/detokenize", {"tokens": list(ids)}, "content", str)) if ids else ""


class Client(EngineInterface):
    """A ninfer server as an engine.

    Args:
        base_url: the server's address, with or without `/v1`. A user and password in it are sent as basic
            authentication, and are not part of `base_url` or of any message afterwards.
        model: the served name to ask for; None is the server's own model.
        api_key: sent as a bearer token.
        timeout: seconds for a whole request, queue time included, where the request sets none; None is no limit.
        max_retries: further attempts after a refused connection or a full queue, while nothing has been generated. A
            server that still loads its model is asked until it has; 0 is one attempt, whatever the error.
        http_client: your own `httpx.AsyncClient` (proxies, certificates, transports); it is used on the background
            loop only, and you close it.

    Raises:
        InvalidRequestError: the address has no scheme or host, the key cannot be sent or comes on top of a user in the
            address, or the client is of another kind.
    """

    nonblocking = True
    """`submit` does no work that could hold up an event loop."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:11434",
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        max_retries: int = 2,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self.base_url, basic = check_address(base_url)
        if http_client is not None:
            check_http_client(http_client)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequestError(
                "api_key holds a character that no HTTP header can carry, such as the line end of a file it was read "
                "from",
                param="api_key",
            )
        self.model = model
        self.timeout = timeout
        self.max_retries = max_retries
        if api_key and basic:
            raise InvalidRequestError(
                "base_url holds a user and there is an api_key (or NINFER_API_KEY); a request has one Authorization "
                "header, so leave out one of the two",
                param="api_key",
            )
        authorization = f"Bearer {api_key}" if api_key else basic
        self._headers = {"Authorization": authorization} if authorization else {}
        self._link = _Link(http_client)

    def with_model(self, model: str | None) -> Client:
        """A client of the same server, over the same connections, that asks for another model."""
        other = copy.copy(self)
        other.model = model
        return other

    @property
    def closed(self) -> bool:
        """Whether it, or a client it shares its connections with, was closed."""
        return self._link.closed

    # what is known of the server

    def _entries(self) -> list[dict[str, Any]]:
        if self._link.models is None:
            entries = self._get("/v1/models").get("data")
            known = isinstance(entries, list) and all(isinstance(entry, dict) and "id" in entry for entry in entries)
            if not known or not entries:
                raise EngineError(f"{self.base_url} lists no models; is this the address of a ninfer server?")
            self._link.models = entries
        return self._link.models

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names the server answers to (asked once)."""
        return tuple(str(entry["id"]) for entry in self._entries())

    @property
    def context_length(self) -> int:
        """The served context (asked once).

        Raises:
            EngineError: a server of another kind, which does not say.
        """
        self._entries()
        if self.known_context is None:
            raise EngineError(f"{self.base_url} does not say how long its context is (max_model_len)")
        return self.known_context

    @property
    def known_context(self) -> int | None:
        """The served context if it was asked for before; never asks."""
        length = self._link.models[0].get("max_model_len") if self._link.models else None
        return length if isinstance(length, int) else None

    @property
    def profile(self) -> dict[str, Any]:
        """Capabilities as far as the server tells them (asked once)."""
        made = self._entries()[0].get("architecture")
        inputs = made.get("input_modalities") if isinstance(made, dict) else None
        vision = isinstance(inputs, list) and "image" in inputs
        return model_profile(self.model or self.served_names[0], self.known_context, vision=vision)

    @property
    def state(self) -> str:
        """`ready`, `loading`, `restarting`, `stalled`, `failed` (also: nobody answers) or `closed`."""
        if self._link.closed:
            return "closed"
        status = str(self.health().get("status"))
        if status in ("ok", "checking"):
            return "ready"
        return status if status in ("loading", "restarting", "stalled") else "failed"

    @property
    def tokenizer(self) -> RemoteTokenizer:
        """The server's tokenizer."""
        return RemoteTokenizer(self)

    def health(self) -> dict[str, Any]:
        """The server's own account; `{"status": "failed", "error": ...}` where nobody answers."""
        try:
            answer = _Background.run(
                self._link.session().get(self.base_url + "/health", headers=self._headers)
            ).result()
            return json_object(answer.content, "the answer to /health")
        except (httpx.HTTPError, EngineError) as error:
            return {"status": "failed", "error": f"{type(error).__name__}: {error}"}

    def stats(self) -> dict[str, Any]:
        """`running`: requests of this client; `server_load`: requests that run or wait at the server."""
        return {"running": len(self._link.running), **self._get("/load")}

    def count_tokens(
        self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None
    ) -> int:
        """Tokens of the rendered prompt, counted by the server."""
        request = _as_request(messages, tools, thinking)
        if isinstance(request.prompt, tuple):
            return len(request.prompt)
        if request.prompt is not None:
            return len(self.tokenizer.encode(request.prompt))
        return int(self._post("/tokenize", _prompt_body(request), "count", int))

    def render(self, messages: Prompt, tools: Sequence[Tool] | None = None, *, thinking: bool | None = None) -> str:
        """The prompt text, made by the server."""
        request = _as_request(messages, tools, thinking)
        return str(self._post("/apply-template", _prompt_body(request), "prompt", str))

    # generating

    def submit(self, request: Request) -> RequestHandle:
        """Send a request; returns at once. Errors of the server reach the reader of the handle.

        Raises:
            InvalidRequestError: a value that is wrong for every model; it would not travel, or be left out.
            UnsupportedError: a field that does not travel over HTTP.
            EngineClosedError: the client was closed.
        """
        if self._link.closed:
            raise EngineClosedError("the client is closed; make a new one")
        _check(request)
        try:
            (self.model or "").encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"model is {self.model!r}, which is not Unicode text", param="model") from error
        path, body = request_body(request, self.model)
        future: list[Future[None]] = []

        def cancel(_: RequestHandle) -> None:
            future[0].cancel()

        handle = RequestHandle(request, on_cancel=cancel)
        future.append(_Background.run(self._play(handle, path, body)))
        with self._link.lock:
            self._link.running.add(handle)
        # A task that is cancelled before its first step never runs, so its end is told here.
        future[0].add_done_callback(lambda done: self._ended(handle, done))
        return handle

    def _ended(self, handle: RequestHandle, future: Future[None]) -> None:
        with self._link.lock:
            self._link.running.discard(handle)
        if self._link.closed:
            handle.fail(EngineClosedError("the client was closed while the request ran"))
        elif future.cancelled():
            handle.push([Finish("cancelled", Usage())])
        elif future.exception() is not None:
            handle.fail(future.exception() or RuntimeError("the request failed"))

    async def _play(self, handle: RequestHandle, path: str, body: dict[str, Any]) -> None:
        limit = handle.request.timeout or self.timeout
        try:
            async with asyncio.timeout(limit):
                attempt = 0
                while True:
                    try:
                        await self._attempt(handle, path, body)
                        return
                    except NinferError as error:
                        pause = _pause(error, attempt)
                        if pause is None or handle._events or not self.max_retries:
                            raise
                        # As in a process of its own, loading is waited for; the request's timeout bounds that.
                        if attempt >= self.max_retries and not await self._loading(error):
                            raise
                        attempt += 1
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"the request took longer than its timeout of {limit} s; raise the timeout or ask for less"
            ) from error

    async def _loading(self, error: NinferError) -> bool:
        """Whether the server was busy since it still loads its model."""
        if not isinstance(error, EngineBusyError):
            return False
        try:
            answer = await self._link.session().get(self.base_url + "/health", headers=self._headers)
            return json_object(answer.content, "the answer to /health").get("status") == "loading"
        except (httpx.HTTPError, EngineError):
            return False

    async def _attempt(self, handle: RequestHandle, path: str, body: dict[str, Any]) -> None:
        started = time.monotonic()
        reader = (ChatReader if path.endswith("/chat/completions") else TextReader)(handle.request, started)
        try:
            async with self._link.session().stream(
                "POST", self.base_url + path, json=body, headers={**self._headers, "Accept": "text/event-stream"}
            ) as answer:
                if answer.status_code != 200:
                    raise decode_error(answer.status_code, await answer.aread(), answer.headers)
                async for line in _lines(answer):
                    handle.push(reader.feed(line))
                    if reader.done:
                        return
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise ServerUnreachableError(f"{self.base_url} closed the stream before the answer was complete")

    # plumbing

    def _get(self, path: str) -> dict[str, Any]:
        return _Background.run(self._json("GET", path, None)).result()

    def _post(self, path: str, body: Mapping[str, Any], name: str, kind: type) -> Any:
        """A field of the answer, which must be of this kind."""
        value = _Background.run(self._json("POST", path, body)).result().get(name)
        if not isinstance(value, kind):
            raise EngineError(
                f"the answer to {path} has no {name!r}; is {self.base_url} the address of a ninfer server?"
            )
        return value

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            answer = await self._link.session().request(method, self.base_url + path, json=body, headers=self._headers)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise decode_error(answer.status_code, answer.content, answer.headers)
        return json_object(answer.content, f"the answer to {path}")

    def _unreachable(self, error: httpx.HTTPError) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"no answer from {self.base_url} ({type(error).__name__}: {error}); is `ninfer serve` running there?"
        )

    def close(self) -> None:
        """Cancel what runs and close the connections. Idempotent."""
        self._link.close()


def check_http_client(client: Any) -> None:
    """Refuse a client that cannot run on the background loop.

    Raises:
        InvalidRequestError: it is no `httpx.AsyncClient`.
    """
    if not isinstance(client, httpx.AsyncClient):
        raise InvalidRequestError(
            f"http_client must be an httpx.AsyncClient, not {type(client).__name__}: synchronous calls use it too",
            param="http_client",
        )


def _check(request: Request) -> None:
    """What an engine of this process would refuse whatever its model is; the rest is the server's to say."""
    check_request(request, addressable=ANY_TOKEN, vision=True, grammars=True)


def _as_request(messages: Prompt, tools: Sequence[Tool] | None, thinking: bool | None) -> Request:
    made = messages if isinstance(messages, Request) else None
    request = made or make_request(messages, tools=tuple(tools or ()), thinking=thinking)
    _check(request)
    return request


def _prompt_body(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": messages_body(request), "tools": [tool_body(tool) for tool in request.tools]}
    for name, value in (("enable_thinking", request.thinking), ("preserve_thinking", request.preserve_thinking)):
        if value is not None:
            body[name] = value
    return body


def _pause(error: NinferError, attempt: int) -> float | None:
    """Seconds before the next attempt; None where another attempt cannot help."""
    if not error.retryable:
        return None
    return float(min(getattr(error, "retry_after", 0.25 * 2**attempt), MAX_PAUSE_SECONDS))


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a body, split at line feeds only: JSON text may hold other characters that Unicode calls line ends."""
    rest = b""
    async for block in answer.aiter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest
