"""The tables of a model in a worker of a hybrid job."""

import dataclasses
import os

import numpy as np
import pytest
import torch

from trueline.errors import RecipeError, UsageError
from trueline.parallel.gloo import GlooGroup
from trueline.ps.hybrid.exchange import TableExchange
from trueline.ps.hybrid.kept import choose_old
from trueline.ps.hybrid.rows import HybridTables
from trueline.ps.model.embedding import Embedding
from trueline.ps.tables.initial import initial_rows
from trueline.train.step.joint import JointOptimizer
from trueline.train.step.optimizer_step import OptimizerStep
from trueline.train.step.options import Options
from trueline.train.step.replica import Replica
from worlds.recipes import untrained


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.users, self.head = Embedding(2), Embedding(2, init="zeros"), torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(torch.cat([self.items(ids), self.users(ids)], dim=1)).sum()


def optimizer(params, tables=torch.optim.Adagrad):
    params = list(params)
    empty = [one for one in params if not one.numel()]
    return JointOptimizer(tables(empty, lr=0.5), torch.optim.Adamax([one for one in params if one.numel()], lr=0.1))


def make(optimizer=optimizer):
    tables = HybridTables(seed=3)
    recipe = tables.watch(dataclasses.replace(untrained(Model), optimizer=optimizer))
    model = recipe.make_model()
    recipe.optimizer(model.parameters())
    return tables, model


def test_rows_have_their_initial_values_until_there_are_servers_and_then_theirs():
    tables, model = make()
    ids, asked = torch.tensor([5, -7, 5]), []
    first = model.items(ids).detach().numpy()
    spec = tables.spec.tables[0]
    np.testing.assert_array_equal(first, initial_rows(spec, 3, ids.numpy()))

    def pull(wanted, averaged):
        assert not averaged
        asked.append({name: rows.tolist() for name, rows in wanted.items()})
        return {name: np.full((len(rows), 2), 9.0, np.float32) for name, rows in wanted.items()}

    tables.pull = pull
    for _ in range(2):
        model(ids)
        tables.take_gradients()
    assert (model.items(ids) == 9.0).all()
    assert asked[:2] == [{"items": [-7, 5]}, {"users": [-7, 5]}]
    assert asked[2] == {"items": [-7, 5], "users": [-7, 5]}  # from then on in one request, before the forward


def test_gradients_of_all_forwards_of_a_step_are_summed_by_id_and_taken_once():
    tables, model = make()
    for ids in ([1, 2, 2], [2, 3]):
        model(torch.tensor(ids)).backward()
    weight = model.head.weight.detach()[0, :2].numpy()
    ids, rows = tables.take_gradients(2.0)["items"]
    assert ids.tolist() == [1, 2, 3]
    np.testing.assert_allclose(rows, 2.0 * np.array([[1], [3], [1]]) * weight, rtol=1e-6)
    assert tables.take_gradients() == {}


def test_the_servers_learn_of_the_optimizers_of_tables_alone():
    tables, _ = make()
    assert [one.kind for one in tables.spec.groups] == ["adagrad", "sgd"]
    assert (tables.spec.dense, tables.lrs) == ((), (0.5, 0.1))
    tables, _ = make(lambda params: optimizer(params, tables=torch.optim.Adamax))
    with pytest.raises(UsageError, match="Adamax is not one that parameter servers step"):
        tables.spec  # noqa: B018


def test_a_worker_leaves_the_rows_of_a_checkpoint_to_the_servers():
    tables, model = make()
    ids = np.array([4, 8], np.int64)
    state = {**model.state_dict(), **tables.state({"items": (ids, np.ones((2, 2), np.float32))})}
    assert state["items.ids"].tolist() == [4, 8]
    model.load_state_dict(state)
    assert (len(model.items.ids), model.items.rows.shape) == (0, (0, 2))


def test_a_model_without_tables_is_refused():
    recipe = HybridTables(0).watch(untrained(lambda: torch.nn.Linear(1, 1)))
    with pytest.raises(RecipeError, match="no table for the servers"):
        recipe.make_model()


def test_what_the_trial_of_a_record_looked_up_does_not_count_in_the_step():
    """A worker tries records alone after several deaths; it begins the step before and after."""
    tables, model = make()
    step = OptimizerStep(model, tables.optimizer, None, Options())
    replica = Replica(model, step, GlooGroup(), 4, Options())
    replica.exchange = TableExchange(replica.exchange, None, None, tables=tables, link=None, connect=None)
    replica.begin()
    model(torch.tensor([1, 1])).backward()
    replica.begin()
    model(torch.tensor([1, 2])).backward()
    weight = model.head.weight.detach()[0, :2].numpy()
    ids, rows = tables.take_gradients()["items"]
    assert ids.tolist() == [1, 2]
    np.testing.assert_allclose(rows, np.ones((2, 1)) * weight, rtol=1e-6)


def test_the_tables_of_the_newest_checkpoint_stay_whatever_the_clock_says(tmp_path):
    folders = {step: tmp_path / f"step-{step}" for step in (8, 16, 24, 32, 40)}
    for step, folder in folders.items():
        folder.mkdir()
        os.utime(folder, (0, 1e9 - step))  # the clock went back between all of them
    assert choose_old(list(folders.values()), 40, 3) == [folders[16], folders[8]]
    assert choose_old(list(folders.values()), 24, 2) == [folders[8], folders[40], folders[32]]
