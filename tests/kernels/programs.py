"""Running the programs of kernel cases beside this file, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def printed(*arguments: str, interpret: bool, seconds: float = 1500, **more: str) -> str:
    """What `python ARGUMENTS` prints, with `more` in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | more
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def lines(program: str, *arguments: str, interpret: bool) -> list[dict]:
    """What a program prints: one JSON object a line."""
    return [json.loads(line) for line in printed(str(HERE / program), *arguments, interpret=interpret).splitlines()]


@cache
def interpreted(program: str, cases: tuple[str, ...]) -> dict[str, str | None]:
    """Every case's fault, from two processes at once: the interpreter is slow and uses one core."""
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda names: lines(program, *names, interpret=True), (cases[::2], cases[1::2]))
    return {line["case"]: line["fault"] for half in halves for line in half}
