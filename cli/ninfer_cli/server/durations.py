"""Time spans as clients and operators write them: the grammar of `keep_alive`."""

from __future__ import annotations

import re

from ninfer_core.errors import InvalidRequestError

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(value: float | str, param: str = "keep_alive") -> float:
    """Seconds of a keep-alive: a number, or text such as "5m", "1h30m", "-1"; below zero means for ever.

    Raises:
        InvalidRequestError: the text is none of these.
    """
    if isinstance(value, (int, float)):
        return float(value)
    text = value.strip()
    sign, body = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if re.fullmatch(r"\d+(\.\d+)?", body):
        return sign * float(body)
    if re.fullmatch(r"(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+", body):
        return sign * sum(float(n) * _UNITS[u] for n, _, u in re.findall(r"(\d+(\.\d+)?)(ns|us|µs|ms|s|m|h)", body))
    raise InvalidRequestError(
        f'{param} is {value[:40]!r}; it must be seconds or a text such as "5m" or "-1"', param=param
    )
