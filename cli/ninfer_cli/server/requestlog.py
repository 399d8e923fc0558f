"""The request log: one JSON line per answered request, written by a thread, with nothing secret in it."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context import RequestRecord

_QUEUE = 4096


class RequestLog:
    """Writes lines to a file or to standard error ("-"); a full disk loses lines, never requests.

    Headers, keys and bodies are not logged at all; a client is named by its address, or by the first characters of
    its key's digest.
    """

    def __init__(self, target: str | None) -> None:
        self.target = target
        self.lost = 0
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None
        if target is not None:
            self._thread = threading.Thread(target=self._run, name="ninfer-request-log", daemon=True)
            self._thread.start()

    def write(self, record: RequestRecord, status: int) -> None:
        """Queue the line of an answered request."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(json.dumps(entry(record, status), ensure_ascii=True))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write what is queued and stop."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                if self.target == "-":
                    sys.stderr.write(line + "\n")
                    sys.stderr.flush()
                else:
                    # Opened per line, so that a rotated or removed file is made anew.
                    with open(self.target or "", "a", encoding="utf-8") as file:
                        file.write(line + "\n")
            except (OSError, ValueError):
                self.lost += 1


def entry(record: RequestRecord, status: int) -> dict[str, Any]:
    """The fields of one line; durations in milliseconds."""
    line: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": record.request_id,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": status,
        "ms": round(record.elapsed() * 1e3, 1),
    }
    if record.model is not None:
        line |= {"model": record.model, "stream": bool(record.stream)}
    if record.prompt_tokens is not None:
        line["prompt_tokens"] = record.prompt_tokens
    if record.usage is not None:
        usage = record.usage
        line |= {"cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens}
        line |= {"known_tokens": usage.known_tokens, "reasoning_tokens": usage.reasoning_tokens}
    if record.first_event is not None:
        line["first_token_ms"] = round((record.first_event - record.arrived) * 1e3, 1)
    if record.outcome is not None:
        line |= {"outcome": record.outcome, "finish": record.finish_reasons}
    if record.dropped:
        line["tools_left_out"] = record.dropped
    if record.ignored:
        line["ignored"] = record.ignored
    if record.error is not None:
        text = record.error.detail or record.error.message
        line["error"] = {"code": record.error.code, "param": record.error.param, "message": text[:500]}
    return line
