"""Promises of the master's log."""

import json
import random
import sqlite3

import pytest

from trueline.errors import StorageError
from trueline.train.master import journal as journals
from trueline.train.master import progress as accounts
from trueline.train.master.journal import Journal, apply_row
from trueline.train.master.progress import JobProgress, ReportOutcome
from trueline.train.membership.state import Member, State
from trueline.wire import train_pb2 as pb
from worlds.cases import few

VIEW = {"generation": 3, "members": ["worker-0.0", "worker-1.1"], "cut_below": 3, "reason": "all are ready"}


def replay(journal, now=0.0):
    state, account = State(workers=2), JobProgress()
    for kind, body in journal.rows():
        apply_row(state, kind, body, now)
        account.apply(kind, body)
    return state, account


def commit(step, **changes):
    return {
        "step": step,
        "generation": 3,
        "records": 64,
        "digest": 5,
        "loss": 0.5,
        "workers": 2,
        "gap_ms": 0.0,
        **changes,
    }


def test_a_master_that_comes_back_knows_generation_members_incarnations_and_progress(tmp_path):
    journal = Journal(tmp_path / "log")
    journal.append(("START", {"ref": "worker-0.0"}), ("START", {"ref": "worker-1.0"}), ("START", {"ref": "worker-1.1"}))
    journal.append(("VIEW", VIEW), ("COMMIT", commit(0)), ("COMMIT", commit(1)), ("CKPT", {"step": 2, "path": "/c"}))
    journal.close()
    state, account = replay(Journal(tmp_path / "log"), now=100.0)
    assert (state.generation, state.view, state.committed) == (3, ("worker-0.0", "worker-1.1"), 2)
    assert (dict(state.incarnations), state.checkpoint, state.checkpoint_step) == ({0: 1, 1: 2}, "/c", 2)
    assert state.members["worker-0.0"].seen_at == 100.0
    assert account.logged == 2


def test_a_truncation_takes_back_what_the_survivors_never_applied(tmp_path):
    journal = Journal(tmp_path / "log")
    journal.append(("VIEW", VIEW), *(("COMMIT", commit(step)) for step in range(5)), ("TRUNCATE", {"steps": 3}))
    state, account = replay(journal)
    assert (state.committed, account.logged) == (3, 3)


def history(seed):
    """The rows of a job with deaths, checkpoints, late reports and states that were lost, as a master writes them."""
    dice, account, step = random.Random(seed), JobProgress(), 0
    for generation in range(1, dice.randint(2, 13)):
        members = ["worker-0.0", f"worker-1.{generation}"][: dice.randint(1, 2)]
        view = {"generation": generation, "members": members, "cut_below": generation - dice.randint(0, 1),
                "careful": dice.random() < 0.2, "reason": "x"}  # fmt: skip
        rows = [("VIEW", view)]
        if dice.random() < 0.2:
            step = dice.randint(0, step)
            rows.append(("TRUNCATE", {"steps": step}))
        for row in rows:
            account.apply(*row)
        yield from rows
        gap_ms = dice.choice([0.0, 85.0])
        for _ in range(dice.choice([0, 1, 7, 30])):
            late = generation - (dice.random() < 0.1)
            one = pb.Applied(step=step, generation=late, records=8, digest=step * 7, workers=2, gap_ms=gap_ms)
            yield from account.enter_report(pb.Progress(ref="worker-0.0", applied=[one])).rows
            step, gap_ms = step + 1, 0.0
            if dice.random() < 0.1:
                yield "CKPT", {"step": step, "path": f"/{step}"}
            if dice.random() < 0.1:
                evaluated = {"step": step, "records": 8, "loss": 0.5, "metrics": "", "best": True, "stop": False}
                account.apply("EVAL", evaluated)
                yield "EVAL", evaluated


@pytest.mark.parametrize("seed", few(range(60), 20, pytest.mark.jobs))
def test_a_master_that_comes_back_to_a_long_job_reads_its_last_steps_and_knows_as_much(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(journals, "REMEMBERED", 5)
    monkeypatch.setattr(accounts, "REMEMBERED", 5)
    journal = Journal(tmp_path / "log")
    for row in history(seed):
        journal.append(row)
    state, account = State(workers=2), JobProgress()
    with sqlite3.connect(tmp_path / "log") as log:
        everything = [(kind, json.loads(body)) for kind, body in log.execute("SELECT kind, body FROM log ORDER BY seq")]
    for kind, body in everything:
        apply_row(state, kind, body, 1.0)
        account.apply(kind, body)
    read = list(journal.rows())
    assert [row for row in read if row[0] != "COMMIT"] == [row for row in everything if row[0] != "COMMIT"]
    assert sum(kind == "COMMIT" for kind, _ in read) == min(5, sum(kind == "COMMIT" for kind, _ in everything))
    came_back, accounted = replay(journal, now=1.0)
    if not (state.careful and state.died_at < state.committed):  # what a care that has ended began with is not kept
        came_back.died_at = state.died_at
    assert came_back == state
    assert {name: vars(accounted)[name] for name in ("logged", "loss", "digests", "regroups", "evaluations")} == {
        name: vars(account)[name] for name in ("logged", "loss", "digests", "regroups", "evaluations")
    }


def test_a_journal_that_cannot_be_opened_is_a_clear_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be opened"):
        Journal(tmp_path)


def progress(*steps, digest=5):
    applied = [pb.Applied(step=step, generation=3, records=64, digest=digest, workers=2) for step in steps]
    return pb.Progress(ref="worker-0.0", generation=3, step=steps[-1] + 1, applied=applied)


def test_a_step_that_several_workers_report_is_logged_once():
    account = JobProgress([])
    assert [body["step"] for _, body in account.enter_report(progress(0, 1)).rows] == [0, 1]
    assert account.enter_report(progress(0, 1)) == ReportOutcome()
    assert [body["step"] for _, body in account.enter_report(progress(1, 2)).rows] == [2]


def test_two_workers_that_report_different_records_for_a_step_raise_the_alarm():
    account = JobProgress([])
    account.enter_report(progress(0))
    assert account.enter_report(progress(0, digest=6)).fault == "two workers report different records for step 0"


def test_workers_that_see_different_data_are_found_out():
    account = JobProgress([])
    assert account.accept_facts(100, 10, 0)[0] == ""
    assert account.accept_facts(101, 11, 0)[0] == "a worker sees 101 records (11 steps), the others 100 (10 steps)"


def test_workers_that_cut_steps_differently_are_found_out_before_they_train():
    account = JobProgress([])
    ((kind, facts),) = account.accept_facts(100, 10, 8)[1]
    for known in (account, JobProgress([(kind, facts)])):
        assert known.accept_facts(100, 10, 8) == ("", [])
        assert known.accept_facts(100, 10, 0)[0].startswith(
            "a worker takes steps whole, the others in shards of 8 records"
        )


def test_a_master_that_comes_back_knows_what_was_asked_for_suspected_set_aside_and_in_quarantine(tmp_path):
    journal = Journal(tmp_path / "log")
    journal.append(("LAUNCH", {"workers": 2}), ("SCALE", {"workers": 5, "before": 2, "again": True, "why": "x"}))
    journal.append(("QUARANTINE", {"slot": 3, "why": "died"}), ("VIEW", {**VIEW, "rotation": 4, "careful": True}))
    journal.append(
        ("SUSPECT", {"record": 7, "worker": "worker-0.0", "why": "odd"}),
        ("POISON", {"record": 9, "why": "a; b", "where": "record 9 of x.parquet#0"}),
    )
    state, _ = replay(journal)
    assert (state.workers, state.quarantined, state.rotation, state.careful) == (5, {3: "died"}, 4, True)
    assert (state.suspects, state.set_aside) == ({7: {"worker-0.0": "odd"}}, {9: "a; b"})
    assert state.list_set_aside() == [{"record": 9, "where": "record 9 of x.parquet#0", "why": "a; b"}]
    journal.append(("SCALE", {"workers": 4, "before": 5, "again": False, "why": "x"}))
    assert replay(journal)[0].quarantined == {3: "died"}
    journal.append(("LAUNCH", {"workers": 3}))
    assert (replay(journal)[0].workers, replay(journal)[0].quarantined) == (3, {})


ROWS = {
    "LAUNCH": {"workers": 2}, "START": {"ref": "worker-0.0"}, "VIEW": VIEW, "TRUNCATE": {"steps": 3},
    "CKPT": {"step": 2, "path": "/c"}, "SCALE": {"workers": 5, "again": True}, "QUARANTINE": {"slot": 3, "why": "died"},
    "SUSPECT": {"record": 7, "worker": "worker-0.0", "why": "odd"}, "POISON": {"record": 9, "why": "odd"},
    "FACTS": {"num_records": 8, "total_steps": 2, "shard_records": 0}, "EPOCH": {"epoch": 0}, "EVAL": {"step": 2},
    "HALT": {"why": "x"}, "END": {"summary": {}}, "FAIL": {"code": "train", "why": "x"}, "LEASES": {"epoch": 0},
    "DONE": {"epoch": 0},
}  # fmt: skip
STEPS = [("COMMIT", commit(0)), ("FORMED", {"generation": 3, "step": 0, "gap_ms": 1.0, "workers": 2})]


class Durability:
    """How SQLite was set at each commit of a journal: FULL waits for the disk, NORMAL does not."""

    def __init__(self, journal):
        self.level, self.commits = "", []
        journal._db.set_trace_callback(self.see)

    def see(self, statement):
        if statement.startswith("PRAGMA synchronous"):
            self.level = statement.rpartition("=")[2]
        if statement == "COMMIT":
            self.commits.append(self.level)


@pytest.mark.parametrize("kind", ROWS)
def test_every_row_is_on_the_disk_when_it_is_written_but_those_of_steps(tmp_path, kind):
    journal = Journal(tmp_path / "log")
    seen = Durability(journal)
    journal.append(*STEPS)
    journal.append((kind, ROWS[kind]))
    journal.append(STEPS[0])
    journal.append(STEPS[0], (kind, ROWS[kind]), STEPS[1])
    assert seen.commits == ["NORMAL", "FULL", "NORMAL", "FULL"]
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,), "as SQLite took it"
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


def test_workers_wait_for_no_disk_when_the_rows_are_about_processes_that_a_power_cut_ends(tmp_path):
    journal = Journal(tmp_path / "log", journals.STEPS_AND_LAUNCH)
    seen = Durability(journal)
    for kind in ("VIEW", "START", "CKPT", "EPOCH"):
        journal.append((kind, ROWS[kind]), *STEPS)
    journal.append(("VIEW", VIEW), ("TRUNCATE", {"steps": 3}))
    journal.append(("POISON", ROWS["POISON"]))
    assert seen.commits == ["NORMAL"] * 4 + ["FULL"] * 2


def test_the_rows_of_a_decision_are_there_together_or_not_at_all(tmp_path):
    journal, reader = Journal(tmp_path / "log"), Journal(tmp_path / "log")
    journal.append(("START", {"ref": "worker-0.0"}))
    with pytest.raises(StorageError, match="cannot be written"):
        journal.append(("VIEW", VIEW), (object(), {}))  # SQLite takes the first of them only
    assert [kind for kind, _ in reader.rows()] == ["START"]
    journal.append(("VIEW", VIEW))
    assert [kind for kind, _ in reader.rows()] == ["START", "VIEW"]


def test_a_journal_that_was_full_can_be_written_again_when_there_is_room(tmp_path):
    journal = Journal(tmp_path / "log")
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages + 1}")
    with pytest.raises(StorageError, match="database or disk is full"):
        journal.append(("VIEW", {**VIEW, "reason": "x" * 100_000}))
    journal._db.execute("PRAGMA max_page_count=100000")
    journal.append(("FAIL", {"code": "storage", "why": "full"}))
    assert [kind for kind, _ in journal.rows()] == ["FAIL"]


def applied_to(*rows, now=5.0):
    """The state of a master that comes back at `now` and finds these rows."""
    state = State(workers=2)
    for kind, body in rows:
        apply_row(state, kind, body, now)
    return state


def test_a_worker_whose_start_is_in_the_log_is_on_its_way_instead_of_the_one_before_it():
    started = applied_to(("START", {"ref": "worker-1.0"}), ("START", {"ref": "worker-1.1"}))
    assert (started.pending, started.incarnations) == ({"worker-1.1": 5.0}, {1: 2})


def test_the_log_knows_the_steps_of_a_group_by_its_first_one_and_never_fewer_than_before():
    formed = ("FORMED", {"step": 6, "generation": 3})
    assert applied_to(("COMMIT", commit(3)), formed).committed == 7
    assert applied_to(formed, ("COMMIT", commit(3))).committed == 7


def test_a_view_that_was_published_is_in_force_for_a_master_that_comes_back():
    view = {"generation": 4, "members": ["worker-1.0", "worker-0.2"], "cut_below": 3, "rotation": 2, "careful": False}
    state = applied_to(("START", {"ref": "worker-0.2"}), ("VIEW", view))
    members = {ref: (member.rank, member.slot, member.joined) for ref, member in state.members.items()}
    assert members == {"worker-1.0": (0, 1, True), "worker-0.2": (1, 0, True)}
    assert {member.seen_at for member in state.members.values()} == {5.0}, "each has a whole lease before it"
    assert (state.generation, state.cut_below, state.rotation) == (4, 3, 2)
    assert (state.phase, state.released, state.pending) == ("running", True, {})
    assert state.awaited == state.unfinished == {"worker-1.0", "worker-0.2"}
    assert applied_to(("VIEW", {**view, "members": []})).phase == "gathering"


def test_who_leaves_by_a_planned_view_is_known_until_a_step_of_that_view_is():
    before = ("VIEW", {"generation": 1, "members": ["worker-0.0", "worker-1.0"], "cut_below": 1})
    planned = ("VIEW", {"generation": 2, "members": ["worker-0.0"], "cut_below": 1})
    left = applied_to(before, planned)
    assert left.members["worker-1.0"].rank == -1
    assert left.members["worker-1.0"].left
    assert applied_to(before, planned, ("COMMIT", commit(0, generation=1))).members.keys() == left.members.keys()
    for step in (("COMMIT", commit(0, generation=2)), ("FORMED", {"step": 0, "generation": 2})):
        assert applied_to(before, planned, step).members.keys() == {"worker-0.0"}
    forced = ("VIEW", {"generation": 2, "members": ["worker-0.0"], "cut_below": 2})
    assert applied_to(before, forced).members.keys() == {"worker-0.0"}


def test_care_begins_where_the_log_says_that_the_job_was():
    view = {"generation": 4, "members": ["worker-0.0"], "cut_below": 4, "careful": True}
    assert applied_to(("COMMIT", commit(8)), ("VIEW", view)).died_at == 9
    assert applied_to(("COMMIT", commit(8)), ("VIEW", {**view, "careful": False})).died_at == -1


def test_the_place_of_a_suspected_record_is_kept_until_it_is_set_aside():
    vote = ("SUSPECT", {"record": 7, "worker": "worker-0.0", "why": "odd", "where": "record 7 of x"})
    assert applied_to(vote).places == {7: "record 7 of x"}


def test_a_scale_lifts_quarantine_where_it_tries_the_slots_again():
    shut = ("QUARANTINE", {"slot": 1, "why": "died"})
    for again, kept in ((True, {}), (False, {1: "died"})):
        state = applied_to(shut, ("SCALE", {"workers": 3, "again": again}))
        assert (state.quarantined, state.workers) == (kept, 3)


def test_a_view_in_the_log_makes_its_members_and_all_that_is_asked_of_them_whole():
    before = ("VIEW", {"generation": 1, "members": ["worker-3.0", "worker-1.2"], "cut_below": 1, "reason": "x"})
    planned = ("VIEW", {"generation": 2, "members": ["worker-1.2"], "cut_below": 1, "reason": "x"})
    left = applied_to(before, planned, now=7.0)
    known = {"store": "", "seen_at": 7.0, "steps": 0, "joined": True}
    assert left.members == {
        "worker-1.2": Member(ref="worker-1.2", slot=1, rank=0, **known),
        "worker-3.0": Member(ref="worker-3.0", slot=3, rank=-1, **known),
    }
    assert left == State(
        workers=2, phase="running", generation=2, cut_below=1, view=("worker-1.2",), released=True,
        members=left.members, awaited={"worker-1.2"}, unfinished={"worker-1.2"},
    )  # fmt: skip


def test_a_view_that_says_nothing_of_rotation_or_care_has_none():
    said = ("VIEW", {**VIEW, "rotation": 4, "careful": True})
    assert (applied_to(said).rotation, applied_to(said).careful, applied_to(said).died_at) == (4, True, 0)
    assert (applied_to(said, ("VIEW", VIEW)).rotation, applied_to(said, ("VIEW", VIEW)).careful) == (0, False)
    assert applied_to(said, ("VIEW", VIEW)).died_at == -1


def test_the_members_of_a_view_stay_the_same_through_its_steps():
    state = applied_to(("VIEW", VIEW))
    state.members["worker-0.0"].steps = 9
    for generation in (2, 3):
        apply_row(state, "COMMIT", commit(0, generation=generation), 8.0)
    assert [(ref, member.steps, member.seen_at) for ref, member in state.members.items()] == [
        ("worker-0.0", 9, 5.0), ("worker-1.1", 0, 5.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([("START", {"ref": "worker-1.4"})], {"incarnations": {1: 5}, "pending": {"worker-1.4": 5.0}}),
        ([("COMMIT", commit(3))], {"committed": 4}),
        ([("FORMED", {"step": 3, "generation": 1})], {"committed": 4}),
        ([("COMMIT", commit(3)), ("TRUNCATE", {"steps": 2})], {"committed": 2}),
        ([("CKPT", {"step": 2, "path": "/c"})], {"checkpoint": "/c", "checkpoint_step": 2}),
        ([("LAUNCH", {"workers": 5})], {"workers": 5}),
        ([("HALT", {"why": "enough"})], {"halting": "enough"}),
        ([("HALT", {"why": "enough"}), ("LAUNCH", {"workers": 5})], {"workers": 5}),
        ([("SCALE", {"workers": 5, "again": True})], {"workers": 5}),
        ([("QUARANTINE", {"slot": 1, "why": "died", "times": 2, "retry_s": 60.0})],
         {"quarantined": {1: "died"}, "retry_at": {1: 65.0}, "relapses": {1: 2}}),
        ([("QUARANTINE", {"slot": 1, "why": "died", "times": 2, "retry_s": 60.0}), ("RETRY", {"slot": 1, "times": 2})],
         {"relapses": {1: 2}}),
        ([("SUSPECT", {"record": 7, "worker": "a", "why": "odd"}),
          ("SUSPECT", {"record": 7, "worker": "b", "why": "x"}),
          ("SUSPECT", {"record": 8, "worker": "a", "why": "odd", "where": "w"})],
         {"suspects": {7: {"a": "odd", "b": "x"}, 8: {"a": "odd"}}, "places": {7: "", 8: "w"}}),
        ([("POISON", {"record": 7, "why": "odd"}), ("POISON", {"record": 9, "why": "a", "where": "w"})],
         {"set_aside": {7: "odd", 9: "a"}, "reasons": {"odd": [0], "a": [0]}, "places": {7: "", 9: "w"}}),
        ([("EPOCH", {"epoch": 0}), ("EVAL", {"step": 2}), ("FACTS", {"num_records": 8})], {}),
    ],
    ids=lambda found: "+".join(kind for kind, _ in found) if isinstance(found, list) else "",
)  # fmt: skip
def test_each_row_brings_back_what_it_is_about_and_nothing_else(rows, changes):
    state, fresh = applied_to(*rows), State(workers=2)
    for name, value in changes.items():
        setattr(fresh, name, value)
    assert state == fresh
