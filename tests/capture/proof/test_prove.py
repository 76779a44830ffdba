"""A program that lies on any probe is caught, and the user's line is found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture.model import code_paths
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.careful import Careful, care
from trueline.capture.proof.observe import Observation, find_parting, hidden_state, observe
from trueline.capture.proof.probes import Probe, make_probes
from trueline.capture.proof.prove import Proof, disagreement, judge, prove, versions
from trueline.errors import CaptureError
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
    parted = find_parting(observe(eager, make_probes(eager.example)), found.disagreeing)
    assert parted is not None
    assert place_of("data branch") in str(parted[0])
    assert parted[0].source.startswith("if x.sum() > 0:")
    assert parted[1].startswith("batch 1,")  # held against a probe of the same size: the values steer it


def test_a_branch_within_one_line_is_found_too() -> None:
    found, eager = proof_of(Ternary(), lambda x: x * np.float32(2))
    parted = find_parting(observe(eager, make_probes(eager.example)), found.disagreeing)
    assert parted is not None
    assert place_of("ternary") in str(parted[0])


def test_a_branch_on_the_shape_that_was_frozen_is_caught_at_the_smallest_size_that_shows_it() -> None:
    found, eager = proof_of(ShapeBranch(), lambda x: x + np.float32(1))
    assert not found.proven
    assert found.disagreeing == "batch 8, as given"
    parted = find_parting(observe(eager, make_probes(eager.example)), found.disagreeing)
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
    assert "equal inputs differently" in found.reason


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


def test_made_up_values_that_the_model_refuses_have_to_be_refused_by_the_program() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("not negative")
            return x + 1

    def refuse(x: Array) -> Array:
        return x + np.float32(1) if (x >= 0).all() else opened(ValueError("no"))

    found, _ = proof_of(Positive(), refuse)
    assert found.proven
    assert "unanswered" in {one.verdict for one in found.evidence}
    found, _ = proof_of(Positive(), lambda x: x + np.float32(1))
    assert "the eager model raises ValueError: not negative, and the program answers" in found.reason


def test_two_equal_ways_do_not_part_and_a_loop_that_runs_longer_does() -> None:
    def loop(n: int) -> int:
        total = 0
        for i in range(n):
            total += i
        return total

    ways = []
    for n in (3, 3, 4):
        with code_paths.watch() as way:
            loop(n)
        ways.append(way)
    assert code_paths.divergence(ways[0], ways[1]) is None
    place = code_paths.divergence(ways[0], ways[2])
    assert place is not None
    assert place.source == "for i in range(n):"


def test_watching_leaves_the_tracer_that_was_there_in_place() -> None:
    import sys

    def mine(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        with code_paths.watch():
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
    found = judge(program(lambda x: x + near), asked)
    assert [one.probe for one in found.evidence] == ["p1", "p2"]
    assert [dict(one.shapes) for one in found.evidence] == [{"x": (1, 2)}, {"x": (2, 2)}]
    assert len({one.inputs_sha256 for one in found.evidence}) == 2
    assert all(one.versions == versions() and one.tolerance == OF_FLOATS for one in found.evidence)
    assert all(one.max_abs_error == pytest.approx(1e-6, rel=0.2) for one in found.evidence)
    assert found.max_abs_error == max(one.max_abs_error or 0.0 for one in found.evidence) > 0


def test_the_digest_of_a_probe_is_of_its_values_its_shape_and_its_dtype() -> None:
    inputs = [rows(2), rows(2, 1), rows(1), rows(2).astype(np.float64), np.zeros((2, 2), np.int32)]
    asked = [seen(f"p{i}", x, None) for i, x in enumerate(inputs)]
    assert len({one.inputs_sha256 for one in judge(program(pytest.fail), asked).evidence}) == len(inputs)
    twice = judge(program(pytest.fail), [seen("a", rows(2), None), seen("b", rows(2), None)])
    assert len({one.inputs_sha256 for one in twice.evidence}) == 1


def test_a_given_record_that_the_model_refuses_counts_against_the_claim_and_a_made_one_if_it_is_answered() -> None:
    good = seen("good", rows(2), rows(2, 1))
    adding = program(lambda x: x + np.float32(1))
    assert not judge(adding, [good, seen("bad", rows(1), None)]).proven
    same = program(lambda x: x + np.float32(1) if len(x) > 1 else opened(ValueError("no")))
    assert judge(same, [good, seen("bad", rows(1), None)]).proven
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
    assert found.reason.startswith("the model answers equal inputs differently")


def test_a_made_probe_that_the_model_refuses_stays_on_record() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("not negative")
            return x + 1

    eager = oracle(Positive())
    probes = make_probes(eager.example)
    assert [one.probe.name for one in observe(eager, probes)] == [probe.name for probe in probes]


# Whole answers, with programs and models that are a function each. ------------------------------------------------


class Asked:
    """A model or program that is a function of the array x; it counts its calls."""

    format = "asked"

    def __init__(self, answer: Any, signature: Signature | None = None) -> None:
        self.answer, self.signature = answer, signature or program(None).signature
        self.calls = 0

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.calls += 1
        return {"output": self.answer(inputs["x"])}


def raising(error: Exception) -> Any:
    def answer(x: Array) -> Array:
        raise error

    return answer


def probe_of(name: str, x: Array, *, origin: Any = "made", wild: bool = False, records: int | None = None) -> Probe:
    return Probe(
        name=name, origin=origin, num_records=len(x) if records is None else records, inputs={"x": x}, wild=wild
    )


def sha_of(x: Array, name: str = "x") -> str:
    return hashlib.sha256(f"{name}|{x.dtype.str}|{x.shape}|".encode() + x.tobytes()).hexdigest()


def evidence(name: str, x: Array, verdict: Any, reason: str = "", **more: Any) -> Evidence:
    """Of the program `frozen`, where nothing was compared unless `more` says so."""
    usual = {"max_abs_error": None, "max_rel_error": None, "tolerance": "", "origin": "made", "versions": {}}
    return Evidence(
        format="frozen",
        against="eager",
        probe=name,
        inputs_sha256=sha_of(x),
        shapes={"x": x.shape},
        verdict=verdict,
        reason=reason,
        **{**usual, **more},
    )


OF_FLOATS = "output: 0.0001 of its column"
STEP = 2.0**-20


def test_a_proof_is_the_whole_of_what_was_found() -> None:
    def step(x: Array) -> Array:
        return opened(ValueError("no")) if (x == 9).all() else x + np.float32(STEP)  # type: ignore[no-any-return]

    judged = program(step, upper=3)
    found = judge(
        judged,
        [
            seen("near", rows(1, 2), rows(1, 2), origin="given"),
            seen("wide", rows(4), rows(4)),
            seen("mute", rows(2, 9), None),
            seen("off", rows(3, 1), rows(3, 5)),
        ],
    )
    refused = "input 'x' has size 4 in dimension 0 (batch), proven only for sizes of at least 1 and at most 3"
    differs = "output 'output' differs by 4 (6 of 6 elements; at [0, 0] 5 is off by 4, where 0.0005 is allowed)"
    off = 4 - STEP
    assert found == Proof(
        format="frozen",
        signature=judged.signature,
        proven=False,
        reason=f"on probe 'off': {differs}",
        disagreeing="off",
        evidence=(
            evidence("near", rows(1, 2), "agrees", origin="given", max_abs_error=STEP, max_rel_error=STEP / 2,
                     tolerance=OF_FLOATS, versions=versions()),
            evidence("wide", rows(4), "outside", refused, versions=versions()),
            evidence("mute", rows(2, 9), "unanswered", "the eager model raises", versions=versions()),
            evidence("off", rows(3, 1), "disagrees", differs, max_abs_error=off, max_rel_error=off / 5,
                     tolerance=OF_FLOATS, versions=versions()),
        ),
        max_abs_error=STEP,
    )  # fmt: skip


def test_a_proof_of_no_probes_and_one_of_a_hidden_state_are_whole_too() -> None:
    nothing = program(pytest.fail)
    assert judge(nothing, []) == Proof(
        format="frozen",
        signature=nothing.signature,
        proven=False,
        reason=NOTHING,
        disagreeing="",
        evidence=(),
        max_abs_error=0.0,
    )
    first, last = seen("first", rows(1), rows(1, 1)), seen("last", rows(1), rows(1, 2))
    differs = "output 'output' differs by 1 (2 of 2 elements; at [0, 0] 1 is off by 1, where 0.0001 is allowed)"
    found = judge(program(lambda x: x + np.float32(1)), [first, last])
    assert found.reason == f"the model answers equal inputs differently: {differs}"
    assert (found.proven, found.disagreeing, found.max_abs_error) == (False, "", 0.0)
    assert [one.verdict for one in found.evidence] == ["agrees", "disagrees"]


def test_a_proof_asks_the_model_and_the_program_each_probe_once_and_names_the_versions() -> None:
    model, made = Asked(lambda x: x * np.float32(2)), Asked(lambda x: x + x)
    found = prove(made, model, [probe_of("a", rows(1, 1)), probe_of("b", rows(2, 3))])
    assert (found.format, found.proven, found.reason, model.calls, made.calls) == ("asked", True, "", 2, 2)
    assert [dict(one.versions) for one in found.evidence] == [versions()] * 2


def test_progress_is_told_after_each_probe() -> None:
    done: list[tuple[int, int]] = []
    asked = [seen(name, rows(1), rows(1)) for name in "abc"]
    judge(program(lambda x: x), asked, progress=lambda *now: done.append(now))
    assert done == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("sizes", "worst"),
    [
        ([(3, 1), (1, 4), (2, 1)], "p1"),  # the fewest records
        ([(1, 3), (1, 2), (1, 4)], "p1"),  # as many records, the fewest values
        ([(2, 2), (1, 3), (1, 3)], "p1"),  # equal in both: the first
    ],
)
def test_the_smallest_probe_is_that_of_the_fewest_records_and_then_of_the_fewest_values(
    sizes: list[tuple[int, int]], worst: str
) -> None:
    asked = []
    for number, (records, length) in enumerate(sizes):
        x = rows(length, number)
        asked.append(replace(seen("", x, x + np.float32(9)), probe=probe_of(f"p{number}", x, records=records)))
    assert judge(program(lambda x: x), asked).disagreeing == worst


def answered(probe: Probe, outputs: dict[str, Array]) -> Observation:
    return Observation(probe=probe, outputs=outputs, error="", way=())


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (ValueError(), "ValueError: "),
        (ValueError("   "), "ValueError: "),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError("\n  no kernel\nat line 3"), "RuntimeError: no kernel"),
    ],
)
def test_what_a_program_raises_is_told_by_its_first_line(error: Exception, first: str) -> None:
    wrong = disagreement(program(raising(error)), answered(probe_of("p", rows(1)), {"output": rows(1)}))
    assert wrong == f"the program raises {first}"


def test_a_program_disagrees_with_an_answer_by_its_values_or_its_shape_and_else_not() -> None:
    adding, asked = program(lambda x: x + np.float32(1)), probe_of("p", rows(1))
    assert disagreement(adding, answered(asked, {"output": rows(1, 1)})) == ""
    assert disagreement(adding, answered(asked, {"output": rows(1, 3)})) == (
        "output 'output' differs by 2 (2 of 2 elements; at [0, 0] 3 is off by 2, where 0.0003 is allowed)"
    )
    flat = program(lambda x: x[0])
    assert disagreement(flat, answered(asked, {"output": rows(1)[0]})) == (
        "output 'output' has shape [2], the signature promises ['batch', 2]"
    )
    assert disagreement(flat, answered(asked, {"output": rows(1, 3)[0]})) == (
        "output 'output' differs by 3 (2 of 2 elements; at [0] 3 is off by 3, where 0.0003 is allowed)"
    ), "the values come before the shape"


def test_a_size_of_an_output_that_no_input_has_may_be_any() -> None:
    spec = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
    out = TensorSpec(name="output", datatype="FP32", shape=("batch", "found"))
    made = Frozen(Signature(inputs=(spec,), outputs=(out,), dims={"batch": Dim(), "found": Dim()}), lambda x: x[:, :1])
    assert disagreement(made, answered(probe_of("p", rows(3)), {"output": rows(3)[:, :1]})) == ""


def test_the_tolerance_says_how_each_output_was_compared() -> None:
    signature = program(None).signature
    outputs = {
        "output": rows(1),
        "ids": np.array([1]),
        "more": rows(1),
        "fine": np.ones(1, np.float64),
        "half": np.ones(1, np.float16),
    }

    class Many:
        format = "many"

        def __init__(self) -> None:
            self.signature = signature

        def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            return outputs

    asked = Observation(probe=probe_of("p", rows(1)), outputs=outputs, error="", way=())
    (one,) = judge(Many(), [asked]).evidence
    assert one.tolerance == (
        "output: 0.0001 of its column; ids: equal; more: 0.0001 of its column; fine: 1e-07 of its column; "
        "half: 0.01 of its column"
    )


def test_the_digest_is_of_all_inputs_in_the_order_of_their_names() -> None:
    one, two = rows(1, 1), np.arange(6).reshape(2, 3).T
    probe = Probe(name="p", origin="made", num_records=1, inputs={"b": two, "a": one})
    (found,) = judge(program(pytest.fail), [Observation(probe=probe, outputs=None, error="", way=())]).evidence
    both = b"a|<f4|(1, 2)|" + one.tobytes() + b"b|<i8|(3, 2)|" + np.ascontiguousarray(two).tobytes()
    assert found.inputs_sha256 == hashlib.sha256(both).hexdigest()


# Observing. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError(), "raises ValueError: "),
        (ValueError("give me two\nor more"), "raises ValueError: give me two"),
        (KeyError("x"), "raises KeyError: 'x'"),
    ],
)
def test_what_the_model_raises_is_recorded_with_its_first_line(error: Exception, told: str) -> None:
    (one,) = observe(Asked(raising(error)), [probe_of("p", rows(1))], num_draws=5)
    assert (one.outputs, one.error, one.draws) == (None, told, None)


def test_what_the_model_answers_is_recorded_as_it_is() -> None:
    asked = [probe_of(name, rows(1, value)) for name, value in (("a", 1), ("b", 2))]
    found = observe(Asked(lambda x: x + x), asked)
    assert [one.probe for one in found] == asked
    assert [(one.error, one.draws) for one in found] == [("", None)] * 2
    assert [(one.outputs or {})["output"].tolist() for one in found] == [[[2.0, 2.0]], [[4.0, 4.0]]]


def test_a_model_that_returns_other_outputs_on_a_probe_is_an_error_with_the_line_where_its_code_parted() -> None:
    def answer(x: Array) -> Array:
        if x.sum() > 1:
            raise CaptureError("returns other outputs", hint="return the same")
        return x

    small, large = probe_of("small", rows(1)), probe_of("large", rows(1, 5))
    with pytest.raises(CaptureError) as first:
        observe(Asked(answer), [large])
    assert (first.value.message, first.value.hint) == ("on probe 'large' returns other outputs", "return the same")
    with pytest.raises(CaptureError) as second:
        observe(Asked(answer), [small, large])
    message, _, place = second.value.message.partition("; see ")
    assert (message, second.value.hint) == ("on probe 'large' returns other outputs", "return the same")
    assert place.startswith(__file__)
    assert place.endswith("if x.sum() > 1:")


def test_a_model_whose_code_took_the_same_way_has_no_line_to_name() -> None:
    answers = iter([rows(1), CaptureError("returns other outputs")])

    def run(x: Array) -> Array:
        return opened(next(answers))

    with pytest.raises(CaptureError) as refused:
        observe(Asked(run), [probe_of("a", rows(1)), probe_of("b", rows(1))])
    assert refused.value.message.startswith("on probe 'b' returns other outputs")


def opened(found: Any) -> Any:
    if isinstance(found, Exception):
        raise found
    return found


def test_a_wild_probe_that_is_refused_stays_on_record_and_so_does_an_answer_without_numbers() -> None:
    def answer(x: Array) -> Array:
        return x if np.isfinite(x).all() or len(x) > 1 else opened(ValueError("no numbers"))

    asked = [
        probe_of("raises", rows(1, np.nan), wild=True),
        probe_of("answers NaN", rows(2, np.nan), wild=True),
        probe_of("answers", rows(1, 3), wild=True),
        probe_of("tame NaN", rows(2, np.inf)),
        probe_of("tame", rows(1)),
    ]
    found = observe(Asked(answer), asked)
    assert [one.probe.name for one in found] == [probe.name for probe in asked]
    assert [one.error for one in found] == ["raises ValueError: no numbers", "", "", "", ""]
    assert all((one.outputs is None) == bool(one.error) for one in found)


def test_a_way_that_an_earlier_probe_took_is_kept_once() -> None:
    def answer(x: Array) -> Array:
        if x.sum() > 1:
            return x + np.float32(1)
        return x

    found = observe(Asked(answer), [probe_of(str(value), rows(1, value)) for value in (0, 5, 0, 6)])
    ways = [one.way for one in found]
    assert ways[0] is ways[2]
    assert ways[1] is ways[3]
    assert ways[0] != ways[1]
    assert all(ways)


def test_a_loop_of_the_model_that_does_not_end_is_ended_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_paths, "MAX_EVENTS", 2000)
    monkeypatch.setattr(code_paths, "ENDLESS_S", 0.0)

    def answer(x: Array) -> Array:
        for _ in range(1000):
            x = x + np.float32(1)
        return x

    (one,) = observe(Asked(answer), [probe_of("p", rows(1))])
    assert (one.outputs, one.error[:16]) == (None, "raises Endless: ")


def test_only_wild_values_are_kept_from_lapack_and_what_finite_ones_become_from_eigvals() -> None:
    assert isinstance(care(probe_of("p", rows(1), wild=True)), Careful)
    own = torch.linalg.eigvals
    with care(probe_of("p", rows(1))):
        assert torch.linalg.inv(torch.full((2, 2), torch.nan)).isnan().all()
        with pytest.raises(RuntimeError, match="the input has no finite number"):
            torch.linalg.eigvals(torch.full((2, 2), torch.nan))
    assert torch.linalg.eigvals is own


# Models that draw random numbers. ---------------------------------------------------------------------------------


def noise(x: Array) -> Array:
    return x + torch.rand(x.shape).numpy()


def drawn(count: int, *shape: int) -> Array:
    """The first draws from the seed of every observation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.stack([torch.rand(shape).numpy() for _ in range(count)])


def test_a_model_that_draws_is_asked_many_times_from_the_same_seed_and_disturbs_no_other_draws() -> None:
    model = Asked(noise)
    torch.manual_seed(5)
    after_one = (torch.rand(1, 2), torch.rand(2, 2), torch.rand(3))[-1]
    torch.manual_seed(5)
    found = observe(model, [probe_of("a", rows(1)), probe_of("b", rows(2))], num_draws=4)
    assert torch.equal(torch.rand(3), after_one)
    assert model.calls == 2 + 2 * 4
    for one, size in zip(found, (1, 2), strict=True):
        assert one.draws is not None
        assert one.draws["output"].tolist() == drawn(4, size, 2).tolist()
        assert one.outputs is not None
    assert [one.draws for one in observe(Asked(noise), [probe_of("a", rows(1))])] == [None]


def random_seen(count: int = 40, *, names: str = "a") -> list[Observation]:
    asked = [replace(seen(name, rows(1), rows(1)), draws={"output": drawn(count, 1, 2)}) for name in names]
    return [replace(one, outputs={"output": drawn(1, 1, 2)[0]}) for one in asked]


def test_a_program_that_draws_as_the_model_does_agrees_draw_by_draw() -> None:
    made = Asked(noise)
    (one,) = judge(made, random_seen(7)).evidence
    assert (one.verdict, one.reason, one.max_abs_error, one.max_rel_error) == ("agrees", "", 0.0, 0.0)
    assert one.tolerance == "from the same seeds the same answers: 7 draws of each, one by one"
    assert made.calls == 7


def test_a_program_that_draws_otherwise_is_judged_by_the_level_of_all_probes_together() -> None:
    found = judge(Asked(lambda x: noise(x) + np.float32(5)), random_seen(names="ab"))
    assert (found.proven, found.disagreeing) == (False, "a")
    for one in found.evidence:
        assert one.verdict == "disagrees"
        assert one.reason.startswith("output 'output' is drawn from another distribution: its mean differs (p = ")
        assert "where 2.5e-06 is the least to be expected of 20 tests)" in one.reason  # 1e-4, of 2 probes, 20 tests
        assert one.max_abs_error == pytest.approx(10.0), "of the sum of both elements"
        assert one.tolerance.startswith("statistical: 40 draws of each, ")


def test_a_random_program_whose_answer_has_another_shape_than_promised_disagrees() -> None:
    flat = [replace(one, draws={"output": drawn(7, 2)}) for one in random_seen()]
    (one,) = judge(Asked(lambda x: noise(x[0])), flat).evidence
    assert (one.verdict, one.tolerance) == ("disagrees", OF_FLOATS)
    assert one.reason == "output 'output' has shape [2], the signature promises ['batch', 2]"


def test_a_random_program_that_raises_disagrees_in_its_words() -> None:
    (one,) = judge(Asked(raising(ValueError("no dice"))), random_seen(3)).evidence
    assert (one.verdict, one.reason) == ("disagrees", "the program raises ValueError: no dice")


# Hidden states. ---------------------------------------------------------------------------------------------------

DIFFERS = "output 'output' differs by 1 (2 of 2 elements; at [0, 0] 1 is off by 1, where 0.0001 is allowed)"
ONE, TWO = (seen("one", rows(1), rows(1, 1)), seen("two", rows(1), rows(1, 2)))
MUTE = seen("mute", rows(1), None)
OTHER, OTHERWISE = (seen("other", rows(2), rows(2, value)) for value in (1, 1))
RANDOM = replace(TWO, draws={"output": rows(1, 2)[None]})


@pytest.mark.parametrize(
    ("asked", "hidden"),
    [
        ([], ""),
        ([ONE], ""),
        ([ONE, ONE], ""),
        ([ONE, OTHER], ""),
        ([ONE, TWO], DIFFERS),
        ([OTHER, ONE, OTHERWISE, TWO], DIFFERS),
        ([MUTE, ONE], ""),
        ([ONE, MUTE], ""),
        ([MUTE, MUTE], ""),
        ([ONE, MUTE, TWO], DIFFERS),
        ([MUTE, ONE, TWO], ""),
        ([ONE, RANDOM], ""),
        ([ONE, RANDOM, TWO], ""),  # a model that draws numbers
    ],
)
def test_a_hidden_state_shows_where_equal_inputs_have_other_answers(asked: list[Observation], hidden: str) -> None:
    assert hidden_state(asked) == hidden


# Where two probes part. -------------------------------------------------------------------------------------------


def steps_of(asked: Observation, *offsets: int) -> Observation:
    """The same, as if its way had gone through these instructions of one function."""
    return replace(asked, way=[(1, steps_of.__code__, offset) for offset in offsets])


def test_probes_part_where_one_that_answers_went_another_way() -> None:
    a, b = (steps_of(seen(name, rows(1), rows(1)), 0, 2) for name in "ab")
    parted = steps_of(seen("parted", rows(1), rows(1)), 0, 4)
    wide = steps_of(seen("wide", rows(3), rows(3)), 0, 6)
    cut = steps_of(seen("cut", rows(1), None), 0, 8)
    names = {
        "same": find_parting([a, b]),
        "none": find_parting([]),
        "first": find_parting([a, parted]),
        "named": find_parting([a, b, parted], "parted"),
        "unknown": find_parting([parted, a], "nothing of this name"),
        "cut short": find_parting([cut, a, b], "a"),
        "after one cut short": find_parting([a, cut, parted], "a"),
        "of its size": find_parting([wide, a, parted], "parted"),
        "of another size": find_parting([wide, a, b], "b"),
        "itself cut short": find_parting([a, cut], "cut"),
    }
    assert {key: found and found[1:] for key, found in names.items()} == {
        "same": None,
        "none": None,
        "first": ("parted", "a"),
        "named": ("a", "parted"),
        "unknown": ("a", "parted"),
        "cut short": None,
        "after one cut short": ("parted", "a"),
        "of its size": ("a", "parted"),
        "of another size": ("wide", "b"),
        "itself cut short": ("a", "cut"),
    }
    place = names["first"]
    assert place is not None
    assert (place[0].file, place[0].line >= steps_of.__code__.co_firstlineno) == (__file__, True)
