"""Where to listen: the grammar of `NINFER_HOST`, binding both loopback families, and who holds a taken port."""

from __future__ import annotations

import errno
import http.client
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from ninfer_core.errors import InvalidRequestError

from .settings import DEFAULT_PORT

_SCHEME_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """A host (without brackets) and a port; port 0 takes a free one."""

    host: str
    port: int

    @property
    def shown(self) -> str:
        """The host as part of a URL."""
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str, port: int | None = None) -> Address:
    """`host`, `:port`, `host:port`, `[v6]`, `[v6]:port`, or a URL without a path; `port` wins over the text's.

    Raises:
        InvalidRequestError: the text is none of these.
    """
    value = text.strip()
    scheme, mark, rest = value.partition("://")
    default = DEFAULT_PORT
    if mark:
        if scheme.lower() not in _SCHEME_PORTS:
            raise InvalidRequestError(f"the address {text!r} has the scheme {scheme!r}; use http", param="host")
        default = _SCHEME_PORTS[scheme.lower()]
    else:
        rest = value
    if rest.count(":") > 1 and not rest.startswith("["):
        rest = f"[{rest}]"
    try:
        parts = urlsplit("//" + rest)
        found = parts.port
    except ValueError as error:
        raise InvalidRequestError(f"the address {text!r} has a wrong host or port: {error}", param="host") from error
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise InvalidRequestError(
            f"the address {text!r} has more than a host and a port; a path prefix needs a reverse proxy", param="host"
        )
    host = parts.hostname or "127.0.0.1"
    return Address(host, port if port is not None else found if found is not None else default)


def bind(address: Address, backlog: int = 2048) -> list[socket.socket]:
    """Listening sockets. "localhost" and 127.0.0.1 listen on ::1 too: clients resolve the name either way.

    Raises:
        OSError: the address cannot be bound.
    """
    first = _listen(address.host, address.port, backlog)
    sockets = [first]
    if address.host.lower() in ("localhost", "127.0.0.1"):
        port = first.getsockname()[1]
        other = "::1" if first.family == socket.AF_INET else "127.0.0.1"
        try:
            sockets.append(_listen(other, port, backlog))
        except OSError as error:
            # A machine without that family; a port taken there is somebody else's server, and a trap for clients.
            if error.errno == errno.EADDRINUSE:
                first.close()
                raise
    return sockets


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    made = socket.socket(family, kind, protocol)
    try:
        # On Windows this option lets a second server take the port of the first.
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if host == "::1" else 0)
        made.bind(where)
        made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def holder_of(address: Address) -> str:
    """What answers on a taken port, as the end of a sentence; empty if nobody tells."""
    host = "127.0.0.1" if address.host in ("0.0.0.0", "localhost") else "::1" if address.host == "::" else address.host
    connection = http.client.HTTPConnection(host, address.port, timeout=1.0)
    try:
        connection.request("GET", "/")
        text = connection.getresponse().read(200).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    if "ninfer" in text:
        return " (a ninfer server is there)"
    return " (Ollama is there)" if "Ollama" in text else " (another HTTP server is there)"
