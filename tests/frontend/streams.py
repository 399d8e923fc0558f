"""Feeds byte strings to an output machine in chosen pieces, and brings event lists into a comparable form."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

from ninfer_core.frontend.output import OutputMachine
from ninfer_core.types import (
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

EOS = 0


def tool(name: str, **properties: Any) -> Tool:
    made = {key: value if isinstance(value, dict) else {"type": value} for key, value in properties.items()}
    return Tool(name, parameters={"type": "object", "properties": made})


TOOLS = (
    tool("bash", command="string"),
    tool("write_file", path="string", content="string"),
    tool("glob", pattern="string"),
)


class Pieces:
    """Token ids for arbitrary byte strings: id 0 ends the output, the others are made on demand."""

    def __init__(self) -> None:
        self.table: list[bytes] = [b""]

    def ids(self, *pieces: bytes | str) -> list[int]:
        made = []
        for piece in pieces:
            self.table.append(piece if isinstance(piece, bytes) else piece.encode())
            made.append(len(self.table) - 1)
        return made

    def machine(self, **options: Any) -> OutputMachine:
        counter = itertools.count()
        return OutputMachine(self.table.__getitem__, eos_ids=(EOS,), new_id=lambda: f"call_{next(counter)}", **options)


def merged(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Events as tuples, adjacent ones of one kind joined."""
    out: list[tuple[Any, ...]] = []
    for event in events:
        item: tuple[Any, ...]
        if isinstance(event, ReasoningDelta):
            item = ("reasoning", event.text)
        elif isinstance(event, TextDelta):
            item = ("text", event.text)
        elif isinstance(event, ToolCallStart):
            item = ("start", event.index, event.id, event.name)
        elif isinstance(event, ToolCallDelta):
            item = ("arguments", event.index, event.arguments)
        else:
            assert isinstance(event, ToolCallEnd)
            item = (
                "end",
                event.index,
                event.call.id,
                event.call.name,
                json.dumps(event.call.arguments),
                event.complete,
            )
        if out and item[0] in ("reasoning", "text", "arguments") and item[:-1] == out[-1][:-1]:
            out[-1] = (*item[:-1], out[-1][-1] + item[-1])
        else:
            out.append(item)
    return out


def run(
    data: bytes | str,
    cuts: Sequence[int] = (),
    burst: int | random.Random = 1,
    reason: FinishReason = "stop",
    **options: Any,
) -> tuple[list[tuple[Any, ...]], OutputMachine]:
    """Events of `data` cut into tokens at `cuts`, fed in bursts; what follows the end of the output is not fed."""
    if isinstance(data, str):
        data = data.encode()
    edges = [0, *sorted(set(cuts)), len(data)]
    pieces = Pieces()
    ids = pieces.ids(*(data[a:b] for a, b in itertools.pairwise(edges)))
    machine = pieces.machine(**options)
    events: list[Event] = []
    i = 0
    while i < len(ids) and not machine.stopped:
        size = burst.randint(1, 6) if isinstance(burst, random.Random) else burst
        events += machine.feed(ids[i : i + size])
        assert machine.kept <= size
        assert machine.stopped or machine.kept == len(ids[i : i + size])
        i += size
    events += machine.finish(reason)
    return merged(events), machine


def text_of(events: Sequence[tuple[Any, ...]], kind: str) -> str:
    return "".join(event[-1] for event in events if event[0] == kind)


def calls_of(events: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any, bool]]:
    return [(event[3], json.loads(event[4]), event[5]) for event in events if event[0] == "end"]
