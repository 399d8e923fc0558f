"""Generated requests against the published description: no 5xx, documented statuses, each API's own error shape.

A few of each operation; `FUZZ_EXAMPLES=40 python -m pytest tests/server/test_server_fuzz.py` makes over a thousand.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import status_code_conformance

from ninfer_core.testing import Reply, Script, ScriptedEngine
from ninfer_core.types import ToolCall

from .conftest import running

load_all_checks()
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "4"))


@pytest.fixture(scope="module")
def fuzzed() -> Any:
    turn = Reply("Hello!", reasoning="hm", tool_calls=[ToolCall("", "bash", {"command": "ls"})])
    with running(ScriptedEngine(Script(turn, burst=16))) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_generated_requests(fuzzed: Any, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:
        if mode is GenerationMode.POSITIVE or operation.body:
            run(operation, mode)


def run(operation: Any, mode: GenerationMode) -> None:
    """A few generated requests of one operation."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call()
        told = f"{case.method} {case.formatted_path}\n{case.body!r}\n{answer.text[:500]}"
        assert answer.status_code < 500, told
        case.validate_response(answer, checks=[status_code_conformance])
        assert answer.headers["x-request-id"]
        if answer.status_code >= 400:
            assert shaped(case.path, answer.json()), told

    check()


def shaped(path: str, body: Any) -> bool:
    """Whether an error has the shape of its API."""
    if path.startswith("/api/"):
        return set(body) == {"error"} and isinstance(body["error"], str)
    if path.startswith("/v1/messages"):
        return body["type"] == "error" and bool(body["error"]["type"] and body["error"]["message"])
    return {"message", "type", "param", "code"} <= set(body["error"])


def test_nothing_is_left_running(fuzzed: Any) -> None:
    assert fuzzed.idle()
    assert fuzzed.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
