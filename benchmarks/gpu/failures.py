"""A pytest plugin that prints why a test failed at once: a run that is ended prints no summary."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the traceback of a failed test or of its set-up."""
    if report.failed:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext}", flush=True)
