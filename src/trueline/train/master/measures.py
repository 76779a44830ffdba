"""What members report beside their steps: bytes of a state on its way, and of memory. Both become events. No torch."""

import json
import math
from collections.abc import Callable

from trueline.train.membership.health import describe_transfer
from trueline.train.membership.state import State

MEMORY_S = 10.0


class MemberMeasures:
    """`emit` publishes an event."""

    def __init__(self, state: State, now: Callable[[], float], emit: Callable[..., None]) -> None:
        self._state, self._now, self._emit = state, now, emit
        self._receiving: set[str] = set()
        self.memory: dict[str, int] = {}
        self._memory_at = -math.inf

    def note_transfer(self, ref: str) -> None:
        """Publishes how much of its state a joiner has received, with each of its heartbeats, and the end of it."""
        member = self._state.members.get(ref)
        if member is not None and member.to_move and not member.sending:
            self._receiving.add(ref)
            does = describe_transfer(member)
            self._emit("worker.receiving", worker=ref, moved=member.moved, of=member.to_move, does=does)
        elif ref in self._receiving:
            self._receiving.discard(ref)
            self._emit("worker.received", worker=ref)

    def note_memory(self, ref: str, memory: int) -> None:
        """Publishes what the members have in memory, every MEMORY_S."""
        self.memory[ref] = memory
        if self._now() >= self._memory_at + MEMORY_S:
            self._memory_at = self._now()
            self.memory = {ref: self.memory[ref] for ref in self._state.members if ref in self.memory}
            self._emit("workers.measured", memory=json.dumps(self.memory))
