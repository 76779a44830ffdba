"""Values of each record, written by range into a folder or store: each part once, even if processes die.

Predictions and evaluations record by record use it (`data/tools/writer.py` defines when a part is whole or absent).
Parts are computed in this process, or by a pool's workers, which write their parts themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline import events, files
from trueline.batch import pool
from trueline.batch.job import BatchJob
from trueline.batch.pool import Compute, Work
from trueline.bundle.read import open_bundle
from trueline.checkpoint import checkpoint
from trueline.data.open import open_records
from trueline.data.tools.writer import RangeWriter, WritePlan
from trueline.storage.location import is_remote, local_path

if TYPE_CHECKING:
    import pyarrow as pa

    from trueline.bundle.signature import Array

Answer = Callable[[int, int], "dict[str, Array]"]
"""From the records [start, stop) to arrays with a row for each record."""


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
    """The plan of a folder whose parts are made from what the digest `of` stands for."""
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
    """The absolute path or the URI of the folder."""
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
