"""A shadow: a version that is asked what another answers, and whose answers are compared and thrown away.

It costs the requests nothing but the machine's time: the shadow is asked after the answer is there, and left out when
its queue is more than half full. What differs is counted, and the largest difference kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trueline import events
from trueline.errors import RequestError
from trueline.runtime.compare import compare
from trueline.serve.models.servable import Servable

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@dataclass(slots=True)
class Shadow:
    """One version in another's shadow, and what was seen of it."""

    version: Servable
    asked: int = 0
    left_out: int = 0
    failed: int = 0
    agreed: int = 0
    differed: int = 0
    max_abs_error: float = 0.0
    first_difference: str = ""
    _pending: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)

    def show(self, inputs: dict[str, Any], answer: Mapping[str, Array]) -> None:
        """Asks the shadow the same and compares, now or later. Never raises."""
        try:
            if self.version.num_waiting > self.version.policy.max_requests // 2:
                self.left_out += 1
                return
            self.asked += 1
            found = self.version.ask(inputs)
        except Exception as error:  # noqa: BLE001 - blind on purpose: a shadow is not seen by who asks
            self._count_failure(error)
            return
        if isinstance(found, dict):
            self._compare(answer, found)
            return
        self._pending.add(found)
        found.add_done_callback(lambda done: self._later(answer, done))

    def _later(self, answer: Mapping[str, Array], done: asyncio.Future[dict[str, Array]]) -> None:
        self._pending.discard(done)
        if done.cancelled():
            return
        failure = done.exception()
        if failure is not None:
            self._count_failure(failure)
        else:
            self._compare(answer, done.result())

    def _count_failure(self, error: BaseException) -> None:
        self.failed += 1
        if self.failed == 1:
            why = error.message if isinstance(error, RequestError) else type(error).__name__
            events.emit("shadow.failed", model=self.version.model, version=self.version.version, why=why)

    def _compare(self, answer: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        one = compare(answer, found)
        self.max_abs_error = max(self.max_abs_error, one.max_abs_error)
        if one.agrees:
            self.agreed += 1
            return
        self.differed += 1
        if not self.first_difference:
            self.first_difference = one.reason
            events.emit("shadow.differed", model=self.version.model, version=self.version.version, why=one.reason)

    def facts(self) -> dict[str, Any]:
        """What was seen, for who manages."""
        return {
            "version": self.version.version,
            "asked": self.asked,
            "agreed": self.agreed,
            "differed": self.differed,
            "failed": self.failed,
            "leftOut": self.left_out,
            "maxAbsError": self.max_abs_error,
            "firstDifference": self.first_difference,
        }
