"""Lists of numbers of unequal length: read from lists and from texts, scaled, cut, filled up and masked alike."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from trueline.columns import Label, Number, Series, Text
from trueline.columns.cells import cell_of_text
from trueline.columns.guess import guess
from trueline.columns.series import lists_of_array, lists_of_cells
from trueline.data.open import open_records
from trueline.errors import DataError, MissingValues, RecipeError
from worlds.columns import fitted

BEATS: list[Any] = [[1.0, 2.0, 6.0], [], None, [3.0], [0.0, None, 6.0, 3.0, 3.0]]
LABELS = ["a", "b", "a", "b", "a"]
TABLE = pa.table({"beats": BEATS, "label": LABELS})
PLAIN = Series(max_length=3, scale="none", pad=-1.0)


def made(declared: Series, table: pa.Table = TABLE) -> Any:
    return fitted(table, {"beats": declared, "label": Label()}, rows=2)


def test_lists_are_cut_and_filled_up_and_the_mask_says_where_numbers_are() -> None:
    inputs, _ = made(PLAIN).encode_table(TABLE)
    assert inputs["beats"].tolist() == [[1, 2, 6], [-1, -1, -1], [-1, -1, -1], [3, -1, -1], [0, -1, 6]]
    assert inputs["beats_mask"].tolist() == [
        [True] * 3, [False] * 3, [False] * 3, [True, False, False], [True, False, True],
    ]  # fmt: skip
    assert (inputs["beats"].dtype, inputs["beats_mask"].dtype) == (np.float32, np.bool_)
    assert list(made(Series(max_length=3, mask=False)).encode_table(TABLE)[0]) == ["beats"]


def test_numbers_are_scaled_over_all_lists_and_padding_is_as_the_model_sees_it() -> None:
    numbers = np.array([1, 2, 6, 3, 0, 6, 3, 3], np.float64)
    column = made(Series(max_length=5, pad=0.25))["beats"]
    assert (column.offset, column.factor) == pytest.approx((numbers.mean(), numbers.std()))
    assert (column.low, column.high, column.longest, column.cut, column.gaps, column.missing) == (0, 6, 5, 0, 1, 1)
    inputs, _ = made(Series(max_length=5, pad=0.25)).encode_table(TABLE)
    scaled = ((numbers - numbers.mean()) / numbers.std()).astype(np.float32)
    assert inputs["beats"][4].tolist() == [scaled[4], 0.25, scaled[5], scaled[6], scaled[7]]
    assert made(Series(max_length=2))["beats"].cut == 2
    shrunk = made(Series(max_length=3, scale="minmax")).encode_table(TABLE)[0]["beats"]
    assert shrunk[0].tolist() == pytest.approx([1 / 6, 2 / 6, 1])


@pytest.mark.parametrize("declared", [PLAIN, Series(max_length=4), Series(max_length=9, scale="minmax", pad=2)])
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.int64()), pa.string()]
)
def test_a_request_is_encoded_as_the_training_records_to_the_bit(declared: Series, kind: pa.DataType) -> None:
    cells = [json.dumps(one) if one is not None else None for one in BEATS] if kind == pa.string() else BEATS
    table = pa.table({"beats": pa.array(cells, kind), "label": LABELS})
    columns = made(declared, table)
    assert [row["beats"] for row in columns.rows_of_table(table)] == BEATS
    of_table, _ = columns.encode_table(table)
    of_rows = columns.encode_rows(columns.rows_of_table(table))
    of_lists = columns.encode_rows([{"beats": one} for one in BEATS])
    for name in ("beats", "beats_mask"):
        assert of_table[name].tobytes() == of_rows[name].tobytes() == of_lists[name].tobytes()


def test_a_column_of_one_length_and_a_slice_of_a_table_are_read_too() -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    found = lists_of_array(fixed, "x")
    assert (found.numbers.tolist(), found.sizes.tolist(), found.absent.tolist()) == (
        [1, 2, 3, 4], [2, 0, 2], [False, True, False],
    )  # fmt: skip
    part = lists_of_array(pa.array([[9.0], [1.0, 2.0], [3.0]]).slice(1), "x")
    assert (part.numbers.tolist(), part.sizes.tolist()) == ([1, 2, 3], [2, 1])


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[1.5, 2, -3e2]", [1.5, 2, -300]), ("1.5 2\t-3e2", [1.5, 2, -300]), ("1.5;2; -3e2", [1.5, 2, -300]),
        ("[1. 2.\n 3.]", [1, 2, 3]), ("[]", []), ("7", [7]), ("[1, nan, 2]", [1, None, 2]), ("1,,2", [1, None, 2]),
        ("[1, None, null]", [1, None, None]),
    ],
)  # fmt: skip
def test_texts_of_csv_are_lists_as_tools_write_them(text: str, numbers: list[float | None]) -> None:
    found = lists_of_cells([text], "x")
    assert [None if math.isnan(one) else one for one in found.numbers.tolist()] == numbers


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("1 2 x", "column 'x' of record 1: expected a number at place 2 of the list, got the text 'x'"),
        ("1,5;2,5", r"place 0 of the list, got the text '1,5'"),
        ([1, "2"], "place 1 of the list, got the text '2'"),
        ([1, True], "place 1 of the list, got the truth value"),
        ([[1]], "place 0 of the list, got a list"),
        ([1, math.inf], "place 1 of the list, got inf"),
        ([10**400], "place 0 of the list"),
        (5, "column 'x' of record 1: expected a list of numbers, got the whole number '5'"),
        ({"a": 1}, "expected a list of numbers, got a object"),
    ],
)
def test_what_is_no_list_of_numbers_is_named_by_its_place(cell: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        lists_of_cells([[1.0], cell], "x")


def test_a_number_beyond_float32_is_refused_and_never_becomes_infinite() -> None:
    with pytest.raises(DataError, match=r"1e.300 at place 1 of the list is a number that float32 cannot hold"):
        made(PLAIN).encode_rows([{"beats": [0, 1e300]}])


def test_a_missing_list_and_a_gap_are_errors_where_they_are_declared_so() -> None:
    strict = Series(max_length=3, missing="error")
    with pytest.raises(MissingValues, match="a gap inside of a list, first in row 4"):
        made(strict, TABLE.filter(pa.array([True, True, False, True, True])))
    with pytest.raises(MissingValues, match="column 'beats' has no value in 1 of 4 records, first in row 3") as caught:
        made(strict, TABLE.slice(0, 4))
    assert "Series(missing=" in caught.value.hint
    columns = made(strict, TABLE.slice(0, 2))
    assert columns.encode_rows([{"beats": []}])["beats_mask"].any() == np.False_
    for cell in (None, [1, None]):
        with pytest.raises(MissingValues, match="column 'beats' has no value in 1 of 1 records"):
            columns.encode_rows([{"beats": cell}])


@pytest.mark.parametrize(
    ("declared", "fault"),
    [
        (Series(max_length=0), "max_length=0"), (Series(max_length=2, scale="other"), "scale='other'"),  # type: ignore[arg-type]
        (Series(max_length=2, pad=math.nan), "pad=nan"), (Series(max_length=2, missing="mean"), "missing='mean'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_is_named(declared: Series, fault: str) -> None:
    assert any(fault in one for one in declared.faults())


def test_a_column_of_another_kind_is_named_with_the_declaration_that_fits() -> None:
    for declared, words in (
        (Number(), r"is list, expected numbers for Number.*"), (Text(max_length=3), "holds list values, expected text"),
        (Label(), "holds lists of numbers, which are no label"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=words) as caught:
            fitted(TABLE, {"beats": declared})
        assert "Series(max_length=...)" in caught.value.hint or isinstance(declared, Text)
    with pytest.raises(DataError, match="holds number values, expected lists of numbers for Series"):
        fitted(pa.table({"x": [1.5, 2.5], "label": [0, 1]}), {"x": PLAIN, "label": Label()})


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_files_of_text_hold_lists_too(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"beats.{form}"
    lines = [json.dumps({"beats": one, "label": label}) for one, label in zip(BEATS, LABELS, strict=True)]
    if form == "csv":
        cells = ["" if one is None else json.dumps(one) for one in BEATS]
        lines = ["beats,label", *(f'"{cell}",{label}' for cell, label in zip(cells, LABELS, strict=True))]
    path.write_text("\n".join(lines) + "\n")
    records = open_records(str(path))
    table = records.load(0, 0, 5)
    inputs, _ = made(PLAIN, table).encode_table(table)
    assert inputs["beats"].tolist() == made(PLAIN).encode_table(TABLE)[0]["beats"].tolist()


def test_a_cell_of_a_csv_request_stays_a_text_that_is_read_as_a_list() -> None:
    columns = made(PLAIN)
    cell = cell_of_text("[1, 2]", "beats", columns["beats"].type, 0)
    assert columns.encode_rows([{"beats": cell}])["beats"].tolist() == [[1, 2, -1]]


def test_lists_in_columns_and_in_texts_are_guessed_as_series() -> None:
    many = 40
    lists = [[float(at)] * (at % 11) for at in range(many)]
    table = pa.table({
        "beats": lists, "spoken": [json.dumps(one) for one in lists], "phone": [f"12 {at}" for at in range(many)],
        "label": ["a", "b"] * (many // 2),
    })  # fmt: skip
    _, found = guess(table.schema, [table.slice(0, 7), table.slice(7)], "label", {})
    declared = {one.name: one.declared for one in found}
    assert declared["beats"] == declared["spoken"] == Series(max_length=16)
    assert not isinstance(declared["phone"], Series)
    assert "lists of 0 to 10 numbers, 1 to 39" in next(one.why for one in found if one.name == "beats")
    with pytest.raises(DataError, match="'beats' cannot be the label: it holds lists of numbers"):
        guess(table.schema, [table], "beats", {})


def test_a_model_input_has_one_column(tmp_path: Path) -> None:
    from trueline.columns.declared import check

    with pytest.raises(RecipeError, match="two columns would be the model's input 'beats_mask'"):
        check({"beats": PLAIN, "beats_mask": Text(max_length=2)})
