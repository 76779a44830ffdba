"""The Engine: starts processes, kills them, reports exits. Everything elastic is built above it.

Laws, one conformance test each (`tests/conformance/engine.py`): an engine never restarts anything; `add` and `kill` are
idempotent; an incarnation ends with exactly one EXITED or LOST; with `list` a restarted master adopts what runs; the
log of a dead process stays readable. An engine's reports are hints: the master's lease decides who is alive.
"""

import signal
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start. `ref` follows from role, slot and incarnation, so adding it twice starts one."""

    role: str
    slot: int
    incarnation: int
    entry: str
    """`module:function`, called without arguments; what it returns is the exit code (None: 0)."""
    log: str
    """File for the process's stdout and stderr; it outlives the process."""
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
    """Role, slot and incarnation. Raises ValueError for anything but a ref.

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
    """Its exit code is unknown, or the engine has lost contact with it (its incarnation fences it)."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's report of a process. `reason` is for people: `killed by SIGKILL`, `exit code 1`."""

    ref: str
    kind: Kind
    pid: int = 0
    """0: it has not begun yet. `watch` tells of it once it has."""
    code: int | None = None
    signal: int | None = None
    reason: str = ""
    host: str = ""
    """Where it runs; empty: on the master's machine."""

    @property
    def alive(self) -> bool:
        return self.kind is Kind.STARTED

    @property
    def failed(self) -> bool:
        """Whether it failed by itself: an exit code other than 0, or a signal of `CRASHES`."""
        return bool(self.code) or self.signal in CRASHES


class Engine(Protocol):
    async def add(self, specs: Sequence[ProcessSpec]) -> None: ...

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; SIGKILL at once when it is 0. An unknown ref is not an error."""

    def watch(self) -> AsyncIterator[Seen]:
        """Yields the last report of every known process, then every change. Ends when the engine is gone."""

    async def list(self) -> list[Seen]: ...

    async def capacity(self) -> int | None:
        """How many workers there is room for, including those that run; None: unknown."""
