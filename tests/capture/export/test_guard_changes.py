"""Guards are tried on whole columns of sizes, and answer as they do for each size alone."""

from __future__ import annotations

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


def test_a_guard_between_two_sizes_is_looked_at_once_for_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(text="", rule="d0 * d1 != 6002", symbols=("a", "b"))
    dims = {"a": Dim(), "b": Dim(), "c": Dim(max=7)}
    assert breaks_far(guard, dims)
    monkeypatch.setattr(guard_changes, "holding", lambda *of: pytest.fail("it was known"))
    assert breaks_far(guard, {**dims, "c": Dim(max=8)})
