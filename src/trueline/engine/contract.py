"""The Engine: start a process of a role, kill it, watch exits. Everything elastic is above it.

Laws, one conformance test each (`tests/conformance/engine.py`): an engine never restarts anything; `add` and
`kill` are idempotent; an incarnation ends with exactly one EXITED or LOST; `list` is enough for a restarted master to
adopt what runs; the log of a dead process stays readable. An engine's events are hints: the master's own lease
decides who is alive.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start. `ref` follows from role, slot and incarnation, so asking twice starts one."""

    role: str
    slot: int
    incarnation: int
    entry: str
    """`module:function`, called without arguments; what it returns is the exit code (None: 0)."""
    log: str
    """File that takes the process's stdout and stderr; it outlives the process."""
    env: dict[str, str] = {}

    @property
    def ref(self) -> str:
        return make_ref(self.role, self.slot, self.incarnation)


def make_ref(role: str, slot: int, incarnation: int) -> str:
    """
    >>> make_ref("worker", 2, 0)
    'worker-2.0'
    """
    return f"{role}-{slot}.{incarnation}"


def parse_ref(ref: str) -> tuple[str, int, int]:
    """The parts of a ref. Raises ValueError when it is none.

    >>> parse_ref("worker-2.0")
    ('worker', 2, 0)
    """
    role, _, rest = ref.rpartition("-")
    slot, _, incarnation = rest.partition(".")
    return role, int(slot), int(incarnation)


CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)


class Kind(StrEnum):
    STARTED = "started"
    EXITED = "exited"
    LOST = "lost"
    """It has ended and nobody knows how, or the engine has lost sight of it (its incarnation fences it)."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine saw of one process. `reason` is in words, e.g. `killed by SIGKILL` or `exit code 1`."""

    ref: str
    kind: Kind
    pid: int = 0
    code: int | None = None
    signal: int | None = None
    reason: str = ""

    @property
    def alive(self) -> bool:
        return self.kind is Kind.STARTED

    @property
    def failed(self) -> bool:
        """It ended by itself and not well: by an exit code, or by a signal that a process brings upon itself."""
        return bool(self.code) or self.signal in CRASHES


class Engine(Protocol):
    async def add(self, specs: Sequence[ProcessSpec]) -> None: ...

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; SIGKILL at once when it is 0. An unknown ref is not an error."""
        ...

    def watch(self) -> AsyncIterator[Seen]:
        """What is known of every process, then every change. Ends when the engine is gone."""
        ...

    async def list(self) -> list[Seen]: ...

    async def capacity(self) -> int | None:
        """For how many workers there is room, those that run included; None: unknown."""
        ...
