"""What is computed for each record, written by range into a folder or store: each part once, whoever died on the way.

Predictions and evaluations record by record are written so (`data/tools/writer.py` says how a part is whole or
absent). Parts are computed in this process or by a pool's workers, each of which writes its own.
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
from trueline.batch.pool import Compute, Work
from trueline.bundle.read import open_bundle
from trueline.checkpoint import checkpoint
from trueline.data.open import open_records
from trueline.data.tools.writer import RangeWriter, WritePlan
from trueline.recipe.contract import Mode, Recipe
from trueline.storage.location import is_remote, local_path

if TYPE_CHECKING:
    import pyarrow as pa

    from trueline.bundle.signature import Array


PART_RECORDS = 16384
"""Records of a part: a file of some MB, and what is computed again when its process dies."""
Answer = Callable[[int, int], "dict[str, Array]"]
"""From the first record and the one after the last to arrays with a row for each of them."""


def is_folder(out: str | Path) -> bool:
    """Whether parts are wanted, and not one file."""
    return is_remote(out) or str(out).endswith("/") or Path(out).is_dir() or not Path(out).suffix


def made_of(recipe: Recipe, where: str, mode: Mode, batch: int) -> str:
    """What the answers follow from, as a digest: `batch` too, for numbers that a model draws are seeded by it."""
    if not where:
        source = "untrained"
    elif checkpoint.exists(where):
        source = checkpoint.read_manifest(where)["digest"]
    else:
        source = open_bundle(Path(where)).digest
    return files.sha256_bytes("|".join((recipe.digest, source, mode, str(batch))).encode())


def write(
    out: str | Path,
    plan: WritePlan,
    rows: int,
    *,
    answering: Callable[[], tuple[int, Answer]],
    work: Callable[[], Work],
    workers: int,
    event: str,
) -> int:
    """Writes the parts of `plan` that `out` lacks, asking for at most `rows` records at a time; returns how many.

    `answering` opens what computes them here, `work` says it to the workers of a pool. `event` is emitted with `done`
    and `total`. Raises what they raise, DataError, StorageError.
    """
    folder = str(place(out))
    writer = RangeWriter(folder, plan)
    missing = writer.missing()
    there = plan.num_records - sum(stop - start for start, stop in missing)

    def advanced(done: int) -> None:
        events.emit(event, done=there + done, total=plan.num_records)

    if missing and workers > 1:
        left = {start for start, _ in missing}
        done = tuple(index for index, (start, _) in enumerate(plan.ranges()) if start not in left)
        said = msgspec.structs.replace(work(), out=folder, rows=rows, format=plan.format, of=plan.of, done=done)
        pool.run(said, workers=workers, advanced=advanced)
    elif missing:
        _, answer = answering()
        computed = 0
        for start, stop in missing:
            _write_part(writer, answer, start, stop, rows)
            computed += stop - start
            advanced(computed)
    writer.commit()
    return len(missing)


def place(out: str | Path) -> Path | str:
    """Where the parts are."""
    return str(out) if is_remote(out) else local_path(out).absolute()


def opened(work: Work, count: int, answer: Answer) -> tuple[int, Compute]:
    """What a pool's worker does with its chunks: each is a part that it writes to the folder `work.out`."""
    plan = WritePlan(num_records=work.num_records, range_records=work.batch, format=work.format, of=work.of)
    writer = RangeWriter(work.out, plan)

    def compute(start: int, stop: int) -> dict[str, Any]:
        if start % work.batch or (stop % work.batch and stop != work.num_records):
            answer(start, stop)  # one record of a chunk that failed, to see whether it is to blame
        else:
            _write_part(writer, answer, start, stop, work.rows)
        return {}

    return count, compute


def _write_part(writer: RangeWriter, answer: Answer, start: int, stop: int, rows: int) -> None:
    answers = [answer(at, min(at + rows, stop)) for at in range(start, stop, rows)]
    columns = {name: np.concatenate([one[name] for one in answers]) for name in answers[0]}
    writer.write(start, stop, table(columns, first=start))


def sums(out: str | Path) -> dict[str, float]:
    """The sum of each column of numbers over all parts."""
    records = open_records(str(place(out)))
    totals: dict[str, float] = defaultdict(float)
    for number, unit in enumerate(records.units):
        for name, column in zip(records.schema.names, records.load(number, 0, unit.count).columns, strict=True):
            totals[name] += float(np.asarray(column, np.float64).sum())
    return dict(totals)


def table(columns: dict[str, Array], first: int = 0) -> pa.Table:
    """One row for each record, numbered from `first`."""
    import pyarrow as pa

    count = len(next(iter(columns.values()), ()))
    made = {"record": pa.array(np.arange(first, first + count))}
    for name, values in columns.items():
        made[name] = pa.array(list(values.reshape(count, -1))) if values.ndim > 1 else pa.array(values)
    return pa.table(made)
