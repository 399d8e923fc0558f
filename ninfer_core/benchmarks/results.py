"""Measured figures and the files that keep the latest of them: one JSON file per device."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InvalidRequestError

PACKAGES = ("torch", "triton")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    name: parts joined by `/`, the model first: `qwen3.6-35b-a3b/decode/mtp0/7680`.
    value, unit: the mean of `runs`; `deviation`: their sample standard deviation, None for a single run.
    floor: the best value in the same unit that the bytes alone would allow at the bandwidth measured in the same run.
    details: what else belongs to it (context, acceptance, how the context was filled, notes).
    """

    name: str
    value: float
    unit: str
    deviation: float | None = None
    runs: int = 1
    floor: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The part of the floor that is reached: for rates the value over it, for times the other way round."""
        if not self.floor or not self.value:
            return None
        return self.value / self.floor if "/s" in self.unit else self.floor / self.value

    def as_dict(self) -> dict[str, Any]:
        """Plain values, rounded to six digits."""
        made = {
            "value": rounded(self.value),
            "unit": self.unit,
            "deviation": rounded(self.deviation),
            "runs": self.runs,
            "floor": rounded(self.floor),
            "share": rounded(self.share),
            "details": dict(self.details),
        }
        return {key: value for key, value in made.items() if value is not None}


def rounded(value: float | None) -> float | None:
    """A figure to six digits; None stays None."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def figure_of(name: str, values: Sequence[float], unit: str, *, floor: float | None = None, **details: Any) -> Figure:
    """The figure of repeated runs: mean and sample deviation."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Figure(name, statistics.fmean(values), unit, spread, len(values), floor, details)


@dataclass(frozen=True, slots=True)
class Device:
    """What was measured on: `slug` names its result file."""

    name: str
    slug: str
    kind: str
    memory: int


def device_of(kind: str) -> Device:
    """The CPU of this machine, or its current CUDA device. `kind`: "cpu" or "cuda"."""
    if kind == "cuda":
        import torch

        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device(found.name, slug_of(found.name), "cuda", found.total_memory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = f"{_cpu_name()}, {cores} cores"
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return Device(name, slug_of(name), "cpu", size)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.M)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def load_per_core() -> float | None:
    """Runnable programs per core over the last minutes, the measurement's own threads among them; None if not told."""
    if not hasattr(os, "getloadavg"):
        return None
    return round(os.getloadavg()[1] / (os.cpu_count() or 1), 2)


def slug_of(name: str) -> str:
    """A file name made of a device name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str]:
    """Versions of what computed."""
    found = {"ninfer": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit_of() -> str | None:
    """The commit of the checkout this package lies in, with `+changes` where files differ; None outside of one."""
    folder = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(folder), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "ninfer_core", "cli")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def save(
    folder: Path, device: Device, figures: Iterable[Figure], *, command: str, commit: str | None, prefix: str = ""
) -> Path:
    """Write figures into the device's file in `folder`; those of other names stay. Returns the file.

    `prefix`: older figures whose name begins with it are dropped first.

    Raises:
        InvalidRequestError: the file is there and is not a result file.
    """
    path = folder / f"{device.slug}.json"
    kept = read(path)["figures"] if path.exists() else {}
    if prefix:
        kept = {name: entry for name, entry in kept.items() if not name.startswith(prefix)}
    origin: dict[str, Any] = {"command": command, "commit": commit, "versions": versions()}
    origin |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "load": load_per_core()}
    kept |= {figure.name: {**figure.as_dict(), **origin} for figure in figures}
    about = {"name": device.name, "kind": device.kind, "memory": device.memory}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"device": about, "figures": dict(sorted(kept.items()))}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def read(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        InvalidRequestError: it is not one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidRequestError(f"{path} is no result file ({error}); name a folder of `ninfer bench`") from error
    if not isinstance(found, dict) or not isinstance(found.get("figures"), dict) or "device" not in found:
        raise InvalidRequestError(f"{path} is no result file: it has no `device` and `figures`")
    return found


def read_all(folder: Path) -> dict[str, dict[str, Any]]:
    """All result files of a folder by the slug of their device; `peers.json` and other documents are left out."""
    files = sorted(path for path in folder.glob("*.json") if "figures" in path.read_text(encoding="utf-8")[:4000])
    return {path.stem: read(path) for path in files}
