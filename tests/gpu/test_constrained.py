"""Grammars and thinking budgets on the device: the tokens of rounds with the host in them, for any drafts, in a graph."""

from __future__ import annotations

import json

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from ninfer_core.engine import Engine
from ninfer_core.types import Message, Request, ResponseFormat, Sampling, Tool, ToolChoice
from tests.gpu.test_fused import loaded, requests, tokens_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "mode": {"enum": ["read", "append", "replace"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "mode", "sizes", "note"],
    "additionalProperties": False,
}
CALL = Tool(
    "edit", parameters={"type": "object", "properties": {"path": {"type": "string"}, "all": {"type": "boolean"}}}
)
MINE = (Message("user", "Describe a ship in three words."),)


def constrained(**fields) -> list[Request]:
    """Schemas, a choice, calls, a tight budget, thinking with and without a budget; half greedy, half drawn."""
    kinds = [
        {"response_format": ResponseFormat("json_schema", SCHEMA), "thinking": False},
        {"response_format": ResponseFormat("json_schema", SCHEMA), "thinking": True, "thinking_budget": 20},
        {"response_format": ResponseFormat("json_schema", SCHEMA), "thinking": False, "max_tokens": 60},
        {"response_format": ResponseFormat("regex", pattern="([a-z]{2} and so it goes on ){9}"), "thinking": False},
        {"tools": (CALL,), "tool_choice": ToolChoice("required"), "thinking": False},
        {"thinking": True, "thinking_budget": 30},
    ]
    made = []
    for i, kind in enumerate([*kinds, *kinds]):
        greedy = Sampling(temperature=0.0)
        law = greedy if i < len(kinds) else Sampling(temperature=1.0, top_k=20, top_p=0.95, min_p=0.0, seed=i)
        made.append(Request(MINE, sampling=law, **{"max_tokens": 160, **kind, **fields}))
    return made


@pytest.fixture(scope="module")
def hosted():
    """Tokens without drafts, one request at a time, drawn by the host: log-probabilities keep them off the device."""
    with loaded(0) as engine:
        return tokens_of(engine, constrained(logprobs=1), together=False)


def orders_of(engine: Engine) -> list[int]:
    """From now on, how many tokens the orders of rounds allow."""
    rounds, found = engine._runner._flights.rounds, []
    finish = rounds._finish

    def counted(shape, turn, began, orders):
        found.extend(order.most for order in orders)
        return finish(shape, turn, began, orders)

    rounds._finish = counted
    return found


@pytest.mark.parametrize("drafts", range(4))
def test_constrained_tokens_are_those_of_the_host(hosted, drafts):
    with loaded(drafts) as engine:
        orders = orders_of(engine)
        assert tokens_of(engine, constrained(), together=False) == hosted
        assert len(orders) > 100, "they were drawn on the device"
        assert tokens_of(engine, constrained(), together=True) == hosted
        assert engine.stats()["failed"] == 0
        engine._runner._flights.rounds._use_graphs = False
        assert tokens_of(engine, constrained(), together=True) == hosted


def test_free_and_constrained_ones_run_beside(hosted):
    free = requests(160)[:4]
    with loaded(0) as engine:
        want = tokens_of(engine, free, together=False)
    with loaded(3, max_sequences=16) as engine:
        assert tokens_of(engine, [*free, *constrained()], together=True) == [*want, *hosted]


def test_several_launches_of_a_round_do_not_take_each_others_orders(hosted):
    """Orders lie in one place of the host: those of a launch wait until the one before has used its own."""
    with loaded(3, max_sequences=24) as engine:
        most = engine._runner._flights.rounds.rows_within(1000)
        assert most < 24 * 4, "one launch would hold them all"
        assert tokens_of(engine, [*constrained(), *constrained()], together=True) == [*hosted, *hosted]
        assert engine.stats()["failed"] == 0


def test_answers_are_valid():
    with loaded(3) as engine:
        asked = [r for r in constrained() if r.response_format and r.response_format.kind == "json_schema"]
        handles = [engine.submit(request) for request in asked]
        for handle in handles:
            value = json.loads(handle.result(120).text)
            assert set(value) == set(SCHEMA["required"]) and value["mode"] in ("read", "append", "replace")
