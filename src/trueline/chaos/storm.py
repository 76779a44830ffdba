"""Storms: a job is struck again and again while it runs, and has to end as if nothing had happened.

    calm run ──▶ what the job ought to do: steps, losses, weights
    storm 1, 2, ... with seed S, S+1, ...:  strikes (`strikes.py`) ──▶ the same job ──▶ compared

Nothing here trusts the job: who runs is read from /proc by a mark in the environment, what was applied from the
journal and from the model itself (a parameter `seen` that counts its records, where the recipe has one).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import errors
from trueline.chaos import schedule
from trueline.chaos.leftovers import Remains, marked
from trueline.chaos.runner import DISK, Victim, Weather
from trueline.chaos.verdict import Calm, Verdict, judge, observe
from trueline.train import settings as job_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    seed: int
    kills: Counter[str]
    """Kind or point -> how often it was done."""
    gaps_ms: dict[str, list[float]]
    """Kind or point -> milliseconds from each strike to the first step of a regrouped group."""
    verdict: Verdict
    seconds: float
    folder: Path


def calm(weather: Weather, home: Path) -> Calm:
    """The job without strikes. Raises TrainError when it does not even end well by itself."""
    victim = Victim(weather, home, [])
    victim.run()
    if victim.troubles:
        raise errors.TrainError(f"the undisturbed job did not end well: {victim.troubles[0]}",
                                hint=f"see {home / 'launcher.log'}")  # fmt: skip
    found = observe(victim.job_dir)
    shutil.rmtree(home)
    return found


def storm(weather: Weather, home: Path, seed: int, usual: Calm) -> Storm:
    """One job under the strikes of `seed`. What is found stays in `home` if it is a violation."""
    began = time.monotonic()
    slots = job_settings.parse_workers(weather.workers)[1]
    plan = schedule.plan(
        seed, steps=usual.steps, slots=slots, every=weather.every, kinds=weather.kinds, points=weather.points
    )
    victim = Victim(weather, home, plan)
    before = Remains.of(victim.mark)
    victim.run()
    (home / "strikes.json").write_text(json.dumps(victim.struck()))
    verdict = judge(victim.job_dir, usual, victim.struck(), tolerance=weather.tolerance)
    left = Remains.of(victim.mark).since(before) + _torn(home)
    verdict = verdict.with_violations([*victim.troubles, *left])
    for found in marked(victim.mark):
        os.kill(found.pid, signal.SIGKILL)
    done = Storm(seed=seed, kills=victim.kills(), gaps_ms=verdict.gaps_ms, verdict=verdict,
                 seconds=time.monotonic() - began, folder=home)  # fmt: skip
    if not verdict.violations:
        shutil.rmtree(home)
    return done


def _torn(home: Path) -> list[str]:
    """Files under construction, and what the processes left in their folder for temporary files."""
    torn = [f"a partial file is left: {path.relative_to(home)}" for path in home.rglob(".partial-*")]
    return torn + [f"a temporary file is left: {path.relative_to(home)}" for path in (home / "tmp").iterdir()]


def pace(weather: Weather, usual: Calm) -> Weather:
    """With the steps between strikes that make about three a second."""
    return weather if weather.every else replace(weather, every=max(2, round(0.35 / max(usual.step_s, 1e-6))))


def storms(
    weather: Weather, *, kills: int, seed: int, home: Path, tell: Callable[[str], None]
) -> Iterator[tuple[Weather, Storm]]:
    """Storms with the seeds `seed`, `seed` + 1, ... until `kills` strikes are done in all. Jobs are in `home`."""
    with _disk(home, own="disk" in weather.kinds) as ground:
        usual = calm(weather, ground / "calm")
        weather, done = pace(weather, usual), 0
        tell(f"undisturbed: {usual.steps} steps, {usual.step_s * 1e3:.1f} ms each; a strike each {weather.every} steps")
        while done < kills:
            found = storm(weather, ground / f"storm-{seed}", seed, usual)
            if found.folder.exists() and ground != home:
                shutil.copytree(found.folder, home / found.folder.name, symlinks=True)
                found = replace(found, folder=home / found.folder.name)
            done += found.kills.total()
            yield weather, found
            seed += 1
            if not found.kills and not found.verdict.violations:
                why = f"a job of {usual.steps} steps is over before anything strikes"
                raise errors.UsageError(why, hint="more --epochs, or less --every")


@contextlib.contextmanager
def _disk(home: Path, *, own: bool) -> Iterator[Path]:
    """A folder for jobs; on a small disk of its own where it is to be filled."""
    if not own:
        yield home
        return
    ground = home / DISK
    ground.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "storm", str(ground)], check=True)
    try:
        yield ground
    finally:
        subprocess.run(["umount", "-l", str(ground)], check=False)
        ground.rmdir()


def home_for(keep: str | None) -> Path:
    """A new folder for storms, in `keep` (made where it is not there) or among the temporary ones."""
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="storm-", dir=keep))
