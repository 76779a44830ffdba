"""Guards travel in words and in a form that can be evaluated without running anything."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from trueline.bundle import guards
from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.errors import RequestError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

DOUBLE = Guard(text="2 * length == y.1", rule="2 * d0 == d1", symbols=("length", "y.1"))


def signature(*found: Guard) -> Signature:
    x = TensorSpec(name="x", datatype="FP32", shape=("batch", "length"))
    y = TensorSpec(name="y", datatype="FP32", shape=("batch", "y.1"))
    dims = {"batch": Dim(), "length": Dim(), "y.1": Dim()}
    return Signature(inputs=(x, y), outputs=(), dims=dims, guards=found)


def request(length: int, other: int) -> dict[str, Array]:
    return {"x": np.zeros((2, length), np.float32), "y": np.zeros((2, other), np.float32)}


def test_a_request_that_breaks_a_guard_is_refused_with_the_guard_in_words_and_its_sizes() -> None:
    signature(DOUBLE).check(request(3, 6))
    with pytest.raises(RequestError) as refused:
        signature(DOUBLE).check(request(3, 7))
    assert "length = 3, y.1 = 7" in refused.value.message
    assert "y.1 is twice length" in refused.value.message


@pytest.mark.parametrize(
    "rule", ["2 * d0 == d1", "d0 % 4 != 0", "d0 > 2 * d1 or d1 == 3", "min(d0, 7) + -d1 <= (1 + d0) // 2"]
)
def test_a_rule_says_what_python_says(rule: str) -> None:
    for a, b in itertools.product(range(1, 12), repeat=2):
        wanted = eval(rule.replace("d0", str(a)).replace("d1", str(b)))
        assert bool(guards.read(rule)([a, b])) is wanted


def test_a_division_by_zero_keeps_no_guard() -> None:
    assert not Guard(text="", rule="d0 // (d0 // 4) == 4", symbols=("a",)).holds({"a": 3})


@pytest.mark.parametrize(
    "rule",
    [
        "__import__('os').system('touch pwned') == 0",
        "d0.real == 1",
        "d0 ** 99999999 == 1",
        "open('x') == 1",
        "(lambda: 1)() == 1",
        "d0",
        "d0 == 'a'",
        "d0 == 1.5",
        "x == 1",
        "[d0][0] == 1",
        "d0 == ",
        "min(d0) == 1",
        "(" * 2000 + "d0 == 1",
    ],
)
def test_a_rule_that_is_no_integer_comparison_is_refused_before_anything_is_computed(rule: str) -> None:
    with pytest.raises(ValueError, match=r"guard|symbol"):
        guards.check(Guard(text=rule, rule=rule, symbols=("a",)), {"a": None})


def test_a_guard_over_symbols_that_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no symbol"):
        guards.check(DOUBLE, {"length": None})
    with pytest.raises(ValueError, match="d1"):
        guards.check(Guard(text="", rule="d0 == d1", symbols=("length",)), {"length": None})


def test_a_rule_is_read_up_to_its_bound_and_not_beyond() -> None:
    longest = "d0 == " + "1 + " * 248 + "11"
    assert len(longest) == guards.MAX_CHARS
    assert guards.read(longest)([259])
    with pytest.raises(ValueError, match="longer than 1000"):
        guards.read(longest + " ")


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        ("d0 < 3", {1, 2}),
        ("d0 <= 3", {1, 2, 3}),
        ("d0 > 3", {4, 5}),
        ("d0 >= 3", {3, 4, 5}),
        ("d0 == 3", {3}),
        ("d0 != 3", {1, 2, 4, 5}),
    ],
)
def test_a_comparison_holds_on_its_side_of_the_border(rule: str, holds: set[int]) -> None:
    guard = Guard(text=rule, rule=rule, symbols=("a",))
    assert {size for size in range(1, 6) if guard.holds({"a": size})} == holds


def test_a_division_by_zero_lets_no_request_in() -> None:
    never = Guard(text="", rule="d0 // (d0 // 4) == 4", symbols=("length",))
    assert never.holds({"length": 4})
    with pytest.raises(RequestError):
        signature(never).check(request(3, 6))


@pytest.mark.parametrize(
    "rule",
    [
        "d0.real == 1",
        "1 == d0.real",
        "-d0.real == 1",
        "d0.real + 1 == 1",
        "1 + d0.real == 1",
        "d0 == 1 or d0.real == 1",
        "d0.real == 1 and d0 == 1",
        "min(d0.real, 1) == 1",
        "1 == max(1, -(2 * d0.real))",
    ],
)
def test_what_a_guard_may_not_hold_is_named_with_its_rule_wherever_it_stands(rule: str) -> None:
    with pytest.raises(ValueError, match="may not hold") as refused:
        guards.read(rule)
    assert str(refused.value) == f"a guard may not hold 'd0.real': {rule!r}"
