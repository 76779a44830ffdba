"""What many hosts cost, and what their deaths do: `make bench-hosts`, as root.

Sums: two network namespaces are the hosts, with four members each, and their link takes 1 Gbit/s (a token bucket of
tc(8)). All members sum the gradients of 25 million parameters in four buckets, in turn by host and over all members at
once, in one group of processes. Both have ranks of one host together. Every byte of the flat ring crosses the link
nearly twice, so four members on each host bound the ratio at 0.57.

Jobs (`_host_jobs.py`): strikes at workers, hosts, links, clocks, the master and the store of a job on two hosts; the
death of the master's host; a halt and a resume on other hosts. Decisions: the membership of 512 workers, without I/O.

Last comes one line of JSON. Ten minutes on two cores with the usual 40 strikes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import _host_jobs
from _table import mark, report
from master_scale import core

HOSTS, EACH, MILLIONS, BUCKETS = 2, 4, 25, 4
DEVICE, RATE = "tl0", "1gbit"
SECRET = "of-this-benchmark"
GOAL = "<= 0.65"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="sums of each way")
    parser.add_argument("--strikes", type=int, default=40, help="at a job on two hosts; 300 take an hour")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no further strike after that")
    parser.add_argument("--lease", default="3", help="seconds; more on a machine with other work")
    parser.add_argument("--seed", type=int, default=1, help="of the strikes")
    parser.add_argument("--only", choices=("sums", "strikes", "master", "resume"), help="one part")
    parser.add_argument("--member", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member is not None:
        member(args.member, args.rounds)
        return
    if os.geteuid():
        sys.exit("bench-hosts makes network namespaces: run it as root")
    figures: dict[str, Any] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "sums": lambda: measure_sums(args.rounds),
        "strikes": lambda: _host_jobs.measure_strikes(args.strikes, args.seed, args.minutes, args.lease),
        "master": _host_jobs.measure_master_host,
        "resume": _host_jobs.measure_resume,
    }
    for name, measure_part in parts.items():
        if args.only in (None, name):
            figures |= measure_part()
    figures["decision_ms_512"] = core(512)["core_regroup_ms"]
    figures = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    report(("what", "measured", "goal", "", "detail"), mark(list(rows_of(figures, args.rounds))), figures)


def rows_of(figures: dict[str, Any], rounds: int) -> Iterator[tuple[str, str, str, str, str]]:
    """The rows of the table; what was not measured has a dash."""

    def show(name: str, unit: str = "") -> str:
        return f"{figures[name]}{unit}" if name in figures else "-"

    bits = MILLIONS * 32e6 * 2 * (HOSTS * EACH - 1) / (HOSTS * EACH)
    kills, strikes = figures.get("kills", 0), figures.get("strikes", 0)
    counted = f"{figures['lost']} / {figures['repeated']}" if strikes else "-"
    yield "all members at once, 25 million parameters", show("flat_s", " s"), "", f"the link alone: {bits / 1e9:.1f} s"
    yield "inside each host, then between them", show("by_host_s", " s"), "", f"of {rounds} sums each, in turn"
    yield "the second / the first", show("reduce_ratio"), GOAL, "the bound is 0.57"
    yield "worker killed to the next applied step, p50", show("kill_p50_ms", " ms"), "<= 80 ms", f"of {kills}"
    yield "the same, p95", show("kill_p95_ms", " ms"), "<= 250 ms", f"of {kills}"
    yield "host killed to the next applied step", show("host_kill_s", " s"), "<= 5 s", "the longest"
    yield "host back to full size", show("back_s", " s"), "<= 2 s", "the longest, from its join"
    yield "records lost / repeated", counted, "0 / 0", f"{strikes} strikes"
    yield "halt", show("halt_s", " s"), "<= 2 s", "the command, to the end of all processes"
    yield "resume to the next step", show("resume_s", " s"), "<= 3 s", "the command, on other hosts, other workers"
    yield "the same bits as an undisturbed run", show("resume_equal"), "True", "--bitwise"
    yield "master's host killed: steps lost", show("master_host_steps_lost"), "0", "lost, repeated or redone"
    yield "the same: to the next applied step", show("adopt_s", " s"), "<= 5 s", "no worker is started again"
    yield "a regroup of 512 workers, decisions alone", show("decision_ms_512", " ms"), "<= 50 ms", ""


def measure_sums(rounds: int) -> dict[str, Any]:
    """The sums of both ways, in turn."""
    times = measure(rounds)
    flat_s, hosts_s = (statistics.median(times[way]) for way in ("flat", "by host"))
    return {"reduce_ratio": round(hosts_s / flat_s, 2), "flat_s": flat_s, "by_host_s": hosts_s}


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each sum, as the first member saw them."""
    with hosts() as names, ExitStack() as exits:
        members = []
        for rank in range(HOSTS * EACH):
            host = rank // EACH
            command = ["ip", "netns", "exec", names[host], sys.executable, __file__, "--member", str(rank)]
            env = {
                **os.environ, "TRUELINE_HOST": f"10.78.0.{host + 1}", "TRUELINE_SECRET": SECRET, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            process = subprocess.Popen(
                [*command, "--rounds", str(rounds)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            exits.callback(process.kill)
            members.append(process)
        stores = [read_line(process) for process in members]  # all have imported torch
        for process in members:
            assert process.stdin is not None
            process.stdin.write(f"{stores[0]}\n")
            process.stdin.flush()
        found: dict[str, list[float]] = json.loads(read_line(members[0]))
        return found


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def member(rank: int, rounds: int) -> None:
    """One member: the first serves the store, writes its address, and last the times. All read that address."""
    import torch

    from trueline.parallel import by_host
    from trueline.parallel.gloo import GlooGroup
    from trueline.parallel.store import StoreServer

    server = StoreServer() if rank == 0 else None
    print("" if server is None else server.address, flush=True)
    store = sys.stdin.readline().strip()
    open_sums, times = by_host.open_sums, {"flat": list[float](), "by host": list[float]()}
    random = torch.Generator().manual_seed(rank)
    buckets = [torch.randn(MILLIONS * 1_000_000 // BUCKETS, generator=random) for _ in range(BUCKETS)]
    group = GlooGroup()
    for turn in range(2 * (rounds + 1)):
        way = ("flat", "by host")[turn % 2]
        by_host.open_sums = open_sums if way == "by host" else none_opened
        group.form(turn + 1, rank=rank, size=HOSTS * EACH, store=store)
        assert (group._host_sums is not None) == (way == "by host")
        group.wait(group.sum_on_host(torch.zeros(1)))
        began = time.perf_counter()
        for work in [group.sum_bucket(bucket) for bucket in buckets]:
            group.wait_bucket(work)
        seconds = time.perf_counter() - began
        group.wait(group.sum_on_host(torch.zeros(1)))
        if turn >= 2:  # the first of each way makes its buffers
            times[way].append(seconds)
        for bucket in buckets:
            bucket.mul_(1 / (HOSTS * EACH))
    if server is not None:
        print(json.dumps(times), flush=True)
    group.wait(group.sum_on_host(torch.zeros(1)))
    group.close()


def none_opened(*_: Any) -> None:
    return None


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Two namespaces at 10.78.0.1 and 10.78.0.2, and a limited link between them."""
    names = [f"bh{os.getpid()}{host}" for host in range(HOSTS)]

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    with ExitStack() as exits:
        for name in names:
            run("ip", "netns", "add", name)
            exits.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for host, name in enumerate(names):
            run("ip", "-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                run("ip", "-n", name, "link", "set", device, "up")
            run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf",
                "rate", RATE, "burst", "256kb", "latency", "50ms")  # fmt: skip
        yield names


if __name__ == "__main__":
    main()
