"""Promises of the master's log."""

import json
import random
import sqlite3

import pytest

from trueline.errors import StorageError
from trueline.train import account as accounts
from trueline.train import journal as journals
from trueline.train.account import Account, Report
from trueline.train.journal import Journal, apply
from trueline.train.roster import State
from trueline.wire import train_pb2 as pb

VIEW = {"generation": 3, "members": ["worker-0.0", "worker-1.1"], "cut_below": 3, "reason": "all are ready"}


def replay(journal, now=0.0):
    state, account = State(workers=2), Account()
    for kind, body in journal.rows():
        apply(state, kind, body, now)
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
    dice, account, step = random.Random(seed), Account(), 0
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
            yield from account.report(pb.Progress(ref="worker-0.0", applied=[one])).rows
            step, gap_ms = step + 1, 0.0
            if dice.random() < 0.1:
                yield "CKPT", {"step": step, "path": f"/{step}"}
            if dice.random() < 0.1:
                evaluated = {"step": step, "records": 8, "loss": 0.5, "metrics": "", "best": True, "stop": False}
                account.apply("EVAL", evaluated)
                yield "EVAL", evaluated


@pytest.mark.parametrize("seed", range(60))
def test_a_master_that_comes_back_to_a_long_job_reads_its_last_steps_and_knows_as_much(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(journals, "REMEMBERED", 5)
    monkeypatch.setattr(accounts, "REMEMBERED", 5)
    journal = Journal(tmp_path / "log")
    for row in history(seed):
        journal.append(row)
    state, account = State(workers=2), Account()
    with sqlite3.connect(tmp_path / "log") as log:
        everything = [(kind, json.loads(body)) for kind, body in log.execute("SELECT kind, body FROM log ORDER BY seq")]
    for kind, body in everything:
        apply(state, kind, body, 1.0)
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
    account = Account([])
    assert [body["step"] for _, body in account.report(progress(0, 1)).rows] == [0, 1]
    assert account.report(progress(0, 1)) == Report()
    assert [body["step"] for _, body in account.report(progress(1, 2)).rows] == [2]


def test_two_workers_that_report_different_records_for_a_step_raise_the_alarm():
    account = Account([])
    account.report(progress(0))
    assert account.report(progress(0, digest=6)).fault == "two workers report different records for step 0"


def test_workers_that_see_different_data_are_found_out():
    account = Account([])
    assert account.accept(100, 10, 0)[0] == ""
    assert account.accept(101, 11, 0)[0] == "a worker sees 101 records (11 steps), the others 100 (10 steps)"


def test_workers_that_cut_steps_differently_are_found_out_before_they_train():
    account = Account([])
    ((kind, facts),) = account.accept(100, 10, 8)[1]
    for known in (account, Account([(kind, facts)])):
        assert known.accept(100, 10, 8) == ("", [])
        assert known.accept(100, 10, 0)[0].startswith("a worker takes steps whole, the others in shards of 8 records")


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
    assert state.reported() == [{"record": 9, "where": "record 9 of x.parquet#0", "why": "a; b"}]
    journal.append(("SCALE", {"workers": 4, "before": 5, "again": False, "why": "x"}))
    assert replay(journal)[0].quarantined == {3: "died"}
    journal.append(("LAUNCH", {"workers": 3}))
    assert (replay(journal)[0].workers, replay(journal)[0].quarantined) == (3, {})
