"""`trueline.predict`: the outputs for many records, written to one file that is whole or absent."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline import events, files
from trueline.bundle.read import open_bundle
from trueline.errors import UsageError
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe
from trueline.runtime.eager import EagerSession
from trueline.runtime.session import open_program
from trueline.state import checkpoint
from trueline.state.checkpoint import load_model

if TYPE_CHECKING:
    import numpy.typing as npt

    from trueline.bundle.signature import Array
    from trueline.data.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    records: int
    path: Path


def predict(
    recipe: str | Path | Recipe,
    source: str | Path,
    out: str | Path,
    *,
    mode: Mode = "prediction",
    batch: int = 256,
) -> Prediction:
    """Writes the outputs for every record of `mode`: by the eager model of a checkpoint, or by a bundle's program.

    `out` ends in .parquet (columns `record` and one list for each output) or .jsonl (one object for each record).
    Raises UsageError, CheckpointError, BundleError, DataError, StorageError; `out` is then as it was.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    out = Path(out)
    if out.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"{out} has no ending that says how to write it", hint="use .parquet or .jsonl")
    records = found.source(mode)
    answers = list(_answers(found, Path(source), records, batch))
    columns = {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]} if answers else {}
    files.write_atomic(out, _parquet(columns) if out.suffix == ".parquet" else _json_lines(columns))
    return Prediction(records=records.num_records, path=out)


def _answers(recipe: Recipe, source: Path, records: Source, batch: int) -> Iterator[dict[str, Array]]:
    model = load_model(recipe, source if (source / checkpoint.MANIFEST).exists() else None)
    program = None if (source / checkpoint.MANIFEST).exists() else open_program(open_bundle(source))
    for start in range(0, records.num_records, batch):
        indices = np.arange(start, min(start + batch, records.num_records), dtype=np.int64)
        eager = EagerSession(model, records.read(indices).inputs)
        yield (program or eager).run(eager.example)
        events.emit("prediction.advanced", done=start + len(indices), total=records.num_records)


def _parquet(columns: dict[str, Array]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(next(iter(columns.values()), ()))
    table = {"record": pa.array(np.arange(count))}
    for name, values in columns.items():
        table[name] = pa.array(list(values.reshape(count, -1))) if values.ndim > 1 else pa.array(values)
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink)
    return sink.getvalue()


def _json_lines(columns: dict[str, npt.NDArray[Any]]) -> bytes:
    count = len(next(iter(columns.values()), ()))
    rows = ({"record": i, **{name: values[i].tolist() for name, values in columns.items()}} for i in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
