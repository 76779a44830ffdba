"""The bodies of requests for a bundle with columns: records by column name, as users have them. Pure.

    body                                             the answer
    {column: cell, ...}                              that record's
    [{column: cell, ...}, ...]                       a list of them
    {"instances": [record, ...]}                     the list; on /v1 and /invocations {"predictions": the list}
    {"inputs": [record, ...] or {column: [...]}}     {"predictions": the list}
    {"dataframe_split": ...}, {"dataframe_records": ...}, text/csv: MLflow's tables    {"predictions": the list}

An answer is {"class", "probabilities"} or {"value"} where the label declares it, else the model's outputs. Cells are
encoded by the functions that encoded the training records (`columns.fitted`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from trueline.columns import answers, cells
from trueline.columns.fitted import FittedColumns
from trueline.errors import DataError, RequestError, join_names
from trueline.serve.tensors.bounds import RequestBounds
from trueline.web.body import Body

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

CSV = b"text/csv"
_FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_IGNORED = ("params", "signature_name")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ColumnRecords:
    """One request, encoded. `single`: it was one record; `wrapped`: the answer is {"predictions": ...}; `labels`: that
    the records have, and that nothing reads."""

    inputs: dict[str, Array]
    single: bool
    wrapped: bool
    labels: tuple[str, ...] = ()


def decode(body: Body, fitted: FittedColumns, bounds: RequestBounds, media: bytes | None, wraps: bool) -> ColumnRecords:
    """The records in a body of type `media`; `wraps`: the protocol has {"predictions"} for `instances` too.

    Raises RequestError that names the column, what was expected and what was received; TooLarge.
    """
    if not body:
        raise RequestError("the body is empty", hint=_hint(fitted))
    if media is not None and media.partition(b";")[0].strip().lower() == CSV:
        return _encode(_rows_of_csv(body, fitted), fitted, bounds, False, True)
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON of records: {error}", hint=_hint(fitted)) from error
    form = next((one for one in _FORMS if isinstance(given, dict) and one in given and one not in fitted.by_name), None)
    if form is not None:
        more = sorted(name[:64] for name in given.keys() - {form, *_IGNORED})
        if more or given.get("params"):
            raise RequestError(f"beside '{form}' the body names: {join_names(more or ['params'])}")
        rows = _rows_of_form(form, given[form])
        return _encode(rows, fitted, bounds, False, wraps or form != "instances")
    if wraps and media is None:
        raise RequestError("Unrecognized request format: the body names neither 'instances' nor 'inputs'")
    single = isinstance(given, dict)
    return _encode([given] if single else given, fitted, bounds, single, False)


def _encode(rows: Any, fitted: FittedColumns, bounds: RequestBounds, single: bool, wrapped: bool) -> ColumnRecords:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RequestError("expected one record, an object of cells by column, or a list of them", hint=_hint(fitted))
    bounds.check_values(len(rows) * fitted.values_per_record)
    try:
        labels = tuple(one.name for one in fitted.labels if any(one.name in row for row in rows))
        return ColumnRecords(fitted.encode_rows(rows), single, wrapped, labels)
    except DataError as error:
        raise RequestError(error.message, hint=error.hint) from error


def _hint(fitted: FittedColumns) -> str:
    return f"send JSON: an object with the columns {join_names(fitted.input_columns)}, or a list of such records"


def _rows_of_form(form: str, given: Any) -> Any:
    if form == "dataframe_split":
        names = given.get("columns") if isinstance(given, dict) else None
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(names, list) or not isinstance(data, list):
            raise RequestError("'dataframe_split' must have 'columns' and 'data'")
        return [_row(names, line) for line in data]
    if form == "inputs" and isinstance(given, dict):
        lists = list(given.values())
        if not all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists):
            raise RequestError("'inputs' must be a list of records, or lists of one length by column")
        return [dict(zip(given, line, strict=True)) for line in zip(*lists, strict=True)]
    return given


def _row(names: Sequence[Any], line: Any) -> Row:
    if not isinstance(line, list) or len(line) != len(names) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"each row of the table must have {len(names)} cells, one for each column")
    return dict(zip(names, line, strict=True))


def _rows_of_csv(body: Body, fitted: FittedColumns) -> list[Row]:
    try:
        names, *lines = [line for line in csv.reader(io.StringIO(bytes(body).decode("utf-8")), strict=True) if line]
    except (ValueError, csv.Error) as error:
        raise RequestError(f"the body is no CSV with the columns' names in its first line: {error}") from error
    kinds = {one.name: one.type for one in fitted.columns}
    rows: list[Row] = []
    for number, line in enumerate(lines):
        row = _row(names, line)
        try:
            rows.append(
                {name: cells.cell_of_text(text, name, kinds.get(name, "text"), number) for name, text in row.items()}
            )
        except DataError as error:
            raise RequestError(error.message, hint=error.hint) from error
    return rows


def ignored_header(records: ColumnRecords) -> bytes:
    """A header line that names the labels in the request; empty without any. Source of the form: RFC 8941, URL-encoded
    names."""
    names = ", ".join(f'"{quote(name)}"' for name in records.labels)
    return f"trueline-ignored: {names}\r\n".encode() if names else b""


def encode(outputs: Mapping[str, Array], fitted: FittedColumns, records: ColumnRecords) -> bytes:
    """The answer's body. NaN and the infinities are null."""
    rows = len(next(iter(records.inputs.values())))
    if any(values.ndim == 0 or len(values) != rows for values in outputs.values()):
        plain = {name: values.tolist() for name, values in outputs.items()}
        return msgspec.json.encode({"predictions": plain} if records.wrapped else plain)
    found: Any = answers.records_of(fitted, outputs)
    if records.wrapped:
        return msgspec.json.encode({"predictions": found})
    return msgspec.json.encode(found[0] if records.single else found)
