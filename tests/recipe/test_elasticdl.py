"""A module that was written for ElasticDL is a recipe: its `dataset_fn` gets the records that the values name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.data.formats import recordio
from trueline.errors import DataError, RecipeError
from trueline.recipe.load import load_recipe
from trueline.train.worker.measure import call_model

MODULE = """
import torch
class CustomModel(torch.nn.Module): pass
def loss(labels, predictions): return torch.nn.functional.mse_loss(predictions, labels)
def optimizer(params, lr=0.1): return torch.optim.SGD(params, lr)
"""
BYTES = """
import numpy as np
def dataset_fn(data_list, mode, _):
    features = [np.frombuffer(data, np.float32)[:2] for data in data_list]
    if mode == "prediction":
        return features
    return features, [float(np.frombuffer(data, np.float32)[2]) for data in data_list]
"""
ROWS = """
def dataset_fn(data_list, mode, metadata):
    at = metadata.column_names.index("class")
    rows = torch.tensor([[float(value) for value in row] for row in data_list])
    return {"x": torch.cat([rows[:, :at], rows[:, at + 1:]], 1), "kinds": rows[:, at]}, rows[:, at].numpy()
"""


TWO = "training_data = PLACE\nprediction_data = PLACE"


def recipe(folder: Path, dataset_fn: str, values: str = TWO, *, place: Path):
    (folder / "zoo_module.py").write_text(MODULE + dataset_fn)
    lines = values.replace("PLACE", repr(str(place)))
    (folder / "recipe.py").write_text(f"from zoo_module import *\n{lines}\n")
    return load_recipe(folder / "recipe.py")


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.recordio"
    rows = [np.array([number, number + 0.5, 2 * number], np.float32).tobytes() for number in range(10)]
    path.write_bytes(recordio.encode_chunk(rows[:6]) + recordio.encode_chunk(rows[6:]))
    return path


def test_records_of_bytes_become_features_and_labels(tmp_path, records):
    found = recipe(tmp_path, BYTES, place=records).source("training")
    assert found.num_records == 10
    batch = found.read(np.array([7, 2]))
    assert batch.inputs.tolist() == [[7.0, 7.5], [2.0, 2.5]]
    assert batch.labels.tolist() == [14.0, 4.0]


def test_a_prediction_may_be_features_alone(tmp_path, records):
    batch = recipe(tmp_path, BYTES, place=records).source("prediction").read(np.array([3]))
    assert batch.inputs.tolist() == [[3.0, 3.5]]
    assert batch.labels is None


def test_records_of_columns_are_lists_and_their_names_are_in_the_metadata(tmp_path):
    (tmp_path / "rows.csv").write_text("a,class,b\n1,0,2\n3,1,4\n")
    batch = recipe(tmp_path, ROWS, place=tmp_path / "rows.csv").source("training").read(np.array([1, 0]))
    assert batch.inputs["x"].tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert batch.inputs["kinds"].tolist() == batch.labels.tolist() == [1.0, 0.0]
    assert isinstance(batch.labels, torch.Tensor)


def test_validation_data_is_evaluation_data(tmp_path, records):
    assert recipe(tmp_path, BYTES, "validation_data = PLACE", place=records).source("evaluation").num_records == 10


def test_a_recipe_that_does_not_say_where_its_records_are_is_told_how(tmp_path, records):
    found = recipe(tmp_path, BYTES, place=records)
    with pytest.raises(RecipeError, match="does not say where those for evaluation are") as caught:
        found.source("evaluation")
    assert 'set evaluation_data = "URI"' in caught.value.hint


@pytest.mark.parametrize(
    ("given", "message"),
    [("[1.0], [2.0]", "made 1 features of 2 records"), ("[1.0, 2.0]", "returned list for training")],
)
def test_what_is_no_batch_of_the_records_is_refused(tmp_path, records, given, message):
    found = recipe(tmp_path, f"def dataset_fn(data_list, mode, metadata): return {given}", place=records)
    with pytest.raises((DataError, RecipeError), match=message):
        found.source("training").read(np.array([0, 1]))


DICT = """
import numpy as np
def dataset_fn(data_list, mode, _):
    values = np.stack([np.frombuffer(data, np.float32) for data in data_list])
    return {"x": values[:, :1].copy(), "y": values[:, 1].copy()}, values[:, 2].copy()
class CustomModel(torch.nn.Module):
    def forward(self, FORM):
        return BODY
"""


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ("features", 'features["x"][:, 0] + features["y"]'),
        ("batch: dict[str, torch.Tensor]", 'batch["x"][:, 0] + batch["y"]'),
        ("inputs: 'Mapping[str, object]'", 'inputs["x"][:, 0] + inputs["y"]'),
        ("x, y", "x[:, 0] + y"),
        ("*, y, x", "x[:, 0] + y"),
        ("**features", 'features["x"][:, 0] + features["y"]'),
    ],
)
def test_a_forward_gets_features_as_one_dict_or_by_name(tmp_path, records, form, body):
    found = recipe(tmp_path, DICT.replace("FORM", form).replace("BODY", body), place=records)
    batch = found.source("training").read(np.array([7, 2]))
    assert call_model(found.make_model(), batch.inputs).tolist() == [14.5, 4.5]
