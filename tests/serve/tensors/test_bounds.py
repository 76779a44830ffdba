"""What one request may bring, and ask for: derived from what a bundle proves, refused in words before it is read."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trueline.bundle import Dim, Signature
from trueline.errors import RequestError, TooLarge
from trueline.serve.tensors import codec
from trueline.serve.tensors.bounds import LARGER, LEAST_SIZE, LEAST_VALUES, RequestBounds, of_program
from worlds.bundles import spec

LINES = Signature(
    inputs=(spec("x", "batch", "length", 8),),
    outputs=(spec("y", "batch", "length", 1000),),
    dims={"batch": Dim(), "length": Dim()},
)
IMAGES = Signature(
    inputs=(spec("x", "batch", 3, 224, 224),), outputs=(spec("y", "batch", 10),), dims={"batch": Dim(max=None)}
)
COLUMN = b"x\n" + b"1\n" * 2000
"""CSV whose values are separated by line ends alone."""


def bounds(signature: Signature = LINES, length: int = 500, **more: int) -> RequestBounds:
    probed = [{"x": (7, length, 8), "y": (7, length, 1000)}]
    return of_program(signature, probed, row_symbol="batch", cuts=False, max_batch=64, **more)


def zeros(*shape: int) -> dict[str, np.ndarray]:
    return {"x": np.zeros(shape, np.float32)}


def test_a_full_batch_of_what_was_proven_is_always_accepted() -> None:
    bounds().check(LINES, zeros(64, 500, 8))
    images = of_program(IMAGES, [{"x": (4, 3, 224, 224)}], row_symbol="batch", cuts=True, max_batch=64)
    assert images.values == 64 * 3 * 224 * 224 > LEAST_VALUES


def test_a_free_dimension_may_be_several_times_as_large_as_the_largest_probe_and_no_larger() -> None:
    most = LARGER * 500
    assert most > LEAST_SIZE
    bounds().check(LINES, zeros(1, most, 8))
    with pytest.raises(
        TooLarge, match=rf"input 'x' has size {most + 1} in dimension 1 \(length\), at most {most}"
    ) as no:
        bounds().check(LINES, zeros(1, most + 1, 8))
    assert "--max-size" in no.value.hint
    bounds(max_size=9000).check(LINES, zeros(1, most + 1, 8))


def test_rows_that_may_not_be_cut_into_runs_are_bounded_by_the_largest_batch() -> None:
    with pytest.raises(TooLarge, match="the request has 65 rows, at most 64") as no:
        bounds().check(LINES, zeros(65, 1, 8))
    assert "--max-batch" in no.value.hint
    assert of_program(LINES, [{"x": (90, 2, 8)}], row_symbol="batch", cuts=False, max_batch=64).rows == 90
    assert of_program(LINES, [{"x": (90, 2, 8)}], row_symbol="batch", cuts=True, max_batch=64).rows is None


def test_the_numbers_of_a_request_and_of_its_answer_are_bounded_before_the_run() -> None:
    with pytest.raises(TooLarge, match=r"the inputs have 1024 values, at most 1000 .*") as no:
        bounds(max_values=1000).check(LINES, zeros(1, 128, 8))
    assert "--max-values" in no.value.hint
    small = of_program(LINES, [{"x": (1, 1, 8)}], row_symbol="batch", cuts=True, max_batch=1)
    with pytest.raises(TooLarge, match="the answer would have 5000000 values"):
        small.check(LINES, zeros(2, 2500, 8))


def test_an_answer_whose_size_only_the_run_shows_is_bounded_after_it() -> None:
    found = Signature(inputs=(spec("x", 4),), outputs=(spec("y", "found"),), dims={"found": Dim()})
    made = of_program(found, [{"x": (4,), "y": (3,)}], row_symbol=None, cuts=False, max_batch=64)
    assert made.open_answer
    made.check_answer({"y": np.zeros(LEAST_VALUES, np.uint8)})
    with pytest.raises(TooLarge, match="the answer has"):
        made.check_answer({"y": np.zeros(LEAST_VALUES + 1, np.uint8)})


def test_text_with_too_many_values_is_refused_before_anything_is_made_of_it() -> None:
    made = RequestBounds(values=1000, answer_values=1000)
    made.check_text(b"[" + b"0.123456," * 999 + b"0]")
    made.check_text(b"[" + b"0.123456,\n" * 999 + b"0]")
    made.check_text(b"x\n" + b"0.5\n" * 998)
    for text in (
        b"[" + b"0," * 1001 + b"0]",
        b'{"a":[' + b"[]," * 2000 + b"[]]}",
        b"1," * 2000,
        COLUMN,
        COLUMN.replace(b"\n", b"\r"),
    ):
        with pytest.raises(TooLarge, match=r"the body has \d+ values, at most 1000"):
            made.check_text(text)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1001], "parameters": {"binary_data_size": 4004}},
        {"shape": [1001], "data": [1]},
        {"shape": [1], "data": [0] * 5000},
        {"shape": [1] * 5000, "data": [0]},
        {"shape": [1], "data": [0], "parameters": {"a": [[]] * 5000}},
    ],
)
def test_the_decoder_refuses_before_it_reads_values(change: dict[str, object]) -> None:
    signature = Signature(inputs=(spec("x", "n"),), outputs=(spec("y", "n"),), dims={"n": Dim()})
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32"} | change]}).encode()
    binary = len(body) if "binary_data_size" in str(change) else None
    with pytest.raises(TooLarge, match="values, at most 1000"):
        codec.decode_with_inputs(body, signature, binary, RequestBounds(values=1000, answer_values=1000))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}]},
         "input 'x' is in a shared-memory region"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
         "output 'y' is in a shared-memory region"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "requests classification"),
        ({"outputs": [{"name": "y" * 5000}]}, "the name of an output has 5000 characters"),
        ({"outputs": [{"name": "y"}] * 5000}, "5000 outputs, the model gives 1"),
    ],
)  # fmt: skip
def test_what_blows_up_an_answer_or_names_memory_of_the_machine_is_refused(more: object, words: str) -> None:
    signature = Signature(inputs=(spec("x", "n"),), outputs=(spec("y", "n"),), dims={"n": Dim()})
    request = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    with pytest.raises(RequestError, match=words):
        codec.decode(json.dumps({**request, **more}).encode(), signature)  # type: ignore[dict-item]
