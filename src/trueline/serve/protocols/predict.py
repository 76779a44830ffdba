"""KServe's V1 protocol and MLflow's scoring protocol: records and tables in, predictions out. Pure.

    {"instances": [record, ...]}                    {"predictions": [answer of each record, ...]}
    {"inputs": {input name: batch, ...}}            {"predictions": {output name: batch, ...}}, or the only output's
    {"dataframe_split": {"columns", "data"}}        MLflow: a table by rows
    {"dataframe_records": [{column: cell}, ...]}    MLflow: a table with named cells
    text/csv                                        MLflow: a table with the columns' names in the first line

Records are those of /predictions (`json_records`). If a table's columns have the names of the model's inputs, each
input gets its column; for a model of one input the rows of any other table are the input's rows. Sources: KServe's V1
page, TensorFlow Serving's REST API, MLflow's page "Deploy MLflow Model as a Local Inference Server".
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from trueline.bundle.signature import Signature
from trueline.errors import RequestError, join_names
from trueline.serve import json_records
from trueline.web.body import Body

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

CSV = b"text/csv"
_FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_IGNORED = frozenset({"params", "signature_name"})
_BODY = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NUMBERS = msgspec.json.Decoder(list[list[int | float]])
_NUMERIC = b"0123456789+-.eE,\n"
_BOOLEANS = {"true": True, "false": False}


class _Split(msgspec.Struct):
    data: list[list[Any]]
    columns: list[str] | None = None
    index: list[Any] | None = None


_SPLIT = msgspec.json.Decoder(_Split)
_RECORDS = msgspec.json.Decoder(list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class PredictBatch:
    """One decoded request. `by_row`: it came as instances, and is answered record by record."""

    inputs: dict[str, Array]
    by_row: bool


def decode_v1(body: Body, signature: Signature) -> PredictBatch:
    """The batch in a predict request of KServe's V1. Raises RequestError."""
    try:
        given = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"Unrecognized request format: {error}") from error
    if "instances" in given:
        instances = msgspec.json.encode({"instances": given["instances"]})
        return PredictBatch(json_records.decode(instances, signature).inputs, by_row=True)
    if "inputs" not in given:
        raise RequestError("Unrecognized request format: the body names neither 'instances' nor 'inputs'")
    records = json_records.decode(bytes(given["inputs"]), signature)
    if records.single:
        raise RequestError("'inputs' must contain batches; send one record as an instance")
    return PredictBatch(records.inputs, by_row=False)


def decode_mlflow(body: Body, media: bytes, signature: Signature) -> PredictBatch | None:
    """The batch in a body of content type `media`; None for a body that is not MLflow's. Raises RequestError."""
    if media.partition(b";")[0].strip().lower() == CSV:
        return _decode_table(*_parse_csv(body), signature)
    given: dict[str, msgspec.Raw] = {}
    if bytes(body[:64]).lstrip()[:1] == b"{":
        try:
            given = _BODY.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
    names = {spec.name for spec in signature.inputs}
    form = next((form for form in _FORMS if form in given and form not in names), None)
    if form is None:
        return None
    more = given.keys() - {form} - _IGNORED
    if more:
        raise RequestError(f"beside '{form}' the body names: {join_names(sorted(name[:64] for name in more)[:8])}")
    if bytes(given.get("params", b"null")) not in (b"null", b"{}"):
        raise RequestError("the model takes no params")
    if form == "dataframe_split":
        split = _parse(_SPLIT, given[form])
        return _decode_table(split.columns, split.data, signature)
    if form == "dataframe_records":
        rows = _parse(_RECORDS, given[form])
        columns = list(rows[0]) if rows else []
        if any(row.keys() != set(columns) for row in rows):
            raise RequestError("all of 'dataframe_records' must name the same columns")
        return _decode_table(columns, [[row[column] for column in columns] for row in rows], signature)
    return decode_v1(msgspec.json.encode({form: given[form]}), signature)


def decode_records(body: Body, signature: Signature, media: bytes | None) -> json_records.JsonRecords | PredictBatch:
    """The records in a body, or with its type `media` MLflow's table. Raises RequestError."""
    table = None if media is None else decode_mlflow(body, media, signature)
    return table or json_records.decode(body, signature)


def _parse(decoder: msgspec.json.Decoder[Any], text: msgspec.Raw) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no table: {error}") from error


def _parse_csv(body: Body) -> tuple[list[str], list[list[Any]]]:
    return _parse_numbers(bytes(body)) or _parse_cells(bytes(body))


def _parse_cells(body: bytes) -> tuple[list[str], list[list[Any]]]:
    try:
        columns, *lines = [line for line in csv.reader(io.StringIO(body.decode("utf-8")), strict=True) if line]
    except (ValueError, csv.Error) as error:
        raise RequestError(f"the body is no CSV with the columns' names in its first line: {error}") from error
    return columns, [[_parse_cell(text.strip()) for text in line] for line in lines]


def _parse_numbers(body: bytes) -> tuple[list[str], list[list[Any]]] | None:
    """The table, if it is plain: names, and then nothing but numbers, which JSON's reader takes all at once."""
    head, _, rest = body.replace(b"\r\n", b"\n").partition(b"\n")
    if b'"' in head or b"\r" in head or rest.translate(None, _NUMERIC):
        return None
    try:
        columns = head.decode("utf-8").split(",")
        lines = _NUMBERS.decode(b"[[" + rest.replace(b"\n", b"],[") + b"]]")
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None
    return (columns, [line for line in lines if line]) if head else None


def _parse_cell(text: str) -> Any:
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    try:
        return msgspec.json.decode(text, type=int | float)
    except msgspec.DecodeError as error:
        raise RequestError(f"the cell '{text[:32]}' is no number") from error


def _decode_table(columns: Sequence[str] | None, rows: Sequence[Sequence[Any]], signature: Signature) -> PredictBatch:
    if not rows:
        raise RequestError("the table has no rows")
    width = len(rows[0]) if columns is None else len(columns)
    if any(len(row) != width for row in rows):
        raise RequestError(f"the table's rows are not all of its {width} columns")
    ranks = {spec.name: len(spec.shape) for spec in signature.inputs}
    if columns is not None and len(set(columns)) == width and set(columns) == set(ranks):
        # an input of shape [batch, 1] takes a column of numbers
        inputs = {
            name: [[row[at]] if ranks[name] == 2 and not isinstance(row[at], list) else row[at] for row in rows]
            for at, name in enumerate(columns)
        }
    elif len(ranks) == 1:
        inputs = {next(iter(ranks)): list(rows)}
    else:
        shown = join_names([] if columns is None else [name[:64] for name in columns[:8]])
        raise RequestError(f"the model has the inputs {join_names(list(ranks))}, the table's columns are {shown}")
    records = json_records.decode(msgspec.json.encode(inputs), signature)
    if records.single:
        raise RequestError("the table's cells do not nest as the model's inputs do")
    return PredictBatch(records.inputs, by_row=False)


def encode(outputs: Mapping[str, Array], batch: PredictBatch) -> bytes:
    """The answer's body. Raises RequestError."""
    if len(outputs) == 1:
        return msgspec.json.encode({"predictions": next(iter(outputs.values())).tolist()})
    columns = {name: array.tolist() for name, array in outputs.items()}
    if not batch.by_row:
        return msgspec.json.encode({"predictions": columns})
    rows = len(next(iter(batch.inputs.values())))
    uncounted = [name for name, array in outputs.items() if array.ndim == 0 or len(array) != rows]
    if uncounted:
        raise RequestError(
            f"output '{uncounted[0]}' has no row for each record",
            hint="send the batch as 'inputs', which is answered with whole outputs",
        )
    answers = [{name: values[row] for name, values in columns.items()} for row in range(rows)]
    return msgspec.json.encode({"predictions": answers})
