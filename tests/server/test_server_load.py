"""A light load: every chunk arrives and nobody is held up. `tests/tools/server_load.py` measures in full."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ninfer_cli.server.generation import Generation

from ninfer_core.runtime.interface import make_request
from ninfer_core.testing import Script, ScriptedEngine
from tests.tools.server_load import measure


async def test_a_backlog_is_handed_on_in_small_batches() -> None:
    """Whoever reads late finds thousands of events at once; the event loop must run on between them."""
    engine = ScriptedEngine(Script(["</think>", "x" * 5000]))
    handle = await engine.asubmit(make_request("go", thinking=True))
    await asyncio.to_thread(handle.wait)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    server: Any = SimpleNamespace(settings=SimpleNamespace(queue_timeout=None), metrics=None)
    record: Any = SimpleNamespace(output_seen=lambda metrics: None)
    generation = Generation(server, record, [handle], None)  # type: ignore[arg-type]
    running = asyncio.create_task(others())
    sizes = [len(batch) async for batch in generation.batches()]
    running.cancel()
    assert sum(sizes) == len(handle._events) > 5000 and max(sizes) <= 256
    assert turns >= len(sizes) - 2


def test_many_chunks_to_one_client() -> None:
    found = measure(1, 4000, None, 1)
    assert found["events"] == 4000 + 3, "the role, the end, the end mark"
    assert found["events_per_second"] > 400


def test_the_event_loop_is_free_under_many_clients() -> None:
    found = measure(32, 20, 20.0, 1)
    assert found["events"] == 32 * 23
    assert found["lag_p50_ms"] < 100
