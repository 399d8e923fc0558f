"""Mixed requests against a small torch model: outputs equal solo runs, nothing is lost. See `tests.tools.soak`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from ninfer_core.types import Request, Sampling
from tests.tools import soak


def run(capsys, *arguments):
    code = soak.main(["--drafts", "1", "--tokens", "4", "--grown", "128", *arguments])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["faults"]
    return report


@pytest.mark.timeout(1200)
def test_mixed_requests_end_right_and_leave_nothing(capsys):
    report = run(capsys, "--requests", "300", "--seed", "3")
    ends = report["ends"]
    assert ends["finished"] > 180 and ends["cancelled"] > 15 and ends["overdue"] > 1 and ends["refused"] > 1
    assert report["cached_tokens"] > 5000 and "failed" not in ends


def test_a_run_ends_in_time(capsys):
    report = run(capsys, "--requests", "1000000", "--seed", "5", "--seconds", "1")
    assert 0 < report["requests"] < 100_000 and sum(report["ends"].values()) >= report["requests"]
    assert report["memory"][-1]["requests"] == report["requests"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_mixed_requests(capsys):
    run(capsys, "--requests", "4000", "--seed", "4", "--model", "demo")


def test_what_is_wrong_is_found(monkeypatch, capsys):
    """Another output, a lost page, an object that somebody keeps: each is a fault and an exit status of 1."""
    kept, real = [], soak.outcome

    def other(handle):
        kept.append(handle)
        return (len(kept), *real(handle))

    monkeypatch.setattr(soak, "outcome", other)
    audit = soak._audit

    def leak(client, report, before):
        client.reuse.pages.take(1)
        audit(client, report, before)

    monkeypatch.setattr(soak, "_audit", leak)
    monkeypatch.setattr(soak, "CASES", 8)
    assert soak.main(["--requests", "60", "--drafts", "0", "--tokens", "2"]) == 1
    faults = "\n".join(json.loads(capsys.readouterr().out)["faults"])
    assert "instead of" in faults and "pages are free" in faults and "RequestHandle" in faults


def test_outputs_of_random_weights_are_compared_by_their_tokens():
    given = argparse.Namespace(random="demo", sequences=2, drafts=1, chunk=64, context=256)
    with soak.open_client(given) as client:
        request = Request(prompt=(5, 6, 7), max_tokens=3, sampling=Sampling(temperature=1.0, seed=1))
        first, *rest = (
            client.solo(replace(request, sampling=Sampling(temperature=1.0, seed=seed))) for seed in (1, 1, 2)
        )
        assert len(first[0].split()) == 3 and rest[0] == first != rest[1]
        greedy = {client.solo(replace(request, sampling=Sampling(temperature=0.0, seed=seed)))[0] for seed in (1, 2)}
        assert len(greedy) == 1
