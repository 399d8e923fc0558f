"""Fetching remote media without becoming a proxy into the operator's network."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from ..errors import MediaError

MAX_BYTES = 64 << 20
MAX_REDIRECTS = 5
TOTAL_SECONDS = 20.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ipaddress.ip_network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.ip_network("::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def globally_reachable(address: Address) -> bool:
    """Whether an address belongs to the public Internet, with every IPv4 address hidden in an IPv6 one looked at."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _LOCAL_NAT64 or address in _COMPATIBLE:
            return False
        hidden = [address.ipv4_mapped, address.sixtofour]
        if address.teredo:
            hidden += address.teredo
        if address in _NAT64:
            hidden.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [item for item in hidden if item is not None]
        if inner:
            return all(globally_reachable(item) for item in inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


class Fetcher:
    """Reads http(s) resources; `domains` limits the hosts (with their subdomains), empty means any public host."""

    def __init__(self, domains: Sequence[str] = ()) -> None:
        self.domains = tuple(domain.lower().strip(".") for domain in domains)

    def check_url(self, url: str, param: str) -> SplitResult:
        """The parts of an acceptable address.

        Raises:
            MediaError: scheme, port, credentials or host are not allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise MediaError(f"{param} is not a valid address", param=param) from error
        host = (parts.hostname or "").lower().rstrip(".")
        if parts.scheme not in ("http", "https") or not host:
            raise MediaError(f"{param} must be an http or https address", param=param)
        if parts.username is not None or parts.password is not None:
            raise MediaError(f"{param} may not hold a user name or password", param=param)
        if port not in (80, 443):
            raise MediaError(f"{param} uses port {port}; only 80 and 443 are fetched from", param=param)
        if self.domains and not any(host == domain or host.endswith("." + domain) for domain in self.domains):
            raise MediaError(f"{param}: the host {host!r} is not among the allowed media domains", param=param)
        return parts

    def get(self, url: str, param: str) -> bytes:
        """The content of an address; every hop is resolved once, checked, and connected to at the checked address.

        Raises:
            MediaError: not allowed, not reachable, too large or too slow; all failures of the network read alike.
        """
        deadline = time.monotonic() + TOTAL_SECONDS
        for _ in range(MAX_REDIRECTS + 1):
            parts = self.check_url(url, param)
            addresses = self._resolve(parts, param)
            try:
                location, data = _request(parts, addresses[0], deadline)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _failed(param) from error
            if location is None:
                if not data:
                    raise _failed(param)
                return data
            url = urljoin(url, location)
        raise MediaError(f"{param} redirects more than {MAX_REDIRECTS} times", param=param)

    def _resolve(self, parts: SplitResult, param: str) -> list[str]:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _failed(param) from error
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        if not addresses or not all(globally_reachable(ipaddress.ip_address(item)) for item in addresses):
            raise MediaError(f"{param} does not name a public host", param=param)
        return addresses


def _failed(param: str) -> MediaError:
    return MediaError(f"{param} could not be fetched", param=param)


class _Pinned(http.client.HTTPConnection):
    """Connects to a fixed address while Host and SNI keep the name."""

    def __init__(self, parts: SplitResult, address: str, timeout: float) -> None:
        secure = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if secure else 80), timeout=timeout)
        self._address = address
        self._context = ssl.create_default_context() if secure else None

    def connect(self) -> None:
        """Open the socket, with TLS for https."""
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._context is not None:
            self.sock = self._context.wrap_socket(self.sock, server_hostname=self.host)


def _request(parts: SplitResult, address: str, deadline: float) -> tuple[str | None, bytes]:
    """One hop: a redirect's target, or the content."""
    connection = _Pinned(parts, address, max(0.1, deadline - time.monotonic()))
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Accept": "image/*, video/*", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            location = response.getheader("Location")
            if not location:
                raise ValueError("a redirect without a target")
            return location, b""
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return None, _read(response, connection, deadline)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float) -> bytes:
    data = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the transfer takes too long")
        if connection.sock is not None:
            connection.sock.settimeout(left)
        piece = response.read1(1 << 16)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > MAX_BYTES:
            raise ValueError("the resource is larger than the limit")
