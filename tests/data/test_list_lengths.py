"""Promises about lists of unequal lengths: counted before training, and refused where no batch of them can be made."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trueline.data.loading.tensors import DefaultFeed, tensor
from trueline.data.missing import Missing
from trueline.data.open import open_source
from trueline.errors import DataError, UnequalLengths


def source_of(folder, values, feed=None, rules="refuse"):
    table = pa.table({"x": values, "label": [0, 1] * (len(values) // 2)})
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    return open_source(str(folder / "a.parquet"), feed or DefaultFeed(), mode="training", missing=Missing(rules))


UNEQUAL = [
    (
        pa.array([[1, 2], [3, 4], [5], [6, 7, 8]]),
        r"column 'x' has lists of 1 to 3 values: row 1 has 2, and 2 of 4 records have another number, first in row 3",
    ),
    (pa.array([[1.0, 2.0], [], [3.0, 4.0], [5.0, 6.0]]), "lists of 0 to 2 values: row 1 has 2, and 1 of 4 records"),
    (
        pa.array([[[1, 2], [3, 4]], [[1, 2], [3]], [[1, 2], [3, 4]], [[1, 2], [3, 4]]]),
        r"lists of lists of many lengths: row 1 has 2 x 2, and 1 of 4 records have another number, first in row 2",
    ),
    (pa.array([[1], [2], [3], [4, 5]], pa.large_list(pa.int64())), r"first in row 4 \(record 1 of .*a.parquet#1\)"),
]


@pytest.mark.parametrize(("values", "words"), UNEQUAL)
def test_lists_of_several_lengths_are_refused_with_column_count_and_row(tmp_path, values, words):
    with pytest.raises(UnequalLengths, match=words) as caught:
        source_of(tmp_path, values).check_missing()
    assert f'columns = {{"x": Series(max_length={max(map(len, values.to_pylist()))})}}' in caught.value.hint


@pytest.mark.parametrize(("values", "words"), UNEQUAL)
def test_a_batch_of_several_lengths_is_an_error_of_the_schema(tmp_path, values, words):
    with pytest.raises(UnequalLengths, match="of several lengths"):
        source_of(tmp_path, values).read(np.arange(4))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[1, 2], [3, 4], [5, 6], [7, 8]]),
        pa.array([[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]),
        pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
        pa.array([[], [], [], []], pa.list_(pa.int64())),
        pa.array([1, 2, 3, 4]),
    ],
)
def test_lists_of_one_length_are_not_refused(tmp_path, values):
    source_of(tmp_path, values).check_missing()


def test_a_column_that_the_recipe_keeps_is_not_counted(tmp_path):
    source_of(tmp_path, UNEQUAL[0][0], rules="keep").check_missing()


def _stack(records, mode):
    return torch.tensor(np.stack(records["x"].to_pylist())), tensor(records["label"])


def _pad(records, mode):
    rows = [torch.tensor(row) for row in records["x"].to_pylist()]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), tensor(records["label"])


def _fail_alone(records, mode):
    if any(len(row) == 1 for row in records["x"].to_pylist()):
        raise ValueError("a broken record")
    return _pad(records, mode)


def test_a_feed_of_the_users_is_refused_where_it_fails_on_two_lengths_at_once_and_on_neither_alone(tmp_path):
    """What pads is left alone; a record that fails by itself is one to set aside."""
    with pytest.raises(UnequalLengths, match="lists of 1 to 3 values"):
        source_of(tmp_path, UNEQUAL[0][0], _stack).check_missing()
    source_of(tmp_path, UNEQUAL[0][0], _pad).check_missing()
    broken = source_of(tmp_path, UNEQUAL[0][0], _fail_alone)
    broken.check_missing()
    with pytest.raises(DataError, match="a broken record"):
        broken.read(np.array([2]))
