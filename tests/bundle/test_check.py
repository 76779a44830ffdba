"""`Check` remembers what `Signature.check` has let through; it lets through nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trueline.bundle import Dim, Signature, TensorSpec
from trueline.bundle.guards import Guard
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
        assert len(check._let_through) <= 256
