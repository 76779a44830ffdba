"""Promises of one worker's copy of the state: what it sums, and what a step that fails leaves in it."""

import copy
import threading

import numpy as np
import pytest
import torch

from trueline.checkpoint import snapshot as snapshots
from trueline.errors import RecipeError
from trueline.parallel.gloo import GlooGroup
from trueline.train import dynamo
from trueline.train.step.ledger import StepAccount
from trueline.train.step.optimizer_step import OptimizerStep
from trueline.train.step.options import Options
from trueline.train.step.replica import Replica
from worlds.states import read_all


def replica_of(model):
    advance = OptimizerStep(model, torch.optim.SGD(model.parameters(), lr=0.1), None, Options())
    return Replica(model, advance, GlooGroup(), 10, Options())


def test_a_step_that_failed_leaves_the_running_statistics_of_the_last_applied_one():
    """Whoever is behind is healed from this state, before the step is begun anew."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    replica = replica_of(model)
    replica.begin()
    before = {name: value.clone() for name, value in replica.state()["model"].items()}
    model(torch.randn(4, 2))
    assert replica.state()["model"]["1.num_batches_tracked"] == 1
    replica.detach()
    healed = replica.state()["model"]
    assert all(torch.equal(healed[name], value) for name, value in before.items())


ACCOUNT = StepAccount(count=4, digest=9)


def norm():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def test_a_step_begins_without_gradients_or_contributions_of_the_one_before():
    replica = replica_of(norm())
    replica.begin()
    replica.add(replica.model(torch.randn(4, 2)).sum(), 0.5, np.array([1, 2]))
    replica.add(replica.model(torch.randn(4, 2)).sum(), 0.5, np.array([2, 7]))
    assert replica.exchange.beside[:10].tolist() == [0, 1, 2, 0, 0, 0, 0, 1, 0, 0], "how often each record was in it"
    assert replica.exchange.beside[10:].abs().sum() > 0, "what became of the running statistics"
    replica.begin()
    assert replica.exchange.beside.abs().sum() == 0
    assert [value.grad for value in replica.model.parameters()] == [None] * 4


def reduced(replica, value):
    """As if a step had just been reduced: all gradients and the tally are `value`."""
    for parameter in replica.model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    replica._summed = torch.full((10,), value)
    return replica.keep(StepAccount(loss_sum=value))


def test_what_was_kept_of_a_step_is_a_copy_and_is_applied_as_if_it_had_just_been_reduced():
    replica = replica_of(torch.nn.Linear(2, 1))
    first = reduced(replica, 1.0)
    for parameter in replica.model.parameters():
        parameter.grad.zero_()
    replica._summed.zero_()
    reduced(replica, 2.0)
    before = [value.clone() for value in replica.model.parameters()]
    replica.begin()
    replica.recall(first)
    assert replica.apply(ACCOUNT)
    for value, was in zip(replica.model.parameters(), before, strict=True):
        torch.testing.assert_close(value, was - 0.1)
    assert (first.account.loss_sum, replica.ledger.tally.tolist()) == (1.0, [1] * 10)
    assert (replica.ledger.steps, replica.ledger.epoch_records) == (1, 4)


def test_a_step_that_overflows_is_not_counted():
    model = norm()
    options = Options(precision="fp16")
    advance = OptimizerStep(model, torch.optim.SGD(model.parameters(), lr=0.1), None, options)
    replica = Replica(model, advance, GlooGroup(), 10, options)
    replica.begin()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reduced(replica, torch.inf)
    replica._summed = torch.ones(16)
    assert not replica.apply(ACCOUNT)
    assert (replica.ledger.steps, replica.ledger.tally.sum()) == (0, 0)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def momentum_of(model):
    advance = OptimizerStep(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None, Options())
    return Replica(model, advance, GlooGroup(), 10, Options())


def test_a_state_that_travels_goes_on_as_if_it_had_stayed():
    torch.manual_seed(0)
    stays, travels = momentum_of(torch.nn.Linear(2, 1)), momentum_of(torch.nn.Linear(2, 1))

    def step(replica, value):
        reduced(replica, value)
        assert replica.apply(ACCOUNT)

    step(stays, 1.0)
    taken = stays.snapshot()
    copied = {name: value.clone() for name, value in stays.model.state_dict().items()}
    step(stays, 2.0)
    state = read_all(taken)
    assert all(torch.equal(state["model"][name], value) for name, value in copied.items()), "it is of its moment"
    travels.restore(state)
    step(travels, 2.0)
    for mine, its in zip(travels.model.parameters(), stays.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert travels.ledger.as_tree()["tally"].tolist() == [3] * 10
    assert (travels.ledger.steps, travels.ledger.epoch_digest) == (2, 18)
    assert [parameter.grad is None for parameter in travels.model.parameters()] == [False, False]


def test_a_parameter_that_took_no_part_in_the_first_step_of_a_recipe_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    replica = replica_of(model)
    model[0](torch.ones(1, 2)).sum().backward()
    replica.check_all_used()  # in a loop of the user's own it may be meant
    replica.owned = True
    with pytest.raises(RecipeError, match=r"took no part in the loss of a step \(1\.weight, 1\.bias\)"):
        replica.check_all_used()
    replica.ledger.steps = 1  # a later step leaves it without a gradient, as one process does
    replica.check_all_used()
    replica.ledger.steps = 0
    model[1](torch.ones(1, 2)).sum().backward()
    replica.check_all_used()


@pytest.mark.parametrize("owned", [True, False])
def test_a_snapshot_reads_the_parameters_in_place_only_where_the_loop_is_not_a_users_own(monkeypatch, owned):
    monkeypatch.setattr("trueline.checkpoint.snapshot.LEAST_LIVE", 1)
    replica = momentum_of(torch.nn.Linear(2, 1))
    replica.owned = owned
    taken = replica.snapshot()
    assert bool(taken._live) is owned
    before = [value.clone() for value in replica.model.parameters()]
    reduced(replica, 1.0)
    assert replica.apply(ACCOUNT)
    assert [value.tolist() for value in read_all(taken)["model"].values()] == [value.tolist() for value in before]


def test_a_restored_state_does_not_reach_a_snapshot_of_the_old_one(monkeypatch):
    monkeypatch.setattr("trueline.checkpoint.snapshot.LEAST_LIVE", 1)
    replica, other = momentum_of(torch.nn.Linear(2, 1)), momentum_of(torch.nn.Linear(2, 1))
    replica.owned = True
    taken, before = replica.snapshot(), replica.model.weight.tolist()
    replica.restore(read_all(other.snapshot()))
    assert read_all(taken)["model"]["weight"].tolist() == before


def test_where_something_else_changed_parameters_later_snapshots_are_copied_at_once(monkeypatch):
    monkeypatch.setattr("trueline.checkpoint.snapshot.LEAST_LIVE", 1)
    replica = momentum_of(torch.nn.Linear(2, 1))
    replica.owned = True
    replica.snapshot()
    with torch.no_grad():
        replica.model.weight.mul_(2.0)
    replica.settle()
    assert not replica.owned
    assert not replica.snapshot()._live


def test_a_group_that_is_left_takes_the_gradients_in_its_buckets_along():
    replica = momentum_of(torch.nn.Linear(2, 1))
    reduced(replica, 1.0)
    replica.detach()
    assert [value.grad for value in replica.model.parameters()] == [None, None]


class Slow(torch.optim.Optimizer):
    """Of a user's own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for value in self.param_groups[0]["params"]:
            value.numpy()[...] += 1.0


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, Slow])
def test_a_checkpoint_that_is_read_during_the_next_step_has_the_state_before_it(make, monkeypatch, tmp_path):
    monkeypatch.setattr(snapshots, "LEAST_LIVE", 8)
    monkeypatch.setattr(snapshots, "LEAST_SPILLED", 1)
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 16)
    monkeypatch.setattr(dynamo, "is_loaded", lambda: False)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    advance = OptimizerStep(model, make(model.parameters()), None, Options(ema=0.9), owned=True)
    replica = Replica(model, advance, GlooGroup(), 10, Options())

    def step():
        for value in model.parameters():
            value.grad = torch.ones_like(value)
        assert advance.apply()

    step()
    before = copy.deepcopy(replica.state())
    snapshot = replica.snapshot(spill=tmp_path)
    assert snapshot.live_bytes > 4 * 20 * 4
    read = {}
    reader = threading.Thread(target=lambda: read.update(read_all(snapshot)), daemon=True)
    monkeypatch.setattr(snapshots, "STILL_S", 20.0)
    reader.start()
    step()
    step()
    reader.join()
    snapshot.close()
    assert all(torch.equal(read["model"][name], value) for name, value in before["model"].items())
    assert all(torch.equal(read["ema"][name], value) for name, value in before["ema"].items())
    for index, state in before["optimizer"]["state"].items():
        assert all(torch.equal(read["optimizer"]["state"][index][name], value) for name, value in state.items())
    assert replica.owned
    assert not torch.equal(before["model"]["0.weight"], model[0].weight)
