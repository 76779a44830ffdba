"""A program that lies on any probe is caught, and the user's line is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle.signature import Dim, Signature
from trueline.runtime import paths
from trueline.runtime.eager import EagerSession
from trueline.runtime.probes import make_probes
from trueline.runtime.prove import Proof, observe, parting, prove
from worlds.models import Branch, Counter, Mlp, Noisy, ShapeBranch, Ternary, place_of

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


class Frozen:
    """What a tracer makes of a model: one way, taken for every input. `answer` is that way."""

    format = "frozen"

    def __init__(self, signature: Signature, answer: Any) -> None:
        self.signature = signature
        self.answer = answer

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.signature.check(inputs)
        return {"output": self.answer(inputs["x"])}


def oracle(module: nn.Module) -> EagerSession:
    torch.manual_seed(0)
    return EagerSession(module.eval(), torch.rand(4, 8))


def proof_of(module: nn.Module, answer: Any, *, upper: int | None = None) -> tuple[Proof, EagerSession]:
    eager = oracle(module)
    signature = Signature(
        inputs=eager.signature.inputs, outputs=eager.signature.outputs, dims={"batch": Dim(max=upper)}
    )
    return prove(Frozen(signature, answer), eager, make_probes(eager.example)), eager


def test_a_program_that_answers_as_the_model_does_is_proven_on_every_probe() -> None:
    eager = oracle(Mlp())
    found = prove(eager, eager, make_probes(eager.example))
    assert (found.proven, found.reason, found.max_abs_error) == (True, "", 0.0)
    assert {one.verdict for one in found.evidence} == {"agrees"}
    assert all(len(one.inputs_sha256) == 64 and one.tolerance for one in found.evidence)


def test_a_branch_on_values_that_was_frozen_is_caught_and_its_line_is_found() -> None:
    found, eager = proof_of(Branch(), lambda x: x * np.float32(2))
    assert not found.proven
    assert found.reason.startswith("on probe 'batch 1, ")
    parted = parting(observe(eager, make_probes(eager.example)), found.disagreeing)
    assert parted is not None
    assert place_of("data branch") in str(parted[0])
    assert parted[0].source.startswith("if x.sum() > 0:")
    assert parted[1].startswith("batch 1,")  # held against a probe of the same size: the values steer it


def test_a_branch_within_one_line_is_found_too() -> None:
    found, eager = proof_of(Ternary(), lambda x: x * np.float32(2))
    parted = parting(observe(eager, make_probes(eager.example)), found.disagreeing)
    assert parted is not None
    assert place_of("ternary") in str(parted[0])


def test_a_branch_on_the_shape_that_was_frozen_is_caught_at_the_smallest_size_that_shows_it() -> None:
    found, eager = proof_of(ShapeBranch(), lambda x: x + np.float32(1))
    assert not found.proven
    assert found.disagreeing == "batch 8, as given"
    parted = parting(observe(eager, make_probes(eager.example)), found.disagreeing)
    assert parted is not None
    assert place_of("shape branch") in str(parted[0])


def test_the_same_program_is_proven_within_a_range_that_it_enforces() -> None:
    found, _ = proof_of(ShapeBranch(), lambda x: x + np.float32(1), upper=6)
    assert found.proven
    outside = [one for one in found.evidence if one.verdict == "outside"]
    assert outside
    assert all(one.shapes["x"][0] > 6 and "at most 6" in one.reason for one in outside)


@pytest.mark.parametrize("module", [Counter(), Noisy()])
def test_a_model_that_is_no_function_of_its_inputs_is_refused(module: nn.Module) -> None:
    found, _ = proof_of(module, lambda x: x)
    assert not found.proven
    assert "asked the same again" in found.reason


def test_a_program_with_a_memory_is_caught_by_asking_the_same_again() -> None:
    asked: list[int] = []

    def answer(x: Any) -> Any:
        asked.append(1)
        return x + np.float32(1) + np.float32(len(asked) > 10)

    assert not proof_of(ShapeBranch(), answer, upper=6)[0].proven


def test_a_program_that_raises_where_the_model_answers_disagrees() -> None:
    def answer(x: Any) -> Any:
        if len(x) == 1:
            raise ValueError("no batch of one")
        return x + np.float32(1)

    found, _ = proof_of(ShapeBranch(), answer, upper=6)
    assert "the program raises ValueError: no batch of one" in found.reason


def test_a_size_that_the_model_itself_cannot_answer_is_not_claimed() -> None:
    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 1:
                raise ValueError("give me two")
            return x + 1

    found, _ = proof_of(Many(), lambda x: x + np.float32(1))
    assert not found.proven
    assert "the eager model raises ValueError: give me two" in found.reason


def test_an_answer_that_loses_its_batch_dimension_is_refused_though_the_numbers_agree() -> None:
    class Squeezed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.squeeze()

    found, _ = proof_of(Squeezed(), np.squeeze)
    assert not found.proven
    assert "has shape [8], the signature promises ['batch', 8]" in found.reason


def test_made_up_values_that_the_model_refuses_prove_and_disprove_nothing() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("not negative")
            return x + 1

    found, _ = proof_of(Positive(), lambda x: x + np.float32(1))
    assert found.proven
    assert "unanswered" in {one.verdict for one in found.evidence}


def test_two_equal_ways_do_not_part_and_a_loop_that_runs_longer_does() -> None:
    def loop(n: int) -> int:
        total = 0
        for i in range(n):
            total += i
        return total

    ways = []
    for n in (3, 3, 4):
        with paths.watching() as way:
            loop(n)
        ways.append(way)
    assert paths.divergence(ways[0], ways[1]) is None
    place = paths.divergence(ways[0], ways[2])
    assert place is not None
    assert place.source == "for i in range(n):"


def test_watching_leaves_the_tracer_that_was_there_in_place() -> None:
    import sys

    def mine(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        with paths.watching():
            pass
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)
