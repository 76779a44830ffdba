"""Two answers agree or the reason is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.runtime.compare import Comparison, Tolerance, _compare_exact, column_scale, compare, largest, refusal

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


def at(value: float, off: float, dtype: str) -> bool:
    """Whether `value`, and the same off by `off`, agree; the arithmetic is exact in the widest float."""
    return compare({"y": np.array([value], dtype)}, {"y": np.array([value + off], dtype)}).agrees


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 1e-2), ("float32", 1e-4), ("float64", 1e-7)])
def test_without_bounds_they_are_those_of_the_dtype_and_no_wider_however_small_the_answer(
    dtype: str, rtol: float
) -> None:
    for value in (1.0, 64.0, -64.0, 2.0**-10):
        bound = rtol * abs(value)
        assert at(value, 0.9 * bound, dtype)
        assert not at(value, 1.2 * bound, dtype)
        assert not at(value, -1.2 * bound, dtype)
    assert at(0.0, 0.0, dtype)
    assert not at(0.0, 1e-7, dtype)


def test_the_scale_is_what_was_expected_and_not_what_was_found() -> None:
    assert not compare(outputs([0.0, 1.0]), outputs([0.0, 1000.0])).agrees
    assert not compare(outputs([0.0, 0.0, 0.0]), outputs([0.0, 1.0, 1e6])).agrees


def test_one_wrong_element_of_many_is_enough_wherever_it_stands() -> None:
    for shape in ((64,), (8, 8), (2, 4, 8)):
        want = np.ones(shape, np.float32)
        for place in (0, 31, 63):
            got = want.copy()
            got.reshape(-1)[place] += np.float32(0.01)
            found = compare({"y": want}, {"y": got})
            assert "1 of 64 elements" in found.reason
            assert (found.agrees, round(found.max_abs_error, 4)) == (False, 0.01)


def test_every_output_counts_and_the_first_that_disagrees_is_named() -> None:
    good, bad = np.ones(3, np.float32), np.array([1, 1, 2], np.float32)
    want = {"a": good, "b": good, "c": good}
    for name in want:
        found = compare(want, {**want, name: bad})
        assert not found.agrees
        assert found.reason.startswith(f"output '{name}' differs by 1 ")
        assert found.max_abs_error == 1.0
    assert compare(want, {"a": good, "b": bad, "c": bad}).reason.startswith("output 'b'")


@pytest.mark.parametrize("names", [[], ["a"], ["b"], ["b", "a"], ["a", "b", "c"]])
def test_the_outputs_are_those_that_were_expected_in_their_order(names: list[str]) -> None:
    one = np.ones(2, np.float32)
    want = {"a": one, "b": one}
    found = compare(want, dict.fromkeys(names, one))
    assert found.reason == f"the outputs are {names}, expected ['a', 'b']"


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64", "bool"])
def test_values_that_are_equal_in_another_dtype_disagree(dtype: str) -> None:
    one = np.ones(2, np.float32)
    assert f"has dtype {dtype}, expected float32" in compare({"y": one}, {"y": one.astype(dtype)}).reason
    assert f"has dtype float32, expected {dtype}" in compare({"y": one.astype(dtype)}, {"y": one}).reason


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (1, 6), (3, 2, 1), (0,), (5,), ()])
def test_as_many_values_in_another_shape_disagree(shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.int64):
        found = compare({"y": np.ones((3, 2), dtype)}, {"y": np.ones(shape, dtype)})
        assert found.reason == f"output 'y' has shape {list(shape)}, expected [3, 2]"


def test_a_nan_stands_where_a_nan_stood_and_nowhere_else() -> None:
    bad = (np.nan, np.inf, -np.inf)
    for want in bad:
        for got in (*bad, 0.0):
            same = want == got or (np.isnan(want) and np.isnan(got))
            found = compare(outputs([1.0, want, 2.0]), outputs([1.0, got, 2.0]))
            assert found.agrees is bool(same), (want, got)
    assert not compare(outputs([1.0, np.nan]), outputs([np.nan, 1.0])).agrees


def test_whole_numbers_and_truths_have_no_tolerance_in_either_direction() -> None:
    for dtype in ("int8", "int64", "uint8", "bool"):
        for want, got in ((0, 1), (1, 0)):
            assert not compare({"y": np.array([want], dtype)}, {"y": np.array([got], dtype)}).agrees
    big = np.array([2**60], np.int64)
    assert not compare({"y": big}, {"y": big + 1}).agrees


def test_a_decision_within_the_tolerance_of_its_rival_is_none_and_a_clear_one_is() -> None:
    wide = {np.dtype(np.float32): Tolerance(0.25, 0.0)}

    def changed(first: float, second: float) -> int:
        """Of two candidates whose order the other answer turns around."""
        found = compare(outputs([first, second]), outputs([second, first]), tolerances=wide)
        return found.decisions_changed

    assert changed(1.0, 0.75) == 0
    assert changed(1.0, 0.5) == 0
    assert changed(1.0, 0.25) == 1


def test_a_refusal_has_no_numbers() -> None:
    assert refusal("why") == Comparison(
        agrees=False, reason="why", max_abs_error=0.0, max_rel_error=0.0, decisions_changed=0, how=""
    )


@pytest.mark.parametrize(
    ("want", "got", "dtype", "count", "error"),
    [
        ([1, 2, 3], [1, 2, 3], "int64", 0, 0.0),
        ([1, 2, 3], [1, 5, 2], "int64", 2, 3.0),
        ([0, 255], [255, 0], "uint8", 2, 255.0),
        ([True, False], [True, True], "bool", 1, 1.0),
        ([2.5], [1.0], "longdouble", 1, 1.5),
        ([], [], "int32", 0, 0.0),
    ],
)
def test_whole_numbers_are_compared_one_by_one(
    want: list[float], got: list[float], dtype: str, count: int, error: float
) -> None:
    found = compare({"y": np.array(want, dtype)}, {"y": np.array(got, dtype)})
    assert found == Comparison(
        agrees=count == 0,
        reason=f"output 'y' differs in {count} of {len(want)} elements" if count else "",
        max_abs_error=error,
        max_rel_error=0.0,
        decisions_changed=count,
    )
    assert _compare_exact("y", np.array(want, dtype), np.array(got, dtype)) == found


def test_the_largest_errors_and_all_changed_decisions_of_all_outputs_are_counted() -> None:
    wide = {np.dtype(np.float32): Tolerance(0.0, 0.25)}
    want = {
        "a": np.array([[8.0, 2.0], [8.0, 2.0]], np.float32),
        "b": np.array([[2.0, 1.0]], np.float32),
        "c": np.array([1, 2, 3]),
        "d": np.array([4.0], np.float32),
    }
    got = {
        "a": np.array([[7.0, 2.0], [8.0, 2.0]], np.float32),
        "b": np.array([[1.5, 1.5]], np.float32),
        "c": np.array([1, 0, 0]),
        "d": np.array([4.0], np.float32),
    }
    assert compare(want, got, tolerances=wide) == Comparison(
        agrees=False,
        reason="output 'c' differs in 2 of 3 elements",
        max_abs_error=3.0,
        max_rel_error=0.25,
        decisions_changed=2,
    )


WIDE = {np.dtype(np.float64): Tolerance(0.5, 0.25)}
BY = "differs by"


@pytest.mark.parametrize(
    ("want", "got", "reason", "error", "relative", "changed"),
    [
        (2.0, 3.0, "", 1.0, 0.5, 0),  # no dimension: its own scale; the bound itself is within
        (2.0, 3.0625, f"{BY} 1.06 (1 of 1 elements; 2 is off by 1.06, where 1 is allowed)", 1.0625, 0.53125, 0),
        (0.0, 0.5, "", 0.5, 0.0, 0),
        ([0.0, -8.0], [0.5, -10.5], "", 2.5, 0.3125, 0),
        ([0.0, -8.0], [0.5625, -8.0],
         f"{BY} 0.562 (1 of 2 elements; at [0] 0 is off by 0.562, where 0.5 is allowed)", 0.5625, 0.0, 0),
        ([[16.0, 0.0], [1.0, 0.0]], [[16.0, 0.0], [2.0, 0.0]], "", 1.0, 0.0625, 0),  # a column of two
        ([np.nan, np.inf, 4.0], [np.nan, np.inf, 5.0], "", 1.0, 0.25, 0),
        ([np.nan, np.inf, 4.0], [np.inf, np.inf, 5.0], "has 1 infinities or NaN where the other has none",
         1.0, 0.25, 0),
        ([1.0, np.inf, 4.0], [np.nan, -np.inf, 9.0], "has 2 infinities or NaN where the other has none", 5.0, 1.25, 0),
        ([[5.0, 1.0]], [[3.25, 2.75]], "", 1.75, 0.35, 0),
        ([[5.0, 1.0]], [[1.0, 5.0]],
         f"{BY} 4 (2 of 2 elements; at [0, 0] 5 is off by 4, where 1.75 is allowed)", 4.0, 0.8, 1),
        ([[5.0, np.nan]], [[5.0, np.nan]], "", 0.0, 0.0, 0),
    ],
)  # fmt: skip
def test_numbers_are_compared_against_the_scale_of_their_column(
    want: object, got: object, reason: str, error: float, relative: float, changed: int
) -> None:
    found = compare({"y": np.array(want, np.float64)}, {"y": np.array(got, np.float64)}, tolerances=WIDE)
    assert (found.times > 1) == reason.startswith(BY)
    assert replace(found, times=0.0) == Comparison(
        agrees=not reason,
        reason=f"output 'y' {reason}" if reason else "",
        max_abs_error=error,
        max_rel_error=pytest.approx(relative, rel=1e-12),
        decisions_changed=changed,
    )


STAMPS = np.array([[1.7e9, 0.25, 3e-9], [1.6e9, 0.5, 1e-9], [1.5e9, 0.125, 2e-9], [1.7e9, 0.75, 4e-9]], np.float32)


@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3), (4, 3, 1), (2, 2, 3), (4, 1, 3)])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_no_column_hides_another_whichever_axis_the_columns_are_on(shape: tuple[int, ...], column: int) -> None:
    for factor, agrees in ((1.00001, True), (1.001, False)):
        got = STAMPS.copy()
        got[:, column] *= np.float32(factor)
        assert compare({"y": STAMPS.reshape(shape)}, {"y": got.reshape(shape)}).agrees is agrees
        if len(shape) == 2:
            assert compare({"y": STAMPS.T}, {"y": got.T}).agrees is agrees


def test_bounds_that_are_given_count_instead_of_the_dtype_and_the_smallest_along_the_axes_counts() -> None:
    want = np.ones((2, 2), np.float32)
    bounds = {"y": (np.array([1.0]), np.array([0.5, 0.25]), np.array([0.75, 0.125]))}
    for place, bound in {(0, 0): 0.5, (0, 1): 0.125, (1, 0): 0.25, (1, 1): 0.125}.items():
        for off, agrees in ((bound, True), (bound * 1.01, False)):
            got = want.copy()
            got[place] += np.float32(off)
            assert compare({"y": want}, {"y": got}, bounds=bounds).agrees is agrees, (place, off)


def test_a_column_of_few_elements_has_the_scale_that_is_known_of_it() -> None:
    sizes = largest(np.array([[1.7e9, 1e-9]]))
    _, _, alone = column_scale(sizes, (1, 2))
    assert alone.tolist() == [1.7e9, 64e-9], "at most the whole"
    _, rows, known = column_scale(sizes, (1, 2), {1: np.array([1.5e9, 0.5])})
    assert (rows.tolist(), known.tolist()) == ([1.7e9], [1.7e9, 0.5])


def test_each_record_that_decides_otherwise_is_counted_in_any_number_of_dimensions() -> None:
    want = np.zeros((2, 2, 3))
    want[..., 0] = 1.0
    got = want.copy()
    got[0, 1], got[1, 0], got[1, 1] = [0.0, 0.2, 0.1], [0.1, 0.0, 0.3], [0.51, 0.4, 0.49]
    found = compare({"y": want}, {"y": got}, tolerances={np.dtype(np.float64): Tolerance(0.49, 0.0)})
    assert (found.decisions_changed, found.agrees) == (2, False)


@pytest.mark.parametrize("shape", [(7,), (7, 3), (5, 2, 3), (2, 3, 2, 5), (1, 4), (0, 3), ()])
def test_a_large_answer_is_compared_by_parts_with_the_same_verdict(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = np.random.default_rng(0)
    want = {"y": drawn.normal(size=shape).astype(np.float32)}
    for wrong in (0.0, 1e-3, np.nan):
        found = {"y": want["y"].copy()}
        found["y"][...] += np.float32(1e-9)
        if found["y"].size:
            found["y"].reshape(-1)[-1] += np.float32(wrong)
        monkeypatch.setattr("trueline.runtime.compare.PIECE", 1 << 22)
        whole = compare(want, found)
        monkeypatch.setattr("trueline.runtime.compare.PIECE", 2)
        assert compare(want, found) == whole


def test_the_records_that_are_off_are_named() -> None:
    want = np.ones((40, 3), np.float32)
    found = want.copy()
    found[[7, 31], 1] = 2.0
    assert compare({"y": want}, {"y": found}).records == (7, 31)
    assert compare({"y": want}, {"y": want + np.float32(1)}).records == tuple(range(16))
    assert compare({"y": want}, {"y": want}).records == ()
