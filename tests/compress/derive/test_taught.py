"""A teacher answers each record once; the student's loss knows both labels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from trueline.compress.derive import taught
from trueline.compress.derive.features import FeatureWatch
from trueline.compress.derive.plan import DerivePlan
from trueline.compress.measure.records import open_records
from trueline.errors import RecipeError, UsageError
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from worlds import compressible


def plan(share: float, classes: int = 1, temperature: float = 2.0) -> DerivePlan:
    return DerivePlan(kind="taught", recipe="", share=share, classes=classes, temperature=temperature)


def test_a_teacher_answers_each_record_once_and_the_student_gets_its_answer(tmp_path: Path) -> None:
    made = compressible.make(tmp_path)
    program, calls = open_program(made.bundle), []

    class Counting:
        signature = program.signature

        def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            calls.append(len(inputs["input"]))
            return program.run(inputs)

    records = open_records(load_recipe(made.recipe), "training", program.signature)
    folder = taught.write_answers(tmp_path / "answers", Counting(), records, made.bundle.digest)
    taught.write_answers(tmp_path / "answers", Counting(), records, made.bundle.digest)
    assert sum(calls) == records.count == 1000
    source = taught.TaughtSource(records.source, str(folder))
    batch = source.read(np.array([7, 3, 7]))
    labels, answers = batch.labels
    expected = program.run({"input": batch.inputs.numpy()})["output"]
    assert torch.equal(labels, records.source.read(np.array([7, 3, 7])).labels)
    assert np.allclose(answers.numpy(), expected, atol=1e-4)
    assert source.fingerprint() != records.source.fingerprint()


def test_the_loss_is_the_recipes_for_plain_labels_and_least_at_the_softened_answers_else() -> None:
    loss = taught.make_loss(functional.cross_entropy, plan(1.0))
    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    assert loss(outputs, labels) == functional.cross_entropy(outputs, labels)
    answers = torch.randn(5, 3)
    assert loss(answers / 2, (labels, answers)).item() == pytest.approx(0.0, abs=1e-6)
    assert loss(outputs, (labels, answers)) > 0.01


def test_a_surer_teacher_needs_no_more_steps() -> None:
    labels, answers = torch.tensor([0, 1, 2, 1, 0]), torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    outputs = torch.zeros(5, 3, requires_grad=True)
    slopes = [
        torch.autograd.grad(
            taught.make_loss(functional.cross_entropy, plan(1.0, temperature=sure))(outputs, (labels, sure * answers)),
            outputs,
        )[0]
        for sure in (1.0, 100.0)
    ]
    assert torch.allclose(*slopes, atol=1e-6)


def test_numbers_are_taught_by_squares() -> None:
    loss = taught.make_loss(functional.mse_loss, plan(0.5, classes=0))
    outputs, labels, answers = torch.zeros(4), torch.full((4,), 2.0), torch.ones(4)
    assert loss(outputs, (labels, answers)).item() == pytest.approx(0.5 * 4 + 0.5 * 1)


def test_classes_of_each_pixel_are_taught_along_their_axis() -> None:
    loss = taught.make_loss(functional.cross_entropy, plan(1.0, classes=1))
    labels, answers, drawn = torch.zeros(2, 4, 5, dtype=torch.int64), torch.randn(2, 3, 4, 5), torch.randn(2, 1, 4, 5)
    assert loss(answers / 2 + drawn, (labels, answers)).item() == pytest.approx(0.0, abs=1e-5)
    assert loss(answers / 2 + drawn * torch.randn(2, 3, 1, 1), (labels, answers)) > 0.01


def test_a_yes_or_no_is_taught_as_two_classes_by_its_logit_or_its_probability() -> None:
    zero, logits, labels = torch.zeros(6, 1), 3 * torch.randn(6, 1), torch.ones(6, 1)
    outputs, answers = (torch.cat([one, 0 * one], dim=1) for one in (logits + 1, logits))
    wanted = taught.make_loss(lambda outputs, labels: outputs.sum() * 0, plan(1.0))(outputs, (labels, answers))
    for kind, form in (("logits", torch.Tensor.clone), ("probabilities", torch.sigmoid)):
        alone = msgspec.structs.replace(plan(1.0, classes=0), yes_or_no=kind)
        loss = taught.make_loss(lambda outputs, labels: outputs.sum() * 0, alone)
        assert loss(form(logits + 1), (labels, form(logits))).item() == pytest.approx(wanted.item(), rel=1e-3)
        assert loss(form(logits / 2), (labels, form(logits))).item() == pytest.approx(0.0, abs=1e-6)
        sure = loss(form(zero + 30), (labels, form(zero - 30)))  # beyond what float32 tells from 0 and 1
        assert 0 < sure.item() < 100


def test_a_function_of_the_students_recipe_takes_the_place_of_the_distance(tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        compressible.RECIPE + "\n\ndef furthest(outputs, answers):\n    return (outputs - answers).abs().amax(1)\n"
    )
    recipe = load_recipe(file)
    loss = taught.make_loss(recipe.loss, plan(1.0), distance=taught.find_distance(recipe, "furthest"))
    outputs, answers, labels = torch.zeros(2, 3), torch.tensor([[1.0, 2, 3], [0, 0, 5]]), torch.tensor([0, 1])
    assert loss(outputs, (labels, answers)).item() == pytest.approx(4.0)
    with pytest.raises(UsageError, match="has no function 'farthest'") as missing:
        taught.find_distance(recipe, "farthest")
    assert missing.value.hint == "did you mean 'furthest'?"


@pytest.mark.parametrize("found", [torch.zeros(2, 3), 0.5])
def test_a_distance_that_is_no_number_for_each_record_is_refused(found: object) -> None:
    loss = taught.make_loss(functional.cross_entropy, plan(1.0), distance=lambda outputs, answers: found)  # type: ignore[arg-type,return-value]
    with pytest.raises(RecipeError, match="one for each of 2 records"):
        loss(torch.zeros(2, 3), (torch.tensor([0, 1]), torch.zeros(2, 3)))


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_a_student_learns_what_a_submodule_of_the_teacher_returns() -> None:
    watch = FeatureWatch({"first": "body.5"}, [0.25])
    student = watch.attach(Two())
    loss = taught.make_loss(lambda outputs, labels: outputs.sum() * 0, plan(1.0, temperature=1.0), watch)
    inputs, labels = torch.randn(6, 3), torch.zeros(6)
    outputs = student(inputs)
    right = student.first(inputs).detach()
    outputs = student(inputs)
    assert loss(outputs, (labels, outputs.detach(), right)).item() == pytest.approx(0.0, abs=1e-6)
    outputs = student(inputs)
    distance = loss(outputs, (labels, outputs.detach(), right + 0.5))
    assert distance.item() == pytest.approx(1.0, rel=0.01)  # in units of the variance
    distance.backward()
    assert student.first.weight.grad.abs().sum() > 0


def test_shapes_that_differ_and_names_that_are_none_are_told() -> None:
    watch = FeatureWatch({"first": "body.5"}, [1.0])
    student = watch.attach(Two())
    student(torch.randn(6, 3))
    with pytest.raises(RecipeError, match=r"'first' of the student returns \[6, 4\], 'body.5' of its teacher \[6, 5\]"):
        watch.measure_distance([torch.zeros(6, 5)])
    with pytest.raises(UsageError, match="no submodule of that name") as missing:
        FeatureWatch({"firts": "body.5"}).attach(Two())
    assert "'first'" in missing.value.hint


def test_outputs_inside_the_teacher_lie_beside_its_answers_by_record(tmp_path: Path) -> None:
    made = compressible.make(tmp_path)
    program = open_program(made.bundle)
    records = open_records(load_recipe(made.recipe), "training", program.signature)
    insides = taught.Insides(made.module, ["3"])
    folder = taught.write_answers(tmp_path / "answers", program, records, made.bundle.digest, insides)
    source = taught.TaughtSource(records.source, str(folder))
    batch = source.read(np.array([7, 3]))
    label, _, inside = batch.labels
    with torch.no_grad():
        torch.testing.assert_close(inside, made.module[:4](batch.inputs), atol=1e-5, rtol=1e-5)
    assert torch.equal(label, records.source.read(np.array([7, 3])).labels)
    with torch.no_grad():
        every = made.module[:4](records.source.read(np.arange(1000)).inputs)
    assert taught.read_variances(str(folder)) == [pytest.approx(every.var().item(), rel=1e-3)]
    with pytest.raises(UsageError, match="match names '33'"):
        taught.write_answers(tmp_path / "other", program, records, "x", taught.Insides(made.module, ["33"]))
