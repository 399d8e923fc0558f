"""The code blocks of the adapters' pages run, in order, on the demo model; what they list is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(("page", "expected"), [("langchain.md", "Person("), ("llama_index.md", "Person(")])
def test_page(page: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    from llama_index.core import set_global_tokenizer

    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    scope: dict[str, object] = {"__name__": "docs"}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), scope)
    finally:
        set_global_tokenizer(None)
    assert len(blocks) >= 5 and expected in capsys.readouterr().out


def test_every_item_of_the_standard_suite_is_listed_once() -> None:
    from langchain_tests.integration_tests import ChatModelIntegrationTests

    section = (DOCS / "langchain.md").read_text().split("## Standard tests")[1].split("| Setting |")[0]
    named = re.findall(r"`(\w+)`", section.split("Skipped are")[1])
    items = {name.removeprefix("test_") for name in dir(ChatModelIntegrationTests) if name.startswith("test_")}
    assert sorted(name for name in named if name != "test_") == sorted(items)
