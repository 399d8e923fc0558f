"""One fake hub per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fake_hub import FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    yield hub
    hub.close()
