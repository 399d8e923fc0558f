"""What a Ray application is to run, as one checked value, and the same from the `args` of a config file. No Ray."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ninfer_cli.server.settings import ServerSettings

from ninfer_core.errors import InvalidRequestError, ServerUnreachableError

_ANSWERS = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: `options` go to `Engine.load`, `replicas` is a number or "auto" (1 to `max_replicas`, by load).

    Times are seconds. More requests than fit for `grow_after` start a replica, fewer for `shrink_after` end one;
    `drain` is how long a replica that is replaced may go on with its requests, `health_period` how often its engine
    is asked. `fronts` is how many processes read requests and choose replicas; `num_gpus` and `num_cpus` are what one
    replica asks Ray for.

    Raises:
        InvalidRequestError: a value out of range, or a setting that only one process can have.
    """

    model: str = "demo"
    options: dict[str, Any] = field(default_factory=dict)
    settings: ServerSettings = field(default_factory=ServerSettings)
    replicas: int | str = 1
    max_replicas: int = 8
    fronts: int = 1
    num_gpus: float = 0
    num_cpus: float = 1
    drain: float = 600.0
    grow_after: float = 30.0
    shrink_after: float = 600.0
    health_period: float = 5.0

    def __post_init__(self) -> None:
        if self.replicas != "auto" and (not isinstance(self.replicas, int) or self.replicas < 1):
            raise InvalidRequestError(f"replicas must be at least 1, or auto; not {self.replicas!r}", param="replicas")
        # The bounds of each field: the least value, and whether it may be that itself.
        bounds = {"max_replicas": (1, True), "fronts": (1, True), "num_gpus": (0, True), "num_cpus": (0, True),
                  "drain": (0, True), "grow_after": (0, True), "shrink_after": (0, True),
                  "health_period": (0, False)}  # fmt: skip
        for name, (least, equal) in bounds.items():
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < least
                or (value == least and not equal)
            ):
                wanted = f"at least {least}" if equal else f"above {least}"
                raise InvalidRequestError(f"{name} must be a number of {wanted}, not {value!r}", param=name)
        if self.settings.stored_responses:
            raise InvalidRequestError(
                f"store_responses is {self.settings.stored_responses}, but a replica cannot read what another one "
                "keeps: with Ray it must be 0",
                param="store_responses",
            )

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Plan:
        """The plan of a config file's `args`: the fields of `Plan`, with `settings` as an object.

        Raises:
            InvalidRequestError: an unknown or wrong field.
        """
        _check_names("args", args, cls)
        settings = dict(args.get("settings") or {})
        _check_names("settings", settings, ServerSettings)
        for name in ("api_keys", "origins", "media_domains"):
            if settings.get(name) is not None:
                settings[name] = tuple(settings[name])
        if "metrics_compat" in settings:
            settings["metrics_compat"] = frozenset(settings["metrics_compat"])
        checked = ServerSettings(**settings)
        options = {"max_sequences": checked.slots, "max_queue": checked.max_queue, **(args.get("options") or {})}
        return cls(**{**args, "settings": checked, "options": options})


def _check_names(where: str, given: Mapping[str, Any], of: type) -> None:
    known = {item.name for item in fields(of)}
    if unknown := sorted(set(given) - known):
        raise InvalidRequestError(f"{where} has {', '.join(unknown)}; it knows {', '.join(sorted(known))}", param=where)


def check_address(address: str) -> None:
    """See whether something listens at the `host:port` of a RAY_ADDRESS; other forms are Ray's to judge.

    Ray itself tries for minutes, and then ends the process.

    Raises:
        ServerUnreachableError: nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
    except (OSError, OverflowError) as error:
        raise ServerUnreachableError(
            f"the Ray cluster of RAY_ADDRESS={address} does not answer ({error}): start it with `ray start --head`, "
            "correct RAY_ADDRESS, or unset it to use a cluster of this machine"
        ) from error
