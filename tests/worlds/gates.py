"""Acts on a running job at its steps, so that the job cannot end before: workers wait in their recipe until it is done.

A recipe whose learning-rate schedule is `pass_gate` (tests/ps/recipes) comes here once a step. Works for any speed of
the machine, which events of the master do not: these arrive some steps later, perhaps after the job.
"""

from __future__ import annotations

import os
import signal
import socketserver
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trueline import events
from worlds.killer import Killer
from worlds.waiting import until

VARIABLE = "TRUELINE_STEP_GATE"
SLACK = 6
"""Steps that go on while an act is carried out."""


class StepGate(Killer):
    """Carries out each act at its step, in order: kills the process or waits for the event that it names, or calls it.
    `slack`: the steps that a worker may go on meanwhile; then it waits until the act is done."""

    def __init__(self, job_dir: Path, *acts: tuple[int, str | Callable[[], object]], slack: int = SLACK) -> None:
        super().__init__(job_dir, [])
        self.acts, self.slack, self.done, self.step = acts, slack, 0, -1
        self.error: BaseException | None = None
        self._closed, self._ended, self._seen = False, set[int](), set[str]()
        self._changed = threading.Condition()
        self._stack = ExitStack()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        super().__call__(name, fields)
        self._seen.add(name)

    def arrive(self, step: int) -> None:
        """A process of the job is at `step`; returns when it may go on."""
        with self._changed:
            self.step = max(self.step, step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._is_open(step))

    def _is_open(self, step: int) -> bool:
        return self.done == len(self.acts) or step < self.acts[self.done][0] + self.slack

    def _carry_out(self) -> None:
        try:
            for due, act in self.acts:
                with self._changed:
                    self._changed.wait_for(lambda due=due: self._closed or self.step >= due)
                    if self._closed:
                        return
                if not isinstance(act, str):
                    act()
                elif "." in act:
                    until(lambda act=act: act in self._seen, act)
                else:
                    self.kill(act)
                with self._changed:
                    self.done += 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  raised where the gate closes
            self.error = error
            self._close()

    def kill(self, what: str) -> None:
        pid = until(lambda: self.find(what), lambda: f"{what} runs: {self.pids}")
        self._ended.add(pid)
        os.kill(pid, signal.SIGKILL)
        self.killed.append(what)

    def find(self, what: str) -> int | None:
        if what != "master":
            pid = self.pids.get(what)
        else:
            record = self.job.read_master()
            pid = None if record is None else record.pid
        return None if pid in self._ended else pid

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        gate = self

        class StepHandler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                gate.arrive(int(self.rfile.readline() or -1))
                self.wfile.write(b"\n")

        class GateServer(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A worker was killed while it waited."""

        server = GateServer(("127.0.0.1", 0), StepHandler)
        for work in (server.serve_forever, self._carry_out):
            threading.Thread(target=work, daemon=True).start()
        os.environ[VARIABLE] = str(server.server_address[1])
        for end in (server.server_close, server.shutdown, self._close, lambda: os.environ.pop(VARIABLE)):
            self._stack.callback(end)
        self._stack.enter_context(events.listening(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        if self.error is not None:
            raise self.error
        if kind is None:
            assert self.done == len(self.acts), f"{self.done} of {self.acts}"
