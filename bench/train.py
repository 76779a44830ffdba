"""What elastic training costs, and what a death costs: `make bench-train`. A table, then one line of JSON.

Ratios are measured side by side: the two jobs run in turns of some steps, and the figure is the median of the turns'
ratios. Peers run in their own environments (`make peers`); one that is not installed has null for its figure. Run
nothing else on the machine: other load makes the figures worthless.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

import recipe
from _jobs import HERE, FormingKiller, Killer, MasterKiller, PacedKiller, Watch, environment, journal
from _table import mark, report
from _turns import VARIABLE, blocks, both
from peers.drive import EPOCH_STEPS, PEERS, run_peer
from trueline.checkpoint import checkpoint

RECIPE, PACED, COUNTING = HERE / "recipe.py", HERE / "paced.py", HERE / "peers" / "counting.py"
EXACT = HERE.parent / "tests" / "train" / "recipes" / "counting.py"
"""The counting model in double precision."""

Figures = dict[str, Any]
Row = tuple[str, str, str, str]


def ms(value: float) -> str:
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def counts_of(path: Path) -> list[int]:
    """How often each record was applied, as the model's own parameter counted it."""
    found: list[int] = checkpoint.read(path).state["model"]["seen"].round().to(torch.int64).tolist()
    return found


# Deaths. -------------------------------------------------------------------------------------------------------


def regroup(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    kills = 10 * scale
    killer = Killer(kills, full=3)
    epochs = kills + 2
    result = killer.run(folder, COUNTING, workers="2:3", epochs=epochs)
    gaps, back = killer.resumed_ms, killer.replaced_ms
    counts = counts_of(result.checkpoint)
    figures = {
        "regroup_p50_ms": round(statistics.median(gaps), 1),
        "regroup_p99_ms": round(quantile(gaps, 0.99), 1),
        "regroup_max_ms": round(max(gaps), 1),
        "kills": len(gaps),
        "replace_p50_ms": round(statistics.median(back), 1),
        "replace_max_ms": round(max(back), 1),
        "lost": sum(epochs - count for count in counts if count < epochs),
        "repeated": sum(count - epochs for count in counts if count > epochs),
    }
    rows = [
        (
            "SIGKILL -> next applied step, p50",
            ms(figures["regroup_p50_ms"]),
            "<= 60 ms",
            f"{len(gaps)} kills, 0.2 M parameters, 3 workers",
        ),
        ("  p99", ms(figures["regroup_p99_ms"]), "<= 250 ms", f"max {ms(max(gaps))}"),
        (
            "SIGKILL -> the replacement's first step, p50",
            ms(figures["replace_p50_ms"]),
            "<= 1 s",
            f"max {ms(max(back))}",
        ),
        ("records lost / repeated", f"{figures['lost']} / {figures['repeated']}", "0 / 0", f"{epochs} epochs"),
    ]
    return figures, rows


def forming(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    killer = FormingKiller(2 * scale, full=4)
    killer.run(folder, COUNTING, workers="2:4", epochs=2 * scale + 4)
    worst = max(killer.forming_ms)
    figures = {"forming_kill_ms": round(worst, 1), "forming_p50_ms": round(statistics.median(killer.forming_ms), 1),
               "forming_kills": len(killer.forming_ms), "forming_missed": killer.missed}  # fmt: skip
    return figures, [("a kill while the group forms, longest", ms(worst), "<= 2 s", f"{len(killer.forming_ms)} tries")]


def hang(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    killer = Killer(max(1, scale // 3), full=3, with_signal=signal.SIGSTOP)
    killer.run(folder, COUNTING, workers="2:3", epochs=max(1, scale // 3) * 6)
    worst = max(killer.resumed_ms) / 1e3
    figures = {"hang_detect_s": round(worst, 2), "hangs": len(killer.resumed_ms)}
    return figures, [("SIGSTOP -> next applied step, longest", f"{worst:.1f} s", "<= 5 s", f"{figures['hangs']} tries")]


def goodput(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    kills = 1 if scale == 1 else 4
    every_s = 15.0 if scale == 1 else 30.0
    killer = PacedKiller(kills, full=3, every_s=every_s)
    with environment(PACE_MS="5", PACE_RECORDS=str(int(every_s * (kills + 1) * 9.5) * 60)):
        killer.run(folder, PACED, workers="1:3", epochs=1)
    figures = {"goodput": round(killer.goodput(), 4), "goodput_kills": len(killer.resumed_ms)}
    row = (
        f"goodput, one kill each {every_s:g} s, a model that sleeps",
        f"{figures['goodput']:.2%}",
        ">= 99 %",
        f"{len(killer.resumed_ms)} kills",
    )
    return figures, [row]


def master(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    back, ratios, calm, lost = [], [], [], 0
    for _ in range(max(1, scale // 2)):
        killer = MasterKiller(at_step=60)
        with environment(PACE_MS="5", PACE_RECORDS=str(120 * 60)):
            killer.run(folder, PACED, workers=3, epochs=1)
        usual = statistics.median(killer.gaps_ms())
        back.append((killer.back_ns - killer.killed_ns) / 1e9)
        ratios.append(killer.longest_ms(killer.killed_ns, 2.5) / usual)
        calm.append(killer.longest_ms(killer.killed_ns - 2_600_000_000, 2.5) / usual)
        lost += steps_lost(killer.job_dir, 120)
    figures = {"master_kill_steps_lost": lost, "master_back_s": round(max(back), 2), "master_kills": len(back),
               "master_gap_ratio": round(statistics.median(ratios), 3),
               "master_gap_ratios": [round(ratio, 3) for ratio in ratios],
               "master_gap_ratios_without_kill": [round(ratio, 3) for ratio in calm]}  # fmt: skip
    return figures, [
        ("master killed: steps lost", str(lost), "0", f"{len(back)} kills"),
        ("  a worker's report is taken again after", f"{max(back):.2f} s", "<= 2 s", "longest"),
        ("  longest gap / a step, median of kills, sleeping model", f"{figures['master_gap_ratio']:.3f}", "<= 1.1",
         f"longest {max(ratios):.3f}; {statistics.median(calm):.3f} without a kill"),
    ]  # fmt: skip


def steps_lost(job_dir: Path, total: int) -> int:
    """Steps that the journal lacks or has reverted."""
    rows = journal(job_dir)
    applied = {body["step"] for kind, body in rows if kind == "COMMIT"}
    redone = sum(kind == "TRUNCATE" for kind, _ in rows)
    return total - len(applied) + redone


# Speed without deaths. -----------------------------------------------------------------------------------------


Turned = list[list[float]]
"""Milliseconds of the steps of each turn."""


class Side(NamedTuple):
    """One of two jobs that are compared: how it is started, and where it leaves the times of its steps."""

    command: list[str]
    steps: Callable[[], list[int]]


def plain(folder: Path, steps: int, reading: str = "inside") -> Side:
    """A plain DDP loop on two workers; `reading` is explained in `_plain_ddp.py`."""
    log = folder / f"plain-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(HERE / "_plain_ddp.py"), str(log), str(steps), reading]  # fmt: skip
    return Side(command, lambda: [int(line) for line in log.read_text().splitlines()])


def elastic(folder: Path, steps: int, **settings: Any) -> Side:
    """An undisturbed elastic job on two workers; `steps` is a multiple of those of an epoch."""
    batch, epoch_steps, *_ = recipe.SIZES[os.environ["BENCH_STEP"]]
    batch = 2 * round(batch / 2 * float(os.environ.get("BENCH_FACTOR", "1")))
    job_dir = folder / f"job-{time.monotonic_ns()}"
    asked = {"recipe": str(RECIPE), "workers": 2, "epochs": steps // epoch_steps, "global_batch": batch,
             "job_dir": str(job_dir), **settings}  # fmt: skip
    code = "import json, sys; from trueline.train.api import train; train(**json.loads(sys.argv[1]))"
    return Side(
        [sys.executable, "-c", code, json.dumps(asked)],
        lambda: [body["at_ns"] for kind, body in journal(job_dir) if kind == "COMMIT"],
    )


def in_turns(folder: Path, one: Side, other: Side, block: int, steps: int) -> tuple[Turned, Turned]:
    """Runs both at once, with `block` steps of one, then of the other."""
    turns = both(folder, block, steps)
    usual = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    usual["PYTHONPATH"] = os.pathsep.join([str(HERE), *usual.get("PYTHONPATH", "").split(os.pathsep)])
    processes = []
    try:
        for side, told in zip((one, other), turns, strict=True):
            with (folder / f"output-{told.first}").open("wb") as out:
                env = {**usual, VARIABLE: told.as_text()}
                processes.append(subprocess.Popen(side.command, env=env, stdout=out, stderr=out))
        for process, told in zip(processes, turns, strict=True):
            if process.wait(900):
                said = (folder / f"output-{told.first}").read_text()[-800:]
                raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode}: {said}")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            _end(process)
    return blocks(one.steps(), turns[0]), blocks(other.steps(), turns[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process that was signalled to end; killing a launcher ends its job's processes too."""
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def compared(
    folder: Path, key: str, label: str, goal: str, *, block: int, steps: int,
    one: Side, other: Side, typical: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[Figures, list[Row]]:  # fmt: skip
    ones, others = ([typical(turn) for turn in side] for side in in_turns(folder, one, other, block, steps))
    ratios = [mine / theirs for mine, theirs in zip(ones, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    figures = {key: round(middle, 3), f"{key}_quartiles": [round(low, 3), round(high, 3)], f"{key}_turns": len(ratios),
               f"{key}_ms": [round(statistics.median(ones), 2), round(statistics.median(others), 2)]}  # fmt: skip
    detail = f"quartiles {low:.3f}, {high:.3f} of {len(ratios)} turns; {figures[f'{key}_ms'][1]} ms without"
    return figures, [(label, f"{middle:.3f}", goal, detail)]


def steps_long(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    return against_ddp(folder, scale, "long", "step_ratio", "<= 1.01", block=10, steps=60, aim_ms=100)


def steps_short(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    return against_ddp(folder, scale, "short", "step_ratio_8ms", "<= 1.03", block=40, steps=400, aim_ms=8)


def against_ddp(
    folder: Path, scale: int, kind: str, key: str, goal: str, *, block: int, steps: int, aim_ms: float
) -> tuple[Figures, list[Row]]:
    """Jobs beside plain DDP, in turns: the median of ten runs, each the median of its turns.

    A step has as many records as DDP takes `aim_ms` for. DDP reads ahead as the elastic worker does: in the way that
    is fastest for it here, tried first.
    """
    with ExitStack() as stack:
        stack.enter_context(environment(BENCH_STEP=kind))

        def one_run(one: Side, other: Side) -> tuple[float, float, float]:
            """The median of the turns' ratios, and the median steps of both."""
            sides = in_turns(fresh(folder), one, other, block, steps)
            ones, others = ([statistics.median(turn) for turn in side] for side in sides)
            ratio = statistics.median(mine / its for mine, its in zip(ones, others, strict=True))
            return ratio, statistics.median(ones), statistics.median(others)

        factor = 1.0
        for _ in range(3):  # a part of a step's time is the same for any number of records, so one correction is short
            stack.enter_context(environment(BENCH_FACTOR=f"{factor:.2f}"))
            _, first_ms, second_ms = one_run(plain(folder, steps, "inside"), plain(folder, steps, "inside"))
            factor *= 2 * aim_ms / (first_ms + second_ms)
        stack.enter_context(environment(BENCH_FACTOR=f"{factor:.2f}"))
        tried = {"inside": 1.0}
        for new in ("hook", "thread", "loader"):
            ratio, *_ = one_run(plain(folder, steps, new), plain(folder, steps, "inside"))
            tried[new] = round(ratio, 3)
        reading = min(tried, key=tried.__getitem__)
        runs = []
        for number in range(scale):  # in each second run DDP has the first turn
            ours, ddp = elastic(fresh(folder), steps), plain(folder, steps, reading)
            ratio, first_ms, second_ms = one_run(ddp, ours) if number % 2 else one_run(ours, ddp)
            runs.append((1 / ratio, second_ms, first_ms) if number % 2 else (ratio, first_ms, second_ms))
    ratios = sorted(round(ratio, 3) for ratio, *_ in runs)
    ours_ms, ddp_ms = (round(statistics.median(run[side] for run in runs), 2) for side in (1, 2))
    figures = {key: round(statistics.median(ratios), 3), f"{key}_runs": ratios, f"{key}_ms": [ours_ms, ddp_ms],
               f"{key}_reading": reading, f"{key}_readings": tried}  # fmt: skip
    detail = f"median of {scale} runs, {ratios[0]} to {ratios[-1]}; DDP reads by '{reading}' and takes {ddp_ms} ms"
    return figures, [
        (f"step of {ddp_ms:.0f} ms, elastic / plain DDP that reads ahead", f"{figures[key]}", goal, detail)
    ]


def sums(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    """Sums over two and three members of this host, beside gloo's over loopback."""
    figures: Figures = {"sum_ratio": []}
    rows = []
    for members in (2, 3):
        found = subprocess.run(
            [sys.executable, str(HERE / "_sums.py"), str(members)], stdout=subprocess.PIPE, check=True
        )
        for row in json.loads(found.stdout):
            ratio, used = (round(row[f"local_{unit}"] / row[f"gloo_{unit}"], 2) for unit in ("ms", "cpu_ms"))
            figures["sum_ratio"].append({"members": members, **row, "ratio": ratio, "cpu_ratio": used})
            label = f"sum of {row['numbers'] / 1e6:g} million numbers over {members} members of a host / gloo's"
            detail = f"{row['local_ms']:.2f} and {row['gloo_ms']:.2f} ms; processor time {used:.2f}"
            rows.append((label, f"{ratio:.2f}", "<= 1", detail))
    return figures, rows


def fresh(folder: Path) -> Path:
    """A new folder in `folder`."""
    return Path(tempfile.mkdtemp(dir=folder))


def checkpoints(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    """Means, not medians: one step in ten is what may stall. A turn ends five steps after a checkpoint."""
    with environment(BENCH_STEP="long"):
        steps = 120 if scale == 1 else 420
        return compared(folder, "checkpoint_stall_ratio", "step, a checkpoint each 10 steps / none", "<= 1.05",
                        block=20, steps=steps, typical=statistics.fmean,
                        one=elastic(folder, steps, checkpoint_every=10),
                        other=elastic(folder, steps, checkpoint_every=100_000))  # fmt: skip


def bitwise_cost(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    with environment(BENCH_STEP="long"):
        steps = 120 if scale == 1 else 420
        return compared(folder, "bitwise_cost", "step with --bitwise / without", "<= 1.5", block=10, steps=steps,
                        one=elastic(folder, steps, bitwise=True), other=elastic(folder, steps))  # fmt: skip


def straggler(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    """Steps of 1 s and of half a second: synchronising eight processes on two cores costs both the same."""
    figures: Figures = {}
    rows = []
    for key, pace_ms, steps in (("straggler_ratio", 10.0, 40), ("straggler_ratio_half_s", 5.0, 60)):
        steps = 10 if scale == 1 else steps
        figures[key], figures[f"{key}_steps"] = round(makespan(folder, pace_ms, steps), 3), steps
        label = f"8 workers that sleep, one at 1/10 speed, steps of {pace_ms / 10:g} s: makespan / ideal"
        rows.append((label, f"{figures[key]:.3f}", "<= 1.05", f"{steps} steps"))
    return figures, rows


def makespan(folder: Path, pace_ms: float, steps: int) -> float:
    """The first step runs before speeds are known, so it is left out with the start."""
    workers, batch, watch = 8, 710, Watch()
    with environment(PACE_MS=str(pace_ms), PACE_SLOW=str(workers - 1), PACE_RECORDS=str(steps * batch)):
        watch.run(folder, PACED, workers=workers, epochs=1, global_batch=batch)
    first, last = watch.steps[0], watch.steps[-1]
    records = sum(step["records"] for step in watch.steps[1:])
    speed = (workers - 1 + 0.1) / pace_ms  # records a millisecond
    return (last["at_ns"] - first["at_ns"]) / 1e6 / (records / speed)


# The answer. ---------------------------------------------------------------------------------------------------


def storm(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    worst, kills = storm_difference(folder, scale)
    figures = {"final_difference": worst, "final_difference_kills": kills}
    return figures, [("final parameters, kill storm / undisturbed", f"{worst:.1e}", "<= 1e-6", f"{kills} kills")]


def bitwise(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
    worst, kills = storm_difference(folder, scale, bitwise=True)
    figures = {"bitwise_equal": worst == 0.0, "bitwise_kills": kills}
    return figures, [("with --bitwise: equal", str(worst == 0.0).lower(), "true", f"{kills} kills")]


def storm_difference(folder: Path, scale: int, **settings: Any) -> tuple[float, int]:
    """The largest difference between the parameters of both runs, relative to the parameter's largest value."""
    epochs = 40 * max(1, scale // 2)
    killer = Killer(3 * scale, full=3, settle=5)
    stormy = killer.run(folder, EXACT, workers="2:3", epochs=epochs, **settings)
    calm = Watch().run(folder, EXACT, workers=2, epochs=epochs, **settings)
    states = [checkpoint.read(result.checkpoint).state["model"] for result in (stormy, calm)]
    differences = [
        0.0 if torch.equal(states[0][name], value) else float((states[0][name] - value).abs().max() / value.abs().max())
        for name, value in states[1].items()
    ]
    return max(differences), len(killer.resumed_ms)


# Others. -------------------------------------------------------------------------------------------------------


def peer(name: str) -> Callable[[Path, int], tuple[Figures, list[Row]]]:
    def measure(folder: Path, scale: int) -> tuple[Figures, list[Row]]:
        kills = 2 * scale
        found: Any = run_peer(name, kills=kills, steps=EPOCH_STEPS * 6 * kills)
        gaps = found["gap_ms"]
        figures = {f"{name}_p50_ms": round(statistics.median(gaps), 1) if gaps else None, name: found}
        lost = "no model came out" if found["lost"] is None else f"{found['lost']} lost, {found['repeated']} repeated"
        typical = ms(figures[f"{name}_p50_ms"]) if gaps else "-"
        detail = f"{len(gaps)} kills, {found['redone']} steps redone" + (f"; {found['why']}" if found["why"] else "")
        return figures, [(f"{name}: SIGKILL -> next applied step, p50", typical, "", f"{detail}; {lost}")]

    return measure


SECTIONS: dict[str, tuple[Callable[[Path, int], tuple[Figures, list[Row]]], tuple[str, ...]]] = {
    "regroup": (regroup, ("regroup_p50_ms", "regroup_max_ms", "replace_p50_ms", "lost", "repeated")),
    "forming": (forming, ("forming_kill_ms",)),
    "hang": (hang, ("hang_detect_s",)),
    "goodput": (goodput, ("goodput",)),
    "master": (master, ("master_kill_steps_lost", "master_back_s", "master_gap_ratio")),
    "steps": (steps_long, ("step_ratio",)),
    "steps8": (steps_short, ("step_ratio_8ms",)),
    "sums": (sums, ("sum_ratio",)),
    "straggler": (straggler, ("straggler_ratio",)),
    "storm": (storm, ("final_difference",)),
    "bitwise": (bitwise, ("bitwise_equal",)),
    "bitwise_cost": (bitwise_cost, ("bitwise_cost",)),
    "checkpoints": (checkpoints, ("checkpoint_stall_ratio",)),
    **{name: (peer(name), (f"{name}_p50_ms",)) for name in PEERS},
}
"""Name -> what measures it, and the keys that are null when it cannot."""


def measured(name: str, scale: int) -> tuple[Figures, list[Row]]:
    """One section; an error in it is printed, and its figures are null."""
    measure, keys = SECTIONS[name]
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            figures, rows = measure(Path(scratch), scale)
    except Exception as error:  # noqa: BLE001  the other sections are still worth their time
        if not isinstance(error, LookupError):
            traceback.print_exc()
        figures, rows = dict.fromkeys(keys), [(name, "-", "", f"not measured: {error}")]
    print(f"{name}: {time.monotonic() - began:.0f} s", *map("  ".join, rows), sep="\n  ", file=sys.stderr, flush=True)
    return figures, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a tenth of the kills, to see that it works")
    arguments = parser.parse_args()
    figures: Figures = {"load_before": os.getloadavg()[0]}
    rows: list[Row] = []
    for name in arguments.only.split(","):
        found, lines = measured(name, 1 if arguments.quick else 10)
        figures |= found
        rows += lines
    report(("what", "measured", "goal", "", "detail"), mark(rows), figures)


if __name__ == "__main__":
    main()
