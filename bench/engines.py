"""Submitted jobs on each engine that is installed: `make bench-engines`, as root. `make chaos-engines KILLS=100` has
strikes alone: at workers, hosts and heads.

A tiny job of three workers on three hosts, a slot each. Measured: from `trueline submit` to the first applied step, and
to why a job waits; from the SIGKILL of a worker, and of a whole host, to the next applied step, and to full size again;
how long `halt` takes, and `resume` with another number of workers on the next engine of the list; whether the
parameters are those of a plain loop; whether ten jobs on two slots start by priority. Times are of the job's own
events. Slurm, Ray and Kubernetes have two nodes of their own; where an engine is not installed, the reason is
printed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from _table import mark, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from worlds import podman, ray, slurm
from worlds.clusters import Client
from worlds.jobs import TINY, plain_loop
from worlds.kubernetes import cluster as kubernetes
from worlds.waiting import until

ENGINES = ("local", "hosts", "podman", "ray", "slurm", "kubernetes")
STILL_S = 1.0
"""Between the end of a recovery and the next strike."""
STEPS = 48
GOALS = {
    "first_step_s": 8.0,
    "why_s": 2.0,
    "kill_p95_s": 0.5,
    "host_s": 5.0,
    "full_s": 8.0,
    "halt_s": 2.0,
    "resume_s": 5.0,
}


@contextmanager
def open_client(engines: list[str]) -> Iterator[Client]:
    folder = Path(tempfile.mkdtemp(prefix="tl-engines-"))
    clusters: dict[str, slurm.Slurm | ray.RayCluster | kubernetes.Kubernetes] = {}
    if "slurm" in engines:
        clusters["slurm"] = slurm.Slurm(folder / "slurm")
    if "ray" in engines:
        clusters["ray"] = ray.RayCluster(folder / "r")  # the paths of its sockets have to be short
    if "kubernetes" in engines:
        clusters["kubernetes"] = kubernetes.Kubernetes(folder / "kubernetes")
    (folder / "containers.conf").write_text(podman.CONFIG)
    client = Client(folder, CONTAINERS_CONF=str(folder / "containers.conf"))
    try:
        for cluster in clusters.values():
            cluster.start()
            client.env |= cluster.env
        for name in "ab" if "hosts" in engines else "":
            client.lend(name, cores=2)
        yield client
    finally:
        client.close()
        for cluster in clusters.values():
            cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def worker_pids(client: Client) -> list[int]:
    """Those of the running workers, as this machine numbers them."""
    found: dict[str, tuple[str, int]] = {}
    for name, event, _ in client.events():
        if name == "worker.running":
            found[event["worker"]] = event.get("host", "this host"), event["pid"]
        elif name in ("worker.lost", "worker.killed"):
            found.pop(event["worker"], None)
    status = client.where.read_status(1)
    assert status is not None
    pids = (client.find_outside(status.leader if host == "this host" else host, pid) for host, pid in found.values())
    return sorted(pid for pid in pids if pid)


def wait_loss(client: Client, after: float) -> None:
    """Until the master has lost a worker: its agent has said so, or its lease was over before."""
    names = ("worker.lost", "worker.killed")
    until(lambda: any(name in names and at > after for name, _, at in client.events()), client.logs)


def wait_gap_s(client: Client, after: float) -> float:
    """The gap before the first step of a new group that was applied after a time."""

    def find() -> float:
        return next(
            (
                float(event["gap_ms"]) / 1000
                for name, event, at in client.events()
                if name == "step.applied" and at > after and event["gap_ms"]
            ),
            0.0,
        )

    return until(find, client.logs)


def measure_strikes(client: Client, engine: str, kills: int, dice: random.Random, *, heads: bool) -> dict[str, Any]:
    """`heads`: each tenth strike is at the process that leads."""
    began = time.time()
    job = client.submit(engine, "--workers", "1:3")
    figures: dict[str, Any] = {"first_step_s": client.wait("step.applied") - began}
    client.wait_workers(3)
    gaps, fulls, host_s, head_s = [], [], [], []
    for number in range(kills):
        time.sleep(STILL_S + dice.random())
        at = time.time()
        if number % 5 < 4:
            os.kill(dice.choice(worker_pids(client)), signal.SIGKILL)
            wait_loss(client, at)
            gaps.append(wait_gap_s(client, at))
            full = client.wait_workers(3, after=client.wait("worker.joined", after=at))
        elif heads and number % 10 == 9:
            full = strike_head(client, head_s)
        else:
            full = strike_host(client, dice, host_s)
            fulls.append(full - at)
        print(f"{engine}: strike {number + 1} of {kills}, full after {full - at:.1f} s", file=sys.stderr)
    if not heads:
        figures["why_s"] = measure_wait(client, engine)
    client.job = job
    began = time.monotonic()
    client.run("halt", job)
    figures["halt_s"] = time.monotonic() - began
    steps, lost, repeated = client.count()
    gaps.sort()
    more = {"head_s": max(head_s), "heads_killed": len(head_s)} if head_s else {}
    return figures | more | {
        "kill_p95_s": gaps[int(0.95 * (len(gaps) - 1))], "kills": len(gaps), "host_s": max(host_s),
        "full_s": max(fulls), "hosts_killed": len(fulls), "steps": steps, "lost": lost, "repeated": repeated,
    }  # fmt: skip


def strike_host(client: Client, dice: random.Random, host_s: list[float]) -> float:
    """Kills a host that does not lead; returns when the job has its full size again."""
    status = client.where.read_status(1)
    assert status is not None
    role = dice.choice([one["role"] for one in client.read()["hosts"] if one["role"] not in ("head", status.leader)])
    at = time.time()
    client.kill(role)
    host_s.append(client.wait_workers(2, after=client.wait("host.lost", after=at, host=role)) - at)
    return client.wait_workers(3, after=client.wait("host.joined", after=at))


def strike_head(client: Client, head_s: list[float]) -> float:
    """Kills what leads: a host leads then, and another one is submitted."""
    status = client.where.read_status(1)
    assert status is not None
    at = time.time()
    client.kill(status.leader)
    head_s.append(client.wait("step.applied", after=at) - at)
    submitted = client.wait("host.submitted", after=at)
    return client.wait_workers(3, after=client.wait("host.joined", after=submitted))


def measure_wait(client: Client, engine: str) -> float:
    """From `submit` to a status that says why the job waits, beside one that leaves no room for it."""
    began = time.monotonic()
    job = client.submit(f"{engine}:large", "--workers", "1:1")
    until(lambda: (one := client.read())["state"] == "queued" and one["why"], client.logs)
    why_s = time.monotonic() - began
    client.run("halt", job)
    return why_s


def measure_move(client: Client, engine: str, other: str) -> dict[str, Any]:
    """A job halts on one engine and ends on the other with another number of workers."""
    gate = client.folder / f"gate-{engine}"
    client.env["TINY_GATE"] = f"10:{gate}"
    job = client.submit(engine, "--workers", "2:2", epochs=6)
    client.wait("step.applied", step=12)
    client.run("halt", job)
    gate.touch()
    began = time.time()
    client.run("resume", job, "--on", other, "--workers", "1:1")
    resume_s = client.wait("step.applied", after=began) - began
    end = client.wait_end()
    del client.env["TINY_GATE"]
    newest = checkpoint.latest(client.where.checkpoints)
    assert newest is not None
    state, expected = newest.state["model"], plain_loop(load_recipe(TINY), STEPS)
    equal = all(torch.allclose(state[name], value, rtol=1e-9, atol=1e-12) for name, value in expected.items())
    counted = client.count() == (STEPS, 0, 0) and end.outcome == "finished"
    return {"resume_s": resume_s, "resume_equal": equal and counted, "resumed_on": other}


def measure_queue(client: Client) -> dict[str, Any]:
    """Ten jobs of other priorities wait on this machine while one has its two slots."""
    with (client.folder / "trueline.toml").open("a") as file:
        file.write("[engine.local.two]\ncapacity = 2\n")
    first = client.submit("local:two", "--workers", "2:2")
    client.wait("step.applied")
    waiting: dict[str, tuple[int, str]] = {}
    for priority in (3, 9, 1, 7, 5, 8, 2, 10, 4, 6):
        name = client.submit("local:two", "--workers", "1", "--priority", str(priority), epochs=1)
        waiting[client.unique] = priority, name
    began = time.time()
    client.run("halt", first)
    ended = []
    for _, client.job in waiting.values():
        ended.append(client.wait_end())
    runs = Path(client.env["XDG_CACHE_HOME"], "trueline", "local-engine").glob("*.head.run")
    names = [path.name.removesuffix(".1.head.run") for path in sorted(runs, key=os.path.getmtime)]
    started = [waiting[name][0] for name in names if name in waiting]
    in_order = started == sorted(started, reverse=True) and all(end.outcome == "finished" for end in ended)
    return {"queue_in_order": in_order, "queue_s": max(end.ended for end in ended) - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="strikes on each engine; each fifth at a whole host")
    parser.add_argument("--seed", type=int, default=1, help="of the strikes")
    parser.add_argument("--strikes-only", action="store_true", help="and each tenth strike at a head")
    parser.add_argument("--only", choices=ENGINES, action="append", help="one engine; repeatable")
    args = parser.parse_args()
    lacks = {"local": "", "hosts": "", "podman": podman.find_lack(), "ray": ray.find_lack(), "slurm": slurm.find_lack(),
             "kubernetes": kubernetes.find_lack()}  # fmt: skip
    engines = [name for name in args.only or ENGINES if not lacks[name]]
    for name in set(args.only or ENGINES) - {*engines}:
        print(f"skipped {name}: {lacks[name]}", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the schedulers, too
    found: dict[str, dict[str, Any]] = {}
    queue: dict[str, Any] = {}
    with open_client(engines) as client, suppress(KeyboardInterrupt):  # what is done is reported
        for number, engine in enumerate(engines):
            dice = random.Random(args.seed)
            figures = measure_strikes(client, engine, args.kills, dice, heads=args.strikes_only)
            if not args.strikes_only:
                figures |= measure_move(client, engine, engines[(number + 1) % len(engines)])
            found[engine] = figures
            print(f"{engine}: {figures['lost']} records lost, {figures['repeated']} repeated", file=sys.stderr)
            until(lambda: not client.processes(), "the end of all processes")
        queue = measure_queue(client) if "local" in engines and not args.strikes_only else {}
    engines = [*found]
    rows = [
        (f"{engine}: {name}", f"{figures[name]:.2f} s", f"<= {goal} s", "")
        for engine, figures in found.items() for name, goal in GOALS.items() if name in figures
    ]  # fmt: skip
    for engine, figures in found.items():
        struck = [f"{figures.get(name, 0)} {name.partition('_')[0]}" for name in ("hosts_killed", "heads_killed")]
        killed = f"{figures['kills']} workers, {' and '.join(struck)} killed in {figures['steps']} steps"
        rows.append((f"{engine}: lost / repeated", f"{figures['lost']} / {figures['repeated']}", "0 / 0", killed))
    if queue:
        order = "yes" if queue["queue_in_order"] else "no"
        rows.append(("local: ten jobs on two slots by priority", order, "yes", f"{queue['queue_s']:.0f} s in all"))
    names = next(iter(found.values()), {})
    by_engine = {name: {engine: figures[name] for engine, figures in found.items()} for name in names}
    report(["figure", "measured", "goal", "", ""], mark(rows), {"engines": engines, **by_engine, **queue})


if __name__ == "__main__":
    main()
