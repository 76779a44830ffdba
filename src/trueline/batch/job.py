"""A batch job: its options, its computation in this process, and its output of values of each record by parts.

`evaluate` and `predict` share it. A part is a file for a range of records, whole or absent, and written once, even if
processes die (`data/tools/writer.py`). Parts are computed in this process, or by a pool's workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec
import numpy as np

from trueline import events, files
from trueline.batch import pool
from trueline.batch.pool import Compute, Work
from trueline.bundle.read import open_bundle
from trueline.checkpoint import checkpoint
from trueline.data.open import open_records
from trueline.data.tools.writer import RangeWriter, WritePlan
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe, locate_recipe
from trueline.storage.location import is_remote, local_path

if TYPE_CHECKING:
    import pyarrow as pa

    from trueline.bundle.signature import Array

Result = TypeVar("Result")
Answer = Callable[[int, int], "dict[str, Array]"]
"""From the records [start, stop) to arrays with a row for each record."""
PART_RECORDS = 16384
"""Records in a part: a file of some MB, and what is computed again when its process dies."""


class BatchOptions(TypedDict, total=False):
    """Options of `trueline.evaluate` and `trueline.predict`."""

    mode: Mode
    """The records: those of the recipe's `dataset(mode)`."""
    batch: int
    """Records in a call of the model (256)."""
    workers: int
    """Processes of one thread each that share the batches (1: this process alone)."""
    device: str | None
    """Where models compute: auto, cpu, cuda, cuda:N; None: the recipe's own, else auto."""
    format: str
    """Of the parts in a folder: `parquet` or `jsonl`."""
    part_records: int
    """Records in a part (16384)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    recipe: Recipe
    given: object
    """What the caller passed as the recipe."""
    source: str
    """The checkpoint or bundle; empty for the untrained model."""
    mode: Mode
    batch: int = 256
    workers: int = 1
    device: str = "auto"
    format: str = "parquet"
    part_records: int = PART_RECORDS

    @classmethod
    def of(cls, given: str | Path | Recipe, source: str, options: BatchOptions, *, mode: Mode) -> BatchJob:
        """The job of a call; `mode` is what its `options` may override."""
        recipe = given if isinstance(given, Recipe) else load_recipe(given)
        chosen: BatchOptions = {"mode": mode, **options}
        chosen["device"] = options.get("device") or recipe.defaults.device
        return cls(recipe=recipe, given=given, source=source, **chosen)  # type: ignore[arg-type]  # device is not None

    def num_records(self) -> int:
        return count_records(self.recipe, self.mode)

    def work(self, entry: str, *, num_records: int, chunk: int) -> Work:
        """The Work of a pool with `chunk` records a chunk. Raises UsageError if workers cannot load the recipe."""
        return Work(
            entry=entry, recipe=locate_recipe(self.recipe, self.given, otherwise=", or leave workers at 1"),
            recipe_digest=self.recipe.digest, source=self.source, mode=self.mode, num_records=num_records, batch=chunk,
            device=self.device,
        )  # fmt: skip


def count_records(recipe: Recipe, mode: Mode) -> int:
    """The number of records for `mode`. Columns are not fitted for it."""
    return (recipe if recipe.columns is None else replace(recipe, columns=None, feed=_no_feed)).source(mode).num_records


def _no_feed(*_: Any) -> Any:
    raise NotImplementedError("records were only to be counted")


def compute_chunks(count: int, compute: Callable[[int, int], Result], size: int, event: str) -> list[Result]:
    """Computes the records [0, count) in chunks of `size`, in this process; emits `event` after each."""
    results = []
    for start in range(0, count, size):
        stop = min(start + size, count)
        results.append(compute(start, stop))
        events.emit(event, done=stop, total=count)
    return results


def is_folder(out: str | Path) -> bool:
    """Whether `out` is a folder for parts and not a file."""
    return is_remote(out) or str(out).endswith("/") or Path(out).is_dir() or not Path(out).suffix


def digest_inputs(job: BatchJob) -> str:
    """A digest of everything that the answers depend on. `batch` is included: it seeds random numbers of the model."""
    if not job.source:
        source = "untrained"
    elif checkpoint.exists(job.source):
        source = checkpoint.read_manifest(job.source)["digest"]
    else:
        source = open_bundle(Path(job.source)).digest
    return files.sha256_bytes("|".join((job.recipe.digest, source, job.mode, str(job.batch))).encode())


def plan_parts(job: BatchJob, of: str) -> WritePlan:
    """The parts of the job's output; `of` is a digest of their inputs."""
    return WritePlan(num_records=job.num_records(), range_records=job.part_records, format=job.format, of=of)


def write(
    out: str | Path, job: BatchJob, plan: WritePlan, *, open_answer: Callable[[], tuple[int, Answer]], entry: str,
    event: str,
) -> int:  # fmt: skip
    """Writes the parts of `plan` that `out` lacks; returns how many.

    Without workers `open_answer` returns what computes them here; a pool's workers call `entry`. `event` is emitted
    with `done` and `total` records. Raises what these raise, DataError, StorageError.
    """
    folder = str(resolve_folder(out))
    writer = RangeWriter(folder, plan)
    missing = writer.missing()
    finished = plan.num_records - sum(stop - start for start, stop in missing)

    def report(done: int) -> None:
        events.emit(event, done=finished + done, total=plan.num_records)

    if missing and job.workers > 1:
        starts = {start for start, _ in missing}
        done = tuple(index for index, (start, _) in enumerate(plan.ranges()) if start not in starts)
        work = job.work(entry, num_records=plan.num_records, chunk=plan.range_records)
        work = msgspec.structs.replace(work, out=folder, rows=job.batch, format=plan.format, of=plan.of, done=done)
        pool.run(work, workers=job.workers, report=report)
    elif missing:
        _, answer = open_answer()
        computed = 0
        for start, stop in missing:
            _write_part(writer, answer, start, stop, job.batch)
            computed += stop - start
            report(computed)
    writer.commit()
    return len(missing)


def resolve_folder(out: str | Path) -> Path | str:
    """The folder's absolute path or URI."""
    return str(out) if is_remote(out) else local_path(out).absolute()


def open_part_worker(work: Work, count: int, answer: Answer) -> tuple[int, Compute]:
    """What a pool's worker does with its chunks: it writes each as a part into the folder `work.out`."""
    plan = WritePlan(num_records=work.num_records, range_records=work.batch, format=work.format, of=work.of)
    writer = RangeWriter(work.out, plan)

    def compute(start: int, stop: int) -> dict[str, Any]:
        if start % work.batch or (stop % work.batch and stop != work.num_records):
            answer(start, stop)  # a single record of a chunk that failed: does it fail alone?
        else:
            _write_part(writer, answer, start, stop, work.rows)
        return {}

    return count, compute


def _write_part(writer: RangeWriter, answer: Answer, start: int, stop: int, rows: int) -> None:
    answers = [answer(at, min(at + rows, stop)) for at in range(start, stop, rows)]
    columns = {name: np.concatenate([one[name] for one in answers]) for name in answers[0]}
    writer.write(start, stop, make_table(columns, first=start))


def sum_columns(out: str | Path) -> dict[str, float]:
    """The sum of each column of numbers over all parts."""
    records = open_records(str(resolve_folder(out)))
    totals: dict[str, float] = defaultdict(float)
    for number, unit in enumerate(records.units):
        for name, column in zip(records.schema.names, records.load(number, 0, unit.count).columns, strict=True):
            totals[name] += float(np.asarray(column, np.float64).sum())
    return dict(totals)


def make_table(columns: dict[str, Array], first: int = 0) -> pa.Table:
    """A row for each record, numbered from `first`."""
    import pyarrow as pa

    count = len(next(iter(columns.values()), ()))
    arrays = {"record": pa.array(np.arange(first, first + count))}
    for name, values in columns.items():
        arrays[name] = pa.array(list(values.reshape(count, -1))) if values.ndim > 1 else pa.array(values)
    return pa.table(arrays)
