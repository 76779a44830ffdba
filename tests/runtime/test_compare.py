"""Two answers agree or the reason is said."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.runtime.compare import compare

Array = npt.NDArray[np.generic]


def outputs(*rows: list[float], dtype: str = "float32") -> dict[str, Array]:
    return {"y": np.array(rows, dtype=dtype)}


def test_equal_answers_agree_without_error() -> None:
    found = compare(outputs([1.0, 2.0]), outputs([1.0, 2.0]))
    assert found.agrees
    assert (found.reason, found.max_abs_error, found.decisions_changed) == ("", 0.0, 0)


def test_rounding_agrees_and_its_size_is_reported() -> None:
    found = compare(outputs([1.0, 100.0]), outputs([1.0, 100.001]))
    assert found.agrees
    assert found.max_abs_error == pytest.approx(0.001, rel=0.1)
    assert found.max_rel_error == pytest.approx(1e-5, rel=0.1)


def test_a_large_record_does_not_hide_an_error_in_a_small_one() -> None:
    assert not compare(outputs([1e6, 1e6], [1.0, 2.0]), outputs([1e6, 1e6], [1.0, 2.1])).agrees


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nan_or_infinity_where_the_other_has_a_number_disagrees(bad: float) -> None:
    assert "infinities or NaN" in compare(outputs([1.0, 2.0]), outputs([1.0, bad])).reason
    assert not compare(outputs([1.0, bad]), outputs([1.0, 2.0])).agrees
    assert compare(outputs([1.0, bad]), outputs([1.0, bad])).agrees


def test_infinities_of_opposite_sign_disagree() -> None:
    assert not compare(outputs([np.inf]), outputs([-np.inf])).agrees


def test_integers_are_equal_or_wrong() -> None:
    assert "1 of 2" in compare(outputs([1, 2], dtype="int64"), outputs([1, 3], dtype="int64")).reason


def test_another_name_dtype_or_shape_disagrees_in_words() -> None:
    one = outputs([1.0, 2.0])
    assert "expected ['y']" in compare(one, {"z": one["y"]}).reason
    assert "dtype float64" in compare(one, outputs([1.0, 2.0], dtype="float64")).reason
    assert "shape [1, 1]" in compare(one, outputs([1.0])).reason


def test_a_clear_decision_may_not_change_even_within_a_wide_tolerance() -> None:
    from trueline.runtime.compare import Tolerance

    wide = {np.dtype(np.float32): Tolerance(0.0, 0.05)}
    found = compare(outputs([1.0, 0.8]), outputs([0.96, 0.96 + 1e-6]), tolerances=wide)
    assert found.decisions_changed == 1
    assert not found.agrees


def test_a_tie_is_no_decision() -> None:
    assert compare(outputs([1.0, 1.0]), outputs([1.0, 1.0 + 1e-6])).agrees


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_whatever_the_values_an_answer_agrees_with_itself(values: list[float]) -> None:
    assert compare(outputs(values), outputs(values)).agrees


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), st.floats(1, 100))
def test_whatever_the_values_an_answer_that_is_off_by_one_disagrees(values: list[float], by: float) -> None:
    assert not compare(outputs(values), {"y": outputs(values)["y"] + np.float32(by)}).agrees


def test_an_empty_batch_agrees_with_itself() -> None:
    empty: dict[str, Array] = {"y": np.zeros((0, 3), np.float32)}
    assert compare(empty, empty).agrees
