"""Tests that failed in a run are run once more, alone; which of them pass then is said: they are flaky, and a bug.

A run on a machine that others share fails of a single test in thousands now and then, and says by it nothing of the
change. That such a test has to be mended, and which it is, is printed; who gates a change by this decides by what fails
twice. It forgives three tests at most, and only where the run came to its end: a run that broke off proves nothing.

    python tests/again.py CACHE_DIR ...     of runs with `-o cache_dir=...`; exits with 0, or with 1 for what is left
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST = 3
_ENDED = "trueline/ended"


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    _keep(session, None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _keep(session, {"status": int(exitstatus), "failed": session.testsfailed})


def _keep(session: pytest.Session, value: object) -> None:
    cache = getattr(session.config, "cache", None)  # not with -p no:cacheprovider
    if cache is not None:
        cache.set(_ENDED, value)


def failed_in(folders: list[Path]) -> list[str]:
    """The tests that failed in these runs. Raises ValueError when that is not all that went wrong, or too many did."""
    found: list[str] = []
    for folder in folders:
        ended = _read(folder / "v" / _ENDED)
        if ended is None or ended["status"] not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise ValueError(f"the run of {folder.name} did not come to its end; what it failed of is not known")
        failed = list(_read(folder / "v" / "cache" / "lastfailed") or {}) if ended["status"] else []
        if len(failed) < ended["failed"] or not all("::" in name for name in failed):
            raise ValueError(f"{ended['failed']} failures in {folder.name}, of which {len(failed)} name a test")
        found += failed
    if len(found) > MOST:
        raise ValueError(f"{len(found)} tests failed; at most {MOST} are run again: that many are no accident")
    return found


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def main(folders: list[Path]) -> int:
    try:
        failed = failed_in(folders)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not failed:
        print("no test failed: there is nothing to run again")
        return 0
    print(f"once more, alone: {', '.join(failed)}", flush=True)
    if subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed], check=False).returncode:
        return 1
    print("FLAKY, to be mended: failed beside the others, passed alone: " + ", ".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
