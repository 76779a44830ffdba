"""A job under strikes: it is launched, followed, struck, and resumed when necessary."""

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
from trueline.chaos.clocks import JumpingClock
from trueline.chaos.leftovers import MARK, find_marked
from trueline.chaos.schedule import Strike
from trueline.engine.local.process import LIFELINE, Lifeline
from trueline.train import api
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir, parse_events

STILL_S, STILL_STEPS = 200.0, 60
"""A job hangs when it takes no step for this long, or for the time of 60 undisturbed ones if that is longer than any
lease, delay and start of a process: a large model on a machine with other work takes seconds for a step."""
POLL_S = 0.01
LEASE_S, LEASE_STEPS = 1.5, 3
CALM_LEASE_S = 15.0
"""Of the undisturbed run, which shows how long a step takes."""
DISK = "disk"
"""Where a storm's own disk is mounted."""
_AGENT = "trueline.engine.local.agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class StormPlan:
    """The job of a storm, and its strikes."""

    recipe: str
    workers: str
    kinds: tuple[str, ...]
    every: int = 0
    """Steps between strikes; 0: as many as take a third of a second."""
    step_s: float = 0.0
    """Of an undisturbed step; 0: it is not known yet."""
    points: tuple[job_settings.Phase, ...] = schedule.POINTS
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6


class Victim:
    """One job under strikes. Its launcher is a process of its own, so that it can be killed too."""

    def __init__(self, options: StormPlan, home: Path, plan: list[Strike]) -> None:
        self.options, self.home, self.job_dir = options, home, home / "job"
        self.plan = sorted((strike for strike in plan if strike.fault is None), key=lambda strike: strike.step)
        self.faults = tuple(strike.fault for strike in plan if strike.fault is not None)
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.lease_s = max(LEASE_S, LEASE_STEPS * options.step_s) if options.step_s else CALM_LEASE_S
        self.still_s = max(STILL_S, STILL_STEPS * options.step_s)
        self.done: list[tuple[str, int]] = []
        """Kind and instant (monotonic, ns) of the strikes from outside."""
        self.troubles: list[str] = []
        self.step, self.moved_at = 0, time.monotonic()
        self.workers: dict[str, int] = {}
        self._offset, self._rest = 0, b""
        self._saved = False
        (home / "tmp").mkdir(parents=True)
        self.clock = JumpingClock(home)
        self.launcher: subprocess.Popen[bytes] | None = None
        self.lifeline = Lifeline()
        """Of the launchers, which end with this process."""

    def run(self) -> None:
        api.prepare(
            self.options.recipe, workers=self.options.workers, job_dir=self.job_dir, faults=self.faults,
            **{"lease_s": self.lease_s, "max_failures": 1_000_000, **self.options.settings},
        )  # fmt: skip
        self._launch()
        try:
            while self._is_running():
                self._read_events()
                self._strike_if_due()
                time.sleep(POLL_S)  # the job reports in a file of its own
        finally:
            self._end()

    def _launch(self) -> None:
        env = {**os.environ, MARK: self.mark, "TMPDIR": str(self.home / "tmp"), **self.clock.env,
               "TORCHINDUCTOR_CACHE_DIR": str(self.home / "cache"), LIFELINE: str(self.lifeline.reading)}  # fmt: skip
        with (self.home / "launcher.log").open("ab") as log:
            command = [sys.executable, "-m", "trueline.train.launch.launcher", str(self.job_dir)]
            self.launcher = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=(self.lifeline.reading,),
            )  # fmt: skip
        self.moved_at = time.monotonic()

    def _is_running(self) -> bool:
        """False when the job has ended, or hangs. A job that ended for lack of a state is resumed."""
        assert self.launcher is not None
        if time.monotonic() - self.moved_at > self.still_s:
            alive = ", ".join(map(str, find_marked(self.mark)))
            self.troubles.append(f"no step for {self.still_s:g} s after step {self.step}; alive: {alive}")
            return False
        if self.launcher.poll() is None:
            return True
        self._read_events()
        launch = JobDir(self.job_dir).read_launch()
        if launch is None or launch.outcome == "":
            self.troubles.append(f"the launcher ended with {self.launcher.returncode} and reported no outcome")
            return False
        return launch.outcome == "failed" and self._resume_failed(launch.why)

    def _resume_failed(self, why: str) -> bool:
        """Resumes a job that failed for a valid reason: no process held the state, or its disk was full."""
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
        (self.home / "filler").unlink(missing_ok=True)
        if self.launcher.poll() is None:
            self.launcher.terminate()
            try:
                self.launcher.wait(10)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()
        self.lifeline.end()
        os.close(self.lifeline.reading)

    def _read_events(self) -> None:
        """Reads the new lines of events.jsonl."""
        try:
            with JobDir(self.job_dir).events.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for name, fields, _ in parse_events(filter(None, lines)):
            self._handle(name, fields)

    def _handle(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "step.applied":
            self.step, self.moved_at = int(fields["step"]) + 1, time.monotonic()
        elif name == "worker.running":
            self.workers[fields["worker"]] = int(fields["pid"])
        elif name == "worker.lost":
            self.workers.pop(fields["worker"], None)
        elif name == "checkpoint.saved":
            self._saved = True

    def _is_due(self) -> bool:
        """By the steps alone. A strike waits for the job's first checkpoint, but only as many steps as lie between two
        strikes: beside other work the thread that writes it may get no time for the whole job."""
        if not self.plan:
            return False
        return self.step >= self.plan[0].step + (0 if self._saved else self.options.every)

    def _strike_if_due(self) -> None:
        if not self._is_due():
            return
        strike = self.plan.pop(0)
        time.sleep(strike.delay_s)  # reports come in bunches; the strike is at any instant
        if self._do(strike):
            self.done.append((strike.kind, time.monotonic_ns()))

    def _signal(self, pid: int, number: int) -> bool:
        """Only to processes of this storm, even if a pid is used again."""
        if not any(process.pid == pid for process in find_marked(self.mark)):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _pick_workers(self, strike: Strike, count: int) -> list[int]:
        pids = sorted(set(self.workers.values()))
        first = int(strike.pick * len(pids)) if pids else 0
        return (pids[first:] + pids[:first])[:count]

    def _signal_workers(self, strike: Strike, count: int, number: int = signal.SIGKILL) -> bool:
        struck = [self._signal(pid, number) for pid in self._pick_workers(strike, count)]
        return any(struck)

    def _do(self, strike: Strike) -> bool:
        """Returns whether it struck anything."""
        match strike.kind:
            case "worker":
                return self._signal_workers(strike, 1)
            case "two":
                return self._signal_workers(strike, 2)
            case "all":
                return self._signal_workers(strike, len(self.workers))
            case "hang":
                return self._signal_workers(strike, 1, signal.SIGSTOP)
            case "master":
                return self._signal(self._master(), signal.SIGKILL)
            case "both":
                return self._signal(self._master(), signal.SIGKILL) | self._signal_workers(strike, 1)
            case "agent":
                return self._signal(self._child(_AGENT), signal.SIGKILL)
            case "zygote":
                return self._signal(self._child("trueline.train.master.failover"), signal.SIGKILL)
            case "clock":
                self.clock.jump(int((strike.pick - 0.5) * 20 * 86400))
                return True
        struck: bool = getattr(self, f"_do_{strike.kind}")(strike)
        return struck

    def _master(self) -> int:
        master = JobDir(self.job_dir).read_master()
        return -1 if master is None else master.pid

    def _do_freeze(self, strike: Strike) -> bool:
        master = self._master()
        if not self._signal(master, signal.SIGSTOP):
            return False
        time.sleep(0.2 + 2.5 * strike.pick)  # the time that it is stopped
        return self._signal(master, signal.SIGCONT)

    def _child(self, module: str) -> int:
        """The process that the launcher started with `module`; -1: there is none."""
        assert self.launcher is not None
        children = [process for process in find_marked(self.mark) if process.parent == self.launcher.pid]
        return next((process.pid for process in children if module in process.command), -1)

    def _do_launcher(self, strike: Strike) -> bool:
        assert self.launcher is not None
        self.launcher.kill()
        self.launcher.wait()
        deadline = time.monotonic() + 10
        while (left := find_marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # its processes notice that it is gone
        if left:
            alive = ", ".join(map(str, left))
            self.troubles.append(f"10 s after the launcher was killed there is still {alive}")
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

    def _do_network(self, strike: Strike) -> bool:
        for way, pause_s in (("down", 0.1 + 3 * strike.pick), ("up", 0.0)):
            subprocess.run(["ip", "link", "set", "lo", way], check=True)
            time.sleep(pause_s)
        return True

    def _do_reset(self, strike: Strike) -> bool:
        pids = self._pick_workers(strike, 1)
        sockets = subprocess.run(["ss", "-tnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
        mine = [line.split()[3].rpartition(":")[2] for line in sockets if pids and f"pid={pids[0]}," in line]
        for port in mine:
            subprocess.run(["ss", "-K", "sport", "=", port], capture_output=True, check=False)
        return bool(mine)

    def _do_zombie(self, strike: Strike) -> bool:
        """A worker that wakes up and has to notice that the others have continued without it."""
        pids = self._pick_workers(strike, 1)
        if not (pids and self._signal(self._child(_AGENT), signal.SIGKILL) and self._signal(pids[0], signal.SIGSTOP)):
            return False
        time.sleep(self.lease_s + 0.5 + strike.pick)
        self._signal(pids[0], signal.SIGCONT)
        return True

    def _do_disk(self, strike: Strike) -> bool:
        """Fills what is left of the storm's own disk."""
        if not (self.home.parent.name == DISK and self.home.parent.is_mount()):
            return False  # other programs use this disk too
        with contextlib.suppress(OSError), (self.home / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(0.1 + strike.pick)  # the time that it is full
        (self.home / "filler").unlink(missing_ok=True)
        return True

    def kills(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.struck())

    def struck(self) -> list[tuple[str, int]]:
        """The strikes (kind, or the point where a worker did it to itself) and their instants (monotonic, ns)."""
        struck = list(self.done)
        for file in JobDir(self.job_dir).faults.glob("*"):
            with contextlib.suppress(ValueError):  # struck from outside while it wrote
                fault = json.loads(file.read_text())
                struck.append((f"{fault['phase']}{'' if fault['signal'] == 9 else ' (stop)'}", fault["at_ns"]))
        return sorted(struck, key=lambda one: one[1])
