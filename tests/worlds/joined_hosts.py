"""A job on machine A, and machines B and C that join it."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from trueline.chaos.clocks import JumpingClock
from trueline.checkpoint import checkpoint
from trueline.train.job_dir import JobDir, parse_events
from trueline.train.master.hosts import HostsFolder
from worlds.jobs import TINY
from worlds.waiting import until

TRUELINE = str(Path(sys.executable).with_name("trueline"))
PORT, BATCH, RECORDS = 7700, 30, 240
LOOP = """
import os, sys, time
from pathlib import Path
import torch, trueline
import recipe  # travels beside the script

def main():
    epochs, tail = int(sys.argv[1]), Path(sys.argv[2])
    if "differ" in sys.argv and "/code/" not in __file__:  # where it has travelled to
        epochs += 1
    torch.manual_seed(0)
    model = recipe.model()
    optimizer, data = recipe.optimizer(model.parameters()), recipe.dataset("training")
    job = trueline.Elastic(model, optimizer, data, global_batch=30, epochs=epochs)
    for batch in job:
        job.step(recipe.loss(model(*batch.inputs), batch.labels))
    (tail / os.environ["TRUELINE_REF"]).write_text(str(job.steps))
    while not (tail / "open").exists():
        time.sleep(0.01)
    print("the tail of", os.environ["TRUELINE_REF"], "is over", flush=True)

if __name__ == "__main__":
    main()
"""
"""A script with a loop of its own; its arguments are the epochs and a folder. It ends once that has a file `open`."""


class Machines:
    def __init__(self, tmp_path: Path, machines) -> None:
        self.path, self.machines = tmp_path, dict(zip("abc", machines, strict=True))
        self.leader = self.machines["a"]
        self.job, self.store = JobDir(tmp_path / "a" / "job"), tmp_path / "store"
        project = tmp_path / "a" / "project"
        project.mkdir()
        shutil.copy(TINY, project / "recipe.py")
        self.processes = []
        self._events, self._events_of, self._events_end = [], ("", 0), 0
        self.clocks: dict[str, JumpingClock] = {}
        self.address = ""
        """Where A listens, if not at its IPv4 address: a name, or an IPv6 address in brackets."""

    def give_clock(self, name: str) -> JumpingClock:
        """A wall clock of its own for what is started on that machine from now on."""
        folder = self.path / f"clock-{name}"
        folder.mkdir()
        self.clocks[name] = JumpingClock(folder)
        return self.clocks[name]

    def _env(self, name: str) -> dict[str, str]:
        return self.clocks[name].env if name in self.clocks else {}

    def train(self, *options: str) -> None:
        self.launch("train", str(self.path / "a" / "project"), "--epochs", "1000000", *options)

    def run(self, script: Path, *options: str) -> None:
        """As `train`, a script with a loop of its own; what follows `--` in `options` are its arguments."""
        at = options.index("--") if "--" in options else len(options)
        self.launch("run", *options[:at], str(script), *options[at:])

    def launch(self, verb: str, *options: str) -> None:
        command = (
            TRUELINE, verb, "--job", str(self.job.path), "--listen", f"{self.address or self.leader.address}:{PORT}",
            "--checkpoints", str(self.store), "--checkpoint-every", "1000", *options,
        )  # fmt: skip
        self.launcher = self.leader.start(*command, log=self.path / "train.log", **self._env("a"))
        self.processes.append(self.launcher)
        self.wait("hosts.listening")

    def join(
        self, *options: str, cores: int = 1, name: str = "b", token: Path | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        """`token`: in place of a copy of the job's."""
        address = HostsFolder(self.job).read_launch().leader.address
        if token is None:
            token = Path(shutil.copy(self.job.hosts / "token", self.path / f"token-{name}"))
        command = (TRUELINE, "join", address, "--token-file", str(token), "--cores", str(cores), "--name", name)
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        process = self.machines[name].start(
            *command, *options, log=self.path / f"join-{name}.log", folder=folder,
            XDG_CACHE_HOME=str(folder / "cache"), **self._env(name), **env,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def events(self):
        """All events so far. A long job has hundreds of thousands: only what is new is parsed."""
        if not self.job.events.exists():
            return self._events
        with self.job.events.open("rb") as file:
            status = os.fstat(file.fileno())
            kind = (str(self.job.events), status.st_ino)
            if kind != self._events_of or status.st_size < self._events_end:
                self._events_of, self._events_end, self._events = kind, 0, []
            file.seek(self._events_end)
            whole = file.read().rpartition(b"\n")[0]
        self._events_end += len(whole) + 1 if whole else 0
        self._events += parse_events(whole.splitlines())
        return self._events

    def wait(self, *names: str, after: float = 0.0, **fields):
        """The first event of these names after a time. What has been looked at is not looked at again: to poll a long
        job's log whole takes a core from the job."""
        found, looked = [], (None, 0)

        def there() -> bool:
            nonlocal looked
            assert all(process.poll() is None for process in self.processes[:1]), self.logs()
            events = self.events()
            first = looked[1] if events is looked[0] else 0
            looked = events, len(events)
            found[:] = [
                (event, at) for event_name, event, at in itertools.islice(events, first, None)
                if event_name in names and at > after and all(event.get(key) == value for key, value in fields.items())
            ]  # fmt: skip
            return bool(found)

        until(there, lambda: f"{names} {fields}: {self.logs()}")
        return found[0]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.path.glob("*.log"))

    def wait_workers(self, workers: int, *, after: float = 0.0) -> float:
        """When this number of workers has first applied a step together."""
        return self.wait("step.applied", after=after, workers=workers)[1]

    def halt(self) -> None:
        self.leader.run(TRUELINE, "halt", str(self.job.path))
        self.launcher.wait(100)

    def count(self) -> tuple[int, int, int]:
        """Steps, and how often records are missing or too many, as the model's own parameter counted them."""
        newest = checkpoint.latest(self.store)
        seen, steps = newest.state["model"]["seen"].round().long(), newest.step
        whole, rest = divmod(steps, RECORDS // BATCH)
        lost = int((whole - seen).clamp(min=0).sum())
        repeated = max(0, int(seen.sum()) - steps * BATCH) + int((seen - whole - 1).clamp(min=0).sum())
        assert int((seen == whole + 1).sum()) == rest * BATCH
        return steps, lost, repeated

    def changes(self, after: float, until: float) -> list[str]:
        """Why the group changed in that time."""
        return [event["why"] for name, event, at in self.events() if name == "view.published" and after < at <= until]

    def gap_ms(self, after: float) -> float:
        """The gap of the first step of a new group that was applied after a time."""
        for name, event, at in self.events():
            if name == "step.applied" and at > after and event["gap_ms"]:
                return float(event["gap_ms"])
        raise AssertionError("no step began a group")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Ends a process and all that it has started, at once."""
        for child in (process, *children(process.pid)):
            os.kill(child.pid, signal.SIGKILL)

    def steps(self, *, after: float = 0.0) -> list[int]:
        return [event["step"] for name, event, at in self.events() if name == "step.applied" and at > after]

    def move_to(self, name: str, launcher: subprocess.Popen[bytes]) -> None:
        """The host of this name leads the job from now on; its launcher is `launcher`."""
        self.leader, self.launcher = self.machines[name], launcher
        self.job = JobDir(self.path / name / "runs" / "job")
        self.processes.sort(key=lambda process: process is not launcher)

    def close(self) -> None:
        for process in self.processes:
            for child in [*children(process.pid), process]:
                try:
                    os.kill(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def children(pid: int):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
