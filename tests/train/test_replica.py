"""Promises of one worker's copy of the state: what it sums, and what a step that fails leaves in it."""

import pytest
import torch

from trueline.train.advance import Advance
from trueline.train.group import GlooGroup
from trueline.train.options import Options
from trueline.train.replica import Replica


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
