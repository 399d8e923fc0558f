"""However a request ends, its pages and its slot are back one step of the loop later: one round, or one prompt chunk.

Steps are counted, not seconds. Over the hash model.
"""

from __future__ import annotations

import pytest
from hash_model import Machine, answer

from ninfer_core.errors import DeviceFaultError, EngineBusyError, RequestTimeoutError

LONG = [(i * 37 + i // 5) % 250 for i in range(600)]
SHORT = [(i * 11) % 250 for i in range(40)]


def free(machine):
    """Pages and slots that a new request gets."""
    reuse = machine.reuse
    return reuse.pages.free + reuse.cache.reclaimable(), reuse.slots.free


def cancel(handle):
    handle.cancel()


def expire(handle):
    handle.session.deadline = 0.0


WAYS = [pytest.param(cancel, id="cancelled"), pytest.param(expire, id="overdue")]


def ended(handle, way):
    assert handle.done
    if way is cancel:
        assert handle.session.outcome == "cancelled"
    else:
        assert type(handle.error) is RequestTimeoutError


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_in_decoding_within_one_round(way, lanes):
    machine = Machine(lanes=lanes, slots=2)
    before = free(machine)
    handle = machine.submit(LONG, 200)
    machine.reach(9, handle)
    rounds, made = machine.scheduler.totals.rounds, handle.session.completion_tokens
    assert free(machine)[1] == before[1] - 1
    way(handle)
    machine.scheduler.step()
    ended(handle, way)
    assert free(machine) == before and handle.session.completion_tokens == made
    assert machine.scheduler.totals.rounds == rounds, "not even one more round"
    machine.audit()


@pytest.mark.parametrize("chunks", [1, 4, 9])
@pytest.mark.parametrize("way", WAYS)
def test_in_prefill_within_one_chunk(way, chunks):
    machine = Machine(slots=2)
    before = free(machine)
    handle = machine.submit(LONG, 20)
    for _ in range(chunks):
        machine.scheduler.step()
    assert machine.scheduler.totals.chunks == chunks and handle.session.completion_tokens == 0
    way(handle)
    machine.scheduler.step()
    ended(handle, way)
    assert free(machine) == before and machine.scheduler.totals.chunks == chunks
    machine.expect(LONG, 12)  # what it kept on the way is true
    machine.audit()


@pytest.mark.parametrize("way", WAYS)
def test_in_the_queue_at_once(way):
    machine = Machine(slots=1)
    running, waits, behind = machine.submit(SHORT, 60), machine.submit(LONG, 20), machine.submit(SHORT, 5)
    machine.scheduler.step()
    held = free(machine)
    assert [machine.scheduler.position(handle) for handle in (running, waits, behind)] == [None, 0, 1]
    way(waits)
    machine.scheduler.step()
    ended(waits, way)
    assert free(machine) == held and machine.scheduler.position(behind) == 0
    assert machine.run(running, behind) == [answer(SHORT, 60), answer(SHORT, 5)]
    assert machine.scheduler.totals.chunks == 2, "nothing of its prompt was read"
    machine.audit()


def test_while_it_waits_for_a_state_that_another_is_about_to_keep():
    machine = Machine(slots=3, pages=80)
    first, second = machine.submit(LONG, 5), machine.submit(LONG, 5)
    machine.scheduler.step()
    second.cancel()
    machine.scheduler.step()
    assert second.done and machine.scheduler.position(second) is None
    assert machine.run(first) == [answer(LONG, 5)]
    machine.scheduler.step()
    machine.audit()


def test_behind_a_restored_state():
    """A slot that was just filled from a checkpoint is given back like any other, and the checkpoint stays good."""
    machine = Machine(slots=1)
    made, _ = machine.ask(LONG, 6)
    before = free(machine)
    handle = machine.submit([*LONG, *made, *SHORT], 30)
    machine.scheduler.step()
    assert handle.session.cached_tokens > 500
    handle.cancel()
    machine.scheduler.step()
    assert handle.done and free(machine) == before
    assert machine.expect([*LONG, *made, *SHORT], 30).cached_tokens > 500
    machine.audit()


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_by_itself_in_the_step_of_its_last_token(tokens):
    machine = Machine(slots=2)
    before = free(machine)
    handle = machine.submit(LONG, tokens)
    while not handle.done:
        machine.scheduler.step()
    assert free(machine) == before and handle.session.completion_tokens == tokens


def test_from_outside_while_the_loop_hangs():
    machine = Machine(slots=2, lanes=True)
    before = free(machine)
    ran, waits = [machine.submit(SHORT, 90), machine.submit(LONG, 90)], machine.submit(SHORT, 5)
    machine.reach(1, *ran)
    machine.scheduler.refuse(DeviceFaultError("hangs"))
    assert all(type(handle.error) is DeviceFaultError for handle in (*ran, waits))
    with pytest.raises(DeviceFaultError, match="hangs"):
        machine.submit(SHORT, 5)
    machine.scheduler.accept()
    machine.scheduler.step()
    assert free(machine) == before and machine.scheduler.stats()["failed"] == 3
    machine.expect(LONG, 9)
    machine.audit()


def test_a_prompt_that_cannot_be_opened_takes_nothing():
    machine = Machine(slots=2)
    before = free(machine)
    wanted = machine.reuse.wanted

    def broken(*args):
        raise RuntimeError("no")

    machine.reuse.wanted = broken
    handle = machine.submit(LONG, 5)
    machine.scheduler.step()
    assert "RuntimeError" in str(handle.error) and free(machine) == before
    machine.reuse.wanted = wanted
    machine.expect(LONG, 5)
    machine.audit()


# who goes first


def test_priorities_then_arrival_and_a_place_in_the_queue():
    machine = Machine(slots=1)
    running = machine.submit(SHORT, 30)
    machine.scheduler.step()
    order = []
    handles = {name: machine.submit(SHORT, 3, priority=priority) for name, priority in
               (("late", 5), ("first", 0), ("second", 0), ("urgent", -1))}  # fmt: skip
    assert [machine.scheduler.position(handles[name]) for name in ("urgent", "first", "second", "late")] == [0, 1, 2, 3]
    while not all(handle.done for handle in handles.values()):
        machine.scheduler.step()
        order += [name for name, handle in handles.items() if handle.done and name not in order]
    assert running.done and order == ["urgent", "first", "second", "late"]


def test_prompts_take_turns_and_decoding_goes_on_between_their_chunks():
    """Two long prompts beside a running stream: a chunk of the one, a chunk of the other, a round behind each."""
    machine = Machine(slots=3, pages=120)
    machine.runner.piece_seconds = lambda decoding: 0.0  # a chunk takes next to no time
    stream = machine.submit(SHORT, 300)
    machine.reach(4, stream)
    prompts = [LONG, LONG[::-1]]
    handles = [machine.submit(prompt, 5) for prompt in prompts]
    gaps, lead = [], []
    while not all(handle.session.completion_tokens for handle in handles):
        before, chunks = stream.session.completion_tokens, machine.scheduler.totals.chunks
        machine.scheduler.step()
        gaps.append((machine.scheduler.totals.chunks - chunks, stream.session.completion_tokens - before))
        reading = [s.length for s in machine.scheduler._prefilling]
        lead.append(max(reading) - min(reading) if len(reading) == 2 else 0)
    assert all(chunks <= 1 and tokens >= 1 for chunks, tokens in gaps) and len(gaps) == 20
    assert max(lead) == 64, "neither is ever more than one chunk ahead"
    assert machine.run(*handles) == [answer(prompt, 5) for prompt in prompts]


def test_choices_of_one_prompt_read_it_once():
    machine = Machine(slots=4, pages=80)
    handles = [machine.submit(LONG, 9) for _ in range(4)]
    assert machine.run(*handles) == [answer(LONG, 9)] * 4
    chunks = -(-len(LONG) // 64)
    assert machine.scheduler.totals.chunks == chunks + 3, "the others read the last piece alone"


def test_a_full_queue_names_its_limit_and_takes_again_when_there_is_room():
    machine = Machine(slots=1)
    machine.scheduler._max_queue = 2
    running = machine.submit(SHORT, 20)
    machine.scheduler.step()
    waiting = [machine.submit(SHORT, 3) for _ in range(2)]
    with pytest.raises(EngineBusyError, match="2 requests are waiting and the queue limit is 2") as caught:
        machine.submit(SHORT, 3)
    assert caught.value.retry_after >= 1 and machine.scheduler.stats()["refused"] == 1
    waiting[0].cancel()
    machine.scheduler.step()
    machine.run(running, waiting[1], machine.submit(SHORT, 3))
    assert machine.scheduler.stats()["waiting"] == 0
