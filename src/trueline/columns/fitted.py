"""Fitted columns as one value: `model(columns)` receives it, a job keeps it, a bundle has it as `columns.json`.

columns["city"].size, columns["review"].size, columns.num_numbers, columns.num_classes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline import files
from trueline.columns import cells
from trueline.columns.declared import MASK, NUMBERS, input_name
from trueline.columns.encoders import (
    Array,
    FittedCategory,
    FittedColumn,
    FittedImage,
    FittedLabel,
    FittedNumber,
    FittedSeries,
    FittedText,
    count_values,
    encode_array,
    encode_cells,
    json_of_cell,
)
from trueline.errors import BundleError, DataError, TruelineError, closest, join_names

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1


class FittedColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """All columns of a recipe, in its order. `ignored`: columns of the records that it does not declare."""

    schema: int = SCHEMA
    records: int
    """Training records over which they were fitted."""
    columns: tuple[FittedColumn, ...]
    ignored: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        found = self.by_name.get(name)
        if found is None:
            raise KeyError(f"no column '{name}' (there are: {join_names(self.by_name)})")
        return found

    @cached_property
    def by_name(self) -> dict[str, FittedColumn]:
        return {one.name: one for one in self.columns}

    @property
    def num_numbers(self) -> int:
        """Width of the input `numbers`."""
        return sum(one.width for one in self.columns if isinstance(one, FittedNumber))

    @cached_property
    def input_columns(self) -> tuple[str, ...]:
        """Names of the columns that are no labels."""
        return tuple(one.name for one in self.columns if not isinstance(one, FittedLabel))

    @cached_property
    def values_per_record(self) -> int:
        """Numbers that one record becomes."""
        return sum(count_values(one) for one in self.columns if not isinstance(one, FittedLabel))

    @property
    def labels(self) -> tuple[FittedLabel, ...]:
        return tuple(one for one in self.columns if isinstance(one, FittedLabel))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the label, by index."""
        return self.labels[0].classes if self.labels else ()

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return files.sha256_bytes(msgspec.json.encode(self, order="sorted"))

    def encode_table(self, table: pa.Table, *, labels: bool = True) -> tuple[dict[str, Array], Any]:
        """The inputs by name, and the labels (None without `labels`): an array, or a dict of several.

        Raises DataError that names the column.
        """
        columns = [one for one in self.columns if labels or not isinstance(one, FittedLabel)]
        cells.expect_columns([one.name for one in columns], table.column_names)
        arrays = {one.name: encode_array(one, cells.one_array(table.column(one.name))) for one in columns}
        return self._join(arrays, labels=labels)

    def encode_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """The inputs by name for records with JSON's values; a column that a record lacks has no value.

        Raises DataError that names the column, what was expected and what was received.
        """
        known = {*self.by_name, *self.ignored}
        for row, record in enumerate(rows):
            for name in record.keys() - known:
                near = closest(name, known)
                raise DataError(
                    f"record {row} has a column '{name[:64]}', which the model does not take; it takes "
                    f"{join_names(self.input_columns)}",
                    hint=f"did you mean '{near}'?" if near else "",
                )
        arrays = {
            one.name: encode_cells(one, [record.get(one.name) for record in rows])
            for one in self.columns
            if not isinstance(one, FittedLabel)
        }
        return self._join(arrays, labels=False)[0]

    def rows_of_table(self, table: pa.Table) -> list[dict[str, Any]]:
        """The records of `table` as JSON's values, without labels, from which `encode_rows` makes the same arrays."""
        rows = table.select(self.input_columns).to_pylist()
        return [{name: json_of_cell(self[name], value) for name, value in row.items()} for row in rows]

    def _join(self, arrays: Mapping[str, Any], *, labels: bool) -> tuple[dict[str, Array], Any]:
        numbers = [column for one in self.columns if isinstance(one, FittedNumber) for column in arrays[one.name]]
        inputs: dict[str, Array] = {NUMBERS: np.stack(numbers, axis=1)} if numbers else {}
        for one in self.columns:
            if isinstance(one, FittedText | FittedSeries):
                values, mask = arrays[one.name]
                inputs[input_name(one.name)] = values
                if one.declared.mask:
                    inputs[input_name(one.name) + MASK] = mask
            elif isinstance(one, FittedCategory | FittedImage):
                inputs[input_name(one.name)] = arrays[one.name]
        if not labels or not self.labels:
            return inputs, None
        if len(self.labels) == 1:
            return inputs, arrays[self.labels[0].name]
        return inputs, {one.name: arrays[one.name] for one in self.labels}


def encode(fitted: FittedColumns) -> bytes:
    """The text of `columns.json`."""
    return msgspec.json.format(msgspec.json.encode(fitted, order="sorted"), indent=1) + b"\n"


def decode(text: bytes, where: str) -> FittedColumns:
    """The columns in `text`. Raises BundleError that names `where`."""
    try:
        found = msgspec.json.decode(text, type=FittedColumns)
        faults = [fault for one in found.columns for fault in one.declared.faults()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TruelineError) as error:
        raise BundleError(f"{where} holds no columns: {error}") from error
    if found.schema != SCHEMA or faults or len(found.by_name) != len(found.columns):
        why = f"schema {found.schema}" if found.schema != SCHEMA else "; ".join(faults) or "a column twice"
        raise BundleError(f"{where} holds columns that cannot be read: {why}")
    return found
