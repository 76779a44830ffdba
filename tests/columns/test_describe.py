"""What columns are, in words: as a reader of a page needs it."""

import pyarrow as pa

from trueline.columns import Image, Label, Number, Series, Text
from trueline.columns.describe import rows_of
from worlds.columns import DECLARED, fitted, table_of


def test_each_column_is_described_by_what_it_was_fitted_to() -> None:
    described = {name: (kind, words) for name, kind, words in rows_of(fitted(table_of(), DECLARED))}
    assert [kind for kind, _ in described.values()] == ["Number", "Number", "Category", "Text", "Series", "Label"]
    assert "scaled to mean 0 and deviation 1; a missing value becomes " in described["age"][1]
    assert ", the mean; " in described["age"][1]
    assert "scaled to 0 to 1; a missing value becomes " in described["visits"][1]
    assert described["city"][1].startswith("3 values: Berlin, São Paulo, 東京; others are unseen; ")
    assert described["city"][1].endswith(" of 500 records had no value")
    assert described["review"][1].endswith(" words; texts longer than 4 are cut")
    assert "longest had 5, and longer ones than 4 are cut" in described["spent"][1]
    assert described["income"][1].startswith("2 classes, with their records: <=50K (")


def test_numbers_to_learn_images_and_many_values_are_described_too() -> None:
    table = pa.table({
        "x": [1.5, 2.5], "many": [f"v{at}" for at in range(2)], "picture": [b"1", b"2"], "price": [1.0, 3.0],
        "beats": [[1.0], [2.0, 4.0]],
    })  # fmt: skip
    declared = {
        "x": Number(scale="none"), "many": Text(max_length=9, unit="characters"),
        "picture": Image(size=(4, 6), channels=1), "beats": Series(max_length=2, scale="none"),
        "price": Label(number=True, scale="minmax"),
    }  # fmt: skip
    assert [row[2] for row in rows_of(fitted(table, declared))] == [
        "1.5 to 2.5; a missing value is an error",
        "3 characters; texts longer than 9 are cut",
        "grey, resized to 4 x 6",
        "lists of numbers from 1 to 4; the longest had 2, and longer ones than 2 are cut",
        "a number from 1 to 3, scaled to 0 to 1",
    ]
