"""A group on several hosts sums inside each host first: the same sums, and a death in the middle fails all of them."""

import hashlib
import os

import pytest
import torch

from trueline.parallel import by_host
from trueline.parallel.exchange import is_collective
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.store import StoreServer
from worlds.groups import in_processes

pytestmark = pytest.mark.slow
HOSTS = ("127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.3")


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", "the-secret-of-this-job")
    server = StoreServer()
    yield server.address
    server.close()


def _form(store: str, rank: int, hosts) -> GlooGroup:
    os.environ["TRUELINE_HOST"] = hosts[rank]
    group = GlooGroup()
    group.form(1, rank=rank, size=len(hosts), store=store)
    return group


@pytest.mark.parametrize("hosts", [HOSTS, ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.4")])
def test_members_on_several_hosts_get_one_and_the_same_sum(store, hosts):
    def work(rank):
        group, digests = _form(store, rank, hosts), []
        assert isinstance(group._host_sums, by_host.HostSums)
        for numbers in (1, 7, 100_003, 3_000_001):
            values = [
                torch.randn(numbers, generator=torch.Generator().manual_seed(other)) for other in range(len(hosts))
            ]
            mine = values[rank].clone()
            group.wait_bucket(group.sum_bucket(mine))
            torch.testing.assert_close(mine, torch.stack(values).sum(0), rtol=1e-5, atol=1e-5)
            digests.append(hashlib.sha256(mine.numpy().tobytes()).hexdigest())
        group.wait(group.sum_on_host(torch.zeros(1)))
        group.close()
        return digests

    first, *others = in_processes(len(hosts), work)
    assert all(found == first for found in others)


@pytest.mark.parametrize("chunk", [by_host.CHUNK, 50_000], ids=["one part", "20 parts"])
def test_a_member_that_dies_within_a_sum_fails_it_for_all_others(store, monkeypatch, chunk):
    monkeypatch.setattr(by_host, "CHUNK", chunk)

    def work(rank):
        group = _form(store, rank, HOSTS)
        group.wait_bucket(group.sum_bucket(torch.ones(1000)))
        if rank == 1:
            group.cut()  # shuts its connections, as its end would
            return "gone"
        try:
            group.wait_bucket(group.sum_bucket(torch.ones(1_000_000)))
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as later:  # that of the next bucket, which is computed meanwhile
                group.wait_bucket(group.sum_bucket(torch.ones(1000)))
            group.close()
            return [is_collective(found) for found in (error, later.value)]
        return "summed"

    assert in_processes(len(HOSTS), work) == [[True, True], "gone", *[[True, True]] * 3]
