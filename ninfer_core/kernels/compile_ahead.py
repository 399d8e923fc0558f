"""Compiles kernels before they are needed: what a call would launch, found without a launch, built in processes.

Triton compiles a kernel at its first launch, in the process that launches; a round has dozens, seconds each. Here a
call is run with every launch noted instead of made; processes of their own then compile what was noted, for the same
target, into Triton's cache, where the first real launch finds it.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

log = logging.getLogger("ninfer.engine")
MOST_WORKERS = 16
_SERVE = "from ninfer_core.kernels.compile_ahead import serve; serve()"


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel with the types, constants and options of a launch: what `triton.compile` needs."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any

    def source(self) -> Any:
        """The kernel's source, specialised."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        return ASTSource(kernel, self.signature, self.constants, self.attributes)


@contextmanager
def _noting(found: dict[str, Build]) -> Any:
    """Every launch of a kernel by this thread is noted in `found`, and none is made."""
    kept, thread = JITFunction.run, threading.get_ident()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:  # another engine's
            return kept(self, *arguments, grid=grid, warmup=warmup, **options)
        # As `JITFunction.run` up to where it would compile.
        options["debug"] = options.get("debug", self.debug) or triton.knobs.runtime.debug
        options["instrumentation_mode"] = triton.knobs.compilation.instrumentation_mode
        device = triton.runtime.driver.active.get_current_device()
        _, _, target, backend, binder = self.device_caches[device]
        bound, special, chosen = binder(*arguments, **options)
        made, signature, constants, attributes = self._pack_args(backend, options, bound, special, chosen)
        build = Build(
            self.fn.__module__, self.fn.__name__, signature, constants, attributes, dict(made.__dict__), target
        )
        found.setdefault(f"{build.name} {special} {sorted(build.options.items(), key=str)}", build)
        return None

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = kept


def noted(call: Callable[[], object]) -> list[Build]:
    """What `call` would launch, each kernel and specialisation once; nothing is launched.

    `call` must not look at results.
    """
    found: dict[str, Build] = {}
    with _noting(found):
        call()
    return list(found.values())


def is_cached(build: Build) -> bool:
    """Whether Triton's cache on disk holds it."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    source, backend = build.source(), make_backend(build.target)
    options = backend.parse_options(dict(build.options))
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    file = f"{source.name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(file)
    return bool(group and file in group)


def compile_all(builds: Sequence[Build], workers: int | None = None) -> None:
    """Compile into Triton's cache, in up to `workers` processes (None: one a processor, at most 16).

    Raises:
        RuntimeError: one does not compile, or a process ended.
    """
    waiting: queue.SimpleQueue[Build] = queue.SimpleQueue()
    for build in builds:
        waiting.put(build)
    count = min(len(builds), workers or min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    faults: list[str] = []
    threads = [threading.Thread(target=_feed, args=(waiting, faults), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise RuntimeError("; ".join(faults))


def _feed(waiting: queue.SimpleQueue[Build], faults: list[str]) -> None:
    """One process, given builds until none is left."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _SERVE], stdin=pipe, stdout=pipe, env=environment) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            while not faults:
                build = waiting.get_nowait()
                pickle.dump(build, worker.stdin)
                worker.stdin.flush()
                answer = worker.stdout.readline().decode().strip()
                if answer != "done":
                    faults.append(f"{build.name}: {answer or 'the process ended'}")
        except queue.Empty:
            pass
        except OSError as error:
            faults.append(f"a process that compiles ended: {error}")
        finally:
            worker.kill()


def serve() -> None:
    """In a worker: compile what comes in, one line out for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is not an answer
    while True:
        try:
            build: Build = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            triton.compile(build.source(), target=build.target, options=build.options)
            answers.write("done\n")
        except Exception as error:
            answers.write(f"{type(error).__name__}: {error}".replace("\n", " ")[:500] + "\n")
        answers.flush()


def prepare(call: Callable[[], object]) -> int:
    """Compile what `call` would launch and the cache lacks; how many that were.

    Where that fails the kernels are compiled as they are needed, one by one; a warning says so.
    """
    began = time.monotonic()
    try:
        lacking = [build for build in noted(call) if not is_cached(build)]
        if lacking:
            log.info("compiling %d kernels for this card, once", len(lacking))
            compile_all(lacking)
            log.info("compiled in %.0f s", time.monotonic() - began)
        return len(lacking)
    except Exception as error:  # Triton's inner interface, which other releases may change
        log.warning("kernels are not compiled ahead, the first requests wait for them: %s", error)
        return 0
