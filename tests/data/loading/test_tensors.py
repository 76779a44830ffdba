"""Records become tensors by their columns, without a copy where the memory may be written, and nothing is guessed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trueline.data.loading.tensors import DefaultFeed, split_columns, tensor
from trueline.data.open import as_source
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


def fed(columns: dict[str, Any], mode: Any = "training") -> tuple[Any, Any]:
    table = pa.table(columns)
    feed = DefaultFeed()
    feed.check(table.schema, mode)
    return feed(table, mode)


def png(value: int, size: tuple[int, int] = (4, 2), mode: str = "RGB") -> bytes:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    out = io.BytesIO()
    image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(out, "PNG")
    return out.getvalue()


def test_plain_numbers_are_the_columns_of_one_tensor_and_the_label_is_apart() -> None:
    inputs, labels = fed({"a": [1, 2], "label": [0, 1], "b": [0.5, 0.25], "c": [True, False]})
    assert inputs.tolist() == [[1.0, 0.5, 1.0], [2.0, 0.25, 0.0]]
    assert (inputs.dtype, labels.dtype, labels.tolist()) == (torch.float32, torch.int64, [0, 1])
    alone, price = fed({"x": [3, 4], "Target": np.array([1.5, 2.5])})
    assert (alone.dtype, alone.tolist()) == (torch.int64, [3, 4]), "one input is passed as it is: ids stay ids"
    assert (price.dtype, price.tolist()) == (torch.float32, [1.5, 2.5])


def test_lists_of_one_length_are_tensors_of_that_width_however_they_are_nested() -> None:
    fixed = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.float64(), 3))
    inputs, _ = fed({"x": fixed, "label": [0, 1]})
    assert (inputs.dtype, inputs.tolist()) == (torch.float32, [[1, 2, 3], [4, 5, 6]])
    inputs, _ = fed({"x": [[[1, 2], [3, 4], [5, 6]]], "label": [0]})
    assert (inputs.dtype, tuple(inputs.shape)) == (torch.int64, (1, 3, 2))
    with pytest.raises(DataError, match="'x' has lists of several lengths"):
        fed({"x": [[1, 2, 3], [4]], "label": [0, 1]})
    with pytest.raises(DataError, match="'x' has lists of several lengths"):
        fed({"x": [[1, 2, 3], [4, 5, 6, 7, 8]], "label": [0, 1]})
    with pytest.raises(DataError, match="'x' has lists with 1 missing values"):
        fed({"x": [[1, None], [4, 5]], "label": [0, 1]})


def test_images_are_decoded_in_channels_and_from_0_to_1() -> None:
    inputs, _ = fed({"image": [png(255), png(0)], "label": [0, 1], "path": ["a.png", "b.png"]})
    assert (tuple(inputs.shape), inputs.dtype) == ((2, 3, 2, 4), torch.float32)
    assert inputs[0, :, 0, 0].tolist() == [1.0, 0.0, 0.0]
    grey, _ = fed({"image": [png(51, mode="L")], "label": [0]})
    assert (tuple(grey.shape), round(float(grey[0, 0, 0, 0]), 3)) == ((1, 1, 2, 4), 0.2)
    with pytest.raises(DataError, match="images of 2 sizes"):
        fed({"image": [png(1), png(1, (3, 3))], "label": [0, 1]})
    with pytest.raises(DataError, match="record 1 of the batch is no image in column 'image'"):
        fed({"image": [png(1), b"text"], "label": [0, 1]})


def test_text_is_what_a_tokenizer_returns() -> None:
    feed = DefaultFeed(lambda texts: {"ids": torch.tensor([[len(text)] for text in texts])})
    inputs, _ = feed(pa.table({"text": ["ab", "c"], "label": [0, 1]}), "training")
    assert inputs["ids"].tolist() == [[2], [1]]


def test_inputs_of_several_kinds_are_passed_by_name() -> None:
    inputs, _ = fed({"id": [7, 8], "x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]})
    assert sorted(inputs) == ["id", "x"]
    assert (inputs["id"].dtype, tuple(inputs["x"].shape)) == (torch.int64, (2, 2))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"x": pa.float32()}, "no column is the labels: the records have x"),
        ({"x": pa.float32(), "label": pa.int64(), "y": pa.int64()}, "label, y could each be the labels"),
        ({"label": pa.int64()}, "nothing to learn from"),
        ({"t": pa.string(), "label": pa.int64()}, "column 't' is text, and has no declaration"),
        ({"t": pa.timestamp("s"), "label": pa.int64()}, "column 't' is timestamp"),
        ({"t": pa.list_(pa.string()), "label": pa.int64()}, "column 't' is list<"),
    ],
)
def test_columns_that_leave_a_guess_are_refused_before_a_record_is_read(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        DefaultFeed().check(pa.schema(list(schema.items())), "training")


def test_missing_values_are_an_error_and_predictions_need_no_label(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="column 'a' has 1 records without a value"):
        fed({"a": [1, None], "b": [1, 2], "label": [0, 1]})
    assert split_columns(pa.schema([("x", pa.float32())]), "prediction") == (None, ["x"])
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0]}), path)
    batch = as_source(str(path), mode="prediction", feed=None, recipe="r").read(np.array([1, 0]))
    assert (batch.inputs.tolist(), batch.labels) == ([2.0, 1.0], None)
    with pytest.raises(DataError, match="no column is the labels"):
        as_source(str(path), mode="training", feed=None, recipe="r")
