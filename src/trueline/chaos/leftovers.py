"""What a job leaves behind on its machine: processes that carry its mark, sockets, shared memory. Linux (/proc)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MARK = "TRUELINE_CHAOS"
"""Variable of the environment that all processes of a storm's job inherit."""


@dataclass(frozen=True, slots=True)
class Found:
    pid: int
    parent: int
    what: str
    """Its command line."""


def marked(mark: str) -> list[Found]:
    """The processes that live and whose environment holds the mark."""
    wanted, found = f"{MARK}={mark}\0".encode(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        home = Path("/proc", name)
        try:
            if wanted not in (home / "environ").read_bytes():
                continue
            state, parent = (home / "stat").read_text().rpartition(")")[2].split()[:2]
            what = (home / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended meanwhile, or is not ours
            continue
        if state not in "ZX":
            found.append(Found(int(name), int(parent), what))
    return found


@dataclass(frozen=True, slots=True)
class Remains:
    processes: frozenset[str]
    shared: frozenset[str]

    @classmethod
    def of(cls, mark: str) -> Remains:
        shared = frozenset(entry.name for entry in Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else ()
        return cls(frozenset(f"{found.pid} {found.what}" for found in marked(mark)), frozenset(shared))

    def since(self, before: Remains) -> list[str]:
        """What has come since, in words. A socket needs a process that holds it."""
        # Others use shared memory too: torch's and gloo's own have these names.
        shared = [name for name in self.shared - before.shared if name.startswith(("torch_", "gloo", "trueline"))]
        return [f"a process is left: {what}" for what in sorted(self.processes - before.processes)] + [
            f"shared memory is left: {name}" for name in sorted(shared)
        ]
