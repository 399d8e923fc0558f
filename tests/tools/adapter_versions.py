"""Runs the adapters' tests against the lowest and the newest framework versions that the wheel allows, in a new environment.

    python -m tests.tools.adapter_versions                 # lowest, then newest
    python -m tests.tools.adapter_versions --end lowest --place DIR   # keep the environment there, or use it again

The environment holds the wheel and no checkout; the second end is an upgrade of the first, as a user does it. Besides the
tests it is checked that the wheel leaves `llama_index` a namespace: `llama_index.core` and `llama_index.llms.ninfer`
import together, and core stays when ninfer goes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

from .packages import ROOT, build, run

FRAMEWORKS = {"langchain": "langchain-core", "llama-index": "llama-index-core"}
"""Extra of the wheel, and the package whose range it states."""
TESTS = [
    "test_adapter_breakage.py",
    "test_foreign_servers.py",
    "test_langchain.py",
    "test_langchain_contract.py",
    "test_langchain_runnables.py",
    "test_langchain_structured.py",
    "test_langchain_unit.py",
    "test_llama_index.py",
    "test_llama_index_agents.py",
    "test_llama_index_contract.py",
    "test_media.py",
]
"""Those of tests/integrations that need neither langchain's agents nor long generations."""
PLUGINS = ("pytest", "pytest-asyncio", "pytest-timeout", "langchain-tests")
NAMESPACE = """
import llama_index, llama_index.core, llama_index.llms.ninfer as own
assert getattr(llama_index, "__file__", None) is None, "llama_index has become a package of its own"
assert len(list(llama_index.__path__)) >= 1 and own.NInfer.class_name() == "NInfer_llm"
"""
CORE_STAYS = """
import importlib.util, llama_index.core
assert importlib.util.find_spec("llama_index.llms.ninfer") is None
"""


def pins(end: str) -> list[str]:
    """Requirements that choose one end of each range; the newest is what pip finds within it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    made = []
    for extra, package in FRAMEWORKS.items():
        (need,) = extras[extra]
        found = re.fullmatch(rf"{package}>=([\d.]+),<[\d.]+", need)
        if found is None:
            sys.exit(f"the extra {extra!r} is {need!r}; this script reads ranges of the form {package}>=A,<B")
        made.append(f"{package}=={found[1]}" if end == "lowest" else need)
    return made


def attempt(end: str, wheel: Path, place: Path) -> bool:
    """Install, check the namespace, run the tests, take ninfer away again. Whether the tests passed."""
    began = time.monotonic()
    interpreter = str(place / "bin/python")
    what = f"ninfer[langchain,llama-index,serve,vision] @ {wheel.as_uri()}"
    helpers = [f"{name}=={version(name)}" for name in PLUGINS]
    pinned = ["--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    pip = [interpreter, "-m", "pip", "install", *pinned]
    # A wheel of the same version would count as installed already.
    run(interpreter, "-m", "pip", "uninstall", "--quiet", "--yes", "ninfer", cwd=place)
    run(*pip, "--upgrade", what, *helpers, *pins(end), cwd=place)
    run(interpreter, "-m", "pip", "check", cwd=place)
    installed = time.monotonic()
    run(interpreter, "-c", NAMESPACE, cwd=place)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", work)
        # -P: nothing but what is installed answers an import; the copied tests find each other by this path.
        files = [f"tests/integrations/{name}" for name in TESTS]
        command = [interpreter, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        environ = {**os.environ, "PYTHONPATH": str(work)}
        done = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, check=False)
    said = run(interpreter, "-m", "pip", "freeze", cwd=place)
    versions = [line for line in said.splitlines() if line.startswith(tuple(f"{p}==" for p in FRAMEWORKS.values()))]
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    took = f"install {installed - began:.0f} s, tests {time.monotonic() - installed:.0f} s"
    print(f"{end}: {', '.join(versions)}; {took}; {last}", flush=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", flush=True)
    run(interpreter, "-m", "pip", "uninstall", "--quiet", "--yes", "ninfer", cwd=place)
    run(interpreter, "-c", CORE_STAYS, cwd=place)
    return done.returncode == 0


def main() -> int:
    """One end after the other; 1 if a test failed at any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--end", action="append", choices=("lowest", "newest"), help="this end only; repeatable")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument(
        "--place", type=Path, help="the environment's folder, which stays; the default is a temporary one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheel, _ = build(Path(name))
        place = (args.place or Path(name) / "environment").resolve()
        if not (place / "bin/python").exists():
            run(args.python, "-m", "venv", str(place), cwd=Path(name))
        passed = [attempt(end, wheel, place) for end in args.end or ("lowest", "newest")]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
