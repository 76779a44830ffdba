"""A disagreement is shown on the smallest input that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture.proof.disagreement import shrink
from trueline.capture.proof.probes import Probe

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

SHAPE = ("batch", "length")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", datatype="FP32", shape=SHAPE),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=SHAPE),),
    dims={"batch": Dim(), "length": Dim(multiple_of=2)},
)
BATCH = Probe(
    name="b", origin="given", num_records=4, inputs={"x": np.arange(32, dtype=np.float32).reshape(4, 8) / 7 + 1}
)


class Answering:
    format = "own"
    signature = SIGNATURE

    def __init__(self, answer: Callable[[Array], Array]) -> None:
        self.answer = answer
        self.asked = 0

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.asked += 1
        return {"y": self.answer(inputs["x"])}


def test_sizes_fall_to_the_smallest_that_the_claim_allows_and_values_to_zeros() -> None:
    found = shrink(Answering(lambda x: x + 1), Answering(lambda x: x + 2), BATCH)
    assert found is not None
    assert str(found) == "x FP32 [1, 2] = [[0., 0.]]"
    assert "differs by 1" in found.reason


def test_what_the_disagreement_needs_stays() -> None:
    def long(x: Array) -> Array:
        return x * 2 if x.shape[1] > 4 and x.max() > 0 else x + 0

    found = shrink(Answering(lambda x: x + 0), Answering(long), BATCH)
    assert found is not None
    assert found.inputs["x"].shape == (1, 6)
    assert found.inputs["x"].max() == 1


def test_the_number_of_questions_is_bounded() -> None:
    program = Answering(lambda x: x + 1)
    shrink(program, Answering(lambda x: x), BATCH, questions=7)
    assert program.asked <= 7


def test_a_disagreement_that_does_not_come_back_is_none() -> None:
    assert shrink(Answering(lambda x: x), Answering(lambda x: x), BATCH) is None
