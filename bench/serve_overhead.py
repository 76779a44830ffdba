"""The overhead of serving: processor time of the server for each request, less the runtime's own.

A small MLP (256-256-10, FP32) is sealed into a bundle and served by its own process; a client on plain sockets keeps 1
and then 8 connections busy for a few seconds each. The server's user and system time comes from the kernel, so other
load affects requests per second, but hardly this figure. For each load the floor is measured too: the cost of a Python
server that only reads the same bytes and writes as many back.

    python bench/serve_overhead.py [--seconds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from trueline.bundle import Bundle, Contents, Dim, Golden, ProgramEntry, Signature, Summary, TensorSpec, seal
from trueline.serve import RunningServer, start

sys.path.insert(0, str(Path(__file__).parent))
from _floor import floor
from _table import report

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def mlp() -> onnx.ModelProto:
    """256 -> 256 -> 10 with a ReLU between."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((256, 256), dtype=np.float32) / 16,
        "b1": np.zeros(256, np.float32),
        "w2": rng.standard_normal((256, 10), dtype=np.float32) / 16,
        "b2": np.zeros(10, np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def sealed(folder: Path) -> Bundle:
    """The MLP as a bundle, with golden records from ONNX Runtime itself: this measures time and proves nothing."""
    source = folder / "source"
    (source / "programs").mkdir(parents=True)
    path = source / "programs" / "model.onnx"
    onnx.save(mlp(), str(path))
    x = np.random.default_rng(1).standard_normal((4, 256), dtype=np.float32)
    y = session(path).run(None, {"x": x})[0]
    signature = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 256)),),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", 10)),),
        dims={"batch": Dim()},
    )
    entry = ProgramEntry(
        format="onnx", file="programs/model.onnx", proven=False, seconds=0.0, probes=0, max_abs_error=0.0, versions={}
    )
    contents = Contents(
        name="mlp",
        signature=signature,
        programs=[(entry, source)],
        serve="onnx",
        golden=[Golden(case="4", inputs={"x": x}, outputs={"y": y})],
        evidence=[],
        lineage={},
        summary=Summary(recipe="bench", recipe_digest="0" * 64),
    )
    return seal(folder / "mlp.bundle", contents)


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def raw_cpu_us(path: Path, seconds: float) -> float:
    """Processor time of one run of the program, alone in a loop."""
    runtime, inputs = session(path), {"x": np.ones((1, 256), np.float32)}
    for _ in range(200):
        runtime.run(["y"], inputs)
    runs, cpu, until = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(200):
            runtime.run(["y"], inputs)
        runs += 200
    return (time.process_time() - cpu) / runs * 1e6


def infer_request(digits: int) -> bytes:
    """A whole request of 256 values with `digits` decimals."""
    values = [round(float(v), digits) for v in np.random.default_rng(2).uniform(0, 1, 256)]
    tensor = {"name": "x", "shape": [1, 256], "datatype": "FP32", "data": values}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    head = "POST /v2/models/mlp/infer HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Latencies at the client, and processor time of the server."""

    requests: int
    per_second: float
    p50_us: float
    p99_us: float
    user_us: float
    system_us: float

    @property
    def cpu_us(self) -> float:
        return self.user_us + self.system_us


def connect(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def first_answer(client: socket.socket, request: bytes) -> int:
    """Length of the answer to `request`; later answers have the same."""
    client.sendall(request)
    answer = client.recv(65536)
    while b"\r\n\r\n" not in answer:
        answer += client.recv(65536)
    head = answer.partition(b"\r\n\r\n")[0]
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"unexpected answer: {answer[:300]!r}")
    length = len(head) + 4 + int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(answer) < length:
        answer += client.recv(65536)
    return length


def closed_loop(port: int, request: bytes, clients: int, seconds: float) -> list[float]:
    """Seconds of each request, on `clients` connections that send the next after each response."""
    sockets = [connect(port) for _ in range(clients)]
    length = max(first_answer(one, request) for one in sockets)
    by_handle = {one.fileno(): one for one in sockets}
    poller = select.epoll()
    sent, left, times = {}, {}, []
    until = time.perf_counter() + seconds
    for handle, one in by_handle.items():
        poller.register(handle, select.EPOLLIN)
        sent[handle], left[handle] = time.perf_counter(), length
        one.sendall(request)
    while (now := time.perf_counter()) < until:
        for handle, _ in poller.poll(1.0):
            left[handle] -= len(by_handle[handle].recv(65536))
            if left[handle] == 0:
                now = time.perf_counter()
                times.append(now - sent[handle])
                sent[handle], left[handle] = now, length
                by_handle[handle].sendall(request)
    for one in sockets:
        one.close()
    return times


def user_system_s(pid: int) -> tuple[float, float]:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) * TICK_S, int(fields[12]) * TICK_S


def cpu_s(pid: int) -> float:
    """Both together."""
    return sum(user_system_s(pid))


def runs_of(port: int, request: bytes) -> int:
    """Of a bare server that refuses, so far."""
    with connect(port) as client:
        client.sendall(request)
        head = client.recv(65536).partition(b"\r\n\r\n")[0]
    return int(head.partition(b"x-runs: ")[2].split(b"\r\n")[0])


def loop_s(pid: int) -> float:
    """Processor time of a process's first thread, which responds: without the runs of the model, a hundredth of which
    is more than all refusals.
    """
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def tree_cpu_s(root: int) -> float:
    """Processor time so far of a process, its descendants and the processes in its session."""
    return sum(_tree(root).values())


def tree_pss_mb(root: int) -> float:
    """PSS of the same processes."""
    return sum(pss_mb(pid) for pid in _tree(root))


def _tree(root: int) -> dict[int, float]:
    """Processor time of each."""
    parents: dict[int, tuple[int, int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        parents[int(path.parent.name)] = (int(fields[1]), int(fields[3]), sum(map(int, fields[11:15])) * TICK_S)
    below = {root}
    while more := {pid for pid, (parent, _, _) in parents.items() if parent in below} - below:
        below |= more
    return {pid: spent for pid, (_, group, spent) in parents.items() if pid in below or group == root}


def measured(server_pid: int, port: int, request: bytes, clients: int, seconds: float) -> Load:
    closed_loop(port, request, clients, 0.3)
    before, began = user_system_s(server_pid), time.perf_counter()
    times = closed_loop(port, request, clients, seconds)
    took, after = time.perf_counter() - began, user_system_s(server_pid)
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    user_us, system_us = ((now - then) / len(times) * 1e6 for now, then in zip(after, before, strict=True))
    return Load(
        requests=len(times),
        per_second=len(times) / took,
        p50_us=float(p50),
        p99_us=float(p99),
        user_us=user_us,
        system_us=system_us,
    )


def floor_us(port: int, request: bytes, clients: int, seconds: float) -> float:
    """Processor time of the bare server for each request, under the same load as the server on `port`."""
    with connect(port) as client:
        answer_bytes = first_answer(client, request)
    with floor(len(request), answer_bytes) as (pid, bare):
        apart(pid)
        return measured(pid, bare, request, clients, seconds).cpu_us


def pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("the kernel does not say the PSS of a process")


def torch_loaded(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def apart(pid: int) -> None:
    """Pins the server and this client to a core each, where there are two, so that the placement is not random.

    This is the costlier placement: with one connection the server's core falls idle after each response, and waking it
    is charged to the server (some 30 us on a virtual machine). On one core the two only switch.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(pid, cores[:1])
        os.sched_setaffinity(0, cores[1:])


def timed(act: Callable[[], RunningServer]) -> tuple[RunningServer, float]:
    began = time.perf_counter()
    made = act()
    return made, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        bundle = sealed(Path(folder))
        raw_us = raw_cpu_us(bundle.program_path(), min(1.0, seconds))
        server, ready_s = timed(lambda: start(bundle.path))
        with server:
            apart(server.pid)
            loads: dict[str, Load] = {}
            floors: dict[str, float] = {}
            for digits, label in ((1, "1kB"), (7, "2.7kB")):
                request = infer_request(digits)
                for clients in (1, 8):
                    name = f"{label} c{clients}"
                    loads[name] = measured(server.pid, server.port, request, clients, seconds)
                    floors[name] = floor_us(server.port, request, clients, seconds / 2)
            pss, torch = pss_mb(server.pid), torch_loaded(server.pid)
    rows = [
        [
            name,
            load.requests,
            load.per_second,
            load.p50_us,
            load.p99_us,
            load.user_us,
            load.system_us,
            load.cpu_us - raw_us,
            floors[name],
        ]
        for name, load in loads.items()
    ]
    dearest = max(loads, key=lambda name: loads[name].cpu_us)
    result = {
        "overhead_us_json": round(loads[dearest].cpu_us - raw_us, 1),
        "floor_us": round(floors[dearest], 1),
        "above_floor_us": round(statistics.mean(loads[name].cpu_us - raw_us - floors[name] for name in loads), 1),
        "ready_s": round(ready_s, 3),
        "pss_mb": round(pss, 1),
        "torch_loaded": torch,
        "raw_us": round(raw_us, 2),
        "loads": {
            name: {
                "per_second": round(load.per_second),
                "p50_us": round(load.p50_us, 1),
                "p99_us": round(load.p99_us, 1),
                "user_us": round(load.user_us, 1),
                "system_us": round(load.system_us, 1),
                "overhead_us": round(load.cpu_us - raw_us, 1),
                "floor_us": round(floors[name], 1),
            }
            for name, load in loads.items()
        },
    }
    headers = ["load", "requests", "per s", "p50 us", "p99 us", "user us", "system us", "overhead us", "floor us"]
    report(headers, rows, result)


if __name__ == "__main__":
    main()
