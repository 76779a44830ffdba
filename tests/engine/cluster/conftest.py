"""The shared suite of schedulers: which of its cases `make test` leaves to `make test-engines`, and how many passed."""

from collections import Counter

import pytest

SUITE = "conformance.scheduler"
START_S = 900
"""A real cluster may take minutes to start on a busy machine, which counts for the first test on it."""
_cases: dict[str, str] = {}
"""The engine of each case that was chosen."""
_passed: Counter[str] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(START_S))
        module = getattr(getattr(item, "function", None), "__module__", "")
        if module.startswith(SUITE):
            _cases[item.nodeid] = item.path.stem.removeprefix("test_")
            if module != SUITE:
                item.add_marker(pytest.mark.engines)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        _cases.pop(item.nodeid, None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and report.nodeid in _cases:
        _passed[_cases[report.nodeid]] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    chosen = Counter(_cases.values())
    shown = ", ".join(f"{engine} {_passed[engine]} of {count}" for engine, count in sorted(chosen.items()))
    if shown:
        terminalreporter.write_line(f"cases of the shared suite of schedulers that passed: {shown}")
