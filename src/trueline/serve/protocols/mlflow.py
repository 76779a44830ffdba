"""MLflow's scoring protocol on /invocations: tables and tensors in, predictions out. Pure.

    {"inputs": ...}, {"instances": [...]}           as KServe's V1 has them (`v1`)
    {"dataframe_split": {"columns", "data"}}        a table by rows
    {"dataframe_records": [{column: cell}, ...]}    the same, each row by names
    text/csv                                        the same, with the columns' names in the first line

A table whose columns are called as the model's inputs gives each input its column; for a model of one input any other
table is its rows, as long as the columns. Source: MLflow's page "Deploy MLflow Model as a Local Inference Server".
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.bundle.signature import Signature
from trueline.errors import RequestError, join_names
from trueline.serve import json_records
from trueline.serve.protocols.oip import v1

if TYPE_CHECKING:
    from trueline.serve.protocols.oip.v1 import Rows

CSV = b"text/csv"
_FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_BESIDE = frozenset({"params", "signature_name"})
"""What may stand beside the data, and says nothing here."""
_BODY = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WORDS = {"true": True, "false": False}


class _Split(msgspec.Struct):
    data: list[list[Any]]
    columns: list[str] | None = None
    index: list[Any] | None = None


_SPLIT = msgspec.json.Decoder(_Split)
_RECORDS = msgspec.json.Decoder(list[dict[str, Any]])


def decode(body: bytes | bytearray, media: bytes, signature: Signature) -> Rows | None:
    """The batch in a request's body of content type `media`; None for a body that is none of MLflow's.

    Raises RequestError.
    """
    if media.partition(b";")[0].strip().lower() == CSV:
        return _table(*_lines(body), signature)
    given = _object(body)
    names = {spec.name for spec in signature.inputs}
    forms = [form for form in _FORMS if form in given and form not in names]
    if not forms:
        return None
    more = given.keys() - {forms[0]} - _BESIDE
    if more:
        raise RequestError(f"beside '{forms[0]}' the body names: {join_names(sorted(name[:64] for name in more)[:8])}")
    if bytes(given.get("params", b"null")) not in (b"null", b"{}"):
        raise RequestError("the model takes no params")
    if forms[0] == "dataframe_split":
        told = _read(_SPLIT, given[forms[0]])
        return _table(told.columns, told.data, signature)
    if forms[0] == "dataframe_records":
        rows = _read(_RECORDS, given[forms[0]])
        columns = list(rows[0]) if rows else []
        if any(row.keys() != set(columns) for row in rows):
            raise RequestError("each of 'dataframe_records' is to name the same columns")
        return _table(columns, [[row[column] for column in columns] for row in rows], signature)
    return v1.decode(msgspec.json.encode({forms[0]: given[forms[0]]}), signature)


def _object(body: bytes | bytearray) -> dict[str, msgspec.Raw]:
    """What a body says by name; nothing when it is no JSON object, which is another's to judge."""
    if bytes(body[:64]).lstrip()[:1] != b"{":
        return {}
    try:
        return _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _read(decoder: msgspec.json.Decoder[Any], text: msgspec.Raw) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no table: {error}") from error


def _lines(body: bytes | bytearray) -> tuple[list[str], list[list[Any]]]:
    try:
        columns, *lines = [line for line in csv.reader(io.StringIO(bytes(body).decode("utf-8")), strict=True) if line]
    except (ValueError, csv.Error) as error:
        raise RequestError(f"the body is no CSV with the columns' names in its first line: {error}") from error
    return columns, [[_cell(text) for text in line] for line in lines]


def _cell(text: str) -> Any:
    """A number as JSON has it, or true or false."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return msgspec.json.decode(text, type=int | float)
    except msgspec.DecodeError as error:
        raise RequestError(f"the cell '{text[:32]}' is no number") from error


def _table(columns: Sequence[str] | None, rows: Sequence[Sequence[Any]], signature: Signature) -> Rows:
    """A table as a batch. Raises RequestError."""
    if not rows:
        raise RequestError("the table has no rows")
    width = len(rows[0]) if columns is None else len(columns)
    if any(len(row) != width for row in rows):
        raise RequestError(f"the table's rows are not all of its {width} columns")
    names = [spec.name for spec in signature.inputs]
    if columns is not None and len(set(columns)) == width and set(columns) == set(names):
        text = {
            name: [_in_list(row[at], len(spec.shape)) for row in rows]
            for at, name in enumerate(columns)
            for spec in signature.inputs
            if spec.name == name
        }
    elif len(names) == 1:
        text = {names[0]: list(rows)}
    else:
        found = join_names([] if columns is None else [name[:64] for name in columns[:8]])
        raise RequestError(f"the model takes the inputs {join_names(names)}, the table's columns are {found}")
    found_rows = json_records.decode(msgspec.json.encode(text), signature)
    if found_rows.single:
        raise RequestError("the table's cells do not nest as the model's inputs do")
    return v1.Rows(found_rows.inputs, by_row=False)


def _in_list(cell: Any, rank: int) -> Any:
    """A number of a column for an input of one number a row, [batch, 1]."""
    return [cell] if rank == 2 and not isinstance(cell, list) else cell
