"""What a hybrid job keeps of its servers: what they were made for, and the files of tables beside its checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from trueline.ps.messages import ModelSpec, Routing
from trueline.train.settings import JobSettings


class KeptTables(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers were made for, in JOB/ps/tables.json. `held`: they held it once. `wanted`: how many there shall
    be; `asked`: how many the job's settings said then."""

    spec: ModelSpec
    routing: Routing
    held: bool = False
    wanted: int = 0
    asked: int = 0


def choose_cuts(job: JobSettings, own: Path) -> Path:
    """Where servers write their tables, and the worker that makes the checkpoint reads them: beside the checkpoints, in
    the folder that all hosts see, once other hosts may join; else in `own`."""
    shared = Path(job.checkpoints or ".") / "tables"
    travels = bool(job.checkpoints) and "://" not in job.checkpoints and (job.listen or job.hosts)
    return shared.absolute() if travels else own / "cuts"


def choose_old(folders: Sequence[Path], step: int, keep: int) -> list[Path]:
    """Which of the folders `step-N` go once that of `step` is written: all but the newest `keep` of those up to it.
    Later steps are of a time that is lost. Clocks jump, so that the names count, and not when they were written."""
    numbers = {path: int(path.name.removeprefix("step-")) for path in folders}
    return sorted(folders, key=lambda path: (numbers[path] > step, -numbers[path]))[keep:]


def list_parts(job: JobSettings, own: Path, step: int) -> tuple[str, ...]:
    """The files of the tables of `step`, also of a launch that had other hosts, or none."""
    places = [choose_cuts(job, own), own / "cuts"]
    if job.checkpoints and "://" not in job.checkpoints:
        places.append(Path(job.checkpoints).absolute() / "tables")
    found = (sorted(place.glob(f"step-{step}/*.part")) for place in places)
    return tuple(str(path) for path in next((one for one in found if one), []))
