"""A light load: every chunk arrives and nobody is held up. `tests/tools/server_load.py` measures in full."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

from ninfer_cli.server.app import Turns
from ninfer_cli.server.generation import Generation

from ninfer_core.runtime.interface import make_request
from ninfer_core.testing import Script, ScriptedEngine
from tests.tools.server_load import _length, measure

FURTHER = 2
"""Events beside the tokens: the role, the end and the end mark, less the token that ends the thought."""


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
    found = measure(1, 4000, None, True)
    assert found["events"] == 4000 + FURTHER


def test_many_clients() -> None:
    found = measure(32, 20, 20.0)
    assert found["events"] == sum(_length(20, i, 32) + FURTHER for i in range(32))
    assert found["samples"] > 10, "the event loop was free in between"


async def test_requests_that_come_together_begin_one_by_one() -> None:
    """Whatever else the loop has to do gets its turn between any two of them; who gives up holds nobody up."""
    turns, begun = Turns(), []

    async def request(number: int) -> None:
        await turns.wait()
        begun.append(number)

    async def others() -> None:
        while len(begun) < 19:
            begun.append(-1)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(request(i)) for i in range(20)]
    tasks.append(asyncio.ensure_future(others()))
    await asyncio.sleep(0)
    tasks[5].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    own = [i for i in begun if i >= 0]
    assert own == [i for i in range(20) if i != 5]
    assert all(-1 in begun[begun.index(a) : begun.index(b)] for a, b in itertools.pairwise(own[1:9]))
    await asyncio.wait_for(turns.wait(), 60)
