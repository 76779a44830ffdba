"""Tensors as raw bytes: what goes in comes out, bit for bit, and whatever does not add up is the client's fault."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.bundle import Dim, Signature
from trueline.errors import RequestError, TooLarge
from trueline.serve.tensors import arrays, codec
from trueline.web import compression as coding
from worlds import bundles
from worlds.servers import TinyApp

X = bundles.spec("x", "batch", 3)
ONE = Signature(inputs=(X,), outputs=(bundles.spec("y", "batch", 3),), dims={"batch": Dim()})


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyApp]:
    with TinyApp(tmp_path_factory.mktemp("tiny")) as made:
        yield made


def body_of(*inputs: tuple[str, np.ndarray[Any, Any]], **more: Any) -> tuple[bytes, int]:
    """A binary infer request and the length of its JSON."""
    names = {np.dtype(np.float32): "FP32", np.dtype(np.float16): "FP16", np.dtype(np.bool_): "BOOL"}
    told = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": names[array.dtype],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in inputs
    ]
    head = json.dumps({"inputs": told, **more}).encode()
    return head + b"".join(array.tobytes() for _, array in inputs), len(head)


@given(rows=st.integers(1, 5), seed=st.integers(0, 99), lead=st.integers(0, 3))
def test_every_float_arrives_bit_for_bit_wherever_it_lies_in_the_body(rows: int, seed: int, lead: int) -> None:
    array = np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)
    body, length = body_of(("x", array), id="7" * lead)  # ids of other lengths move the tensor
    found = codec.decode(body, ONE, length).inputs["x"]
    assert found.tobytes() == array.tobytes()
    assert found.flags.aligned


def test_outputs_are_bytes_where_they_are_asked_for(app: TinyApp) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    body, length = body_of(("x", array), outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    found = app.ask("POST", "/v2/models/tiny/infer", body, inference_header_content_length=str(length))
    assert found.status == 200
    assert found.content_type == b"application/octet-stream"
    head = int(found.headers.split(b":")[1])
    told = json.loads(found.body[:head])["outputs"][0]
    assert told["parameters"] == {"binary_data_size": 24}
    assert "data" not in told
    assert np.array_equal(np.frombuffer(found.body[head:], np.float32).reshape(2, 3), array * 2 + 1)


def test_an_output_may_stay_json_while_the_request_wants_bytes(app: TinyApp) -> None:
    array = np.zeros((1, 3), np.float32)
    body, length = body_of(
        ("x", array),
        parameters={"binary_data_output": True},
        outputs=[{"name": "y", "parameters": {"binary_data": False}}],
    )
    found = app.ask("POST", "/v2/models/tiny/infer", body, inference_header_content_length=str(length))
    assert json.loads(found.body)["outputs"][0]["data"] == [1.0, 1.0, 1.0]


def test_a_raw_request_is_the_tensor_alone_and_is_answered_in_bytes(app: TinyApp) -> None:
    array = np.arange(9, dtype=np.float32).reshape(3, 3)
    found = app.ask("POST", "/v2/models/tiny/infer", array.tobytes(), inference_header_content_length="0")
    head = int(found.headers.split(b":")[1])
    assert np.array_equal(np.frombuffer(found.body[head:], np.float32).reshape(3, 3), array * 2 + 1)


ARRAY = np.zeros((2, 3), np.float32)
BODY, LENGTH = body_of(("x", ARRAY))


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        (BODY, "99999", "inference header size should be in range"),
        (BODY, "-1", "inference header size should be in range"),
        (BODY, "1e1", "inference header size should be in range"),
        (BODY[:-4], str(LENGTH), "unexpected size for input 'x': 20 bytes, its shape says 24"),
        (BODY + b"\0", str(LENGTH), "unexpected additional input data: 1 bytes"),
        (BODY.replace(b"24", b"20"), str(LENGTH), "unexpected size for input 'x': 20 bytes"),
        (BODY.replace(b'"binary_data_size": 24', b'"binary_data_size": -4'), str(LENGTH), "is no number of bytes"),
        (BODY.replace(b"[2, 3]", b"[9999999999, 3]"), str(LENGTH + 9), "dimension of size 9999999999"),
        (BODY.replace(b"[2, 3]", b"[1000000, 3]"), str(LENGTH + 6), "unexpected size"),
        (BODY[:LENGTH], None, "has no header Inference-Header-Content-Length"),
        (b"\0" * 13, "0", "13 bytes are no multiple of 12"),
    ],
)
def test_bytes_that_do_not_add_up_are_a_400_that_says_how(
    app: TinyApp, body: bytes, length: str | None, words: str
) -> None:
    headers = {} if length is None else {"inference_header_content_length": length}
    found = app.ask("POST", "/v2/models/tiny/infer", body, **headers)
    assert found.status == 400
    assert words in json.loads(found.body)["error"]


@given(length=st.integers(0, 200), at=st.integers(0, len(BODY)), junk=st.binary(max_size=8))
def test_no_torn_binary_body_is_more_than_a_request_error(length: int, at: int, junk: bytes) -> None:
    body = BODY[:at] + junk + BODY[at:]
    try:
        found = codec.decode(body, ONE, min(length, len(body)))
    except RequestError:
        return
    assert all(array.size * array.itemsize <= len(body) for array in found.inputs.values())


def test_half_floats_and_booleans_travel_as_bytes_only() -> None:
    halves = Signature(inputs=(bundles.spec("h", "batch", datatype="FP16"),), outputs=(X,), dims={"batch": Dim()})
    array = np.array([1.5, -2.0], np.float16)
    body, length = body_of(("h", array))
    assert codec.decode(body, halves, length).inputs["h"].tolist() == [1.5, -2.0]
    with pytest.raises(RequestError, match="raw bytes only"):
        codec.decode(b'{"inputs":[{"name":"h","shape":[1],"datatype":"FP16","data":[1]}]}', halves)
    flags = Signature(inputs=(bundles.spec("b", "batch", datatype="BOOL"),), outputs=(X,), dims={"batch": Dim()})
    body, length = body_of(("b", np.array([True, False])))
    assert codec.decode(body, flags, length).inputs["b"].tolist() == [True, False]
    with pytest.raises(RequestError, match="bytes other than 0 and 1"):
        codec.decode(body[:-1] + b"\2", flags, length)


def test_an_output_without_elements_has_no_bytes() -> None:
    assert arrays.as_bytes("y", np.zeros((0, 3), np.float32)) == b""


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda body: zlib.compress(body, wbits=-15)])
@pytest.mark.parametrize("id_bytes", [1, 2 * coding.ON_LOOP_BYTES], ids=["small", "in a thread"])
def test_compressed_bodies_are_answered_as_plain_ones(app: TinyApp, pack: Any, id_bytes: int) -> None:
    id = np.random.default_rng(0).bytes(id_bytes).hex()
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0, 1, 2]}
    body = pack(json.dumps({"id": id, "inputs": [tensor]}).encode())
    assert (len(body) > coding.ON_LOOP_BYTES) == (id_bytes > 1)
    coded = "gzip" if pack is gzip.compress else "deflate"
    found = json.loads(app.ask("POST", "/v2/models/tiny/infer", body, content_encoding=coded).body)
    assert found["id"] == id
    assert found["outputs"][0]["data"] == [1.0, 3.0, 5.0]
    torn = app.ask("POST", "/v2/models/tiny/infer", body[:-9], content_encoding=coded)
    assert torn.status == 400


def test_a_bomb_is_opened_no_further_than_the_bound() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    assert len(bomb) < 60_000
    with pytest.raises(TooLarge):
        coding.decompress(bomb, "gzip", 1_000_000)
    with pytest.raises(RequestError, match="does not end"):
        coding.decompress(gzip.compress(b"abc")[:-4], "gzip", 100)
    with pytest.raises(RequestError, match="is no gzip"):
        coding.decompress(b"abc", "gzip", 100)
    assert coding.decompress(gzip.compress(b"ab") + gzip.compress(b"c"), "gzip", 100) == b"abc"
