"""The measurements themselves on small models: what is counted, forced, copied and refused; load on a scripted server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_core.benchmarks import harness, serving, suite, workloads
from ninfer_core.benchmarks.harness import Context, Method
from ninfer_core.benchmarks.subject import Subject, Target, open_subject
from ninfer_core.errors import EngineError, InvalidRequestError
from ninfer_core.testing import Delay, Script, ScriptedEngine

SMALL = Method(tokens=12, seeds=(1,), warm=0, fill="read", bandwidth=1e10)


def finish(subject: Subject) -> None:
    reuse = subject.runner.reuse
    subject.release()
    stats = reuse.stats()
    assert stats["slots_free"] == stats["slots_total"] and stats["pages_free"] == stats["pages_total"]


def test_contexts_are_the_published_ones_or_scaled() -> None:
    assert harness.contexts_for(262_144, 256) == [7_680, 64_512, 130_048, 260_096]
    assert harness.contexts_for(4_096, 64) == [128, 1_024, 2_048, 4_032]
    assert harness.contexts_for(4_096, 64, [100]) == [100]
    with pytest.raises(InvalidRequestError, match="choose from 1 to 4032"):
        harness.contexts_for(4_096, 64, [4_033])


@pytest.mark.parametrize(
    "target", [Target(model="demo", device="cpu"), Target(random="demo", device="cpu")], ids=["model", "random"]
)
def test_forced_acceptance_keeps_the_answer_and_reaches_the_stated_mean(target: Target) -> None:
    answers: dict[tuple[int, int], list[int]] = {}
    subject = open_subject(target, draft_tokens=0, context=256)
    (plain, *others) = harness.decode(subject, [70], SMALL, answers=answers)
    finish(subject)
    assert len(answers[70, 1]) == SMALL.tokens and plain.name.endswith("/decode/mtp0/70")
    assert [figure.name.split("/")[1] for figure in others] == ["prefill", "first-token"]
    assert plain.floor and plain.floor > plain.value > 0
    subject = open_subject(target, draft_tokens=3, context=256)
    with pytest.raises(InvalidRequestError, match="let --drafts hold 0"):
        harness.decode(subject, [70], SMALL, forced=2.0)
    run = harness.one_run(subject, 70, SMALL, 1, copy=False, forced=(2.0, answers[70, 1]))
    assert run.tokens == answers[70, 1]
    usage = run.done.usage
    # 11 tokens behind the first: rounds of three (two drafts accepted and one token more), two tokens in the last
    assert usage.rounds == 4 and usage.accepted_by_position[:2] == (4, 4) and not any(usage.accepted_by_position[2:])
    finish(subject)


def test_a_copied_context_reads_two_chunks_only() -> None:
    subject = open_subject(Target(model="demo", device="cpu"), draft_tokens=3, context=2048)
    chunks: list[int] = []
    watch = Context(subject, copy=True)

    def count(sequence: object) -> None:
        chunks.append(watch.sequence.length if watch.sequence else 0)
        watch(sequence)  # type: ignore[arg-type]

    with subject.watching(count):
        done = subject.start(subject.prompt(1500, 1), 8, 1).result()
    assert len(chunks) == 2 and done.usage.completion_tokens == 8 and watch.sequence is not None
    assert watch.sequence.length >= 1500
    finish(subject)


def test_prompts_have_their_length_and_differ_from_the_start() -> None:
    subject = open_subject(Target(model="demo", device="cpu"), draft_tokens=0, context=256)
    prompts = [subject.prompt(length, seed) for length, seed in ((100, 1), (100, 2), (7, 1))]
    assert [len(p) for p in prompts] == [100, 100, 7] and prompts[0][:8] != prompts[1][:8]
    finish(subject)


def test_a_whole_plan_with_batches_and_a_gap() -> None:
    said: list[str] = []
    plan = suite.Plan(
        Target(random="demo", device="cpu"), ("decode", "batch", "gap"), contexts=(400,), drafts=(0, 2), forced=1.5,
        batches=(1, 3), batch_context=64, gap_context=600, tokens=10, seeds=1, fill="copy", say=said.append,
    )  # fmt: skip
    device, figures = suite.run(plan)
    names = [figure.name.removeprefix("ninfer-demo-random/") for figure in figures]
    assert names == [
        "bandwidth/read", "decode/mtp0/400", "decode/mtp2/400", "decode/mtp2-forced/400", "batch/64/1", "batch/64/3",
        "gap/600",
    ]  # fmt: skip
    assert device.kind == "cpu" and all(figure.value > 0 for figure in figures) and len(said) > 4
    by_name = dict(zip(names, figures, strict=True))
    assert by_name["decode/mtp2-forced/400"].details["forced"].startswith("1.5 of 2 drafts are accepted")
    assert by_name["decode/mtp2-forced/400"].details["tokens_per_round"] > 2
    assert "forced" not in by_name["decode/mtp2/400"].details
    about = by_name["gap/600"].details
    assert by_name["gap/600"].value >= about["median_during_ms"] and about["waits"] >= 2
    assert about["prefill_tokens_per_second"] > 0 and about["first_alone_seconds"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("speed",)}, "no part 'speed'"),
        ({"drafts": (0, 6)}, "numbers from 0 to 5"),
        ({"drafts": ()}, "numbers from 0 to 5"),
        ({"drafts": (0, 3), "forced": 3.5}, "3.5 accepted drafts are more"),
        ({"fill": "zeros"}, "must be auto, read or copy"),
        ({"seeds": 0}, "at least 1"),
    ],
)
def test_plans_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        suite.Plan(Target(model="demo"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [Target(), Target(model="demo", random="27b"), Target(random="9b")])
def test_a_target_is_a_model_or_a_known_shape(target: Target) -> None:
    with pytest.raises(InvalidRequestError, match=r"name either|must be one of"):
        open_subject(target, draft_tokens=0)


# --- kinds of text ---------------------------------------------------------------------------------------------------


def test_workloads_scale_to_the_context_and_count_their_rounds() -> None:
    sets = {work.name: work for work in workloads.workloads()}
    assert {name: len(work.prompts) for name, work in sets.items()} == dict.fromkeys(
        ("reasoning", "code", "translation", "story", "structured"), 3
    )
    assert [sets[name].limit(262_144) for name in ("reasoning", "code")] == [65_536, 4_096]
    assert [sets[name].limit(4_096) for name in ("reasoning", "code")] == [1_024, 64]
    with pytest.raises(InvalidRequestError, match="no workload 'poems'"):
        workloads.workloads(["poems"])
    engine = ScriptedEngine(Script(["a", Delay(0.01), "b", Delay(0.01), "c"]))
    (figure,) = workloads.run_workload(engine, "m", sets["story"], context=4_096, seeds=(1, 2), warm=1)
    assert figure.runs == 6 and figure.details["tokens"] == 18 and figure.details["ended"] == 6
    assert [request.sampling.seed for request in engine.requests] == [1000, 1, 2, 1, 2, 1, 2]
    engine.close()


# --- load ------------------------------------------------------------------------------------------------------------


def test_load_counts_tokens_first_tokens_gaps_and_failures() -> None:
    from tests.server.conftest import running

    script = Script(["a", Delay(0.05), "b", Delay(0.02), "c"])
    with running(ScriptedEngine(script, max_sequences=4)) as server:
        url = server.url + "/v1"
        model = asyncio.run(serving.served_model(url))
        load = serving.Load(url, model, max_tokens=3, prompt_tokens=20)
        level, rate = asyncio.run(serving.serve_load(load, levels=[2], rates=[40.0], requests=6))
        told = [request.ignore_eos for request in server.engine.requests]
    assert level.name == "scripted/serve/concurrency/2" and rate.name == "scripted/serve/rate/40"
    for figure in (level, rate):
        about = figure.details
        assert about["completion_tokens"] >= 18 and about["failed"] == 0 and about["requests"] == 6
        assert about["gap_ms"]["max"] >= 40 and about["first_token_ms"]["p50"] < 5_000
        assert figure.value == pytest.approx(about["completion_tokens"] / about["seconds"], rel=0.01)
    assert all(told) and len(told) == 13


def test_second_turns_say_what_the_cache_saves() -> None:
    """Each conversation: its first turn, a side request, the second turn, and one that was never seen."""
    from tests.server.conftest import running

    with running(ScriptedEngine(Script(["</think>\n\n", "Well", " then."]), max_sequences=4)) as server:
        load = serving.Load(server.url + "/v1", "scripted", max_tokens=40)
        (figure,) = asyncio.run(serving.second_turns(load, [200], runs=2))
        asked = [[m.text for m in request.messages] for request in server.engine.requests]
    assert figure.name == "scripted/serve/second_turn/200" and figure.unit == "ms"
    about = figure.details
    assert about["first_token_ms"] == pytest.approx(figure.value, abs=0.01) and about["first_token_ms"] > 0
    assert about["first_token_ms_without_cache"] > 0 and about["reused_share"] == 0 and about["runs"] == 2
    for first, side, second, cold in (asked[:4], asked[4:]):
        assert second[:1] == first and second[1] == "Well then." == cold[1] and len(second) == 3 == len(cold)
        assert cold[0] not in (first[0], side[0]) and len(side[0]) < len(first[0])
        assert cold[0][:6] != first[0][:6], "nothing of it is known"
    (row,) = serving.turn_rows([figure])
    assert len(row) == len(serving.TURNS_HEADER) and row[-1] == "0.0%"
    with pytest.raises(InvalidRequestError, match="from 1"):
        asyncio.run(serving.second_turns(load, [0]))


def test_load_on_nothing_says_so() -> None:
    with pytest.raises(EngineError, match="lists no models"):
        asyncio.run(serving.served_model("http://127.0.0.1:9/v1"))
    load = serving.Load("http://127.0.0.1:9/v1", "x", timeout=2)
    with pytest.raises(EngineError, match="all 8 requests failed; the first: ConnectError"):
        asyncio.run(serving.serve_load(load, levels=[1]))
    with pytest.raises(InvalidRequestError, match="at least one"):
        asyncio.run(serving.serve_load(load))


def test_percentiles_are_values_that_occur() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [serving.percentile(values, p) for p in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert serving.percentile([3.0], 99) == 3.0


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_measures_keeps_and_draws(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "ninfer_cli", "bench", "--random-weights", "demo", "--device", "cpu", "--context", "64",
        "--drafts", "0", "--tokens", "8", "--seeds", "1", "--save", str(tmp_path / "kept"), "--plot",
        str(tmp_path / "p.svg"), "--json", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert "ninfer-demo-random/decode/mtp0/64" in figures
    (kept,) = (tmp_path / "kept").glob("*.json")
    entry = json.loads(kept.read_text())["figures"]["ninfer-demo-random/decode/mtp0/64"]
    assert entry["command"].startswith("ninfer bench --random-weights demo") and entry["versions"]["ninfer"]
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
