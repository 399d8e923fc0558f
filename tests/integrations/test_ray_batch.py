"""What the batch example keeps of a run that was killed, and its rows on the demo model. Needs no Ray."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.serving import wait_for

FILE = Path(__file__).resolve().parents[2] / "examples" / "ray_batch.py"
# The example's own loop with rows that are answered without Ray or a model, slowly, so that it can be killed midway.
SLOW = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("ray_batch", sys.argv.pop(1))
batch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(batch)

def slow(rows, given):
    for at in range(0, len(rows), 3):
        some = rows[at : at + 3]
        time.sleep(0.05)
        yield {"row": [r["row"] for r in some], "prompt": [r["prompt"] for r in some],
               "answer": [r["prompt"].upper() for r in some], "error": [""] * len(some)}

batch.answer_with_ray = slow
batch.main()
"""


@pytest.fixture(scope="module")
def batch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_batch", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts_of(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("cut", [b"", b'{"row": 7, "prom', b'{"row": 7, "prompt": "p", "answer": "all but the end"}'])
def test_a_killed_run_leaves_whole_rows(batch: ModuleType, tmp_path: Path, cut: bytes) -> None:
    kept = b"".join(json.dumps({"row": row, "prompt": f"p{row}", "answer": "é"}).encode() + b"\n" for row in (4, 0))
    path = tmp_path / "answers.jsonl"
    path.write_bytes(kept + cut)
    with path.open("a+b") as file:
        assert batch.answered(file) == {0: "p0", 4: "p4"}
        file.write(b"next\n")
    assert path.read_bytes() == kept + b"next\n"


def test_a_run_goes_on_with_what_is_missing(batch: ModuleType, tmp_path: Path) -> None:
    path = prompts_of(tmp_path / "prompts.jsonl", [f"p{row}" for row in range(4)])
    path.write_text(path.read_text() + "\n")
    assert list(batch.missing(path, {0: "p0", 2: "p2"})) == [{"row": 1, "prompt": "p1"}, {"row": 3, "prompt": "p3"}]


def test_answers_of_another_file_are_refused(batch: ModuleType, tmp_path: Path) -> None:
    path = prompts_of(tmp_path / "prompts.jsonl", ["a", "b"])
    with pytest.raises(SystemExit, match=r"line 2 of .* is not what was answered"):
        list(batch.missing(path, {0: "a", 1: "x"}))


def test_rows_are_written_as_they_are(batch: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with path.open("a+b") as file:
        batch.keep(file, {"row": [3, 1], "prompt": ["é", "long"], "answer": ["ü\n", ""], "error": ["", "too long"]})
        assert batch.answered(file) == {3: "é", 1: "long"}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"row": 3, "prompt": "é", "answer": "ü\n"}, {"row": 1, "prompt": "long", "error": "too long"}]


def test_an_engine_answers_a_batch_and_says_what_it_refuses(batch: ModuleType) -> None:
    answers = batch.Answers("demo", 4, {"device": "cpu", "threads": 1, "context_length": 256})
    try:
        made = answers({"row": [0, 1], "prompt": ["Say hello.", "word " * 1000]})
    finally:
        answers.engine.close()
        answers.pool.shutdown()
    assert made["row"] == [0, 1] and made["error"][0] == "" and made["answer"][1] == ""
    assert "maximum context length is 256" in made["error"][1]


def test_no_row_is_lost_or_repeated_however_often_a_run_is_killed(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path / "prompts.jsonl", [f"prompt {row}" for row in range(40)])
    answers = tmp_path / "answers.jsonl"

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SLOW, str(FILE), str(prompts), str(answers)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    def size() -> int:
        return answers.stat().st_size if answers.exists() else 0

    for _ in range(2):
        before, run = size(), start()
        try:
            assert wait_for(lambda: size() > before or run.poll() is not None, 60)
            os.kill(run.pid, signal.SIGKILL)
        finally:
            run.kill()
            run.communicate()
        with answers.open("ab") as file:  # as if it had been killed within a line
            file.write(b'{"row": 39, "pro')
    said, _ = start().communicate(timeout=120)
    rows: list[dict[str, Any]] = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["row"] for row in rows) == list(range(40)) and said.endswith(b"complete\n")
    assert all(row["answer"] == row["prompt"].upper() == f"PROMPT {row['row']}" for row in rows)


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    prompts, answers = prompts_of(tmp_path / "prompts.jsonl", ["p"]), tmp_path / "answers.jsonl"
    with answers.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", SLOW, str(FILE), str(prompts), str(answers)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode != 0 and "another run writes" in run.stderr and not answers.read_bytes()
