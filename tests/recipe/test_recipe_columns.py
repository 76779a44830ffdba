"""A recipe's `columns` are checked when it is loaded; its paths are beside it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.csv
import pytest
import torch

from trueline.errors import RecipeError
from trueline.recipe.load import load_recipe
from worlds.columns import table_of

WHOLE = """
from trueline.columns import Category, Label, Number, Text
def model(columns): return columns["city"].size
def loss(outputs, labels): return outputs
def optimizer(params): return params
def dataset(mode): return "all.csv"
"""
COLUMNS = (
    'columns = {"age": Number(missing="mean"), "visits": Number(missing=0), "city": Category(), '
    '"review": Text(max_length=3), "income": Label()}\n'
)


def write(folder: Path, text: str) -> Path:
    (folder / "r.py").write_text(text)
    return folder / "r.py"


def test_a_model_with_an_argument_receives_the_fitted_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.csv.write_csv(table_of().drop_columns("spent"), tmp_path / "all.csv")
    monkeypatch.chdir("/")
    recipe = load_recipe(write(tmp_path, WHOLE + COLUMNS))
    assert recipe.make_model() == 5
    batch = recipe.source("training").read(torch.arange(4).numpy())
    assert list(batch.inputs) == ["numbers", "city", "review", "review_mask"]
    assert (batch.inputs["numbers"].dtype, batch.labels.dtype) == (torch.float32, torch.int64)
    assert recipe.source("prediction").read(torch.arange(4).numpy()).labels is None


def test_a_model_with_an_argument_needs_columns(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"'model' \(r\.py:3\) takes \(columns\)"):
        load_recipe(write(tmp_path, WHOLE))


def test_a_declaration_that_is_none_is_a_problem_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"columns\['age'\]: scale='log', expected 'standard'"):
        load_recipe(write(tmp_path, WHOLE + 'columns = {"age": Number(scale="log")}\n'))
    with pytest.raises(RecipeError, match="'missing' and 'columns' are both set"):
        load_recipe(write(tmp_path, WHOLE + COLUMNS + 'missing = "mean"\n'))


def test_training_records_are_augmented_and_others_are_not(tmp_path: Path) -> None:
    pyarrow.csv.write_csv(table_of().drop_columns("spent"), tmp_path / "all.csv")
    changed = "def augment(inputs): return {**inputs, 'city': inputs['city'] * 0 + 9}\n"
    recipe = load_recipe(write(tmp_path, WHOLE + COLUMNS + changed))
    index = torch.arange(3).numpy()
    assert recipe.source("training").read(index).inputs["city"].tolist() == [9, 9, 9]
    assert max(recipe.source("evaluation").read(index).inputs["city"].tolist()) < 9
