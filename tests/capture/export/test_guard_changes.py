"""Guards are tried on whole columns of sizes, and answer as they do for each size alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim
from trueline.capture.export import guard_changes
from trueline.capture.export.guard_changes import breaks_far, holding, is_certain

RULES = (
    "d0 > 1 and d1 > 2",
    "d0 == 3 or d1 // d0 == 2",
    "100 // (d0 - d1) != 7",
    "min(d0, d1) * 2 > max(d0, 5)",
    "d0 // 2 > -1 and d0 // 2 > 0",
)


@pytest.mark.parametrize("rule", RULES)
def test_a_guard_holds_for_columns_where_it_holds_for_each_of_their_sizes(rule: str) -> None:
    guard = Guard(text=rule, rule=rule, symbols=("a", "b") if "d1" in rule else ("a",))
    a, b = (one.reshape(-1) for one in np.meshgrid(np.arange(1, 90), np.arange(2, 7)))
    each = [guard.holds(dict(zip(("a", "b"), map(int, pair), strict=True))) for pair in zip(a, b, strict=True)]
    assert holding(guard, {"a": a, "b": b}).tolist() == each
    assert len({*each}) == 2


def test_a_guard_that_divides_by_zero_at_few_places_is_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    guard = Guard(text="", rule="6000 // (d0 - 40) != 7", symbols=("a",))
    alone = Guard.holds
    monkeypatch.setattr(Guard, "holds", lambda self, sizes: asked.append(sizes) or alone(self, sizes))
    assert not holding(guard, {"a": np.arange(1, 60_001)}).all()
    assert 0 < len(asked) <= 64


SIZES = [3, 5, 1 << 16, 1 << 20, 1 << 31, (1 << 40) + 1]


@pytest.mark.parametrize(
    "rule",
    [
        "d0 * d0 * d1 - 7 != 5 * d1",
        "3 * d0 * (d1 + (4 - d1 % 4) % 4) * (d0 + (4 - d0 % 4) % 4) // 16 != 12 or d0 == 3",
        "max(d0 * d1, d0 * d0) * d1 > min(d1 * d1, 5) * d0",
    ],
)
def test_a_guard_whose_numbers_leave_64_bits_is_computed_in_whole_numbers_of_any_length(rule: str) -> None:
    guard = Guard(text="", rule=rule, symbols=("a", "b"))
    for most in SIZES:
        a, b = np.array([one for one in SIZES if one <= most]), np.array([most])
        each = [guard.holds({"a": int(one), "b": most}) for one in a]
        assert holding(guard, {"a": a, "b": b}).tolist() == each


def test_numbers_that_fit_at_the_sizes_that_are_tried_are_computed_as_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[np.dtype[Any]] = []
    whole = guard_changes._holding
    monkeypatch.setattr(
        guard_changes, "_holding", lambda guard, columns: kinds.append(columns[0].dtype) or whole(guard, columns)
    )
    padded = "(d0 + (4 - d0 % 4) % 4)"
    guard = Guard(text="", rule=f"4 * {padded} * ({padded} // 4) * {padded} * d1 * d1 != 7", symbols=("a", "b"))
    assert holding(guard, {"a": np.arange(1, 1000), "b": np.array([1000])}).all()
    assert holding(guard, {"a": np.array([1 << 20]), "b": np.array([1000])}).all()
    assert kinds == [np.dtype(np.int64), np.dtype(object)]


@pytest.mark.parametrize(
    ("rule", "certain"),
    [
        ("(-1 + d0 + d0 * d1) // d0 != 0", True),
        ("d0 * d1 != 0", True),
        ("d0 * d1 + d0 > 1", True),
        ("2 * d0 >= d0 + 1", True),
        ("3 <= d0 * 2 + d1", True),
        ("d0 * d1 != 6000", False),
        ("5 * d0 - d1 != 0", False),
        ("(d0 * d1) // 4 != 0", False),
        ("d0 - d1 > -5", False),
        ("d0 % 4 != 0", False),
    ],
)
def test_a_guard_that_holds_for_all_sizes_by_its_terms_is_certain(rule: str, certain: bool) -> None:
    guard = Guard(text="", rule=rule, symbols=("a", "b") if "d1" in rule else ("a",))
    assert is_certain(guard, {"a": Dim(), "b": Dim()}) is certain
    if certain:
        a, b = (one.reshape(-1) for one in np.meshgrid(np.arange(1, 300), np.arange(1, 300)))
        assert holding(guard, {"a": a, "b": b}).all()


def test_what_is_certain_counts_from_the_least_size_on() -> None:
    guard = Guard(text="", rule="d0 // 4 != 0", symbols=("a",))
    assert is_certain(guard, {"a": Dim(min=4)})
    assert not is_certain(guard, {"a": Dim(min=3)})
    between = Guard(text="", rule="16 * d0 * (-1 + d1 // 8) != 0", symbols=("a", "b"))
    assert is_certain(between, {"a": Dim(), "b": Dim(min=16)})
    assert not is_certain(between, {"a": Dim(), "b": Dim(min=15)})


@pytest.mark.parametrize(
    "rule", ["d0 * ((3 + d1) // 4) != d0", "d0 != ((3 + d1) // 4) * d0", "d0 % (d0 * ((3 + d1) // 4)) != 0"]
)
def test_a_size_is_never_its_own_multiple_nor_divided_by_it(rule: str) -> None:
    guard = Guard(text="", rule=rule, symbols=("a", "b"))
    assert is_certain(guard, {"a": Dim(), "b": Dim(min=5)})
    assert not is_certain(guard, {"a": Dim(), "b": Dim(min=4)})
    another = Guard(text="", rule=rule.replace("d0 * ", "7 * ").replace("* d0", "* 7"), symbols=("a", "b"))
    assert not is_certain(another, {"a": Dim(), "b": Dim(min=5)})


def test_a_guard_between_two_sizes_is_looked_at_once_for_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(text="", rule="d0 * d1 != 6002", symbols=("a", "b"))
    dims = {"a": Dim(), "b": Dim(), "c": Dim(max=7)}
    assert breaks_far(guard, dims)
    monkeypatch.setattr(guard_changes, "holding", lambda *of: pytest.fail("it was known"))
    assert breaks_far(guard, {**dims, "c": Dim(max=8)})
