"""`trueline.predict`: the outputs for many records, in one file that is whole or absent, or in parts by range.

A file is made of all answers in memory. Parts are written as they are computed, each once (`data/tools/writer.py`), and
a call that starts again writes the missing ones.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import numpy as np

from trueline import events, files
from trueline.batch import job as parts
from trueline.batch import pool
from trueline.batch.job import Answer, BatchJob, BatchOptions, compute_chunks
from trueline.batch.pool import Compute, Work
from trueline.bundle.read import open_bundle
from trueline.capture.model.eager import EagerSession
from trueline.checkpoint import checkpoint
from trueline.checkpoint.checkpoint import load_model
from trueline.columns import answers
from trueline.data.loading.seeding import seed_generators
from trueline.errors import UsageError
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from trueline.storage.location import Location, parse_location
from trueline.train import devices

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILES = (".parquet", ".jsonl")
ADVANCED = "prediction.advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    records: int
    path: Path | str
    parts: int = 0
    """Parts that this call wrote; parts that existed were left as they are."""


def predict(
    recipe: str | Path | Recipe, source: Location, out: str | Path, **options: Unpack[BatchOptions]
) -> Prediction:
    """Writes the outputs for all records of `mode` ("prediction"), by a checkpoint's eager model or a bundle's program.

    `out` is a file that ends in .parquet (columns `record` and one list for each output) or .jsonl (one object for each
    record). Or it is a folder, local or a URI such as s3://bucket/answers, for parts of `part_records` records in
    `format`; a call that was interrupted continues where it ended. The output is the same for any number of `workers`.
    Programs of bundles compute on the CPU.

    Raises UsageError, CheckpointError, BundleError, DataError, StorageError; a file is then unchanged, and the parts in
    a folder are whole.
    """
    job = BatchJob.of(recipe, str(parse_location(source)), options, mode="prediction")
    if parts.is_folder(out):
        plan = parts.plan_parts(job, parts.digest_inputs(job))
        written = parts.write(
            out, job, plan, open_answer=lambda: _open_answer(job.recipe, job),
            entry="trueline.batch.predict:open_part_worker", event=ADVANCED,
        )  # fmt: skip
        return Prediction(records=plan.num_records, path=parts.resolve_folder(out), parts=written)
    out = Path(out)
    if out.suffix not in FILES:
        raise UsageError(
            f"{out} has no ending that selects a format",
            hint="use .parquet or .jsonl, or a folder (end it with /) for parts",
        )
    if job.workers == 1:
        count, answer = _open_answer(job.recipe, job)
        answers = compute_chunks(count, answer, job.batch, ADVANCED)
    else:
        count = job.num_records()
        answers = _answer_in_pool(job, count, out)
    columns = {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]} if answers else {}
    files.write_atomic(out, _encode_parquet(columns) if out.suffix == ".parquet" else _encode_json_lines(columns))
    return Prediction(records=count, path=out)


def _answer_in_pool(job: BatchJob, count: int, out: Path) -> list[dict[str, Array]]:
    """The answers of many processes, which leave them in files beside `out`."""
    work = job.work("trueline.batch.predict:open_worker", num_records=count, chunk=job.batch)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(prefix=files.PARTIAL, dir=out.parent)
    except OSError as error:
        raise files.storage_error(error, out) from error
    try:
        work = msgspec.structs.replace(work, out=str(Path(scratch).resolve()))
        replies = pool.run(work, workers=job.workers, report=lambda done: events.emit(ADVANCED, done=done, total=count))
        return [_read_arrays(Path(scratch, reply["file"]), reply["names"]) for reply in replies]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_arrays(file: Path, names: list[str]) -> dict[str, Array]:
    with file.open("rb") as stream:
        return {name: np.load(stream, allow_pickle=False) for name in names}


def open_worker(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with its chunks: it leaves the outputs in a file in `work.out` and replies its name."""
    count, answer = _open_answer(load_recipe(work.recipe), work)

    def compute(start: int, stop: int) -> dict[str, Any]:
        arrays, stream = answer(start, stop), io.BytesIO()
        for array in arrays.values():
            np.save(stream, array, allow_pickle=False)
        file = Path(work.out, f"{start}-{stop}.npy")
        files.write_atomic(file, stream.getvalue())
        return {"file": file.name, "names": list(arrays)}

    return count, compute


def open_part_worker(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with parts: it writes them itself."""
    return parts.open_part_worker(work, *_open_answer(load_recipe(work.recipe), work))


def _open_answer(recipe: Recipe, on: BatchJob | Work) -> tuple[int, Answer]:
    trained = checkpoint.exists(on.source)
    bundle = None if trained else open_bundle(Path(on.source))
    if bundle is not None and recipe.columns is not None:
        recipe = recipe.with_columns(bundle.columns())
    recipe = checkpoint.bind_columns(recipe, on.source if trained else None)
    model = load_model(recipe, on.source if trained else None)
    if trained:
        model = devices.wrap_for_host(model, devices.choose_own(on.device))
    program = None if bundle is None else open_program(bundle)
    records = recipe.source(on.mode)

    def answer(start: int, stop: int) -> dict[str, Array]:
        with seed_generators(start):
            eager = EagerSession(model, records.read(np.arange(start, stop, dtype=np.int64)).inputs)
            outputs = (program or eager).run(eager.example)
            return {**outputs, **answers.columns_of(recipe.fitted, outputs)} if recipe.fitted else outputs

    return records.num_records, answer


def _encode_parquet(columns: dict[str, Array]) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(parts.make_table(columns), sink)
    return sink.getvalue()


def _encode_json_lines(columns: dict[str, Array]) -> bytes:
    count = len(next(iter(columns.values()), ()))
    rows = ({"record": i, **{name: values[i].tolist() for name, values in columns.items()}} for i in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
