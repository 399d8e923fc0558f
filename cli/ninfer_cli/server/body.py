"""Request bodies: size limits, content encodings, strict JSON, and pydantic errors turned into one readable line."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message

from ninfer_core.errors import InvalidRequestError

from .errors import HttpError

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 200
SILENCE_SECONDS = 60.0
_DRAIN_BYTES = 128 << 20
_DRAIN_SECONDS = 5.0
_SURROGATE = re.compile("[\ud800-\udfff]")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete; there is nobody to tell."""


async def read_body(request: Request, limit: int) -> bytes:
    """The decoded body of a request.

    Raises:
        HttpError: 413 above `limit` bytes (before or after decoding), 415 for an unknown encoding, 408 after silence.
        ClientGoneError: the client left while sending.
    """
    decode, finish = _decoder(request.headers.get("content-encoding", ""), limit)
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    parts: list[bytes] = []
    raw = size = 0
    more = True
    while more:
        if too_large:
            await _drain(request)
            raise _too_large(limit)
        message = await _received(request)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        chunk = message.get("body", b"")
        raw += len(chunk)
        piece = decode(chunk)
        size += len(piece)
        parts.append(piece)
        if raw > limit or size > limit:
            if more:
                await _drain(request)
            raise _too_large(limit)
    parts.append(finish())
    return b"".join(parts)


async def _received(request: Request) -> Message:
    """The next part of a body; who stops sending in the middle of it is not waited for."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await request.receive()
    except TimeoutError:
        raise HttpError(
            408, f"nothing more of the request body came for {SILENCE_SECONDS:g} seconds; send it again",
            code="request_timeout",
        ) from None  # fmt: skip


def _too_large(limit: int) -> HttpError:
    return HttpError(
        413, f"the request body is larger than the limit of {limit:,} bytes; send less, or raise --max-body",
        code="request_too_large",
    )  # fmt: skip


async def _drain(request: Request) -> None:
    """Read and drop what a client still sends, within bounds, so that it sees the answer and not a reset."""
    left = _DRAIN_BYTES
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _decoder(encoding: str, limit: int) -> tuple[Callable[[bytes], bytes], Callable[[], bytes]]:
    """An incremental decoder with a cap on what it may produce from one chunk, and its end check."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return (lambda chunk: chunk), (lambda: b"")
    if name in ("gzip", "x-gzip", "deflate"):
        inflater = zlib.decompressobj(zlib.MAX_WBITS | (32 if name != "deflate" else 0))

        def inflate(chunk: bytes) -> bytes:
            try:
                return inflater.decompress(chunk, limit + 1)
            except zlib.error as error:
                raise _undecodable(name, str(error)) from error

        def end() -> bytes:
            if not inflater.eof:
                raise _undecodable(name, "the data ends early")
            return b""

        return inflate, end
    if name == "zstd":
        return _zstd_decoder(limit)
    raise HttpError(
        415, f"Content-Encoding {encoding!r} is not supported; send gzip, deflate, zstd or no encoding",
        code="unsupported_encoding", headers={"Accept-Encoding": "gzip, deflate, zstd"},
    )  # fmt: skip


def _undecodable(name: str, reason: str) -> HttpError:
    return HttpError(400, f"the request body is not valid {name} data: {reason}", code="invalid_body")


def _zstd_decoder(limit: int) -> tuple[Callable[[bytes], bytes], Callable[[], bytes]]:
    """zstandard works on whole frames here: collect, then decode with the cap."""
    try:
        import zstandard
    except ImportError as error:
        raise HttpError(
            415, 'zstd request bodies need the package zstandard: pip install "ninfer[serve]"',
            code="unsupported_encoding",
        ) from error  # fmt: skip
    chunks: list[bytes] = []

    def keep(chunk: bytes) -> bytes:
        chunks.append(chunk)
        return b""

    def end() -> bytes:
        reader = zstandard.ZstdDecompressor().stream_reader(b"".join(chunks), read_across_frames=True)
        try:
            data = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise _undecodable("zstd", str(error)) from error
        if len(data) > limit:
            raise _too_large(limit)
        return data

    return keep, end


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8 (a byte-order mark is allowed), finite numbers, bounded nesting, no lone surrogates.

    Raises:
        InvalidRequestError: with the place of the first fault.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the request body is not UTF-8: byte {error.start} cannot be decoded") from error
    if not text.strip():
        raise InvalidRequestError("the request body is empty; send a JSON object")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the request body is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise InvalidRequestError(f"the request body holds a number that cannot be used: {error}") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\u" in body:
        value = _repair(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is outside the range of a double")
    return value


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"the request body nests deeper than {MAX_DEPTH} levels")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        following: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                following.extend(child for child in item.values() if isinstance(child, (dict, list)))
            elif isinstance(item, list):
                following.extend(child for child in item if isinstance(child, (dict, list)))
        if not following:
            return
        level = following
    raise _too_deep()


def _repair(value: Any) -> Any:
    """Half of a surrogate pair is no character: it becomes U+FFFD, as in any UTF-8 decoder."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_repair(item) for item in value]
    if isinstance(value, dict):
        return {_repair(key): _repair(item) for key, item in value.items()}
    return value


def validate(model: type[Model], value: Any) -> Model:
    """A checked request object; unknown fields are ignored.

    Raises:
        InvalidRequestError: `param` is the path of the first fault, such as `messages[2].role`.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the request body must be a JSON object, not {_kind(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        # Of a union's alternatives pydantic reports each; the deepest one is the form the client meant.
        details = max(error.errors(include_url=False), key=lambda item: len(item["loc"]))
        missing = details["type"] == "missing"
        param = _path(details["loc"], value, missing)
        found = "" if missing else f", found {_kind(details['input'])}"
        raise InvalidRequestError(f"{param or 'request'}: {details['msg'].lower()}{found}", param=param) from error


def _path(location: tuple[int | str, ...], value: Any, missing: bool) -> str | None:
    """The path of a fault in the client's own terms: names of union members are left out."""
    text = ""
    node = value
    for place, step in enumerate(location):
        if isinstance(step, int):
            if isinstance(node, list) and step < len(node):
                text, node = f"{text}[{step}]", node[step]
        elif isinstance(node, dict) and (step in node or (missing and place == len(location) - 1)):
            text, node = f"{text}.{step}" if text else step, node.get(step)
    return text or None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"the number {value!r}"[:60]
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return "an object" if isinstance(value, dict) else "an array"


async def read_request(request: Request, model: type[Model], limit: int) -> Model:
    """Body, JSON and schema in one step; large bodies are parsed in a thread to keep the event loop free."""
    body = await read_body(request, limit)

    def parse() -> tuple[Model, list[str]]:
        value = parse_json(body)
        return validate(model, value), unknown_fields(model, value)

    parsed, unknown = await asyncio.to_thread(parse) if len(body) > 1 << 18 else parse()
    request.scope["state"]["record"].ignored = unknown
    return parsed


def unknown_fields(model: type[BaseModel], value: dict[str, Any]) -> list[str]:
    """What a request says that is ignored, for the log: fields of the body and of its `options`."""
    found = [name[:60] for name in value if name not in model.model_fields]
    options, field = value.get("options"), model.model_fields.get("options")
    if isinstance(options, dict) and field is not None:
        known = next(kind for kind in get_args(field.annotation) if issubclass(kind, BaseModel)).model_fields
        found += [f"options.{name[:60]}" for name in options if name not in known]
    return sorted(found)[:32]
