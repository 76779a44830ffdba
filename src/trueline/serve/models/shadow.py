"""A shadow: a version that gets copies of answered requests; its answers are compared and dropped.

Clients do not wait for it. A copy is skipped when the shadow's queue is more than half full.
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
    """One shadow and its results."""

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
        """Sends `inputs` to the shadow and compares its answer when it comes. Never raises."""
        try:
            if self.version.num_waiting > self.version.policy.max_requests // 2:
                self.left_out += 1
                return
            self.asked += 1
            found = self.version.ask(inputs)
        except Exception as error:  # noqa: BLE001 - blind on purpose: it must not fail a request
            self._count_failure(error)
            return
        if isinstance(found, dict):
            self._compare(answer, found)
            return
        self._pending.add(found)
        found.add_done_callback(lambda done: self._finish(answer, done))

    def _finish(self, answer: Mapping[str, Array], done: asyncio.Future[dict[str, Array]]) -> None:
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
