"""Promises of leased ranges: each record is committed once, whoever dies, sleeps or comes back, the master too."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trueline.errors import UsageError
from trueline.train.journal import Journal
from trueline.train.leases import Leases, replayed

WORKERS = st.sampled_from(["a", "b", "c"])


class Epoch(RuleBasedStateMachine):
    """Workers that lease, commit in parts, die, sleep beyond their deadline and wake up; a master that restarts."""

    @initialize(num_records=st.integers(1, 500))
    def begin(self, num_records: int) -> None:
        self.size, self.now = num_records, 0.0
        self.rows: list = []
        self.held: dict = {}
        self.zombies: list = []
        self.tokens: set = set()
        self.counts = [0] * num_records
        self.leases = Leases(epoch=1, num_records=num_records)
        self.rows += self.leases.begun()

    @rule(worker=WORKERS, dt=st.floats(0, 1))
    def lease(self, worker: str, dt: float) -> None:
        self.now += dt
        found = self.leases.lease(worker, self.now)
        if found is None:
            return
        assert found.token not in self.tokens
        self.tokens.add(found.token)
        self.held[found.token] = (worker, found.start, found.stop)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), dt=st.floats(0, 1))
    def commit(self, data: st.DataObject, dt: float) -> None:
        self.now += dt
        token = data.draw(st.sampled_from(sorted(self.held)))
        worker, start, stop = self.held[token]
        upto = data.draw(st.integers(start, stop))
        rows = self.leases.commit(token, upto, self.now)
        assert rows is not None
        self._count(start, upto, rows)
        self.held.pop(token)
        if upto < stop:
            self.held[token] = (worker, upto, stop)

    def _count(self, start: int, upto: int, rows: list) -> None:
        self.rows += rows
        for position in range(start, upto):
            self.counts[position] += 1

    @rule(worker=WORKERS)
    def die(self, worker: str) -> None:
        mine = [token for token, (who, _, _) in self.held.items() if who == worker]
        rest = sum(self.held[token][2] - self.held[token][1] for token in mine)
        assert self.leases.lost(worker) == rest, "only what was not committed comes back"
        self.zombies += [(token, *self.held.pop(token)[1:]) for token in mine]

    @rule(worker=WORKERS)
    def sleep(self, worker: str) -> None:
        self.now += self.leases.lease_s / 2
        for other in {who for who, _, _ in self.held.values()} - {worker}:
            self.leases.beat(other, self.now)
        self.now += self.leases.lease_s / 2 + 0.01
        late = self.leases.expire(self.now)
        for token in [token for token, (who, _, _) in self.held.items() if who in late]:
            self.zombies.append((token, *self.held.pop(token)[1:]))

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        token, start, stop = data.draw(st.sampled_from(self.zombies))
        assert self.leases.commit(token, data.draw(st.integers(start, stop)), self.now) is None, "it is fenced"

    @rule()
    def restart(self) -> None:
        self.leases = replayed(self.rows, epoch=1, num_records=self.size)
        self.rows += self.leases.begun()
        self.zombies += [(token, start, stop) for token, (_, start, stop) in self.held.items()]
        self.held.clear()

    @invariant()
    def each_record_is_done_once_at_most_and_counted(self) -> None:
        if hasattr(self, "counts"):
            assert max(self.counts) <= 1
            assert self.leases.committed == sum(self.counts)
            assert self.leases.finished == all(self.counts)

    def teardown(self) -> None:
        if not hasattr(self, "counts"):
            return
        self.leases.lost("a"), self.leases.lost("b"), self.leases.lost("c")
        while (found := self.leases.lease("last", self.now)) is not None:
            self.now += 1.0
            self._count(found.start, found.stop, self.leases.commit(found.token, found.stop, self.now) or [])
        assert self.counts == [1] * self.size
        assert self.leases.finished


Epoch.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_epoch = Epoch.TestCase


def makespan(rates: list[float], *, num_records: int, ask_s: float = 0.001) -> float:
    """Seconds until all is committed, over those of workers that never wait and end together. Time is simulated."""
    leases = Leases(epoch=0, num_records=num_records, lease_s=1e9)
    coming = [(0.0, worker, None) for worker in range(len(rates))]
    last = 0.0
    while coming:
        now, worker, done = heapq.heappop(coming)
        if done is not None:
            assert leases.commit(done.token, done.stop, now) is not None
            last = now
        found = leases.lease(f"w{worker}", now)
        if found is not None:
            heapq.heappush(coming, (now + ask_s + (found.stop - found.start) / rates[worker], worker, found))
    assert leases.finished
    return last / (num_records / sum(rates))


def test_one_worker_at_a_tenth_of_the_speed_holds_up_nobody():
    assert makespan([10_000.0] * 7 + [1_000.0], num_records=1_000_000) < 1.05
    assert makespan([10_000.0] * 8, num_records=1_000_000) < 1.03
    assert makespan([10_000.0, 100.0], num_records=200_000) < 1.05


@given(st.lists(st.floats(500, 20_000), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_whatever_the_speeds_are_the_end_is_near_the_ideal(rates):
    assert makespan(rates, num_records=int(20 * sum(rates))) < 1.08


def test_a_journal_keeps_what_was_committed_and_a_master_that_comes_back_goes_on(tmp_path):
    journal, leases = Journal(tmp_path / "job.db"), Leases(epoch=3, num_records=1000)
    journal.append(*leases.begun())
    first = leases.lease("a", 0.0)
    half = (first.start + first.stop) // 2
    journal.append(*leases.commit(first.token, half, 1.0))
    journal.close()
    again = Journal(tmp_path / "job.db")
    back = replayed(again.rows(), epoch=3, num_records=1000)
    assert back.committed == half - first.start
    assert back.commit(first.token, first.stop, 2.0) is None, "a token of the master before is worth nothing"
    assert back.lease("b", 2.0).start == half
    with pytest.raises(UsageError, match="begun with 1000 records, and there are 999 now"):
        replayed(again.rows(), epoch=3, num_records=999)
    again.close()


def test_a_ledger_that_has_a_record_twice_is_refused():
    rows = [("DONE", {"epoch": 0, "start": 0, "stop": 10}), ("DONE", {"epoch": 0, "start": 5, "stop": 20})]
    with pytest.raises(UsageError, match="the records 5 to 10 committed twice"):
        replayed(rows, epoch=0, num_records=20)
    with pytest.raises(UsageError, match="no records"):
        Leases(epoch=0, num_records=0)
