"""Rounds that are launched before the last one is read: tokens, cursors, ends and what the prefix cache keeps."""

from __future__ import annotations

import pytest
from hash_model import FRONTEND, Machine, answer
from tiny import Alternating, Wandering

from ninfer_core.errors import NotFiniteError

PROMPT = [(i * 37) % 250 for i in range(150)]
OTHERS = [[(i * k) % 250 for i in range(20 + k)] for k in (3, 7, 11)]


@pytest.mark.parametrize("drafts", range(6))
def test_tokens_are_those_of_the_model(drafts):
    machine = Machine(lanes=True, drafts=drafts)
    handles = [machine.submit(prompt, 40) for prompt in OTHERS]
    made = machine.run(*handles)
    assert made == [answer(prompt, 40) for prompt in OTHERS]
    assert all(handle.session.usage.completion_tokens == 40 for handle in handles)
    machine.scheduler.step()
    machine.audit()


def test_a_round_is_read_when_the_next_one_flies():
    machine = Machine(lanes=True, drafts=0)
    handle = machine.submit(OTHERS[0], 10)
    counts = []
    while not handle.done:
        machine.scheduler.step()
        counts.append((len(machine.device.launched), handle.session.completion_tokens))
    flying = [(launched, tokens) for launched, tokens in counts if launched]
    assert all(tokens == launched for launched, tokens in flying), "one by prefill, then one behind the launches"
    assert len(machine.device.launched) == 10, "nine rounds made tokens, one was too many"


def test_more_sequences_than_fit_into_a_launch_are_split():
    machine = Machine(lanes=True, drafts=3, slots=3)
    handles = [machine.submit(prompt, 30) for prompt in OTHERS]
    assert machine.run(*handles) == [answer(prompt, 30) for prompt in OTHERS]
    assert {len(slots) for slots, rows, _ in machine.device.launched if rows == 4} == {1, 2}


@pytest.mark.parametrize("drafts", [0, 3, 5])
def test_a_stop_token_ends_the_state_where_it_ends_the_answer(drafts):
    want = answer(PROMPT, 90)
    at = next(i for i in range(60, 90) if want[i] not in want[:i])
    machine = Machine(lanes=True, drafts=drafts)
    made, _ = machine.ask(PROMPT, 90, stop_token_ids=(want[at],))
    assert made == want[: at + 1]
    kept = [c for c in machine.reuse.cache.checkpoints if c.kind == "answer"]
    assert [c.length for c in kept] == [len(PROMPT) + at]
    machine.audit()
    following, usage = machine.ask([*PROMPT, *made, 5], 20)
    assert usage.cached_tokens == len(PROMPT) + at and following == answer([*PROMPT, *made, 5], 20)


def test_accepted_drafts_are_counted_as_by_the_host():
    """Where a stop token comes before the draw of the last round, all its tokens are drafts."""
    want = answer(PROMPT, 60)
    counted = []
    for lanes in (False, True):
        machine, found = Machine(lanes=lanes, drafts=3), []
        for token in dict.fromkeys(want[20:50]):
            _, usage = machine.ask(PROMPT, 60, stop_token_ids=(token,))
            found.append((usage.completion_tokens, usage.accepted_tokens, usage.accepted_by_position))
        counted.append(found)
    assert counted[0] == counted[1]
    assert len(counted[0]) > 10 and sum(accepted for _, accepted, _ in counted[0]) > 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stop_string_ends_one_round_late_and_leaves_no_wrong_state(drafts):
    want = answer(PROMPT, 90)
    text = FRONTEND.tokenizer.decode(want)
    machine = Machine(lanes=True, drafts=drafts)
    for length in range(60, 80):
        stop = text[length : length + 3]
        handle = machine.submit(PROMPT, 90, stop=(stop,))
        (made,) = machine.run(handle)
        assert made == want[: len(made)] and len(made) < 90
        machine.audit()
    assert machine.ask(PROMPT, 90)[0] == want


def test_a_cancelled_request_is_forgotten_while_its_round_flies():
    machine = Machine(lanes=True)
    doomed, other = machine.submit(PROMPT, 100), machine.submit(OTHERS[1], 30)
    machine.reach(10, doomed)
    doomed.cancel()
    third = machine.submit(OTHERS[2], 30)  # takes the slot and pages that the round under way still knows
    assert machine.run(other, third) == [answer(OTHERS[1], 30), answer(OTHERS[2], 30)]
    assert doomed.session.outcome == "cancelled"
    machine.audit()


def test_a_row_that_is_not_finite_ends_its_request_alone():
    machine = Machine(lanes=True)
    sick, well = machine.submit(PROMPT, 60), machine.submit(OTHERS[1], 60)
    machine.reach(5, sick, well)
    running = next(s for s in machine.scheduler._decoding if s.session is sick.session)
    own, slot, behind = list(running.pages), running.slot, running.kept[0]
    assert behind.alive
    machine.device.rotten.add(slot)
    machine.scheduler.step()
    while not sick.done:
        machine.scheduler.step()
    assert type(sick.error) is NotFiniteError and sick.id in str(sick.error)
    assert not behind.alive and (machine.state.trunk[own] == -1).all() and (machine.state.draft[own] == -1).all()
    machine.device.rotten.clear()
    following = machine.submit(PROMPT, 20)  # with the slot and the pages of the sick one
    machine.run(well, following)
    assert following.session.cached_tokens == 0 and machine.tokens[following.id] == answer(PROMPT, 20)
    assert machine.tokens[well.id] == answer(OTHERS[1], 60)
    machine.audit()


@pytest.mark.parametrize("on,off", [(1, 1), (2, 3), (3, 20)])
def test_drafting_rests_and_resumes_without_a_gap(on, off):
    """The draft layer's rows are checked by the model: every row before a realignment belongs to the sequence."""
    machine = Machine(lanes=True, drafts=3)
    machine.runner._flights._pacer = pacer = Alternating(on, off)
    handles = [machine.submit(prompt, 120) for prompt in OTHERS]
    assert machine.run(*handles) == [answer(prompt, 120) for prompt in OTHERS]
    assert pacer.resumed >= 3
    assert {rows for _, rows, _ in machine.device.launched} == {1, 4}
    machine.audit()


def test_requests_that_need_the_host_run_beside():
    machine = Machine(lanes=True, drafts=3)
    hosted, free = machine.submit(OTHERS[0], 40, logprobs=1), machine.submit(OTHERS[1], 40)
    guided = machine.submit(OTHERS[2], 40, thinking_budget=1000)
    made = machine.run(hosted, free, guided)
    assert made == [answer(prompt, 40) for prompt in OTHERS]
    assert {slots for slots, _, _ in machine.device.launched} == {(1,), (2,)}, "one is hosted, one needs orders"


def test_a_failed_launch_restarts_its_sequences_alone():
    machine = Machine(lanes=True, drafts=3, slots=2)
    handles = [machine.submit(prompt, 40) for prompt in OTHERS[:2]]
    machine.reach(6, *handles)
    launch, machine.device.launch = machine.device.launch, _fails
    machine.scheduler.step()
    machine.device.launch = launch
    assert machine.run(*handles) == [answer(prompt, 40) for prompt in OTHERS[:2]]
    assert machine.restarted == {h.id for h in handles}
    machine.audit()


def test_results_that_cannot_be_read_end_nobody_silently():
    """A flight holds two sequences, of which one has moved to another group: it must not go on without its tokens."""
    machine = Machine(lanes=True, drafts=3, slots=2)
    handles = [machine.submit(prompt, 60) for prompt in OTHERS[:2]]
    machine.reach(6, *handles)
    (flight,) = machine.runner._flights._flying
    assert len(flight.crew) == 2
    machine.scheduler._decoding[1].pace.drafting = False
    flight.launched.read = _fails
    machine.scheduler.step()
    for prompt, handle, told in zip(OTHERS[:2], handles, machine.run(*handles), strict=True):
        assert handle.session.outcome == "error" and told == answer(prompt, len(told))
    machine.audit()
    assert machine.run(machine.submit(OTHERS[2], 30)) == [answer(OTHERS[2], 30)]


def test_what_is_late_for_a_request_that_left_is_forgotten():
    machine = Machine(lanes=True, drafts=3, slots=2)
    handles = [machine.submit(prompt, 60) for prompt in OTHERS[:2]]
    machine.reach(6, *handles)
    machine.runner._flights._late[machine.scheduler._decoding[1]] = RuntimeError("late")
    handles[1].cancel()
    machine.run(*handles)
    assert handles[1].session.outcome == "cancelled" and not machine.runner._flights._late
    assert machine.tokens[handles[0].id] == answer(OTHERS[0], 60)


def _fails(*_):
    raise RuntimeError("the device said no")


@pytest.mark.parametrize("depths", [(5, 1, 3), (1, 1, 2, 5, 4)])
def test_any_depth_from_round_to_round_gives_the_same_tokens(depths):
    machine = Machine(lanes=True, drafts=5)
    machine.runner._pacer = machine.runner._flights._pacer = Wandering(5, depths)
    handles = [machine.submit(prompt, 90) for prompt in OTHERS]
    assert machine.run(*handles) == [answer(prompt, 90) for prompt in OTHERS]
    assert {drafts for _, _, drafts in machine.device.launched} == set(depths)
    assert {rows - 1 for _, rows, _ in machine.device.launched} >= set(depths)
    assert all(h.session.usage.accepted_tokens <= h.session.usage.drafted_tokens for h in handles)
    machine.audit()


def test_the_depth_follows_the_load_and_the_tokens_do_not():
    """A launch holds 8 rows and takes its time, whatever it holds: many sequences draft less deep, one alone deeper."""
    cost = lambda rows, drafts, sequences: 2.0 if rows == 1 else 1.0 + 0.1 * drafts  # noqa: E731
    machine = Machine(lanes=True, drafts=5, slots=8, pages=120, cost=cost)
    prompts = [[(i * k) % 250 for i in range(20 + k)] for k in range(3, 11)]
    handles = [machine.submit(prompt, 500) for prompt in prompts]
    assert machine.run(*handles) == [answer(prompt, 500) for prompt in prompts]
    flown = [drafts for _, _, drafts in machine.device.launched]
    late = flown[len(flown) // 2 : len(flown) * 3 // 4]
    assert flown[20] == 5 and late.count(1) > 0.7 * len(late), late
    alone = machine.submit(prompts[0], 400)
    assert machine.run(alone) == [answer(prompts[0], 400)]
    assert machine.device.launched[-10][2] == machine.scheduler.stats()["draft_depth"] > 1
    machine.audit()
