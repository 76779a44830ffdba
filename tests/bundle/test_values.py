"""A condition on values is kept by every check, says what broke it, and is written in words."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.bundle import Dim, Signature, TensorSpec
from trueline.bundle.signature import Check
from trueline.bundle.values import ANY, Values
from trueline.errors import RequestError

FINITE, IDS = Values(finite=True), Values(low=0, high=19)


def signature(values: Values, datatype: str = "FP32", shape: Any = ("batch", "length")) -> Signature:
    spec = TensorSpec(name="x", datatype=datatype, shape=shape, values=values)
    return Signature(inputs=(spec,), outputs=(), dims={"batch": Dim(), "length": Dim()})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (Values(), ""),
        (FINITE, "finite"),
        (IDS, "from 0 to 19"),
        (Values(low=3, high=3), "3"),
        (Values(low=0), "at least 0"),
        (Values(high=1e18), "at most 1e+18"),
        (Values(finite=True, high=0.1), "finite and at most 0.1"),
        (Values(low=0, high=-1, size="length"), "at least 0 and less than length"),
        (Values(high=0, size="length"), "at most length"),
        (Values(high=2, size="length"), "at most length + 2"),
    ],
)
def test_a_condition_is_written_in_words(values: Values, text: str) -> None:
    assert values.text == text
    assert signature(values).inputs[0].needs == (f"x is {text}" if text else "")


@pytest.mark.parametrize(
    ("values", "array", "words"),
    [
        (
            FINITE,
            np.array([[1, np.nan]], np.float32),
            r"'x' has nan at \[0, 1\], proven only for values that are finite",
        ),
        (FINITE, np.array([[np.inf, 0]], np.float32), r"has inf at \[0, 0\]"),
        (IDS, np.array([[3, -1]]), r"has -1 at \[0, 1\], proven only for values that are from 0 to 19"),
        (IDS, np.array([[20]]), r"has 20 at \[0, 0\]"),
        (Values(low=0, high=-1, size="length"), np.array([[0, 1, 3]]), r"has 3 .* less than length"),
        (Values(low=0.0), np.array([[np.nan]], np.float32), r"has nan"),
    ],
)
def test_the_first_value_that_breaks_it_is_named_with_its_place(values: Values, array: Any, words: str) -> None:
    claim = signature(values, {"f": "FP32", "i": "INT64"}[array.dtype.kind])
    for check in (claim.check, Check(claim)):
        with pytest.raises(RequestError, match=words):
            check({"x": array})


CONDITIONS = st.sampled_from(
    [FINITE, IDS, Values(low=-2), Values(high=3), Values(low=-1.5, high=2.5), Values(high=-1, size="length")]
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 4, 19, 20, -(2**31), 2**31 - 1, 2.5, -1.5, np.nan, np.inf, -np.inf])


@given(CONDITIONS, st.sampled_from(["FP32", "FP16", "INT32", "INT64", "UINT8"]), st.lists(NUMBERS, max_size=6))
def test_the_quick_check_of_a_server_lets_through_what_the_signature_does(
    values: Values, datatype: str, numbers: list[float]
) -> None:
    claim = signature(values, datatype)
    with np.errstate(all="ignore"):
        array = np.array(numbers, np.float64).reshape(1, -1).astype(claim.inputs[0].dtype)
    found = []
    for check in (claim.check, Check(claim)):
        try:
            check({"x": array})
            found.append("")
        except RequestError as error:
            found.append(error.message)
    assert found[0] == found[1]


def test_a_condition_survives_the_manifest_and_costs_an_unconditional_input_nothing() -> None:
    claim = signature(Values(low=0, high=2**63 - 1))
    assert msgspec.json.decode(msgspec.json.encode(claim), type=Signature) == claim
    assert b"values" not in msgspec.json.encode(signature(ANY))


def test_two_conditions_hold_together() -> None:
    assert IDS.both(Values(low=5, high=30)) == Values(low=5, high=19)
    assert FINITE.both(Values(high=2.0)) == Values(finite=True, high=2.0)
    assert IDS.both(Values(high=-1, size="length")) == Values(low=0, high=-1, size="length")
