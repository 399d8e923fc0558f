"""All measurements on one GPU: `python -m tests.gpu --out DIR [--minutes 25] [--only PART,...] [--prepare] [--resume]`.

Every part is a program of its own with a limit of time, so that none takes the others down. Figures lie in
`DIR/<part>.json` as soon as they are known, what a part printed in `DIR/<part>.log`, and what became of each in
`DIR/parts.json`. `--prepare` compiles first, several parts at once; what was compiled stays in Triton's cache.
`--resume` leaves out what ended well in DIR before. `--dry` runs everything small on the CPU, to try it. Nothing needs
to be installed: the checkout is found from here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.parts import PARTS, ROOT, Command, Part

PREPARING = 170
"""Seconds that compiling may take of a part."""
LEAST = 15
"""Seconds without which no part is begun."""
LAST = 12
"""Lines of its output that the table shows of a part without figures."""
DRY = 600
"""Seconds of a part of a dry run: the interpreter is slow."""


def environment(interpret: bool) -> dict[str, str]:
    """Where the package, the command line and the adapters are found without being installed."""
    paths = [str(ROOT), str(ROOT / "cli"), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    return made | ({"TRITON_INTERPRET": "1"} if interpret else {})


def run(command: Command, log: Path, seconds: float, interpret: bool = False) -> dict[str, Any]:
    """Run a program to its end or its limit, with all it started: `status` ok, failed or late, and the seconds."""
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(interpret), stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    status = "ok" if code == 0 else "late" if code is None else "failed"
    found: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if status != "ok":
        found["reason"] = f"stopped at its limit of {seconds:.0f} s" if code is None else f"ended with code {code}"
        found["last"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its children, which share its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lacking(part: Part, dry: bool) -> str:
    """Why a part cannot run here; empty if it can."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return "needs a GPU" if dry and part.tiny is None else ""


class Session:
    """One run over the parts, and its record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out, self.dry = options.out.resolve(), options.dry
        self.out.mkdir(parents=True, exist_ok=True)
        self._file = self.out / "parts.json"
        known = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() and options.resume else {}
        self.done: dict[str, dict[str, Any]] = known
        self._deadline = time.monotonic() + 60 * options.minutes

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._deadline - time.monotonic()

    def note(self, name: str, found: dict[str, Any]) -> None:
        """Keep what became of a part."""
        self.done[name] = found
        self._file.write_text(json.dumps(self.done, indent=1) + "\n", encoding="utf-8")
        reason = f" ({found['reason']})" if "reason" in found else ""
        print(f"{self.left:6.0f} s left  {name:<18} {found['status']:<8} {found['seconds']:6.1f} s{reason}", flush=True)

    def prepare(self, parts: list[Part], workers: int) -> None:
        """Compile what the parts launch, `workers` of them at once."""
        jobs = [part for part in parts if part.prepare is not None and not lacking(part, self.dry)]

        def one(part: Part) -> tuple[str, dict[str, Any]]:
            assert part.prepare is not None
            command = [word.replace("{out}", str(self.out)) for word in part.prepare]
            name = f"prepare {part.name}"
            return name, run(command, self.out / f"{part.name}.prepare.log", min(PREPARING, max(1.0, self.left)))

        with ThreadPoolExecutor(workers) as pool:
            for name, found in pool.map(one, jobs):
                self.note(name, found)

    def measure(self, part: Part) -> None:
        """Run one part, if it can and there is time."""
        reason = lacking(part, self.dry)
        if not reason and self.left < LEAST:
            reason = "no time left"
        if reason:
            self.note(part.name, {"status": "skipped", "seconds": 0.0, "reason": reason})
            return
        command, limit = part.command(part.file(self.out)), min(part.seconds, self.left)
        if self.dry:
            command, limit = [*command, *(part.tiny or ())], min(DRY, self.left)
        log = self.out / f"{part.name}.log"
        self.note(part.name, run(command, log, limit, interpret=self.dry and part.interpreted))

    def table(self, parts: list[Part]) -> str:
        """All figures, a line each: part, figure, value."""
        lines = []
        for part in parts:
            state = self.done.get(part.name, {"status": "not run", "seconds": 0.0})
            reason = f": {state['reason']}" if "reason" in state else ""
            lines.append(f"## {part.name}: {part.what} [{state['status']}{reason}]")
            if state["status"] in ("skipped", "not run"):
                continue
            if not part.file(self.out).exists():
                log = (self.out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
                lines += [f"  {line[:200]}" for line in log.splitlines()[-LAST:]]
            else:
                found = json.loads(part.file(self.out).read_text(encoding="utf-8"))
                lines += [f"  {name:<44} {short(value)}" for name, value in found.items() if not bulky(name, value)]
        return "\n".join(lines)


def bulky(name: str, value: Any) -> bool:
    """Whether a figure is a table of its own, to be read in the file."""
    return name in ("device", "torch") or len(json.dumps(value)) > 900


def short(value: Any) -> str:
    """A figure on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {short(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def main() -> int:
    """See the module docstring; 0 if every part that ran ended well."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=25.0, help="all parts together")
    parser.add_argument("--only", default="", metavar="PART,...", help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--prepare", action="store_true", help="compile first")
    parser.add_argument("--prepare-only", action="store_true", help="compile, and measure nothing")
    parser.add_argument("--workers", type=int, default=max(2, min(4, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--resume", action="store_true", help="leave out what ended well in DIR")
    parser.add_argument("--dry", action="store_true", help="everything small, on the CPU")
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    unknown = [name for name in wanted if name not in [part.name for part in PARTS]]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    session = Session(options)
    parts = [part for part in PARTS if not wanted or part.name in wanted]
    due = [part for part in parts if session.done.get(part.name, {}).get("status") != "ok"]
    if (options.prepare or options.prepare_only) and not options.dry:
        session.prepare(due, options.workers)
    for part in [] if options.prepare_only else due:
        session.measure(part)
    table = session.table(parts)
    (session.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    return 1 if any(session.done.get(part.name, {}).get("status") in ("failed", "late") for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
