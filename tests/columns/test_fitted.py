"""Records of a table and records of a request become the same arrays; what does not fit is named."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as Pillow

from trueline.columns import Category, Image, Label, Number, Text, answers
from trueline.columns.cells import NULL_SPELLINGS, cell_of_text
from trueline.errors import DataError, MissingValues
from worlds.columns import DECLARED, fitted, table_of


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes() for name in left
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_request_is_encoded_as_the_training_records_to_the_bit(seed: int) -> None:
    made, other = fitted(table_of(0), DECLARED), table_of(seed + 10, 90)
    inputs, labels = made.encode_table(other)
    assert same(inputs, made.encode_rows(made.rows_of_table(other)))
    assert list(inputs) == ["numbers", "city", "review", "review_mask", "spent", "spent_mask"]
    assert [(array.dtype.name, array.shape) for array in inputs.values()] == [
        ("float32", (90, 3)), ("int64", (90,)), ("int64", (90, 4)), ("bool", (90, 4)),
        ("float32", (90, 4)), ("bool", (90, 4)),
    ]  # fmt: skip
    assert labels.tolist() == [int(one == ">50K") for one in other["income"].to_pylist()]


def test_missing_and_unseen_have_indices_of_their_own() -> None:
    made = fitted(table_of(), DECLARED)
    inputs = made.encode_rows([{"city": "Rome"}, {"city": None}, {"city": ""}, {}, {"city": "Berlin"}])
    assert inputs["city"].tolist() == [1, 0, 0, 0, 2]
    assert inputs["numbers"][0].tolist() == pytest.approx([0.0, made.encode_rows([{}])["numbers"][0, 1], 1.0])


def test_a_whole_number_is_one_category_whether_it_comes_as_int_or_as_float() -> None:
    table = pa.table({"floor": pa.array([1, 2, 3, None], pa.int64()), "label": [0, 1, 0, 1]})
    made = fitted(table, {"floor": Category(), "label": Label()})
    as_floats = pa.table({"floor": [2.0, None, 9.0], "label": [0.0, 1.0, 0.0]})
    inputs, labels = made.encode_table(as_floats)
    assert (inputs["floor"].tolist(), labels.tolist()) == ([3, 0, 1], [0, 1, 0])
    assert made.encode_rows([{"floor": 2}, {"floor": 2.0}])["floor"].tolist() == [3, 3]


def test_composed_and_decomposed_letters_are_one_text() -> None:
    table = pa.table({"c": ["é", "b"], "t": ["né", "x"], "label": [0, 1]})
    made = fitted(table, {"c": Category(), "t": Text(max_length=2), "label": Label()})
    composed, decomposed = ({"c": "\u00e9", "t": "n\u00e9"}, {"c": "e\u0301", "t": "ne\u0301"})
    assert same(made.encode_rows([composed]), made.encode_rows([decomposed]))


def test_texts_are_cut_and_filled_up_and_the_mask_says_where_words_are() -> None:
    made = fitted(pa.table({"t": ["a b c", "b"], "label": [0, 1]}), {"t": Text(max_length=2), "label": Label()})
    inputs = made.encode_rows([{"t": "b zzz c"}, {"t": ""}, {"t": None}])
    assert inputs["t"].tolist() == [[2, 1], [0, 0], [0, 0]]
    assert inputs["t_mask"].tolist() == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"age": "old"}, "column 'age' of record 0: expected a number, got the text 'old'|expected number"),
        ({"age": True}, "column 'age' of record 0: expected .*number, got the truth value 'True'"),
        ({"age": [1]}, "column 'age' of record 0: expected .*number, got a list"),
        ({"age": 10**400}, "column 'age' of record 0: expected a number that float64 holds"),
        ({"age": 1e300}, "column 'age' of record 0: .* float32 cannot hold"),
        ({"city": 5}, "column 'city' of record 0: expected text, got the whole number '5'"),
        ({"review": {"a": 1}}, "column 'review' of record 0: expected text, got a object"),
        ({"citty": "Rome"}, "record 0 has a column 'citty', which the model does not take; it takes age, visits"),
    ],
)
def test_a_wrong_cell_names_the_column_what_was_expected_and_what_came(record: dict[str, Any], words: str) -> None:
    made = fitted(table_of(), DECLARED)
    with pytest.raises(DataError, match=words):
        made.encode_rows([record])


def test_a_label_and_columns_that_were_not_declared_may_be_sent_and_are_not_read() -> None:
    table = table_of().append_column("row", pa.array(range(500)))
    made = fitted(table, DECLARED)
    assert made.ignored == ("row",)
    assert same(made.encode_rows([{"row": 1, "income": "?"}]), made.encode_rows([{}]))


def test_what_may_not_be_missing_is_refused_when_it_is() -> None:
    made = fitted(pa.table({"x": [1.0, 2.0], "c": ["a", "b"]}), {"x": Number(), "c": Category(missing="error")})
    for record in ({"c": "a"}, {"x": 1, "c": None}):
        with pytest.raises(MissingValues, match="has no value in 1 of 1 records"):
            made.encode_rows([record])


def test_a_label_that_training_did_not_have_is_an_error() -> None:
    made = fitted(table_of(), DECLARED)
    with pytest.raises(DataError, match="label 'income' of record 1 is 'much', expected one of the 2 classes"):
        made.encode_table(table_of(1, 2).set_column(5, "income", pa.array(["<=50K", "much"])))


def test_a_column_named_as_a_keyword_is_an_argument_of_a_model() -> None:
    made = fitted(pa.table({"class": ["a", "b"], "x y": ["a", "b"]}), {"class": Category(), "x y": Category()})
    assert list(made.encode_rows([{}])) == ["class_", "x_y"]


def test_images_of_any_size_and_mode_become_one_and_a_request_sends_base64() -> None:
    contents = []
    for mode, size in (("RGB", (9, 5)), ("L", (4, 4)), ("RGBA", (2, 7))):
        stream = io.BytesIO()
        Pillow.new(mode, size, 255 if mode == "L" else (255, 0, 0, 255)[: len(mode)]).save(stream, "PNG")
        contents.append(stream.getvalue())
    table = pa.table({"photo": pa.array(contents, pa.binary()), "label": ["a", "b", "a"]})
    made = fitted(table, {"photo": Image(size=(4, 6), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), "label": Label()})
    inputs, _ = made.encode_table(table)
    assert (inputs["photo"].shape, inputs["photo"].dtype) == ((3, 3, 4, 6), np.float32)
    assert inputs["photo"][0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert same(inputs, made.encode_rows([{"photo": base64.b64encode(one).decode()} for one in contents]))
    for cell in ("no base64!", base64.b64encode(b"no image").decode()):
        with pytest.raises(DataError, match="column 'photo' of record 0: expected"):
            made.encode_rows([{"photo": cell}])


def test_cells_of_csv_are_read_as_the_training_records_were() -> None:
    assert {cell_of_text(text, "c", "text", 0) for text in NULL_SPELLINGS} == {None}
    assert cell_of_text("2.5", "x", "number", 0) == 2.5
    assert cell_of_text("TRUE", "x", "boolean", 0) is True
    with pytest.raises(DataError, match="column 'x' of record 3: expected a whole number, got the text 'one'"):
        cell_of_text("one", "x", "whole", 3)


def test_answers_name_classes_with_their_probabilities() -> None:
    made = fitted(table_of(), DECLARED)
    logits = np.array([[0.0, 0.0], [0.0, np.log(3.0)]], np.float32)
    assert answers.records_of(made, {"output": logits})[1] == {
        "class": ">50K", "probabilities": {"<=50K": pytest.approx(0.25), ">50K": pytest.approx(0.75)},
    }  # fmt: skip
    one = answers.columns_of(made, {"output": np.array([[-1.0], [2.0]], np.float32)})
    assert one["class"].tolist() == ["<=50K", ">50K"]
    assert answers.columns_of(made, {"a": logits, "b": logits}) == {}


def test_numbers_are_scaled_back_in_answers() -> None:
    table = pa.table({"x": [1.0, 2.0, 3.0], "price": [100.0, 200.0, 600.0]})
    made = fitted(table, {"x": Number(), "price": Label(number=True, scale="standard")})
    _, labels = made.encode_table(table)
    back = answers.columns_of(made, {"output": labels[:, None]})["value"]
    assert back.tolist() == pytest.approx([100.0, 200.0, 600.0], rel=1e-6)
