"""Values around the size from which on a model answers no number are probed, whatever that size is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import Probe
from trueline.capture.proof.value_probes import EQUAL, Observe, make_value_probes, observe_border

EXAMPLE = np.array([[1.0, -0.25]], np.float32)


def huge(size: float) -> Probe:
    values = (EXAMPLE * size).astype(np.float32)
    name = f"batch 1, x: up to {size:g}"
    return Probe(name=name, origin="made", num_records=1, inputs={"x": values}, planted="x", value=size)


def test_nan_is_in_whole_records_in_parts_of_them_and_in_one_place_beside_one_that_has_none_however_few() -> None:
    signature = Signature(inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 9)),), outputs=(),
                          dims={"batch": Dim()})  # fmt: skip
    for dear in (False, True):
        probes = make_value_probes({"x": np.ones((2, 9), np.float32)}, signature, dear=dear)
        found = {probe.name.partition(": ")[2]: np.isnan(probe.inputs["x"]).sum(axis=1) for probe in probes}
        assert {9, 0} <= set(found["either in some records"])
        assert any(1 < count < 9 for count in found["either in some records"])
        assert 1 in found["NaN in some records"]
    assert found["NaN in some records"].tolist() == [1, 1], "two records tell what other places do"
    assert len(found["either in some records"]) == 4


def observer(border: float, asked: list[float]) -> Observe:
    """Observes a model that answers NaN from `border` on, and notes what it is asked."""

    def observe(probes: Sequence[Probe]) -> tuple[Observation, ...]:
        asked.extend(float(probe.value) for probe in probes)
        answers = [EXAMPLE * (1 if probe.value < border else np.nan) for probe in probes]
        return tuple(
            Observation(probe=probe, outputs={"y": answer}, error="", way=())
            for probe, answer in zip(probes, answers, strict=True)
        )

    return observe


@pytest.mark.parametrize("border", [1.3e19, 5e24, 88.0, 7e3])
def test_values_on_both_sides_of_the_border_are_within_a_factor_of_two(border: float) -> None:
    asked: list[float] = []
    observe = observer(border, asked)
    observe_border(observe, observe([huge(3e38)]), cheap=True)
    assert max(one for one in asked if one < border) > border / 2
    assert min(one for one in asked if one >= border) < border * 2


def test_a_model_that_answers_numbers_for_the_largest_values_is_asked_nothing_more() -> None:
    asked: list[float] = []
    observe = observer(np.inf, asked)
    observe_border(observe, observe([huge(3e38)]), cheap=True)
    assert asked == [3e38]


def test_a_model_whose_calls_cost_much_is_asked_only_until_it_answers_numbers() -> None:
    asked: list[float] = []
    observe = observer(1e10, asked)
    observe_border(observe, observe([huge(3e38)]), cheap=False)
    assert asked == [3e38, 1e30, 1e19, 1e18, 1e9]


def test_values_of_one_size_and_sign_are_asked_until_the_model_answers_numbers_and_no_further() -> None:
    spec = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
    signature = Signature(inputs=(spec,), outputs=(), dims={"batch": Dim()})
    most = float(np.finfo(np.float32).max)
    for what, end in zip(EQUAL, (-most, most), strict=True):
        (equal,) = [one for one in make_value_probes({"x": EXAMPLE}, signature) if what in one.name]
        assert (equal.inputs["x"] == np.float32(end)).all()  # a sum of these overflows in one order of its terms alone
        asked: list[float] = []
        observe = observer(1e10, asked)
        observe_border(observe, observe([equal]), cheap=True)
        assert asked == [most, 3e38, 1e30, 1e19, 1e18, 1e9]
