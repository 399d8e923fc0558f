"""Builds the wheel and the sdist, and tries each extra in a clean environment: install, `pip check`, a run.

    python -m tests.tools.packages                       # every extra, with this Python
    python -m tests.tools.packages --extra serve --python python3.12

Each environment is made new and gets the wheel alone, outside the checkout; constraints.txt pins torch as CI
does, or `--newest` takes what a user gets.
"""

from __future__ import annotations

import argparse
import email
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL_LIMIT, SDIST_LIMIT = 16e6, 20e6
TOPS = {"ninfer_core", "ninfer_cli", "langchain_ninfer", "llama_index", "ray_ninfer"}
STRAY = ("__pycache__", ".pyc", ".scratch", ".gpu", ".venv", "demo/make")

ANSWER = 'ninfer run demo --no-think "What is the capital of France?"'
TRIES = {
    "": [ANSWER, "ninfer list", "ninfer bench demo --tokens 8 --seeds 1 --context 64 --drafts 0 -q"],
    "langchain": ["python examples/langchain_structured.py"],
    "llama-index": ["python examples/llama_index_chat.py"],
    "serve": [
        "python -c \"import ninfer_cli.server.app\"",
        "ninfer bench serve demo --concurrency 1 --requests 1 --max-tokens 4 --prompt-tokens 16 -q",
    ],
    "vision": ["python -c \"import av, PIL\"", ANSWER],
    "ray": ["python -c \"import ray_ninfer.app\"", ANSWER],
}  # fmt: skip
"""What must work with each extra; commands run in a folder that holds only `examples`."""


def run(*command: str, cwd: Path, env: dict[str, str] | None = None, quiet: bool = True) -> str:
    """Run a command; its output. Exits with that output if it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of the checkout, the wheel made from the sdist as an installer would."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=source)
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """Sizes, names, metadata: one version, licences, nothing stray."""
    problems = []
    for path, limit in ((wheel, WHEEL_LIMIT), (sdist, SDIST_LIMIT)):
        size = path.stat().st_size
        print(f"{path.name}: {size / 1e6:.2f} MB of at most {limit / 1e6:.0f}")
        if size > limit:
            problems.append(f"{path.name} has {size:,} bytes, the limit is {limit:,.0f}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(about))
    with tarfile.open(sdist) as archive:
        sources = archive.getnames()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    if tops != TOPS:
        problems.append(f"the wheel holds {sorted(tops)}, not {sorted(TOPS)}")
    problems += [f"stray: {name}" for name in names for part in STRAY if part in name]
    problems += [f"stray in the sdist: {name}" for name in sources for part in STRAY[:-1] if part in name]
    licences = [name for name in names if ".dist-info/licenses/" in name]
    for wanted in ("LICENSE", "ninfer_core/demo/NOTICE"):
        if not any(name.endswith(f"licenses/{wanted}") for name in licences):
            problems.append(f"the wheel carries no {wanted} among its licences")
    namespace = {}
    exec((ROOT / "ninfer_core/__init__.py").read_text(encoding="utf-8").split("__all__")[0], namespace)
    if metadata["Version"] != namespace["__version__"]:
        problems.append(f"metadata says {metadata['Version']}, ninfer_core says {namespace['__version__']}")
    if problems:
        sys.exit("\n".join(problems))
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    print(f"version {metadata['Version']}, needs {', '.join(needs)}")


def attempt(extra: str, wheel: Path, python: str, folder: Path, pinned: bool) -> None:
    """One extra in an environment of its own."""
    began = time.monotonic()
    place = folder / f"env-{extra or 'plain'}"
    run(python, "-m", "venv", str(place), cwd=folder)
    interpreter = str(place / "bin/python")
    what = f"ninfer[{extra}] @ {wheel.as_uri()}" if extra else f"ninfer @ {wheel.as_uri()}"
    constraint = ["--constraint", str(ROOT / "constraints.txt")] if pinned else []
    run(interpreter, "-m", "pip", "install", "--quiet", *constraint, what, cwd=folder)
    run(interpreter, "-m", "pip", "check", cwd=folder)
    work = place / "work"
    shutil.copytree(ROOT / "examples", work / "examples")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{place / 'bin'}:{environment['PATH']}", "HOME": str(work)}
    said = [run("bash", "-c", command, cwd=work, env=environment).strip() for command in TRIES[extra]]
    last = next((text.splitlines()[-1] for text in reversed(said) if text), "no output")
    print(f"ninfer[{extra}]: {len(said)} commands in {time.monotonic() - began:.0f} s; {last[:100]}", flush=True)
    shutil.rmtree(place)


def main() -> None:
    """Build, check, try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", choices=list(TRIES), help="this extra only; repeatable")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument(
        "--newest", action="store_true", help="the newest versions, as a user gets them: no constraints"
    )
    parser.add_argument("--build-only", action="store_true", help="make and check the archives, install nothing")
    parser.add_argument("--keep", type=Path, help="copy wheel and sdist there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        check(wheel, sdist)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            for path in (wheel, sdist):
                shutil.copy(path, args.keep)
        if not args.build_only:
            for extra in args.extra or TRIES:
                attempt(extra, wheel, args.python, folder, not args.newest)


if __name__ == "__main__":
    main()
