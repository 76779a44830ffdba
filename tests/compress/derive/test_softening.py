"""What a student learns of a sure teacher: its answers are softened until they say more than labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from trueline.compress.derive import taught
from trueline.compress.derive.plan import DerivePlan
from trueline.compress.derive.softening import (
    ENTROPY,
    TEACHING,
    choose_temperature,
    find_class_axis,
    soften,
    tell_yes_or_no,
)
from trueline.compress.measure.records import open_records
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from worlds import compressible

Loss = Callable[[torch.Tensor], torch.Tensor]


def entropy(logits: np.ndarray) -> float:
    told = torch.log_softmax(torch.from_numpy(logits), dim=-1)
    return float(-(told.exp() * told).sum(-1).mean()) / math.log(logits.shape[-1])


@pytest.mark.parametrize("classes", [2, 10, 300])
@pytest.mark.parametrize("sure", [10.0, 40.0, 400.0])
@pytest.mark.parametrize("wanted", [0.6, 0.9])
def test_the_answers_of_a_sure_teacher_get_a_set_share_of_the_entropy_of_a_guess(
    classes: int, sure: float, wanted: float
) -> None:
    draw = np.random.default_rng(0)
    answers = draw.standard_normal((500, classes), np.float32) * np.float32(sure / 10)
    answers[np.arange(500), draw.integers(0, classes, 500)] += sure
    assert entropy(answers) < wanted
    temperature = choose_temperature(answers, 1, wanted)
    assert entropy(answers / np.float32(temperature)) == pytest.approx(wanted, abs=0.03)
    assert temperature == float(f"{temperature:.2g}")  # as the row says it


def test_answers_that_are_soft_already_stay_as_they_are() -> None:
    draw = np.random.default_rng(0)
    assert choose_temperature(0.5 * draw.standard_normal((50, 10), np.float32), 1, 0.9) == 1.0
    assert choose_temperature(np.zeros((50, 10), np.float32), 1, 0.9) == 1.0


def test_the_temperature_is_of_the_axis_of_the_classes() -> None:
    answers = np.random.default_rng(0).standard_normal((40, 10, 6), np.float32) * 30
    answers += 100 * np.arange(6, dtype=np.float32)
    assert choose_temperature(answers, 1, 0.9) == choose_temperature(np.swapaxes(answers, 1, 2).copy(), 2, 0.9)
    assert choose_temperature(answers, 1, 0.9) != choose_temperature(answers, 2, 0.9)


def test_what_the_loss_does_not_see_tells_where_the_classes_are() -> None:
    draw = torch.Generator().manual_seed(0)
    flat, pixels = torch.randn(8, 5, generator=draw), torch.randn(8, 5, 4, 4, generator=draw)
    words = torch.randn(8, 3, 5, generator=draw)
    labels = torch.randint(0, 5, (8,), generator=draw)
    cases: list[tuple[Loss, torch.Tensor, int]] = [
        (lambda made: functional.cross_entropy(made, labels), flat, 1),
        (lambda made: functional.cross_entropy(made, labels, label_smoothing=0.1), 1000 * flat, 1),
        (lambda made: functional.cross_entropy(made, labels[:, None, None].expand(8, 4, 4)), pixels, 1),
        (lambda made: functional.cross_entropy(made.flatten(0, 1), labels.repeat_interleave(3)), words, 2),
        (lambda made: functional.nll_loss(made, labels), functional.log_softmax(flat, 1), 1),
        (lambda made: functional.mse_loss(made, torch.zeros(8, 5)), flat, 0),
        (lambda made: functional.l1_loss(made, torch.zeros(8, 5)), flat, 0),
        (lambda made: functional.binary_cross_entropy_with_logits(made, torch.ones(8, 5)), flat, 0),
        (lambda made: functional.mse_loss(made, torch.zeros(8)), flat[:, 0], 0),
        (lambda made: functional.binary_cross_entropy_with_logits(made, torch.ones(8, 1)), flat[:, :1], 0),
    ]
    assert [find_class_axis(loss, outputs) for loss, outputs, _ in cases] == [axis for _, _, axis in cases]


def test_a_loss_tells_elements_that_decide_alone_as_logits_or_probabilities() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = 5 * torch.randn(8, 3, generator=draw), torch.randint(0, 2, (8, 3), generator=draw).float()
    likely, one_of, weights = logits.sigmoid(), logits.softmax(1), torch.rand(8, 3, generator=draw)
    entropy_of, of_logits = functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits
    cases: list[tuple[Loss, torch.Tensor, str]] = [
        (lambda made: of_logits(made, labels), logits, "logits"),
        (lambda made: of_logits(made, labels, reduction="none"), 100 * logits, "logits"),
        (lambda made: of_logits(made, labels, weight=weights, pos_weight=torch.full((3,), 9.0)), logits, "logits"),
        (lambda made: of_logits(made, 0.8 * labels + 0.1), logits, "logits"),
        (lambda made: of_logits(made, labels[:, 0]), logits[:, 0], "logits"),
        (lambda made: entropy_of(made, labels), likely, "probabilities"),
        (lambda made: entropy_of(made, labels, weight=weights, reduction="sum"), likely, "probabilities"),
        (lambda made: -(labels * made.log()).sum(1), one_of, ""),
        (lambda made: functional.mse_loss(made, labels), logits, ""),
        (lambda made: functional.mse_loss(made, labels), likely, ""),
        (lambda made: functional.soft_margin_loss(made, 2 * labels - 1) + functional.l1_loss(made, labels), logits, ""),
        (lambda made: functional.relu(1 - made * (2 * labels - 1)), logits, ""),
        (lambda made: functional.cross_entropy(made, labels.argmax(1)), logits, ""),
        (lambda made: functional.nll_loss(made, labels.argmax(1)), functional.log_softmax(logits, 1), ""),
    ]
    assert [tell_yes_or_no(loss, outputs) for loss, outputs, _ in cases] == [kind for _, _, kind in cases]


def test_classes_are_softened_and_numbers_are_not(tmp_path: Path) -> None:
    made = compressible.make(tmp_path)
    program, recipe = open_program(made.bundle), load_recipe(made.recipe)
    records = open_records(recipe, "training", program.signature)
    folder = taught.write_answers(tmp_path / "answers", program, records, made.bundle.digest)
    plan = DerivePlan(kind="taught", recipe="", answers=str(folder))
    soft = soften(
        plan, program, records, lambda outputs, labels: recipe.loss(torch.from_numpy(outputs["output"]), labels)
    )
    assert (soft.classes, soft.share, soft.name) == (1, TEACHING, f"distill:{soft.temperature:g}")
    assert soft.temperature == choose_temperature(np.array(taught.read_answers(folder)), 1, ENTROPY) > 1
    numbers = soften(plan, program, records, lambda outputs, _: (outputs["output"] ** 2).mean())
    assert (numbers, numbers.name) == (plan, "distill")


def test_the_answers_to_many_classes_are_as_soft_as_to_ten(tmp_path: Path) -> None:
    made = compressible.make(tmp_path)
    records = open_records(load_recipe(made.recipe), "training", open_program(made.bundle).signature)
    logits = 8 * torch.randn((1000, 300), generator=torch.Generator().manual_seed(0))

    class Chooses:
        signature = SimpleNamespace(outputs=[SimpleNamespace(name="y", shape=("batch", 300), dtype=np.dtype("f4"))])
        done = 0

        def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            at, self.done = self.done % 1000, self.done + len(inputs["input"])
            return {"y": logits[at : at + len(inputs["input"])].numpy()}

    def loss(outputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(torch.from_numpy(outputs["y"]), labels)

    folder = taught.write_answers(tmp_path / "answers", Chooses(), records, "x")  # type: ignore[arg-type]
    plan = DerivePlan(kind="taught", recipe="", answers=str(folder))
    soft = soften(plan, Chooses(), records, loss)  # type: ignore[arg-type]
    nats = entropy(logits.numpy() / np.float32(soft.temperature)) * math.log(300)
    assert nats == pytest.approx(ENTROPY * math.log(10), rel=0.05)


@pytest.mark.parametrize("shape", [(1000, 1), (1000,)])
@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_a_yes_or_no_is_softened_as_two_classes(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    made = compressible.make(tmp_path)
    records = open_records(load_recipe(made.recipe), "training", open_program(made.bundle).signature)
    logits = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0))

    class Decides:
        signature = SimpleNamespace(
            outputs=[SimpleNamespace(name="y", shape=("batch", *shape[1:]), dtype=np.dtype("f4"))]
        )
        done = 0

        def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            at, self.done = self.done % 1000, self.done + len(inputs["input"])
            found = logits[at : at + len(inputs["input"])]
            return {"y": (found.sigmoid() if kind == "probabilities" else found).numpy()}

    def loss(outputs: Mapping[str, Any], labels: torch.Tensor) -> torch.Tensor:
        found, wanted = torch.from_numpy(outputs["y"]), (labels % 2).float().reshape(-1, *shape[1:])
        if kind == "probabilities":
            return functional.binary_cross_entropy(found, wanted)
        return functional.binary_cross_entropy_with_logits(found, wanted)

    folder = taught.write_answers(tmp_path / "answers", Decides(), records, "x")  # type: ignore[arg-type]
    plan = DerivePlan(kind="taught", recipe="", answers=str(folder))
    soft = soften(plan, Decides(), records, loss)  # type: ignore[arg-type]
    assert (soft.yes_or_no, soft.classes, soft.share) == (kind, 0, TEACHING)
    two = np.stack([logits.flatten().numpy(), np.zeros(1000, np.float32)], axis=1)
    assert soft.temperature == pytest.approx(choose_temperature(two, 1, ENTROPY), rel=0.05)
    assert soft.name == f"distill:{soft.temperature:g}"


def test_the_plan_stands_in_the_file_of_its_recipe(tmp_path: Path) -> None:
    plan = DerivePlan(
        kind="taught", recipe="s.py", classes=1, temperature=5.3, matches={"a": "b"}, ranges={"x": (0.0, 1.5)}
    )
    assert DerivePlan.read(tmp_path / "recipe.py") is None
    (tmp_path / "recipe.py").write_text(plan.text)
    assert DerivePlan.read(tmp_path / "recipe.py") == plan
