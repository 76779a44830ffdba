"""Promises of leased ranges: each record is committed once, whoever dies, sleeps or comes back, the master too."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trueline.errors import UsageError
from trueline.train.master.journal import Journal
from trueline.train.membership.leases import Lease, Leases, replay

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
        self.rows += self.leases.first_rows()

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
        assert self.leases.release(worker) == rest, "only what was not committed comes back"
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
        self.leases = replay(self.rows, epoch=1, num_records=self.size)
        self.rows += self.leases.first_rows()
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
        self.leases.release("a"), self.leases.release("b"), self.leases.release("c")
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
    journal.append(*leases.first_rows())
    first = leases.lease("a", 0.0)
    half = (first.start + first.stop) // 2
    journal.append(*leases.commit(first.token, half, 1.0))
    journal.close()
    again = Journal(tmp_path / "job.db")
    back = replay(again.rows(), epoch=3, num_records=1000)
    assert back.committed == half - first.start
    assert back.commit(first.token, first.stop, 2.0) is None, "a token of the master before is worth nothing"
    assert back.lease("b", 2.0).start == half
    with pytest.raises(UsageError, match="begun with 1000 records, and there are 999 now"):
        replay(again.rows(), epoch=3, num_records=999)
    again.close()


def test_a_ledger_that_has_a_record_twice_is_refused():
    rows = [("DONE", {"epoch": 0, "start": 0, "stop": 10}), ("DONE", {"epoch": 0, "start": 5, "stop": 20})]
    with pytest.raises(UsageError, match="the records 5 to 10 committed twice"):
        replay(rows, epoch=0, num_records=20)
    with pytest.raises(UsageError, match="no records"):
        Leases(epoch=0, num_records=0)


KNOWN = {"a": 1000.0, "b": 1000.0}
SIZE = 1666
"""Of the first lease of a worker that does half of the work, of 10,000 records."""


def epoch(**fields) -> Leases:
    """Two workers of the same speed."""
    return Leases(**{"epoch": 1, "num_records": 10_000, "rates": dict(KNOWN), **fields})


def done(start: int, stop: int, of: int = 1) -> tuple:
    return ("DONE", {"epoch": of, "start": start, "stop": stop})


def free(leases: Leases, worker: str = "c") -> list[tuple[int, int]]:
    """What `worker` gets until nothing is left; it may take all at once."""
    leases.rates[worker], found = 1e12, []
    while (lease := leases.lease(worker, 100.0)) is not None:
        found.append((lease.start, lease.stop))
    return found


def test_a_commit_has_to_lie_within_its_lease_and_beyond_what_was_committed_of_it():
    leases = epoch()
    leases.lease("a", 0.0)
    mine = leases.lease("b", 0.0)
    assert mine.start == SIZE
    refused = [leases.commit(mine.token, upto, 1.0) for upto in (0, mine.start - 1, mine.stop + 1, 10_000)]
    assert (refused, leases.committed) == ([None] * 4, 0)
    rows = [leases.commit(mine.token, mine.start + part, 1.0) for part in (0, 7, 7, 9)]
    assert rows == [[], [done(SIZE, SIZE + 7)], [], [done(SIZE + 7, SIZE + 9)]]
    assert leases.commit(mine.token, mine.start + 8, 1.0) is None, "it was committed before"
    assert leases.commit(mine.token, mine.stop, 1.0) == [done(SIZE + 9, mine.stop)]
    assert leases.commit(mine.token, mine.stop, 1.0) is None, "a lease that is done is nobody's"
    assert leases.committed == mine.stop - mine.start


def test_a_lease_ends_at_its_deadline_and_not_before_and_its_rest_is_free():
    leases = epoch(lease_s=10.0)
    mine = leases.lease("a", 0.0)
    leases.commit(mine.token, 400, 2.0)
    assert leases.expire(11.99) == []
    assert leases.expire(12.0) == ["a"]
    assert leases.commit(mine.token, mine.stop, 12.0) is None, "it comes too late"
    assert (leases.expire(1e9), leases.committed, free(leases)) == ([], 400, [(400, 10_000)])


def test_a_worker_that_is_heard_keeps_its_own_leases_and_only_these():
    leases = epoch(lease_s=10.0)
    first, second, other = leases.lease("a", 0.0), leases.lease("a", 0.0), leases.lease("b", 0.0)
    leases.beat("a", 9.0)
    assert leases.expire(10.0) == ["b"]
    assert leases.commit(other.token, other.stop, 10.0) is None
    assert leases.expire(18.99) == []
    assert leases.commit(first.token, first.stop, 18.99) == [done(first.start, first.stop)]
    assert leases.expire(19.0) == ["a"]
    assert leases.commit(second.token, second.stop, 19.0) is None


def test_a_worker_that_is_gone_loses_all_its_leases_and_its_speed_and_takes_nobody_elses():
    leases = epoch()
    one, two, other = leases.lease("a", 0.0), leases.lease("a", 0.0), leases.lease("b", 0.0)
    leases.commit(one.token, 100, 0.0)
    assert leases.release("a") == two.stop - 100
    assert leases.rates == {"b": 1000.0}
    assert leases.release("a") == 0
    assert leases.commit(other.token, other.stop, 0.0) == [done(other.start, other.stop)]
    assert free(leases) == [(100, two.stop), (other.stop, 10_000)], "what lies together is one range again"


def test_ranges_that_come_back_apart_stay_apart():
    leases = epoch()
    one, two, three = (leases.lease(worker, 0.0) for worker in ("a", "b", "a"))
    leases.release("a")
    assert free(leases) == [(one.start, one.stop), (three.start, 10_000)]
    assert two.stop == three.start


def test_the_last_range_leaves_nothing_and_an_epoch_is_finished_when_it_is_committed():
    leases = Leases(epoch=1, num_records=1)
    last = leases.lease("a", 0.0)
    assert (leases.lease("b", 0.0), leases.finished) == (None, False)
    leases.commit(last.token, 1, 0.0)
    assert (leases.lease("b", 0.0), leases.finished) == (None, True)


def test_speed_is_measured_from_commit_to_commit_and_smoothed():
    leases = epoch(rates={})
    mine = leases.lease("a", 0.0)
    assert mine.stop == 9, "one in 1024: nobody knows its speed"
    leases.commit(mine.token, 4, 2.0)
    assert leases.rates == {"a": 2.0}
    leases.commit(mine.token, 4, 3.0)  # it lives
    leases.commit(mine.token, 9, 4.0)
    assert leases.rates == {"a": pytest.approx(0.7 * 2.0 + 0.3 * 5.0)}


def test_no_lease_is_larger_than_what_a_death_may_cost():
    many = 100_000_000
    assert epoch(num_records=many, rates={}).lease("a", 0.0).stop == 4096
    assert epoch(num_records=many, rates={}, most=50).lease("a", 0.0).stop == 50
    assert epoch(num_records=many, most=700).lease("a", 0.0).stop == 700
    assert epoch(num_records=100_000, rates={"a": 1.0, "b": 1e6}).lease("a", 0.0).stop == 1


def test_a_master_that_comes_back_frees_what_was_not_committed_in_this_epoch():
    rows = [
        ("LEASES", {"epoch": 1, "incarnation": 4, "num_records": 100}), done(60, 80), done(10, 20), done(0, 50, of=0),
        ("LEASES", {"epoch": 1, "incarnation": 2, "num_records": 100}), ("LEASES", {"epoch": 2, "num_records": 7}),
        ("VIEW", {"generation": 3}),
    ]  # fmt: skip
    back = replay(rows, epoch=1, num_records=100, lease_s=3.0)
    assert back.first_rows() == [("LEASES", {"epoch": 1, "incarnation": 5, "num_records": 100})]
    assert (back.committed, back.lease_s, back.finished) == (30, 3.0, False)
    assert free(back) == [(0, 10), (20, 60), (80, 100)]
    whole = replay([done(50, 100), done(0, 50)], epoch=1, num_records=100)
    assert (whole.finished, whole.lease("a", 0.0)) == (True, None)
    for other in (99, 101):
        with pytest.raises(UsageError, match=f"begun with 100 records, and there are {other} now"):
            replay(rows, epoch=1, num_records=other)


def test_a_token_is_given_out_once_over_all_masters():
    tokens = set()
    rows: list = []
    for _ in range(3):
        leases = replay(rows, epoch=1, num_records=10_000)
        rows += leases.first_rows()
        tokens |= {leases.lease(worker, 0.0).token for worker in "abc"}
    assert len(tokens) == 9


def test_a_late_commit_counts_for_nothing_though_another_worker_has_its_range_now():
    leases = epoch(lease_s=10.0)
    late = leases.lease("a", 0.0)
    leases.expire(10.0)
    again = leases.lease("b", 10.0)
    assert (again.start, again.stop, again.token != late.token) == (late.start, late.stop, True)
    assert leases.commit(late.token, 400, 11.0) is None
    assert leases.committed == 0
    assert leases.commit(again.token, 400, 11.0) == [done(0, 400)]


def test_the_leases_that_a_master_finds_are_whole():
    rows = [
        ("LEASES", {"epoch": 0, "incarnation": 9, "num_records": 5}), ("VIEW", {"generation": 3}),
        ("LEASES", {"epoch": 1, "incarnation": 0, "num_records": 100}), done(0, 5, of=0), done(20, 60), done(0, 10),
    ]  # fmt: skip
    expected = Leases(epoch=1, num_records=100, lease_s=10.0, incarnation=1)
    expected._free, expected.committed = [(10, 20), (60, 100)], 50
    assert replay(rows, epoch=1, num_records=100) == expected
    assert replay([], epoch=1, num_records=100) == Leases(epoch=1, num_records=100, lease_s=10.0)
    whole = replay([done(0, 100)], epoch=1, num_records=100)
    assert (whole._free, whole.committed, whole.finished) == ([], 100, True)
    with pytest.raises(UsageError, match="epoch 1: the ledger has the records 5 to 10 committed twice"):
        replay([done(0, 10), done(5, 20)], epoch=1, num_records=100)
    with pytest.raises(UsageError, match="epoch 1: the ledger has the records 5 to 8 committed twice"):
        replay([done(0, 10), done(5, 8)], epoch=1, num_records=100)


@pytest.mark.parametrize(
    ("rates", "num_records", "most", "size"),
    [
        ({}, 100, 1 << 20, 1),
        ({}, 1023, 1 << 20, 1),
        ({}, 3072, 1 << 20, 3),
        ({}, 1 << 30, 1 << 20, 4096),
        ({}, 1 << 30, 100, 100),
        ({"b": 5.0}, 3072, 1 << 20, 3),
        ({"a": 1.0}, 3000, 1 << 20, 1000),
        ({"a": 1.0}, 3002, 1 << 20, 1000),
        ({"a": 1.0}, 3003, 1 << 20, 1001),
        ({"a": 1.0}, 3000, 999, 999),
        ({"a": 1.0, "b": 3.0}, 1200, 1 << 20, 100),
        ({"a": 3.0, "b": 1.0}, 1200, 1 << 20, 300),
        ({"a": 1.0}, 2, 1 << 20, 1),
        ({"a": 500.0, "b": 9500.0}, 300, 1 << 20, 50),
        ({"a": 39.0, "b": 9500.0}, 300, 1 << 20, 3),
        ({"a": 500.0, "b": 9500.0}, 300, 40, 40),
    ],
    ids=str,
)
def test_a_lease_is_its_workers_share_of_a_third_of_what_is_left_or_a_tenth_of_a_second(rates, num_records, most, size):
    leases = Leases(epoch=1, num_records=num_records, most=most, rates=rates, incarnation=3)
    assert leases.lease("a", 7.0) == Lease(token=(3 << 32) | 1, start=0, stop=size)
    assert leases._free == [(size, num_records)]


def test_a_worker_whose_speed_is_not_known_counts_for_the_others_with_the_usual_one():
    leases = Leases(epoch=1, num_records=3072, rates={"a": 1.0, "b": 3.0})
    assert leases.lease("c", 0.0) == Lease(token=1, start=0, stop=3)
    assert leases.lease("a", 0.0) == Lease(token=2, start=3, stop=3 + int(3069 / 6 / 3))


def test_a_commit_is_written_whole_measures_its_worker_and_gives_the_rest_a_new_deadline():
    leases = Leases(epoch=1, num_records=300, lease_s=4.0, rates={"a": 10.0})
    mine = leases.lease("a", 2.0)
    assert (mine.start, mine.stop) == (0, 100)
    assert leases.commit(mine.token, 40, 4.0) == [done(0, 40)]
    assert leases.rates == {"a": pytest.approx(0.7 * 10.0 + 0.3 * 20.0)}
    assert leases.commit(mine.token, 60, 4.0) == [done(40, 60)], "no time has passed: nothing is measured"
    assert leases.commit(mine.token, 60, 7.0) == []
    assert leases.rates == {"a": pytest.approx(13.0)}
    assert (leases.expire(10.9), leases.committed) == ([], 60)
    assert leases.expire(11.0) == ["a"]
    assert leases._free == [(60, 300)]
    assert leases.commit(mine.token, 100, 11.0) is None
