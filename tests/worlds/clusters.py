"""A client of submitted jobs: its commands, and what the store says afterwards."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from trueline.checkpoint import checkpoint
from trueline.train.cluster.store import JobStore
from trueline.train.job_dir import parse_events
from worlds.jobs import TINY
from worlds.kubernetes.images import HOST, list_mounts
from worlds.waiting import until

TRUELINE = str(Path(sys.executable).with_name("trueline"))
BATCH, RECORDS = 30, 240
MODULES = ("trueline.train.cluster.", "trueline.train.learners.")
SKEW_S = 5.0
"""By how much events of several processes may be out of order in the log."""
ENGINES = """
[engine.slurm]
interface = "127.0.0.1"
[engine.slurm.large]
slots = 2
[engine.hosts]
interface = "127.0.0.1"
env = ["TINY_GATE"]
[engine.hosts.large]
slots = 2
[engine.ray]
interface = "127.0.0.1"
env = ["PYTHONPATH", "OMP_NUM_THREADS", "TINY_GATE", "XDG_CACHE_HOME"]
[engine.ray.large]
slots = 2
[engine.local]
capacity = 4
[engine.local.large]
slots = 4
[engine.podman]
rootfs = "/"
capacity = 4
env = ["PYTHONPATH", "OMP_NUM_THREADS", "TINY_GATE"]
[engine.podman.large]
slots = 4
[engine.kubernetes]
image = "{image}"
pull = "Never"
service_account = "trueline"
python = "{python}"
mounts = {mounts}
env = ["PYTHONPATH", "OMP_NUM_THREADS", "TINY_GATE"]
[engine.kubernetes.large]
slots = 2
"""
"""`large` has no room beside a job of three slots."""


class Client:
    """Submits a tiny recipe from `folder` into `folder`/store. `env` is that of all processes of its jobs."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.store = folder, folder / "store"
        self.env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"} | env
        (folder / "tiny").mkdir()
        shutil.copy(TINY, folder / "tiny" / "recipe.py")
        engines = ENGINES.format(image=HOST, python=sys.executable, mounts=json.dumps(list_mounts(folder)))
        (folder / "trueline.toml").write_text(engines)
        self.job = ""
        self.lenders: dict[str, subprocess.Popen[bytes]] = {}
        self._events: dict[str, tuple[list[tuple[str, dict[str, Any], float]], int]] = {}

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            [TRUELINE, *command], cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout + done.stderr

    def lend(self, name: str, *, cores: int) -> None:
        """Starts a host that lends its cores to the jobs of the store."""
        command = [TRUELINE, "join", str(self.store), "--cores", str(cores), "--name", name]
        with (self.folder / f"lender-{name}.log").open("ab") as log:
            self.lenders[name] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder)

    def submit(self, on: str, *options: str, epochs: int = 1_000_000) -> str:
        text = self.run(
            "submit", "tiny", "--on", on, "--store", str(self.store), "--epochs", str(epochs), "--checkpoint-every",
            "1000", "--json", *options,
        )  # fmt: skip
        self.job = str(json.loads(text)["job"])
        return self.job

    @property
    def where(self) -> JobStore:
        return JobStore(self.store / self.job)

    @property
    def unique(self) -> str:
        """The job in the names of its submissions."""
        return self.where.read_job().unique_name

    def read(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.run("status", self.job, "--json"))
        return facts

    def wait(self, what: str, *, after: float = 0.0, **fields: Any) -> float:
        """When the first event of this name happened after a time."""

        def find() -> float:
            launch = self.where.last_launch()
            end = self.where.read_end(launch.number) if launch is not None else None  # its events are there before it
            known = self.events()
            first = bisect.bisect_left(known, after - SKEW_S, key=lambda one: one[2])
            for name, event, at in itertools.islice(known, first, None):
                if name == what and at > after and all(event.get(key) == value for key, value in fields.items()):
                    return at
            assert end is None or end.ended < after or what == "end", f"{end}: {self.logs()}"
            return 0.0

        return until(find, lambda: f"{what} {fields}: {self.logs()}")

    def wait_workers(self, workers: int, *, after: float = 0.0) -> float:
        """When this number of workers has applied a step together."""
        return self.wait("step.applied", after=after, workers=workers)

    def wait_end(self) -> Any:
        launch = self.where.last_launch()
        assert launch is not None
        return until(lambda: self.where.read_end(launch.number), self.logs)

    def events(self) -> list[tuple[str, dict[str, Any], float]]:
        """Of the job so far. Its log grows to megabytes, so that only what is new is read."""
        known, at = self._events.setdefault(self.job, ([], 0))
        with contextlib.suppress(FileNotFoundError), (self.store / self.job / "logs/events.log").open("rb") as file:
            file.seek(at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            known += parse_events(whole.splitlines())
            self._events[self.job] = known, at + len(whole)
        return known

    def logs(self) -> str:
        found = sorted((self.store / self.job / "logs").glob("*.log")) if self.job else []
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in found)

    def processes(self, role: str = "") -> list[psutil.Process]:
        """The heads and hosts of this client's jobs that run, or those of one role."""
        found: dict[int, psutil.Process] = {}
        for one in psutil.process_iter(["cmdline", "ppid"]):
            words = one.info["cmdline"] or []
            module = next((word for word in words if word.startswith(MODULES)), "")
            own = module and "python" in words[0] and str(self.store) in " ".join(words)
            if own and (not role or words[-1] == role or module.endswith(f".{role}")):
                found[one.pid] = one

        def is_fork(one: psutil.Process) -> bool:
            """Whether it is about to become another program."""
            parent = found.get(one.info["ppid"])
            return parent is not None and parent.info["cmdline"] == one.info["cmdline"]

        return [one for one in found.values() if not is_fork(one)]

    def find_outside(self, role: str, pid: int) -> int:
        """The pid here of a process that a head or host has started; `pid`: in its container, which may have its own
        numbers. 0: it has ended."""
        for process in self.processes(role):
            for one in process.children(recursive=True):
                with contextlib.suppress(OSError):
                    (numbers,) = re.findall(
                        r"^NSpid:\s+(.*)$", Path(f"/proc/{one.pid}/status").read_text(), re.MULTILINE
                    )
                    if int(numbers.split()[-1]) == pid:
                        return one.pid
        return 0

    def kill(self, role: str) -> None:
        """SIGKILL for a head or host and all that it has started, as its machine's end would be."""
        (process,) = self.processes(role)
        for one in (*process.children(recursive=True), process):
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.kill(one.pid, signal.SIGKILL)

    def count(self) -> tuple[int, int, int]:
        """Steps of the newest checkpoint, records that are missing in it, and records that are too many."""
        newest = checkpoint.latest(self.where.checkpoints)
        assert newest is not None
        seen, steps = newest.state["model"]["seen"].round().long(), newest.step
        whole, rest = divmod(steps, RECORDS // BATCH)
        lost = int((whole - seen).clamp(min=0).sum())
        repeated = max(0, int(seen.sum()) - steps * BATCH) + int((seen - whole - 1).clamp(min=0).sum())
        assert int((seen == whole + 1).sum()) == rest * BATCH
        return steps, lost, repeated

    def close(self) -> None:
        for lender in self.lenders.values():
            lender.kill()
            lender.wait()
        for process in self.processes():
            for one in (*process.children(recursive=True), process):
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
        until(lambda: not self.processes(), lambda: f"left: {self.processes()}")
