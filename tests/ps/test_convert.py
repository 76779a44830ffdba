"""torch's own sparse embeddings become tables for the training, and are themselves again in the checkpoint."""

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from trueline.errors import UsageError
from trueline.ps.model.convert import convert_embeddings, refuse_table_weights
from trueline.ps.model.minibatch import Tables
from trueline.ps.model.strategy import ServedModel


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(1000, 4, sparse=True, padding_idx=0)
        self.small = nn.Embedding(10, 4, sparse=True)
        self.dense = nn.Embedding(1000, 4)
        self.tied, self.out = nn.Embedding(1000, 4, sparse=True), nn.Linear(4, 1000, bias=False)
        self.out.weight = self.tied.weight
        nn.init.uniform_(self.users.weight, -0.3, 0.3)

    def forward(self, ids):
        return self.users(ids).sum()


def pull(wanted):
    return {table: np.ones((len(ids), 4), np.float32) for table, ids in wanted.items()}


def test_large_sparse_embeddings_become_tables_and_others_stay():
    model = Plain()
    assert convert_embeddings(model, 100) == ["users"]
    served = ServedModel(model, torch.optim.SGD(model.parameters()))
    (spec,) = served.spec.tables
    assert (spec.name, spec.dim, spec.init) == ("users", 4, "uniform")
    assert spec.scale == pytest.approx(0.3, rel=0.01)
    with served.tables.minibatch(pull) as minibatch:
        model(torch.tensor([3, 0, 3])).backward()
    ids, rows = minibatch.gradients()["users"]
    assert ids.tolist() == [3]
    assert rows.tolist() == [[2, 2, 2, 2]]


def test_the_initial_values_have_the_distribution_of_the_weight():
    for fill, init, scale in ((nn.init.zeros_, "zeros", 0.0), (lambda w: nn.init.normal_(w, 0, 0.5), "normal", 0.5)):
        model = nn.ModuleList([nn.Embedding(5000, 4, sparse=True)])
        fill(model[0].weight)
        convert_embeddings(model, 100)
        assert model[0].settings.init == init
        assert model[0].settings.scale == pytest.approx(scale, rel=0.05)


def test_the_checkpoint_has_the_whole_weight_and_the_recipes_model_takes_it():
    pytest.importorskip("trueline.ps.tables.initial")
    model = Plain()
    convert_embeddings(model, 100)
    served = ServedModel(model, torch.optim.SGD(model.parameters()), seed=3)
    state = served.state_dict({}, {"users": (np.array([7, 5]), np.array([[1.0] * 4, [2.0] * 4], np.float32))})
    fresh = Plain()
    fresh.load_state_dict(state)
    weight = fresh.users.weight.detach()
    assert weight[7].tolist() == [1.0] * 4
    assert weight[5].tolist() == [2.0] * 4
    assert not weight[0].any()  # the padding
    assert 0.25 < weight[8:].abs().max() <= 0.3001


def test_an_id_outside_the_vocabulary_is_refused():
    model = Plain()
    convert_embeddings(model, 100)
    served = ServedModel(model, torch.optim.SGD(model.parameters()))
    with served.tables.minibatch(pull), pytest.raises(UsageError, match="are 3 to 1000, expected 0 to 999"):
        model(torch.tensor([3, 1000]))


def test_a_model_without_such_an_embedding_is_refused_with_what_it_has():
    with pytest.raises(UsageError, match=r"no torch\.nn\.Embedding.* of more than 100 rows") as caught:
        convert_embeddings(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Embedding(1000, 4)), 100)
    assert "0 has 10, 1 has 1000 and is not sparse" in caught.value.hint


def test_weights_with_rows_of_a_table_are_refused_and_those_of_other_layers_are_not(tmp_path):
    plain, converted, file = Plain(), Plain(), tmp_path / "weights.safetensors"
    convert_embeddings(converted, 100)
    del plain.tied, plain.out
    safetensors.torch.save_file(plain.state_dict(), file)
    with pytest.raises(UsageError, match="--weights has 1000 rows of table 'users'") as caught:
        refuse_table_weights(Tables(converted), file)
    assert "--new-layers users" in caught.value.hint
    safetensors.torch.save_file(plain.small.state_dict(), file)
    refuse_table_weights(Tables(converted), file)
