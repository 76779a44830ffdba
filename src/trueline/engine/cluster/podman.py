"""podman: each submission is a container of this machine, which waits for free slots as local processes do.

The keepers of `local.py` start `podman run`, which passes SIGTERM on. A container shares the machine's network and its
process numbers, and the folder of the submissions: so a head in it submits hosts without podman and its socket, which
would let it do anything. Sources: podman-run(1), podman-kill(1).
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trueline import files
from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState
from trueline.engine.cluster.local import INSIDE, LocalScheduler
from trueline.engine.cluster.settings import LocalSettings, PodmanSettings
from trueline.errors import UsageError

CALL_S = 20.0
CANNOT_START = 125
"""Exit code of podman itself."""


class PodmanScheduler:
    def __init__(self, settings: PodmanSettings, folder: Path | None = None) -> None:
        if bool(settings.image) == bool(settings.rootfs):
            raise UsageError("podman needs an image", hint="set image (or rootfs) in [engine.podman] of trueline.toml")
        self._settings, self._folder = settings, folder or files.user_cache() / "podman-engine"
        self._kept = LocalScheduler(LocalSettings(capacity=settings.capacity), self._folder)

    def submit(self, submission: Submission) -> str:
        command = make_command(submission, self._settings, self._folder)
        kept = msgspec.structs.replace(submission, command=tuple(command), env={})
        return self._kept.submit(kept, kill=("podman", "kill", submission.name))

    def cancel(self, name: str, *, grace: bool = True) -> None:
        self._kept.cancel(name, grace=grace)

    def list(self, job: str) -> Sequence[SubmissionReport]:
        listed = self._kept.list(job)
        orphans = _list_running() if any(_is_unexplained(one) for one in listed) else set()
        return [self._describe(one, orphans) for one in listed]

    def _describe(self, one: SubmissionReport, orphans: set[str]) -> SubmissionReport:
        if _is_unexplained(one) and one.name in orphans:
            return SubmissionReport(name=one.name, state=SubmissionState.RUNNING)
        if one.code == CANNOT_START:
            lines = self.read_log(one.name).decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix("Error: ") if lines else "no reason given"
            return msgspec.structs.replace(one, reason=f"podman could not start it: {why}")
        return one

    def read_log(self, name: str) -> bytes:
        return self._kept.read_log(name)


def make_command(submission: Submission, settings: PodmanSettings, folder: Path) -> list[str]:
    """`podman run` for a submission; `folder`: of the submissions."""
    seen = dict.fromkeys([f"{folder}:{folder}", *(f"{place}:{place}" for place in find_places(submission))])
    mounts = [*seen, *(mount if ":" in mount else f"{mount}:{mount}" for mount in settings.mounts)]
    command = [
        "podman", "run", "--rm", f"--name={submission.name}", "--network=host", "--pid=host",
        "--log-driver=none", "--pull=missing", f"--env={INSIDE}=1", f"--env=XDG_CACHE_HOME={folder.parent.parent}",
        *(f"--volume={mount}" for mount in mounts), *(f"--env={name}" for name in settings.env),
        *(f"--env={name}={value}" for name, value in submission.env.items()),
    ]  # fmt: skip
    if submission.memory_mb:
        command.append(f"--memory={submission.memory_mb}m")
    command += settings.options
    where = ["--rootfs", f"{settings.rootfs}:O"] if settings.rootfs else [settings.image]
    return [*command, *where, *submission.command]


def find_places(submission: Submission) -> list[str]:
    """Folders that the command names and the log's: the store of the job, if that is one."""
    named = [word for word in submission.command[1:] if word.startswith("/") and os.path.isdir(word)]
    return [*named, str(Path(submission.log).parent)]


def _is_unexplained(one: SubmissionReport) -> bool:
    """Whether a keeper and its `podman run` were killed: the container may live."""
    return one.state is SubmissionState.ENDED and one.code is None and "killed, or" in one.reason


def _list_running() -> set[str]:
    """Names of containers; empty in a container, where there is no podman."""
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["podman", "ps", "--format={{.Names}}"], capture_output=True, text=True, timeout=CALL_S, check=False
        )
        return set(done.stdout.split())
    return set()
