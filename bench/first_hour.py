"""The first hour of a newcomer: the README and the tutorials in a clean clone and environment, then eight tasks.

    make bench-first-hour [BENCH="--only quickstart,help"]

Sections: `quickstart` (clone, install, docs/start/quickstart.md), `pages` (README and tutorials by `docs.run`, links of
the site), `serve` (an environment that only serves: size, start), `help` (each verb's --help), `tasks`
(bench/newcomer/*.sh, each with its own check). Packages come from the
package cache. Prints a table and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _table import table

ROOT = Path(__file__).parents[1]
SKIPPED = 77
"""Exit status of a task that cannot be done on this machine, whose last line says why."""
GOALS = {
    "quickstart_s": "<= 120",
    "tasks_done": "8",
    "serve_install_mb": "<= 350",
    "ready_s": "<= 0.5",
    "help_s": "<= 0.3",
    "broken_links": "0",
}
Figures = dict[str, Any]


def call(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `command` in `folder` without what this process has of Trueline's settings; both streams are `stdout`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRUELINE_", "PYTHON", "VIRTUAL_"))
    }
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=folder, env={**kept, **variables}, text=True, check=False, **streams)


def last_json(done: subprocess.CompletedProcess[str]) -> Figures:
    """The JSON object in the last line of what was printed."""
    try:
        return dict(json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1]))
    except (ValueError, IndexError):
        raise SystemExit(f"{done.args} printed no JSON object last:\n{done.stdout[-4000:]}") from None


class FirstHour:
    """A clean clone with an environment of its own, and what is measured in it."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "trueline"
        self.serving = folder / "serving"
        began = time.monotonic()
        self._must(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(self.clone)], folder)
        self._must(["make", "setup"], self.clone)
        self.install_s = time.monotonic() - began
        self.binaries = self.clone / ".venv" / "bin"

    def _must(self, command: list[str], folder: Path) -> str:
        done = call(command, folder)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout

    def _pages(self, *pages: str) -> Figures:
        done = call([str(self.binaries / "python"), "-m", "docs.run", *pages], self.clone, PYTHONPATH="tests")
        print(done.stdout, flush=True)
        return last_json(done)

    def quickstart(self) -> Figures:
        """From the clone to an answer by curl; `quickstart_install_s` of it is the installation."""
        found = self._pages("docs/start/quickstart.md")
        total = None if found["failed"] else round(self.install_s + found["seconds"], 1)
        return {"quickstart_s": total, "quickstart_install_s": round(self.install_s, 1)}

    def pages(self) -> Figures:
        """Blocks of README and tutorials, those that did what they show, and links of the site that lead nowhere."""
        found = self._pages()
        built = call([str(self.binaries / "python"), "-m", "docs.site"], self.clone, PYTHONPATH="tests")
        links = last_json(built)["broken_links"]
        return {
            "blocks_run": found["blocks_run"],
            "blocks": found["blocks"],
            "pages_failed": found["failed"],
            "broken_links": links,
        }

    def serve(self) -> Figures:
        """Megabytes of an environment that only serves, without pip; seconds from start to ready of a small bundle."""
        self._must([sys.executable, "-m", "venv", str(self.serving)], self.clone)
        python = str(self.serving / "bin" / "python")
        uv = [str(self.binaries / "uv"), "pip", "install", "-q", "--python", python, "-c", "constraints.txt"]
        empty = _megabytes(self.serving)
        self._must([*uv, ".[serve]"], self.clone)
        size = _megabytes(self.serving) - empty
        script = "bench/newcomer/ready.py"
        bundle = self.clone / "small.bundle"
        self._must([str(self.binaries / "python"), script, "seal", str(bundle)], self.clone)
        taken = [float(self._must([python, script, "start", str(bundle)], self.clone).split()[-1]) for _ in range(5)]
        return {"serve_install_mb": round(size), "ready_s": sorted(taken)[2]}

    def help(self) -> Figures:
        """The slowest --help of any verb: the median of three calls of each."""
        script = "from trueline.cli import app; print(*(' '.join(path) for path in app.known_tables()), sep='\\n')"
        verbs = self._must([str(self.binaries / "python"), "-c", script], self.clone).splitlines()
        slowest = max((self._help_s(verb.split()), verb) for verb in verbs)
        return {"help_s": round(slowest[0], 3), "help_slowest": slowest[1]}

    def _help_s(self, verb: list[str]) -> float:
        taken = []
        for _ in range(3):
            began = time.monotonic()
            self._must([str(self.binaries / "trueline"), *verb, "--help"], self.clone)
            taken.append(time.monotonic() - began)
        return sorted(taken)[1]

    def tasks(self) -> Figures:
        """The tasks that were done, each in an empty folder, by the exit status of its script."""
        done: dict[str, float | None] = {}
        skipped: dict[str, str] = {}
        for script in sorted((self.clone / "bench" / "newcomer").glob("*.sh")):
            with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
                began = time.monotonic()
                path = f"{self.binaries}:{os.environ['PATH']}"
                outcome = call(
                    ["bash", "-euo", "pipefail", str(script)],
                    Path(folder),
                    PATH=path,
                    HOME=folder,
                    CLONE=str(self.clone),
                )
            done[script.stem] = None if outcome.returncode else round(time.monotonic() - began, 1)
            if outcome.returncode == SKIPPED:
                skipped[script.stem] = outcome.stdout.rstrip().rsplit("\n", 1)[-1]
            elif outcome.returncode:
                print(f"task {script.stem} was not done:\n{outcome.stdout[-2000:]}", flush=True)
        count = sum(seconds is not None for seconds in done.values())
        return {"tasks_done": count, "tasks": done, "tasks_skipped": skipped}


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 1e6


def main() -> int:
    sections = ("quickstart", "pages", "serve", "help", "tasks")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(sections), help="sections, with commas")
    chosen = parser.parse_args().only.split(",")
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        first_hour = FirstHour(Path(folder))
        for name in sections:
            if name in chosen:
                section: Callable[[], Figures] = getattr(first_hour, name)
                figures |= section()
    rows = [(name, figures.get(name, "-"), goal) for name, goal in GOALS.items()]
    rows.append(("blocks run", f"{figures.get('blocks_run', '-')} of {figures.get('blocks', '-')}", "all"))
    print(table(["what", "measured", "goal"], rows))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
