"""A process that attempts model after model; it is replaced when it hangs, crashes or has grown old."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil
from bench.attack.sealed import Record, attempt

LIFE = 120
"""Attempts of one process: exporters keep what they made."""


def warm() -> None:
    """Loads what the first export of a process loads, so that forked ones have it."""
    import torch

    from trueline.capture.export.tracing import quiet

    torch.set_num_threads(1)  # a forked process has no threads but its first
    with tempfile.TemporaryDirectory() as folder, quiet():
        program = torch.export.export(torch.nn.Linear(2, 2).eval(), (torch.ones(2, 2),))
        made = torch.onnx.export(program, (), dynamo=True, verbose=False)
        assert made is not None
        made.save(f"{folder}/model.onnx")


def _work(asked: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what exporters and runtimes print
    while True:
        try:
            text, options = asked.recv()
        except EOFError:
            return
        asked.send(attempt(text, **options))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Worker:
    """Attempts models in a process beside this one. `limit_s` of processor time for each, so that neighbours do not
    decide what hangs; one that waits without computing has ten times as long."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._process: Any = None
        self._left = 0

    def attempt(self, text: str, **options: Any) -> Record:
        """As `sealed.attempt`; a record with `hang` or `crash` when the process ended otherwise."""
        if self._left == 0:
            self.close()
            self._start()
        self._left -= 1
        try:
            self._pipe.send((text, options))
            if self._answered():
                found: Record = self._pipe.recv()
                return found
            record = {"hang": f"no end in {self.limit_s:g} s of processor time"}
        except (EOFError, OSError):
            self._process.join()
            record = {"crash": f"the process ended with exit code {self._process.exitcode}"}
        self.close()
        return record

    def _answered(self) -> bool:
        """Whether an answer came in time."""
        process = psutil.Process(self._process.pid)
        spent, started = _cpu_s(process), time.monotonic()
        while not self._pipe.poll(min(self.limit_s, 1.0)):
            if _cpu_s(process) - spent > self.limit_s or time.monotonic() - started > 10 * self.limit_s:
                return False
        return True

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._left = LIFE

    def close(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._process, self._left = None, 0
