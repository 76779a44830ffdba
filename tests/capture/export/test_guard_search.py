"""Sizes that break a guard are found however far out they are, and what holds for all sizes is certain."""

from __future__ import annotations

import itertools
import random

import pytest

from trueline.bundle.signature import Dim
from trueline.capture.export.guard_search import Undecided, as_condition, is_implied, search


def find(rule: str, *dims: Dim) -> tuple[int, ...] | None:
    """The least sizes of the first box in which `rule` is broken."""
    box = next(search(as_condition(rule), dims or (Dim(min=1),)), None)
    return None if box is None else tuple(low for low, _ in box)


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        ("d0 // 16000 != 5", 80_000),
        ("d0 // 4096 != 33", 135_168),
        ("d0 - d0 // 3 * 2 != 25001", 74_999),
        ("7 * d0 != 7000000007", 1_000_000_001),
        ("(d0 - 5) * (d0 - 123456789) != 0", 5),
        (f"d0 * d0 < {10**17}", 316_227_767),
        ("max(1000003 - d0, d0 - 1000003) > 0", 1_000_003),
        ("d0 % 48 != 0", 48),
    ],
)
def test_a_size_that_breaks_a_guard_is_found_however_far_out_it_is(rule: str, size: int) -> None:
    found = find(rule)
    assert found is not None
    assert not as_condition(rule).exact(*found)
    assert found[0] == pytest.approx(size, rel=0.01)


def test_sizes_of_two_symbols_that_break_a_guard_together_are_found() -> None:
    two = Dim(min=1), Dim(min=1)
    for rule in ("2 * d0 != 3 * d1", "max(d0 - 3037, 3037 - d0) + max(d1 - 41, 41 - d1) > 3", "d0 * d1 != 60000"):
        found = find(rule, *two)
        assert found is not None
        assert not as_condition(rule).exact(*found), rule


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        ("d0 - d0 // 4 * 4 == d0 % 4", 1),
        ("d0 // 4 * 4 <= d0", 1),
        ("(d0 + 7) // 8 * 8 >= d0", 1),
        ("7 * d0 != 7000000008", 1),
        ("d0 * d1 != 1", 2),
        ("4 * d0 < d0 * (4 * d1)", 2),
        ("(d0 // 2) * (d1 // 2) != 0", 2),
        ("d0 + d1 + d2 != 3", 2),
    ],
)
def test_what_holds_for_all_sizes_is_certain(rule: str, least: int) -> None:
    count = 1 + max(at for at in range(3) if f"d{at}" in rule)
    assert is_implied(rule, (Dim(min=least),) * count)


def test_a_guard_follows_from_others_or_does_not() -> None:
    free = (Dim(min=1),)
    assert is_implied("d0 >= 8", free, ("d0 // 4 > 1",))
    assert not is_implied("d0 >= 9", free, ("d0 // 4 > 1",))
    assert is_implied("d0 // 16000 != 5", free, ("d0 < 80000",))
    assert not is_implied("d0 // 16000 != 5", free, ("d0 <= 80000",))
    assert is_implied("d0 % 8 == 0", (Dim(min=8, multiple_of=8),))


def test_what_the_boxes_do_not_decide_is_not_certain() -> None:
    rule = "(d0 % 7 - 3) * (d0 * d0 - 1683 * d0 + 708122) != 0"
    with pytest.raises(Undecided):
        next(search(as_condition(rule), (Dim(min=1),), (as_condition("d0 % 7 != 3"),)), None)
    assert not is_implied(rule, (Dim(min=1),), ("d0 % 7 != 3",))


def test_numbers_that_floats_would_round_are_told_apart() -> None:
    most = 3 * 10**9
    far = Dim(min=most - 3, max=most)
    assert is_implied(f"d0 * d0 <= {most**2}", (far,))
    assert find(f"d0 * d0 != {most**2}", far) == (most,)
    assert find(f"d0 * d0 != {(most - 1) ** 2}", far) == (most - 1,)


def test_boxes_agree_with_every_size_that_is_tried() -> None:
    decided = 0
    for seed in range(100):
        draw = random.Random(seed)
        count = draw.choice((1, 1, 2))
        rule, other = _draw_rule(draw, count, 3), _draw_rule(draw, count, 1)
        dims = [
            Dim(min=step, max=draw.choice((None, 40)), multiple_of=step) for step in draw.choices((1, 1, 4), k=count)
        ]
        among = [as_condition(other)] if draw.random() < 0.3 else []
        breaks = [
            sizes
            for sizes in itertools.product(range(1, 41), repeat=count)
            if all(dim.allows(size) for dim, size in zip(dims, sizes, strict=True))
            and not as_condition(rule).exact(*sizes)
            and all(one.exact(*sizes) for one in among)
        ]
        try:
            box = next(search(as_condition(rule), dims, among), None)
        except Undecided:
            continue
        decided += 1
        assert box is not None or not breaks, (seed, rule, breaks[:1])
        for corner in itertools.product(*box or ()):
            sizes = tuple(steps * dim.multiple_of for steps, dim in zip(corner, dims, strict=True)) if box else ()
            assert not sizes or not as_condition(rule).exact(*sizes), (seed, rule, box)
    assert decided > 85


def _draw_rule(draw: random.Random, count: int, depth: int) -> str:
    comparison = draw.choice(("==", "!=", "<", "<=", ">", ">="))
    return f"{_draw(draw, count, depth)} {comparison} {_draw(draw, count, depth - 1)}"


def _draw(draw: random.Random, count: int, depth: int) -> str:
    if depth <= 0:
        return draw.choice((f"d{draw.randrange(count)}", f"d{draw.randrange(count)}", str(draw.randint(0, 50))))
    one, other, number = _draw(draw, count, depth - 1), _draw(draw, count, depth - 1), draw.randint(1, 40)
    operator = draw.choice("+-*/%mMdr")
    if operator in "mM":
        return f"{'min' if operator == 'm' else 'max'}({one}, {other})"
    if operator in "dr":
        return f"({one} {'//' if operator == 'd' else '%'} {other})"
    return (
        f"({one} {operator} {other})" if operator in "+-*" else f"({one} {'//' if operator == '/' else '%'} {number})"
    )
