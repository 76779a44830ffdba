"""What a death, a checkpoint and memory cost at 2, 60 and 300 million parameters: `make bench-large SIZES=2,60`.

Two workers on local processes train an MLP with Adam on distinct records (`sized.py`). Measures, of which `--only`
chooses:

    kills         a worker is killed again and again: kill -> next step, join, longest step of the others, records
    checkpoints   ten steps that begin with a checkpoint, then ten without, in turn in one job
    memory        a plain DDP worker with the same model, optimizer and batch; the peaks of ours in both jobs above
    goodput       one kill every 30 s

Beside them: copying the state's bytes over loopback (between kills, beside the training, and on an idle machine), in
memory, and to the disk. A size that does not fit the free memory is left out, and says so. Last comes one line of JSON
with an object for each size. Minutes on two cores: 2 for 2 million, 6 for 60, 12 for 300, which needs 17 GB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import safetensors

import sized
from _jobs import HERE, PacedKiller, SizedKiller, Watch, environment, journal
from _machine import copy_s, disk_s, move_s, peak_bytes
from _table import mark, report
from trueline.storage.location import Location

RECIPE = HERE / "sized.py"
WORKERS, EVERY, EPOCHS = 2, 10, 2
MEASURES = ("kills", "checkpoints", "memory", "goodput")
Figures = dict[str, Any]
Row = tuple[str, str, str, str]


class Size(NamedTuple):
    millions: int
    kill_steps: int
    settle: int
    """Steps that both workers share before a kill."""
    reserve: int
    """Steps that are left for the last replacement."""
    pairs: int
    """Of ten steps with a checkpoint and ten without."""
    kill_goal_ms: int
    needs_gb: float

    @property
    def state_bytes(self) -> int:
        """Parameters and Adam's two moments."""
        return 12 * self.millions * 1_000_000


SIZES = {
    2: Size(2, kill_steps=500, settle=10, reserve=15, pairs=12, kill_goal_ms=60, needs_gb=1.5),
    60: Size(60, kill_steps=110, settle=5, reserve=8, pairs=5, kill_goal_ms=150, needs_gb=5.0),
    300: Size(300, kill_steps=30, settle=4, reserve=7, pairs=3, kill_goal_ms=300, needs_gb=17.0),
}


@contextmanager
def sizing(size: Size, epoch_steps: int) -> Iterator[dict[str, Any]]:
    """Variables for the recipe in workers; yields the settings of a job of that size."""
    _, _, batch = sized.SIZES[size.millions]
    with environment(BENCH_SIZE=str(size.millions), BENCH_STEPS=str(epoch_steps)):
        yield {"workers": WORKERS, "global_batch": batch, "keep": 1, "device": os.environ.get("BENCH_DEVICE", "cpu")}


def counted(where: Location, epochs: int, records: int) -> Figures:
    """Records that the final model lacks or has too often, by its own counter."""
    with safetensors.safe_open(Path(str(where)) / "state.safetensors", "pt") as file:
        # Tensors are numbered; the model's come before the optimizer's, whose moments have the same shape.
        names = sorted(file.keys(), key=int)
        seen = file.get_tensor(next(name for name in names if file.get_slice(name).get_shape() == [records]))
    counts = seen.round().long()
    return {"lost": int((epochs - counts).clamp(min=0).sum()), "repeated": int((counts - epochs).clamp(min=0).sum())}


def journalled(job_dir: Path, total: int) -> int:
    """Steps that the journal has not exactly once, after what it took back."""
    applied: list[int] = []
    for kind, body in journal(job_dir):
        if kind == "COMMIT":
            applied.append(body["step"])
        elif kind == "TRUNCATE":
            applied = [step for step in applied if step < body["steps"]]
    return sum(applied.count(step) != 1 for step in range(total))


def _kill_steps(size: Size, quick: bool) -> int:
    fewest = 2 * (size.settle + size.reserve)  # for one kill and its replacement
    return (max(size.kill_steps // 4, fewest) if quick else size.kill_steps) // EPOCHS * EPOCHS


def _checkpoint_steps(size: Size, quick: bool) -> int:
    return 2 * EVERY * ((1 if quick else size.pairs) + 1) + 1


def kills(folder: Path, size: Size, quick: bool) -> Figures:
    epochs, steps = EPOCHS, _kill_steps(size, quick)
    killer = SizedKiller(full=WORKERS, settle=size.settle, reserve=size.reserve, move_bytes=size.state_bytes)
    with sizing(size, steps // epochs) as settings:
        result = killer.run(folder, RECIPE, epochs=epochs, checkpoint_every=1_000_000, **settings)
        records = steps // epochs * settings["global_batch"]
    joined = killer.joined_ms
    usual = statistics.median(killer.usual)
    return {
        "kills": killer.kills,
        "kill_p50_ms": round(statistics.median(killer.resumed_ms), 1),
        "kill_max_ms": round(max(killer.resumed_ms), 1),
        "usual_ms": round(usual, 1),
        "given_s": round(statistics.median(killer.given_ms) / 1e3, 2) if len(joined) == killer.kills else None,
        "join_s": round(statistics.median(joined) / 1e3, 2) if len(joined) == killer.kills else None,
        "join_max_s": round(max(joined) / 1e3, 2) if joined else None,
        "joined": len(joined),
        "given_up": killer.given_up,
        "quarantined": killer.quarantined,
        "state_move_s": round(statistics.median(killer.moved_s), 3) if killer.moved_s else None,
        "state_move_idle_s": round(statistics.median(move_s(size.state_bytes) for _ in range(3)), 3),
        "others_longest_ratio": round(max(killer.longest_ms) / usual, 2),
        "others_longest_p50_ratio": round(statistics.median(killer.longest_ms) / usual, 2),
        "peak_kills_mb": max(killer.peaks.values()) >> 20,
        **counted(result.checkpoint, epochs, records),
        "journal_faults": journalled(killer.job_dir, steps),
    }


class Peaks(Watch):
    """The largest peak of a worker before step `mark`, and at the end."""

    def __init__(self, mark: int) -> None:
        super().__init__()
        self.mark, self.before, self.most = mark, 0, 0

    def applied(self, step: Any) -> None:
        self.most = max(self.most, *map(peak_bytes, self.pids.values()))
        if step["step"] < self.mark:
            self.before = self.most


def checkpoints(folder: Path, size: Size, quick: bool) -> Figures:
    """Steps 20 to 29, 40 to 49, … follow a checkpoint."""
    pairs, steps = 1 if quick else size.pairs, _checkpoint_steps(size, quick)
    watch = Peaks(mark=2 * EVERY - 2)
    with sizing(size, steps) as settings:
        watch.run(folder, RECIPE, epochs=1, checkpoint_every=2 * EVERY, **settings)
    at = {step["step"] + 1: step["at_ns"] / 1e9 for step in watch.steps}
    means = [(at[start + EVERY] - at[start]) / EVERY for start in range(2 * EVERY, steps - EVERY, EVERY)]
    ratios = [loaded / free for loaded, free in zip(means[::2], means[1::2], strict=False)]
    saved = [body["step"] for kind, body in journal(watch.job_dir) if kind == "CKPT"]
    return {
        "checkpoint_ratio": round(statistics.median(ratios), 3),
        "checkpoint_ratios": [round(ratio, 3) for ratio in ratios],
        "checkpoint_ms": [round(1e3 * statistics.median(kind), 1) for kind in (means[::2], means[1::2])],
        "checkpoints_written": len(saved),
        "checkpoints_due": pairs + 2,
        "peak_training_mb": watch.before >> 20,
        "peak_checkpoints_mb": watch.most >> 20,
    }


def memory(folder: Path, size: Size, quick: bool) -> Figures:
    """Peak and step of plain DDP, which neither writes checkpoints nor sends a state. It holds the records of the
    smaller of the jobs above, and takes some steps with them."""
    steps = 8 if size.millions > 100 else 20
    log = folder / "plain.log"
    with sizing(size, max(steps, min(_kill_steps(size, quick) // EPOCHS, _checkpoint_steps(size, quick)))):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}",
                   str(HERE / "_plain_ddp.py"), str(log), str(steps)]  # fmt: skip
        usual = {"BENCH_RECIPE": "sized", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env={**os.environ, **usual}, check=True, timeout=400, stderr=subprocess.DEVNULL)
    at_ns = [int(line) for line in log.read_text().splitlines()][3:]
    return {
        "ddp_peak_mb": max(int(Path(f"{log}.{rank}").read_text()) for rank in range(WORKERS)) >> 20,
        "ddp_step_ms": round(statistics.median((b - a) / 1e6 for a, b in itertools.pairwise(at_ns)), 1),
    }


def goodput(folder: Path, size: Size, quick: bool) -> Figures:
    every_s, count = (10.0, 1) if quick else (30.0, 3)
    step_s = {2: 0.1, 60: 0.9, 300: 6.0}[size.millions]
    steps = int(every_s * (count + 1) / step_s)
    killer = PacedKiller(count, full=WORKERS, every_s=every_s)
    with sizing(size, steps) as settings:
        killer.run(folder, RECIPE, epochs=1, checkpoint_every=1_000_000, **settings)
    return {"goodput": round(killer.goodput(), 4), "goodput_kills": len(killer.resumed_ms)}


RUNS = {"kills": kills, "checkpoints": checkpoints, "memory": memory, "goodput": goodput}


def measure(size: Size, measures: list[str], *, quick: bool) -> Figures:
    figures: Figures = {"millions": size.millions}
    for name in measures:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                figures |= RUNS[name](Path(scratch), size, quick)
        except Exception as error:  # noqa: BLE001  the other measures are still worth their time
            figures[f"{name}_failed"] = f"{type(error).__name__}: {error}"
        print(f"{size.millions} M, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    peaks = [figures[key] for key in ("peak_training_mb", "peak_checkpoints_mb", "peak_kills_mb") if key in figures]
    if peaks and "ddp_peak_mb" in figures:
        figures["peak_ratio"] = round(max(peaks) / figures["ddp_peak_mb"], 2)
    with tempfile.TemporaryDirectory() as scratch:
        figures["memcpy_s"] = round(copy_s(size.state_bytes), 3)
        figures["disk_s"] = round(disk_s(size.state_bytes, Path(scratch)), 3)
    return figures


def rows_of(size: Size, figures: Figures) -> list[Row]:
    """What was measured of one size, beside its targets."""
    rows: list[Row] = []

    def row(key: str, what: str, text: str, goal: str, detail: str) -> None:
        if key in figures:
            rows.append((f"{size.millions} M: {what}", text if figures[key] is not None else "never", goal, detail))

    def get(key: str) -> Any:
        value = figures.get(key)
        return float("nan") if value is None else value

    row(
        "kill_p50_ms",
        "kill -> next step less a usual step, p50",
        f"{get('kill_p50_ms') - get('usual_ms'):.0f} ms",
        f"<= {size.kill_goal_ms} ms",
        f"{get('kills')} kills; a step {get('usual_ms'):.0f} ms, "
        f"kill -> next step {get('kill_p50_ms'):.0f}, longest {get('kill_max_ms'):.0f}",
    )
    move_s = get("state_move_s")
    row(
        "given_s",
        "kill -> the replacement has state and records / moving the state",
        f"{get('given_s') / move_s:.2f}",
        "<= 3" if size.millions > 2 else "",
        f"{get('given_s'):.2f} s, {get('joined')} of {get('kills')}; a move {move_s:.2f} s beside the training, "
        f"{get('state_move_idle_s'):.2f} alone; {get('given_up')} replacements given up",
    )
    least_s = 2 * get("usual_ms") / 1e3 + move_s  # the survivor's step, the move, the step of both
    row(
        "join_s",
        "kill -> its first step is applied / two steps and a move",
        f"{get('join_s') / least_s:.2f}",
        "<= 1.15" if size.millions > 2 else "",
        f"{get('join_s'):.2f} s, longest {get('join_max_s'):.2f}; {get('join_s') / move_s:.2f} moves",
    )
    row(
        "others_longest_ratio",
        "longest step of the others meanwhile / usual",
        f"{get('others_longest_ratio'):.2f}",
        "<= 2",
        f"median {get('others_longest_p50_ratio'):.2f}",
    )
    row(
        "lost",
        "records lost / repeated",
        f"{figures.get('lost')} / {figures.get('repeated')}",
        "0 / 0",
        f"{figures.get('journal_faults')} steps not once in the journal",
    )
    row(
        "checkpoint_ratio",
        f"step with a checkpoint every {EVERY} / without",
        f"{get('checkpoint_ratio'):.3f}",
        "<= 1.05",
        f"{figures.get('checkpoint_ms')} ms; {figures.get('checkpoints_written')} of "
        f"{figures.get('checkpoints_due')} written",
    )
    row(
        "peak_ratio",
        "peak of a worker / plain DDP's",
        f"{get('peak_ratio'):.2f}",
        "<= 1.3",
        f"MB: DDP {figures.get('ddp_peak_mb')}, training {figures.get('peak_training_mb')}, checkpoints "
        f"{figures.get('peak_checkpoints_mb')}, kills {figures.get('peak_kills_mb')}",
    )
    row("goodput", "goodput, one kill each 30 s", f"{get('goodput'):.2%}", ">= 99 %", f"{get('goodput_kills')} kills")
    row(
        "memcpy_s",
        "the state once in memory, to the disk",
        f"{get('memcpy_s'):.2f}, {get('disk_s'):.2f} s",
        "",
        f"{size.state_bytes / 1e6:.0f} MB",
    )
    rows += [(f"{size.millions} M: {key}", "-", "", figures[key]) for key in figures if key.endswith("_failed")]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="", help="million parameters: 2,60,300; default: those that fit the memory")
    parser.add_argument("--only", default="kills,checkpoints,memory", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--device", default="cpu", help="cuda: both workers share a GPU, and the peer is left out")
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps, to see that it works")
    arguments = parser.parse_args()
    os.environ["BENCH_DEVICE"] = arguments.device
    if arguments.device != "cpu" and "memory" in arguments.only:
        arguments.only = arguments.only.replace(",memory", "")
    wanted = [int(size) for size in arguments.sizes.split(",") if size] or list(SIZES)
    if unknown := set(wanted) - SIZES.keys() | set(arguments.only.split(",")) - set(MEASURES):
        parser.error(f"no size or measure {', '.join(map(str, unknown))}")
    figures: Figures = {"sizes": {}, "left_out": []}
    rows: list[Row] = []
    for millions in wanted:
        size, free_gb = SIZES[millions], psutil.virtual_memory().available / 1e9
        if free_gb < size.needs_gb:
            rows.append((f"{millions} M", "left out", "", f"{free_gb:.1f} GB are free, {size.needs_gb:g} are needed"))
            figures["left_out"].append(millions)
            continue
        found = figures["sizes"][str(millions)] = measure(size, arguments.only.split(","), quick=arguments.quick)
        rows += rows_of(size, found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    report(("what", "measured", "goal", "", "detail"), mark(rows), figures)


if __name__ == "__main__":
    main()
