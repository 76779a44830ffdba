"""Promises of gradients that DDP's buckets carry."""

from unittest import mock

import pytest
import torch

from conformance.gradient_exchange import *  # noqa: F403  its tests
from conformance.gradient_exchange import WORDS, in_a_group, model_of, step
from trueline.parallel import ddp
from trueline.parallel.ddp import DdpExchange
from trueline.parallel.exchange import Overtaken, Shares, is_collective
from trueline.parallel.gloo import GlooGroup


@pytest.fixture
def make_exchange():
    return lambda model, group, width: DdpExchange(model, group, width)


class Bucket:
    """Memory of a device that is not here: it remembers what it was given."""

    is_cpu = False

    def __init__(self) -> None:
        self.held: list[float] = []

    def copy_(self, host: torch.Tensor) -> None:
        self.held = host.tolist()


def exchange_with(*operations):
    """An exchange whose buckets' sums are the `operations`; with the buckets and what DDP was promised."""
    exchange = DdpExchange(torch.nn.Linear(2, 1), GlooGroup(), 0)
    buckets = [Bucket() for _ in operations]
    promises = [torch.futures.Future() for _ in operations]
    hosts = [torch.full((2,), float(number)) for number, _ in enumerate(operations)]
    exchange._pending = list(zip(operations, hosts, buckets, promises, strict=True))
    return exchange, buckets, promises


class Summed:
    def __init__(self, error: str = "") -> None:
        self.error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None:
        if self.error:
            raise RuntimeError(self.error)


def test_sums_made_in_host_memory_are_brought_to_where_they_belong():
    exchange, buckets, promises = exchange_with(Summed(), Summed())
    exchange._receive()
    assert [bucket.held for bucket in buckets] == [[0.0, 0.0], [1.0, 1.0]]
    assert [promise.value() for promise in promises] == buckets


def test_a_sum_that_failed_does_not_touch_its_bucket_and_ends_the_backward():
    exchange, buckets, promises = exchange_with(Summed(), Summed("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="gloo: Connection closed by peer"):
        exchange._receive()
    assert buckets[1].held == []
    assert not promises[1].done()


def test_a_group_begins_without_buckets_of_the_one_before(monkeypatch):
    monkeypatch.setattr(ddp, "DistributedDataParallel", mock.Mock())
    exchange, _, _ = exchange_with(Summed())
    exchange.attach(0)
    assert exchange._pending == []


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


def test_the_backward_of_a_group_that_was_cut_stops_at_its_next_bucket():
    exchange, (bucket,), _ = exchange_with(Summed())
    exchange._pending, exchange._group._broken = [], True
    with pytest.raises(Overtaken, match="the group was cut"):
        exchange._send(bucket)
    assert is_collective(Overtaken("the group was cut"))
    assert exchange._pending == []


def test_a_forward_that_is_given_up_is_not_run_again():
    exchange = DdpExchange(torch.nn.Linear(2, 1), GlooGroup(), 0)
    exchange._ddp = mock.Mock(side_effect=Overtaken("a newer view"))
    exchange.original = mock.Mock()
    with pytest.raises(Overtaken):
        exchange._model(torch.ones(1, 2))
    assert not exchange.original.called


def test_sums_begin_during_the_backward_in_the_first_step_of_a_group_too(monkeypatch):
    monkeypatch.setattr(ddp, "BUCKETS_MB", [1e-5, 1e-5])

    def work(rank, group):
        model = model_of()
        exchange = DdpExchange(model, group, 6)
        exchange.attach(WORDS)
        found = []
        for _ in range(2):
            sent = []
            send = type(exchange)._send
            exchange._send = lambda bucket, sent=sent, send=send: sent.append(bucket.index()) or send(exchange, bucket)
            step(exchange, model, [[(0, 3)], [(3, 6)]][rank], Shares([1, 1], [0, 1]), 6)
            found.append(sent)
        return found

    for first, second in in_a_group(2, work):
        assert first == list(range(len(first)))
        assert len(first) >= 4, "of four parameters and the words"
        assert len(second) >= 4
