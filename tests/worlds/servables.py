"""Servables whose runs wait for the test: a gated program, and handler workers without processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.bundle import Dim, Signature, TensorSpec
from trueline.errors import NotReady
from trueline.serve.handlers import pool as pools
from trueline.serve.handlers.config import HandlerPlan
from trueline.serve.handlers.pool import Pool
from trueline.serve.handlers.worker import Launch
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest

X = TensorSpec(name="x", datatype="FP32", shape=("batch",))
Y = TensorSpec(name="y", datatype="FP32", shape=("batch",))
SIGNATURE = Signature(inputs=(X,), outputs=(Y,), dims={"batch": Dim()})


class Gated:
    """A program that adds `step`; each of its runs waits until the gate is open."""

    format = "onnx"
    signature = SIGNATURE

    def __init__(self, step: float) -> None:
        self.step = step
        self.gate = threading.Event()
        self.entered = threading.Event()

    def run(self, inputs: Any) -> dict[str, Any]:
        self.entered.set()
        assert self.gate.wait(100)
        return {"y": inputs["x"] + np.float32(self.step)}


class FakeWorker:
    """A handler's worker without a process: ready at once, it answers when the test opens it."""

    made: list[FakeWorker]

    def __init__(self, launch: Launch, loop: asyncio.AbstractEventLoop, **_: Any) -> None:
        self.ended: asyncio.Future[str] = loop.create_future()
        self.ready = False
        self.answered = 0
        self.since = self.load_s = 0.0
        self.pid = 0
        self.asked: list[list[HandlerRequest]] = []
        self._answering: asyncio.Future[list[HandlerAnswer]] | None = None
        self._loop = loop
        FakeWorker.made.append(self)

    async def wait_started(self) -> None:
        self.ready = True

    def ask(self, asks: list[HandlerRequest]) -> asyncio.Future[list[HandlerAnswer]]:
        assert self.ready
        self.asked.append(asks)
        self._answering = self._loop.create_future()
        return self._answering

    @property
    def busy(self) -> bool:
        return self._answering is not None and not self._answering.done()

    def answer(self) -> None:
        assert self._answering is not None
        self.answered += len(self.asked[-1])
        self._answering.set_result([HandlerAnswer(body=one.request_id.encode()) for one in self.asked[-1]])

    def kill(self, why: str) -> None:
        self.ready = False
        if self._answering is not None and not self._answering.done():
            self._answering.set_exception(NotReady("its process was ended"))
        if not self.ended.done():
            self.ended.set_result(why)


@contextmanager
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeWorker]]:
    FakeWorker.made = []
    with monkeypatch.context() as patched:
        patched.setattr(pools, "Worker", FakeWorker)
        yield FakeWorker.made


def handler(workers: int = 1) -> Pool:
    plan = HandlerPlan(handler="noop.py", workers=workers)
    launch = Launch(model="noop", version="1.0", folder=Path(), config_file="", plan=plan)
    return Pool(launch, asyncio.get_running_loop())
