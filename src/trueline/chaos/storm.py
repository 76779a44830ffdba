"""Storms: a job is struck again and again while it runs, and has to end as if nothing had happened.

    calm run ──▶ expected steps, losses, weights
    storm 1, 2, ... with seed S, S+1, ...:  strikes (`schedule.py`) ──▶ the same job ──▶ compared

Nothing here trusts the job: its processes are found in /proc by a mark in the environment, the applied steps in the
journal and in the model itself (a parameter `seen` that counts its records, where the recipe has one).
"""

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
from trueline.chaos.leftovers import Remains, find_marked
from trueline.chaos.runner import DISK, StormPlan, Victim
from trueline.chaos.verdict import Calm, JobVerdict, judge, observe
from trueline.train import settings as job_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    seed: int
    kills: Counter[str]
    """Kind or point -> number of strikes."""
    gaps_ms: dict[str, list[float]]
    """Kind or point -> milliseconds from each strike to the first step of a regrouped group."""
    verdict: JobVerdict
    seconds: float
    folder: Path


def calm(options: StormPlan, home: Path) -> Calm:
    """The job without strikes. Raises TrainError when it fails by itself."""
    victim = Victim(options, home, [])
    victim.run()
    if victim.troubles:
        raise errors.TrainError(f"the undisturbed job did not end well: {victim.troubles[0]}",
                                hint=f"see {home / 'launcher.log'}")  # fmt: skip
    observed = observe(victim.job_dir)
    shutil.rmtree(home)
    return observed


def storm(options: StormPlan, home: Path, seed: int, usual: Calm) -> Storm:
    """One job under the strikes of `seed`. After a violation its files stay in `home`."""
    began = time.monotonic()
    slots = job_settings.parse_workers(options.workers)[1]
    plan = schedule.plan(
        seed, steps=usual.steps, slots=slots, every=options.every, kinds=options.kinds, points=options.points
    )
    victim = Victim(options, home, plan)
    before = Remains.of(victim.mark)
    victim.run()
    (home / "strikes.json").write_text(json.dumps(victim.struck()))
    verdict = judge(victim.job_dir, usual, victim.struck(), tolerance=options.tolerance)
    left = Remains.of(victim.mark).since(before)
    left += [f"a partial file is left: {path.relative_to(home)}" for path in home.rglob(".partial-*")]
    left += [f"a temporary file is left: {path.relative_to(home)}" for path in (home / "tmp").iterdir()]
    verdict = replace(verdict, violations=(*verdict.violations, *victim.troubles, *left))
    for process in find_marked(victim.mark):
        os.kill(process.pid, signal.SIGKILL)
    done = Storm(seed=seed, kills=victim.kills(), gaps_ms=verdict.gaps_ms, verdict=verdict,
                 seconds=time.monotonic() - began, folder=home)  # fmt: skip
    if not verdict.violations:
        shutil.rmtree(home)
    return done


def storms(
    options: StormPlan, *, kills: int, seed: int, home: Path, tell: Callable[[str], None]
) -> Iterator[tuple[StormPlan, Storm]]:
    """Storms with the seeds `seed`, `seed` + 1, ... until there were `kills` strikes in all. Jobs are in `home`."""
    with _disk(home, own="disk" in options.kinds) as ground:
        usual = calm(options, ground / "calm")
        about_three_a_second = max(2, round(0.35 / max(usual.step_s, 1e-6)))
        options, done = replace(options, every=options.every or about_three_a_second, step_s=usual.step_s), 0
        tell(f"undisturbed: {usual.steps} steps, {usual.step_s * 1e3:.1f} ms each; a strike each {options.every} steps")
        while done < kills:
            result = storm(options, ground / f"storm-{seed}", seed, usual)
            if result.folder.exists() and ground != home:
                shutil.copytree(result.folder, home / result.folder.name, symlinks=True)
                result = replace(result, folder=home / result.folder.name)
            done += result.kills.total()
            yield options, result
            seed += 1
            if not result.kills and not result.verdict.violations:
                why = f"a job of {usual.steps} steps is over before anything strikes"
                raise errors.UsageError(why, hint="more --epochs, or less --every")


@contextlib.contextmanager
def _disk(home: Path, *, own: bool) -> Iterator[Path]:
    """A folder for jobs; on a small disk of its own where strikes fill the disk."""
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
    """A new folder for storms, in `keep` (made where it does not exist) or among the temporary ones."""
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="storm-", dir=keep))
