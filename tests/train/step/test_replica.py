"""Promises of one worker's copy of the state: what it sums, and what a step that fails leaves in it."""

import numpy as np
import pytest
import torch

from trueline.errors import RecipeError
from trueline.parallel.gloo import GlooGroup
from trueline.train.step.ledger import Sums
from trueline.train.step.optimizer_step import Advance
from trueline.train.step.options import Options
from trueline.train.step.replica import Replica, is_collective


def replica_of(model, *, sharded=False):
    advance = Advance(model, torch.optim.SGD(model.parameters(), lr=0.1), None, Options())
    return Replica(model, advance, GlooGroup(), 10, Options(), sharded=sharded)


class Bucket:
    """Memory of a device that is not here: it remembers what it was given."""

    is_cpu = False

    def __init__(self) -> None:
        self.held: list[float] = []

    def copy_(self, host: torch.Tensor) -> None:
        self.held = host.tolist()


def replica_with(*operations):
    """A replica whose buckets' sums are the `operations`; with the buckets and what DDP was promised."""
    replica = replica_of(torch.nn.Linear(2, 1))
    buckets = [Bucket() for _ in operations]
    promises = [torch.futures.Future() for _ in operations]
    hosts = [torch.full((2,), float(number)) for number, _ in enumerate(operations)]
    replica._sent = list(zip(operations, hosts, buckets, promises, strict=True))
    return replica, buckets, promises


class Summed:
    def __init__(self, error: str = "") -> None:
        self.error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None:
        if self.error:
            raise RuntimeError(self.error)


def test_sums_made_in_host_memory_are_brought_to_where_they_belong():
    replica, buckets, promises = replica_with(Summed(), Summed())
    replica._receive()
    assert [bucket.held for bucket in buckets] == [[0.0, 0.0], [1.0, 1.0]]
    assert [promise.value() for promise in promises] == buckets


def test_a_sum_that_failed_does_not_touch_its_bucket_and_ends_the_backward():
    replica, buckets, promises = replica_with(Summed(), Summed("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="gloo: Connection closed by peer"):
        replica._receive()
    assert buckets[1].held == []
    assert not promises[1].done()


def test_a_step_that_failed_leaves_the_running_statistics_of_the_last_applied_one():
    """Whoever is behind is healed from this state, before the step is begun anew."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    replica = replica_of(model, sharded=True)
    replica.begin()
    before = {name: value.clone() for name, value in replica.state()["model"].items()}
    model(torch.randn(4, 2))
    assert replica.state()["model"]["1.num_batches_tracked"] == 1
    replica.detach()
    healed = replica.state()["model"]
    assert all(torch.equal(healed[name], value) for name, value in before.items())


SUMS = Sums(count=4, digest=9, wishes=0, loss=0.5)


def norm():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


def test_a_step_begins_without_gradients_contributions_or_buckets_of_the_one_before():
    replica = replica_of(norm(), sharded=True)
    replica.begin()
    replica.add(replica.model(torch.randn(4, 2)).sum(), 0.5, np.array([1, 2]))
    replica.add(replica.model(torch.randn(4, 2)).sum(), 0.5, np.array([2, 7]))
    assert replica._beside[:10].tolist() == [0, 1, 2, 0, 0, 0, 0, 1, 0, 0], "how often each record was in it"
    assert replica._beside[10:].abs().sum() > 0, "what became of the running statistics"
    replica._sent = [(None, None, None, None)]
    replica.begin()
    assert replica._beside.abs().sum() == 0
    assert [value.grad for value in replica.model.parameters()] == [None] * 4
    assert replica._sent == []


def reduced(replica, value):
    """As if a step had just been reduced: all gradients and the tally are `value`."""
    for parameter in replica.model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    replica._summed = torch.full((10,), value)
    return replica.keep([value] * 9)


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
    assert replica.apply(SUMS)
    for value, was in zip(replica.model.parameters(), before, strict=True):
        torch.testing.assert_close(value, was - 0.1)
    assert (first.words, replica.ledger.tally.tolist()) == ([1.0] * 9, [1] * 10)
    assert (replica.ledger.steps, replica.ledger.epoch_records) == (1, 4)


def test_a_step_that_overflows_is_not_counted():
    model = norm()
    options = Options(precision="fp16")
    advance = Advance(model, torch.optim.SGD(model.parameters(), lr=0.1), None, options)
    replica = Replica(model, advance, GlooGroup(), 10, options, sharded=True)
    replica.begin()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reduced(replica, torch.inf)
    replica._summed = torch.ones(16)
    assert not replica.apply(SUMS)
    assert (replica.ledger.steps, replica.ledger.tally.sum()) == (0, 0)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def momentum_of(model):
    advance = Advance(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None, Options())
    return Replica(model, advance, GlooGroup(), 10, Options(), sharded=False)


def test_a_state_that_travels_goes_on_as_if_it_had_stayed():
    torch.manual_seed(0)
    stays, travels = momentum_of(torch.nn.Linear(2, 1)), momentum_of(torch.nn.Linear(2, 1))

    def step(replica, value):
        reduced(replica, value)
        assert replica.apply(SUMS)

    step(stays, 1.0)
    state = stays.snapshot()
    copied = {name: value.clone() for name, value in state["model"].items()}
    step(stays, 2.0)
    assert all(torch.equal(state["model"][name], value) for name, value in copied.items()), "it is of its moment"
    travels.restore(state)
    step(travels, 2.0)
    for mine, its in zip(travels.model.parameters(), stays.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert travels.ledger.as_tree()["tally"].tolist() == [3] * 10
    assert (travels.ledger.steps, travels.ledger.epoch_digest) == (2, 18)
    assert [parameter.grad is None for parameter in travels.model.parameters()] == [False, False]


@pytest.mark.parametrize(
    ("error", "collective"),
    [
        (RuntimeError("[enforce fail at gloo/transport] timed out"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("ProcessGroup: the transfer was interrupted"), True),
        (torch.distributed.DistBackendError("NCCL error"), True),
        (torch.distributed.DistNetworkError("the client socket has failed"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("connection to the data base was lost"), False),
    ],
    ids=str,
)
def test_an_error_of_the_group_is_told_from_one_of_the_model(error, collective):
    assert is_collective(error) is collective


def test_a_parameter_that_took_no_part_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    replica = replica_of(model)
    model[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RecipeError, match=r"took no part in the loss of a step \(1\.weight, 1\.bias\)"):
        replica.check_all_used()
    model[1](torch.ones(1, 2)).sum().backward()
    replica.check_all_used()
