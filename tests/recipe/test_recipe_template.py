from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.errors import UsageError
from trueline.recipe import template
from trueline.recipe.load import load_recipe


def accuracy_after(path: Path, epochs: int) -> float:
    recipe = load_recipe(path)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    training, held_out = recipe.source("training"), recipe.source("evaluation")
    order = np.random.default_rng(0)
    for _ in range(epochs):
        for indices in np.array_split(order.permutation(training.num_records), training.num_records // 64 + 1):
            batch = training.read(indices)
            optimizer.zero_grad()
            recipe.loss(model(batch.inputs), batch.labels).backward()
            optimizer.step()
    batch = held_out.read(np.arange(held_out.num_records))
    assert recipe.metrics is not None
    with torch.no_grad():
        found = recipe.metrics()["accuracy"](model(batch.inputs), batch.labels)
    assert found.shape == (held_out.num_records,)
    return float(found.mean())


@pytest.mark.parametrize("digits", [True, False])
def test_the_recipe_that_init_writes_learns_as_it_is(tmp_path: Path, digits: bool) -> None:
    if digits:
        pytest.importorskip("sklearn")
    path = tmp_path / "recipe.py"
    path.write_text(template.text("mine", where="mine/recipe.py", digits=digits))
    assert load_recipe(path).name == "mine"
    assert accuracy_after(path, epochs=5) > 0.9


def test_init_makes_the_folder_and_overwrites_nothing(tmp_path: Path) -> None:
    written = template.write_recipe("mine", tmp_path)
    assert written.path == tmp_path / "mine" / "recipe.py"
    written.path.write_text("changed")
    with pytest.raises(UsageError, match="exists already"):
        template.write_recipe("mine", tmp_path)
    assert written.path.read_text() == "changed"


def test_without_scikit_learn_the_recipe_says_so_and_generates_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    written = template.write_recipe("mine", tmp_path)
    assert "pip install scikit-learn" in written.note
    assert "sklearn" not in written.path.read_text()


@pytest.mark.parametrize("name", ["../up", "", "two words", ".hidden", "a/b"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a recipe"):
        template.write_recipe(name, tmp_path)


@pytest.mark.slow
def test_the_digits_example_reads_its_held_out_scans() -> None:
    pytest.importorskip("sklearn")
    path = Path(__file__).parents[2] / "examples" / "digits" / "recipe.py"
    recipe = load_recipe(path)
    assert (recipe.name, recipe.defaults.epochs, recipe.defaults.global_batch) == ("digits", 12, 64)
    assert recipe.source("training").num_records == 1437
    held_out = recipe.source("evaluation").read(np.arange(360))
    assert torch.bincount(held_out.labels).min() >= 35
    assert held_out.inputs.shape == (360, 1, 8, 8)
    assert 0 <= held_out.inputs.min() <= held_out.inputs.max() <= 1
    assert accuracy_after(path, epochs=6) > 0.97
