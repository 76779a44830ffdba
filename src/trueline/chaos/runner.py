"""A job under strikes: it is launched, followed, struck, and resumed when it has to be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline import errors
from trueline.chaos import schedule
from trueline.chaos.leftovers import MARK, marked
from trueline.chaos.schedule import Strike
from trueline.train import api
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir, parse_events

STILL_S = 200.0
"""A job without a step for so long stands still: longer than any lease, delay and start of a process."""
POLL_S = 0.01
LEASE_S = 1.5
DISK = "disk"
"""Where a storm's own disk is mounted."""
_CLOCK = """
import os, sys, time
_file, _real, _real_ns = os.environ["TRUELINE_CHAOS_CLOCK"], time.time, time.time_ns
def _jump():
    if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc"):
        return 0  # it compares with a clock of its own in C, which does not jump
    try:
        return int(open(_file).read() or 0)
    except (OSError, ValueError):
        return 0
time.time = lambda: _real() + _jump()
time.time_ns = lambda: _real_ns() + _jump() * 10**9
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What is asked of a storm."""

    recipe: str
    workers: str
    kinds: tuple[str, ...]
    every: int = 0
    """Steps between strikes; 0: a third of a second's."""
    points: tuple[job_settings.Phase, ...] = schedule.POINTS
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6


class Victim:
    """One job under strikes. Its launcher is a process of its own, so that it can be killed too."""

    def __init__(self, weather: Weather, home: Path, plan: list[Strike]) -> None:
        self.weather, self.home, self.job_dir = weather, home, home / "job"
        self.plan = sorted((strike for strike in plan if strike.fault is None), key=lambda strike: strike.step)
        self.faults = tuple(strike.fault for strike in plan if strike.fault is not None)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.done: list[tuple[str, int]] = []
        """Kind and instant (monotonic, ns) of what was done from outside."""
        self.troubles: list[str] = []
        self.step, self.moved_at = 0, time.monotonic()
        self.workers: dict[str, int] = {}
        self._offset, self._rest = 0, b""
        self._saved = False
        (home / "tmp").mkdir(parents=True)
        (home / "path").mkdir()
        (home / "path" / "sitecustomize.py").write_text(_CLOCK)
        self.launcher: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        api.prepare(
            self.weather.recipe, workers=self.weather.workers, job_dir=self.job_dir, faults=self.faults,
            **{"lease_s": LEASE_S, "max_failures": 1_000_000, **self.weather.settings},
        )  # fmt: skip
        self._launch()
        try:
            while self._goes_on():
                self._listen()
                self._strike_what_is_due()
                time.sleep(POLL_S)  # what the job reports is in a file of its own
        finally:
            self._end()

    def _launch(self) -> None:
        path = os.pathsep.join([str(self.home / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, MARK: self.mark, "TMPDIR": str(self.home / "tmp"), "PYTHONPATH": path,
               "TRUELINE_CHAOS_CLOCK": str(self.home / "clock"),
               "TORCHINDUCTOR_CACHE_DIR": str(self.home / "cache")}  # fmt: skip
        with (self.home / "launcher.log").open("ab") as log:
            command = [sys.executable, "-m", "trueline.train.launch.launcher", str(self.job_dir)]
            self.launcher = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.moved_at = time.monotonic()

    def _goes_on(self) -> bool:
        """False when the job has ended, or stands still."""
        assert self.launcher is not None
        if time.monotonic() - self.moved_at > STILL_S:
            alive = ", ".join(f"{found.pid} {found.what}" for found in marked(self.mark))
            self.troubles.append(f"no step for {STILL_S:g} s after step {self.step}; alive: {alive}")
            return False
        if self.launcher.poll() is None:
            return True
        self._listen()
        launch = JobDir(self.job_dir).read_launch()
        if launch is None or launch.outcome == "":
            self.troubles.append(f"the launcher ended with {self.launcher.returncode} and did not say how")
            return False
        if launch.outcome == "failed":
            return self._failed(launch.why)
        return False

    def _failed(self, why: str) -> bool:
        """A job may fail for want of any state or of room on its disk, if that is so; then it is resumed."""
        struck = "disk" in {kind for kind, _ in self.done}
        full = struck and any(words in why for words in ("no room", "disk is full", "No space"))
        lost = "that held the state" in why and not self._saved
        if full or lost:
            self._resume()
            return True
        self.troubles.append(f"the job failed: {why}")
        return False

    def _end(self) -> None:
        assert self.launcher is not None
        self._refresh_disk()
        if self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(10)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()

    def _refresh_disk(self) -> None:
        (self.home / "filler").unlink(missing_ok=True)

    # What the job says. --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Reads what was added to events.jsonl."""
        try:
            with JobDir(self.job_dir).events.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for name, fields, _ in parse_events(filter(None, lines)):
            self._hear(name, fields)

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "step.applied":
            self.step, self.moved_at = int(fields["step"]) + 1, time.monotonic()
        elif name == "worker.running":
            self.workers[fields["worker"]] = int(fields["pid"])
        elif name == "worker.lost":
            self.workers.pop(fields["worker"], None)
        elif name == "checkpoint.saved":
            self._saved = True

    # Strikes. ------------------------------------------------------------------------------------------------------

    def _strike_what_is_due(self) -> None:
        if not self.plan or self.step < self.plan[0].step or not self._saved:
            return
        strike = self.plan.pop(0)
        time.sleep(strike.delay_s)  # reports come in bunches; the kill is at any instant
        if getattr(self, f"_do_{strike.kind}")(strike):
            self.done.append((strike.kind, time.monotonic_ns()))

    def _signal(self, pid: int, number: int) -> bool:
        """Only processes of this storm, whatever became of a pid."""
        if not any(found.pid == pid for found in marked(self.mark)):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _picked(self, strike: Strike, count: int) -> list[int]:
        pids = sorted(set(self.workers.values()))
        first = int(strike.pick * len(pids)) if pids else 0
        return (pids[first:] + pids[:first])[:count]

    def _kill_workers(self, strike: Strike, count: int, number: int = signal.SIGKILL) -> bool:
        struck = [self._signal(pid, number) for pid in self._picked(strike, count)]
        return any(struck)

    def _do_worker(self, strike: Strike) -> bool:
        return self._kill_workers(strike, 1)

    def _do_two(self, strike: Strike) -> bool:
        return self._kill_workers(strike, 2)

    def _do_all(self, strike: Strike) -> bool:
        return self._kill_workers(strike, len(self.workers))

    def _do_hang(self, strike: Strike) -> bool:
        return self._kill_workers(strike, 1, signal.SIGSTOP)

    def _master(self) -> int:
        master = JobDir(self.job_dir).read_master()
        return -1 if master is None else master.pid

    def _do_master(self, strike: Strike) -> bool:
        return self._signal(self._master(), signal.SIGKILL)

    def _do_both(self, strike: Strike) -> bool:
        struck = self._do_master(strike)
        return self._do_worker(strike) or struck

    def _do_freeze(self, strike: Strike) -> bool:
        master = self._master()
        if not self._signal(master, signal.SIGSTOP):
            return False
        time.sleep(0.2 + 2.5 * strike.pick)  # that long it stands still
        return self._signal(master, signal.SIGCONT)

    def _do_agent(self, strike: Strike) -> bool:
        return self._signal(self._child("trueline.engine.local.agent"), signal.SIGKILL)

    def _do_zygote(self, strike: Strike) -> bool:
        return self._signal(self._child("trueline.train.master.failover"), signal.SIGKILL)

    def _child(self, module: str) -> int:
        """The process that the launcher started with `module`; -1: there is none."""
        assert self.launcher is not None
        children = [found for found in marked(self.mark) if found.parent == self.launcher.pid]
        return next((found.pid for found in children if module in found.what), -1)

    def _do_launcher(self, strike: Strike) -> bool:
        assert self.launcher is not None
        self.launcher.kill()
        self.launcher.wait()
        deadline = time.monotonic() + 10
        while marked(self.mark) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # its processes notice that it is gone
        left = [f"{found.pid} {found.what}" for found in marked(self.mark)]
        if left:
            self.troubles.append(f"10 s after the launcher was killed there is still {', '.join(left)}")
        self._resume()
        return True

    def _resume(self) -> None:
        self.workers.clear()
        try:
            api.prepare_resume(self.job_dir, faults=self.faults)
        except errors.UsageError as error:
            if "finished already" not in error.message:
                raise
            return
        self._launch()

    def _do_clock(self, strike: Strike) -> bool:
        (self.home / "clock").write_text(str(int((strike.pick - 0.5) * 20 * 86400)))
        return True

    def _do_network(self, strike: Strike) -> bool:
        for way, pause_s in (("down", 0.1 + 3 * strike.pick), ("up", 0.0)):
            subprocess.run(["ip", "link", "set", "lo", way], check=True)
            time.sleep(pause_s)
        return True

    def _do_reset(self, strike: Strike) -> bool:
        pids = self._picked(strike, 1)
        found = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
        mine = [line.split()[3].rpartition(":")[2] for line in found if pids and f"pid={pids[0]}," in line]
        for port in mine:
            subprocess.run(["ss", "-K", "sport", "=", port], capture_output=True, check=False)
        return bool(mine)

    def _do_zombie(self, strike: Strike) -> bool:
        """Waking up, it has to find out by itself that the others have gone on without it."""
        pids = self._picked(strike, 1)
        if not (pids and self._do_agent(strike) and self._signal(pids[0], signal.SIGSTOP)):
            return False
        time.sleep(LEASE_S + 0.5 + strike.pick)
        self._signal(pids[0], signal.SIGCONT)
        return True

    def _do_disk(self, strike: Strike) -> bool:
        """Fills what is left of the storm's own disk."""
        if not (self.home.parent.name == DISK and self.home.parent.is_mount()):
            return False  # it is somebody else's too
        with contextlib.suppress(OSError), (self.home / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(0.1 + strike.pick)  # that long it is full
        self._refresh_disk()
        return True

    def kills(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.struck())

    def struck(self) -> list[tuple[str, int]]:
        """What was done (kind, or the point where a worker did it to itself) and when (monotonic, ns)."""
        found = list(self.done)
        for file in JobDir(self.job_dir).faults.glob("*"):
            with contextlib.suppress(ValueError):  # struck from outside while it wrote
                fault = json.loads(file.read_text())
                found.append((f"{fault['phase']}{'' if fault['signal'] == 9 else ' (stop)'}", fault["at_ns"]))
        return sorted(found, key=lambda one: one[1])
