"""Records by column name are accepted in every form that users send, and refused with the column's name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from trueline.columns import Category, Label, Number, Text
from trueline.columns.encoders import FittedCategory, FittedLabel, FittedNumber, FittedText
from trueline.columns.fitted import FittedColumns
from trueline.errors import RequestError, TooLarge
from trueline.serve import column_records
from trueline.serve.tensors.bounds import UNBOUNDED, RequestBounds

COLUMNS = FittedColumns(
    records=9,
    columns=(
        FittedNumber(
            name="age", type="number", declared=Number(missing="mean"), offset=40.0, factor=10.0, fill=40.0, low=1.0,
            high=90.0,
        ),
        FittedCategory(name="city", type="text", declared=Category(), values=("Oslo", "Rome")),
        FittedText(name="note", type="text", declared=Text(max_length=3, mask=False), words=("good",)),
        FittedLabel(name="income", type="text", declared=Label(), classes=("high", "low")),
    ),
)  # fmt: skip
ROW = {"age": 50, "city": "Rome"}
WANTED = {"numbers": [[1.0]], "city": [3], "note": [[0, 0, 0]]}


def read(body: Any, *, media: bytes | None = None, wraps: bool = False) -> column_records.ColumnRecords:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return column_records.decode(text, COLUMNS, UNBOUNDED, media, wraps)


@pytest.mark.parametrize(
    ("body", "single", "wrapped"),
    [
        (ROW, True, False),
        ([ROW], False, False),
        ({"instances": [ROW]}, False, False),
        ({"inputs": [ROW]}, False, True),
        ({"inputs": {"age": [50], "city": ["Rome"]}}, False, True),
        ({"dataframe_split": {"columns": ["city", "age"], "data": [["Rome", 50]]}}, False, True),
        ({"dataframe_records": [ROW], "params": {}}, False, True),
    ],
)
def test_all_forms_of_one_record_are_one_input(body: Any, single: bool, wrapped: bool) -> None:
    found = read(body)
    assert {name: array.tolist() for name, array in found.inputs.items()} == WANTED
    assert (found.single, found.wrapped) == (single, wrapped)


def test_csv_has_missing_cells_and_names_in_its_first_line() -> None:
    found = read(b"city,age,note\nRome,50,\nNA,,good\n", media=b"text/csv; charset=utf-8")
    assert found.inputs["numbers"].tolist() == [[1.0], [0.0]]
    assert found.inputs["city"].tolist() == [3, 0]
    assert found.inputs["note"].tolist() == [[0, 0, 0], [2, 0, 0]]
    with pytest.raises(RequestError, match="column 'age' of record 0: expected a number, got the text 'old'"):
        read(b"age\nold\n", media=b"text/csv")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b"[1,", "no JSON of records"),
        ([], "expected one record"),
        ([1], "expected one record"),
        ("text", "expected one record"),
        ({"instances": 5}, "expected one record"),
        ({"instances": [ROW], "more": 1}, "beside 'instances' the body names: more"),
        ({"dataframe_split": {"columns": ["age"], "data": [[1, 2]]}}, "each row of the table must have 1 cells"),
        ({"inputs": {"age": [1], "city": []}}, "lists of one length"),
        ({"agee": 3}, "a column 'agee', which the model does not take"),
        ({"city": 3}, "column 'city' of record 0: expected text, got the whole number '3'"),
    ],
)
def test_what_is_no_record_is_refused_in_words(body: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(body)


def test_kserves_v1_takes_instances_or_inputs_only() -> None:
    assert read({"instances": [ROW]}, wraps=True).wrapped
    with pytest.raises(RequestError, match="neither 'instances' nor 'inputs'"):
        read(ROW, wraps=True)


def test_many_short_records_cannot_become_more_numbers_than_a_request_may() -> None:
    with pytest.raises(TooLarge, match="the inputs have 500 values"):
        column_records.decode(
            msgspec.json.encode([{}] * 100), COLUMNS, RequestBounds(values=400, answer_values=400), None, False
        )


def test_answers_are_by_record_and_name_classes() -> None:
    outputs = {"output": np.array([[0.0, 0.0]], np.float32)}
    one = {"class": "high", "probabilities": {"high": 0.5, "low": 0.5}}
    assert json.loads(column_records.encode(outputs, COLUMNS, read(ROW))) == one
    assert json.loads(column_records.encode(outputs, COLUMNS, read([ROW]))) == [one]
    assert json.loads(column_records.encode(outputs, COLUMNS, read({"inputs": [ROW]}))) == {"predictions": [one]}


@pytest.mark.parametrize(
    ("body", "line"), [(ROW, b""), ([ROW, {**ROW, "income": "low"}], b'trueline-ignored: "income"\r\n')]
)
def test_a_label_in_a_request_changes_nothing_and_is_named_in_a_header(body: Any, line: bytes) -> None:
    found = read(body)
    assert column_records.ignored_header(found) == line
    assert found.inputs["numbers"].tolist() == [[1.0]] * (len(body) if isinstance(body, list) else 1)


def test_a_label_with_a_hostile_name_makes_no_header_of_its_own() -> None:
    label = FittedLabel(name="a\r\nset-cookie: é", type="text", declared=Label(), classes=("x", "y"))
    columns = msgspec.structs.replace(COLUMNS, columns=(*COLUMNS.columns[:3], label))
    text = json.dumps([{**ROW, label.name: "x"}]).encode()
    found = column_records.decode(text, columns, UNBOUNDED, None, False)
    assert column_records.ignored_header(found) == b'trueline-ignored: "a%0D%0Aset-cookie%3A%20%C3%A9"\r\n'
