"""How many workers one master supports: heartbeats a second, time to regroup, memory.

The real master (its gRPC server, journal and decisions, in its own process) serves simulated workers: asyncio clients
that join, watch views, enter them and send heartbeats. Client and server share this machine's CPUs, so the figures are
a lower bound. Also without gRPC, the decisions alone: events a second, and one regroup. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil

from _table import report
from trueline.engine.contract import make_ref
from trueline.train import settings as job_settings
from trueline.train.membership import decide
from trueline.train.membership import events as h
from trueline.train.membership.state import MembershipPolicy, State
from trueline.train.settings import JobSettings
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

SECRET = "bench"
METADATA = (("authorization", f"Bearer {SECRET}"),)
CHANNELS = 8
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
LONG_S = 3600.0


class Paper:
    """An engine that starts no processes: the simulated workers take their place."""

    async def add(self, specs: object) -> None:
        return

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        return

    async def list(self) -> list[object]:
        return []

    async def capacity(self) -> None:
        return

    async def watch(self):
        await asyncio.Event().wait()
        yield


def serve(job_dir: Path) -> None:
    """The master's process."""
    from trueline.train.master.server import run

    asyncio.run(run(job_dir, Paper(), 0))


class Fleet:
    """Simulated workers over a few channels."""

    def __init__(self, address: str, count: int) -> None:
        self.refs = [make_ref("worker", slot, 0) for slot in range(count)]
        self.channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(CHANNELS)]
        self.stubs = [pb_grpc.MasterStub(channel) for channel in self.channels]
        self.released: dict[int, asyncio.Event] = {}
        self.inside: dict[int, int] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def stub(self, index: int) -> pb_grpc.MasterStub:
        return self.stubs[index % CHANNELS]

    def start(self) -> None:
        self.tasks = [asyncio.ensure_future(self._live(index, ref)) for index, ref in enumerate(self.refs)]

    async def _live(self, index: int, ref: str) -> None:
        """Joins, then enters every view, as a worker does."""
        stub = self.stub(index)
        hello = pb.Hello(ref=ref, store="127.0.0.1:1", num_records=1 << 20, total_steps=1 << 20)
        # Of a view only the number is read: workers parse theirs on machines of their own.
        watch = self.channels[index % CHANNELS].unary_stream(
            "/trueline.train.v1.Master/Watch",
            request_serializer=pb.Hello.SerializeToString,
            response_deserializer=pb.Cursor.FromString,
        )
        entering: asyncio.Task[None] | None = None
        async for view in watch(hello, metadata=METADATA):
            if entering is not None:
                entering.cancel()
            entering = asyncio.ensure_future(self._enter(stub, ref, view.after))

    async def _enter(self, stub: pb_grpc.MasterStub, ref: str, generation: int) -> None:
        entry = pb.Entry(ref=ref, generation=generation, step=0, rate=100.0)
        plan = await stub.Enter(entry, metadata=METADATA)
        if not plan.superseded:
            self.inside[generation] = self.inside.get(generation, 0) + 1
            if self.inside[generation] >= plan_size(plan):
                self.released.setdefault(generation, asyncio.Event()).set()

    async def beats(self, seconds: float, parallel: int) -> float:
        """Heartbeats a second that the master answers, `parallel` at a time."""
        until, count, number = time.monotonic() + seconds, 0, iter(range(1 << 62))

        async def one() -> None:
            nonlocal count
            while time.monotonic() < until:
                index = next(number) % len(self.refs)
                message = pb.Progress(ref=self.refs[index], generation=1, step=0, phase="computing", phase_s=0.1)
                await self.stub(index).Report(message, metadata=METADATA)
                count += 1

        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(parallel)))
        return count / (time.monotonic() - began)

    async def all_inside(self, generation: int) -> None:
        await self.released.setdefault(generation, asyncio.Event()).wait()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for channel in self.channels:
            await channel.close()


def plan_size(plan: pb.Plan) -> int:
    return len(plan.steps)


def start(job_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--serve", str(job_dir)]
    with (job_dir / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "GRPC_VERBOSITY": "NONE"})


async def over_grpc(count: int, beat_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="tl-bench-") as scratch:
        job_dir = Path(scratch)
        (job_dir / "secret").write_text(SECRET)
        job_settings.save(
            JobSettings(name="bench", recipe="x.py", recipe_digest="", workers=count, epochs=1, global_batch=1,
                        seed=0, lease_s=LONG_S), job_dir,
        )  # fmt: skip
        master = start(job_dir)
        try:
            while not (job_dir / "master.json").exists():
                assert master.poll() is None, (job_dir / "log").read_text()
                await asyncio.sleep(0.01)
            address = json.loads((job_dir / "master.json").read_text())["address"]
            return await _measure(Fleet(address, count), psutil.Process(master.pid), beat_s)
        finally:
            master.kill()
            master.wait()


async def _measure(fleet: Fleet, master: psutil.Process, beat_s: float) -> dict[str, float]:
    follow = fleet.stub(0).Follow(pb.Cursor(), metadata=METADATA)
    while all(event.name != "worker.started" for event in (await follow.read()).events):
        continue
    began = time.monotonic()
    fleet.start()
    await fleet.all_inside(1)
    gathered_s = time.monotonic() - began
    rate = await fleet.beats(beat_s, 64)
    began = time.monotonic()
    await fleet.stub(0).ReportBrokenGroup(pb.Fault(ref=fleet.refs[0], generation=1, what="bench"), metadata=METADATA)
    await fleet.all_inside(2)
    regroup_s = time.monotonic() - began
    rss = master.memory_info().rss / 2**20
    await fleet.close()
    return {"gathered_s": gathered_s, "beats_per_s": rate, "regroup_s": regroup_s, "rss_MiB": rss}


def core(count: int) -> dict[str, float]:
    """The decisions alone."""
    state, policy = State(workers=count), MembershipPolicy(workers=count, lease_s=LONG_S)
    refs = [make_ref("worker", slot, 0) for slot in range(count)]
    decide.decide(state, h.Begin(), 0.0, policy)
    for ref in refs:
        decide.decide(state, h.Ready(ref, "a:1"), 0.0, policy)
    began = time.perf_counter()
    for ref in refs:
        decide.decide(state, h.Entered(ref, 1, 0), 0.0, policy)
    entered_s = time.perf_counter() - began
    assert state.released
    began = time.perf_counter()
    for ref in refs:
        decide.decide(state, h.Heartbeat(ref, 1, "waiting", 0.1), 1.0, policy)
    heard_s = time.perf_counter() - began
    began = time.perf_counter()
    decide.decide(state, h.Death(refs[-1], "killed"), 1.0, policy)
    for ref in refs[:-1]:
        decide.decide(state, h.Entered(ref, 2, 1), 1.0, policy)
    assert state.released
    regroup_ms = (time.perf_counter() - began) * 1e3
    began = time.perf_counter()
    decide.decide(state, h.Tick(), 1.25, policy)
    tick_ms = (time.perf_counter() - began) * 1e3
    return {"core_beats_per_s": count / heard_s, "core_enter_us": entered_s / count * 1e6,
            "core_regroup_ms": regroup_ms, "core_tick_ms": tick_ms}  # fmt: skip


async def measure(counts: list[int], beat_s: float) -> list[dict[str, float]]:
    found = []
    for count in counts:
        found.append({"workers": count, **core(count), **await over_grpc(count, beat_s)})
        print(f"{count} workers: {found[-1]}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 3000, 10000])
    parser.add_argument("--beat-s", type=float, default=5.0)
    parser.add_argument("--serve", type=Path)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    found = asyncio.run(measure(arguments.workers, arguments.beat_s))
    headers = list(found[0])
    report(headers, [[row[name] for name in headers] for row in found], {"cpus": os.cpu_count(), "runs": found})


if __name__ == "__main__":
    main()
