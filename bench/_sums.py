"""Sums over members on this host: those of `parallel/local_sums.py` beside gloo's over loopback, in turns.

Prints one line of JSON: for each size, the medians of the milliseconds of both, and of the processor time of a member.
"""

import json
import os
import statistics
import sys
import time

import torch

from trueline.parallel.gloo import GlooGroup
from trueline.parallel.local_sums import LocalSums
from trueline.parallel.store import StoreServer

SIZES = {200_000: 200, 2_000_000: 60, 30_000_000: 12}
"""Numbers of a sum -> how often each of both is timed."""
BLOCK = 4


def measure(group: GlooGroup) -> list[dict[str, float]]:
    """One row for each size."""
    rows = []
    for numbers, times in SIZES.items():
        value = torch.ones(numbers)
        ways = {
            "local": lambda value=value: group.wait_bucket(group.sum_bucket(value)),
            "gloo": lambda value=value: group.wait(group.sum_on_host(value)),
        }
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(times // BLOCK):
            for way, add in ways.items():
                for _ in range(BLOCK):
                    value.fill_(1.0)
                    began, used = time.perf_counter(), time.process_time()
                    add()
                    found[way].append((1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - used)))
        row = {"numbers": float(numbers)}
        for way, pairs in found.items():
            row[f"{way}_ms"], row[f"{way}_cpu_ms"] = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(row)
    return rows


def main() -> None:
    size = int(sys.argv[1])
    os.environ.setdefault("TRUELINE_SECRET", "of-this-benchmark")
    torch.set_num_threads(1)
    server = StoreServer()
    children = []
    for rank in range(1, size):
        if child := os.fork():
            children.append(child)
        else:
            run(rank, size, server.address)
            os._exit(0)
    rows = run(0, size, server.address)
    for child in children:
        os.waitpid(child, 0)
    print(json.dumps(rows), flush=True)
    os._exit(0)


def run(rank: int, size: int, store: str) -> list[dict[str, float]]:
    group = GlooGroup()
    group.form(1, rank=rank, size=size, store=store)
    if not isinstance(group._host_sums, LocalSums):
        raise SystemExit("the kernel lets no member read the memory of another one")
    rows = measure(group)
    group.wait(group.sum_on_host(torch.zeros(1)))
    group.close()
    return rows


if __name__ == "__main__":
    main()
