"""A light load: every chunk arrives and the event loop stays free. `tests/tools/server_load.py` measures in full."""

from __future__ import annotations

from tests.tools.server_load import measure


def test_many_chunks_to_one_client() -> None:
    found = measure(1, 4000, None, 1)
    assert found["events"] == 4000 + 3, "the role, the end, the end mark"
    assert found["events_per_second"] > 1500 and found["lag_max_ms"] < 400


def test_the_event_loop_is_free_under_many_clients() -> None:
    found = measure(32, 20, 20.0, 1)
    assert found["events"] == 32 * 23
    assert found["lag_p50_ms"] < 50 and found["lag_p99_ms"] < 400
