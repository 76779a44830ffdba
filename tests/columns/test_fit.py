"""What is fitted is what the whole table has, however it is cut; what cannot be fitted is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trueline.columns import Category, Image, Label, Number, Text
from trueline.columns.declared import Declared, find_faults
from trueline.columns.fitted import decode, encode
from trueline.errors import BundleError, DataError, MissingValues
from worlds.columns import DECLARED, fitted, table_of


def test_numbers_are_fitted_as_pandas_would_over_the_whole_table() -> None:
    table = table_of()
    made = fitted(table, DECLARED)
    ages = np.array([age for age in table["age"].to_pylist() if age is not None])
    visits = np.array([one for one in table["visits"].to_pylist() if one is not None], float)
    age, visit = made["age"], made["visits"]
    assert (age.offset, age.factor, age.fill) == pytest.approx((ages.mean(), ages.std(), ages.mean()), rel=1e-14)
    assert (visit.offset, visit.factor, visit.fill) == (visits.min(), np.ptp(visits), np.median(visits))
    assert (age.missing, age.low, age.high) == (500 - len(ages), ages.min(), ages.max())
    assert (made.records, made.num_numbers, made.num_classes) == (500, 3, 2)


@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_pieces_and_their_order_change_nothing(rows: int) -> None:
    table = table_of(1)
    turned = table.take(np.random.default_rng(2).permutation(len(table)))
    assert fitted(table, DECLARED, rows) == fitted(turned, DECLARED, 11)
    assert fitted(table, DECLARED, rows).digest == fitted(turned, DECLARED, 500).digest


def test_categories_are_sorted_and_empty_cells_are_none() -> None:
    made = fitted(table_of(), DECLARED)
    assert made["city"].values == ("Berlin", "São Paulo", "東京")
    assert made["city"].size == 5
    assert made.classes == ("<=50K", ">50K")


def test_whole_numbers_are_in_the_order_of_numbers_and_exact_at_any_size() -> None:
    large = 2**63 - 1
    table = pa.table({"id": pa.array([10, 9, large, large - 1, None], pa.int64()), "label": [10, 9, 2, 10, 9]})
    made = fitted(table, {"id": Category(), "label": Label()})
    assert made["id"].values == ("9", "10", str(large - 1), str(large))
    assert made.classes == ("2", "9", "10")


def test_rare_values_share_an_index_and_a_vocabulary_is_the_most_frequent_words() -> None:
    table = pa.table({"city": ["a", "a", "b"], "text": ["x y x", "Y z!", "x"], "label": [0, 1, 0]})
    made = fitted(table, {"city": Category(rare=2), "text": Text(max_length=2, vocabulary=2), "label": Label()})
    assert made["city"].values == ("a",)
    assert (made["text"].words, made["text"].cut) == (("x", "y"), 2)


def test_a_dictionary_column_is_fitted_as_its_values() -> None:
    coded = pa.table({"c": pa.array(["b", "a", None]).dictionary_encode(), "label": [True, False, True]})
    made = fitted(coded, {"c": Category(), "label": Label()})
    assert (made["c"].values, made.classes) == (("a", "b"), ("false", "true"))


@pytest.mark.parametrize(
    ("column", "declared", "words"),
    [
        (["a", "b", "c"], Number(), "holds text|is text, expected numbers"),
        ([1, 2, 3], Text(max_length=3), "holds whole values, expected text"),
        ([1, 2, 3], Image(size=4), "expected encoded images"),
        ([1.0, None, 3.0], Number(), "no value in 1 of 3 records, first in row 2"),
        (["a", "", "c"], Category(missing="error"), "no value in 1 of 3 records, first in row 2"),
        ([1.0, float("inf"), 2.0], Number(), "infinite number, first in row 2"),
        ([None, None, float("nan")], Number(missing="mean"), "no value in any record"),
        ([0.5, 1.5, 2.5], Label(), "fractions"),
        (["a", None, "b"], Label(), "no value in 1 of 3 records"),
        (["a", "a", "a"], Label(), "one value a"),
    ],
)
def test_what_cannot_be_fitted_names_the_column_and_the_way_out(
    column: list[Any], declared: Declared, words: str
) -> None:
    table = pa.table({"x": column, "other": [1.0, 2.0, 3.0]})
    with pytest.raises(DataError, match=words) as caught:
        fitted(table, {"x": declared, "other": Number()})
    assert "'x'" in caught.value.message
    assert caught.value.hint or isinstance(declared, Number | Label)


def test_a_column_that_is_not_there_gets_the_nearest_name() -> None:
    with pytest.raises(DataError, match="declares column 'citty'") as caught:
        fitted(table_of(), {"citty": Category()})
    assert caught.value.hint == "did you mean 'city'?"


def test_missing_values_are_counted_over_all_records() -> None:
    with pytest.raises(MissingValues, match=r"in 2 of 20 records, first in row 9"):
        fitted(pa.table({"x": [1.0] * 8 + [None] + [1.0] * 10 + [None]}), {"x": Number()}, rows=3)


def test_faulty_declarations_are_all_named() -> None:
    faults = list(
        find_faults(
            {"a": Number(scale="log"), "b": Category, "c": Text(max_length=0), "d-e": Category(), "d_e": Category()}
        )
    )  # type: ignore[arg-type]
    assert [fault.partition(":")[0].partition(" ")[0] for fault in faults] == [
        "columns['a']", "columns['b']", "columns['c']", "two",
    ]  # fmt: skip
    assert "needs brackets" in faults[1]
    assert next(iter(find_faults(["age"]))).startswith("columns is list")


def test_it_is_kept_as_json_and_what_is_no_such_json_is_refused() -> None:
    made = fitted(table_of(), DECLARED)
    text = encode(made)
    assert decode(text, "columns.json") == made
    assert encode(decode(text, "columns.json")) == text
    for damaged in (text[:-9], text.replace(b'"max_length": 4', b'"max_length": 0'), b"{}"):
        with pytest.raises(BundleError, match=r"columns\.json holds"):
            decode(damaged, "columns.json")
