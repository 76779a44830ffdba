"""Probes leave the example's ground in every direction that a float allows, and in none that an id forbids."""

from __future__ import annotations

import numpy as np

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture.proof.probes import Probe, make_given_probes, make_probes

EXAMPLE = {
    "x": np.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]], np.float32),
    "ids": np.array([[3, 9], [4, 4], [7, 5]], np.int64),
    "mask": np.array([[True], [False], [True]]),
}


def test_the_usual_sizes_and_those_asked_for_are_probed_with_given_records() -> None:
    given = {probe.num_records for probe in make_probes(EXAMPLE, sizes=(6, 7)) if probe.origin == "given"}
    assert given == {1, 2, 3, 4, 6, 7, 8, 17, 32}


def kinds_of(probes: tuple[Probe, ...]) -> set[str]:
    return {probe.name.partition(", ")[2] for probe in probes}


def count_records(probes: tuple[Probe, ...]) -> int:
    return sum(probe.num_records for probe in probes)


def test_a_model_whose_calls_take_long_is_asked_for_the_same_values_in_fewer_records() -> None:
    all_of, fewer = make_probes(EXAMPLE), make_probes(EXAMPLE, dear=True)
    assert {one.num_records for one in all_of} - {one.num_records for one in fewer} == {32}
    assert kinds_of(fewer) == kinds_of(all_of)
    assert count_records(fewer) <= 0.6 * count_records(all_of)
    alike = next(probe for probe in fewer if "three values" in probe.name)
    assert alike.num_records > 16, "a sort of so few keeps the order of equal values"
    ids = {"ids": EXAMPLE["ids"]}
    assert max(probe.num_records for probe in make_probes(ids, dear=True)) == 17, "no equal floats fill a batch of 17"


def test_many_equal_values_are_asked_of_a_model_whose_calls_take_long_if_it_may_choose_among_them() -> None:
    chooses, plain = (make_probes(EXAMPLE, dear=True, chooses=one) for one in (True, False))
    assert kinds_of(plain) == kinds_of(chooses)
    assert [one.num_records for one in plain if "three values" in one.name] == [3]
    assert [one.num_records for one in make_probes(EXAMPLE, chooses=False) if "three values" in one.name] == [32]


def test_equal_arguments_give_equal_probes_and_another_seed_others() -> None:
    def content(seed: int) -> list[tuple[str, bytes]]:
        return [(probe.name, probe.inputs["x"].tobytes()) for probe in make_probes(EXAMPLE, seed=seed)]

    assert content(0) == content(0)
    assert content(0) != content(1)


def test_integers_and_masks_stay_inside_what_the_example_shows() -> None:
    for probe in make_probes(EXAMPLE):
        assert probe.inputs["ids"].min() >= 3
        assert probe.inputs["ids"].max() <= 9
        assert probe.inputs["ids"].dtype == np.int64
        assert probe.inputs["mask"].dtype == np.bool_


def test_float_values_turn_their_sign_vanish_and_grow() -> None:
    found = {probe.name: probe.inputs["x"] for probe in make_probes(EXAMPLE)}
    assert (found["batch 3, zeros"] == 0).all()
    assert (found["batch 3, negated"] == -EXAMPLE["x"]).all()
    assert np.abs(found["batch 3, times 1000"]).max() == 6000
    assert all(array.dtype == np.float32 for array in found.values())


def test_many_records_of_equal_scores_are_asked() -> None:
    found = {probe.name: probe for probe in make_probes(EXAMPLE)}["batch 32, three values"]
    assert (found.origin, found.num_records) == ("made", 32)
    assert set(np.unique(found.inputs["x"])) == {-1.0, 0.0, 1.0}


def test_the_example_is_asked_first_and_last() -> None:
    probes = make_probes(EXAMPLE)
    for probe in (probes[0], probes[-1]):
        assert all((probe.inputs[name] == EXAMPLE[name]).all() for name in EXAMPLE)


def test_names_of_probes_are_unique() -> None:
    names = [probe.name for probe in make_probes(EXAMPLE, sizes=(1, 2, 300))]
    assert len(names) == len(set(names))


def test_one_record_of_bare_numbers_is_enough() -> None:
    assert {probe.num_records for probe in make_probes({"x": np.array([1.5])})} >= {1, 2, 17}


def test_other_examples_are_asked_and_lengths_beyond_those_of_the_first() -> None:
    specs = [("x", "FP32", ("batch", "length")), ("lengths", "INT64", ("batch",))]
    inputs = tuple(TensorSpec(name=name, datatype=kind, shape=shape) for name, kind, shape in specs)
    signature = Signature(inputs=inputs, outputs=(), dims={"batch": Dim(), "length": Dim()})
    first, other = ({"x": np.ones((2, size), np.float32), "lengths": np.array([size, 1], np.int64)} for size in (5, 9))
    given, longer = make_given_probes(first, [first, other], signature)
    assert given.inputs["lengths"].tolist() == [9, 1]
    assert (given.origin, given.name) == ("given", "batch 2, length 9, another example")
    assert longer.inputs["x"].shape == (2, 10)
    assert longer.inputs["lengths"].tolist() == [10, 1]
