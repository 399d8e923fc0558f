"""The framework examples run on the demo model and print something sensible."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {
    "langchain_chain.py": "",
    "langchain_agent.py": "Oslo",
    "langchain_structured.py": "Person(",
    "langchain_rag.py": "found: The coffee machine",
    "langgraph_stream.py": "",
    "langchain_swap.py": "",
    "llama_index_swap.py": "",
    "llama_index_chat.py": "Person(",
    "llama_index_agent.py": "tool: get_weather",
    "llama_index_rag.py": "found: The coffee machine",
}


def test_every_framework_example_is_run_and_listed() -> None:
    found = {path.name for path in EXAMPLES.glob("lang*.py")} | {path.name for path in EXAMPLES.glob("llama*.py")}
    assert found == set(EXPECTED)
    index = (EXAMPLES / "README.md").read_text()
    assert all(name in index for name in found)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from llama_index.core import set_global_tokenizer

    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        set_global_tokenizer(None)
    printed = capsys.readouterr().out
    assert len(printed.strip()) > 3 and EXPECTED[name] in printed
