"""A pool of hosts whose store is a bucket of a real S3 server: `make test-s3`."""

import pytest

from conformance.scheduler import ENDED, RUNNING
from trueline.engine.cluster.pool_records import PoolTurn, PoolView
from trueline.storage import object_store
from worlds.pools import Pool
from worlds.s3 import KEY, SECRET, SERVERS
from worlds.waiting import until

pytest.importorskip("s3fs", reason="the store's package s3fs is not installed: make test-s3")


@pytest.fixture(params=SERVERS)
def bucket(request, tmp_path, monkeypatch):
    from fsspec.config import conf

    with SERVERS[request.param](tmp_path / "served") as url:
        monkeypatch.setitem(conf, "s3", {"key": KEY, "secret": SECRET, "endpoint_url": url})
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fs, _ = object_store.open_store("s3://pool/")
        fs.mkdir("pool")
        yield "s3://pool/jobs"


def test_hosts_and_clients_meet_in_a_bucket_which_also_has_the_output(bucket, tmp_path):
    pool = Pool(bucket, tmp_path)
    try:
        pool.lend("one", 1)
        pool.lend("two", 1)
        first, second = pool.submit("a-1", "head", "echo one; echo two"), pool.submit("a-1", "host-1")
        pool.step()
        (own,) = [one for lender in pool.lenders.values() for name, one in lender.running.items() if name == first]
        own.process.wait()
        pool.clock.s += 3
        pool.step()
        assert (pool.report(first).state, pool.report(second).state) == (ENDED, RUNNING)
        assert pool.client.read_log(first) == b"one\ntwo\n"
        assert b"ready" in until(lambda: pool.step() or pool.client.read_log(second), "output of what runs")
        view = PoolView(bucket)
        view.look()
        late = PoolView(bucket)
        late.look()
        assert view.take_turn(PoolTurn(name="x"))
        assert not late.take_turn(PoolTurn(name="y")), "a turn is made once in a bucket, too"
    finally:
        pool.close()
