"""Rounds under a grammar or a thinking budget on the device: the tokens are those of rounds with the host in them."""

from __future__ import annotations

import time

import pytest
from constrained import BASH, SCHEMAS, TOOLS, USER, asking, good, good_calls, plan_of
from hash_model import Machine, answer
from tiny import Alternating, Wandering

from ninfer_core.errors import NotFiniteError, RequestTimeoutError
from ninfer_core.runtime.grammar import Grammar
from ninfer_core.runtime.orders import VOID
from ninfer_core.runtime.validation import SamplingParams
from ninfer_core.types import Message, Request, ResponseFormat, Tool, ToolChoice

PROMPT = [(i * 37) % 250 for i in range(150)]
SEEDED = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=77)
GREEDY = SamplingParams(temperature=0.0, seed=0)


def made(request, prompt, limit):
    return Grammar(plan_of(request), thinking=prompt.thinking, limit=limit)


def start(machine, request, limit=120, law=GREEDY, grammar=made):
    return machine.enqueue(request, limit, grammar=grammar, law=law)


def one(lanes, request, limit=120, law=GREEDY, drafts=3, grammar=made, **options):
    """Tokens, completion and machine of a request alone."""
    machine = Machine(lanes=lanes, drafts=drafts, **options)
    handle = start(machine, request, limit, law, grammar)
    (tokens,) = machine.run(handle)
    machine.audit()
    assert bool(lanes) == bool(machine.device and machine.device.given), "the round on the device was the one meant"
    return tokens, handle.result(0), machine


@pytest.mark.parametrize("name", ["person", "nested", "union", "scalar"])
@pytest.mark.parametrize("law", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_the_host_for_any_drafts(name, law):
    for thinking in (False, True):
        request = asking(SCHEMAS[name], thinking=thinking)
        want, completion, _ = one(False, request, law=law, drafts=0)
        assert completion.finish_reason == "stop" and good(completion, SCHEMAS[name])
        for drafts in (0, 3, 5):
            tokens, again, _ = one(True, request, law=law, drafts=drafts)
            assert tokens == want, drafts
            assert again.message == completion.message
            assert again.usage.accepted_tokens <= again.usage.drafted_tokens
            assert again.usage.completion_tokens == len(want)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("budget", [60, 100])
def test_a_tight_budget_closes_the_value_there_too(drafts, budget):
    """The token that closes it takes the place of one that the device drew and has gone on with."""
    void = 0
    for seed in range(2):
        for name in ("nested", "array of objects", "anything"):
            request, law = asking(SCHEMAS[name], thinking=False), SamplingParams(temperature=2.0, top_k=64, seed=seed)
            want, completion, _ = one(False, request, budget, law, drafts=drafts)
            tokens, again, machine = one(True, request, budget, law, drafts=drafts)
            assert tokens == want and again.message == completion.message, (name, seed)
            assert again.finish_reason == completion.finish_reason
            void += sum(order is VOID for order in machine.device.given)
    assert void, "no value was closed"


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_replaced_token_in_the_middle_of_a_call_leaves_the_right_state(drafts):
    """Behind the closed call free text goes on: rows, draft layer and state must be those of the tokens that stand."""
    tools = (Tool("bash", parameters=BASH.parameters, strict=True),)
    request = Request(USER, tools=tools, tool_choice=ToolChoice("required"), thinking=False)
    for budget in (90, 120):
        for seed in range(2):
            law = SamplingParams(temperature=2.0, top_k=64, seed=seed)
            want, _, _ = one(False, request, budget, law, drafts=drafts)
            assert one(True, request, budget, law, drafts=drafts)[0] == want


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_grammar_that_allows_everything_changes_nothing(drafts):
    request = Request(prompt=tuple(PROMPT), tools=(Tool("now", strict=True),), max_tokens=60)
    tokens, _, machine = one(True, request, 60, drafts=drafts)
    assert tokens == answer(PROMPT, len(tokens)) and len(tokens) == 60
    if drafts:
        assert len(machine.device.launched) < 30, "drafts are taken"


@pytest.mark.parametrize("law", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_calls_are_those_of_the_host(law, drafts):
    request = Request(USER, tools=TOOLS, tool_choice=ToolChoice("required"), thinking=True)
    want, completion, _ = one(False, request, 200, law, drafts=drafts)
    tokens, again, _ = one(True, request, 200, law, drafts=drafts)
    assert tokens == want and good_calls(again) and again.finish_reason == completion.finish_reason


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_think_block_ends_with_its_budget(drafts, budget):
    for form in (None, ResponseFormat("json_schema", SCHEMAS["scalar"])):
        request = Request(USER, response_format=form, thinking=True, thinking_budget=budget, max_tokens=90)
        grammar = made if form else None
        want, completion, _ = one(False, request, 90, drafts=drafts, grammar=grammar)
        tokens, again, _ = one(True, request, 90, drafts=drafts, grammar=grammar)
        assert tokens == want and again.message == completion.message
        assert again.usage.reasoning_tokens == budget


def test_certain_tokens_are_handed_over_at_once_and_take_few_rounds():
    form = ResponseFormat("regex", pattern="[ab] and what follows is long, and there is no choice about it")
    machine = Machine(lanes=True)
    handle = start(machine, Request(USER, response_format=form, thinking=False))
    machine.reach(2, handle)
    assert handle.session.completion_tokens > 50 and len(machine.device.launched) <= 2
    (tokens,) = machine.run(handle)
    assert len(machine.device.launched) <= len(tokens) / 4 + 2


@pytest.mark.parametrize("drafts", [1, 3])
def test_owed_tokens_become_drafts(drafts):
    """Many certain tokens between choices: a round takes as many as it has rows, though the drafts were wrong."""
    form = ResponseFormat("regex", pattern="([ab][cd] and what follows is certain, ){3}.")
    request = Request(USER, response_format=form, thinking=False)
    tokens, _, machine = one(True, request, drafts=drafts)
    assert len(machine.device.launched) < len(tokens) / (drafts + 1) + 12
    assert tokens == one(False, request, drafts=0)[0] and len(tokens) > 90


def test_free_and_held_and_hosted_ones_run_beside():
    machine = Machine(lanes=True, drafts=3, slots=6, pages=120)
    others = [[(i * k) % 250 for i in range(20 + k)] for k in (3, 7)]
    names = ("person", "nested", "map")
    held = [start(machine, asking(SCHEMAS[name], thinking=False), law=SEEDED) for name in names]
    free = [machine.submit(prompt, 120) for prompt in others]
    hosted = machine.submit(PROMPT, 40, logprobs=1)
    tokens = machine.run(*held, *free, hosted)
    assert tokens[3:] == [*(answer(prompt, 120) for prompt in others), answer(PROMPT, 40)]
    assert tokens[:3] == [one(False, asking(SCHEMAS[name], thinking=False), law=SEEDED)[0] for name in names]
    machine.audit()
    slots = [set(slots) for slots, _, _ in machine.device.launched]
    assert max(map(len, slots)) >= 2, "several share a launch"
    assert {3, 4} in slots and not any(group & {3, 4} and group & {0, 1, 2} for group in slots)


@pytest.mark.parametrize("on,off", [(1, 1), (3, 20)])
def test_drafting_rests_and_resumes(on, off):
    machine = Machine(lanes=True, drafts=3)
    machine.runner._flights._pacer = pacer = Alternating(on, off)
    handles = [start(machine, asking(SCHEMAS[name]), law=SEEDED) for name in ("nested", "recursive")]
    tokens = machine.run(*handles)
    assert tokens == [one(False, asking(SCHEMAS[name]), law=SEEDED)[0] for name in ("nested", "recursive")]
    assert pacer.resumed >= 2
    machine.audit()


def test_any_depth_from_round_to_round():
    machine = Machine(lanes=True, drafts=5)
    machine.runner._pacer = machine.runner._flights._pacer = Wandering(5, (5, 1, 3))
    handles = [start(machine, asking(SCHEMAS[name], thinking=False), 100, SEEDED) for name in ("nested", "anything")]
    want = [one(False, asking(SCHEMAS[name], thinking=False), 100, SEEDED)[0] for name in ("nested", "anything")]
    assert machine.run(*handles) == want
    machine.audit()


@pytest.mark.parametrize("drafts", [0, 3])
def test_what_was_said_is_resumed_from(drafts):
    """The state behind a value that ended by itself, or was cut by a stop string, serves the next turn."""
    for fields in ({}, {"stop": ("s",)}):
        request = Request(prompt=tuple(PROMPT), response_format=ResponseFormat("regex", pattern="[a-z]{100}"), **fields)
        machine = Machine(lanes=True, drafts=drafts)
        handle = start(machine, request, law=SEEDED)
        (tokens,) = machine.run(handle)
        machine.audit()
        following, usage = machine.ask([*PROMPT, *tokens, 5], 20)
        assert following == answer([*PROMPT, *tokens, 5], 20)
        assert usage.cached_tokens > len(PROMPT)


def test_the_cancelled_and_the_late_are_forgotten_while_their_round_flies():
    machine = Machine(lanes=True, drafts=3)
    long = ResponseFormat("regex", pattern="[a-z]{100}")
    doomed = start(machine, Request(prompt=tuple(PROMPT), response_format=long), 130)
    late = start(machine, Request(prompt=(1, 2, 3), response_format=long, timeout=1000.0), 130)
    other = start(machine, Request(prompt=(3, 2, 1), response_format=long), 130)
    machine.reach(10, doomed, late, other)
    doomed.cancel()
    late.session.deadline = time.monotonic() - 1
    third = machine.submit(PROMPT, 30)  # takes the slot and pages that the round under way still knows
    machine.run(other, third)
    assert machine.tokens[third.id] == answer(PROMPT, 30) and len(machine.tokens[other.id]) >= 100
    assert doomed.session.outcome == "cancelled" and type(late.error) is RequestTimeoutError
    machine.audit()


def test_a_row_that_is_not_finite_ends_its_request_alone():
    machine = Machine(lanes=True)
    request = asking(SCHEMAS["nested"], thinking=False)
    sick, well = start(machine, request), start(machine, request, law=SEEDED)
    machine.reach(5, sick, well)
    running = next(s for s in machine.scheduler._decoding if s.session is sick.session)
    machine.device.rotten.add(running.slot)
    machine.run(sick, well)
    assert type(sick.error) is NotFiniteError and sick.id in str(sick.error)
    assert machine.tokens[well.id] == one(False, request, law=SEEDED)[0]
    machine.device.rotten.clear()
    machine.audit()


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch):
    machine = Machine(lanes=True, slots=2)
    request = asking(SCHEMAS["nested"], thinking=False)
    sick, well = start(machine, request, law=SEEDED), start(machine, request, law=SEEDED)
    machine.reach(5, sick, well)
    running = next(s for s in machine.scheduler._decoding if s.session is sick.session)
    monkeypatch.setattr(running.sampler.grammar, "rows", _fails)
    machine.run(sick, well)
    assert sick.session.outcome == "error" and machine.tokens[well.id] == one(False, request, law=SEEDED)[0]
    machine.audit()


def test_what_the_device_may_not_draw_is_never_delivered(monkeypatch):
    machine = Machine(lanes=True, slots=2)
    request = asking(SCHEMAS["nested"], thinking=False)
    sick = start(machine, request, law=SEEDED)
    machine.reach(5, sick)
    monkeypatch.setattr("hash_model._mask", lambda order, row: None)
    machine.run(sick)
    assert sick.session.outcome == "error"
    assert one_prefix(machine.tokens[sick.id], one(False, request, law=SEEDED)[0])
    machine.audit()


def one_prefix(tokens, whole):
    return tokens == whole[: len(tokens)]


@pytest.mark.parametrize("part", ["begin", "finish"])
def test_a_failed_launch_restarts_its_sequences_alone(part, monkeypatch):
    machine = Machine(lanes=True, drafts=3, slots=2)
    request = asking(SCHEMAS["nested"], thinking=False)
    handles = [start(machine, request, law=law) for law in (GREEDY, SEEDED)]
    machine.reach(6, *handles)
    with monkeypatch.context() as patch:
        patch.setattr(machine.device, part, _fails)
        machine.scheduler.step()
    machine.device.begun = None
    assert machine.run(*handles) == [one(False, request, law=law)[0] for law in (GREEDY, SEEDED)]
    assert machine.restarted == {h.id for h in handles}
    machine.audit()


def test_results_that_cannot_be_read_end_nobody_silently():
    machine = Machine(lanes=True, drafts=3, slots=2)
    request = Request((Message("user", "x"),), response_format=ResponseFormat("regex", pattern="[a-z]{60}"))
    handles = [start(machine, request, law=law) for law in (GREEDY, SEEDED)]
    machine.reach(6, *handles)
    (flight,) = machine.runner._flights._flying
    flight.launched.read = _fails
    machine.scheduler.step()
    machine.device.begun = None
    tokens = machine.run(*handles)
    for law, handle, told in zip((GREEDY, SEEDED), handles, tokens, strict=True):
        want = one(False, request, law=law)[0]
        assert told == want or (handle.session.outcome == "error" and one_prefix(told, want))
    machine.audit()


def _fails(*_):
    raise RuntimeError("the device said no")
