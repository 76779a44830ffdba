"""`trueline.predict`: the outputs for many records, in one file that is whole or absent, or in parts by range.

A file is made of all answers in memory. Parts are written as they come, each once, by whoever computes them
(`data/tools/writer.py`): who starts again after a death writes what is missing.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline import events, files
from trueline.batch import output_parts as parts
from trueline.batch import pool
from trueline.batch.output_parts import PART_RECORDS, Answer
from trueline.batch.pool import Compute, Work
from trueline.bundle.read import open_bundle
from trueline.capture.model.eager import EagerSession
from trueline.checkpoint import checkpoint
from trueline.checkpoint.checkpoint import load_model
from trueline.data.loading.seeding import seeded
from trueline.data.tools.writer import WritePlan
from trueline.errors import UsageError
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from trueline.storage.location import Location, parse_location
from trueline.train import devices

if TYPE_CHECKING:
    import numpy.typing as npt

    from trueline.bundle.signature import Array


FILES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    records: int
    path: Path | str
    parts: int = 0
    """How many parts this call has written; those that were there are left as they are."""


def predict(
    recipe: str | Path | Recipe,
    source: Location,
    out: str | Path,
    *,
    mode: Mode = "prediction",
    batch: int = 256,
    workers: int = 1,
    format: str = "parquet",
    part_records: int = PART_RECORDS,
    device: str | None = None,
) -> Prediction:
    """Writes the outputs for every record of `mode`: by the eager model of a checkpoint, or by a bundle's program.

    `out` is a file that ends in .parquet (columns `record` and one list for each output) or .jsonl (one object for each
    record), or a folder, local or a URI such as s3://bucket/answers: then parts of `part_records` records each are
    written there in `format` (`parquet` or `jsonl`) as they are computed, and a call that was cut short goes on where
    it ended. `workers` processes of one thread each share the batches; what is written is the same for any number.
    Models compute on `device` (auto, cpu, cuda, cuda:N; None: the recipe's own, else auto), programs of bundles on the
    CPU.
    Raises UsageError, CheckpointError, BundleError, DataError, StorageError; a file is then as it was, and of a folder
    the parts that are there are whole.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    where, on = str(parse_location(source)), device or found.defaults.device
    if parts.is_folder(out):
        plan = WritePlan(
            num_records=found.source(mode).num_records,
            range_records=part_records,
            format=format,
            of=parts.made_of(found, where, mode, batch),
        )

        def work() -> Work:
            said = pool.work(PARTS, found, recipe, where, mode, records=plan.num_records, batch=part_records)
            return msgspec.structs.replace(said, device=on)

        written = parts.write(
            out, plan, batch, answering=lambda: _answering(found, where, mode, on), work=work, workers=workers,
            event=ADVANCED,
        )  # fmt: skip
        return Prediction(records=plan.num_records, path=parts.place(out), parts=written)
    out = Path(out)
    if out.suffix not in FILES:
        raise UsageError(
            f"{out} has no ending that says how to write it",
            hint="use .parquet or .jsonl, or a folder (end it with /) for parts",
        )
    if workers == 1:
        count, answer = _answering(found, where, mode, on)
        answers = []
        for start in range(0, count, batch):
            answers.append(answer(start, min(start + batch, count)))
            _advanced(min(start + batch, count), count)
    else:
        count = found.source(mode).num_records
        shared = pool.work("trueline.batch.predict:opened", found, recipe, where, mode, records=count, batch=batch)
        answers = _shared_out(msgspec.structs.replace(shared, device=on), workers, out)
    columns = {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]} if answers else {}
    files.write_atomic(out, _parquet(columns) if out.suffix == ".parquet" else _json_lines(columns))
    return Prediction(records=count, path=out)


PARTS = "trueline.batch.predict:opened_parts"
ADVANCED = "prediction.advanced"


def opened_parts(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with parts: it writes them itself."""
    return parts.opened(work, *_answering(load_recipe(work.recipe), work.source, work.mode, work.device))


def _advanced(done: int, total: int) -> None:
    events.emit(ADVANCED, done=done, total=total)


def _shared_out(work: Work, workers: int, out: Path) -> list[dict[str, Array]]:
    """The answers of many processes, which they leave in files beside `out`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=files.PARTIAL, dir=out.parent)
    except OSError as error:
        raise files.storage_error(error, out) from error
    try:
        work = msgspec.structs.replace(work, out=str(Path(scratch).resolve()))
        replies = pool.run(work, workers=workers, advanced=lambda done: _advanced(done, work.num_records))
        return [_restored(Path(scratch, reply["file"]), reply["names"]) for reply in replies]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _restored(file: Path, names: list[str]) -> dict[str, Array]:
    with file.open("rb") as stream:
        return {name: np.load(stream, allow_pickle=False) for name in names}


def opened(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with its chunks: it leaves the outputs in a file of `work.out`, and names them."""
    count, answer = _answering(load_recipe(work.recipe), work.source, work.mode, work.device)

    def compute(start: int, stop: int) -> dict[str, Any]:
        arrays, stream = answer(start, stop), io.BytesIO()
        for array in arrays.values():
            np.save(stream, array, allow_pickle=False)
        file = Path(work.out, f"{start}-{stop}.npy")
        files.write_atomic(file, stream.getvalue())
        return {"file": file.name, "names": list(arrays)}

    return count, compute


def _answering(recipe: Recipe, where: str, mode: Mode, device: str) -> tuple[int, Answer]:
    trained = checkpoint.exists(where)
    model = load_model(recipe, where if trained else None)
    if trained:
        model = devices.wrap_for_host(model, devices.choose_own(device))
    program = None if trained else open_program(open_bundle(Path(where)))
    records = recipe.source(mode)

    def answer(start: int, stop: int) -> dict[str, Array]:
        with seeded(start):
            eager = EagerSession(model, records.read(np.arange(start, stop, dtype=np.int64)).inputs)
            return (program or eager).run(eager.example)

    return records.num_records, answer


def _parquet(columns: dict[str, Array]) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(parts.table(columns), sink)
    return sink.getvalue()


def _json_lines(columns: dict[str, npt.NDArray[Any]]) -> bytes:
    count = len(next(iter(columns.values()), ()))
    rows = ({"record": i, **{name: values[i].tolist() for name, values in columns.items()}} for i in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
