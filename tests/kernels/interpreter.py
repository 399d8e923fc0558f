"""Programs of cases under Triton's interpreter, without what it repeats to no effect: half of its time on small tensors."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from triton.runtime import interpreter

patched: set[int] = set()
"""Modules whose functions were called by a kernel before; what a call patches in them stays."""


def call(function: Any, *arguments: Any, **named: Any) -> Any:
    """A jitted function called by another: patch the language its module sees once, not at every call."""
    module = id(function.fn.__globals__)
    if module not in patched:
        interpreter._patch_lang(function.fn)
        patched.add(module)
    return function.rewrite()(*arguments, **named)


def quicken() -> None:
    """For this process: as `call`, and no overflow checks, whose result the interpreter drops without `debug`."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "with debug the overflow checks count"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = call


def run(cases: Mapping[str, Callable[[], None]], names: Sequence[str]) -> None:
    """Run the named cases, or all, and print one JSON line each."""
    torch.set_num_threads(1)
    quicken()
    for name in names or cases:
        torch.manual_seed(0)
        began = time.process_time()
        try:
            cases[name]()
            fault = None
        except Exception:
            fault = traceback.format_exc()[-3000:]
        print(json.dumps({"case": name, "fault": fault, "seconds": round(time.process_time() - began, 1)}), flush=True)
