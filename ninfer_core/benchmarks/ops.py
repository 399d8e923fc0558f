"""Runs the kernel bench of the repository: every kernel against its twin, and beside its own byte floor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import DeviceError, EngineError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "bench" / "ops.py"


def run(out: Path, *, parts: Sequence[str] = (), workers: int | None = None) -> None:
    """Check and time the kernels on the current GPU; `out` gets `ops.json`, stdout a line per kernel.

    Args:
        out: folder for the result.
        parts: which parts of the bench to run; none: all.
        workers: processes that compile in parallel; None: as the bench chooses.

    Raises:
        UnsupportedError: not run from a checkout; the bench lies beside the tests whose shapes it shares.
        DeviceError: there is no CUDA device.
        EngineError: the bench failed.
    """
    if not SCRIPT.exists():
        raise UnsupportedError(f"the kernel bench is part of the repository and not installed: {SCRIPT} is missing")
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("kernels are timed on a CUDA device, and torch sees none")
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.bench.ops", "--out", str(out.resolve())]
    command += ["--parts", ",".join(parts)] if parts else []
    command += ["--workers", str(workers)] if workers is not None else []
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise EngineError(f"the kernel bench ended with code {done.returncode}")
