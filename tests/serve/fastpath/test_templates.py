"""What infer requests say beside their numbers is remembered, and changes no answer: `oip.decode` is the judge."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.bundle.signature import NUMPY_DTYPES, Dim, Signature
from trueline.errors import RequestError
from trueline.serve.fastpath import templates
from trueline.serve.fastpath.templates import MAX_TEMPLATES, TemplateCache
from trueline.serve.tensors import arrays, codec
from worlds.bundles import spec

ONE = Signature(
    inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch"), spec("data", "batch")), dims={"batch": Dim(min=0)}
)
WHOLE = Signature(inputs=(spec("x", "n", datatype="INT8"),), outputs=(spec("y", "n"),), dims={"n": Dim()})
TWO = Signature(
    inputs=(spec("a", "batch", 2), spec("b", "batch", datatype="BOOL")),
    outputs=(spec("y", "batch"),),
    dims={"batch": Dim()},
)


def told(decode: Any, *arguments: Any) -> tuple[Any, ...]:
    """What was decoded, or the words of the refusal."""
    try:
        call = decode(*arguments)
    except RequestError as error:
        return error.message, error.hint
    arrays = {name: (array.dtype, array.shape, array.tobytes()) for name, array in call.inputs.items()}
    return arrays, call.outputs, call.id, call.timeout_s, call.binary, call.priority


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2.5]} | more


JSON_BODIES = [
    {"inputs": [tensor()]},
    {"inputs": [tensor(data=[3, 4])]},
    {"inputs": [tensor(data=[3])]},
    {"inputs": [tensor(data=[3, 4, 5])]},
    {"inputs": [tensor(data=[[3, 4]])]},
    {"inputs": [tensor(data=[[3], [4]])]},
    {"inputs": [tensor(data=[[3], 4])]},
    {"inputs": [tensor(data=["3", 4])]},
    {"inputs": [tensor(data=[1e39, 4])]},
    {"inputs": [tensor(data=[3.4e38, 4])]},
    {"inputs": [tensor(data=[None, True])]},
    {"inputs": [tensor(data=[])]},
    {"inputs": [tensor(shape=[0, 2], data=[])]},
    {"inputs": [tensor(shape=[2, 2], data=[1, 2, 3, 4])]},
    {"inputs": [tensor(shape=[2, 2], data=[[1, 2], [3, 4]])]},
    {"inputs": [tensor(datatype="INT8")]},
    {"inputs": [tensor(datatype="INT8", data=[1, 2])]},
    {"inputs": [tensor(name="data")]},
    {"inputs": [tensor(parameters={"data": [7, 8]})]},
    {"parameters": {"data": [7, 8]}, "inputs": [tensor()]},
    {"parameters": {"data": [7, 9]}, "inputs": [tensor()]},
    {"inputs": [tensor()], "id": "7"},
    {"inputs": [tensor()], "outputs": [{"name": "y"}]},
    {"inputs": [tensor()], "outputs": [{"name": "data"}]},
    {"inputs": [tensor()], "parameters": {"timeout": 5, "priority": 1, "binary_data_output": True}},
    {"inputs": [tensor(), tensor(name="z")]},
    {"inputs": [tensor()], "note": "\\"},
    {"id": None, "inputs": [tensor()]},
]
TEXTS = [json.dumps(body, separators=by).encode() for body in JSON_BODIES for by in ((",", ":"), (", ", ": "))] + [
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2] }]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data" : [1,2]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2],"data":[3,4]}]}',
    b'{"data":[7,8],"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","d\\u0061ta":[7,8]}]}',
    b'{"data":[7,9],"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","d\\u0061ta":[7,8]}]}',
    b'["data":[',
    b"",
]


@given(st.lists(st.sampled_from(TEXTS), max_size=30), st.sampled_from([ONE, WHOLE]))
def test_what_is_remembered_of_json_requests_changes_no_answer(texts: list[bytes], signature: Signature) -> None:
    remembering = TemplateCache(signature)
    for text in texts:
        for body in (text, bytearray(text)):
            assert told(remembering.decode, body) == told(codec.decode, body, signature)


def binary_body(head: dict[str, Any], tail: bytes) -> tuple[bytes, int]:
    text = json.dumps(head).encode()
    return text + tail, len(text)


A = {"name": "a", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
B = {"name": "b", "shape": [1], "datatype": "BOOL", "parameters": {"binary_data_size": 1}}
X = A | {"name": "x"}
BINARY_HEADS = [
    {"inputs": [A, B]},
    {"inputs": [B, A]},
    {"inputs": [A]},
    {"inputs": [X]},
    {"inputs": [X | {"shape": [2, 1]}]},
    {"inputs": [X], "id": "7"},
    {"inputs": [X], "note": "of another length"},
    {"inputs": [X, A]},
    {"inputs": [X, A | {"parameters": {"binary_data_size": 4}}]},
    {"inputs": [X], "parameters": {"binary_data_output": True, "timeout": 9}},
    {"inputs": [{"name": "a", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}, B]},
    {"inputs": [X | {"datatype": "INT16", "shape": [4]}]},
]


@given(
    st.lists(st.tuples(st.sampled_from(BINARY_HEADS), st.binary(min_size=7, max_size=17)), max_size=30),
    st.sampled_from([ONE, TWO]),
)
def test_what_is_remembered_of_binary_requests_changes_no_answer(
    requests: list[tuple[dict[str, Any], bytes]], signature: Signature
) -> None:
    remembering = TemplateCache(signature)
    for head, tail in requests:
        text, json_bytes = binary_body(head, tail)
        for size in (8, 9, 16, len(tail)):
            for body in (text[: json_bytes + size], bytearray(text[: json_bytes + size])):
                assert told(remembering.decode, body, json_bytes) == told(codec.decode, body, signature, json_bytes)


def test_a_request_that_says_nothing_new_is_read_by_its_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    remembering = TemplateCache(ONE)
    bodies = [json.dumps({"inputs": [tensor(data=[n, n])]}).encode() for n in range(3)]
    remembering.decode(bodies[0])
    remembering.decode(*binary_body({"inputs": [X]}, bytes(8)))
    monkeypatch.setattr(templates.codec, "decode_with_inputs", None)
    assert [remembering.decode(body).inputs["x"].tolist() for body in bodies] == [[[n, n]] for n in range(3)]
    ones = np.ones(2, "<f4").tobytes()
    assert remembering.decode(*binary_body({"inputs": [X]}, ones)).inputs["x"].tolist() == [[1, 1]]


def test_no_more_templates_are_kept_than_there_is_room_for_and_the_used_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembering = TemplateCache(ONE)
    used = json.dumps({"inputs": [tensor()]}).encode()
    bodies = [json.dumps({"n" * (n + 1): None, "inputs": [tensor()]}).encode() for n in range(3 * MAX_TEMPLATES)]
    for body in bodies:
        remembering.decode(used)
        remembering.decode(body)
    assert len(remembering._all()) == remembering._size == MAX_TEMPLATES
    monkeypatch.setattr(templates.codec, "decode_with_inputs", None)
    for body in (used, bodies[-1]):
        assert remembering.decode(body).inputs["x"].tolist() == [[1, 2.5]]
    with pytest.raises(TypeError):
        remembering.decode(bodies[0])


def test_a_form_is_known_by_its_id_and_parameters_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(request_id: str, **more: object) -> bytes:
        return json.dumps({"id": request_id, "inputs": [tensor()], "parameters": more}).encode()

    remembering = TemplateCache(ONE)
    remembering.decode(body("a", timeout=5, priority=1, note="n", at=1.5))
    monkeypatch.setattr(templates.codec, "decode_with_inputs", None)
    call = remembering.decode(body("longer", timeout=7_000_000, priority=0, note="", at=-20))
    assert (call.id, call.timeout_s, call.priority) == ("longer", 7.0, 0)
    for other in (
        body("a", timeout=-5, priority=1, note="n", at=1.5),
        body("a", timeout=5, priority=1.0, note="n", at=1.5),
        body("a", timeout=5, priority=1, note=3, at=1.5),
        body("a", timeout=5, priority=1, note="n", at="1.5"),
        body('"', timeout=5, priority=1, note="n", at=1.5),
        body("a", timeout=5, priority=1, sequence_id=7, at=1.5),
    ):
        with pytest.raises(TypeError):
            remembering.decode(other)


def test_several_inputs_in_json_are_known_by_the_text_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(request_id: str, a: Any, b: Any) -> bytes:
        given = {"name": "a", "shape": [1, 2], "datatype": "FP32", "data": a}
        return json.dumps(
            {"id": request_id, "inputs": [given, {"name": "b", "shape": [1], "datatype": "BOOL", "data": b}]}
        ).encode()

    remembering = TemplateCache(TWO)
    remembering.decode(body("a", [1, 2], [True]))
    remembering.decode(body("a", [[1, 2]], [True]))
    monkeypatch.setattr(templates.codec, "decode_with_inputs", None)
    for a in ([3, 4.5], [[3, 4.5]]):
        call = remembering.decode(body("b", a, [False]))
        assert (call.id, call.inputs["a"].tolist(), call.inputs["b"].tolist()) == ("b", [[3, 4.5]], [False])


def test_every_name_that_the_codec_reads_is_among_those_that_are_no_gaps() -> None:
    read = set()
    for node in ast.walk(ast.parse(Path(codec.__file__).read_text())):
        name: ast.expr | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            name = node.args[0]
        elif isinstance(node, ast.Subscript):
            name = node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            name = node.left
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            read.add(name.value.encode())
    fields = {
        field.encode() for one in (codec.GivenInput, codec._Output, codec._Request) for field in one.__struct_fields__
    }
    assert {b"timeout", b"binary_data_size"} <= read
    assert read | fields <= codec.READ


@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    datatype=st.sampled_from(["FP16", "FP32", "FP64"]),
    near=st.sampled_from([1.0, 6e4, 65519.0, 65520.0, 1e38, 3.4028235e38, 3.4028236e38, 1e300]),
)
def test_a_list_of_floats_is_read_as_numpy_reads_it_and_refused_where_it_does_not_fit(
    values: list[float], datatype: str, near: float
) -> None:
    values = [*values, near]
    text = json.dumps(values).encode()
    try:
        with np.errstate(over="raise"):
            expected = np.array(values, NUMPY_DTYPES[datatype])
    except FloatingPointError:
        with pytest.raises(RequestError, match="out of the range"):
            arrays.parse(text, datatype, 1, "x")
        return
    found = arrays.parse(text, datatype, 1, "x")
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
