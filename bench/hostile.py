"""One hostile client beside 200 requests a second of others: what the others notice, and what stays in memory.

    python bench/hostile.py ATTACK PORT MODEL SECONDS    is that client, until SECONDS are over

    largest    bodies of 64 MiB of JSON, with as many values as a request may have, one after the other
    bomb       gzip of the same, some 130 kB, one after the other
    pipelined  1,000 requests in one piece, again and again
    idle       2,000 connections that send nothing

`measure` runs undisturbed and disturbed turns alternately in one server: the machine's speed cancels out of the ratio.
All clients are processes in sessions of their own, so that the kernel does not take an attacker's processor time from
the server's share. A turn begins when the server is idle again. As a control, a process that has nothing to do with the
server takes as much of the processor as the busiest attack did, client and server together: what the machine costs.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _load import http, paced
from serve_overhead import cpu_s, tree_cpu_s
from trueline.serve import host

ATTACKS = ("largest", "bomb", "pipelined", "idle")
LARGEST_BYTES = 64 * 2**20
MAX_VALUES = 2**22
PER_SECOND = 200
_HEADER = "content-type: application/json"


def largest_body(size: int = LARGEST_BYTES) -> bytes:
    """An infer request in JSON of `size` bytes for the model `mlp`, with as many values as a request may have."""
    number = b"0." + b"0" * (size // MAX_VALUES - 4)
    rows = MAX_VALUES // 256 - 1
    head = b'{"inputs":[{"name":"x","shape":[%d,256],"datatype":"FP32","data":[' % rows
    body = head + b",".join([number] * (rows * 256)) + b"]}]}"
    return body + b" " * (size - len(body))


def attack(kind: str, port: int, model: str, seconds: float) -> None:
    """Attacks until the time is over."""
    path, request = f"/v2/models/{model}/infer", b""
    if kind == "pipelined":
        request = http("/v2/health/live", b"", method="GET") * 1000
    elif kind == "largest":
        request = http(path, largest_body(), _HEADER)
    elif kind == "bomb":
        request = http(path, gzip.compress(largest_body(), 9), _HEADER, "content-encoding: gzip")
    print("ready", flush=True)
    until = time.monotonic() + seconds
    if kind == "idle":
        _sit(port, until)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            _exchange(port, request, until, 1000 if kind == "pipelined" else 1)


def _sit(port: int, until: float) -> None:
    """Holds 2,000 connections, and opens those again that the server closes, some in each second."""
    held: list[socket.socket] = []
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            while len(held) < 2000:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=10))
                held[-1].setblocking(False)
        time.sleep(0.2)
        held = [one for one in held if _is_open(one)]


def _is_open(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _exchange(port: int, request: bytes, until: float, answers: int) -> None:
    """Sends `request` on a connection of its own and reads `answers` responses."""
    with socket.create_connection(("127.0.0.1", port), timeout=max(0.1, until - time.monotonic())) as sock:
        sock.sendall(request)
        got = b""
        while got.count(b"HTTP/1.1 ") < answers:
            piece = sock.recv(2**18)
            if not piece:
                return
            got += piece


def others(port: int, request: bytes, seconds: float) -> list[tuple[float, int]]:
    """Seconds and status of requests at PER_SECOND, in a process of its own."""
    call = [sys.executable, __file__, "others", str(port), "-", str(seconds)]
    done = subprocess.run(call, input=request, capture_output=True, check=True, start_new_session=True)
    return [(took, status) for took, status in json.loads(done.stdout)]


@contextlib.contextmanager
def client(kind: str, port: int, model: str, seconds: float) -> Iterator[int]:
    """The process of a hostile client, or of a busy one (`busy`, `model` is its cores), for as long as the block."""
    call = [sys.executable, __file__, kind, str(port), model, str(seconds)]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it has its bytes
        yield process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def keep_busy(cores: float, seconds: float) -> None:
    """Takes `cores` of the processor until the time is over: as a whole second of work at a time, as attacks do."""
    workers = [multiprocessing.Process(target=_work, args=(min(1.0, cores - at), seconds), daemon=True)
               for at in range(int(cores - 1e-9) + 1)]  # fmt: skip
    for one in workers:
        one.start()
    print("ready", flush=True)
    for one in workers:
        one.join()


def _work(share: float, seconds: float) -> None:
    until, parent = time.monotonic() + seconds, os.getppid()
    while time.monotonic() < until and os.getppid() == parent:
        began = time.process_time()
        while time.process_time() - began < share and os.getppid() == parent:
            pass
        time.sleep(1 - share)


def wait_idle(pid: int) -> None:
    """Returns once a server hardly works: what it began for the last client is done."""
    while True:
        before = tree_cpu_s(pid)
        time.sleep(0.25)
        if tree_cpu_s(pid) - before < 0.03:
            return


class Turns:
    """Latencies and processor time of the turns of each kind."""

    def __init__(self, pid: int, port: int, request: bytes, model: str, seconds: float) -> None:
        self._server, self._asked, self._model, self._seconds = pid, (port, request, seconds), model, seconds
        self._port = port
        self.took_s: dict[str, list[float]] = {}
        self.cores: dict[str, float] = {}
        self.failed = 0

    def turn(self, kind: str) -> None:
        """`calm`, `control` or an attack."""
        wait_idle(self._server)
        if kind == "calm":
            self._note(kind, None)
            return
        busiest = max(0.05, max(self.cores.get(one, 0.0) for one in ATTACKS) - self.cores["calm"])
        name, what = ("busy", f"{busiest:.2f}") if kind == "control" else (kind, self._model)
        with client(name, self._port, what, self._seconds + 5) as pid:
            self._note(kind, pid)

    def _note(self, kind: str, pid: int | None) -> None:
        """Asks, and counts the processor time of the server and of the client `pid`."""
        before = tree_cpu_s(self._server) + (cpu_s(pid) if pid else 0.0)
        answers = others(*self._asked)
        spent_s = tree_cpu_s(self._server) + (cpu_s(pid) if pid else 0.0) - before
        self.cores[kind] = max(self.cores.get(kind, 0.0), spent_s / self._seconds)
        self.took_s.setdefault(kind, []).extend(took for took, _ in answers)
        self.failed += sum(status != 200 for _, status in answers)

    def p99_ms(self, kind: str) -> float:
        """Of all turns together."""
        took = sorted(self.took_s[kind])
        return took[int(0.99 * (len(took) - 1))] * 1e3


def measure(pid: int, port: int, request: bytes, model: str, *, rounds: int, seconds: float) -> dict[str, Any]:
    """The figures of `hostile_*`."""
    turns = Turns(pid, port, request, model, seconds)
    for _ in range(rounds):
        for kind in ("calm", "largest", "bomb", "calm", "pipelined", "idle", "calm", "control"):
            turns.turn(kind)
    calm_ms = turns.p99_ms("calm")
    ratios = {kind: round(turns.p99_ms(kind) / calm_ms, 2) for kind in (*ATTACKS, "control")}
    return {
        "hostile_p99_ratio": max(ratios[kind] for kind in ATTACKS),
        "hostile_control_ratio": ratios.pop("control"),
        "hostile_failed": turns.failed,
        "hostile_ratios": ratios,
        "hostile_p99_ms": {kind: round(turns.p99_ms(kind), 2) for kind in turns.took_s},
        "hostile_samples": {kind: len(took) for kind, took in turns.took_s.items()},
        "hostile_cores": {kind: round(cores, 2) for kind, cores in turns.cores.items() if kind != "control"},
    }


def main() -> None:
    kind, port, model, seconds = sys.argv[1:]
    if kind == "busy":
        keep_busy(float(model), float(seconds))
        return
    if kind == "others":
        host.take_short_turns()  # as the server does: what a client waits for its own turn is none of the server's time
        found = paced(int(port), sys.stdin.buffer.read(), per_second=PER_SECOND, seconds=float(seconds), clients=32)
        print(json.dumps([[one.took_s, one.status] for one in found]))
        return
    attack(kind, int(port), model, float(seconds))


if __name__ == "__main__":
    main()
