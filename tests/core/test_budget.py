"""How much of prompts is read between rounds. Time is a counter that the model moves: no clock is asked."""

from __future__ import annotations

import pytest
from engine_support import text
from hash_model import Machine, answer

from ninfer_core.config import PUBLISHED
from ninfer_core.model.prompt_chunk import LEAST, layer_operations
from ninfer_core.runtime.budget import ChunkTimes

CHUNK, LAYERS = 64, 4
WHOLE = 2.0 + CHUNK


class Timed(Machine):
    """A chunk takes `fixed + tokens * per_token` seconds, a round 1; `log` has what ran, and `gaps` the seconds between rounds.

    `piece`: seconds that prompts may take between two rounds.
    """

    def __init__(self, fixed=2.0, per_token=1.0, piece=WHOLE, layers=1, round_seconds=1.0, **options):
        self.now = 0.0
        super().__init__(clock=lambda: self.now, checkpoints=0, chunk=CHUNK, layers=layers, **options)
        self.log, self.gaps, self.ended = [], [], None
        self.runner.pieces.times.piece = piece
        round_ = self.runner.round

        def ran(tokens):
            self.now += (fixed + per_token * tokens) / layers
            self.log.append(tokens)

        def timed_round(sequences):
            if self.ended is not None:
                self.gaps.append(self.now - self.ended)
            self.now += round_seconds
            self.ended = self.now
            self.log.append("round")
            return round_(sequences)

        self.runner._decoder.ran, self.runner.round = ran, timed_round

    def warm(self):
        """Whole chunks and short ones are known, and a stream runs."""
        for seed in (1, 2, 3):
            self.ask(text(2 * CHUNK + 8, seed=seed), 2)
        stream = self.submit(text(8, seed=9), 400)
        self.reach(3, stream)
        self.log.clear()
        self.gaps.clear()
        return stream


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


def test_short_prompts_share_the_time_of_one_piece():
    machine = Timed(slots=12, pages=200)
    stream = machine.warm()
    handles = [machine.submit(text(8, seed=s), 3) for s in range(20, 30)]
    machine.run(*handles)
    assert [machine.tokens[h.id] for h in handles] == [answer(h.request.prompt, 3) for h in handles]
    runs = chunks_between(machine.log)
    assert len(runs[0]) == int(WHOLE / 10.0) == 6 and len(runs) == 2, runs
    assert max(machine.gaps) <= WHOLE
    stream.cancel()


@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("lanes", [False, True])
def test_a_stream_waits_for_one_piece_at_most(layers, lanes):
    """Beside prompts of all lengths, in an order of their own; nothing that is made depends on it."""
    machine = Timed(0.0, piece=CHUNK / layers, layers=layers, lanes=lanes, slots=12, pages=200)
    stream = machine.warm()
    handles = [machine.submit(text(600, seed=3), 2)]
    handles += [machine.submit(text(n, seed=n), 2) for n in (5, 70, 8, 130, 40, 64, 3, 33)]
    machine.run(*handles)
    assert max(machine.gaps) == CHUNK / layers and len(machine.gaps) > 12 * layers
    whole = [run for run in chunks_between(machine.log) if CHUNK in run]
    assert whole and all(len(run) == 1 for run in whole)
    assert any(len(run) > 1 for run in chunks_between(machine.log))
    assert [machine.tokens[h.id] for h in handles] == [answer(h.request.prompt, 2) for h in handles]
    (shown,) = machine.run(stream)
    assert shown == answer(stream.request.prompt, 400)


def test_as_many_layers_as_fit_make_a_piece():
    machine = Timed(slots=2, pages=100, layers=LAYERS, piece=WHOLE * 3 / LAYERS)
    stream = machine.warm()
    machine.run(machine.submit(text(2 * CHUNK, seed=4), 2))
    runs = [len(run) for run in chunks_between(machine.log)]
    assert runs == [3, 1, 3, 1], "and what follows the last layer comes behind one more round"
    assert machine.log[: machine.log.index("round", 6)].count("round") == 2
    stream.cancel()


def test_an_unknown_time_is_that_of_one_layer():
    """Nothing was measured yet: one layer between rounds, until two are read."""
    machine = Timed(slots=3, pages=100, layers=LAYERS, piece=1000.0)
    stream = machine.submit(text(8, seed=9), 60)
    machine.scheduler.step()
    machine.log.clear()
    machine.run(machine.submit(text(CHUNK, seed=1), 2))
    assert [len(run) for run in chunks_between(machine.log)] == [1, 1, 2]
    stream.cancel()


def test_what_was_measured_for_long_chunks_alone_is_the_least_for_short_ones():
    """Kernels that few rows cannot fill: a short prompt takes as long as a long one, and nothing else beside it."""
    machine = Timed(0.0, 1.0, slots=6, pages=100)
    for seed in (1, 2, 3):
        machine.ask(text(CHUNK, seed=seed), 2)
    stream = machine.submit(text(CHUNK, seed=9), 60)
    machine.reach(2, stream)
    machine.log.clear()
    machine.run(*[machine.submit(text(8, seed=s), 2) for s in (11, 12)])
    assert all(len(run) == 1 for run in chunks_between(machine.log)[:2])
    stream.cancel()


def test_without_running_streams_every_step_reads_a_whole_chunk():
    """And looks around: a cancellation takes effect behind it."""
    machine = Timed(slots=4, pages=100, layers=LAYERS, piece=1.0)
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


def test_rounds_that_take_long_leave_prompts_their_share():
    """Where a round takes longer than a piece, prompts get the time of two rounds between two."""
    machine = Timed(slots=2, pages=100, layers=LAYERS, piece=1.0, round_seconds=30.0, cost=lambda *_: 30.0, lanes=True,
                    drafts=0)  # fmt: skip
    stream = machine.warm()
    assert machine.runner.piece_seconds(1) == 60.0
    machine.run(machine.submit(text(2 * CHUNK, seed=4), 2))
    assert [len(run) for run in chunks_between(machine.log)] == [3, 1, 3, 1]
    stream.cancel()


def test_chunks_of_a_prompt_are_the_same_whatever_the_time():
    """The time decides when they run, never how long they are."""
    sizes = []
    for fixed, per_token in ((2.0, 1.0), (0.0, 0.001), (100.0, 0.0)):
        machine = Timed(fixed, per_token, slots=4, pages=100, layers=LAYERS)
        stream = machine.warm()
        handle = machine.submit(text(230, seed=3), 2)
        machine.run(handle)
        sizes.append([entry for entry in machine.log if entry != "round"])
        stream.cancel()
    assert sizes[0] == sizes[1] == sizes[2] == [n for n in (64, 64, 64, 38) for _ in range(LAYERS)]


def test_one_pause_is_not_taken_for_a_cost():
    times = ChunkTimes()
    assert times.expected(256, 10.0) is None
    for seconds in (9.0, 1.0, 1.0, 1.0, 500.0, 1.0, 1.0):
        times.measured(256, 10.0, seconds)
    assert times.expected(256, 10.0) == pytest.approx(1.0, abs=0.5)
    assert times.expected(129, 20.0) == 2 * times.expected(256, 10.0) and times.expected(257, 10.0) is None
    assert times.expected(128, 5.0) == times.expected(256, 10.0), "by longer ones, while none of its size is known"
    for _ in range(3):
        times.measured(20, 1.0, 0.1)
    assert times.expected(20, 1.0) == pytest.approx(0.1) and times.expected(40, 1.0) > 0.1


@pytest.mark.parametrize("name", PUBLISHED)
def test_operations_tell_layers_apart(name):
    config = PUBLISHED[name]
    shallow, deep = layer_operations(config, 0, 2048), layer_operations(config, 100_000, 2048)
    assert len(shallow) == config.num_hidden_layers
    for i, (first, later) in enumerate(zip(shallow, deep, strict=True)):
        more = 2 * 2048 * 100_000 * 2 * config.query_width if i in config.attention_layers else 0
        assert later - first == pytest.approx(more)
    blocks = layer_operations(config, 100_000, 2048, 1536)
    assert len(blocks) == len(deep) + len(config.attention_layers) and sum(blocks) == pytest.approx(sum(deep), rel=0.02)
    assert max(blocks) < max(deep), "a long layer has several steps"
    assert layer_operations(config, 0, LEAST)[0] == layer_operations(config, 0, 1)[0] == shallow[0] / 2048 * LEAST
