"""What the engine's loop does when the device fails, hangs, or its own books are wrong. Over the hash model."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import pytest
from engine_support import raw
from engine_support import until as until_within
from hash_model import Machine, answer
from tiny import tiny_engine

from ninfer_core.errors import DeviceFaultError, EngineClosedError, EngineFailedError, NotFiniteError
from ninfer_core.runtime.faults import public
from ninfer_core.runtime.loop import Loop, Restarts
from ninfer_core.runtime.watchdog import TICKS, Watchdog

until = partial(until_within, seconds=60)
PROMPTS = [[(i * k) % 250 for i in range(70 + k)] for k in (3, 7, 11, 13, 17, 19)]
GONE = RuntimeError("CUDA error: an illegal memory access was encountered")


class Device:
    """Lets the model's calls fail, or hang, as long as a test wants it."""

    def __init__(self, machine):
        self.fault = self._stop = None
        self.way = threading.Event()
        self.way.set()
        self.reached = threading.Event()
        decoder = machine.runner._decoder
        for name in ("begin", "verify", "flush"):
            setattr(decoder, name, self._wrapped(getattr(decoder, name)))

    def _wrapped(self, call):
        def run(*args):
            if self._stop is not None and self._stop():
                self._stop = None
                self.way.clear()
            if not self.way.is_set():
                self.reached.set()
                assert self.way.wait(60)
            if self.fault is not None:
                raise self.fault
            return call(*args)

        return run

    def run(self, machine, *prompts, tokens=300):
        """Requests that have tokens each, held in a call of the model."""
        self.way.clear()
        handles = [machine.submit(prompt, tokens) for prompt in prompts]
        assert self.reached.wait(60)
        self._stop = lambda: all(handle.session.completion_tokens > 3 for handle in handles)
        self.reached.clear()
        self.way.set()
        assert self.reached.wait(60)
        return handles


@contextlib.contextmanager
def running(machine, limit=0.0, **rules):
    """A loop over the machine, whose restarts do not wait."""
    machine.loop = Loop(machine.scheduler, machine.runner, threads=1, name="hash", limit=limit)
    machine.loop.rules = Restarts(**{"pauses": (0.0, 0.0), **rules})
    machine.device_calls = Device(machine)
    machine.loop.start()
    try:
        yield machine
    finally:
        machine.device_calls.way.set()
        machine.loop.stop()
        assert not machine.loop.alive


def right(machine, *handles):
    for handle in handles:
        assert handle.wait(60) and handle.error is None
        count = handle.request.max_tokens
        until(lambda handle=handle, count=count: len(machine.tokens.get(handle.id, ())) == count)
        assert machine.tokens[handle.id] == answer(handle.request.prompt, count)


def free(machine):
    until(lambda: machine.scheduler.idle and machine.loop.status == "ok")
    stats = machine.scheduler.stats()
    assert (stats["pages_free"], stats["slots_free"]) == (stats["pages_total"], stats["slots_total"])
    machine.audit()


def mended_by_a_restart(machine):
    """The device works again once the engine begins anew."""
    renew = machine.runner.renew
    machine.runner.renew = lambda: (setattr(machine.device_calls, "fault", None), renew())


def meet_a_fault(machine):
    """The device fails, and a request with it."""
    machine.device_calls.fault = GONE
    with pytest.raises(DeviceFaultError):
        machine.submit(PROMPTS[0], 10).result(60)


@pytest.mark.parametrize("lanes", [False, True])
def test_a_fault_of_the_device_ends_what_runs_and_keeps_what_waits(lanes):
    with running(Machine(lanes=lanes, slots=2)) as machine:
        device = machine.device_calls
        right(machine, machine.submit(PROMPTS[0], 10))
        ran = device.run(machine, *PROMPTS[:2])
        waits = [machine.submit(prompt, 20) for prompt in PROMPTS[2:]]
        renew = machine.runner.renew

        def mended():
            assert machine.loop.status == "restarting" and not any(handle.done for handle in waits)
            device.fault = None
            renew()

        machine.runner.renew, device.fault = mended, GONE
        device.way.set()
        for handle in ran:
            with pytest.raises(DeviceFaultError, match="can be sent again") as caught:
                handle.result(60)
            assert caught.value.retryable and "illegal" not in str(caught.value)
        right(machine, *waits)
        free(machine)
        assert machine.loop.restarts == 1 and machine.scheduler.stats()["failed"] == 2
        again = machine.submit(PROMPTS[0], 10)
        right(machine, again)
        assert again.session.cached_tokens == 0, "what was kept before the fault is not trusted"


def test_a_fault_in_prefill_of_the_only_request_leads_there_too():
    with running(Machine()) as machine:
        mended_by_a_restart(machine)
        meet_a_fault(machine)
        free(machine)
        assert machine.loop.restarts == 1
        right(machine, machine.submit(PROMPTS[0], 10))


def test_a_device_that_stays_away_is_given_up_and_all_are_told():
    with running(Machine(slots=1)) as machine:
        (ran,) = machine.device_calls.run(machine, PROMPTS[0])
        waits = machine.submit(PROMPTS[1], 10)
        machine.device_calls.fault = GONE
        machine.device_calls.way.set()
        with pytest.raises(DeviceFaultError):
            ran.result(60)
        with pytest.raises(EngineFailedError, match="load it again") as caught:
            waits.result(60)
        assert type(caught.value) is EngineFailedError
        until(lambda: not machine.loop.alive)
        assert machine.loop.status == "failed" and machine.loop.restarts == 0
        with pytest.raises(EngineFailedError, match="beginning anew does not help"):
            machine.submit(PROMPTS[2], 5)


def test_too_many_restarts_are_given_up():
    with running(Machine(), most=2) as machine:
        mended_by_a_restart(machine)
        for count in (1, 2):
            meet_a_fault(machine)
            right(machine, machine.submit(PROMPTS[1], 10))
            assert machine.loop.restarts == count
        meet_a_fault(machine)
        until(lambda: machine.loop.status == "failed")
        assert machine.loop.restarts == 2


def test_restarts_long_ago_do_not_count():
    with running(Machine(), most=1, window=0.0) as machine:
        mended_by_a_restart(machine)
        for count in (1, 2, 3):
            meet_a_fault(machine)
            until(lambda count=count: machine.loop.restarts == count and machine.loop.status == "ok")
        right(machine, machine.submit(PROMPTS[0], 10))
        assert machine.loop.restarts == 3


def test_a_fault_that_passes_needs_no_restart():
    """A call for several requests fails once: each is read again, and nobody notices."""
    with running(Machine(slots=2)) as machine:
        handles = machine.device_calls.run(machine, *PROMPTS[:2], tokens=50)
        verify = machine.runner._decoder.verify

        def once(*args):
            machine.runner._decoder.verify = verify
            raise RuntimeError("no")

        machine.runner._decoder.verify = once
        machine.device_calls.way.set()
        right(machine, *handles)
        free(machine)
        assert machine.loop.restarts == 0


def test_wrong_books_are_begun_anew():
    """Pages that nobody gives back, and a pool that refuses: what runs ends, and the engine has all it had."""
    with running(Machine(slots=2)) as machine:
        machine.reuse.pages.take(20)
        machine.reuse.slots.take(1)
        (handle,) = machine.device_calls.run(machine, PROMPTS[0])
        del machine.reuse.pages._owners[machine.scheduler._decoding[0].pages[0]]
        handle.cancel()
        machine.device_calls.way.set()
        until(lambda: machine.loop.restarts == 1)
        free(machine)
        assert handle.done
        right(machine, *[machine.submit(prompt, 10) for prompt in PROMPTS])


def test_a_loop_that_ends_leaves_nobody_waiting():
    with running(Machine(slots=1)) as machine:
        handles = [*machine.device_calls.run(machine, PROMPTS[0]), *(machine.submit(p, 300) for p in PROMPTS[1:3])]
        hook = threading.excepthook
        threading.excepthook = lambda args: None
        try:
            machine.device_calls.fault = SystemExit()
            machine.device_calls.way.set()
            for handle in handles:
                with pytest.raises(EngineFailedError):
                    handle.result(60)
            until(lambda: not machine.loop.alive)
        finally:
            threading.excepthook = hook
        assert machine.loop.status == "failed"
        with pytest.raises(EngineFailedError, match="thread has ended"):
            machine.submit(PROMPTS[0], 3)


# hanging


def test_a_step_that_hangs_ends_its_requests_and_the_engine_goes_on_when_it_comes_back():
    with running(Machine(slots=2)) as machine:
        watchdog = Watchdog(machine.loop, 600.0, "test")
        ran = machine.device_calls.run(machine, *PROMPTS[:2])
        waits = machine.submit(PROMPTS[2], 5)
        assert [watchdog.look() for _ in range(TICKS)] == [False] * TICKS and not any(h.done for h in (*ran, waits))
        assert watchdog.look() and machine.loop.status == "stalled"
        for handle in (*ran, waits):
            with pytest.raises(DeviceFaultError, match="600 s and counts as hung"):
                handle.result(60)
        with pytest.raises(DeviceFaultError, match="refused until it does"):
            machine.submit(PROMPTS[3], 5)
        assert not watchdog.look(), "one alarm for one step"
        assert machine.scheduler.stats()["running"] == 0
        machine.device_calls.way.set()
        free(machine)
        assert machine.scheduler.stats()["failed"] == 3 and machine.loop.restarts == 0
        right(machine, *[machine.submit(prompt, 10) for prompt in PROMPTS])


def test_closing_an_engine_that_hangs_does_not():
    with running(Machine()) as machine:
        (handle,) = machine.device_calls.run(machine, PROMPTS[0])
        machine.loop.stop(timeout=0.05)
        assert machine.loop.alive and not handle.done
        machine.device_calls.way.set()
        with pytest.raises(EngineClosedError):
            handle.result(60)


class Steps:
    """A loop as the watchdog sees it."""

    def __init__(self):
        self.step, self.alarms = 0, []

    def stall(self, step, seconds):
        self.alarms.append((step, seconds))
        return True


def test_slow_is_not_hung_and_idle_is_not_either():
    loop = Steps()
    watchdog = Watchdog(loop, 60.0, "test")
    for step in range(10):  # just within the limit, again and again
        loop.step = step
        assert not any(watchdog.look() for _ in range(TICKS))
    loop.step = None
    assert not any(watchdog.look() for _ in range(10 * TICKS))
    loop.step = 11
    assert [watchdog.look() for _ in range(TICKS + 1)].count(True) == 1
    assert loop.alarms == [(11, 60.0)]


def test_a_step_that_has_ended_meanwhile_raises_no_alarm():
    with running(Machine()) as machine:
        assert not machine.loop.stall(10_000, 1.0)
        assert machine.loop.status == "ok"
        right(machine, machine.submit(PROMPTS[0], 5))


def test_the_watchdogs_own_thread_looks_and_ends():
    with running(Machine(), limit=0.2) as machine:
        machine.device_calls.way.clear()
        handle = machine.submit(PROMPTS[0], 30)
        with pytest.raises(DeviceFaultError):
            handle.result(60)
        machine.device_calls.way.set()
        machine.loop._watchdog.stop()
        free(machine)
        right(machine, machine.submit(PROMPTS[0], 30))
    assert not any(thread.name == "ninfer-watchdog-hash" for thread in threading.enumerate())


# a whole engine


def test_an_engine_restarts_and_says_so():
    request = raw(n=150, tokens=10)
    with tiny_engine(draft_tokens=3, max_sequences=2) as engine:
        engine._loop.rules = Restarts(pauses=(0.0,))
        before = engine.generate(request).text
        begin, health = engine._runner._decoder.begin, []

        def dead(*args):
            health.append(engine.health()["status"])
            if len(health) == 2:  # the probe: from then on the device works again
                engine._runner._decoder.begin = begin
            raise GONE

        engine._runner._decoder.begin = dead
        handle = engine.submit(raw(n=150, seed=2))
        with pytest.raises(DeviceFaultError):
            handle.result(60)
        until(lambda: engine.health()["status"] == "ok")
        assert health == ["ok", "checking"] and engine.health()["restarts"] == engine.stats()["restarts"] == 1
        assert engine.state == "ready" and engine.generate(request).text == before


@pytest.mark.parametrize("error,kind", [
    (GONE, DeviceFaultError), (RuntimeError("Triton Error [CUDA]: misaligned address"), DeviceFaultError),
    (RuntimeError("shapes differ"), EngineFailedError), (NotFiniteError("nan"), NotFiniteError),
    (EngineClosedError("closed"), EngineClosedError),
])  # fmt: skip
def test_what_ended_a_request_has_a_public_name(error, kind):
    made = public(error)
    assert type(made) is kind and (made is error or made.__cause__ is error)
    assert made is error or str(error) not in str(made), "internals stay inside"
