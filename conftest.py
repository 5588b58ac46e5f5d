"""For all tests: the sample of the exhaustive ones (tests/sampling.py), skips that are failures (tests/lanes.py), signals."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

from tests.lanes import must_run

pytest_plugins = ["tests.sampling"]


def pytest_configure() -> None:
    """Let the programs under test have default signal actions, also where the tests run in the background.

    A shell starts a background job with SIGINT and SIGQUIT ignored, `nohup` with SIGHUP ignored, and children inherit that.
    An empty handler ignores the signal here as well, but is the default action after exec.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if why := must_run(reason):
            report.outcome, report.longrepr = "failed", why
    return report
