"""A model that draws random numbers is refused, or compared as what it is when that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.capture.api import capture
from trueline.capture.verify import verify
from trueline.errors import NotProven
from trueline.recipe.contract import Recipe
from trueline.runtime import distribution
from trueline.runtime.open import open_program, replay
from worlds import marks, recipes

pytestmark = pytest.mark.slow  # asks models hundreds of times


class Dropping(nn.Module):
    """Dropout left on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, training=True)  # drawn here


class HalfExported(Dropping):
    """Its program is not random: what a tracer makes that takes dropout out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if torch.compiler.is_exporting() else super().forward(x)  # type: ignore[no-any-return]


class Backwards(nn.Module):
    """Its program draws the same number of times, in another order."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = [torch.randn_like(x), torch.randn_like(x)]
        one, other = reversed(drawn) if torch.compiler.is_exporting() else drawn
        return x + one + 2 * other


class NoisyCounter(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.randn_like(x) + self.calls


def recipe(model: Callable[[], nn.Module]) -> Recipe:
    examples = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    return recipes.untrained(model, name="noise", examples=lambda: examples)


def test_without_the_option_it_is_refused_with_the_operator_the_line_and_the_option(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="draws random numbers") as refused:
        capture(recipe(Dropping), None, tmp_path / "b")
    assert marks.place_of(__file__, "drawn here") in refused.value.message
    assert "--allow-random" in refused.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.jobs
def test_what_draws_alike_from_the_same_seeds_is_proven_one_by_one_marked_and_replayed_as_random(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = Dropping()
    capture(recipe(lambda: model), None, tmp_path / "b", formats=["torch_export"], allow_random=True)
    bundle = open_bundle(tmp_path / "b")
    assert bundle.signature.random
    assert "compared one by one (from the same seeds" in bundle.manifest.programs[0].notes
    assert "compared one by one" in describe(bundle)
    assert "equal requests get different answers" in describe(bundle)
    compared = [one for one in bundle.evidence() if one.verdict == "agrees"]
    assert len([one for one in compared if ": " not in one.probe]) == distribution.PROBES  # beside those of values
    assert all(one.tolerance.startswith("from the same seeds the same answers: 100 draws") for one in compared)
    assert all(one.max_abs_error is not None and one.max_abs_error < 1e-4 for one in compared)
    session = open_program(bundle)
    assert all(one.agrees for one in replay(bundle, session).values())
    x = np.ones((3, 8), np.float32)
    assert not np.array_equal(session.run({"x": x})["output"], session.run({"x": x})["output"])


@pytest.mark.jobs
def test_what_draws_in_another_order_is_proven_by_its_distribution(tmp_path: Path) -> None:
    captured = capture(recipe(Backwards), None, tmp_path / "b", formats=["torch_export"], allow_random=True)
    assert "compared statistically (statistical: 100 draws of each" in captured.programs[0].how
    compared = [one for one in open_bundle(tmp_path / "b").evidence() if one.verdict == "agrees"]
    assert any(one.tolerance.startswith("statistical: 100 draws of each") for one in compared)


@pytest.mark.jobs
def test_a_program_that_left_the_dice_out_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match=r"drawn from another distribution: its (mean|spread) differs"):
        capture(recipe(HalfExported), None, tmp_path / "b", formats=["torch_export"], allow_random=True)
    assert list(tmp_path.iterdir()) == []


def test_golden_examples_refuse_a_program_that_is_random_in_another_way(tmp_path: Path) -> None:
    model = Dropping()
    capture(recipe(lambda: model), None, tmp_path / "b", formats=["torch_export"], allow_random=True)
    bundle = open_bundle(tmp_path / "b")
    session = open_program(bundle)

    class Halved:
        format = "torch_export"
        signature = bundle.signature

        def run(self, inputs: Any) -> Any:
            return {name: array / 2 for name, array in session.run(inputs).items()}

    with pytest.raises(NotProven, match="drawn from another distribution"):
        replay(bundle, Halved())


def test_a_memory_beside_the_dice_is_refused_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="draws random numbers"):
        capture(recipe(NoisyCounter), None, tmp_path / "b", allow_random=True)


@pytest.mark.slow
@pytest.mark.long
def test_a_format_that_can_draw_is_proven_beside_one_that_cannot_and_verify_asks_again(tmp_path: Path) -> None:
    model = Dropping()
    captured = capture(recipe(lambda: model), None, tmp_path / "b", allow_random=True)
    assert {one.format: one.verdict for one in captured.programs}["torch_export"] == "proven"
    assert verify(tmp_path / "b", format="torch_export").holds
    assert verify(tmp_path / "b", against=recipe(lambda: model), format="torch_export").holds
