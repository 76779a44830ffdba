from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trueline.cli.line import init
from trueline.errors import UsageError
from trueline.recipe import template
from trueline.recipe.load import load_recipe


def call(model: torch.nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def accuracy_after(path: Path, epochs: int) -> float:
    recipe = load_recipe(path).with_columns()
    torch.manual_seed(0)
    model = recipe.make_model()
    optimizer = recipe.optimizer(model.parameters())
    training, held_out = recipe.source("training"), recipe.source("evaluation")
    order = np.random.default_rng(0)
    for _ in range(epochs):
        for indices in np.array_split(order.permutation(training.num_records), training.num_records // 64 + 1):
            batch = training.read(indices)
            optimizer.zero_grad()
            recipe.loss(call(model, batch.inputs), batch.labels).backward()
            optimizer.step()
    batch = held_out.read(np.arange(held_out.num_records))
    assert recipe.metrics is not None
    with torch.no_grad():
        found = recipe.metrics()["accuracy"](call(model, batch.inputs), batch.labels)
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


@pytest.mark.jobs
@pytest.mark.parametrize(("name", "epochs", "least"), [("tabular", 15, 0.55), ("text", 4, 0.9), ("images", 12, 0.9)])
def test_each_template_learns_as_it_is(tmp_path: Path, name: str, epochs: int, least: float) -> None:
    written = template.write_template("mine", tmp_path, name)
    assert load_recipe(written.path).name == "mine"
    assert accuracy_after(written.path, epochs) > least


def test_the_tabular_template_has_what_tables_have(tmp_path: Path) -> None:
    folder = template.write_template("mine", tmp_path, "tabular").path.parent
    with (folder / "training.csv").open() as training, (folder / "evaluation.csv").open() as evaluation:
        rows, held_out = list(csv.DictReader(training)), list(csv.DictReader(evaluation))
    assert (len(rows), len(held_out)) == (240, 60)
    assert all(any(row[column] == "" for row in rows) for column in rows[0] if column != "rent")
    assert {row["district"] for row in held_out} - {row["district"] for row in rows} == {"Harbour"}
    assert len({len(row["note"].split()) for row in rows}) > 5
    batch = load_recipe(folder / "recipe.py").source("evaluation").read(np.arange(60))
    assert torch.isfinite(batch.inputs["numbers"]).all()
    assert (batch.inputs["district"] == 1).sum() == sum(row["district"] == "Harbour" for row in held_out)


@pytest.mark.slow
@pytest.mark.long
def test_the_own_loop_template_trains_in_one_process(tmp_path: Path) -> None:
    written = template.write_template("mine", tmp_path, "own-loop")
    command = [sys.executable, str(written.path), "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "32 steps, accuracy" in done.stdout


def test_every_template_is_offered_and_overwrites_nothing(tmp_path: Path) -> None:
    assert template.TEMPLATES == init.TEMPLATES
    names = {path.name.partition(".")[0] for path in Path(template.__file__).with_name("templates").glob("*.py.txt")}
    assert names == set(template.TEMPLATES)
    for name in template.TEMPLATES:
        template.write_template(name, tmp_path, name)
        with pytest.raises(UsageError, match="exists already"):
            template.write_template(name, tmp_path, name)


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
@pytest.mark.long
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
