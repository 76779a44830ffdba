"""What `trueline init NAME my.csv` takes columns for."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest

from trueline.columns.declared import Category, Label, Number, Text
from trueline.columns.guess import COUNTED, ColumnGuess, guess
from trueline.errors import DataError

N = 200
LABEL = [f"class {at % 3}" for at in range(N)]


def guesses(label: str = "label", reasons: dict[str, str] | None = None, **columns: Any) -> dict[str, ColumnGuess]:
    columns = {"label": LABEL, "plain": [at % 7 for at in range(N)], **columns}
    table = pa.table(columns)
    records, found = guess(table.schema, [table.slice(0, 90), table.slice(90)], label, reasons or {})
    assert records == N
    assert [one.name for one in found] == list(columns)
    return {one.name: one for one in found}


@pytest.mark.parametrize(
    ("values", "declared"),
    [
        ([at % 50 for at in range(N)], Number()),
        ([at * 0.5 for at in range(N)], Number()),
        ([None if at % 9 == 0 else at % 50 for at in range(N)], Number(missing="mean", indicator=True)),
        ([float("nan") if at == 3 else at * 0.5 for at in range(N)], Number(missing="mean", indicator=True)),
        ([at % 2 == 0 for at in range(N)], Category()),
        (["Rome", "", "Oslo", "Lima"] * (N // 4), Category()),
        (["once", "seldom"] + ["Rome", "Oslo"] * (N // 2 - 1), Category(rare=2)),
        ([f"words {at} of a text of many words" for at in range(N)], Text(max_length=8)),
        ([" ".join(["word"] * (at % 40)) for at in range(N)], Text(max_length=40)),
        ([at * 7 % 1009 for at in range(N)], Number()),  # all different, and no numbering
    ],
)
def test_a_column_is_declared_by_what_its_records_have(values: list[Any], declared: object) -> None:
    assert guesses(x=values)["x"].declared == declared


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("x", [None] * N, "no record has a value"),
        ("x", [4] * N, "it is '4' in every record"),
        ("x", list(range(N)), "it numbers the records"),
        ("customerId", [at * 7 % 1009 for at in range(N)], "it numbers the records"),
        ("x", [f"A-{at * 7919 % 9973}" for at in range(N)], "200 different values in 200 records"),
        ("x", [datetime.date(2024, 1, 1 + at % 28) for at in range(N)], r"dates or times \(date32"),
        ("x", [datetime.datetime(2024, 1, 1, at % 24) for at in range(N)], r"dates or times \(timestamp"),
        ("x", [b"bytes"] * N, "it is binary"),
        ("x", [["a"]] * N, "list<"),
        ("x", [[]] * (N - 1) + [[None]], "list<"),
        ("x", [[0.5, float("inf")]] * N, "infinite"),
        ("x", [float("inf")] + [0.5] * (N - 1), "infinite"),
        ("torch", ["Rome", "Oslo"] * (N // 2), "would hide 'torch'"),
        ("numbers", ["Rome", "Oslo"] * (N // 2), "would hide 'numbers'"),
    ],
)
def test_a_column_that_teaches_nothing_is_left_out_with_a_reason(name: str, values: list[Any], why: str) -> None:
    found = guesses(**{name: values})[name]
    assert found.declared is None
    with pytest.raises(DataError, match=why):
        raise DataError(found.why)


def test_numbers_that_one_odd_cell_made_text_are_left_out_with_that_cell() -> None:
    values = [str(at * 7 % 1009) for at in range(N - 1)] + ["?"]
    found = guesses(reasons={"x": "'?' in record 199 is no number"}, x=values)["x"]
    assert found.declared is None
    assert "'?' in record 199" in found.why


@pytest.mark.parametrize(
    ("values", "declared"),
    [
        (["yes", "no"] * (N // 2), Label()),
        ([True, False] * (N // 2), Label()),
        ([at % 10 for at in range(N)], Label()),
        ([at % 60 for at in range(N)], Label(number=True, scale="standard")),
        ([at * 0.25 for at in range(N)], Label(number=True, scale="standard")),
    ],
)
def test_the_label_is_classes_or_a_number(values: list[Any], declared: Label) -> None:
    assert guesses("y", y=values)["y"].declared == declared


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["yes"] * N, "the same in every record"),
        ([1.5] * N, "the same in every record"),
        (["yes", None] * (N // 2), "no value in 100 of 200 records"),
        ([datetime.date(2024, 1, 1 + at % 28) for at in range(N)], "dates or times"),
        ([f"A-{at}" for at in range(N)], "200 different values"),
        ([float("inf")] + [0.5] * (N - 1), "infinite"),
    ],
)
def test_a_label_that_cannot_be_learnt_is_an_error_in_words(values: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        guesses("y", y=values)


def test_a_misspelt_label_names_the_nearest_column_and_no_inputs_are_an_error() -> None:
    with pytest.raises(DataError, match="no column 'lable'") as caught:
        guesses("lable")
    assert "label" in caught.value.hint
    table = pa.table({"label": LABEL, "row": list(range(N))})
    with pytest.raises(DataError, match="no column is left") as caught:
        guess(table.schema, [table], "label", {})
    assert "row: it numbers the records" in caught.value.hint


def test_a_column_with_more_values_than_are_counted_is_judged_by_those_counted() -> None:
    many = 3 * COUNTED
    table = pa.table(
        {
            "label": ["a", "b"] * (many // 2),
            "token": [f"t{at}" for at in range(many)],
            "user": [f"u{at // 3}" for at in range(many)],
            "number": [float(at) for at in range(many)],
        }
    )
    pieces = [table.slice(start, 4096) for start in range(0, many, 4096)]
    token, user, number = guess(table.schema, pieces, "label", {})[1][1:]
    assert token.declared is None
    assert "more than 10000 different values" in token.why
    assert (user.declared, number.declared) == (Category(), Number())
    assert number.why == "0 to 29999"
