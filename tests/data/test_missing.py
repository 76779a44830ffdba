"""Promises about missing values: counted before training, refused with column, count and row, or filled by rule."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trueline.data import missing
from trueline.data.loading.tensors import DefaultFeed, tensor
from trueline.data.missing import Missing
from trueline.data.open import open_source
from trueline.data.source import find_rule_fault
from trueline.errors import DataError, MissingValues


def write(folder, rows, header="age,income,label"):
    path = folder / "rows.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def source_of(uri, rules="refuse", feed=None, mode="training", training=None):
    return open_source(uri, feed or DefaultFeed(), mode=mode, missing=Missing(rules, lambda: training or uri))


ROWS = ["1,10,0", "2,,1", "3,30,0", ",,1", "5,50,0"]


@pytest.mark.parametrize("absent", ["", "NA", "nan", "NULL"])
def test_empty_cells_are_refused_with_columns_counts_first_row_and_what_to_do(tmp_path, absent):
    rows = [",".join(cell or absent for cell in row.split(",")) for row in ROWS]
    with pytest.raises(MissingValues) as caught:
        source_of(write(tmp_path, rows)).check_missing()
    assert "column 'income' has no value in 2 of 5 records, first in row 2 (record 1 of " in caught.value.message
    assert "column 'age' has no value in 1 of 5 records, first in row 4 (record 3 of " in caught.value.message
    assert 'missing = {"income": "mean"}' in caught.value.hint


def test_an_empty_label_is_refused_without_the_offer_of_a_mean(tmp_path):
    with pytest.raises(MissingValues, match="column 'label' has no value in 1 of 3 records, first in row 2") as caught:
        source_of(write(tmp_path, ["1,10,0", "2,20,", "3,30,1"])).check_missing()
    assert "mean" not in caught.value.hint
    assert "leave those without 'label' out" in caught.value.hint


def test_a_blank_among_numbers_that_makes_a_feed_fail_on_all_records_is_named_with_count_and_row(tmp_path):
    def feed(records, mode):
        return tuple(torch.tensor(records[name].to_numpy()) for name in ("income", "label"))

    rows = [f"{at},{' ' if at in (2, 5) else at},{at % 2}" for at in range(8)]
    with pytest.raises(MissingValues) as caught:
        source_of(write(tmp_path, rows), feed=feed).check_missing()
    assert "column 'income' has text among numbers, which feed fails on (' '), in 2 records" in caught.value.message
    assert "first in row 3 (record 2" in caught.value.message
    assert "so the column is read as text, and feed(records, 'training') fails on 2 records" in caught.value.message
    assert "TypeError" in caught.value.message


def test_a_batch_with_an_empty_cell_is_an_error_of_the_schema(tmp_path):
    with pytest.raises(MissingValues, match="column 'income' has 1 records without a value"):
        source_of(write(tmp_path, ROWS)).read(np.array([0, 1]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, float("nan"), 3.0], "column 'x' has no value in 1 of 3 records, first in row 2"),
        ([1.0, 2.0, float("inf")], "column 'x' has a value that float32 cannot hold in 1 of 3 records, first in row 3"),
        ([-1e300, 2.0, 3.0], "column 'x' has a value that float32 cannot hold in 1 of 3 records, first in row 1"),
        ([None, 2.0, None], "column 'x' has no value in 2 of 3 records, first in row 1"),
    ],
)
def test_nan_nulls_and_values_out_of_range_in_parquet_are_refused(tmp_path, values, words):
    pq.write_table(pa.table({"x": pa.array(values, pa.float64()), "label": [0, 1, 0]}), tmp_path / "a.parquet")
    with pytest.raises(MissingValues) as caught:
        source_of(str(tmp_path / "a.parquet")).check_missing()
    assert words in caught.value.message


PAIRS = [[1.0, 2.0], [1.0, float("nan")], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (pa.array(PAIRS), "no value, or a list with a missing one, in 1 of 3 records, first in row 2"),
        (pa.array([[1.0, 2.0], [None, 2.0], None]), "a list with a missing one, in 2 of 3 records, first in row 2"),
        (pa.array(PAIRS, pa.list_(pa.float32(), 2)), "a list with a missing one, in 1 of 3 records, first in row 2"),
        (pa.array([PAIRS[:1], PAIRS[2:], PAIRS[1:2]]), "a list with a missing one, in 1 of 3 records, first in row 3"),
        (pa.array([[1.0], [1e300], [float("-inf")]]), "float32 cannot hold in 2 of 3 records, first in row 2"),
        (pa.array([[1], [None], [2]], pa.large_list(pa.int64())), "missing one, in 1 of 3 records, first in row 2"),
    ],
)
def test_gaps_and_values_out_of_range_in_lists_are_refused_before_a_batch_has_them(tmp_path, values, words):
    table = pa.table({"x": values, "label": [0, 1, 0]})
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(MissingValues, match=words.replace("3 records", "4 records")):
        source_of(str(tmp_path / "a.parquet")).check_missing()
    source_of(str(tmp_path / "a.parquet"), "keep").check_missing()


def test_long_lists_are_counted_in_a_sample_of_as_many_cells(tmp_path, monkeypatch):
    """1,000 cells are 20 records of 49 numbers and a label; the last ones of 20 groups have no place there."""
    values = np.zeros((200, 49))
    values[199, 3] = np.nan
    table = pa.table({"x": list(values), "label": [0] * 200})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    monkeypatch.setattr(missing, "MAX_CELLS", 1_000)
    count = missing.count_missing(source_of(str(tmp_path / "a.parquet")).records, ["x"])
    assert (count.seen, count.total) == (10, 200)


def test_a_label_without_a_value_is_refused_whatever_the_rule_for_all_is(tmp_path):
    uri = write(tmp_path, ["1,10,0", "2,20,"])
    with pytest.raises(MissingValues, match="column 'label' has no value in 1 of 2 records, first in row 2"):
        source_of(uri, "mean").check_missing()


@pytest.mark.parametrize("rules", ["refuse", "mean", {"x": "zero"}])
def test_a_number_that_float32_cannot_hold_is_refused_whatever_fills_gaps_and_whoever_makes_the_tensors(
    tmp_path, rules
):
    """A mean would be infinite itself. A feed that clips is left alone, and so is a column that none reads."""
    uri = write(tmp_path, ["1,0", "inf,1", ",1", "1e39,0"], header="x,label")

    def careless(records, mode):
        return torch.tensor(np.array(records["x"].fill_null(0).to_numpy(), np.float32)), tensor(records["label"])

    def clipped(records, mode):
        return torch.tensor(records["x"].fill_null(0).to_numpy().clip(-9, 9)), tensor(records["label"])

    for feed in (None, careless):
        with pytest.raises(MissingValues, match=r"float32 cannot hold in 2 of 4 records, first in row 2"):
            source_of(uri, rules, feed).check_missing()
    source_of(uri, rules, clipped).check_missing()
    source_of(uri, rules, lambda records, mode: (tensor(records["label"]), tensor(records["label"]))).check_missing()


def test_a_feed_that_casts_a_gap_to_a_whole_number_is_refused(tmp_path):
    uri = write(tmp_path, ["1,0", "2,", "3,1"], header="x,label")

    def cast(records, mode):
        with np.errstate(invalid="ignore"):
            return tensor(records["x"]), torch.tensor(records["label"].to_numpy().astype(np.int64))

    with pytest.raises(MissingValues, match="column 'label' has no value in 1 of 3 records, first in row 2"):
        source_of(uri, feed=cast).check_missing()


@pytest.mark.parametrize(
    ("rules", "ages", "incomes"),
    [
        ("mean", [1, 2, 3, 11 / 4, 5], [10, 30, 30, 30, 50]),
        ("zero", [1, 2, 3, 0, 5], [10, 0, 30, 0, 50]),
        ({"age": -1, "income": 0.5}, [1, 2, 3, -1, 5], [10, 0.5, 30, 0.5, 50]),
    ],
)
def test_a_rule_fills_every_batch_and_every_mode_with_the_same_values(tmp_path, rules, ages, incomes):
    uri = write(tmp_path, ROWS)
    source = source_of(uri, rules)
    source.check_missing()
    expected = np.array([ages, incomes], np.float32).T
    np.testing.assert_array_equal(source.read(np.arange(5)).inputs, expected)
    np.testing.assert_array_equal(source.read(np.array([3, 0])).inputs, expected[[3, 0]])


def test_nan_and_nulls_of_parquet_are_filled_by_the_mean_of_the_values_that_there_are(tmp_path):
    values = pa.array([1.0, float("nan"), None, 5.0], pa.float64())
    pq.write_table(pa.table({"x": values, "label": [0, 1, 0, 1]}), tmp_path / "a.parquet")
    source = source_of(str(tmp_path / "a.parquet"), "mean")
    source.check_missing()
    assert source.read(np.arange(4)).inputs.tolist() == [1, 3, 3, 5]


def test_the_mean_of_held_out_records_is_that_of_the_training_records(tmp_path):
    uri = write(tmp_path, ROWS)
    (tmp_path / "held").mkdir()
    held = write(tmp_path / "held", ["7,,0", ",9,0"])
    found = source_of(held, "mean", mode="evaluation", training=uri).read(np.array([0, 1])).inputs
    np.testing.assert_array_equal(found, np.array([[7, 30], [11 / 4, 9]], np.float32))


def test_a_missing_text_is_a_category_of_its_own(tmp_path):
    uri = write(tmp_path, ["red,0", ",1", "blue,0"], header="colour,label")
    words = ["red", "blue", missing.MISSING]
    feed = DefaultFeed(lambda texts: torch.tensor([words.index(text) for text in texts]))
    source = source_of(uri, {"colour": "category"}, feed)
    source.check_missing()
    assert source.read(np.arange(3)).inputs.tolist() == [0, 2, 1]


def test_a_feed_that_handles_nulls_is_left_alone_and_one_that_makes_nan_of_them_is_refused(tmp_path):
    uri = write(tmp_path, ROWS)

    def careful(records, mode):
        return tensor(records["income"].fill_null(0)), tensor(records["label"])

    def careless(records, mode):
        return torch.from_numpy(records["income"].to_numpy().copy()), tensor(records["label"])

    source_of(uri, feed=careful).check_missing()
    with pytest.raises(MissingValues, match="column 'income' has no value in 2 of 5 records"):
        source_of(uri, feed=careless).check_missing()
    source_of(uri, "keep", careless).check_missing()


@pytest.mark.parametrize(
    ("rules", "words"),
    [({"income": "category"}, "that rule is for text"), ({"incom": "mean"}, "missing names column 'incom'")],
)
def test_a_rule_that_does_not_suit_its_column_is_refused_in_words(tmp_path, rules, words):
    with pytest.raises(DataError, match=words):
        source_of(write(tmp_path, ROWS), rules)


@pytest.mark.parametrize("rules", ["drop", 3, {"age": "median"}, {"age": True}, {"age": float("nan")}, None])
def test_an_unknown_rule_is_named_with_those_that_there_are(rules):
    assert "expected one of refuse, keep, mean, zero, category" in find_rule_fault(rules)


def test_of_more_records_than_can_be_read_in_a_moment_a_sample_is_counted_and_parquets_nulls_all_the_same(
    tmp_path, monkeypatch
):
    values = np.ones(1000)
    column = pa.array(values, mask=np.arange(1000) == 707)
    pq.write_table(pa.table({"x": column, "label": [0] * 1000}), tmp_path / "a.parquet", row_group_size=100)
    monkeypatch.setattr(missing, "MAX_CELLS", 100)
    with pytest.raises(MissingValues) as caught:
        source_of(str(tmp_path / "a.parquet")).check_missing()
    assert "in 1 of " in caught.value.message
    assert "first in row 708 (record 7 of " in caught.value.message


def parse(records, mode):
    return torch.tensor([float(one or 0) for one in records["x"].to_pylist()]), tensor(records["label"])


@pytest.mark.parametrize("stray", ["-", "?", "1,5", "n/a %"])
def test_text_among_numbers_that_a_feed_fails_on_is_refused_with_column_count_and_row(tmp_path, stray):
    rows = [f"{number},{number % 2}" for number in range(40)]
    rows[7] = rows[31] = f'"{stray}",1'
    with pytest.raises(MissingValues) as caught:
        source_of(write(tmp_path, rows, header="x,label"), feed=parse).check_missing()
    assert f"column 'x' has text among numbers, which feed fails on ('{stray}'), in 2 records" in caught.value.message
    assert "first in row 8 (record 7 of " in caught.value.message
    source_of(str(tmp_path / "rows.csv"), {"x": "keep"}, parse).check_missing()


def test_text_that_a_feed_takes_or_does_not_read_and_columns_of_words_are_left_alone(tmp_path):
    rows = [f"{number},{number % 2},{'red' if number % 3 else 4}" for number in range(40)]
    rows[7] = "-,1,red"
    uri = write(tmp_path, rows, header="x,label,colour")

    def careful(records, mode):
        return torch.tensor([0.0 if one == "-" else float(one) for one in records["x"].to_pylist()]), tensor(
            records["label"]
        )

    def of_labels(records, mode):
        return tensor(records["label"]), tensor(records["label"])

    def colours(records, mode):
        return torch.tensor([("red",).index(one) for one in records["colour"].to_pylist()]), tensor(records["label"])

    def broken(records, mode):
        raise ValueError("of any record")

    for feed in (careful, of_labels, colours, broken):
        source_of(uri, feed=feed).check_missing()
