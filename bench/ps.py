"""The parameter server: CPU of a step, samples per CPU-second, wall clock beside torch's RPC, a server that is killed.

    python -m bench.ps [--seconds 4] [--rounds 3] [--gb 1.0]

`_ps_trainer.py` describes the workload. Ours and torch's RPC run in turns, so that other load affects both. Wall clock
is that of the best quarter of a second of a round, and the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import numpy as np
from bench import _ps_servers as ps_servers
from bench._ps_lookups import measure_lookups
from bench._ps_trainer import DIM, RECORDS
from bench._table import mark, report

from trueline.ps.gradients import Gradients
from trueline.ps.messages import ModelSpec, OptimizerSpec, TableSpec
from trueline.ps.partition import buckets_of, owners_of

SPEC = ModelSpec(
    seed=1,
    groups=(OptimizerSpec(kind="sgd"),),
    tables=(
        TableSpec(name="table", dim=DIM, group=0, init="uniform", scale=0.05),
        TableSpec(name="uses", dim=1, group=0, init="zeros"),
    ),
)
CHUNK = 400_000
Result = dict[str, float]


def measure_steps(seconds: float, rounds: int) -> list[dict[str, Result]]:
    """What each kind measured, round by round."""
    found = []
    for _ in range(rounds):
        one = {}
        for name, tcp in (("ours", False), ("ours_tcp", True)):
            one[name] = ps_servers.train_ours("ours", spec=SPEC, trainers=1, servers=1, seconds=seconds, tcp=tcp)
            peer = name.replace("ours", "rpc")
            one[peer] = ps_servers.train_rpc(peer, seconds=seconds)
        one["eight"] = ps_servers.train_ours("ours", spec=SPEC, trainers=8, servers=1, seconds=seconds)
        found.append(one)
    return found


def middle(rounds: list[dict[str, Result]], name: str, figure: str) -> float:
    return statistics.median(one[name][figure] for one in rounds)


def per_cpu_s(result: Result) -> float:
    return result["steps"] * RECORDS / (result["cpu_s"] + result["server_cpu_s"])


def fill(servers: ps_servers.Servers, gb: float) -> int:
    """Gives server 0 rows until it holds so much; returns the number of its pushes."""
    client, random, pushes = servers.client(), np.random.default_rng(0), 0
    owners = owners_of(servers.routing)
    while True:
        ids = np.unique(random.integers(-(2**63), 2**63 - 1, CHUNK * len(servers.routing.servers), dtype=np.int64))
        ids = ids[owners[buckets_of(ids, "table")] == 0]
        rows = np.full((len(ids), DIM), 0.5, np.float32)
        client.push(Gradients(1, pushes, 1.0, (0.1,), {"table": (ids, rows)}, {}))
        client.drain()
        pushes += 1
        if pushes % 4 == 0:
            tables = servers.ask("server-0", lambda link: link.stats()).tables
            if sum(one.bytes for one in tables) >= gb * 1e9:
                client.close()
                return pushes


def measure_failover(gb: float, kills: int) -> tuple[list[float], int, int, float]:
    """Seconds from a SIGKILL to the next acknowledgement; uses lost and repeated; what that server held, in GB."""
    with ps_servers.serving(3, SPEC) as servers:
        fill(servers, gb)
        held = sum(one.bytes for one in servers.ask("server-0", lambda link: link.stats()).tables)
        ending, acknowledged = threading.Event(), []
        ids = np.arange(2_000)

        def push() -> None:
            client, number = servers.client(outstanding=4), 0
            while not ending.is_set():
                use = np.full((1, 1), -1.0, np.float32)
                tables = {"table": (ids, np.full((len(ids), DIM), 0.01, np.float32)), "uses": (np.array([number]), use)}
                client.push(Gradients(0, number, 1.0, (1.0,), tables, {}))
                acknowledged.extend((time.monotonic(), minibatch) for _, minibatch in client.take_acknowledged())
                number += 1
            client.drain()
            acknowledged.extend((time.monotonic(), minibatch) for _, minibatch in client.take_acknowledged())
            client.close()

        pusher = threading.Thread(target=push)
        pusher.start()
        took = []
        for _ in range(kills):
            time.sleep(1.0)
            at = time.monotonic()
            servers.kill(0)
            after = at + 0.05  # what was on its way when the process died may still be read
            while not acknowledged or acknowledged[-1][0] < after:
                time.sleep(0.005)
            took.append(next(when for when, _ in acknowledged if when >= after) - at)
        ending.set()
        pusher.join()
        minibatches = np.array(sorted(minibatch for _, minibatch in acknowledged))
        client = servers.client()
        uses = client.pull({"uses": minibatches}, dense=False).rows["uses"][:, 0]
        client.close()
        return took, int((uses < 1).sum()), int((uses > 1).sum()), held / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a trainer in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gb", type=float, default=1.0, help="held by the server that is killed")
    parser.add_argument("--kills", type=int, default=3, choices=range(1, 100), metavar="N", help="1 or more")
    given = parser.parse_args()
    rounds = measure_steps(given.seconds, given.rounds)
    cpu_ms = statistics.median(1e3 * one["ours"]["server_cpu_s"] / one["ours"]["steps"] for one in rounds)
    rpc_ms = statistics.median(1e3 * one["rpc_tcp"]["server_cpu_s"] / one["rpc_tcp"]["steps"] for one in rounds)
    alone = statistics.median(per_cpu_s(one["ours"]) for one in rounds)
    rpc_alone = statistics.median(per_cpu_s(one["rpc_tcp"]) for one in rounds)
    eight = statistics.median(per_cpu_s(one["eight"]) for one in rounds)
    relative = statistics.median(per_cpu_s(one["eight"]) / per_cpu_s(one["ours"]) for one in rounds)
    best = "best_samples_per_s"
    local = statistics.median(one["ours"][best] / one["rpc"][best] for one in rounds)
    tcp = statistics.median(one["ours_tcp"][best] / one["rpc_tcp"][best] for one in rounds)
    lookups, compiled = (measure_lookups(given.rounds, compiled=which) for which in (False, True))
    took, lost, repeated, held = measure_failover(given.gb, given.kills)
    rows = [
        ("server CPU of a step", f"{cpu_ms:.2f} ms", "<= 1.8 ms", f"torch RPC over TCP {rpc_ms:.2f} ms"),
        ("samples per CPU-second", f"{alone:.0f}", ">= 130000", f"torch RPC over TCP {rpc_alone:.0f}"),
        ("the same, eight trainers", f"{eight:.0f}", ">= 104000", "0.8 of 130000"),
        ("eight trainers / one", f"{relative:.2f}", ">= 0.8", "of what one trainer has here, by rounds"),
        ("wall / torch RPC", f"{local:.2f}", ">= 1.0",
         f"{middle(rounds, 'ours', best):.0f} / {middle(rounds, 'rpc', best):.0f} samples/s, one host"),
        ("wall / torch RPC, TCP", f"{tcp:.2f}", ">= 1.3",
         f"{middle(rounds, 'ours_tcp', best):.0f} / {middle(rounds, 'rpc_tcp', best):.0f} samples/s"),
        ("lookups at 10 M rows", f"{lookups:.1f} M", ">= 25", "per CPU-second, by NumPy"),
        *([("lookups, compiled", f"{compiled:.1f} M", ">= 45", "with numba")] if compiled else []),
        ("a server is killed", f"{max(took):.2f} s", "<= 5 s", f"slowest of {len(took)}; it holds {held:.2f} GB"),
        ("acknowledged, lost", f"{lost}", "0", "pushes without their row"),
        ("acknowledged, repeated", f"{repeated}", "0", "pushes that count twice"),
    ]  # fmt: skip
    result = {
        "ps_cpu_ms": cpu_ms, "samples_per_cpu_s": alone, "samples_per_cpu_s_eight": eight, "eight_relative": relative,
        "vs_torch_rpc": local, "vs_torch_rpc_tcp": tcp, "lookups_m": lookups, "lookups_m_numba": compiled,
        "failover_s": max(took), "lost": lost, "repeated": repeated,
    }  # fmt: skip
    report(["figure", "measured", "target", "", "beside"], mark(rows), result)


if __name__ == "__main__":
    main()
