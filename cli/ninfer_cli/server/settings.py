"""What the operator decides about the HTTP server, as one frozen value with checked fields."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ninfer_core.errors import InvalidRequestError

DEFAULT_PORT = 11434


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server; sizes in bytes, times in seconds.

    `api_keys` empty means no authentication, which is refused on a non-loopback `host` unless
    `insecure_no_auth`. `media_domains` None keeps remote media off; an empty tuple allows any public host.
    `max_queue` bounds the requests that wait beside the `slots` that run, `max_per_client` those of one key (without
    keys: of one address) that run or wait, `queue_timeout` how long one may wait;
    `request_timeout` covers waiting and running. `unload_after` is how long an unused model stays loaded (below 0: for
    ever), `load_timeout` how long a request waits while its model is being loaded. `stored_responses` 0 turns the
    response store off. `presets` is a file of names with a system message and parameters. `request_log` is a file of
    JSON lines; "-" is standard error.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    insecure_no_auth: bool = False
    origins: tuple[str, ...] = ()
    strict_models: bool = False
    max_body_bytes: int = 64 << 20
    heartbeat: float = 8.0
    stall_timeout: float = 120.0
    request_timeout: float | None = None
    queue_timeout: float | None = None
    slots: int = 8
    max_queue: int = 64
    max_per_client: int | None = None
    keep_alive: int = 75
    shutdown_grace: float = 10.0
    unload_after: float = -1.0
    load_timeout: float = 300.0
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "reasoning_content"
    metrics_compat: frozenset[str] = frozenset()
    media_domains: tuple[str, ...] | None = None
    media_root: Path | None = None
    stored_responses: int = 0
    response_ttl: float = 3600.0
    request_log: str | None = None
    presets: Path | None = None

    def __post_init__(self) -> None:
        unknown = self.metrics_compat - {"vllm", "llamacpp"}
        if unknown:
            raise InvalidRequestError(
                f"metrics_compat knows vllm and llamacpp, not {', '.join(sorted(unknown))}", param="metrics_compat"
            )
        for name in ("max_body_bytes", "heartbeat", "stall_timeout", "slots", "keep_alive", "load_timeout",
                     "response_ttl"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise InvalidRequestError(f"{name} must be above 0, not {getattr(self, name)}", param=name)
        for name in ("max_queue", "shutdown_grace", "stored_responses"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name} must be at least 0, not {getattr(self, name)}", param=name)
        if self.max_per_client is not None and self.max_per_client < 1:
            raise InvalidRequestError(
                f"max_per_client must be at least 1, not {self.max_per_client}", param="max_per_client"
            )
        if any(not key for key in self.api_keys):
            raise InvalidRequestError("an API key may not be empty", param="api_keys")
        if not self.api_keys and not self.loopback and not self.insecure_no_auth:
            raise InvalidRequestError(
                f"binding to {self.host} without an API key would let everyone on the network use this server: "
                "give a key (--api-key or NINFER_API_KEY) or, on a network you trust, --insecure-no-auth",
                param="api_keys",
            )

    @property
    def loopback(self) -> bool:
        """Whether the server listens on this machine only."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a bind address is reachable from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
