"""What torch.export writes as dozens of guards is a range, a divisor and a relation in words."""

from __future__ import annotations

from typing import Any

import pytest

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim
from trueline.capture.export import guard_ranges as ranges
from trueline.capture.export.guard_ranges import Claim, ExportedGuards, borders, claims, list_far_holes

A, B, L, M = (f"L['tensors'][{i}].size()[{axis}]" for i, axis in ((0, 0), (1, 0), (0, 1), (1, 1)))


def exported(
    *codes: str, example: dict[str, int] | None = None, decided: tuple[str, ...] = (), **spans: Dim
) -> ExportedGuards:
    """Guards of a model of two inputs, [batch, length] and [batch, other]."""
    ranges = {"batch": Dim(min=2), "length": Dim(min=2), "other": Dim(min=2)} | spans
    places = {(0, 0): "batch", (1, 0): "batch", (0, 1): "length", (1, 1): "other"}
    names = {"s77": "length"}
    return ExportedGuards(codes=codes, decided=decided, spans=ranges, places=places, names=names, example=example or {})


def claimed(*codes: str, **options: Any) -> tuple[Claim, ...]:
    return claims(exported(*codes, **options), batch="batch")


def holes_of(code: str) -> set[tuple[int, ...]]:
    """Sizes that probes are to try, where the widest claim leaves a condition of the user's code out."""
    found = exported(code, decided=(code,))
    made = claims(found, batch="batch")
    assert made[0].guards == () != made[-1].guards
    return {tuple(sizes.values()) for sizes in list_far_holes(found, made)}


def test_no_guard_claims_every_size_and_gives_the_exporters_assumption_up_last() -> None:
    wide, strict = claimed(f"{A} == {B}")
    assert wide.dims["length"] == Dim(min=1)
    assert wide.guards == strict.guards == ()
    assert strict.dims["length"] == Dim(min=2)
    assert strict.dims["batch"] == Dim(min=1)  # a server has to answer a single request: batch 1 is proven or refused


def test_divisibility_is_read_off_guards_that_do_not_name_it() -> None:
    codes = [f"(8*{A}*{L}) % (32*{A}) == 0", f"({L} % ({L} // 4)) == 0", f"({L} // 4) != 1", f"{L} // ({L} // 4) == 4"]
    wide, *_, strict = claimed(*codes)
    assert wide.dims["length"] == Dim(min=4, multiple_of=4)
    assert strict.dims["length"] == Dim(min=8, multiple_of=4)
    assert wide.guards == ()


def test_sizes_that_are_equal_in_all_examples_are_claimed_together_where_a_box_has_no_room_for_them() -> None:
    found = exported(f"{M} - math.trunc(0.25*{L}) >= 0", example={"length": 256, "other": 256})
    made = claims(found, batch="batch")
    assert not any(claim.allows({"batch": 1, "length": 16, "other": 16}) for claim in made)
    (one,) = ranges.claim_alike(found, {"other": "length"}, made, batch="batch")[:1]
    assert one.allows({"batch": 1, "length": 16, "other": 16})
    assert one.dims["length"].max is None
    assert not one.allows({"batch": 1, "length": 16, "other": 17})
    assert not ranges.claim_alike(exported(f"{M} >= 3"), {}, made, batch="batch")


def test_an_upper_end_is_found_to_the_number_however_it_is_written() -> None:
    assert claimed(f"{L} <= 64")[0].dims["length"].max == 64
    assert claimed(f"2*{L} <= 9001")[0].dims["length"].max == 4500
    assert claimed(length=Dim(min=2, max=512))[0].dims["length"].max == 512


def test_a_single_size_that_is_left_out_stays_a_guard_of_the_stricter_claims() -> None:
    wide, *_, strict = claimed(f"{L} != 7")
    assert wide.allows({"batch": 1, "length": 7, "other": 1})
    assert [guard.text for guard in strict.guards] == ["length != 7"]
    assert 7 in borders((wide, strict))["length"]


def test_a_hole_between_sizes_that_no_probe_meets_is_claimed_by_none() -> None:
    codes = ("6*{0}*{1} != 11964", "{0} + 3*{1} != 9007", "{0}*{1} % 99991 != 0")
    far = claimed(*(code.format(A, L) for code in codes))[0]
    assert {guard.text for guard in far.guards} == {
        code.format("batch", "length").replace("*", " * ") for code in codes
    }
    assert not far.allows({"batch": 2, "length": 997, "other": 1})


@pytest.mark.parametrize(
    ("code", "out"),
    [
        ("(5*{L}) != 1500", [(1, 300)]),
        ("(1 + 2*{L}) != 1800001", [(1, 900000)]),
        ("{L}*{L} != 90601", [(1, 301)]),
        ("{L}*(1400 + ((-1)*{L})) <= 489990", [(1, 698), (1, 702)]),
        ("((-6006) + {A}*{L})*((-6006) + {A}*{L}) != 1", [(5, 1201), (1, 6007)]),
        ("{A}*{L}*(12010 - {A}*{L}) <= 36059999", [(1, 6005), (5, 1201)]),
        ("abs((-50176) + {A}*{L}) > 300", [(224, 224), (112, 448)]),
        ("({A} / {L}) > 2.5", [(2, 1), (5, 2), (20, 300)]),
        ("abs((-1.4142135623730951) + ({A} / {L})) >= 0.0001", [(297, 210), (99, 70)]),
    ],
)
def test_sizes_that_a_guard_excludes_far_from_the_example_are_in_no_claim(
    code: str, out: list[tuple[int, int]]
) -> None:
    made = claimed(code.format(A=A, L=L), example={"batch": 30, "length": 7, "other": 5})
    for batch, length in out:
        assert not any(one.allows({"batch": batch, "length": length, "other": 5}) for one in made)
    assert all(one.allows({"batch": 30, "length": 7, "other": 5}) for one in made)


def test_a_quotient_of_sizes_is_compared_in_whole_numbers_and_shown_as_it_was_written() -> None:
    (guard,) = claimed(f"({A} / {L}) != 1.3333333333333333")[-1].guards
    assert (guard.rule, guard.text) == ("3 * d0 != 4 * d1", "batch / length != 1.3333333333333333")


def test_a_hole_between_sizes_that_probes_meet_is_left_to_the_values() -> None:
    wide, *_, strict = claimed(f"{A}*{L} != 48")
    assert wide.allows({"batch": 2, "length": 24, "other": 1})
    assert not strict.allows({"batch": 2, "length": 24, "other": 1})


def test_relations_between_symbols_stay_in_words_and_those_that_follow_are_left_out() -> None:
    wide = claimed(f"{L} == ((1 + {M}) // 2)", f"{L} + {M} < 3*{M}", f"{A} == {B}")[0]
    assert [guard.text for guard in wide.guards] == ["length == (1 + other) // 2"]
    assert wide.allows({"batch": 1, "length": 3, "other": 6})
    assert not wide.allows({"batch": 1, "length": 4, "other": 6})


def test_a_size_that_a_guard_of_several_pins_is_the_range_of_its_symbol() -> None:
    """Each claim: else a batch "from 1 up" was claimed beside "batch is 3"."""
    for claim in claimed(f"(-1 + {L} + {L}*{A})//{L} == 3"):
        assert claim.dims["batch"] == Dim(min=3, max=3)
        assert claim.guards == ()
    for free in (f"{A}*{L} == 6", f"{A} + {L} == 2", f"{L} == 7*{A} + 5000"):
        assert all(claim.dims["batch"].min != claim.dims["batch"].max for claim in claimed(free))


def test_guards_of_strides_and_devices_say_nothing_about_sizes() -> None:
    wide = claimed("L['tensors'][0].stride()[0] == 8", "s77 <= 20", "L['tensors'][0].requires_grad == False")[0]
    assert wide.guards == ()
    assert wide.dims["length"].max == 20


def test_borders_lie_on_both_sides() -> None:
    found = borders(claimed(f"{L} <= 64", f"{M} % 4 == 0"))
    assert {64, 65} <= set(found["length"])
    assert {3, 4} <= set(found["other"])


def test_guards_of_which_none_says_the_other_are_all_kept() -> None:
    holes = [Guard(text=f"a != {size}", rule=f"d0 != {size}", symbols=("a",)) for size in (7, 9, 30)]
    pair = [
        Guard(text="a != b", rule="d0 != d1", symbols=("a", "b")),
        Guard(text="a + b != 9", rule="d0 + d1 != 9", symbols=("a", "b")),
    ]
    found = ranges._reduce([*holes, *pair], {"a": Dim(), "b": Dim()})
    assert {guard.text for guard in found.guards} == {guard.text for guard in (*holes, *pair)}
    for a in range(1, 40):
        for b in (1, 2, 3, 8):
            assert found.allows({"a": a, "b": b}) is (a not in (7, 9, 30) and a not in (b, 9 - b))


def test_what_is_filled_up_to_a_multiple_is_assumed_to_be_no_1_as_any_size() -> None:
    count = f"({L} + (4 - {L} % 4) % 4) // 4"
    wide, *_, strict = claimed(f"{count} != 1", f"{A} * ({count}) != 1", f"1 < {count}")
    assert wide.dims["length"] == Dim(min=1)
    assert wide.guards == ()
    assert strict.dims["length"] == Dim(min=5)


def test_what_a_remainder_is_compared_with_stands_in_the_model() -> None:
    for code in (f"{L} % 4 > 1", f"1 < 3 * ({L} % 4)", f"{A} * ({L} % 4) >= 1"):
        assert not any(claim.allows({"batch": 2, "length": 8, "other": 2}) for claim in claimed(code))


def test_what_a_single_record_or_step_alone_breaks_is_the_exporters_assumption() -> None:
    filled = f"({L} + (-1 * {L}) % 4)"
    codes = (f"4 * ({filled} // 4) < {A} * {filled}", f"192 * {A} * ({filled} // 4) != 0", f"4 < {A} * {filled}")
    wide, *_, strict = claimed(*codes)
    assert wide.guards == ()
    assert wide.allows({"batch": 1, "length": 1, "other": 2})
    assert not strict.allows({"batch": 1, "length": 3, "other": 2})


def test_a_step_of_several_elements_is_assumed_to_be_no_single_one() -> None:
    share = f"max(1, (2*{A}) // 3)"
    wide, *_, strict = claimed(f"{share} != 1", f"6*{share} > 6", f"(3 % (3*{share})) != 0", batch=Dim(min=3))
    assert wide.dims["batch"] == Dim(min=1)
    assert strict.dims["batch"] == Dim(min=3)
    assert claimed(f"6*{share} > 5", f"6*{share} > 12")[0].dims["batch"].min > 2


@pytest.mark.parametrize("code", [f"{A} * {L} > 5", f"{A} < {L}", f"{A} * {L} != 6", f"16 * ({L} // 4) * {A} != 0"])
def test_what_larger_sizes_break_too_is_no_assumption(code: str) -> None:
    assert all(claim.guards or claim.dims["length"].min > 2 for claim in claimed(code)[-2:])


def test_all_few_sizes_that_a_guard_leaves_out_are_probed_and_of_many_some_up_to_the_largest() -> None:
    few, many = claimed(f"({L} // 6) != 4"), claimed(f"{L} % 48 != 0")
    assert {24, 25, 26, 27, 28, 29} <= set(borders(few)["length"])
    assert {48, 96, 144, 288, 528, 912} <= set(borders(many)["length"])


def test_a_remainder_that_is_left_out_does_not_end_the_range() -> None:
    for code in (f"{L} % 48 != 0", f"{L} % 7 == 3", f"({L} // 4) % 5 == 1"):
        *_, strict = claimed(code)
        assert strict.dims["length"].max is None, code


def test_the_users_conditions_are_left_out_only_where_the_others_imply_them() -> None:
    far, near = f"({L} // 16000) != 5", f"({L} // 40) != 2"
    made = [claimed(far, decided=decided)[0] for decided in ((), (far,))]
    assert [claim.allows({"batch": 1, "length": 80_000, "other": 1}) for claim in made] == [True, False]
    bounded = claimed(far, f"{L} <= 500", decided=(far,))[0]
    assert bounded.dims["length"].max == 500
    assert bounded.guards == ()
    for decided, widest in (((), True), ((near,), False)):  # more sizes than probes would try
        assert claimed(near, decided=decided)[0].allows({"batch": 1, "length": 80, "other": 1}) is widest


def test_a_condition_that_follows_from_a_remainder_may_be_widened_however_it_is_written() -> None:
    for code in (
        f"({L} % 2) != 0",
        f"2*({L} // 2) - {L} != 0",
        f"{L} - 2*(({L} + 1) // 2) + 1 != 0",
        f"({L} // 3) % 4 != 2",
    ):
        wide, *_, strict = claimed(code, decided=(code,))
        assert wide.guards == (), code
        assert strict.guards or strict.dims["length"].multiple_of == 2, code
        assert max(borders((wide, strict))["length"]) > 800, code
    for code, size in (
        (f"({L} // 40) != 4", 161),
        (f"({L} % 2) * ({L} - 2001) != 0", 2001),
        (f"{L} % 1500 != 100", 100),
    ):
        assert not claimed(code, decided=(code,))[0].allows({"batch": 1, "length": size, "other": 1}), code


def test_an_assumption_of_the_users_code_has_no_second_root() -> None:
    hidden = f"({L} - 1)*({L} - 70001) != 0"
    sizes = {"batch": 1, "length": 70_001, "other": 1}
    assert not any(claim.allows(sizes) for claim in claimed(hidden, decided=(hidden,)))
    plain = f"{L} != 1"
    assert claimed(plain, decided=(plain,))[0].allows(sizes | {"length": 1})


def test_every_size_that_a_condition_of_the_user_leaves_out_is_tried_where_they_are_few() -> None:
    assert holes_of(f"({L} // 16) != 14") == {(size,) for size in range(224, 240)}
    assert holes_of(f"{L} != 1500") == {(1500,)}
    for kept, out in ((f"{L} != 5000", 5000), (f"({L} // 33) != 14", 470)):  # farther than is tried, and too many
        assert not claimed(kept, decided=(kept,))[0].allows({"batch": 1, "length": out, "other": 1})


def test_sizes_of_a_grid_are_tried_all_over_it_and_where_both_are_equal() -> None:
    tried = holes_of(f"({L} // 16)*({M} // 16) != 196")
    assert all((length // 16) * (other // 16) == 196 for length, other in tried)
    assert {(224, 224), (239, 239)} <= tried
    assert {14, 1, 196, 7, 28} <= {length // 16 for length, _ in tried}
    assert 16 <= len(tried) <= 27


def test_a_remainder_that_the_users_code_needs_is_tried_at_the_others() -> None:
    for code, others in ((f"{L} % 2 == 1", {0}), (f"{L} % 4 == 3", {0, 1, 2})):
        wide, *_, strict = claimed(code, decided=(code,))
        assert wide.guards == () != strict.guards
        for least in (0, 100):
            tried = [size for size in borders((wide, strict))["length"] if size > least]
            assert others <= {size % (len(others) + 1) for size in tried}
    for kept in (f"{L} % 9 == 3", f"{L} % 4 == 0"):
        assert not claimed(kept, decided=(kept,))[0].allows({"batch": 1, "length": 6, "other": 1})
