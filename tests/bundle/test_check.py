"""`Check` remembers what `Signature.check` has let through; it lets through nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.bundle import Dim, Signature, TensorSpec
from trueline.bundle.guards import Guard
from trueline.bundle.padding import Padding
from trueline.bundle.signature import Check
from trueline.errors import RequestError

X = TensorSpec(name="x", datatype="FP32", shape=("batch", "length"))
MASK = TensorSpec(name="mask", datatype="INT64", shape=("batch", "length"), rows="first")
DIMS = {"batch": Dim(max=3), "length": Dim(min=2, multiple_of=2)}
GUARDED = Signature(
    inputs=(X,),
    outputs=(X,),
    dims=DIMS,
    guards=(Guard(symbols=("batch", "length"), rule="d0 < d1", text="batch < length"),),
)
MASKED = Signature(inputs=(X, MASK), outputs=(X,), dims=DIMS)


def words(check: Any, inputs: dict[str, Any]) -> str:
    """Of the refusal; empty when there is none."""
    try:
        check(inputs)
    except RequestError as error:
        return f"{error.message} {error.hint}"
    return ""


SHAPES = [(1, 2), (2, 2), (3, 4), (4, 4), (1, 3), (1, 0), (2,), (1, 2, 1), ()]
ARRAYS = st.builds(
    lambda shape, dtype, value: np.full(shape, value, dtype),
    st.sampled_from(SHAPES),
    st.sampled_from(["<f4", ">f4", "<f8", "<i8", "<i4", "?"]),
    st.sampled_from([0, 1]),
)
INPUTS = st.dictionaries(st.sampled_from(["x", "mask", "y"]), ARRAYS, max_size=3)
FITTING = st.builds(
    lambda shape, value: {"x": np.zeros(shape, np.float32), "mask": np.full(shape, value, np.int64)},
    st.sampled_from(SHAPES),
    st.sampled_from([0, 1]),
)


@given(st.lists(INPUTS | FITTING | FITTING.map(lambda inputs: {"x": inputs["x"]}), max_size=12))
def test_what_is_let_through_is_what_the_signature_lets_through(asked: list[dict[str, Any]]) -> None:
    for signature in (GUARDED, MASKED):
        check = Check(signature)
        for inputs in [*asked, *asked]:
            assert words(check, inputs) == words(signature.check, inputs)


def test_what_was_let_through_is_remembered_up_to_a_bound() -> None:
    check = Check(Signature(inputs=(X,), outputs=(X,), dims={"batch": Dim(), "length": Dim()}))
    for size in range(1, 1000):
        check({"x": np.zeros((1, size), np.float32)})
        assert len(check._passed) <= 256


def takes(signature: Signature, inputs: dict[str, Any]) -> bool:
    """Whether the signature and what remembers for it let `inputs` through; they never differ."""
    found = {words(check, inputs) == "" for check in (signature.check, Check(signature))}
    assert len(found) == 1
    return found.pop()


DIMENSIONS = [Dim(), Dim(max=1), Dim(max=6), Dim(min=2), Dim(min=3, max=6), Dim(min=4, max=4), Dim(multiple_of=3),
              Dim(min=4, max=8, multiple_of=4), Dim(min=0, max=2)]  # fmt: skip


@pytest.mark.parametrize("dim", DIMENSIONS, ids=str)
def test_a_size_is_let_in_from_the_first_to_the_last_that_was_proven_and_no_other(dim: Dim) -> None:
    x = TensorSpec(name="x", datatype="FP32", shape=("batch",))
    signature = Signature(inputs=(x,), outputs=(), dims={"batch": dim})
    last = 12 if dim.max is None else dim.max
    wanted = [size for size in range(13) if size in range(dim.min, last + 1) and size % dim.multiple_of == 0]
    assert [size for size in range(13) if takes(signature, {"x": np.zeros(size, np.float32)})] == wanted
    assert [size for size in range(13) if signature.allows({"batch": size})] == wanted
    assert [size for size in range(13) if dim.allows(size)] == wanted


def test_a_refused_size_is_said_with_the_range_that_was_proven() -> None:
    x = TensorSpec(name="x", datatype="FP32", shape=(3, "length"))
    signature = Signature(inputs=(x,), outputs=(), dims={"length": Dim(min=2, max=6, multiple_of=2)})
    for size in (1, 5, 7, 8):
        said = words(signature.check, {"x": np.zeros((3, size), np.float32)})
        assert said.strip() == (
            f"input 'x' has size {size} in dimension 1 (length), proven only for sizes of at least 2 and at most 6 and "
            "a multiple of 2"
        )


@pytest.mark.parametrize(("one", "other"), [(2, 3), (3, 2)])
def test_two_dimensions_of_one_symbol_are_equal_whichever_is_larger_and_wherever_they_stand(
    one: int, other: int
) -> None:
    x = TensorSpec(name="x", datatype="FP32", shape=("n", 4))
    y = TensorSpec(name="y", datatype="FP32", shape=(4, "n"))
    square = TensorSpec(name="x", datatype="FP32", shape=("n", "n"))
    apart = Signature(inputs=(x, y), outputs=(), dims={"n": Dim()})
    within = Signature(inputs=(square,), outputs=(), dims={"n": Dim()})
    assert takes(apart, {"x": np.zeros((one, 4), np.float32), "y": np.zeros((4, one), np.float32)})
    assert not takes(apart, {"x": np.zeros((one, 4), np.float32), "y": np.zeros((4, other), np.float32)})
    assert takes(within, {"x": np.zeros((one, one), np.float32)})
    assert not takes(within, {"x": np.zeros((one, other), np.float32)})


def test_a_fixed_dimension_a_rank_and_a_datatype_are_what_was_proven_and_nothing_near() -> None:
    x = TensorSpec(name="x", datatype="FP32", shape=("batch", 4))
    signature = Signature(inputs=(x,), outputs=(), dims={"batch": Dim()})
    assert takes(signature, {"x": np.zeros((2, 4), np.float32)})
    for shape in ((2, 3), (2, 5), (2,), (2, 4, 1), (1, 2, 4), ()):
        assert not takes(signature, {"x": np.zeros(shape, np.float32)})
    for dtype in (np.float64, np.float16, np.int32, np.bool_):
        assert not takes(signature, {"x": np.zeros((2, 4), dtype)})
    check = Check(signature)
    check({"x": np.zeros((2, 4), np.float32)})
    assert words(check, {"x": np.zeros((2, 4), np.float64)}) != ""


def test_every_guard_has_to_hold_and_not_only_the_first() -> None:
    x = TensorSpec(name="x", datatype="FP32", shape=("a", "b"))
    guards = (
        Guard(symbols=("a", "b"), rule="d0 <= d1", text="a <= b"),
        Guard(symbols=("b",), rule="d0 != 5", text="b != 5"),
    )
    signature = Signature(inputs=(x,), outputs=(), dims={"a": Dim(), "b": Dim()}, guards=guards)
    for a in range(1, 8):
        for b in range(1, 8):
            fits = a <= b and b != 5
            assert takes(signature, {"x": np.zeros((a, b), np.float32)}) is fits
            assert signature.allows({"a": a, "b": b}) is fits


@pytest.mark.parametrize(("rows", "fine"), [("some", [[0, 1], [1, 0]]), ("first", [[1, 0], [1, 1]])])
def test_a_mask_shows_in_every_row_what_the_program_needs(rows: Any, fine: list[list[int]]) -> None:
    mask = TensorSpec(name="mask", datatype="INT64", shape=("batch", 2), rows=rows)
    signature = Signature(inputs=(mask,), outputs=(), dims={"batch": Dim()})
    assert takes(signature, {"mask": np.array(fine)})
    for hidden in ([0, 0], [0, 1]) if rows == "first" else ([0, 0],):
        for at in range(3):
            spoilt = [*fine[:at], hidden, *fine[at:]]
            assert not takes(signature, {"mask": np.array(spoilt)})
            assert takes(signature, {"mask": np.array(fine)})


def test_what_fits_is_let_through_without_the_signatures_words_and_then_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("the table lets it through")

    fixed = TensorSpec(name="f", datatype="INT64", shape=(3, "length"))
    signature = Signature(inputs=(X, fixed), outputs=(), dims=DIMS, guards=GUARDED.guards)
    monkeypatch.setattr(Signature, "check", never)
    check = Check(signature)
    for batch, length in ((1, 2), (3, 4), (3, 4), (2, 100)):
        check({"x": np.zeros((batch, length), np.float32), "f": np.zeros((3, length), np.int64)})
    assert len(check._passed) == 3


def test_a_datatype_is_named_as_the_protocol_does_and_else_as_numpy_does() -> None:
    signature = Signature(inputs=(X,), outputs=(), dims=DIMS)
    for dtype, name in (("float64", "FP64"), ("bool", "BOOL"), ("complex64", "complex64"), (">f4", ">f4")):
        assert words(signature.check, {"x": np.zeros((1, 2), dtype)}).strip() == (
            f"input 'x' has datatype {name}, expected FP32"
        )


@pytest.mark.parametrize(
    ("dim", "size", "proven"),
    [
        (Dim(min=2), 1, "at least 2"),
        (Dim(max=6), 7, "at least 1 and at most 6"),
        (Dim(multiple_of=4), 6, "at least 1 and a multiple of 4"),
    ],
)
def test_only_the_bounds_that_there_are_are_named(dim: Dim, size: int, proven: str) -> None:
    x = TensorSpec(name="x", datatype="FP32", shape=("n",))
    said = words(Signature(inputs=(x,), outputs=(), dims={"n": dim}).check, {"x": np.zeros(size, np.float32)})
    assert said.strip() == f"input 'x' has size {size} in dimension 0 (n), proven only for sizes of {proven}"


@pytest.mark.parametrize(
    ("rows", "mask", "row"),
    [
        ("some", [[[0, 1], [1, 0]], [[1, 1], [0, 1]]], None),
        ("some", [[[0, 1], [1, 0]], [[0, 0], [0, 1]]], [1, 0]),
        ("first", [[[1, 0], [1, 0]], [[1, 1], [0, 1]]], [1, 1]),
        ("first", [[[1, 0], [0, 1]], [[0, 0], [1, 1]]], [0, 1]),
        ("first", [[[1, 0], [1, 1]], [[1, 0], [1, 1]]], None),
    ],
)
def test_the_first_row_that_is_hidden_is_named_by_its_place(rows: Any, mask: list[Any], row: list[int] | None) -> None:
    spec = TensorSpec(name="mask", datatype="INT64", shape=("batch", 2, 2), rows=rows)
    signature = Signature(inputs=(spec,), outputs=(), dims={"batch": Dim()})
    said = words(signature.check, {"mask": np.array(mask)})
    assert words(Check(signature), {"mask": np.array(mask)}) == said
    assert said.startswith(f"input 'mask' hides row {row}: " if row else "")
    assert bool(said) is bool(row)


PADDED = Signature(
    inputs=(
        TensorSpec(name="x", datatype="FP32", shape=("batch", "length", 2)),
        TensorSpec(name="mask", datatype="INT64", shape=("batch", "length"), fill=7),
        TensorSpec(name="other", datatype="INT64", shape=("batch", "width")),
    ),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=("length", "batch")),),
    dims={"batch": Dim(), "length": Dim(), "width": Dim()},
    padded=("length",),
)


def asked(batch: int, length: int, width: int = 3) -> dict[str, Any]:
    x = np.ones((batch, length, 2), np.float32)
    return {"x": x, "mask": np.ones((batch, length), np.int64), "other": np.ones((batch, width), np.int64)}


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(1, 16), (15, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (1000, 1024), (1025, 2048)],
)
def test_lengths_share_runs_up_to_the_next_power_of_two(length: int, bucket: int) -> None:
    padding = Padding(PADDED)
    assert padding.bucket("length", length) == bucket
    key = (("x", bucket, 2), ("mask", bucket), ("other", 3))
    assert padding.key(asked(1, length)) == padding.key(asked(5, length)) == key


def test_requests_are_filled_up_to_the_longest_and_their_answers_cut_to_their_own_length() -> None:
    padding, items = Padding(PADDED), [asked(1, 2), asked(2, 4), asked(1, 3, 5)]
    even = padding.even(items)
    assert [{name: array.shape for name, array in one.items()} for one in even] == [
        {"x": (batch, 4, 2), "mask": (batch, 4), "other": (batch, width)} for batch, width in ((1, 3), (2, 3), (1, 5))
    ]
    assert even[0]["mask"].tolist() == [[1, 1, 7, 7]]
    assert even[0]["x"][0, :, 0].tolist() == [1, 1, 0, 0]
    assert even[1]["x"] is items[1]["x"], "what is long enough is not copied"
    assert padding.sizes(items[2]) == {"length": 3}
    answer = np.arange(8.0).reshape(4, 2)
    assert padding.cut({"y": answer}, items[0])["y"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
