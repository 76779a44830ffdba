"""How many workers a server runs: for one model, and over all models by the memory that they take.

A worker is a process. Their number comes from clients and from files, so that without a bound one request ends the
server, or the machine, for lack of memory. A request above the bound is refused with both numbers; none is cut.
"""

import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trueline.serve import host
from trueline.serve.models.servable import TooManyWorkers

WORKER_BYTES = 32 * 2**20
"""Memory of a worker that was not measured: a small handler without torch."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def workers_of_model() -> int:
    """The most workers of one model: they may wait for the disk or the network, so there may be more than cores."""
    return max(64, 2 * len(os.sched_getaffinity(0)))


class WorkerBudget:
    """The workers of all models of a server. Call its methods on the loop."""

    def __init__(self, *, memory_bytes: int | None = None, processes: int = 1) -> None:
        """`memory_bytes`: of the machine or the control group; 0: unknown, without a bound of it. `processes`: servers
        that run the same models beside each other, and divide the memory.
        """
        self._memory_bytes = (host.usable_bytes() if memory_bytes is None else memory_bytes) // max(1, processes)
        self._held: dict[Hashable, tuple[int, int]] = {}

    def reserve(self, owner: Hashable, model: str, workers: int, worker_bytes: int = 0) -> None:
        """`owner` has this number of workers from now on, whose largest takes `worker_bytes`; 0: not measured.

        Fewer than before are always accepted. Raises TooManyWorkers; nothing changes then.
        """
        before, known_bytes = self._held.get(owner, (0, 0))
        each = max(WORKER_BYTES, worker_bytes, known_bytes)
        if workers > before:
            check_number(model, workers)
            others = sum(count * size for one, (count, size) in self._held.items() if one != owner)
            most = max(0, self._memory_bytes - others) // each
            if self._memory_bytes and workers > most:
                raise TooManyWorkers(
                    f"{workers} workers of model '{model}' take about {_mib(workers * each)} MiB of memory, and those "
                    f"of other models {_mib(others)} MiB; this server has {_mib(self._memory_bytes)} MiB",
                    hint=f"{most} workers are possible now; scale other models down to have more",
                )
        self._held[owner] = workers, each

    def release(self, owner: Hashable) -> None:
        """Harmless when repeated."""
        self._held.pop(owner, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the process of a handler may use."""

    address_space: int = 0  # bytes; 0: no bound
    open_files: int = 1024
    max_bytes: int = 256 * 2**20  # of a request, and of its answer
    budget: WorkerBudget = field(default_factory=WorkerBudget)  # of all models together


def check_number(model: str, workers: int, *, what: str = "") -> None:
    """Raises TooManyWorkers; `what`: the parameter or key that has the number."""
    most = workers_of_model()
    if workers > most:
        named = f" ({what})" if what else ""
        raise TooManyWorkers(
            f"{workers} workers of model '{model}'{named} are more than the {most} that one model may have on this "
            "machine",
            hint="name fewer; requests that wait together are one batch of a worker (batch_size)",
        )


def private_bytes(pid: int) -> int:
    """Memory that a process shares with no other one; 0 if it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return max(0, int(resident) - int(shared)) * _PAGE


def largest_bytes(pids: Iterator[int]) -> int:
    """The `private_bytes` of the largest of these processes."""
    return max(map(private_bytes, pids), default=0)


def _mib(count: int) -> int:
    return count // 2**20
