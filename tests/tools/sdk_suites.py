"""The generated tests of the openai and anthropic packages against the server, in strict mode; each failure by name.

    pip download --no-deps --no-binary :all: openai anthropic    # then unpack both
    python -m tests.tools.sdk_suites openai-3.57.0 anthropic-2.14.0

Exit status 1 if a test fails for another reason than those in `REFUSED`.
"""

from __future__ import annotations

import collections
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUITES = {
    "openai": ["chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py", "responses"],
    "anthropic": ["test_messages.py", "test_models.py"],
}
# What this server does not offer or must refuse: a pattern of the error, why.
REFUSED = {
    r"/v1/chat/completions(/completion_id(/messages)?)? does not answer|there is nothing at /v1/chat/completions/":
        "chat completions are not stored",
    r"nothing at /v1/responses/resp_\w+/cancel": "responses do not run in the background, so none is cancelled",
    r"/v1/responses/compact does not answer": "compaction is not offered",
    r"/v1/models/\S+ does not answer DELETE": "models are not deleted over this API",
    r"logit_bias keys must be token ids": "the test biases a token named foo",
    r"suffix is not supported by this model": "the scripted model has no tokens for filling gaps",
    r"background is not supported": "responses do not run in the background",
    r"conversation": "conversations are not stored",
    r"nothing at /v1/messages/batches|/v1/messages/batches\S* does not answer": "batches are not offered",
}  # fmt: skip


def _serve() -> tuple[int, object]:
    import httpx
    import uvicorn
    from ninfer_cli.server.app import build_app
    from ninfer_cli.server.openai_responses import Items, ResponseStore
    from ninfer_cli.server.settings import ServerSettings

    from ninfer_core.testing import ScriptedEngine

    class AnyResponse(ResponseStore):
        """The suites ask for responses by ids of their own: each is the last one that was made."""

        def get(self, response_id: str) -> tuple[dict[str, Any], Items] | None:
            last = next(reversed(self._entries), response_id)
            return super().get(last)

    engine = ScriptedEngine("Hello!", aliases=("string", "model", "model_id"))
    settings = ServerSettings(stored_responses=100)
    app = build_app(engine, settings)
    app.state.server.store = AnyResponse(settings.stored_responses, settings.response_ttl)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    httpx.post(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/responses", json={"input": "hi"}).raise_for_status()
    return listener.getsockname()[1], server


def run(folder: Path, port: int) -> bool:
    """Run the suite of an unpacked source distribution; whether every failure is one of `REFUSED`."""
    name = folder.name.partition("-")[0]
    base = f"http://127.0.0.1:{port}" + ("/v1" if name == "openai" else "")
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        files = [f"tests/api_resources/{item}" for item in SUITES[name]]
        options = ["-n", "0", "-q", "-k", "not aiohttp", "-p", "no:cacheprovider", f"--junitxml={report.name}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *files, *options], cwd=folder, stdout=subprocess.DEVNULL, timeout=540,
            env={**os.environ, "PYTHONPATH": "src", "TEST_API_BASE_URL": base},
        )  # fmt: skip
        cases = list(ET.parse(report.name).iter("testcase"))
    counts: collections.Counter[str] = collections.Counter()
    unknown = []
    for case in cases:
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        if fault is None:
            counts["skipped by the suite itself" if case.find("skipped") is not None else "passed"] += 1
            continue
        text = fault.get("message", "")
        reason = next((why for pattern, why in REFUSED.items() if re.search(pattern, text)), None)
        counts[reason or "FAILED"] += 1
        if reason is None:
            unknown.append(f"{case.get('classname')}.{case.get('name')}: {text[:300]}")
    print(f"{folder.name}: {len(cases)} tests")
    for reason, count in counts.most_common():
        print(f"  {count:4} {reason}")
    print("\n".join(unknown))
    return bool(cases) and not unknown and counts["passed"] > 0


def main(arguments: Sequence[str]) -> int:
    """Run all that are named."""
    if not arguments:
        print(__doc__)
        return 2
    port, _ = _serve()
    results = [run(Path(item).resolve(), port) for item in arguments]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
