"""For all tests: the sample of the exhaustive ones (tests/sampling.py), and skips that are failures (tests/lanes.py)."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.lanes import must_run

pytest_plugins = ["tests.sampling"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if why := must_run(reason):
            report.outcome, report.longrepr = "failed", why
    return report
