"""A crowd of clients that behave badly: they leave at any point, send rubbish, and come again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

import httpx

USER: list[Any] = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "stream": True},
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/responses": {"input": "hi", "stream": True},
    "/v1/messages": {"messages": USER, "max_tokens": 99, "stream": True},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "hi"},
}


async def crowd(url: str, clients: int, seconds: float) -> dict[str, int]:
    """Let so many of them loose for a while; how many requests were `done`, and how many connections `broken`."""
    seen: dict[str, int] = {}
    limits = httpx.Limits(max_connections=2 * clients)
    async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
        until = time.monotonic() + seconds
        await asyncio.gather(*(_rude(client, i, until, seen) for i in range(clients)))
    return seen


async def _rude(client: httpx.AsyncClient, number: int, until: float, seen: dict[str, int]) -> None:
    """One client of the crowd: it reads a random part of its answer, or nothing, or sends rubbish."""
    chance = random.Random(number)
    while time.monotonic() < until:
        path = chance.choice(list(STREAMS))
        mood = chance.random()
        try:
            if mood < 0.15:
                answer = await client.post(path, content=b'{"messages": [' * chance.randrange(1, 9))
                assert answer.status_code == 400
            elif mood < 0.3:
                body = {**STREAMS[path], "stream": False}
                with contextlib.suppress(httpx.TimeoutException):
                    await client.post(path, json=body, timeout=chance.uniform(0.005, 0.2))
            else:
                async with client.stream("POST", path, json=STREAMS[path]) as answer:
                    if answer.status_code != 200:
                        assert answer.status_code in (503, 529), answer.status_code
                        await asyncio.sleep(0.02)
                        continue
                    left = chance.randrange(1, 40)
                    async for _ in answer.aiter_bytes():
                        left -= 1
                        if left < 0:
                            break
            seen["done"] = seen.get("done", 0) + 1
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            seen["broken"] = seen.get("broken", 0) + 1
