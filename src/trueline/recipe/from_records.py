"""The recipe that `trueline init NAME my.csv --label COLUMN` writes: its columns are guessed from the records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from trueline import files
from trueline.columns.declared import (
    MASK,
    NUMBERS,
    Category,
    Declared,
    Label,
    Number,
    Series,
    Text,
    input_name,
    input_names,
)
from trueline.columns.guess import ColumnGuess, guess
from trueline.data.missing import stream_tables
from trueline.data.open import as_list, describe_uris, open_records
from trueline.data.records import TEXT_BECAUSE, Records
from trueline.data.tools.split import SplitRule, split
from trueline.errors import DataError
from trueline.recipe.template import WrittenRecipe, new_file
from trueline.storage.location import Uris

LEAST_RECORDS = 20
PARTS = {"training": 0.8, "evaluation": 0.2}
_STEPS = 600
"""Optimizer steps of a first training, about."""
_CATEGORY_WIDTH, _TEXT_WIDTH, _HIDDEN = 8, 16, 64

_SOURCE = Path(__file__).with_name("templates") / "records.txt"
"""Filled by `str.format`."""
_CLASSES = """def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def metrics():
    return {"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()}"""
_NUMBER = """def loss(outputs, labels):  # of the label as it is scaled: 1 is what the mean of all records would reach
    return nn.functional.mse_loss(outputs, labels)


def metrics():
    return {"absolute_error": lambda outputs, labels: (outputs - labels).abs()}"""


def write_for_records(name: str, into: Path, uris: Uris, label: str) -> WrittenRecipe:
    """Writes `into/name/recipe.py`, and the records in two parts beside it, of which one is kept for evaluation.

    Raises UsageError when the recipe exists or the name is not valid, DataError for records that cannot be read or a
    label that cannot be learnt, StorageError.
    """
    path = new_file(name, into, "recipe.py")
    records = open_records(uris)
    _refuse_other_separator(uris, records.schema)
    reasons = {field.name: (field.metadata or {}).get(TEXT_BECAUSE, b"").decode() for field in records.schema}
    count, guesses = guess(records.schema, _tables(records), label, reasons)
    if count < LEAST_RECORDS:
        raise DataError(f"{describe_uris(as_list(uris))} has {count} records, expected {LEAST_RECORDS} at least")
    declared = {one.name: one.declared for one in guesses if one.declared is not None}
    classes = isinstance(answer := declared[label], Label) and not answer.number
    rule = SplitRule(parts=PARTS, stratify=label if classes else "")
    parts = split(uris, path.parent, rule, to="parquet")
    files.write_atomic(path, write_source(name, guesses, parts["training"]).encode())
    lines = [f"{parts['training']} records for training, {parts['evaluation']} for evaluation"]
    lines += [f"{_verb(one.declared):<9}{one.name}: {one.why}" for one in guesses]
    return WrittenRecipe(path, "\n".join(lines))


def _verb(declared: Declared | None) -> str:
    return "left out" if declared is None else type(declared).__name__


def _tables(records: Records) -> Iterator[pa.Table]:
    for number, unit in enumerate(records.units):
        yield from stream_tables(records, number, unit.count)


def _refuse_other_separator(uris: Uris, schema: pa.Schema) -> None:
    """A table with ; or tabs between its columns, read as CSV, has one column."""
    for sign, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(schema.names) == 1 and sign in schema.names[0]:
            raise DataError(
                f"{describe_uris(as_list(uris))} has one column, {schema.names[0][:64]!r}: it is separated by {called}",
                hint="save it with commas" + (", or name it .tsv" if sign == "\t" else ""),
            )


def write_source(name: str, guesses: Sequence[ColumnGuess], records: int) -> str:
    """The recipe's source. Names and values of the records enter it as literals only."""
    declared = {one.name: one.declared for one in guesses if one.declared is not None}
    numbers = next(one for one in declared.values() if isinstance(one, Label)).number
    batch = next((batch for most, batch in ((2_000, 32), (10_000, 64), (100_000, 256)) if records < most), 1024)
    return _SOURCE.read_text().format(
        folder=name,
        kinds=", ".join(sorted({type(one).__name__ for one in declared.values()})),
        name=_literal(name),
        epochs=min(max(2, round(_STEPS * batch / records)), 30),
        batch=batch,
        columns="\n".join(_write_columns(guesses)),
        layers="".join(f"{line}\n" for line in _write_layers(declared)),
        width=_write_width(declared),
        hidden=_HIDDEN,
        outputs=1 if numbers else "columns.num_classes",
        arguments=", ".join(input_names(declared)),
        parts="\n".join(f"            {one}," for one in _write_parts(declared)),
        squeeze=".squeeze(1)" if numbers else "",
        loss=_NUMBER if numbers else _CLASSES,
    )


def _literal(text: str) -> str:
    """As Python reads it, on one line."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _write_columns(guesses: Sequence[ColumnGuess]) -> Iterator[str]:
    yield "columns = {"
    for one in guesses:
        if one.declared is not None:
            yield f"    {_literal(one.name)}: {_write_declared(one.declared)},  # {_comment(one.why)}"
    yield "}"
    left_out = [one for one in guesses if one.declared is None]
    if left_out:
        yield "# Left out:"
        yield from (f"# {_literal(one.name)}: {_comment(one.why)}" for one in left_out)


def _comment(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _write_declared(declared: Declared) -> str:
    """`Number(missing="mean")`: what is not the default."""
    fields = {one.name: (getattr(declared, one.name), one.default) for one in msgspec.structs.fields(declared)}
    given = {name: value for name, (value, usual) in fields.items() if value != usual}
    values = {name: _literal(value) if isinstance(value, str) else repr(value) for name, value in given.items()}
    return f"{type(declared).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"


def _write_layers(declared: dict[str, Declared]) -> Iterator[str]:
    for column, one in declared.items():
        if isinstance(one, Category | Text):
            width, padding = (_CATEGORY_WIDTH, "") if isinstance(one, Category) else (_TEXT_WIDTH, ", padding_idx=0")
            size = f"columns[{_literal(column)}].size"
            yield f"        self.of_{input_name(column)} = nn.Embedding({size}, {width}{padding})"


def _write_width(declared: dict[str, Declared]) -> str:
    parts = ["columns.num_numbers"] if any(isinstance(one, Number) for one in declared.values()) else []
    fixed = sum(_CATEGORY_WIDTH for one in declared.values() if isinstance(one, Category))
    fixed += sum(_TEXT_WIDTH for one in declared.values() if isinstance(one, Text))
    fixed += sum(2 * one.max_length for one in declared.values() if isinstance(one, Series))
    return " + ".join([*parts, *([str(fixed)] if fixed else [])])


def _write_parts(declared: dict[str, Declared]) -> Iterator[str]:
    """What the head reads, as columns of one tensor."""
    if any(isinstance(one, Number) for one in declared.values()):
        yield NUMBERS
    for column, one in declared.items():
        name = input_name(column)
        if isinstance(one, Category):
            yield f"self.of_{name}({name})"
        elif isinstance(one, Series):
            yield name
            yield f"{name}{MASK}.float()"
        elif isinstance(one, Text):  # the mean of the words that are there
            yield f"self.of_{name}({name}).sum(dim=1) / {name}{MASK}.sum(dim=1, keepdim=True).clamp(min=1)"
