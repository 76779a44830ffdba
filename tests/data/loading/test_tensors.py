"""Columns become tensors without a copy, where the memory may be written, and nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from trueline.data.loading.tensors import tensor
from trueline.errors import DataError


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.float16(), pa.float32(),
     pa.float64(), pa.bool_()],
)  # fmt: skip
def test_numbers_keep_their_type_whole_in_slices_and_in_several_pieces(kind: pa.DataType) -> None:
    values = np.array([0, 1, 1, 0, 1, 0, 0], kind.to_pandas_dtype())
    array = pa.array(values, kind)
    for found in (array, pa.chunked_array([array]), pa.chunked_array([array[:3], array[3:]])):
        assert tensor(found).tolist() == values.tolist()
        assert tensor(found).dtype == torch.from_numpy(values).dtype
    assert tensor(array.slice(2, 3)).tolist() == values[2:5].tolist()
    assert tensor(array.slice(2, 0)).shape == (0,)


@pytest.mark.parametrize("kind", [pa.list_(pa.int16()), pa.large_list(pa.int16()), pa.list_(pa.int16(), 3)])
def test_lists_of_one_length_have_it_as_a_dimension_also_in_a_slice(kind: pa.DataType) -> None:
    array = pa.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], kind)
    assert tensor(array).tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert tensor(array.slice(1)).tolist() == [[4, 5, 6], [7, 8, 9]]
    assert tensor(pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])[1:]).tolist() == [[[5, 6], [7, 8]]]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)])
def test_binary_of_one_length_is_bytes_also_in_a_slice(kind: pa.DataType) -> None:
    array = pa.array([b"ab", b"cd", b"ef"], kind)
    assert tensor(array).tolist() == [[97, 98], [99, 100], [101, 102]]
    assert tensor(array.slice(1, 1)).tolist() == [[99, 100]]
    assert (tensor(array).dtype, len(tensor(array.slice(3)))) == (torch.uint8, 0)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (pa.array([1, None]), "'c' has 1 records without a value"),
        (pa.array([[1, None], [2, 3]]), "'c' has lists with 1 missing values"),
        (pa.array([[[1], None]]), "'c' has lists with 1 missing values"),
        (pa.array([[1, 2], [3]]), "'c' has lists of several lengths, from 1 to 2"),
        (pa.array([b"ab", b"", b"abcd"]), "'c' has values of several lengths, from 0 to 4"),
        (pa.array([[b"a"], [None]]), "'c' has lists with 1 missing values"),
        (pa.array(["a"]), "'c' is string"),
        (pa.array([{"a": 1}]), "'c' is struct"),
        (pa.array([1], pa.timestamp("s")), "'c' is timestamp"),
        (pa.array(["a"]).dictionary_encode(), "'c' is dictionary"),
    ],
)
def test_what_makes_no_tensor_is_refused_with_the_column(array: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        tensor(array, "c")


def test_memory_that_may_be_written_is_not_copied_and_a_mapped_file_is(tmp_path: Path) -> None:
    made = pa.concat_arrays([pa.array([1.0, 2.0]), pa.array([3.0])])
    tensor(made).fill_(7)
    assert made.to_pylist() == [7, 7, 7]
    with pa.ipc.new_file(tmp_path / "t.arrow", pa.schema({"x": pa.float64()})) as writer:
        writer.write_table(pa.table({"x": made}))
    with pa.memory_map(str(tmp_path / "t.arrow")) as source:
        mapped = pa.ipc.open_file(source).read_all()["x"]
    tensor(mapped).fill_(1)
    assert mapped.to_pylist() == [7, 7, 7]
