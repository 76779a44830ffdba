"""The scheduler of one machine: detached processes, which wait for free slots in a folder of the user.

    FOLDER/NAME.json   the submission            FOLDER/NAME.run    its process has started (or its keeper waits)
    FOLDER/NAME.pid    its keeper                FOLDER/NAME.why    why it waits
    FOLDER/NAME.end    how it ended

The keeper is a small process of its own session: it waits for its turn (`line.py`), starts the submission's command,
and writes how that ended. No service runs, and the client may go. A head in a container cannot start a keeper outside:
those of its job start the keepers that are missing. Pids are reused, so pid and start time identify a process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from trueline import files
from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState, job_of
from trueline.engine.cluster.line import Waiter, find_obstacle
from trueline.engine.cluster.settings import LocalSettings
from trueline.engine.local.process import LIFELINE, read_start, signal_group
from trueline.errors import UsageError

_Record = TypeVar("_Record", bound=msgspec.Struct)
INSIDE = "TRUELINE_KEPT"
"""Environment variable of a process in a container of this machine."""
POLL_S = 0.1
KEPT_S = 86_400.0
"""How long the records of an ended submission stay."""
START_S = 30.0
"""A submission whose keeper has not appeared by then was never started: its client died."""


class QueuedSubmission(msgspec.Struct, frozen=True, kw_only=True):
    submission: Submission
    submitted_at: float
    capacity: int
    kill: tuple[str, ...] = ()
    """Command that ends the process at once; empty: SIGKILL for its group."""


class KeptProcess(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started: int
    """Clock ticks since the machine's boot."""

    @property
    def alive(self) -> bool:
        return read_start(self.pid) == self.started and not _is_zombie(self.pid)


class ProcessEnd(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    code: int | None = None


def default_folder() -> Path:
    return files.user_cache() / "local-engine"


class LocalScheduler:
    def __init__(self, settings: LocalSettings, folder: Path | None = None) -> None:
        self._folder = SubmissionFolder(folder or default_folder())
        self._capacity = settings.capacity or len(os.sched_getaffinity(0))

    def submit(self, submission: Submission, *, kill: tuple[str, ...] = ()) -> str:
        """As the contract has it. `kill`: a command that ends the process at once, where SIGKILL does not."""
        need = max(submission.slots, submission.gang)
        if need > self._capacity:
            raise UsageError(
                f"{job_of(submission.name)} needs {need} slots to begin, and this machine has {self._capacity}",
                hint="ask for fewer workers at least (--workers MIN:MAX), or set capacity in [engine.local]",
            )
        own = self._folder
        own.sweep(time.time())
        queued = QueuedSubmission(submission=submission, submitted_at=time.time(), capacity=self._capacity, kill=kill)
        if own.add(queued) and INSIDE not in os.environ:
            start_keeper(own, queued)
        return submission.name

    def cancel(self, name: str, *, grace: bool = True) -> None:
        if self._folder.withdraw(name):
            return
        queued = self._folder.read(name, "json", QueuedSubmission)
        keeper, process = self._folder.read(name, "pid", KeptProcess), self._folder.read(name, "run", KeptProcess)
        for one in (keeper, process):
            if one is None or not one.alive:
                continue
            if queued is not None and queued.kill and not grace:
                if one is keeper:
                    os.kill(one.pid, signal.SIGUSR1)
                    return
                subprocess.run(queued.kill, capture_output=True, check=False)
            elif not grace:
                signal_group(os.getpgid(one.pid), signal.SIGKILL)
            else:
                os.kill(one.pid, signal.SIGTERM)
                return

    def list(self, job: str) -> Sequence[SubmissionReport]:
        now = time.time()
        return [self._folder.report(name, now) for name in self._folder.names() if job_of(name) == job]

    def read_log(self, name: str) -> bytes:
        queued = self._folder.read(name, "json", QueuedSubmission)
        with suppress(OSError):
            return Path(queued.submission.log).read_bytes() if queued is not None else b""
        return b""


def start_keeper(folder: "SubmissionFolder", queued: QueuedSubmission) -> None:
    """Starts the keeper of a submission, as no child of this process."""
    own = queued.submission
    Path(own.log).parent.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != LIFELINE}
    command = [sys.executable, "-m", "trueline.engine.cluster.local", str(folder.path), own.name]
    with Path(own.log).open("ab") as log:
        subprocess.run(
            ["sh", "-c", '"$@" &', "sh", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, env=env, cwd="/", check=True,
        )  # fmt: skip


class SubmissionFolder:
    """The files of all submissions of a user on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, queued: QueuedSubmission) -> bool:
        """False: it was submitted before."""
        file = self.path / f"{queued.submission.name}.json"
        return files.write_atomic(file, msgspec.json.encode(queued), mode=0o600, replace=False)

    def names(self) -> list[str]:
        return sorted(path.name.removesuffix(".json") for path in self.path.glob("*.json"))

    def read(self, name: str, kind: str, record: type[_Record]) -> _Record | None:
        try:
            return msgspec.json.decode((self.path / f"{name}.{kind}").read_bytes(), type=record)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, name: str, kind: str, record: msgspec.Struct | str, *, replace: bool = True) -> bool:
        data = msgspec.json.encode(record)
        return files.write_atomic(self.path / f"{name}.{kind}", data, mode=0o600, replace=replace)

    def report(self, name: str, now: float) -> SubmissionReport:
        keeper, process = self.read(name, "pid", KeptProcess), self.read(name, "run", KeptProcess)
        kept = keeper is not None and keeper.alive
        runs = process is not None and (kept or process.alive)  # the keeper has yet to write how it ended
        end = self.read(name, "end", ProcessEnd)  # after that: the keeper ends once it is written
        if end is not None:
            return SubmissionReport(name=name, state=SubmissionState.ENDED, reason=end.reason, code=end.code)
        if runs:
            return SubmissionReport(name=name, state=SubmissionState.RUNNING)
        queued = self.read(name, "json", QueuedSubmission)
        fresh = keeper is None and queued is not None and now - queued.submitted_at < START_S
        if process is None and (fresh or kept):
            why = "starts"
            with suppress(OSError, msgspec.DecodeError):
                why = msgspec.json.decode((self.path / f"{name}.why").read_bytes(), type=str)
            return SubmissionReport(name=name, state=SubmissionState.QUEUED, reason=why)
        return SubmissionReport(
            name=name, state=SubmissionState.ENDED, reason="it was killed, or its machine restarted"
        )

    def withdraw(self, name: str) -> bool:
        """Ends a submission that has not started; False: it has, or is not known."""
        with files.hold_lock(self.path / "lock"):
            if not (self.path / f"{name}.json").exists() or (self.path / f"{name}.run").exists():
                return False
            self.write(name, "end", ProcessEnd(reason="cancelled while it waited"))
            return True

    def living(self) -> list[Waiter]:
        now, waiters = time.time(), []
        for name in self.names():
            state, queued = self.report(name, now).state, self.read(name, "json", QueuedSubmission)
            if queued is not None and state is not SubmissionState.ENDED:
                own = queued.submission
                waiters.append(Waiter(
                    name=name, slots=own.slots, gang=own.gang, priority=own.priority,
                    submitted_at=queued.submitted_at, running=state is SubmissionState.RUNNING,
                ))  # fmt: skip
        return waiters

    def sweep(self, now: float) -> None:
        """Removes the records of what ended long ago."""
        for end in self.path.glob("*.end"):
            with suppress(OSError):
                if now - end.stat().st_mtime > KEPT_S:
                    name = end.name.removesuffix(".end")
                    for kind in ("json", "pid", "run", "why", "end"):
                        (self.path / f"{name}.{kind}").unlink(missing_ok=True)


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    return True


def _own_process(pid: int) -> KeptProcess:
    return KeptProcess(pid=pid, started=read_start(pid) or 0)


class _Keeper:
    """Waits for the turn of one submission, starts its command and writes how it ended."""

    def __init__(self, folder: SubmissionFolder, name: str) -> None:
        queued = folder.read(name, "json", QueuedSubmission)
        if queued is None:
            raise UsageError(f"there is no submission '{name}' in {folder.path}")
        self._folder, self._name, self._queued = folder, name, queued
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        signal.signal(signal.SIGTERM, self._cancel)
        signal.signal(signal.SIGUSR1, self._kill)

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self._cancelled = True
        if self._child is not None:
            self._child.terminate()

    def _kill(self, number: int, frame: FrameType | None) -> None:
        subprocess.run(self._queued.kill, capture_output=True, check=False)

    def run(self) -> None:
        if not self._folder.write(self._name, "pid", _own_process(os.getpid()), replace=False):
            return  # another keeper was first
        before = ""
        while self._child is None:
            with files.hold_lock(self._folder.path / "lock"):
                if self._folder.read(self._name, "end", ProcessEnd) is not None:
                    return  # it was withdrawn
                why = self._find_obstacle()
                if not why:
                    self._start()
                    break
            if why != before:
                self._folder.write(self._name, "why", why)
            before = why
            time.sleep(POLL_S)  # another process frees slots, by ending in any way
        assert self._child is not None
        while (code := self._child.poll()) is None:
            self._start_missing()
            time.sleep(POLL_S)  # submissions of a container arrive without a notice
        self._folder.write(self._name, "end", _describe(code))

    def _start_missing(self) -> None:
        for name in self._folder.names():
            if job_of(name) == job_of(self._name) and not (self._folder.path / f"{name}.pid").exists():
                queued = self._folder.read(name, "json", QueuedSubmission)
                if queued is not None and self._folder.read(name, "end", ProcessEnd) is None:
                    start_keeper(self._folder, queued)

    def _find_obstacle(self) -> str:
        living = self._folder.living()
        own = [one for one in living if one.name == self._name]
        others = [one for one in living if one.name != self._name]
        return find_obstacle(own[0], others, self._queued.capacity) if own else ""

    def _start(self) -> None:
        own = self._queued.submission
        self._child = subprocess.Popen(own.command, stdin=subprocess.DEVNULL, env=os.environ | own.env)
        self._folder.write(self._name, "run", _own_process(self._child.pid))
        if self._cancelled:
            self._child.terminate()


def _describe(code: int) -> ProcessEnd:
    if code < 0:
        return ProcessEnd(reason=f"killed by {signal.Signals(-code).name}")
    return ProcessEnd(reason=f"exit code {code}", code=code)


def main() -> None:
    """`python -m trueline.engine.cluster.local FOLDER NAME`: the keeper of a submission."""
    folder, name = sys.argv[1:]
    _Keeper(SubmissionFolder(Path(folder)), name).run()


if __name__ == "__main__":
    main()
