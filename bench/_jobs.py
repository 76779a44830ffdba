"""Measures jobs: listeners record every applied step, kill workers or the master, and compute what that costs.

Times come from the workers' clocks (`at_ns` of a step, CLOCK_MONOTONIC, which all processes of a machine share), so the
time that a report takes does not count.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _machine import peak_bytes, start_move
from trueline import events
from trueline.train.api import TrainResult, train

HERE = Path(__file__).parent
Fields = Mapping[str, Any]
LAPS = ("data_ms", "compute_ms", "wait_ms", "commit_ms")
"""What a step consists of, from its begin."""
STILL_S = 90
"""A job without a step for this long has failed."""


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables for the recipes, which read them in workers."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def journal(job_dir: Path) -> list[tuple[str, Fields]]:
    with sqlite3.connect(job_dir / "journal.sqlite") as log:
        return [(kind, json.loads(body)) for kind, body in log.execute("SELECT kind, body FROM log ORDER BY seq")]


class Watch:
    """The running workers and every applied step, from the job's events."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.steps: list[Fields] = []
        self.job_dir = Path()

    def __call__(self, name: str, fields: Fields) -> None:
        if name == "worker.running":
            self.pids[fields["worker"]] = fields["pid"]
        elif name in ("worker.lost", "worker.killed"):  # it ended, or it hung and was ended
            self.pids.pop(fields["worker"], None)
        elif name == "step.applied":
            signal.alarm(STILL_S)
            self.steps.append(fields)
            self.applied(fields)
        self.heard(name, fields)

    def applied(self, step: Fields) -> None:
        """Called for each step that is reported."""

    def heard(self, name: str, fields: Fields) -> None:
        """Called for each event."""

    def run(self, folder: Path, recipe: Path, **settings: Any) -> TrainResult:
        """Trains `recipe` in a new job while this listens."""
        self.job_dir = folder / f"job-{time.monotonic_ns()}"
        signal.signal(signal.SIGALRM, self._stands_still)
        signal.alarm(STILL_S)
        try:
            with events.listening(self):
                return train(recipe, job_dir=self.job_dir, **settings)
        finally:
            signal.alarm(0)

    def _stands_still(self, *_: object) -> None:
        raise TimeoutError(f"no step for {STILL_S} s after step {len(self.steps)}")

    def gaps_ms(self, skip: int = 10) -> list[float]:
        """Times from step to step, without the first `skip`."""
        at = [step["at_ns"] for step in self.steps[skip:]]
        return [(after - before) / 1e6 for before, after in itertools.pairwise(at)]


class Killer(Watch):
    """Kills a random worker at a random instant, `settle` steps or more after `full` workers trained together again."""

    def __init__(self, kills: int, *, full: int, settle: int = 30, with_signal: int = signal.SIGKILL) -> None:
        super().__init__()
        self.left, self.full, self.settle, self.signal = kills, full, settle, with_signal
        self.together = self.killed_ns = 0
        self.resumed = False
        self.resumed_ms: list[float] = []
        """Kill to the next applied step, by any worker."""
        self.replaced_ms: list[float] = []
        """Kill to the first step in which the replacement took part."""
        self.dice = random.Random(0)

    def due(self) -> bool:
        return self.together >= self.settle

    def applied(self, step: Fields) -> None:
        if self.killed_ns:
            self._recovering(step)
            return
        self.together = self.together + 1 if step["workers"] == self.full else 0
        if self.left and len(self.pids) == self.full and self.due():
            self.left, self.together, self.resumed = self.left - 1, 0, False
            time.sleep(self.dice.uniform(0, 0.03))  # reports come in bunches; the kill is at any instant
            self.killed_ns = time.monotonic_ns()
            self.kill()

    def kill(self) -> None:
        os.kill(self.dice.choice(sorted(self.pids.values())), self.signal)

    def _recovering(self, step: Fields) -> None:
        since_ms = (step["at_ns"] - self.killed_ns) / 1e6
        if not self.resumed and step["gap_ms"] and since_ms > 0:  # a gap: the first step of a generation
            self.resumed = True
            self.resumed_ms.append(since_ms)
        if self.resumed and step["workers"] == self.full:
            self.replaced_ms.append(since_ms)
            self.killed_ns = 0


class FormingKiller(Killer):
    """Kills a second worker while the survivors of the first form their group, and times from that kill."""

    def __init__(self, kills: int, *, full: int) -> None:
        super().__init__(kills, full=full)
        self.forming_ms: list[float] = []
        self.missed = 0
        """Second kills that came after the group had already applied a step."""
        self._survivors: list[int] = []
        self._second_ns = self._generation = 0

    def heard(self, name: str, fields: Fields) -> None:
        if name == "worker.lost" and self.killed_ns and not self._second_ns:
            self._survivors = sorted(self.pids.values())
        elif name == "group.released" and self._survivors and not self._second_ns:
            time.sleep(self.dice.uniform(0, 0.01))  # forming takes some 10 ms
            self._second_ns, self._generation = time.monotonic_ns(), fields["generation"]
            os.kill(self.dice.choice(self._survivors), signal.SIGKILL)
        elif name == "step.applied" and self._second_ns and fields["generation"] >= self._generation:
            if fields["generation"] == self._generation:
                self.missed += 1
            else:
                self.forming_ms.append((fields["at_ns"] - self._second_ns) / 1e6)
            self._survivors, self._second_ns = [], 0


class PacedKiller(Killer):
    """Kills one worker every `every_s`, for goodput."""

    def __init__(self, kills: int, *, full: int, every_s: float) -> None:
        super().__init__(kills, full=full, settle=1)
        self.every_s, self.last = every_s, 0.0

    def due(self) -> bool:
        self.last = self.last or time.monotonic()
        if time.monotonic() < self.last + self.every_s:
            return False
        self.last += self.every_s
        return True

    def goodput(self) -> float:
        """Time of the steps at their undisturbed pace, over the time that they took."""
        pairs = list(itertools.pairwise(self.steps[5:]))
        calm = [(b["at_ns"] - a["at_ns"]) for a, b in pairs
                if a["workers"] == b["workers"] == self.full and a["generation"] == b["generation"]]  # fmt: skip
        return statistics.fmean(calm) * len(pairs) / (pairs[-1][1]["at_ns"] - pairs[0][0]["at_ns"])


class MasterKiller(Watch):
    """Kills the master at step `at_step`, and notes when its successor accepts a worker's report."""

    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.at_step, self.killed_ns, self.back_ns, self.lost = at_step, 0, 0, False

    def heard(self, name: str, fields: Fields) -> None:
        self.lost = self.lost or name == "master.lost"
        if self.killed_ns and self.lost and not self.back_ns and name == "step.applied":
            self.back_ns = time.monotonic_ns()
        if name == "step.applied" and fields["step"] >= self.at_step and not self.killed_ns:
            self.killed_ns = time.monotonic_ns()
            os.kill(json.loads((self.job_dir / "master.json").read_text())["pid"], signal.SIGKILL)

    def longest_ms(self, start_ns: int, length_s: float) -> float:
        """The longest gap between two steps that overlaps the window."""
        stop_ns = start_ns + int(length_s * 1e9)
        # The journal has what a dying master may not have told any more.
        pairs = itertools.pairwise(body["at_ns"] for kind, body in journal(self.job_dir) if kind == "COMMIT")
        return max((after - before) / 1e6 for before, after in pairs if after > start_ns and before < stop_ns)


class SizedKiller(Watch):
    """Kills a worker at a random instant whenever all have shared `settle` steps, while `reserve` steps are left.

    Unlike `Killer` it counts a replacement as back when the step has records of its own, and not when it only takes
    part without a state; and it times every step of the others meanwhile. Between kills `move` is copied over loopback.
    """

    def __init__(self, *, full: int, settle: int, reserve: int, move_bytes: int) -> None:
        super().__init__()
        self.full, self.settle, self.reserve, self.move_bytes = full, settle, reserve, move_bytes
        self.dice = random.Random(0)
        self.killed_ns = self.killed_generation = self.before_ns = 0
        self.together = 0
        self.resumed_ms: list[float] = []
        """Kill to the next applied step."""
        self.given_ms: list[float] = []
        """Kill to the begin of the first step with records of the replacement: it has the state, and they are given to
        it."""
        self.joined_ms: list[float] = []
        """Kill to the end of that step."""
        self.longest_ms: list[float] = []
        """For each kill, the longest step of the others from it until the replacement's first one."""
        self.usual: list[float] = []
        """Milliseconds of undisturbed steps."""
        self.moved_s: list[float] = []
        self.kills = self.given_up = 0
        """Kills; replacements that the job itself killed."""
        self.quarantined = False
        self.peaks: dict[str, int] = {}
        """Most resident memory of each worker."""
        self._generation, self._sharing, self._at_ns = -1, False, 0
        self._move: subprocess.Popen[str] | None = None

    def heard(self, name: str, fields: Fields) -> None:
        self.given_up += name == "worker.killed"
        self.quarantined = self.quarantined or name == "worker.quarantined"
        for ref, pid in self.pids.items():
            self.peaks[ref] = max(self.peaks.get(ref, 0), peak_bytes(pid))

    def applied(self, step: Fields) -> None:
        first = step["generation"] != self._generation
        shares = json.loads(step.get("shares", "[]"))
        shared = all(rate > 0 for rate in json.loads(step["rates"])) if first else self._sharing
        self._generation, self._sharing = step["generation"], all(shares) if shares else shared
        gap_ms = (step["at_ns"] - max(self._at_ns, self.killed_ns)) / 1e6
        self._at_ns = step["at_ns"]
        whole = shared and step["workers"] == self.full
        if self.killed_ns:
            self._recovering(step, gap_ms, whole=whole)
            return
        self.together = self.together + 1 if whole else 0
        if self.together > 3 and not self._moving():
            self.usual.append(gap_ms)
        if self.together == 1 and self.move_bytes:
            self._move = start_move(self.move_bytes)
        left = step["total"] - step["step"]
        if self.together >= self.settle and not self._moving() and left > self.reserve and len(self.pids) == self.full:
            time.sleep(self.dice.uniform(0, statistics.median(self.usual) / 1e3 if self.usual else 0))
            self.killed_ns, self.killed_generation = time.monotonic_ns(), self._generation
            self.kills, self.together = self.kills + 1, 0
            self.longest_ms.append(0.0)
            os.kill(self.dice.choice(sorted(self.pids.values())), signal.SIGKILL)

    def _moving(self) -> bool:
        if self._move is not None and self._move.poll() is not None:
            self.moved_s.append(float(self._move.communicate()[0]))
            self._move = None
        return self._move is not None

    def _recovering(self, step: Fields, gap_ms: float, *, whole: bool) -> None:
        since_ms = (step["at_ns"] - self.killed_ns) / 1e6
        if step["generation"] <= self.killed_generation or since_ms <= 0:
            return  # it was applied before the kill was noticed
        self.longest_ms[-1] = max(self.longest_ms[-1], gap_ms)
        if len(self.resumed_ms) < self.kills:
            self.resumed_ms.append(since_ms)
        if whole:
            self.joined_ms.append(since_ms)
            self.given_ms.append(since_ms - sum(step[lap] for lap in LAPS))
            self.killed_ns = 0
