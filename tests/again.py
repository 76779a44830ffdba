"""Tests that failed in a run are run once more, alone; which of them pass then is said: they are flaky, and a bug.

A run on a machine that others share fails of a single test in thousands now and then, and says by it nothing of the
change. That such a test has to be mended, and which it is, is printed; who gates a change by this decides by what fails
twice. It forgives three tests at most, and only where the run came to its end: a run that broke off proves nothing.

    python tests/again.py CACHE_DIR ...     of runs with `-o cache_dir=...`; exits with 0, or with 1 for what is left
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from outcomes import outcome_of

MOST = 3


def failed_in(folders: list[Path]) -> list[str]:
    """The tests that failed in these runs. Raises ValueError when that is not all that went wrong, or too many did."""
    found: list[str] = []
    for folder in folders:
        run = outcome_of(folder)
        if run is None:
            raise ValueError(f"the run of {folder.name} did not come to its end; what it failed of is not known")
        if len(run.lastfailed) < run.failed or not all("::" in name for name in run.lastfailed):
            raise ValueError(f"{run.failed} failures in {folder.name}, of which {len(run.lastfailed)} name a test")
        found += run.lastfailed
    if len(found) > MOST:
        raise ValueError(f"{len(found)} tests failed; at most {MOST} are run again: that many are no accident")
    return found


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
    if subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *failed], check=False
    ).returncode:
        return 1
    print("FLAKY, to be mended: failed beside the others, passed alone: " + ", ".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
