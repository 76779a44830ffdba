"""ElasticDL's recipes with an embedding by id, as they stand."""

import numpy as np
import pytest
import torch

from trueline.errors import RecipeError
from trueline.ps.model.elasticdl import make_layer
from trueline.ps.model.embedding import Embedding, EmbeddingBag
from trueline.ps.model.strategy import ServedModel
from trueline.recipe.load import load_recipe

RECIPE = """
import numpy as np
import torch
from elasticdl.python.elasticdl.layers.embedding import Embedding

training_data = "records/*.recordio"

class CustomModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding(4, mask_zero=True, combiner="mean")
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.dense(self.embedding(ids)).squeeze(1)

def dataset_fn(data_list, mode, metadata):
    values = np.stack([np.frombuffer(one, np.int64) for one in data_list])
    return torch.from_numpy(values[:, 1:].copy()), torch.from_numpy(values[:, 0].astype(np.float32))

def loss(labels, predictions):
    return torch.nn.functional.binary_cross_entropy_with_logits(predictions, labels)

def optimizer(lr=0.25):
    return lambda params: torch.optim.SGD(params, lr)
"""


def test_a_recipe_of_elasticdl_trains_its_table(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    recipe = load_recipe(tmp_path)
    model = recipe.make_model()
    served = ServedModel(model, recipe.optimizer(model.parameters()))
    assert served.lrs(0) == (0.25,)
    assert [(one.name, one.dim) for one in served.spec.tables] == [("embedding", 4)]

    def pull(wanted):
        return {table: np.ones((len(ids), 4), np.float32) for table, ids in wanted.items()}

    with served.tables.minibatch(pull) as minibatch:
        loss = recipe.loss(model(torch.tensor([[3, -8, 0], [3, 0, 0]])), torch.tensor([1.0, 0.0]))
        loss.backward()
    assert minibatch.gradients()["embedding"][0].tolist() == [-8, 3]


def test_layers_without_a_combiner_have_a_row_for_each_id():
    assert isinstance(make_layer(4), Embedding)
    layer = make_layer(4, combiner="sum")
    assert isinstance(layer, EmbeddingBag)
    assert (layer.mode, layer.settings.init, layer.settings.scale) == ("sum", "uniform", 0.05)


def test_what_elasticdls_layer_has_and_ours_does_not_is_refused():
    with pytest.raises(RecipeError, match="combiner='sqrtn'"):
        make_layer(4, combiner="sqrtn")
    with pytest.raises(RecipeError, match="embeddings_initializer='glorot'"):
        make_layer(4, embeddings_initializer="glorot")


def test_an_optimizer_by_learning_rate_that_has_its_parameters_already_is_refused(tmp_path):
    changed = RECIPE.replace("lambda params: torch.optim.SGD(params, lr)", "torch.optim.SGD([torch.zeros(1)], lr)")
    (tmp_path / "recipe.py").write_text(changed)
    recipe = load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="returned SGD, expected what takes the model's parameters"):
        recipe.optimizer([torch.zeros(1)])
