"""Changes the number of a job's servers while it trains, and kills a process in the middle of each move."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trueline.train.launch import jobs
from worlds.killer import Killer
from worlds.waiting import until


class Scaler(Killer):
    """Asks for the next number of servers 30 steps after it got the one before, and halts the job after the last one;
    kills `victim` in the middle of each move: when the first of several new routings is on the disk."""

    def __init__(self, job_dir: Path, numbers: Sequence[int], victim: str = "") -> None:
        super().__init__(job_dir, [])
        self.numbers, self.victim, self.reached, self.asked, self.mark, self.struck = numbers, victim, 0, 0, 0, 0

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        super().__call__(name, fields)
        if name == "servers.scaling" and self.victim and self.struck < self.asked:
            self.struck = self.asked
            threading.Thread(target=self.strike, args=[self.count_routings()], daemon=True).start()
        if name == "servers.scaled" and fields["servers"] == self.numbers[self.asked - 1]:
            self.reached, self.mark = self.asked, self.steps
        if self.asked == self.reached <= len(self.numbers) and self.steps >= self.mark + 30:
            self.asked += 1
            ask = partial(jobs.halt, self.job.path)
            if self.reached < len(self.numbers):
                ask = partial(jobs.scale, self.job.path, servers=self.numbers[self.reached])
            threading.Thread(target=ask, daemon=True).start()

    def count_routings(self) -> int:
        hybrid = self.job.path / "ps" / "tables.json"
        if hybrid.exists():
            return int(msgspec.json.decode(hybrid.read_bytes())["routing"]["version"])
        with contextlib.closing(sqlite3.connect(f"file:{self.job.journal}?mode=ro", uri=True)) as journal:
            return int(journal.execute("SELECT count(*) FROM log WHERE kind = 'PS_ROUTING'").fetchone()[0])

    def strike(self, before: int) -> None:
        until(lambda: self.count_routings() > before, "no new routing")
        os.kill(until(lambda: self.find(self.victim), self.victim), signal.SIGKILL)
        self.killed.append(self.victim)
