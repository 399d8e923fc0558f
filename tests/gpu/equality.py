"""The tests that need a GPU, counted: `python -m tests.gpu.equality [--few]`. What failed stands among the figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.bench.common import Record, parser_of


class Outcomes:
    """Collects what became of every test."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for every phase of a test."""
        name = report.nodeid.rsplit("/", 1)[-1]
        if report.failed:
            self.failed[name] = str(report.longrepr)[-600:]
        elif report.skipped:
            self.skipped.append(name)
        elif report.when == "call":
            self.passed.append(name)


def main() -> int:
    """Run them; 0 if none failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--few", action="store_true", help="one number of drafts: compiles what the tests launch")
    options = parser.parse_args()
    record = Record(options.json, "cuda" if torch.cuda.is_available() else "cpu")
    chosen = ["-k", "windows or drafts_and_neighbours and 3"] if options.few else []
    outcomes = Outcomes()
    folder = str(Path(__file__).parent)
    code = pytest.main(["-q", "-p", "no:cacheprovider", folder, *chosen], plugins=[outcomes])
    record.add("passed", len(outcomes.passed))
    record.add("skipped", len(outcomes.skipped))
    record.add("failed", outcomes.failed)
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


if __name__ == "__main__":
    sys.exit(main())
