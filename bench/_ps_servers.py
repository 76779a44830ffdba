"""Processes of the parameter server's benchmark: servers, trainers, and what they use."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trueline.engine.local.process import LIFELINE
from trueline.ps import dial
from trueline.ps.client import PsClient
from trueline.ps.link import ServerLink
from trueline.ps.messages import ModelSpec, Routing
from trueline.ps.partition import make_routing

HERE = Path(__file__).parent
SECRET = "of the benchmark"
_TICKS = os.sysconf("SC_CLK_TCK")
_T = TypeVar("_T")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Servers:
    """Servers of one job, in a folder that is removed afterwards; they end with the benchmark."""

    def __init__(self, job: Path, count: int, spec: ModelSpec) -> None:
        self.job, self.spec = job, spec
        self._reading, self._writing = os.pipe()
        self._incarnations = [-1] * count
        self.processes: list[subprocess.Popen[bytes]] = [self._start(slot) for slot in range(count)]
        self.routing: Routing = make_routing([f"server-{slot}" for slot in range(count)], spec.dense)
        self.addresses = functools.partial(dial.read_address, job)
        for ref in self.routing.servers:
            self.ask(ref, lambda link: link.configure(spec, self.routing))
        client = self.client()
        client.initialize({}, 60)
        client.close()

    def _start(self, slot: int) -> subprocess.Popen[bytes]:
        self._incarnations[slot] += 1
        env = os.environ | {
            "TRUELINE_JOB": str(self.job), "TRUELINE_SECRET": SECRET, LIFELINE: str(self._reading),
            "TRUELINE_REF": f"server-{slot}.{self._incarnations[slot]}",
        }  # fmt: skip
        return subprocess.Popen([sys.executable, "-m", "trueline.ps.server.process"], env=env, pass_fds=[self._reading])

    def kill(self, slot: int) -> None:
        """Kills a server with SIGKILL and starts its next incarnation at once, as a master does."""
        self.processes[slot].kill()
        self.processes[slot].wait()
        self.processes[slot] = self._start(slot)

    def client(self, **options: Any) -> PsClient:
        return PsClient(self.addresses, self.routing, SECRET.encode(), **options)

    def ask(self, ref: str, question: Callable[[ServerLink], Awaitable[_T]]) -> _T:
        async def run() -> _T:
            link = ServerLink(self.addresses, ref, SECRET.encode())
            try:
                while True:
                    try:
                        return await question(link)
                    except ConnectionError:
                        await asyncio.sleep(0.02)
            finally:
                await link.close()

        return asyncio.run(run())

    def cpu_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        os.close(self._writing)
        os.close(self._reading)


@contextmanager
def serving(count: int, spec: ModelSpec) -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="bench-ps-") as folder:
        servers = Servers(Path(folder), count, spec)
        try:
            yield servers
        finally:
            servers.end()


def train(kind: str, trainers: Sequence[dict[str, Any]], servers_cpu_s: Callable[[], float]) -> dict[str, float]:
    """Runs trainers at the same time. Sums, and the CPU time of the servers meanwhile under `server_cpu_s`."""
    processes = []
    for settings in trainers:
        command = [sys.executable, str(HERE / "_ps_trainer.py"), kind, json.dumps(settings)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"a trainer ({kind}) ended with exit code {process.wait()}")
        before = servers_cpu_s()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = []
        for process in processes:
            assert process.stdout is not None
            told.append(json.loads(process.stdout.readline()))
        after = servers_cpu_s()
    finally:
        for process in processes:
            if process.poll() is None and not kind.startswith("rpc"):
                process.terminate()
            process.wait()
    return {name: sum(one[name] for one in told) for name in told[0]} | {"server_cpu_s": after - before}


def train_ours(
    kind: str, *, spec: ModelSpec, trainers: int, servers: int, seconds: float, tcp: bool = False
) -> dict[str, float]:
    with serving(servers, spec) as world:
        settings = {
            "job": str(world.job), "secret": SECRET, "tcp": tcp, "seconds": seconds,
            "routing": msgspec.msgpack.encode(world.routing).hex(), "trainers": trainers,
        }  # fmt: skip
        return train(kind, [settings | {"seed": seed} for seed in range(trainers)], world.cpu_s)


def train_rpc(kind: str, *, seconds: float) -> dict[str, float]:
    """torch's RPC: one trainer, since a second one crashes it."""
    with tempfile.TemporaryDirectory(prefix="bench-rpc-") as folder:
        os.environ["BENCH_RPC"] = str(Path(folder) / "store")
        command = [sys.executable, str(HERE / "_ps_trainer.py"), f"{kind}_server", "{}"]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            return train(kind, [{"seed": 0, "seconds": seconds}], lambda: cpu_s(server.pid))
        finally:
            began = time.monotonic()
            while server.poll() is None and time.monotonic() < began + 20:
                time.sleep(0.05)
            server.kill()
            server.wait()
