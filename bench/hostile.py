"""One hostile client beside 200 requests a second of others: what the others notice, and what stays in memory.

    python bench/hostile.py ATTACK PORT MODEL SECONDS    is that client, until SECONDS are over

    largest    bodies of 64 MiB of JSON, with as many values as a request may have, one after the other
    bomb       gzip of the same, some 130 kB, one after the other
    pipelined  1,000 requests in one piece, again and again
    idle       2,000 connections that send nothing

`measure` runs undisturbed and disturbed turns alternately in one server, whose clients are processes of their own: the
machine's speed cancels out of the ratio.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _load import http, paced

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
    done = subprocess.run(call, input=request, capture_output=True, check=True)
    return [(took, status) for took, status in json.loads(done.stdout)]


@contextlib.contextmanager
def hostile(kind: str, port: int, model: str, seconds: float) -> Iterator[None]:
    """The hostile client, for as long as the block."""
    client = subprocess.Popen([sys.executable, __file__, kind, str(port), model, str(seconds)], stdout=subprocess.PIPE)
    assert client.stdout is not None
    try:
        client.stdout.readline()  # it has its bytes
        yield
    finally:
        client.terminate()
        client.wait()
        client.stdout.close()


def measure(port: int, request: bytes, model: str, *, turns: int, seconds: float) -> dict[str, Any]:
    """The figures of `hostile_*`."""
    ratios, failed, seen = {}, 0, {}
    for kind in ATTACKS:
        calm: list[float] = []
        beside: list[float] = []
        for _ in range(turns):
            calm.append(_p99_ms(quiet := others(port, request, seconds)))
            with hostile(kind, port, model, seconds + 5):
                disturbed = others(port, request, seconds)
            beside.append(_p99_ms(disturbed))
            failed += sum(status != 200 for _, status in quiet + disturbed)
        ratios[kind] = round(statistics.median(beside) / statistics.median(calm), 2)
        seen[kind] = [round(statistics.median(calm), 2), round(statistics.median(beside), 2)]
    return {
        "hostile_p99_ratio": max(ratios.values()),
        "hostile_failed": failed,
        "hostile_ratios": ratios,
        "hostile_p99_ms": seen,
    }


def _p99_ms(answers: list[tuple[float, int]]) -> float:
    took = sorted(seconds for seconds, _ in answers)
    return took[int(0.99 * (len(took) - 1))] * 1e3


def main() -> None:
    kind, port, model, seconds = sys.argv[1:]
    if kind == "others":
        found = paced(int(port), sys.stdin.buffer.read(), per_second=PER_SECOND, seconds=float(seconds), clients=32)
        print(json.dumps([[one.took_s, one.status] for one in found]))
        return
    attack(kind, int(port), model, float(seconds))


if __name__ == "__main__":
    main()
