"""Named engines of a process, and the functions that need no weights."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_support import TOOL, raw
from tiny import tiny_artifact

from ninfer_core.engine import EngineOptions, get_engine, parse_output, render_prompt
from ninfer_core.errors import (
    EngineClosedError,
    EngineConflictError,
    MemoryPlanError,
)
from ninfer_core.types import Message


@pytest.fixture
def names():
    made = []

    def get(name, **options):
        spec = EngineOptions(model=str(tiny_artifact()), device="cpu", threads=1, **options) if options else None
        engine = get_engine(name, spec)
        made.append(engine)
        return engine

    yield get
    for engine in made:
        engine.close()


def test_a_named_engine_is_made_once_and_loaded_late(names):
    engine = names("a", draft_tokens=1)
    assert names("a") is engine and names("a", draft_tokens=1) is engine
    assert engine.state == "new" and engine.context_length == 1024 and engine.count_tokens("hi") > 1
    assert engine.profile["tool_calling"] and "ninfer-demo" in engine.served_names and engine.state == "new"
    assert engine.health() == {"status": "new"} and engine.stats() == {}
    assert engine.generate(raw(tokens=2)).usage.completion_tokens == 2
    assert engine.state == "ready" and engine.health()["status"] == "ok"
    engine.close()
    engine.close()
    assert engine.state == "closed"
    with pytest.raises(EngineClosedError):
        engine.submit(raw())
    assert names("a", draft_tokens=2) is not engine


def test_other_options_under_one_name_are_refused(names):
    names("a", draft_tokens=1)
    with pytest.raises(EngineConflictError, match="draft_tokens: 2 != 1"):
        names("a", draft_tokens=2)


def test_one_loaded_engine_per_process(names):
    first, second = names("a", draft_tokens=1), names("b", draft_tokens=2)
    first.load()
    with pytest.raises(EngineConflictError, match="'a'"):
        second.load()
    first.close()
    second.load()
    assert second.state == "ready"


def test_one_load_for_many_callers(names):
    engine = names("a", draft_tokens=1)
    with ThreadPoolExecutor(6) as pool:
        loaded = list(pool.map(lambda _: engine.load(), range(6)))
    assert len({id(e) for e in loaded}) == 1
    assert asyncio.run(engine.aload()) is loaded[0]


def test_a_failed_load_raises_the_same_error_for_all(names):
    engine = names("a", memory=1000)
    entered = threading.Event()
    loader = engine._registry.loader

    def slow(spec):
        entered.set()
        time.sleep(0.1)
        return loader(spec)

    engine._registry.loader = slow
    errors = []

    def load():
        try:
            engine.load()
        except MemoryPlanError as error:
            errors.append(error)

    try:
        first = threading.Thread(target=load)
        first.start()
        assert entered.wait(10)
        others = [threading.Thread(target=load) for _ in range(3)]
        for thread in others:
            thread.start()
        for thread in (first, *others):
            thread.join(20)
    finally:
        engine._registry.loader = loader
    assert len(errors) == 4 and len({id(e) for e in errors}) == 1
    assert engine.state == "failed"
    with pytest.raises(MemoryPlanError):
        engine.submit(raw())


# module functions


def test_render_and_parse_need_no_weights():
    path = str(tiny_artifact())
    text = render_prompt([Message("user", "Hi")], model=path)
    assert text.endswith("<think>\n") and "Hi" in text
    assert "</think>" in render_prompt([{"role": "user", "content": "Hi"}], thinking=False, model=path)
    message = parse_output(
        "Plan.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        [TOOL],
        thinking=True,
    )
    assert message.reasoning == "Plan." and message.tool_calls[0].arguments == {"command": "ls"}
    assert parse_output("<tool_call>").text == "<tool_call>"


def test_importing_the_engine_does_not_import_torch():
    program = (
        "import sys, ninfer_core; ninfer_core.Engine; ninfer_core.get_engine('x'); import ninfer_core.testing;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
