"""What the head of a group of learners writes into the store, and reads there: events, curves, status, orders."""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from trueline import events
from trueline.errors import TruelineError, first_line
from trueline.registry import event_file
from trueline.train.cluster.commands import HEAD
from trueline.train.cluster.store import HostStatus, JobLaunch, JobStore, LaunchEnd, LaunchStatus, OrderAnswer
from trueline.train.learners.decide import EndJob
from trueline.train.learners.output import StoredLog

STATUS_S, CURVES_S = 1.0, 5.0


class LaunchRecorder:
    """Of one launch. A store that is away is tried again, and told once; the learners do not end for it."""

    def __init__(self, store: JobStore, launch: JobLaunch, scratch: Path) -> None:
        self._store, self._launch, self._scratch = store, launch, scratch
        self._log = StoredLog(store, "events", [scratch / "events.jsonl"])
        self.step = 0
        self.loss: float | None = None
        self._core_s, self._counted_at = 0.0, time.monotonic()
        self._away: dict[str, str] = {}
        self._curves, self._learners = b"", tuple[HostStatus, ...]()

    def emit(self, name: str, /, **fields: events.Field) -> None:
        events.emit(name, **fields)
        line = {"at": time.time(), "seq": 0, "name": name, "fields": fields}
        self._log.write(json.dumps(line).encode() + b"\n")

    async def attempt(self, what: str, call: Callable[[], object]) -> bool:
        """Calls the store or the scheduler in a thread; reports once that it is away, and that it is back."""
        try:
            await asyncio.to_thread(call)
        except Exception as error:  # noqa: BLE001 - the learners do not end for it
            why = error.message if isinstance(error, TruelineError) else f"{type(error).__name__}: {first_line(error)}"
            if self._away.get(what) != why:
                self.emit("duties.delayed", what=what, why=why)
            self._away[what] = why
            return False
        if self._away.pop(what, None) is not None:
            self.emit("duties.resumed", what=what)
        return True

    async def publish(self, describe: Callable[[], tuple[HostStatus, ...]]) -> None:
        """Writes events, curves and status until it is cancelled. `describe`: the learners as they are."""
        status_at = curves_at = 0.0
        while True:
            await asyncio.to_thread(self._log.flush)
            now = time.monotonic()
            if now >= status_at:
                status_at = now + STATUS_S
                learners = describe()
                await self.attempt("the store", lambda learners=learners: self.write_status(learners))  # type: ignore[misc]
            if now >= curves_at:
                curves_at = now + CURVES_S
                await asyncio.to_thread(self._write_curves)
            await asyncio.sleep(self._log.every_s)

    def _write_curves(self) -> None:
        """Copies the event file of TensorBoard to the store."""
        with contextlib.suppress(OSError, TruelineError):
            data = (self._scratch / event_file.NAME).read_bytes()
            if data != self._curves:
                self._store.write(event_file.NAME, data)
                self._curves = data

    def write_status(self, learners: tuple[HostStatus, ...]) -> None:
        self._learners = learners
        now, here = time.monotonic(), sum(one.state not in ("queued", "starting") for one in learners)
        self._core_s += here * self._launch.engine.slots * (now - self._counted_at)
        self._counted_at = now
        self._store.write_status(self._launch.number, LaunchStatus(
            leader=HEAD, host=socket.gethostname(), step=self.step, loss=self.loss,
            workers=sum(one.workers for one in learners), target=len(learners), core_s=self._core_s,
            hosts=learners, at=time.time(),
        ))  # fmt: skip

    def read_orders(self, halt: Callable[[str], None]) -> None:
        """Answers the orders of clients."""
        number = self._launch.number
        newest = self._store.last_launch()
        if newest is None or newest.number != number or self._store.read_end(number) is not None:
            os._exit(1)  # a client has declared this launch dead: the learners end with their connections
        for name, order in self._store.list_orders(number):
            fault = ""
            if order.workers:
                fault = "the number of learners is the manifest's: submit it again with --set learners=N"
            else:
                halt(order.why)
            self._store.answer_order(name, OrderAnswer(fault=fault))

    def write_end(self, end: EndJob) -> None:
        """Writes what is left to write. Raises StorageError."""
        self._log.flush(whole=True)
        self._write_curves()
        self.write_status(self._learners)
        self._store.end_launch(self._launch.number, LaunchEnd(
            outcome=end.outcome, why=end.why, step=self.step, ended=time.time(),
        ))  # fmt: skip
