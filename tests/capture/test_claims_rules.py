"""How far a claim may go: what its rules say, without a model that is exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture import claims, size_limits, size_walk
from trueline.capture.export.exported import Exported
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe

X = TensorSpec(name="x", datatype="FP32", shape=("batch", "length"))
NOT_SEVEN = Guard(text="length != 7", rule="d0 != 7", symbols=("length",))
EVEN = Guard(text="batch % 2 == 0", rule="d0 % 2 == 0", symbols=("batch",))


def claim(*guards: Guard, **dims: Dim) -> Signature:
    return Signature(inputs=(X,), outputs=(), dims={"batch": Dim(), "length": Dim()} | dims, guards=guards)


def seen(batch: int, length: int) -> Observation:
    x = np.zeros((batch, length), np.float32)
    probe = Probe(name="p", origin="given", num_records=batch, inputs={"x": x})
    return Observation(probe=probe, outputs={}, error="", way=())


def test_a_claim_is_reached_when_each_thing_that_it_leaves_out_is_broken_by_a_probe() -> None:
    wide, strict = claim(), claim(NOT_SEVEN, EVEN)
    assert not claims._tests_difference(wide, strict, [])
    assert not claims._tests_difference(wide, strict, [seen(2, 7)])
    assert not claims._tests_difference(wide, strict, [seen(3, 5)])
    assert claims._tests_difference(wide, strict, [seen(2, 7), seen(3, 5)])
    assert claims._tests_difference(wide, strict, [seen(3, 7)])
    assert claims._tests_difference(claim(EVEN), strict, [seen(2, 7)])


def test_a_wider_range_is_reached_when_a_probe_lies_outside_of_the_narrower_one() -> None:
    wide, strict = claim(), claim(length=Dim(min=2, max=8))
    assert not claims._tests_difference(wide, strict, [seen(1, 2), seen(1, 8)])
    assert claims._tests_difference(wide, strict, [seen(1, 1)])
    assert claims._tests_difference(wide, strict, [seen(1, 9)])
    both = claim(length=Dim(min=2, max=8), batch=Dim(max=4))
    assert not claims._tests_difference(wide, both, [seen(1, 9)])
    assert claims._tests_difference(wide, both, [seen(1, 9), seen(5, 3)])


@pytest.mark.parametrize(
    ("dim", "low", "high", "cut"),
    [
        (Dim(), 1, None, Dim()),
        (Dim(), 3, 10, Dim(min=3, max=10)),
        (Dim(min=4, max=8), 3, 10, Dim(min=4, max=8)),
        (Dim(min=2, max=20, multiple_of=2), 4, 10, Dim(min=4, max=10, multiple_of=2)),
        (Dim(max=8), 1, None, Dim(max=8)),
    ],
)
def test_a_claim_is_cut_to_what_the_model_answers_and_never_widened(
    dim: Dim, low: int, high: int | None, cut: Dim
) -> None:
    found = size_limits._cut(claim(length=dim), "length", low, high)
    assert (found.dims["length"], found.dims["batch"]) == (cut, Dim())


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize(("first", "last"), [(4, 12), (8, 60), (4, 4)])
def test_the_last_size_that_is_answered_is_found_on_either_side(first: int, last: int, step: int) -> None:
    def answers(size: int) -> Any:
        return first <= size <= last

    last -= last % step
    assert size_walk.find_edge(answers, first, 64, step) == last
    assert size_walk.find_edge(answers, last, 0, step) == first


@pytest.mark.parametrize(
    ("guards", "dims", "fitted"),
    [
        ((), {"length": Dim(max=8)}, {"batch": 32, "length": 8}),
        (
            (Guard(text="batch * length < 100", rule="d0 * d1 < 100", symbols=("batch", "length")),),
            {},
            {"batch": 8, "length": 8},
        ),
        ((Guard(text="batch < length", rule="d0 < d1", symbols=("batch", "length")),), {}, {"batch": 16, "length": 32}),
        ((Guard(text="length > 40", rule="d0 > 40", symbols=("length",)),), {"length": Dim(min=3)}, None),
        ((Guard(text="length < 0", rule="d0 < 0", symbols=("length",)),), {"length": Dim(min=2, max=40)}, None),
    ],
)
def test_all_sizes_together_are_made_to_fit_the_guards_or_given_up(
    guards: tuple[Guard, ...], dims: dict[str, Dim], fitted: dict[str, int] | None
) -> None:
    assert size_limits._fit_all(claim(*guards, **dims), 32) == fitted


def test_a_probe_lies_inside_a_claim_by_its_sizes_and_its_guards() -> None:
    some = claim(NOT_SEVEN, length=Dim(max=8))
    assert [claims.allows(some, seen(1, length).probe) for length in (6, 7, 8, 9)] == [True, False, True, False]


class Doubling:
    """An exported program that doubles, but for the lengths at which it does not."""

    format = "torch_export"

    def __init__(self, signature: Signature, *, wrong: int = 0) -> None:
        self.signature = signature
        self.wrong = wrong

    def run(self, inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"] * np.float32(3 if inputs["x"].shape[1] == self.wrong else 2)}


def answered(batch: int, length: int) -> Observation:
    """What a model that doubles answers at these sizes."""
    x = np.ones((batch, length), np.float32)
    probe = Probe(name=f"{batch}, {length}", origin="given", num_records=batch, inputs={"x": x})
    return Observation(probe=probe, outputs={"y": x * np.float32(2)}, error="", way=())


def borne_out(
    monkeypatch: pytest.MonkeyPatch, made: Sequence[Signature], *sizes: tuple[int, int], wrong: int = 0
) -> int:
    """Which of the claims, from the widest on, a program that is wrong at one length bears out."""
    whole = [msgspec.structs.replace(one, outputs=(msgspec.structs.replace(X, name="y"),)) for one in made]
    exported = Exported(
        program=None,  # type: ignore[arg-type]
        signature=whole[0],
        symbols={},
        claims=tuple(whole),
        boundaries={},
        weight_bytes=0,
    )
    monkeypatch.setattr(claims, "LoadedProgram", lambda one: Doubling(one.signature, wrong=wrong))
    found = claims.choose(exported, [answered(*one) for one in sizes])
    return whole.index(found.signature)


def test_the_widest_claim_is_taken_that_probes_between_it_and_the_strictest_bear_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = [claim(), claim(NOT_SEVEN), claim(NOT_SEVEN, EVEN)]
    assert borne_out(monkeypatch, made, (2, 7), (3, 5)) == 0
    assert borne_out(monkeypatch, made, (2, 7), (3, 5), wrong=7) == 1, "batches of any number, and no length of 7"
    assert borne_out(monkeypatch, made, (2, 7), (3, 5), wrong=5) == 2


def test_a_claim_that_no_probe_was_asked_about_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [claim(), claim(NOT_SEVEN, EVEN)]
    assert borne_out(monkeypatch, made) == 1
    assert borne_out(monkeypatch, made, (2, 3), (4, 5)) == 1
    assert borne_out(monkeypatch, made, (2, 7), (4, 5)) == 1, "no odd batch was asked"


def test_a_narrower_claim_is_the_next_one_and_after_the_strictest_there_is_none() -> None:
    made = (claim(), claim(NOT_SEVEN), claim(NOT_SEVEN, EVEN))
    exported = Exported(
        program=None,  # type: ignore[arg-type]
        signature=made[0],
        symbols={},
        claims=made,
        boundaries={},
        weight_bytes=0,
    )
    second = claims.narrower(exported)
    assert second is not None
    assert second.signature == made[1]
    third = claims.narrower(second)
    assert third is not None
    assert third.signature == made[2]
    assert claims.narrower(third) is None
