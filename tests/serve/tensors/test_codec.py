"""JSON to arrays and back: the Open Inference Protocol and the records of /predictions."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trueline.bundle.signature import NUMPY_DTYPES, Dim, Signature
from trueline.errors import RequestError
from trueline.serve import json_records
from trueline.serve.tensors import arrays, codec
from worlds.bundles import spec


def signature(datatype: str = "FP32", *shape: int | str) -> Signature:
    shape = shape or ("batch", 2)
    symbols = {size: Dim(min=0) for size in shape if isinstance(size, str)}
    return Signature(
        inputs=(spec("x", *shape, datatype=datatype),),
        outputs=(spec("y", *shape, datatype=datatype), spec("z", *shape, datatype=datatype)),
        dims=symbols,
    )


TWO = Signature(
    inputs=(spec("a", "batch", 2), spec("b", "batch", datatype="INT64")),
    outputs=(spec("y", "batch"),),
    dims={"batch": Dim()},
)


def infer(data: Any, shape: list[Any], datatype: str = "FP32", **more: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": data}], **more}).encode()


JSON_TYPES = [name for name in NUMPY_DTYPES if name != "FP16"]


@given(data=st.data(), datatype=st.sampled_from(JSON_TYPES), nested=st.booleans())
def test_every_array_survives_the_way_to_json_and_back(data: st.DataObject, datatype: str, nested: bool) -> None:
    shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0 if not nested else 1, max_side=4)
    elements = {"allow_nan": False, "allow_infinity": False} if datatype.startswith("FP") else None
    array = data.draw(hnp.arrays(NUMPY_DTYPES[datatype], shapes, elements=elements))
    values = array.tolist() if nested else array.ravel().tolist()
    found = codec.decode(infer(values, list(array.shape), datatype), signature(datatype)).inputs["x"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    call = codec.InferCall({}, ("x",), "7", None)
    answer = json.loads(codec.encode("m", "1", call, {"x": array}).body)
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("m", "1", "7")
    output = answer["outputs"][0]
    assert output["shape"] == list(array.shape)
    np.testing.assert_array_equal(np.array(output["data"], array.dtype).reshape(array.shape), array)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no infer request"),
        (b"\xff\xfe", "no infer request"),
        (b"[]", "no infer request"),
        (b"{}", "`inputs`"),
        (b'{"inputs": 3}', "Expected `array`"),
        (b'{"inputs": [{"name": "x"}]}', "`shape`"),
        (b'{"id": 3, "inputs": []}', "Expected `str"),
        (infer([1, 2], [1, 2], parameters=3), "parameters"),
        (infer([1, 2], [1, 3]), "has 2 values"),
        (infer([1, 2], [1, -2]), "dimension of size -2"),
        (infer([], [0, 2**62]), "dimension of size"),
        (infer([1], [10**40]), "dimension of size more than"),
        (infer([1], [2**31 - 1] * 3), "has 1 values"),
        (infer([1], [1] * 33), "33 dimensions"),
        (infer([1], [1.5]), "Expected `int`"),
        (infer([[1, 2], [3]], [2, 2]), "ragged"),
        (infer([[1, 2]], [2, 1]), "its shape says [2, 1]"),
        (infer([[[1, 2]]], [1, 2]), "nests 3 lists"),
        (infer(3, [1]), "nests 0 lists"),
        (infer(None, [1]), "nests 0 lists"),
        (infer(["1", "2"], [1, 2]), "Expected `float`, got `str`"),
        (infer([True, 2], [1, 2]), "Expected `float`, got `bool`"),
        (infer([None, 2], [1, 2]), "Expected `float`, got `null`"),
        (infer([1e39, 2], [1, 2]), "out of the range of FP32"),
        (infer([1, 2], [1, 2], "INT64"), "has datatype INT64, expected FP32"),
        (infer(["a"], [1, 2], "BYTES"), "has datatype BYTES, expected FP32"),
        (infer([1, 2], [1, 2]).replace(b"[1, 2], \"datatype", b"NaN, \"datatype"), "malformed"),
        (infer([1, 2], [1, 2]).replace(b"[1, 2]}", b"[NaN, 1]}"), "malformed"),
        (infer([1, 2], [1, 2]).replace(b', "data": [1, 2]', b""), "no data"),
        (infer([1, 2], [1, 2], outputs=[{"name": "w"}]), "unexpected output 'w'"),
        (infer([1, 2], [1, 2], outputs=[{"name": "y"}, {"name": "y"}]), "requested twice"),
        (infer([1, 2], [1, 2], outputs=[{"name": "y", "parameters": {"classification": 2}}]), "classification"),
        (infer([1, 2], [1, 2], parameters={"timeout": -1}), "timeout"),
        (infer([1, 2], [1, 2], parameters={"timeout": "soon"}), "timeout"),
        (infer([1, 2], [1, 2], parameters={"sequence_id": 4}), "sequence"),
        (b'{"inputs":' + b"[" * 200_000, ""),
        (b'{"inputs":[], "parameters":' + b'{"a":' * 200_000, "nests too deeply"),
        (infer([1], [1]).replace(b"[1]}", b"[" * 100_000 + b"]" * 100_000 + b"}"), ""),
    ],
)  # fmt: skip
def test_what_a_client_gets_wrong_is_a_request_error_in_words(body: bytes, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        codec.decode(body, signature())
    assert words in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT8", 128), ("INT8", -129), ("UINT8", -1), ("UINT8", 256), ("INT64", 2**63), ("UINT64", 2**64),
        ("INT32", 1.0), ("INT32", 1.5), ("INT32", True), ("INT32", "1"), ("BOOL", 1), ("BOOL", 0.0), ("BOOL", "true"),
        ("FP32", 3.5e38), ("FP64", 10**400),
    ],
)  # fmt: skip
def test_a_value_that_its_datatype_cannot_hold_is_refused_and_not_bent(datatype: str, value: Any) -> None:
    with pytest.raises(RequestError, match="input 'x'"):
        codec.decode(infer([value], [1], datatype), signature(datatype, "n"))


def test_an_integer_is_a_fine_floating_point_number() -> None:
    found = codec.decode(infer([1, -2], [1, 2]), signature()).inputs["x"]
    np.testing.assert_array_equal(found, np.array([[1, -2]], np.float32))


def test_fp16_is_not_carried_as_json_numbers_by_the_protocol() -> None:
    with pytest.raises(RequestError, match="FP16"):
        codec.decode(infer([1, 2], [1, 2], "FP16"), signature("FP16"))
    with pytest.raises(RequestError, match="FP16"):
        codec.encode("m", "1", codec.InferCall({}, ("y",), None, None), {"y": np.zeros(1, np.float16)})


def test_an_input_given_twice_is_refused() -> None:
    body = json.loads(infer([1, 2], [1, 2]))
    body["inputs"] *= 2
    with pytest.raises(RequestError, match="given twice"):
        codec.decode(json.dumps(body).encode(), signature())


def test_the_outputs_asked_for_are_answered_in_that_order() -> None:
    call = codec.decode(infer([1, 2], [1, 2], outputs=[{"name": "z"}, {"name": "y"}]), signature())
    assert call.outputs == ("z", "y")
    assert codec.decode(infer([1, 2], [1, 2]), signature()).outputs == ("y", "z")


def test_a_timeout_is_in_microseconds() -> None:
    assert codec.decode(infer([1, 2], [1, 2], parameters={"timeout": 2500}), signature()).timeout_s == 0.0025


def test_what_json_has_no_word_for_is_answered_as_null() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    answer = json.loads(codec.encode("m", "1", codec.InferCall({}, ("y",), None, None), {"y": array}).body)
    assert answer["outputs"][0]["data"] == [None, None, None, 1.0]
    assert json.loads(json_records.encode({"y": array}, single=False)) == [None, None, None, 1.0]


ONE = signature("FP32", "batch", 2)


@pytest.mark.parametrize(
    ("body", "found", "single"),
    [
        ([1, 2], [[1, 2]], True),
        ([[1, 2]], [[1, 2]], False),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], False),
        ({"instances": [[1, 2], [3, 4]]}, [[1, 2], [3, 4]], False),
        ({"x": [1, 2]}, [[1, 2]], True),
        ({"x": [[1, 2]]}, [[1, 2]], False),
        ({"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}, [[1, 2], [3, 4]], False),
    ],
)
def test_records_are_told_from_batches_by_their_depth(body: Any, found: Any, single: bool) -> None:
    read = json_records.decode(json.dumps(body).encode(), ONE)
    assert read.inputs["x"].tolist() == found
    assert read.inputs["x"].dtype == np.float32
    assert read.single == single


def test_a_model_of_several_inputs_takes_an_object_or_instances_by_name() -> None:
    one = json_records.decode(b'{"a": [1, 2], "b": 3}', TWO)
    assert one.single
    assert (one.inputs["a"].tolist(), one.inputs["b"].tolist()) == ([[1, 2]], [3])
    several = json_records.decode(b'{"instances": [{"a": [1, 2], "b": 3}, {"a": [4, 5], "b": 6}]}', TWO)
    assert (several.inputs["a"].tolist(), several.inputs["b"].tolist()) == ([[1, 2], [4, 5]], [3, 6])


@pytest.mark.parametrize(
    ("body", "of", "words"),
    [
        (b"", ONE, "empty"),
        (b"3", ONE, "nests 0 lists, expected 1 for one record or 2 for a batch"),
        (b"[[[1]]]", ONE, "nests 3 lists"),
        (b'"text"', ONE, "nests 0 lists"),
        (b"a=1&b=2", ONE, "nests 0 lists"),
        (b"{", ONE, "no JSON of records"),
        (b'{"q": [1, 2]}', ONE, "the model takes: x"),
        (b'{"instances": [[1, 2]], "more": 1}', ONE, "beside 'instances'"),
        (b'{"instances": []}', TWO, "empty"),
        (b'{"instances": [{"a": [1, 2]}]}', TWO, "the model takes: a, b"),
        (b'{"instances": [{"a": [1, 2], "b": 3}, {"a": [1, 2, 3], "b": 3}]}', TWO, "differ in the shape"),
        (b'{"instances": [{"a": [[1, 2]], "b": [3]}]}', TWO, "one record"),
        (b'{"a": [1, 2], "b": [3]}', TWO, "some inputs are one record"),
        (b"[1, 2]", TWO, "several inputs"),
        (b"[" * 100_000, ONE, "nests 33 lists"),
        (b'{"x":' * 100_000, ONE, "nests too deeply"),
    ],
)
def test_a_body_that_is_no_records_is_refused_in_words(body: bytes, of: Signature, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        json_records.decode(body, of)
    assert words in caught.value.message
    assert len(caught.value.message) < 500


def test_a_single_record_gets_a_single_answer_and_several_outputs_an_object() -> None:
    y = np.array([[1.0, 2.0]], np.float32)
    assert json_records.encode({"y": y}, single=True) == b"[1.0,2.0]"
    assert json_records.encode({"y": y}, single=False) == b"[[1.0,2.0]]"
    assert json.loads(json_records.encode({"y": y, "z": np.array([3])}, single=True)) == {"y": [1.0, 2.0], "z": 3}


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_a_request_error(body: bytes) -> None:
    for decode in (codec.decode, json_records.decode):
        for of in (ONE, TWO):
            with contextlib.suppress(RequestError):
                decode(body, of)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "a", "instances"]), inner),
    max_leaves=12,
)


@given(
    name=st.sampled_from(["x", "", "a"]), shape=JSON_VALUES, datatype=JSON_VALUES, data=JSON_VALUES, outputs=JSON_VALUES
)
def test_no_json_whatever_raises_anything_but_a_request_error(
    name: str, shape: Any, datatype: Any, data: Any, outputs: Any
) -> None:
    tensor = {"name": name, "shape": shape, "datatype": datatype, "data": data}
    bodies = ({"inputs": [tensor], "outputs": outputs}, {"inputs": [{**tensor, "datatype": "FP32"}]}, data)
    for body in bodies:
        for decode in (codec.decode, json_records.decode):
            with contextlib.suppress(RequestError):
                decode(json.dumps(body).encode(), ONE)


def test_depth_is_counted_to_a_bound() -> None:
    assert arrays.depth_of(b"[" * 10**6) == arrays.MAX_DEPTH + 1
