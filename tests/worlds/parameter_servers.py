"""Real parameter servers of a small model, for tests: processes of their own that end with the test."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from trueline.engine.local.process import LIFELINE
from trueline.ps import dial
from trueline.ps.client import PsClient
from trueline.ps.gradients import Gradients
from trueline.ps.link import ServerLink
from trueline.ps.messages import DenseSpec, ModelSpec, OptimizerSpec, Routing, ServerReport, TableSpec
from trueline.ps.partition import make_routing
from worlds.waiting import until_reached

SECRET = b"the secret of a test"
TABLE, DIM = "items", 4
SPEC = ModelSpec(
    seed=1,
    groups=(OptimizerSpec(kind="sgd"),),
    tables=(TableSpec(name=TABLE, dim=DIM, group=0, init="zeros"),),
    dense=(DenseSpec(name="bias", shape=(3,), group=0),),
)
IDS = np.array([-5, 0, 3, 7, 2**62, 11, 12, 13], dtype=np.int64)
_T = TypeVar("_T")


class World:
    """Servers in the folder of a job. Each push that `push` sends takes 1 from the rows of IDS and from the bias."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self._lifeline, self._writing = os.pipe()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._incarnations: dict[str, int] = {}
        self.addresses = functools.partial(dial.read_address, job)

    def start(self, ref: str) -> subprocess.Popen[bytes]:
        """The next incarnation of `server-SLOT`."""
        number = self._incarnations[ref] = self._incarnations.get(ref, -1) + 1
        env = os.environ | {
            "TRUELINE_JOB": str(self.job), "TRUELINE_SECRET": SECRET.decode(), "TRUELINE_REF": f"{ref}.{number}",
            LIFELINE: str(self._lifeline),
        }  # fmt: skip
        command = [sys.executable, "-m", "trueline.ps.server.process"]
        log = (self.job / f"{ref}.log").open("ab")
        process = subprocess.Popen(command, env=env, pass_fds=[self._lifeline], stdout=log, stderr=log)
        log.close()
        self.processes[ref] = process
        return process

    def kill(self, ref: str) -> None:
        self.processes[ref].kill()
        self.processes[ref].wait()

    def end_launcher(self) -> None:
        """Has the servers see that their launcher has ended. May be repeated."""
        writing, self._writing = self._writing, -1
        if writing >= 0:
            os.close(writing)

    def end(self) -> None:
        self.end_launcher()
        os.close(self._lifeline)
        for process in self.processes.values():
            process.kill()
            process.wait()

    def log(self, ref: str) -> str:
        return (self.job / f"{ref}.log").read_text()

    def folder(self, ref: str) -> Path:
        return dial.folder_of(self.job, ref)

    def client(self, routing: Routing, **options: object) -> PsClient:
        return PsClient(self.addresses, routing, SECRET, **options)  # type: ignore[arg-type]

    def ask(self, ref: str, question: Callable[[ServerLink], Awaitable[_T]]) -> _T:
        """Asks a server, which may not listen yet, over a connection of its own."""

        async def run() -> _T:
            link = ServerLink(self.addresses, ref, SECRET)
            try:
                return await until_reached(lambda: question(link), f"an answer of {ref}")
            finally:
                await link.close()

        return asyncio.run(run())

    def stats(self, ref: str) -> ServerReport:
        return self.ask(ref, lambda link: link.stats())

    def begin(self, count: int, spec: ModelSpec = SPEC) -> Routing:
        """Starts and configures servers; the dense values are zeros."""
        routing = make_routing([f"server-{slot}" for slot in range(count)], spec.dense)
        for ref in routing.servers:
            self.start(ref)
        for ref in routing.servers:
            self.ask(ref, lambda link: link.configure(spec, routing))
        client = self.client(routing)
        client.initialize({one.name: np.zeros(one.shape, np.float32).reshape(-1) for one in spec.dense}, 30)
        client.close()
        return routing


@contextmanager
def world(job: Path) -> Iterator[World]:
    made = World(job)
    try:
        yield made
    finally:
        made.end()


def gradients(minibatch: int, *, epoch: int = 0, value: float = 1.0, **fields: object) -> Gradients:
    """Takes `value` from the rows of IDS and from the bias, with a learning rate of 1."""
    return Gradients(
        epoch, minibatch, 1.0, (1.0,), {TABLE: (IDS, np.full((len(IDS), DIM), value, np.float32))},
        {"bias": np.full(3, value, np.float32)}, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def values(client: PsClient) -> set[float]:
    """All values that the servers have: one, when each push was applied as often."""
    pulled = client.pull({TABLE: IDS}, timeout_s=30)
    return set(pulled.rows[TABLE].reshape(-1).tolist()) | set(pulled.dense["bias"].tolist())
