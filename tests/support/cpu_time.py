"""Adds up the CPU time of tests, and names those that take more than one without the mark `slow` may.

CPU time, since that of the clock says how busy a machine is. No test fails by it: machines differ.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import forks
import pytest

MOST = 4.0
"""Seconds of CPU time of a test without the mark."""


def _cpu() -> float:
    return sum(os.times()[:4])  # this process, and the processes that it has waited for


_since = 0.0


def pytest_runtest_logstart() -> None:
    """Begin to count."""
    global _since
    _since = _cpu()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Write into the report of each phase of a test the CPU time since the one before."""
    global _since
    outcome = yield
    before, _since = _since, _cpu()
    outcome.get_result().cpu = _since - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the sum, and a line for each test that should be shorter or marked."""
    seconds, marked = Counter[str](), set[str]()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += getattr(report, "cpu", 0.0)
            if "slow" in report.keywords:
                marked.add(report.nodeid)
    written = Path(os.environ.get(forks.FOLDER, "/nowhere"), forks.TIMES)
    for line in written.read_text(encoding="utf-8").splitlines() if written.exists() else ():
        test, took = json.loads(line)
        seconds[test.rpartition(" (")[0]] += took
    if seconds:
        terminalreporter.write_line(f"CPU time of tests: {sum(seconds.values()) / 60:.1f} minutes")
    for test, took in seconds.most_common():
        if took > MOST and test not in marked:
            terminalreporter.write_line(f"not marked slow: {took:.1f} s {test}")
