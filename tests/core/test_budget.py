"""How many prompt chunks run between rounds. Time is a counter that the model moves: no clock is asked."""

from __future__ import annotations

import pytest
from engine_support import text
from hash_model import Machine, answer

from ninfer_core.runtime.budget import ChunkTimes

CHUNK = 64


class Timed(Machine):
    """A chunk takes `fixed + tokens * per_token` seconds, a round 1; `log` has what ran, and `gaps` the seconds between rounds."""

    def __init__(self, fixed=2.0, per_token=1.0, **options):
        self.now = 0.0
        super().__init__(clock=lambda: self.now, checkpoints=0, chunk=CHUNK, **options)
        self.log, self.gaps, self.ended = [], [], None
        decoder, round_ = self.runner._decoder, self.runner.round
        prefill = decoder.prefill

        def timed_prefill(state, tokens, *rest):
            self.now += fixed + per_token * len(tokens)
            self.log.append(len(tokens))
            return prefill(state, tokens, *rest)

        def timed_round(sequences):
            if self.ended is not None:
                self.gaps.append(self.now - self.ended)
            self.now += 1.0
            self.ended = self.now
            self.log.append("round")
            return round_(sequences)

        decoder.prefill, self.runner.round = timed_prefill, timed_round

    def warm(self):
        """Whole chunks and short ones are known, and a stream runs."""
        for seed in (1, 2, 3):
            self.ask(text(2 * CHUNK + 8, seed=seed), 2)
        stream = self.submit(text(8, seed=9), 400)
        while stream.session.completion_tokens < 3:
            self.scheduler.step()
        self.log.clear()
        self.gaps.clear()
        return stream


WHOLE = 2.0 + CHUNK


def chunks_between(log):
    """The chunks between each two rounds."""
    runs, run = [], []
    for entry in log:
        if entry == "round":
            runs.append(run)
            run = []
        else:
            run.append(entry)
    return [run for run in runs if run]


def test_short_prompts_share_the_time_of_one_chunk():
    machine = Timed(slots=12, pages=200)
    stream = machine.warm()
    handles = [machine.submit(text(8, seed=s), 3) for s in range(20, 30)]
    machine.run(*handles)
    assert [machine.tokens[h.id] for h in handles] == [answer(h.request.prompt, 3) for h in handles]
    runs = chunks_between(machine.log)
    assert len(runs[0]) == int(WHOLE / 10.0) == 6 and len(runs) == 2, runs
    assert max(machine.gaps) <= WHOLE
    stream.cancel()


def test_a_stream_waits_for_one_whole_chunk_at_most():
    machine = Timed(slots=12, pages=200)
    stream = machine.warm()
    handles = [machine.submit(text(600, seed=3), 2)]
    handles += [machine.submit(text(n, seed=n), 2) for n in (5, 70, 8, 130, 40, 64, 3, 33)]
    machine.run(*handles)
    assert max(machine.gaps) == WHOLE and len(machine.gaps) > 12
    assert all(len(run) == 1 for run in chunks_between(machine.log) if CHUNK in run)
    assert any(len(run) > 1 for run in chunks_between(machine.log))
    assert [machine.tokens[h.id] for h in handles] == [answer(h.request.prompt, 2) for h in handles]
    stream.cancel()


def test_an_unknown_time_is_a_whole_chunk():
    """Nothing was measured yet: one chunk between rounds, however short."""
    machine = Timed(slots=6, pages=100)
    stream = machine.submit(text(8, seed=9), 60)
    machine.scheduler.step()
    handles = [machine.submit(text(8, seed=s), 2) for s in range(4)]
    machine.run(*handles)
    assert all(len(run) == 1 for run in chunks_between(machine.log)[1:])
    stream.cancel()


def test_without_running_streams_every_step_looks_around():
    """One chunk a step: a cancellation takes effect behind it."""
    machine = Timed(slots=4, pages=100)
    machine.warm().cancel()
    machine.scheduler.step()
    handle = machine.submit(text(600, seed=3), 2)
    before = machine.scheduler.totals.chunks
    for _ in range(3):
        machine.scheduler.step()
    assert machine.scheduler.totals.chunks == before + 3
    handle.cancel()
    machine.scheduler.step()
    assert machine.scheduler.totals.chunks == before + 3 and handle.done


def test_chunks_of_a_prompt_are_the_same_whatever_the_time():
    """The time decides how many run, never how long they are."""
    sizes = []
    for fixed, per_token in ((2.0, 1.0), (0.0, 0.001), (100.0, 0.0)):
        machine = Timed(fixed, per_token, slots=4, pages=100)
        stream = machine.warm()
        handle = machine.submit(text(230, seed=3), 2)
        machine.run(handle)
        sizes.append([entry for entry in machine.log if entry != "round"])
        stream.cancel()
    assert sizes[0] == sizes[1] == sizes[2] == [64, 64, 64, 38]


def test_one_pause_is_not_taken_for_a_cost():
    times = ChunkTimes(256)
    assert times.whole is None
    for seconds in (9.0, 1.0, 1.0, 1.0, 500.0, 1.0, 1.0):
        times.measured(256, seconds)
    assert times.whole == pytest.approx(1.0, abs=0.5)
    assert times.expected(20) == times.whole, "by longer ones, while none of its size is known"
    for _ in range(3):
        times.measured(20, 0.1)
    assert times.expected(20) == pytest.approx(0.1) and times.expected(40) == times.whole
