"""What a request says of itself has to add up: sizes, shapes, lengths and values, to the byte."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.bundle import Dim, Signature, TensorSpec
from trueline.errors import NotFound, RequestError, UsageError
from trueline.serve.fastpath.templates import TemplateCache
from trueline.serve.models import fetch
from trueline.serve.models.sources import Sources, Store
from trueline.serve.settings import ServeSettings
from trueline.serve.tensors import arrays, codec

X = TensorSpec(name="x", datatype="FP32", shape=("batch", 3))
Y = TensorSpec(name="y", datatype="FP32", shape=("batch", 3))
SIGNATURE = Signature(inputs=(X,), outputs=(Y,), dims={"batch": Dim()})


def infer(shape: list[int], data: Any, datatype: str = "FP32") -> bytes:
    return json.dumps({"inputs": [{"name": "x", "shape": shape, "datatype": datatype, "data": data}]}).encode()


@pytest.mark.parametrize("shape", [[-1, 3], [-1, -1], [-1, -3], [3, -1], [2**31, 0], [-1]])
def test_a_shape_of_no_tensor_is_refused_and_guesses_nothing(shape: list[int]) -> None:
    with pytest.raises(RequestError, match="has a dimension of size"):
        codec.decode(infer(shape, [1.0, 2.0, 3.0]), SIGNATURE)


@pytest.mark.parametrize("num_bytes", [0, 1, 11, 13, 24])
def test_the_bytes_of_a_tensor_are_as_many_as_its_shape_says(num_bytes: int) -> None:
    assert arrays.array_of("x", "FP32", [1, 3], bytes(12)).shape == (1, 3)
    with pytest.raises(RequestError, match=f"unexpected size for input 'x': {num_bytes} bytes, its shape says 12"):
        arrays.array_of("x", "FP32", [1, 3], bytes(num_bytes))


@pytest.mark.parametrize("size", [-1, True, 1.0, "12", None])
def test_a_number_of_bytes_is_a_whole_number_from_0_on(size: object) -> None:
    with pytest.raises(RequestError, match="is no number of bytes"):
        arrays.Tail(bytes(12)).take("x", "FP32", [1, 3], size)


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        (b"0", True),
        (b"99", True),
        (b"100", True),
        (b"101", False),
        (b"-1", False),
        (b"+1", False),
        (b"", False),
        (b"1.0", False),
    ],
)
def test_the_head_of_a_body_is_no_longer_than_the_body(given: bytes, fits: bool) -> None:
    if fits:
        assert arrays.header_length(given, 100) == int(given)
    else:
        with pytest.raises(RequestError, match="inference header size"):
            arrays.header_length(given, 100)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("datatype", "most", "beyond"),
    [("FP32", 3.4e38, 3.5e38), ("FP16", 65504, 65520), ("INT8", 127, 128), ("INT8", -128, -129), ("UINT8", 255, 256),
     ("UINT8", 0, -1), ("INT64", 2**63 - 1, 2**63), ("UINT64", 2**64 - 1, 2**64)],
)  # fmt: skip
def test_a_value_beyond_its_datatype_is_refused_however_deep_it_lies(
    datatype: str, most: float, beyond: float, depth: int
) -> None:
    def text(value: float) -> bytes:
        return b"[" * depth + json.dumps(value).encode() + b"]" * depth

    assert arrays.parse(text(most), datatype, depth, "x").reshape(-1)[0] == np.array(
        most, f"{datatype}".lower().replace("fp", "float")
    )
    with pytest.raises(RequestError):
        arrays.parse(text(beyond), datatype, depth, "x")


@pytest.mark.parametrize("cut", [-12, -1, 1, 12])
def test_a_known_kind_of_request_is_of_its_length_and_else_read_anew(cut: int) -> None:
    """A shorter one would leave numbers of the last request where its own are missing."""
    said = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}}]}
    head = json.dumps(said).encode()
    body = head + np.arange(6, dtype=np.float32).tobytes()
    templates = TemplateCache(SIGNATURE)
    templates.decode(body, len(head))
    found = templates.find(body, len(head), [], None)
    assert found is not None
    known, spans = found
    assert known.pieces(body, spans) == [body[len(head) :]]
    for other in (body[:cut] if cut < 0 else body + bytes(cut), b"?" + body[1:]):
        assert known.match(other, len(head), []) is None
        assert templates.find(other, len(head), [], known) is None


@pytest.mark.parametrize("mark", ["sha256:" + "a" * 63, "sha256:" + "a" * 65, "sha256:" + "A" * 64, "sha256:",
                                  "a" * 64, "sha256:" + "a" * 64 + " ", "sha1:" + "a" * 40, ""])  # fmt: skip
def test_a_digest_behind_a_url_is_whole_or_refused(mark: str) -> None:
    assert fetch.split_digest("s3://b/d#sha256:" + "a" * 64) == ("s3://b/d", "a" * 64)
    with pytest.raises(UsageError, match="is no digest of a bundle"):
        fetch.split_digest(f"s3://b/d#{mark}")


@pytest.mark.parametrize("url", ["models:/digits@champion", "s3://bucket/digits.tlb", "file:///etc/passwd", "C:digits",
                                 "http://host/m.mar"])  # fmt: skip
def test_a_client_names_entries_of_the_store_and_nothing_that_lies_elsewhere(tmp_path: Path, url: str) -> None:
    async def scene(store: Store | None) -> None:
        sources = Sources(ServeSettings(), store, asyncio.get_running_loop())
        with pytest.raises(NotFound, match="does not match any allowed URL"):
            await sources.find_allowed(url)

    for store in (None, Store(tmp_path)):
        asyncio.run(scene(store))
