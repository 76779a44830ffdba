"""What a run of tests leaves in its cache folder, and the summary of several runs: counts, seconds, skips by reason.

`make test` runs suites side by side, each with a cache folder of its own. Its last lines are this summary, because a
skip that is printed in the middle of four suites is not read.

    python tests/outcomes.py CACHE_DIR ...     of runs with `-o cache_dir=...`
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_OUTCOME = "trueline/outcome"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that came to its end. `lastfailed`: names of what failed; an error in a fixture's end has none."""

    suite: str
    status: int
    passed: int
    failed: int
    seconds: float
    skipped: dict[str, int] = field(default_factory=dict)
    """Skipped tests by reason."""
    lastfailed: tuple[str, ...] = ()


class Recorder:
    """A pytest plugin that keeps a run's outcome in the run's cache. A run that breaks off leaves none."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._skipped: dict[str, str] = {}
        self._began = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        _keep(session, None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole file
            self._skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skip(report)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def _skip(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        place = report.longrepr
        reason = place[2] if isinstance(place, tuple) else str(place)
        self._skipped[report.nodeid] = reason.removeprefix("Skipped: ")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        outcome = {
            "status": int(exitstatus),
            "passed": len(self._passed),
            "failed": session.testsfailed,
            "seconds": time.monotonic() - self._began,
            "skipped": Counter(self._skipped.values()),
        }
        _keep(session, outcome)


def _keep(session: pytest.Session, value: object) -> None:
    cache = getattr(session.config, "cache", None)  # not with -p no:cacheprovider
    if cache is not None:
        cache.set(_OUTCOME, value)


def outcome_of(folder: Path) -> Outcome | None:
    """The outcome of the run with this cache folder; None when it did not come to its end."""
    kept = _read(folder / "v" / _OUTCOME)
    if kept is None or kept["status"] not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return None
    failed = _read(folder / "v" / "cache" / "lastfailed") or {} if kept["status"] else {}
    return Outcome(suite=folder.name, lastfailed=tuple(failed), **kept)


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def summary(folders: list[Path]) -> str:
    """The runs as a table, failures by name, and skips by reason with their number. The last line counts all."""
    runs = {folder.name: outcome_of(folder) for folder in folders}
    lines = [f"{'suite':<16}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for suite, run in runs.items():
        if run is None:
            lines.append(f"{suite:<16}  did not come to its end")
            continue
        skipped = sum(run.skipped.values())
        lines.append(f"{suite:<16}{run.passed:>8}{run.failed:>8}{skipped:>9}{run.seconds:>9.0f}")
        for reason, count in run.skipped.items():
            reasons[reason][suite] += count
    ended = [run for run in runs.values() if run is not None]
    lines += [f"failed: {name}" for run in ended for name in run.lastfailed]
    for reason, suites in sorted(reasons.items(), key=lambda item: (-item[1].total(), item[0])):
        lines.append(f"skipped {suites.total():>4}  {reason}")
    skipped = sum(suites.total() for suites in reasons.values())
    broken = len(runs) - len(ended)
    passed, failed = sum(run.passed for run in ended), sum(run.failed for run in ended) + broken
    return "\n".join([*lines, f"{passed} passed, {failed} failed, {skipped} skipped"])


if __name__ == "__main__":
    print(summary([Path(argument) for argument in sys.argv[1:]]))
