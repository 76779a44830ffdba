"""A budget is kept where the bound of what is lost says so, and not where the records are too few to tell."""

from __future__ import annotations

import numpy as np
import pytest

import trueline
from trueline.compress import gate
from trueline.compress import search as searching
from trueline.compress.method import Budget, parse_budget
from trueline.compress.promise import check_before_training, check_promise
from trueline.errors import UsageError
from trueline.recipe.load import load_recipe
from trueline.ship import ship
from worlds import compressible

DRAWS = 400


@pytest.mark.parametrize("records", [360, 1000, 2000])
def test_answers_of_which_none_changed_promise_of_shares_what_they_promise_of_decisions(records: int) -> None:
    random = np.random.default_rng(0)
    decisions = (random.random(records) < 0.9).astype(np.float64)
    shares = random.integers(0, 9, records) / 8  # right tokens of eight
    budget = parse_budget("accuracy=0.2%")
    one, other = (gate.judge(budget, values, values) for values in (decisions, shares))
    assert one == other
    assert one.keeps == (records >= 1351)
    assert one.records_needed == (None if one.keeps else 1351)
    for values in (decisions, shares):
        if records < 1351:
            with pytest.raises(UsageError, match="at least 1351 records"):
                check_promise(budget, values, records)
        else:
            check_promise(budget, values, records)


@pytest.mark.parametrize("chance", [0.002, 0.01, 0.1])
def test_the_bound_of_shares_is_above_what_is_lost_in_nineteen_of_twenty_draws(chance: float) -> None:
    """Seldom and much, as a bootstrap would not see: half of a record's tokens, in `chance` of the records."""
    random, below = np.random.default_rng(1), 0
    for _ in range(DRAWS):
        parent = random.integers(4, 9, 300) / 8
        lost = 0.5 * (random.random(300) < chance)
        below += gate.judge(Budget("token_accuracy", 1.0), parent, parent - lost).high < 0.5 * chance
    assert below <= 0.05 * DRAWS


def test_few_numbers_have_no_bound_and_one_record_keeps_no_budget() -> None:
    budget = parse_budget("mae=5")
    parent = np.linspace(1.5, 40, 40)
    for records in (1, 2, 29):
        verdict = gate.judge(budget, parent[:records], parent[:records] + 0.1)
        assert not verdict.keeps
        assert verdict.records_needed == 30
        with pytest.raises(UsageError, match=f"with {records} evaluation records: it needs at least 30"):
            check_promise(budget, parent[:records], records)
    assert gate.judge(budget, parent[:30], parent[:30] + 0.1).keeps
    check_promise(budget, parent[:30], 30)
    assert gate.judge(Budget("mae", np.inf), parent[:1], parent[:1]).keeps  # chosen by hand


def test_an_error_below_one_is_a_number_and_no_share() -> None:
    parent = np.full(300, 0.02)
    assert gate.judge(parse_budget("mae=0.001"), parent, parent + 1e-5).keeps


def test_what_is_chosen_by_hand_with_few_records_says_that_it_has_no_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(searching, "QUICK_S", 0.02)
    monkeypatch.setattr(searching, "FULL_S", 0.05)
    folder = tmp_path_factory.mktemp("few")
    recipe = compressible.RECIPE.replace('"evaluation": 600', '"evaluation": 5')
    recipe = recipe.replace('"accuracy": lambda outputs, labels: (outputs.argmax(dim=1) == labels).float()',
                            '"margin": lambda outputs, labels: outputs.amax(dim=1)')  # fmt: skip
    made = compressible.make(folder, recipe=recipe)
    found = trueline.compress(made.bundle.path, quantize=["dynamic"], out=folder / "small.bundle")
    assert "without a bound: the records are too few" in found.summary
    assert "without a bound: the records are too few" in found.report.read_text()


def test_a_line_with_a_budget_that_cannot_be_promised_is_refused_before_its_training(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    recipe = tmp_path_factory.mktemp("line") / "recipe.py"
    recipe.write_text(compressible.RECIPE)
    with pytest.raises(UsageError, match="at least 1351 records"):
        ship(recipe, compress="accuracy=0.2%")
    assert [one.name for one in recipe.parent.iterdir() if one.name != "__pycache__"] == ["recipe.py"]
    check_before_training(load_recipe(recipe), parse_budget("accuracy=1%"))
    with pytest.raises(UsageError, match="names the metric 'accurcy'"):
        check_before_training(load_recipe(recipe), parse_budget("accurcy=1%"))
