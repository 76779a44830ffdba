"""Jobs over hosts that are network namespaces: what a death, a partition, a halt and a master's host cost.

Strikes hit workers, hosts, links, a host's clock, the master and the store in a random order from a seed; the model
counts its records itself. Times of kills are from the workers' own clocks, those of a host's death and return from the
job's events.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from worlds import waiting
from worlds.joined_hosts import TRUELINE, Machines
from worlds.networks import find_lack, open_machines
from worlds.waiting import until

KINDS = ("worker", "host", "link", "master", "store", "skew")
PATIENCE_S = 900.0
"""A storm may run beside other work."""
STILL_S = 1.0
"""Between the end of a recovery and the next strike."""


@contextmanager
def world() -> Iterator[Machines]:
    """Three machines, of which the first has the recipe and the job."""
    if lack := find_lack():
        raise SystemExit(f"bench-hosts makes network namespaces: {lack}")
    folder = Path(tempfile.mkdtemp(prefix="tl-hosts-"))
    (folder / "a").mkdir()
    (folder / "store").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder / "store")], check=True)
    try:
        with open_machines(3, hidden_from_others=(folder / "a",)) as machines:
            made = Machines(folder, machines)
            try:
                yield made
            finally:
                made.close()
    finally:
        subprocess.run(["umount", "-l", str(folder / "store")], check=False)
        shutil.rmtree(folder, ignore_errors=True)


class Strikes:
    """Strikes at a job of three workers, one on A and two on B, each after all three have trained together."""

    def __init__(self, world: Machines, lease: str) -> None:
        self.world, self.since = world, 0.0
        self.kill_ms: list[float] = []
        self.host_s: list[float] = []
        self.back_s: list[float] = []
        self.clock, self.skewed = world.give_clock("b"), False
        world.train("--workers", "1:3", "--cores", "1", "--lease", lease)
        world.wait_workers(1)
        self.joined = world.join(cores=2)
        self.since = world.wait_workers(3)

    def strike(self, kind: str, dice: random.Random) -> None:
        time.sleep(STILL_S + dice.random())
        at = time.time()
        strikes: dict[str, Callable[[float, random.Random], None]] = {
            "worker": self._worker,
            "host": self._host,
            "link": self._link,
            "master": self._master,
            "store": self._store,
            "skew": self._skew,
        }
        strikes[kind](at, dice)
        self.since = self.world.wait_workers(3, after=max(at, self.since))

    def _worker(self, at: float, dice: random.Random) -> None:
        os.kill(dice.choice(self._pids()), signal.SIGKILL)
        self.world.wait("worker.lost", "worker.killed", after=at)  # its lease may end first
        self.since = self.world.wait_workers(2, after=at)
        self.kill_ms.append(self.world.gap_ms(at))

    def _host(self, at: float, dice: random.Random) -> None:
        self.world.kill(self.joined)
        self.world.wait("host.lost", after=at)
        self.host_s.append(self.world.wait_workers(1, after=at) - at)
        began = time.time()
        self.joined = self.world.join(cores=2)
        back = self.world.wait("host.joined", after=began)[1]
        self.since = self.world.wait_workers(3, after=back)
        self.back_s.append(self.since - back)

    def _link(self, at: float, dice: random.Random) -> None:
        self.world.machines["b"].cut()
        self.world.wait("host.lost", after=at)
        self.since = self.world.wait_workers(1, after=at)
        self.world.machines["b"].heal()

    def _master(self, at: float, dice: random.Random) -> None:
        os.kill(find_master(self.world), signal.SIGKILL)
        self.world.wait("master.lost", after=at)
        self.since = self.world.wait("step.applied", after=at + STILL_S)[1]

    def _store(self, at: float, dice: random.Random) -> None:
        """A worker dies while nothing can be written to the store: the next view waits for it."""
        remount(self.world.store, "ro")
        try:
            os.kill(dice.choice(self._pids()), signal.SIGKILL)
            self.world.wait("worker.lost", "worker.killed", after=at)  # its lease may end first
            time.sleep(STILL_S)
        finally:
            remount(self.world.store, "rw")
        self.since = self.world.wait_workers(2, after=at)

    def _skew(self, at: float, dice: random.Random) -> None:
        """B's clock jumps an hour, or back: the job says so, and loses no worker."""
        self.skewed = not self.skewed
        self.clock.jump(dice.choice((-3600, 3600)) if self.skewed else 0)
        told = self.world.wait("host.clock", after=at)[1]
        lost = [name for name, _, when in self.world.events() if name in ("worker.lost", "host.lost") and when > at]
        assert lost == [], lost
        self.since = self.world.wait("step.applied", after=told)[1]

    def _pids(self) -> list[int]:
        """Those of the running workers."""
        pids: dict[str, int] = {}
        for name, event, _ in self.world.events():
            if name == "worker.running":
                pids[event["worker"]] = event["pid"]
            elif name in ("worker.lost", "worker.killed"):
                pids.pop(event["worker"], None)
        return sorted(pids.values())


def find_master(world: Machines) -> int:
    """The pid of the master that lives: pids are used again within minutes on a busy machine."""

    def look() -> int:
        pid = world.job.read_master().pid
        with suppress(psutil.Error):
            return pid if str(world.job.path) in psutil.Process(pid).cmdline() else 0
        return 0

    return until(look, f"{world.job.path}/master.json names a living master")


def remount(store: Path, how: str) -> None:
    """Remounts the store, for all namespaces; while a file is open for writing it cannot become read-only."""
    command = ["mount", "-o", f"remount,{how}", str(store)]
    until(lambda: not subprocess.run(command, capture_output=True, check=False).returncode, lambda: " ".join(command))


def measure_strikes(count: int, seed: int, minutes: float, lease: str) -> dict[str, Any]:
    """The figures of `count` strikes of all kinds, or of as many as there is time for."""
    dice, ends = random.Random(seed), time.monotonic() + 60 * minutes
    waiting.LIMIT_S = PATIENCE_S
    with world() as machines:
        job = Strikes(machines, lease)
        kinds = [KINDS[number % len(KINDS)] if count < 300 or number % 2 else "worker" for number in range(count)]
        dice.shuffle(kinds)
        done = 0
        for number, kind in enumerate(kinds):
            if time.monotonic() > ends:
                break
            job.strike(kind, dice)
            done += 1
            gap = f", {job.kill_ms[-1]:.0f} ms to the next step" if kind == "worker" else ""
            print(f"strike {number + 1} of {count}: {kind}{gap}", file=sys.stderr, flush=True)
        began = time.monotonic()
        machines.halt()
        halt_s = time.monotonic() - began
        steps, lost, repeated = machines.count()
    figures: dict[str, Any] = {"strikes": done, "steps": steps, "lost": lost, "repeated": repeated, "halt_s": halt_s}
    if kills := sorted(job.kill_ms):
        p95 = kills[int(0.95 * (len(kills) - 1))]
        figures |= {"kills": len(kills), "kill_p50_ms": statistics.median(kills), "kill_p95_ms": p95}
    if job.host_s:
        figures |= {"host_kill_s": max(job.host_s), "back_s": max(job.back_s)}
    return figures


def measure_master_host() -> dict[str, Any]:
    """The host of the master dies: what the joined host that leads then repeats, and after what time steps continue."""
    with world() as machines:
        machines.train("--workers", "1:4", "--cores", "1", "--lease", "3")
        machines.wait_workers(1)
        joined = machines.join(cores=2)
        machines.wait_workers(3)
        machines.join(name="c")
        machines.wait_workers(4)
        time.sleep(STILL_S)
        at = time.time()
        machines.kill(machines.launcher)
        before = max(machines.steps())
        machines.move_to("b", joined)
        adopt_s = machines.wait_workers(3, after=at) - at
        repeated_steps = max(0, before + 1 - min(machines.steps(after=at)))
        os.kill(joined.pid, signal.SIGINT)
        joined.wait(100)
        _, lost, repeated = machines.count()
    return {"adopt_s": adopt_s, "master_host_steps_lost": repeated_steps + lost + repeated}


def measure_resume() -> dict[str, Any]:
    """A bitwise job is halted on A and B and continues on A and C with another number of workers."""
    with world() as machines:
        recipe = machines.path / "a" / "project" / "recipe.py"
        epochs = 60
        gate = machines.path / "gate"
        recipe.write_text(recipe.read_text().replace("epochs = 6\n", f"epochs = {epochs}\n"))
        os.environ["TINY_GATE"] = f"20:{gate}"
        try:
            machines.train("--workers", "1:3", "--cores", "1", "--bitwise", "--epochs", str(epochs))
            machines.join(cores=2)
            machines.wait_workers(3)
            machines.halt()
            gate.touch()
            address = f"{machines.leader.address}:7701"
            again = time.time()
            options = ("--workers", "1:2", "--listen", address, "--cores", "1")
            command = (TRUELINE, "resume", str(machines.job.path), *options)
            launcher = machines.leader.start(*command, log=machines.path / "resume.log")
            machines.processes.insert(0, launcher)
            machines.launcher = launcher
            first = machines.wait("step.applied", after=again)[1]
            machines.wait("hosts.listening", after=again)
            machines.join(name="c")
            until(lambda: launcher.poll() is not None, machines.logs)
            assert launcher.poll() == 0, machines.logs()
        finally:
            del os.environ["TINY_GATE"]
        found = checkpoint.latest(machines.store)
        plain = train(recipe, workers=1, bitwise=True, epochs=epochs, job_dir=machines.path / "plain")
        expected = checkpoint.read(plain.checkpoint)
        assert found is not None
        ours, theirs = found.state["model"], expected.state["model"]
        equal = all(torch.equal(ours[name], value) for name, value in theirs.items())
    return {"resume_s": first - again, "resume_equal": equal}
