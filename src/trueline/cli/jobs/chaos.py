"""`trueline chaos`."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Output, recipe_argument, section, setting_options, verb
from trueline.errors import UsageError
from trueline.recipe.settings import TrainingSettings

if TYPE_CHECKING:
    from trueline.chaos.runner import StormPlan
    from trueline.chaos.storm import Storm

_EXAMPLES = """
trueline chaos digits/recipe.py
    a hundred kills of workers, master, agent and launcher; the model has to equal that of an undisturbed run

trueline chaos digits/recipe.py --kills 500 --workers 2:4 --what points,worker,all
    only workers: at named points of the protocol, at random instants, and all at once

trueline chaos digits/recipe.py --seed 17 --every 40 --kills 1
    repeats one storm: seed and distance decide which faults strike when
"""
_storm = section("The storm")
_OF_THE_JOBS = ("epochs", "global_batch", "evaluate_every", "bitwise", "device", "backend")
TOOLS = ("unshare", "ip", "ss", "mount")
SINGLE = ("worker", "two")
"""Deaths of workers while master and agent live, as at the named points."""
PEERS = ("torchrun", "torchft", "dlrover")
PEER_KILLS, PEER_STEPS = 4, 3600


@verb("chaos", examples=_EXAMPLES)
@recipe_argument
@_storm("--kills", type=int, default=100, metavar="N", help="Storms follow each other until N are done; 100.")
@_storm("--seed", type=int, metavar="S", help="Decides all strikes; else random, and printed.")
@_storm("--what", default="", metavar="KIND,...", help="Only these strikes; --what help explains them.")
@_storm("--points", default="", metavar="PHASE,...", help="Only these named points.")
@_storm("--every", type=int, default=0, metavar="STEPS", help="Steps between two strikes; else a third of a second.")
@_storm("--workers", default="2:3", metavar="N|MIN:MAX", help="Worker processes; 2:3.")
@_storm("--checkpoint-every", type=int, default=25, metavar="STEPS", help="Steps between checkpoints; 25.")
@_storm("--tolerance", type=float, default=1e-6, metavar="X", help="Largest relative difference of weights and losses.")
@_storm("--keep", metavar="FOLDER", help="Where the jobs are; else a folder that is deleted if nothing is wrong.")
@setting_options(TrainingSettings, only=_OF_THE_JOBS, unset=True)
@_storm("--peers", is_flag=True, help="Kill workers of torchrun, torchft and DLRover too, where they are installed.")
def command(recipe: str, what: str, points: str, kills: int, seed: int | None, peers: bool, **given: Any) -> Output:
    """Inject faults into training jobs and compare the results.

    Trains the recipe once undisturbed, then repeatedly under a storm: workers die at every point of the
    protocol and at random instants, hang, lose the network, find the disk full; master, agent and launcher die too.
    Each time every record has to be applied exactly once in each epoch, losses and weights have to equal those of the
    undisturbed run, and no process or file may be left behind. If not, the exit code is 1, and the output has the
    command that replays the storm.
    """
    from trueline.chaos import runner, schedule
    from trueline.chaos import storm as chaos

    if what == "help":
        meanings = {kind: schedule.MEANING[kind] for kind in schedule.KINDS}
        return Output("\n".join(f"{kind:10} {meaning}" for kind, meaning in meanings.items()), meanings)
    kinds, left_out = choose_kinds(what)
    isolate(kinds)
    seed = int.from_bytes(os.urandom(3)) if seed is None else seed
    keep, tolerance = given.pop("keep"), given.pop("tolerance")
    plan = runner.StormPlan(
        recipe=recipe, workers=given.pop("workers"), every=given.pop("every"), kinds=kinds,
        points=tuple(points.split(",")) if points else schedule.POINTS,  # type: ignore[arg-type]  # checked as a setting
        tolerance=0.0 if given["bitwise"] else tolerance, settings={k: v for k, v in given.items() if v is not None},
    )  # fmt: skip
    home = chaos.home_for(keep)
    report(f"seed {seed}; jobs in {home}" + (f"; without {left_out}" if left_out else ""))
    found: list[Storm] = []
    for plan, storm in chaos.storms(plan, kills=kills, seed=seed, home=home, tell=report):  # noqa: B020
        found.append(storm)
        report_storm(plan, storm, sum(s.kills.total() for s in found), kills)
    facts = summarize(found)
    if not facts["violations"]:
        shutil.rmtree(home, ignore_errors=True)
    others = compare_peers() if peers else {}
    text = "\n".join([format_summary(found, facts), *peer_rows(facts, others)])
    compared = {"peers": others} if peers else {}
    return Output(text, {"seed": seed, **facts, **compared}, 1 if facts["violations"] else 0)


report = functools.partial(click.echo, err=True)


def choose_kinds(what: str) -> tuple[tuple[str, ...], str]:
    """The kinds of strikes, and those left out with the reason."""
    from trueline.chaos import schedule

    kinds = tuple(what.split(",")) if what else tuple(schedule.KINDS)
    for kind in kinds:
        if kind not in schedule.KINDS:
            raise UsageError(f"there is no strike '{kind}'", hint=f"one of {', '.join(schedule.KINDS)}")
    if os.geteuid() == 0 and all(shutil.which(tool) for tool in TOOLS):
        return kinds, ""
    rooted = [kind for kind in kinds if kind in schedule.ROOTS]
    left = tuple(kind for kind in kinds if kind not in schedule.ROOTS)
    if not left:
        raise UsageError(f"{', '.join(rooted)} needs root, and {', '.join(TOOLS)}", hint="run it as root on Linux")
    return left, f"{', '.join(rooted)}: that needs root, and {', '.join(TOOLS)}" if rooted else ""


def isolate(kinds: tuple[str, ...]) -> None:
    """Restarts this process with its own network and mounts, if `kinds` strikes them."""
    from trueline.chaos import schedule

    if not set(kinds) & set(schedule.ROOTS) or os.environ.get("TRUELINE_CHAOS_APART"):
        return
    os.environ["TRUELINE_CHAOS_APART"] = "1"
    inside = 'ip link set lo up && exec "$@"'
    command = [sys.executable, "-m", "trueline", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", inside, "sh", *command])


def report_storm(plan: StormPlan, storm: Storm, done: int, kills: int) -> None:
    verdict = storm.verdict
    report(
        f"storm {storm.seed}: {storm.kills.total()} strikes in {storm.seconds:.0f} s ({done}/{kills}), "
        f"difference {verdict.difference:.1e}, {len(verdict.violations)} violations"
    )
    for violation in verdict.violations:
        report(f"  {violation}")
    if verdict.violations:
        report(f"  the job: {storm.folder}\n  again: {replay(plan, storm.seed)}")


def replay(plan: StormPlan, seed: int) -> str:
    """The command that repeats a storm."""
    command = ["trueline", "chaos", plan.recipe, "--seed", str(seed), "--kills", "1", "--every", str(plan.every),
               "--workers", plan.workers, "--what", ",".join(plan.kinds), "--points",
               ",".join(plan.points), "--tolerance", str(plan.tolerance)]  # fmt: skip
    for name, value in plan.settings.items():
        option = "--batch" if name == "global_batch" else f"--{name.replace('_', '-')}"
        command += [option] if value is True else [option, str(value)]
    return shlex.join(command)


def summarize(found: list[Storm]) -> dict[str, Any]:
    from trueline.chaos.schedule import KINDS

    kills: Counter[str] = sum((storm.kills for storm in found), Counter())
    gaps: dict[str, list[float]] = {}
    for storm in found:
        for kind, some in storm.gaps_ms.items():
            gaps.setdefault(kind, []).extend(some)
    deaths = {kind for kind in gaps if kind in SINGLE or (kind not in KINDS and not kind.endswith("(stop)"))}
    single = sorted(gap for kind in deaths for gap in gaps[kind])
    order = [kind for kind in KINDS if kills[kind]] + sorted(point for point in kills if point not in KINDS)
    return {
        "storms": len(found), "kills": kills.total(),
        "struck": {kind: {"times": kills[kind], **quantiles(sorted(gaps.get(kind, [])))} for kind in order},
        **quantiles(single),
        "lost": sum(storm.verdict.lost for storm in found),
        "repeated": sum(storm.verdict.repeated for storm in found),
        "rolled_back": sum(storm.verdict.rolled_back for storm in found),
        "difference": max(storm.verdict.difference for storm in found),
        "loss_difference": max(storm.verdict.loss_difference for storm in found),
        "violations": [{"seed": s.seed, "what": what} for s in found for what in s.verdict.violations],
    }  # fmt: skip


def quantiles(ordered: list[float]) -> dict[str, float | None]:
    last = len(ordered) - 1
    places = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: ordered[min(last, int(share * len(ordered)))] if ordered else None for name, share in places.items()}


def format_summary(found: list[Storm], facts: dict[str, Any]) -> str:
    from trueline.chaos.schedule import KINDS

    lines = [f"{'struck':22}{'times':>7}{'gap p50':>10}{'p99':>9}{'max':>9}   ms to the next step"]
    for kind, one in facts["struck"].items():
        what = kind if kind in KINDS else f"at {kind}"
        lines.append(f"{what:22}{one['times']:7}{_ms(one['p50_ms']):>10}{_ms(one['p99_ms']):>9}{_ms(one['max_ms']):>9}")
    lines += [
        "",
        f"{facts['kills']} strikes in {len(found)} jobs: {facts['lost']} records lost, {facts['repeated']} repeated; "
        f"{facts['rolled_back']} steps rolled back to a checkpoint and repeated",
        f"death of workers -> next step: p50 {_ms(facts['p50_ms'])} ms, p99 {_ms(facts['p99_ms'])} ms, "
        f"max {_ms(facts['max_ms'])} ms",
        f"difference to the undisturbed run: weights {facts['difference']:.1e}, losses {facts['loss_difference']:.1e}",
        f"violations: {len(facts['violations'])}",
    ]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def compare_peers() -> dict[str, Any]:
    """The counting model under kills of workers in other systems, by name; a string if it could not run."""
    driver = Path(__file__).parents[4] / "bench" / "peers" / "drive.py"
    if not driver.exists():
        return dict.fromkeys(PEERS, "bench/peers is missing: run this in a checkout of the repository")
    env = {**os.environ, "PYTHONPATH": str(driver.parents[1])}
    found = {}
    for name in PEERS:
        report(f"{name}: {PEER_KILLS} kills")
        command = [sys.executable, str(driver), name, str(PEER_KILLS), str(PEER_STEPS)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        failure = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        found[name] = failure if done.returncode else json.loads(done.stdout.splitlines()[-1])
    return found


def peer_rows(facts: dict[str, Any], others: dict[str, Any]) -> list[str]:
    if not others:
        return []
    lines = ["", f"{'kills of workers':18}{'kills':>7}{'gap p50':>10}{'max':>9}{'lost':>8}{'repeated':>10}   finished"]
    lines.append(_row("trueline", facts["kills"], facts["p50_ms"], facts["max_ms"], facts["lost"], facts["repeated"],
                      "no" if facts["violations"] else "yes"))  # fmt: skip
    for name, one in others.items():
        if isinstance(one, str):
            lines.append(f"{name:18}{one}")
            continue
        gaps = sorted(one["gap_ms"]) or [None]
        finished = "yes" if one["survived"] else f"no: {one['why']}"
        lines.append(
            _row(name, len(one["gap_ms"]), gaps[len(gaps) // 2], gaps[-1], one["lost"], one["repeated"], finished)
        )
    return lines


def _row(
    name: str, kills: int, p50: float | None, most: float | None, lost: object, repeated: object, finished: str
) -> str:
    counts = f"{'-' if lost is None else lost:>8}{'-' if repeated is None else repeated:>10}"
    return f"{name:18}{kills:7}{_ms(p50):>10}{_ms(most):>9}{counts}   {finished}"
