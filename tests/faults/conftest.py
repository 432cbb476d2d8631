"""Counts of the fault harness, as a result among those of the benchmarks."""

from pathlib import Path

from benchmarks.harness import describe_machine, describe_versions, write_result
from tests.faults.cases import CASES
from tests.faults.harness import MODES


def pytest_addoption(parser):
    parser.addoption(
        "--fault-results", type=Path, metavar="FOLDER", help="write the counts of faults here"
    )
    parser.addoption(
        "--fault-points", type=int, metavar="N", help="so many of each case and mode, spread evenly"
    )


def pytest_terminal_summary(terminalreporter, config):
    folder = config.getoption("fault_results", None)
    outcomes = [
        outcome
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, outcome in report.user_properties
        if name == "outcome"
    ]
    if folder is None or not outcomes or hasattr(config, "workerinput"):
        return
    outcomes.sort(key=lambda own: ([*CASES].index(own["case"]), MODES.index(own["mode"])))
    machine = describe_machine()
    del machine["cores"], machine["load_average"]  # which no count depends on
    head = {"machine": machine, "versions": describe_versions()}
    path = write_result("faults", {**head, "outcomes": outcomes}, folder)
    terminalreporter.write_line(f"written to {path}")
