"""A host of a job, as the fleet knows it."""

import asyncio
from dataclasses import dataclass, field

from trueline.engine.contract import ProcessSpec, Seen
from trueline.engine.hosts.host_clock import ClockNotice
from trueline.engine.hosts.messages import FromMaster

Orders = asyncio.Queue[FromMaster | None]
"""What is on its way to a host; None ends its stream."""


@dataclass(slots=True, kw_only=True)
class Host:
    """A host that has joined, or this one (`id` is empty)."""

    id: str
    name: str
    address: str = ""
    cores: int = 0
    memory: int = 0
    """Bytes that were free before its first process; 0: unknown."""
    places: int = 0
    """Processes that it can take: as many as cores, unless its memory is too small for that."""
    heard_at: float
    orders: Orders | None = None
    """None: it is not connected at the moment."""
    processes: dict[str, Seen] = field(default_factory=dict)
    specs: dict[str, ProcessSpec] = field(default_factory=dict)
    """Of those that were ordered: an order may be lost with the connection."""
    doomed: dict[str, float] = field(default_factory=dict)
    """What has to end: ref -> grace in seconds."""
    leaving: bool = False
    load: float = 0.0
    standby: str = ""
    """Where a master on it would listen."""
    keeps_events: bool = False
    """It gets the job's events, which its page would begin with."""
    clock: ClockNotice = field(default_factory=ClockNotice)
    avoided: bool = False
    """Its workers could not reach others, or were not reached: nothing starts there until `avoided_until`."""
    avoided_until: float = 0.0
    avoidances: int = 0
    unwanted: set[str] = field(default_factory=set)
    """The processes for which it is avoided."""

    @property
    def alive(self) -> list[str]:
        return [ref for ref, seen in self.processes.items() if seen.alive]

    @property
    def capacity(self) -> int:
        """Processes that may be on it, those that run included; of one that leaves, none."""
        if self.leaving:
            return 0
        return len(set(self.alive) - self.unwanted) if self.avoided else self.places

    @property
    def room(self) -> int:
        return 0 if self.leaving or self.avoided else self.places - len(self.alive)

    @property
    def state(self) -> str:
        """In a word or two, for status and page."""
        if self.leaving:
            return "leaving"
        if self.id and self.orders is None:
            return "away"
        return "avoided" if self.avoided else "here"

    def fit(self, process_bytes: int) -> None:
        """Counts the places for processes that take `process_bytes` each; 0: that is not known yet."""
        known = self.memory and process_bytes
        self.places = min(self.cores, self.memory // process_bytes) if known else self.cores

    def send(self, order: FromMaster) -> None:
        if self.orders is not None:
            self.orders.put_nowait(order)
