"""A guard is said in words, and the words say what the rule says."""

from __future__ import annotations

import pytest

from trueline.bundle.guard_words import describe_guard
from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim

SAID = [
    ("d0 * d1 == d0 * min(d0, d1)", "w h", "h is at most w"),
    ("d0 * d1 * d2 == d0 * d1 * min(d1, d2)", "batch w h", "h is at most w"),
    ("d1 == max(d0, d1)", "w h", "w is at most h"),
    ("2 * d0 == d1", "length x.1", "x.1 is twice length"),
    ("d0 == d1 + 3", "a b", "a is b plus 3"),
    ("d0 == 3 * d1 + 2", "a b", "a is three times b plus 2"),
    ("d1 == (1 + d0) // 2", "a b", "b is half of a, rounded up"),
    ("d1 == (d0 - 10) // 5 + 1", "samples frames", "frames is 1 less than 1/5 of samples, rounded down"),
    ("d1 <= d0 + 3", "a b", "b is at most a plus 3"),
    ("d1 >= 2 * d0", "a b", "b is at least twice a"),
    ("d0 - d1 != 0", "a b", "a differs from b"),
    ("d0 % d1 == 0", "a b", "a is a multiple of b"),
    ("d0 % 4 != 0", "batch", "batch is not a multiple of 4"),
    ("3 * (d0 // 3) == d0", "h", "h is a multiple of 3"),
    ("d0 % 7 == 3", "a", "a is 3 more than a multiple of 7"),
    ("d0 != 7", "length", "length is not 7"),
    ("d0 != 7 and d0 != 9", "length", "length is neither 7 nor 9"),
    ("d0 * d0 * 7003 % 65519 >= 140", "n", "the rest of (n * n * 7003) / 65519 is at least 140"),
    ("max(23984 - d0, d0 - 24015) > 0", "length", "length is below 23984 or above 24015"),
    ("d0 > 3 and d0 < 9", "a", "a is from 4 to 8"),
    ("d0 > 5000", "a", "a is at least 5001"),
    ("2 * d0 < 9000", "a", "a is at most 4499"),
    ("d0 * d1 <= 5000", "batch length", "batch * length is at most 5000"),
    ("d0 + d1 <= 64", "past new", "past + new is at most 64"),
    ("d0 * d1 * d2 <= 100", "a b c", "a * b * c is at most 100"),
    ("d0 // 2 == d1 // 2", "h w", "h / 2 rounded down is w / 2 rounded down"),
    ("8 * -(-d0 // 8) == 8 * -(-d1 // 8)", "h w", "8 * (h / 8 rounded up) is 8 * (w / 8 rounded up)"),
    ("max(d0 - d1, 0) // 5 != d2", "n k m", "(the largest of (n - k) and 0) / 5 rounded down is not m"),
    ("d0 % 2 == d1 % 2", "a b", "the rest of a / 2 is the rest of b / 2"),
    ("min(d0, d1) <= 4 or d0 * 2 + 1 != d1", "a b", "the smallest of a and b is at most 4 or (a * 2) + 1 is not b"),
    ("-d0 + 9 > d1 - 1", "a b", "-a + 9 is more than b - 1"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "symbols", "words"), SAID)
def test_a_guard_is_said_in_words(rule: str, symbols: str, words: str) -> None:
    assert describe_guard(Guard(text=rule, rule=rule, symbols=tuple(symbols.split()))) == words


def test_what_the_ranges_say_already_is_left_out() -> None:
    guard = Guard(text="", rule="d0 // 32 == d1 // 32", symbols=("h", "w"))
    assert describe_guard(guard, {"h": Dim(multiple_of=32), "w": Dim(multiple_of=32)}) == "h equals w"


def test_a_relation_that_holds_of_small_sizes_only_is_not_said() -> None:
    guard = Guard(text="", rule="d0 <= d1 or d0 > 4000", symbols=("a", "b"))
    assert describe_guard(guard) == "a is at most b or a is more than 4000"


def test_a_division_by_zero_is_no_error() -> None:
    guard = Guard(text="", rule="d0 % (d1 - 3) == 0", symbols=("a", "b"))
    assert describe_guard(guard) == "the rest of a / (b - 3) is 0"
