"""The driver of all measurements on a GPU: parts end alone, are stopped with their children, and are left out rightly."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as driver
from tests.gpu.parts import PARTS, Part
from tests.serving import wait_for

FIGURE = "import json, sys; json.dump({'device': 'x', 'rate': 12.5}, open(sys.argv[1], 'w')); "
CHILD = (
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "open(sys.argv[1] + '.pid', 'w').write(str(child.pid)); time.sleep(600)"
)


def part(name: str, code: str, seconds: int = 120, **fields) -> Part:
    return Part(name, name, lambda file: [sys.executable, "-c", code, str(file)], seconds, **fields)


def session(folder: Path, **fields) -> driver.Session:
    options = {"out": folder, "minutes": 20.0, "resume": False, "dry": False}
    return driver.Session(argparse.Namespace(**options | fields))


def test_parts_end_alone_and_what_is_known_stays(tmp_path):
    parts = [
        part("good", FIGURE),
        part("bad", FIGURE + "raise SystemExit(3)"),
        part("absent", FIGURE, needs=("no_such_module_here",)),
    ]
    made = session(tmp_path)
    for each in parts:
        made.measure(each)
    assert [made.done[p.name]["status"] for p in parts] == ["ok", "failed", "skipped"]
    assert made.done["bad"]["reason"] == "ended with code 3"
    assert made.done["absent"]["reason"] == "not installed: no_such_module_here"
    assert json.loads((tmp_path / "parts.json").read_text()) == made.done
    table = made.table([*parts, part("later", FIGURE)])
    assert table.count("12.5") == 2 and "later: later [not run]" in table and "device" not in table


def test_a_late_part_is_stopped(tmp_path):
    made = session(tmp_path)
    made.measure(part("slow", "import time; time.sleep(600)", seconds=1))
    assert made.done["slow"]["status"] == "late" and "limit of 1 s" in made.done["slow"]["reason"]


def test_what_a_part_started_ends_with_it(tmp_path):
    noted = tmp_path / "child.pid"
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / "child")], start_new_session=True)
    assert wait_for(lambda: noted.exists() and noted.read_text(), seconds=60)
    driver._end(process)
    assert wait_for(lambda: ended(int(noted.read_text())), seconds=60)


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be reaped by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_resuming_and_running_out_of_time(tmp_path):
    first = session(tmp_path)
    first.measure(part("good", FIGURE))
    again = session(tmp_path, resume=True, minutes=0.0)
    assert again.done == first.done
    again.measure(part("next", FIGURE))
    assert again.done["next"] == {"status": "skipped", "seconds": 0.0, "reason": "no time left"}
    assert session(tmp_path).done == {}


def test_preparing_runs_what_compiles(tmp_path):
    made = session(tmp_path)
    jobs = [
        part("a", "", prepare=[sys.executable, "-c", "open('{out}/a.ready', 'w')"]),
        part("b", "", prepare=[sys.executable, "-c", "raise SystemExit(1)"]),
        part("c", ""),
    ]
    made.prepare(jobs, workers=2)
    assert (tmp_path / "a.ready").exists()
    assert {name: found["status"] for name, found in made.done.items()} == {"prepare a": "ok", "prepare b": "failed"}


@pytest.mark.parametrize("each", PARTS, ids=lambda p: p.name)
def test_every_part_names_a_program_that_is_there(each, tmp_path):
    commands = [each.command(each.file(tmp_path)), *([each.prepare] if each.prepare else [])]
    for command in commands:
        if command[1] == "-m":
            assert importlib.util.find_spec(command[2]) is not None
        else:
            assert Path(command[1]).is_file()
    writes = {"--json", "--out", "--results"} & set(commands[0])
    assert str(tmp_path) in " ".join(commands[0]) or not writes, "whoever writes figures is told where"


def test_names_are_different_and_a_wrong_one_is_refused(monkeypatch, capsys):
    names = [p.name for p in PARTS]
    assert len(set(names)) == len(names)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--out", "nowhere", "--only", "rounds-36b"])
    with pytest.raises(SystemExit):
        driver.main()
    assert "there is no part rounds-36b" in capsys.readouterr().err and not Path("nowhere").exists()
