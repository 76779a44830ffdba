"""A teacher answers each record once; the student's loss knows both labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from trueline.compress.derive import taught
from trueline.compress.measure.records import open_records
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from worlds import compressible


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


def test_the_loss_is_the_recipes_for_plain_labels_and_least_at_the_teachers_answers_else() -> None:
    loss = taught.make_loss(functional.cross_entropy, 2.0, 1.0)
    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    assert loss(outputs, labels) == functional.cross_entropy(outputs, labels)
    answers = torch.randn(5, 3)
    assert loss(answers, (labels, answers)).item() == pytest.approx(0.0, abs=1e-6)
    assert loss(outputs, (labels, answers)) > 0.01


def test_numbers_are_taught_by_squares() -> None:
    loss = taught.make_loss(functional.mse_loss, 2.0, 0.5)
    outputs, labels, answers = torch.zeros(4), torch.full((4,), 2.0), torch.ones(4)
    assert loss(outputs, (labels, answers)).item() == pytest.approx(0.5 * 4 + 0.5 * 1)
