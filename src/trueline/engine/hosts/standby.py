"""What `trueline join` needs of the part that leads a job from this host, should the master's host die."""

import contextlib
import fcntl
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trueline.engine.hosts.messages import EventLines, HostList, JournalCopy, Welcome
from trueline.engine.hosts.token import TokenFile
from trueline.engine.local.process import Lifeline

POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """What the user of this machine wants. `versions`: of trueline, Python and torch here."""

    address: str
    token: TokenFile
    cores: int
    name: str
    interface: str = ""
    ports: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LentHost:
    """What a standby gets of the host whose cores are lent: its agent, and the files of the job."""

    agent: Any
    socket: Path
    lifeline: Lifeline
    job: Path
    request: JoinRequest


def replace_earlier(folder: Path, name: str) -> int:
    """Ends an earlier `trueline join` of this host for the same launch, whose ssh connection may be half open. Returns
    a descriptor whose lock marks this one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / f"{socket.gethostname()}-{name}.pid", os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            _kill_holder(lock)
            time.sleep(POLL_S)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}".encode(), 0)
    return lock


def _kill_holder(lock: int) -> None:
    """Kills the process whose number is in the file, if it has that open: the number may be that of an earlier one,
    which another process has now."""
    number, of = os.pread(lock, 32, 0), os.fstat(lock)
    if not number:
        return
    with contextlib.suppress(OSError):  # it has ended
        handle = os.pidfd_open(int(number))  # before the look, so that it is the same process
        try:
            if any(os.path.samestat(of, os.stat(one)) for one in Path(f"/proc/{int(number)}/fd").iterdir()):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


class Standby(Protocol):
    """Leads the job from this host, should the master's host die."""

    address: str
    """HOST:PORT where it would listen; empty: it cannot."""

    others: list[str]
    """Where masters on other hosts would listen, the first to lead first."""

    def note(self, message: Welcome | JournalCopy | HostList | EventLines, job: Path) -> None:
        """Enters what the master sends; `job` is the folder of the job on this host."""
        ...

    def may_lead(self, host_id: str, silent_s: float) -> bool:
        """Whether this host may lead after so long without a master; makes ready for it when that is near."""
        ...

    async def lead(self, alive: list[str], host: LentHost, host_id: str) -> str | None:
        """Leads the job to its end and returns how it ended; None if it did not begin, or another host leads."""
        ...

    def halt(self, why: str) -> bool:
        """Ends the job that this host leads after a checkpoint; False: it leads none."""
        ...
