"""What a job leaves behind on its machine: processes that carry its mark, and shared memory. Linux (/proc)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MARK = "TRUELINE_CHAOS"
"""Environment variable that all processes of a storm's job inherit."""
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class MarkedProcess:
    pid: int
    parent: int
    command: str

    def __str__(self) -> str:
        return f"{self.pid} {self.command}"


def find_marked(mark: str) -> list[MarkedProcess]:
    """The living processes whose environment holds the mark."""
    entry, processes = f"{MARK}={mark}\0".encode(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        home = Path("/proc", name)
        try:
            if entry not in (home / "environ").read_bytes():
                continue
            state, parent = (home / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (home / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
        if state not in "ZX":
            processes.append(MarkedProcess(int(name), int(parent), command))
    return processes


@dataclass(frozen=True, slots=True)
class Remains:
    processes: frozenset[str]
    shared: frozenset[str]

    @classmethod
    def of(cls, mark: str) -> Remains:
        shared = frozenset(entry.name for entry in SHARED.iterdir()) if SHARED.exists() else frozenset[str]()
        return cls(frozenset(str(process) for process in find_marked(mark)), shared)

    def since(self, before: Remains) -> list[str]:
        """What is new, in words. Sockets need no check: each needs a process that holds it."""
        # Other programs use shared memory too; torch and gloo use these names.
        shared = [name for name in self.shared - before.shared if name.startswith(("torch_", "gloo", "trueline"))]
        left = [f"a process is left: {process}" for process in sorted(self.processes - before.processes)]
        return left + [f"shared memory is left: {name}" for name in sorted(shared)]
