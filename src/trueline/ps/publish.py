"""`publish`: checkpoints of a job as versions of a model in a store: the first as a bundle, each later one as a delta.

    checkpoint ──capture (proven as always)──▶ bundle N ──compared with bundle N-1──▶ STORE/NAME/N.delta

A server that follows the store (`trueline serve --model-store STORE --load NAME --watch`) applies a delta to the bundle
before it, replays the golden examples of the delta, and turns to it. The delta has the changed rows of tables, all
other weights that changed, and the new proofs; it is made of two whole bundles, so rows and dense parameters are of one
checkpoint. JOB/published keeps the last bundle, from which the next delta is made.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from trueline import events, files
from trueline.bundle import delta as deltas
from trueline.bundle.read import Bundle, open_folder
from trueline.capture.api import capture
from trueline.capture.deltas import make_delta
from trueline.capture.proof.attempt import TableRows
from trueline.checkpoint import checkpoint
from trueline.clock import Clock, monotonic_s
from trueline.errors import TruelineError, UsageError
from trueline.recipe.load import load_recipe
from trueline.storage.location import join_location, parse_location
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir
from trueline.train.launch import jobs

FORMAT = "onnx"
SAVE_S = 120.0
"""How long a requested checkpoint is waited for; without one, the newest is published."""
POLL_S = 0.25
NICENESS = 5
"""Of the process beside a job: workers and servers come first."""
FOLDER = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that is now in the store. `bytes`: of the delta, or of the bundle that is the first version."""

    version: int
    path: Path
    step: int
    digest: str
    bytes: int
    seconds: float
    tables: dict[str, Any]
    """By tensor of the program: rows, and those that the delta has."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


class Publisher:
    """Publishes checkpoints of `job` as versions of `name` in `store`."""

    def __init__(
        self, job: Path, store: Path, *, name: str = "", table_rows: TableRows = "float32", minutes: float | None = None
    ) -> None:
        self._settings = job_settings.load(job)
        if re.match(r"[a-z][a-z0-9+.-]*:/", str(store)):
            raise UsageError(f"the model store is {store}, expected a folder", hint="publish to a folder, and copy it")
        if not self._settings.recipe:
            raise UsageError(f"the job in {job} has a script of its own and no recipe, of which a bundle is made")
        self._recipe = load_recipe(self._settings.recipe)
        self.name = name or self._recipe.name
        self._own, self._store = job / FOLDER / self.name, store / self.name
        self._checkpoints = parse_location(self._settings.checkpoints or JobDir(job).checkpoints)
        self._rows, self._minutes = table_rows, minutes
        self._recover()

    def _versions(self) -> list[int]:
        return sorted(int(one.stem) for one in self._own.glob("*.bundle") if one.stem.isdecimal())

    @property
    def last(self) -> Bundle | None:
        """The last version."""
        versions = self._versions()
        return open_folder(self._own / f"{versions[-1]}.bundle") if versions else None

    def _recover(self) -> None:
        """Takes over a version that is in the store and was not noted here: the process ended between the two."""
        last = self.last
        if last is None:
            return
        version = self._versions()[-1] + 1
        delta = self._store / f"{version}{deltas.SUFFIX}"
        if delta.is_dir() and deltas.read_delta(delta).parent == last.digest:
            deltas.apply_delta(last, delta, self._own / f"{version}.bundle")

    def publish(self) -> Published | None:
        """Publishes the newest checkpoint; None: it is published already, or there is none.

        Raises NotProven and CaptureError for a model that cannot be proven, StorageError.
        """
        steps, last, began = checkpoint.steps(self._checkpoints), self.last, time.perf_counter()
        if not steps or (last is not None and last.manifest.lineage.step == steps[-1]):
            return None
        version = self._versions()[-1] + 1 if last is not None else 1
        place = join_location(self._checkpoints, checkpoint.folder_name(steps[-1]))
        own = self._own / f"{version}.bundle"
        with _working_folder(self._own) as work:
            capture(
                self._recipe, place, work / "made.bundle", formats=[FORMAT], table_rows=self._rows,
                minutes=self._minutes,
            )  # fmt: skip
            made = open_folder(work / "made.bundle")
            if last is None:
                out, facts = self._store / own.name, dict[str, Any]()
                _copy(made.path, out)
            else:
                out = self._store / f"{version}{deltas.SUFFIX}"
                facts = make_delta(last, made, out).facts
            made.path.rename(own)
        for old in self._versions()[:-1]:
            shutil.rmtree(self._own / f"{old}.bundle", ignore_errors=True)
        size = sum(one.stat().st_size for one in out.rglob("*") if one.is_file())
        found = Published(
            version=version, path=out, step=steps[-1], digest=made.digest, bytes=size,
            seconds=round(time.perf_counter() - began, 3), tables=facts,
        )  # fmt: skip
        events.emit("model.published", name=self.name, version=version, step=found.step, path=str(out), bytes=size,
                    seconds=found.seconds)  # fmt: skip
        return found


@contextlib.contextmanager
def _working_folder(own: Path) -> Any:
    work = own / f"{files.PARTIAL}work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy(source: Path, out: Path) -> None:
    with files.atomic_dir(out) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)


def publish(
    job: str | Path,
    store: str | Path,
    *,
    name: str = "",
    table_rows: TableRows = "float32",
    minutes: float | None = None,
) -> Published | None:
    """Publishes the newest checkpoint of `job` in the model store `store`, as the next version of `name` (of the recipe
    when left out): a bundle the first time, then deltas. A running job writes a checkpoint for it first. None: the
    newest one is published already.

    `table_rows` and `minutes` are those of `capture`. Raises UsageError, NotProven, CaptureError, CheckpointError,
    StorageError; nothing is then published.
    """
    folder = jobs.find_job(job)
    publisher = Publisher(folder, Path(store), name=name, table_rows=table_rows, minutes=minutes)
    save_now(folder)
    return publisher.publish()


def save_now(job: Path, *, seconds: float = SAVE_S, clock: Clock = monotonic_s) -> None:
    """Has a running job write a checkpoint, and waits for it."""
    if jobs.read_job(job).state != "running":
        return
    try:
        step, until = jobs.save(job), clock() + seconds
    except TruelineError as error:  # it is ending, or its master starts again
        events.emit("publish.no_checkpoint", why=error.message)
        return
    while jobs.read_job(job).checkpoint < step and JobDir(job).is_held() and clock() < until:
        time.sleep(POLL_S)  # polls


def wait_for_end(job: JobDir, seconds: float) -> bool:
    """Whether the job has ended after `seconds`, or before."""
    until = monotonic_s() + seconds
    while job.is_held() and monotonic_s() < until:
        time.sleep(min(POLL_S, seconds))  # polls
    return not job.is_held()


class PublishesVersions(Protocol):
    def publish(self) -> Published | None: ...


def repeat(
    publisher: PublishesVersions,
    every_s: float,
    *,
    save: Callable[[], None],
    ended: Callable[[float], bool],
    clock: Clock = monotonic_s,
) -> int:
    """Publishes every `every_s` seconds until the job has ended, and then once more; returns the number of versions.

    `ended` waits for the end of the job, that many seconds at most. What cannot be published is an event, and the next
    checkpoint is tried.
    """
    count, due, over = 0, clock() + every_s, False
    while not over:
        over = ended(max(0.0, due - clock()))
        due = max(due + every_s, clock())
        try:
            if not over:
                save()
            count += publisher.publish() is not None
        except TruelineError as error:
            events.emit("publish.failed", why=f"{error.message}; {error.hint}".rstrip("; "))
    return count


def main() -> int:
    """`python -m trueline.ps.publish JOB STORE MINUTES`, which a launcher starts: it ends when its standard input does,
    after a last version. Events go to standard output, one JSON list a line."""
    job, store, minutes = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    os.nice(NICENESS)
    over = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        over.set()

    def tell(name: str, fields: dict[str, events.Field]) -> None:
        if name == "model.published" or name.startswith("publish."):
            sys.stdout.write(json.dumps([name, fields]) + "\n")
            sys.stdout.flush()

    threading.Thread(target=watch, daemon=True).start()
    with events.listening(tell):
        try:
            publisher = Publisher(job, store)
        except TruelineError as error:
            events.emit("publish.failed", why=error.message)
            return 1
        repeat(publisher, 60.0 * minutes, save=lambda: save_now(job), ended=over.wait)
    return 0


if __name__ == "__main__":
    sys.exit(main())
