"""What a worker's death costs: SIGKILL of one of 3 gloo workers until the next applied step, ten times.

Beside it, in the same run on the same model and batch: torchrun with --max-restarts (with the one environment variable
that lets its restart work on gloo in torch 2.13, pytorch#135712), and the step time of an undisturbed elastic job over
that of a plain DDP loop, taken in turns. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from _table import report
from trueline import events
from trueline.train.api import train

HERE = Path(__file__).parent
RECIPE = HERE / "recipe.py"


class Killer:
    """Kills a random worker some steps after everybody is there again, and notes when the next step was applied."""

    def __init__(self, kills: int) -> None:
        self.kills, self.pids, self.gaps_ms = kills, {}, []
        self.killed_ns = self.steps_together = 0
        self.ready = threading.Event()
        self.dice = random.Random(0)

    def __call__(self, name: str, fields: dict) -> None:
        if name == "worker.running":
            self.pids[fields["worker"]] = fields["pid"]
        elif name == "worker.lost":
            self.pids.pop(fields["worker"], None)
        elif name == "step.applied":
            self._step(fields)

    def _step(self, fields: dict) -> None:
        if self.killed_ns and fields["gap_ms"] and fields["at_ns"] > self.killed_ns:
            self.gaps_ms.append((fields["at_ns"] - self.killed_ns) / 1e6)
            self.killed_ns = 0
        self.steps_together = self.steps_together + 1 if fields["workers"] == 3 else 0
        if not self.killed_ns and self.steps_together > 30 and len(self.gaps_ms) < self.kills:
            self.steps_together = 0
            self.killed_ns = time.monotonic_ns()
            os.kill(self.dice.choice(list(self.pids.values())), 9)


def regroup_ms(folder: Path, kills: int) -> list[float]:
    killer = Killer(kills)
    with events.listening(killer):
        train(RECIPE, workers="2:3", epochs=max(4, kills * 2), job_dir=folder / "regroup")
    return killer.gaps_ms


def read_log(log: Path) -> list[tuple[int, int, int, int]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [tuple(int(word) for word in line.split()) for line in lines if line.count(" ") == 3]


def torchrun(folder: Path, steps: int, workers: int, checkpoint: str, restarts: int) -> tuple[subprocess.Popen, Path]:
    log = folder / f"plain-{time.monotonic_ns()}.log"
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
           "PYTHONPATH": str(HERE)}  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
               f"--max-restarts={restarts}", str(HERE / "_plain_ddp.py"), str(log), checkpoint, str(steps)]  # fmt: skip
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet, start_new_session=True), log


def torchrun_ms(folder: Path, kills: int) -> list[float]:
    """Kill to next applied step under torchrun; a kill without a step within 60 s counts as 60,000 ms."""
    process, log = torchrun(folder, 1_000_000, 3, str(folder / "plain.pt"), kills + 2)
    gaps = []
    try:
        for _ in range(kills):
            seen = wait_steps(log, time.monotonic_ns(), 40, 60)
            if not seen:
                break
            killed_ns = time.monotonic_ns()
            os.kill(seen[-1][1], 9)
            after = wait_steps(log, killed_ns + 200_000_000, 1, 60)
            gaps.append((after[0][3] - killed_ns) / 1e6 if after else 60_000.0)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
    return gaps


def wait_steps(log: Path, since_ns: int, count: int, patience_s: float) -> list[tuple[int, int, int, int]]:
    """The steps applied after `since_ns`, once there are `count`; none when they do not come in time."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = [line for line in read_log(log) if line[3] > since_ns]
        if len(found) >= count:
            return found
        time.sleep(0.02)
    return []


def step_ms_plain(folder: Path, steps: int) -> float:
    process, log = torchrun(folder, steps, 2, "none", 0)
    process.wait()
    return median_step_ms([line[3] for line in read_log(log) if line[0] == 0])


def step_ms_elastic(folder: Path, steps: int) -> float:
    at: dict[int, int] = {}

    def listen(name: str, fields: dict) -> None:
        if name == "step.applied":
            at[fields["step"]] = fields["at_ns"]

    with events.listening(listen):
        train(RECIPE, workers=2, epochs=steps // 100, job_dir=folder / f"steps-{time.monotonic_ns()}")
    return median_step_ms([at[step] for step in sorted(at)])


def median_step_ms(at_ns: list[int]) -> float:
    gaps = [(after - before) / 1e6 for before, after in itertools.pairwise(at_ns)]
    return statistics.median(gaps[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--torchrun-kills", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the step time comparison")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        gaps = regroup_ms(folder, arguments.kills)
        others = torchrun_ms(folder, arguments.torchrun_kills)
        ratios, plain, elastic = [], [], []
        for _ in range(arguments.rounds):
            plain.append(step_ms_plain(folder, 400))
            elastic.append(step_ms_elastic(folder, 400))
            ratios.append(elastic[-1] / plain[-1])
    rows = [
        ("SIGKILL -> next applied step, Trueline", f"{statistics.median(gaps):.0f} ms p50", f"{max(gaps):.0f} ms max"),
        ("the same, torchrun --max-restarts", f"{statistics.median(others):.0f} ms p50", f"{max(others):.0f} ms max"),
        ("step, plain DDP", f"{statistics.median(plain):.2f} ms", f"{min(plain):.2f} ms min"),
        ("step, elastic worker", f"{statistics.median(elastic):.2f} ms", f"{min(elastic):.2f} ms min"),
    ]
    figures = {
        "regroup_p50_ms": round(statistics.median(gaps), 1),
        "regroup_max_ms": round(max(gaps), 1),
        "kills": len(gaps),
        "torchrun_p50_ms": round(statistics.median(others), 1),
        "torchrun_kills": len(others),
        "step_ratio": round(statistics.median(ratios), 3),
        "step_ratios": [round(ratio, 3) for ratio in ratios],
        "step_plain_ms": round(statistics.median(plain), 3),
        "step_elastic_ms": round(statistics.median(elastic), 3),
        "load_1m": os.getloadavg()[0],
    }
    report(("what", "typical", "extreme"), rows, figures)


if __name__ == "__main__":
    main()
