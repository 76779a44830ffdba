"""A program that lies on any probe is caught, and the user's line is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.runtime import paths
from trueline.runtime.eager import EagerSession
from trueline.runtime.probes import Probe, make_probes
from trueline.runtime.prove import Observation, Proof, judge, observe, parting, prove
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


def seen(name: str, x: Array, y: Array | None, *, origin: Any = "made") -> Observation:
    probe = Probe(name=name, origin=origin, num_records=len(x), inputs={"x": x})
    return Observation(
        probe=probe, outputs=None if y is None else {"output": y}, error="" if y is not None else "raises", way=()
    )


def program(answer: Any, *, upper: int | None = None, least: int = 1) -> Frozen:
    spec = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
    out = TensorSpec(name="output", datatype="FP32", shape=("batch", 2))
    return Frozen(Signature(inputs=(spec,), outputs=(out,), dims={"batch": Dim(min=least, max=upper)}), answer)


def rows(size: int, value: float = 0.0) -> Array:
    return np.full((size, 2), value, np.float32)


NOTHING = "no probe could be compared: each is outside the program's range, or the eager model raises"


def test_where_nothing_could_be_compared_nothing_is_proven() -> None:
    never = pytest.fail
    outside = judge(program(never, least=100), [seen("a", rows(1), rows(1, 1)), seen("b", rows(2), rows(2, 1))])
    assert (outside.proven, outside.reason) == (False, NOTHING)
    assert {one.verdict for one in outside.evidence} == {"outside"}
    unanswered = judge(program(never), [seen("a", rows(1), None), seen("b", rows(2), None)])
    assert (unanswered.proven, unanswered.reason) == (False, NOTHING)
    both = judge(program(never, upper=1), [seen("a", rows(1), None), seen("b", rows(2), rows(2, 1))])
    assert (both.proven, both.reason) == (False, NOTHING)
    assert [one.verdict for one in both.evidence] == ["unanswered", "outside"]
    nothing = judge(program(never), [])
    assert (nothing.proven, nothing.reason) == (False, NOTHING)


def test_one_probe_that_agrees_is_compared_and_said_so() -> None:
    found = judge(
        program(lambda x: x + np.float32(1), upper=1), [seen("a", rows(1), rows(1, 1)), seen("b", rows(2), rows(2))]
    )
    assert (found.proven, found.reason) == (True, "")
    assert [one.verdict for one in found.evidence] == ["agrees", "outside"]


@pytest.mark.parametrize("wrong", range(4))
def test_one_probe_that_disagrees_is_enough_whichever_it_is(wrong: int) -> None:
    asked = [seen(f"p{size}", rows(size), rows(size, 1)) for size in range(1, 5)]
    asked[wrong] = seen(f"p{wrong + 1}", rows(wrong + 1), rows(wrong + 1, 5))
    found = judge(program(lambda x: x + np.float32(1)), asked)
    assert (found.proven, found.disagreeing) == (False, f"p{wrong + 1}")
    assert found.reason.startswith(f"on probe 'p{wrong + 1}': output 'output' differs by 4")
    assert [one.verdict for one in found.evidence] == ["agrees"] * wrong + ["disagrees"] + ["agrees"] * (3 - wrong)
    assert found.max_abs_error == 0.0


def test_of_several_that_disagree_the_smallest_is_named() -> None:
    found = judge(program(lambda x: x), [seen(f"p{size}", rows(size), rows(size, 1)) for size in (3, 1, 2)])
    assert found.disagreeing == "p1"


def test_every_probe_has_its_evidence_with_what_was_asked_and_how_near_it_came() -> None:
    asked = [seen(f"p{size}", rows(size, size), rows(size, size)) for size in (1, 2)]
    near = np.float32(1e-6)
    found = judge(program(lambda x: x + near), asked, versions={"torch": "2"})
    assert [one.probe for one in found.evidence] == ["p1", "p2"]
    assert [dict(one.shapes) for one in found.evidence] == [{"x": (1, 2)}, {"x": (2, 2)}]
    assert len({one.inputs_sha256 for one in found.evidence}) == 2
    assert all(
        one.versions == {"torch": "2"} and one.tolerance == "float32: 1e-05+0.0001*scale" for one in found.evidence
    )
    assert all(one.max_abs_error == pytest.approx(1e-6, rel=0.2) for one in found.evidence)
    assert found.max_abs_error == max(one.max_abs_error or 0.0 for one in found.evidence) > 0


def test_the_digest_of_a_probe_is_of_its_values_its_shape_and_its_dtype() -> None:
    inputs = [rows(2), rows(2, 1), rows(1), rows(2).astype(np.float64), np.zeros((2, 2), np.int32)]
    asked = [seen(f"p{i}", x, None) for i, x in enumerate(inputs)]
    assert len({one.inputs_sha256 for one in judge(program(pytest.fail), asked).evidence}) == len(inputs)
    twice = judge(program(pytest.fail), [seen("a", rows(2), None), seen("b", rows(2), None)])
    assert len({one.inputs_sha256 for one in twice.evidence}) == 1


def test_a_given_record_that_the_model_does_not_answer_counts_against_the_claim_and_a_made_one_does_not() -> None:
    good = seen("good", rows(2), rows(2, 1))
    adding = program(lambda x: x + np.float32(1))
    assert judge(adding, [good, seen("bad", rows(1), None)]).proven
    found = judge(adding, [good, seen("bad", rows(1), None, origin="given")])
    assert (found.proven, found.disagreeing) == (False, "bad")


@pytest.mark.parametrize("answer", [lambda x: x[:1], lambda x: x[..., None], lambda x: x[:, :1], np.transpose])
def test_an_answer_of_another_shape_than_the_signature_promises_is_refused_though_the_model_gives_it(
    answer: Any,
) -> None:
    x = rows(3)
    found = judge(program(answer), [seen("p", x, answer(x))])
    assert not found.proven
    assert "the signature promises ['batch', 2]" in found.reason


def test_a_model_that_answers_a_little_otherwise_the_second_time_is_no_function() -> None:
    once, again = seen("first", rows(2), rows(2, 1)), seen("last", rows(2), rows(2, 1.01))
    found = judge(program(lambda x: x + np.float32(1)), [once, again])
    assert not found.proven
    assert found.reason.startswith("the model answers differently when it is asked the same again")


def test_a_wild_probe_is_asked_only_where_every_output_of_the_model_is_numbers() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.nan_to_num(x)

    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(x)

    for module, kept in ((Two(), False), (One(), True)):
        eager = oracle(module)
        probes = make_probes(eager.example)
        assert any(probe.wild for probe in probes)
        assert any(one.probe.wild for one in observe(eager, probes)) is kept


def test_a_made_probe_that_the_model_refuses_stays_on_record() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("not negative")
            return x + 1

    eager = oracle(Positive())
    probes = make_probes(eager.example)
    tame = [probe.name for probe in probes if not probe.wild]
    assert [one.probe.name for one in observe(eager, probes) if not one.probe.wild] == tame
