"""A host that lends its cores to the jobs of a store, until a signal takes them back: `trueline join STORE`."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec

from trueline import events
from trueline.engine.cluster.contract import Submission, SubmissionState
from trueline.engine.cluster.pool_records import PYTHON, PoolEnd, PoolHost, PoolTurn, PoolView
from trueline.engine.local.process import LIFELINE, signal_group
from trueline.errors import StorageError
from trueline.storage.location import Location

POLL_S, BEAT_S = 0.25, 1.0
LOGS_S = 2.0
"""Time between two writes of output to an object store: each is an object."""
SWEEP_S = 3600.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Lent:
    """A submission that runs here. `output`: its own file, of which `sent` bytes are in the store."""

    submission: Submission
    process: subprocess.Popen[bytes]
    output: BinaryIO
    sent: int = 0
    polite: bool = False
    """Whether it got SIGTERM."""


class PoolLender:
    """`cores`: slots that it lends; `memory_mb`: what they have together, 0: unknown."""

    def __init__(
        self, store: Location, *, name: str, cores: int, memory_mb: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.store, self.name, self.now = store, name, now
        self.running: dict[str, _Lent] = {}
        self._view = PoolView(store, now)
        self._host = PoolHost(id=secrets.token_hex(6), name=name, cores=cores, memory_mb=memory_mb)
        self._due = dict.fromkeys(("beat", "logs", "sweep"), 0.0)
        self._wake = threading.Event()
        self._signals = self._told = 0
        """Those that came, and those that were passed on."""
        self._away = False

    def run(self) -> str:
        """Lends until a signal takes the cores back and nothing runs here any more; returns how that ended. The first
        SIGINT or SIGTERM lets what runs end by itself, the second kills it."""
        with ExitStack() as exits:
            for number in (signal.SIGINT, signal.SIGTERM):
                exits.callback(signal.signal, number, signal.signal(number, self._note_signal))
            exits.callback(self._leave)
            events.emit("lender.lent", host=self.name, cores=self._host.cores, store=str(self.store))
            while not self._signals or self._is_busy():
                self.step()
                self._wake.wait(POLL_S)  # a store sends no notice; a signal ends the wait
                self._wake.clear()
        return "what ran here was killed" if self._signals > 1 else "its cores were taken back"

    def _is_busy(self) -> bool:
        """Whether something runs here, or has ended and the store does not show it yet."""
        alive = any(one.process.poll() is None for one in self.running.values())
        return alive or bool(self.running and not self._away)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._wake.set()

    def step(self) -> None:
        """One look at the pool, and what follows from it. A store that is away stops nothing that runs."""
        self._pass_signals()
        try:
            self._beat()
            self._view.look()
            self._reap()
            self._obey()
            self._view.give_up_silent(time.time())
            if not self._signals:
                self._take_turns()
            if self._is_due("logs", LOGS_S):
                self._send_logs()
            if self._is_due("sweep", SWEEP_S):
                self._view.sweep(time.time())
            if self._away:
                events.emit("lender.back", store=str(self.store))
            self._away = False
        except StorageError as error:
            if not self._away:
                events.emit("lender.away", store=str(self.store), why=error.message)
            self._away = True

    def _is_due(self, what: str, each_s: float) -> bool:
        due = self.now() >= self._due[what]
        if due:
            self._due[what] = self.now() + each_s
        return due

    def _beat(self) -> None:
        leaving = self._signals > 0
        if self._is_due("beat", BEAT_S) or leaving != self._host.leaving:
            self._host = msgspec.structs.replace(
                self._host, beat=self._host.beat + 1, at=time.time(), leaving=leaving
            )  # fmt: skip
            self._view.files.write_record(f"hosts/{self._host.id}.json", self._host)

    def _pass_signals(self) -> None:
        if self._signals == self._told:
            return
        self._told = self._signals
        events.emit("lender.leaving", host=self.name, running=len(self.running))
        for one in self.running.values():
            self._end(one, at_once=self._signals > 1)

    def _end(self, one: _Lent, *, at_once: bool) -> None:
        if at_once:
            signal_group(one.process.pid, signal.SIGKILL)
        elif not one.polite:
            one.polite = True
            one.process.terminate()

    def _reap(self) -> None:
        for name, one in list(self.running.items()):
            code = one.process.poll()
            if code is not None:
                signal_group(one.process.pid, signal.SIGKILL)  # what it has started and left behind
                self._send_log(name, one)
                reason = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
                self._view.end(name, PoolEnd(reason=reason, code=code if code >= 0 else None, at=time.time()))
                one.output.close()
                del self.running[name]
                events.emit("lender.ended", submission=name, why=reason)

    def _obey(self) -> None:
        for name, one in self.running.items():
            if name in self._view.ends or f"{name}.kill" in self._view.cancels:  # given up while this host was silent
                self._end(one, at_once=True)
            elif name in self._view.cancels:
                self._end(one, at_once=False)

    def _take_turns(self) -> None:
        """Starts what this host has room for."""
        for name in self._view.list_waiting():
            waits = name in self._view.submissions and self._view.report(name).state is SubmissionState.QUEUED
            if not waits or self._view.find_obstacle(name) or not self._view.has_room(self._host, name):
                continue
            made = self._view.take_turn(PoolTurn(name=name, host=self._host.id, node=self.name))
            self._view.look()
            if made:
                self._start(name)

    def _start(self, name: str) -> None:
        own = self._view.submissions[name].submission
        env = {key: value for key, value in os.environ.items() if key != LIFELINE} | own.env
        command = [sys.executable if word == PYTHON else word for word in own.command]
        output: BinaryIO | None = None
        try:
            output = self._open_output(own)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd="/",
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        except OSError as error:
            if output is not None:
                output.close()
            self._view.end(name, PoolEnd(reason=f"{self.name} cannot start it: {error}", code=127, at=time.time()))
            return
        self.running[name] = _Lent(own, process, output)
        events.emit("lender.started", submission=name, slots=own.slots)

    def _open_output(self, own: Submission) -> BinaryIO:
        if isinstance(self._view.files.where, Path):
            Path(own.log).parent.mkdir(parents=True, exist_ok=True)
            return Path(own.log).open("ab")
        return tempfile.TemporaryFile()

    def _send_logs(self) -> None:
        for name, one in self.running.items():
            self._send_log(name, one)

    def _send_log(self, name: str, one: _Lent) -> None:
        if isinstance(self._view.files.where, Path):
            return
        data = os.pread(one.output.fileno(), 1 << 26, one.sent)
        if data:
            self._view.files.append(f"logs/{name}.log", data)
            one.sent += len(data)

    def _leave(self) -> None:
        for one in self.running.values():
            self._end(one, at_once=True)
        try:
            self._view.files.remove(f"hosts/{self._host.id}.json")
        except (StorageError, OSError) as error:
            events.emit("lender.away", store=str(self.store), why=str(error))


def _die_with_parent() -> None:
    """In the child: it ends with the host's process, whose place other hosts take after a lease (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
