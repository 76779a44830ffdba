"""Promises of the master's account: certificates, evaluations, early stops."""

import dataclasses
import json

import numpy as np
import pytest

from trueline.data.order import permutation
from trueline.train.api import JobSummary
from trueline.train.master.progress import JobProgress, PlannedRecords, find_certificate_faults, plan_records
from trueline.train.membership.state import State
from trueline.train.settings import JobSettings
from trueline.train.step import ledger
from trueline.train.step.plan import DRAWN, IN_ORDER, order_of
from trueline.wire import train_pb2 as pb

JOB = JobSettings(name="x", recipe="x.py", recipe_digest="", workers=2, epochs=3, global_batch=4, seed=5)
RECORDS, STEPS = 10, 3


def ids(epoch: int, steps: int = STEPS) -> np.ndarray:
    count = min(steps * JOB.global_batch, RECORDS)
    return permutation.record_at(np.arange(count), seed=JOB.seed, epoch=epoch, num_records=RECORDS)


def signed(epoch: int, *, steps: int = STEPS, out: tuple[int, ...] = (), named=None, low: int = 1) -> pb.Certificate:
    """The certificate of an epoch (or its first steps) that applied all its records but `out`."""
    applied = np.setdiff1d(ids(epoch, steps), out)
    return pb.Certificate(
        epoch=epoch, steps=steps, records=len(applied), digest=ledger.digest(applied), tally_min=low, tally_max=1,
        set_aside=out if named is None else named,
    )  # fmt: skip


def evaluation(step: int, **changes) -> pb.Evaluation:
    return pb.Evaluation(step=step, records=50, loss=0.5, metrics=json.dumps({"accuracy": 0.9}), **changes)


def account(*certificates: pb.Certificate, evaluations=()) -> JobProgress:
    found = JobProgress()
    found.accept_facts(RECORDS, STEPS * JOB.epochs, 0)
    found.enter_report(pb.Progress(ref="w", certificates=certificates, evaluations=evaluations))
    return found


def test_certificates_of_all_epochs_over_all_records_are_free_of_faults():
    assert account(signed(0), signed(1), signed(2)).find_faults(JOB) == []
    assert account(signed(0), signed(2)).find_faults(JOB) == ["epoch 1 has no certificate"]


def test_records_that_were_set_aside_are_missing_only_where_the_certificate_names_them():
    whole, part = signed(0), signed(1, out=(3, 7), low=0)
    books = account(whole, part, signed(2, out=(3, 7), low=0))
    assert books.find_faults(JOB, {3: "odd", 7: "odd"}) == []
    assert books.find_faults(JOB, {3: "odd"}) == [
        "epoch 1: record 7 was left out and is not set aside",
        "epoch 2: record 7 was left out and is not set aside",
    ]
    silent = account(whole, signed(1, out=(3,), named=(), low=0), signed(2)).find_faults(JOB, {3: "odd"})
    assert "epoch 1: 9 records were applied, planned were 10" in silent
    assert "epoch 1: records were applied 0 to 1 times" in silent


def drawn_account(*certificates: pb.Certificate, blocks=DRAWN) -> JobProgress:
    """Of a source with an order of its own, whose ids are positions."""
    found = JobProgress()
    found.accept_facts(RECORDS, STEPS * JOB.epochs, 0, blocks)
    found.enter_report(pb.Progress(ref="w", certificates=certificates))
    return found


def test_where_records_are_drawn_a_certificate_names_positions_and_the_records_that_would_have_stood_there():
    def drawn(epoch: int, out: tuple[int, ...], of: tuple[int, ...]) -> pb.Certificate:
        found = signed(epoch, out=out, low=0 if out else 1)
        found.set_aside_of.extend(of)
        return found

    books = drawn_account(signed(0), drawn(1, (3, 7), (5, 5)), drawn(2, (2,), (5,)))
    assert books.find_faults(JOB, {5: "odd"}) == []
    assert books.find_faults(JOB, {3: "odd", 7: "odd", 2: "odd"}) == [
        "epoch 1: record 5 was left out and is not set aside",
        "epoch 2: record 5 was left out and is not set aside",
    ]
    by_chance = drawn_account(signed(0), drawn(1, (3,), ()), signed(2))  # record 3 would have stood at position 3
    assert (by_chance.find_faults(JOB, {3: "odd"}), len(by_chance.find_faults(JOB, {5: "odd"}))) == ([], 1)
    short = drawn_account(signed(0), drawn(1, (3, 7), (5,)), signed(2)).find_faults(JOB, {5: "odd", 3: "odd", 7: "odd"})
    assert short == ["epoch 1: 2 records were left out and 1 are named in their places"]
    silent = drawn_account(signed(0), drawn(1, (3, 7), (5, 5)), signed(2, out=(2,), named=(), low=0))
    assert "epoch 2: 9 records were applied, planned were 10" in silent.find_faults(JOB, {5: "odd"})


def test_where_records_are_not_drawn_nothing_else_can_have_stood_at_their_numbers():
    other = signed(1, out=(3,), low=0)
    other.set_aside_of.append(5)
    for blocks in (IN_ORDER, ()):
        faults = drawn_account(signed(0), other, signed(2), blocks=blocks).find_faults(JOB, {5: "odd", 3: "odd"})
        assert faults == ["epoch 1: 1 records were left out and 1 are named in their places"]


def test_a_record_that_is_named_as_left_out_and_was_applied_is_found_out():
    faults = account(signed(0, named=(3,)), signed(1), signed(2)).find_faults(JOB, {3: "odd"})
    assert faults[0] == "epoch 0: 10 records were applied and 1 set aside, planned were 10"


def test_a_job_that_stops_early_is_complete_with_the_records_of_its_steps():
    stop = [evaluation(3), evaluation(5, stop=True, best=True)]
    books = account(signed(0), signed(1, steps=2, low=0), evaluations=stop)
    assert (books.last_step, books.find_faults(JOB)) == (5, [])
    assert account(signed(0), signed(1), evaluations=stop).find_faults(JOB) != []
    left_out = int(ids(1, 2)[0])
    books = account(signed(0), signed(1, steps=2, out=(left_out,), low=0), evaluations=stop)
    assert (books.find_faults(JOB, {left_out: "odd"}), len(books.find_faults(JOB))) == ([], 1)


def test_the_part_of_an_epoch_in_windows_is_known_from_the_blocks_that_workers_report():
    blocks = (4, 3, 3)
    way = order_of(RECORDS, blocks, seed=JOB.seed)
    applied = way.at(np.arange(2 * JOB.global_batch), epoch=0)
    part = pb.Certificate(epoch=0, steps=2, records=8, digest=ledger.digest(applied), tally_min=0, tally_max=1)
    found = JobProgress()
    (row,) = found.accept_facts(RECORDS, STEPS * JOB.epochs, 0, blocks)[1]
    found = JobProgress([row])  # as a master that comes back
    assert found.accept_facts(RECORDS, STEPS * JOB.epochs, 0, blocks) == ("", [])
    assert "in other blocks (2 blocks, the others 3)" in found.accept_facts(RECORDS, STEPS * JOB.epochs, 0, (5, 5))[0]
    found.enter_report(pb.Progress(ref="w", certificates=[part], evaluations=[evaluation(2, stop=True)]))
    assert found.find_faults(JOB) == []
    assert set(applied.tolist()) != set(ids(0, 2).tolist()), "another order than the full one"


def test_a_stop_at_the_end_of_an_epoch_needs_no_part_of_the_next():
    assert account(signed(0), evaluations=[evaluation(3, stop=True)]).find_faults(JOB) == []


def test_an_evaluation_that_two_workers_report_is_told_once_and_the_summary_names_the_best():
    books = account(evaluations=[evaluation(3, best=True), evaluation(6)])
    again = books.enter_report(pb.Progress(ref="v", evaluations=[evaluation(6), evaluation(7, stop=True)]))
    assert [body["step"] for _, body in again.events] == [7]
    summary = books.summarize(JOB, State(workers=2, set_aside={4: "odd"}, places={4: "record 4 of x"}))
    assert [found["step"] for found in summary["evaluations"]] == [3, 6, 7]
    assert summary["best"] == {"step": 3, "loss": pytest.approx(0.5), "metrics": {"accuracy": 0.9}}
    assert (summary["stopped_early"], summary["steps"]) == (True, 7)
    assert summary["set_aside"] == [{"record": 4, "where": "record 4 of x", "why": "odd"}]


def test_an_evaluation_beyond_the_surviving_state_never_happened():
    books = account(evaluations=[evaluation(3), evaluation(6, stop=True)])
    books.truncate(5)
    assert (books.last_step, [found["step"] for found in books.list_evaluations()]) == (9, [3])


def test_the_journal_brings_back_evaluations_and_leaves_the_times_of_steps_out():
    applied = pb.Applied(step=0, records=4, digest=1, rates=[10.0, 20.0], shares=[1, 3], data_ms=1.5)
    report = account().enter_report(
        pb.Progress(ref="w", applied=[applied], evaluations=[evaluation(1, best=True)]), now=1.0
    )
    (_, step), (_, evaluated) = report.events
    assert (step["rates"], step["shares"], step["data_ms"]) == ("[10.0, 20.0]", "[1, 3]", 1.5)
    assert set(report.rows[0][1]).isdisjoint({"rates", "shares", "data_ms"})
    assert JobProgress(report.rows).find_best() == {"step": 1, "loss": evaluated["loss"], "metrics": {"accuracy": 0.9}}


def test_throughput_is_that_of_the_last_ten_seconds():
    books = JobProgress()
    for step in range(40):
        applied = pb.Applied(step=step, records=100, digest=1)
        books.enter_report(pb.Progress(ref="w", applied=[applied]), now=float(step))
    assert books.records_per_s(39.0) == pytest.approx(100.0)
    assert books.records_per_s(100.0) == 0.0


def steps_of(data_ms: float, compute_ms: float) -> JobProgress:
    found = JobProgress()
    found.accept_facts(RECORDS, STEPS * JOB.epochs, 0)
    applied = [
        pb.Applied(step=step, records=4, workers=2, data_ms=data_ms, compute_ms=compute_ms, wait_ms=1, commit_ms=1)
        for step in range(STEPS)
    ]
    found.enter_report(pb.Progress(ref="w", applied=applied))
    found.enter_report(pb.Progress(ref="w2", applied=applied))
    return found


def test_a_job_whose_steps_wait_for_their_records_says_what_to_do_about_it():
    facts = {
        **steps_of(2000, 1000).summarize(JOB, State(workers=2)),
        "seconds": 1.0,
        "certificates": [],
        "regroups": [],
    }
    assert (facts["reading_s"], facts["steps_s"]) == (6.0, pytest.approx(9.006))
    (line,) = JobSummary(facts)._reading()
    assert line.startswith("reading took 67% of the steps' time: --readers 2")
    assert JobSummary({**facts, **steps_of(200, 4000).summarize(JOB, State(workers=2))})._reading() == []
    assert JobSummary({**facts, **steps_of(20, 10).summarize(JOB, State(workers=2))})._reading() == [], (
        "too short to tell"
    )


def test_the_summary_claims_of_each_epoch_what_its_certificate_shows():
    books = account(signed(0), signed(1), signed(2, steps=2), evaluations=[evaluation(8, stop=True)])
    facts = books.summarize(JOB, State(workers=2))
    one, two, part = facts["certificates"]
    every = "every one of the 10 records was applied exactly once in "
    stopped = ", and at most once in the last one, stopped after 2 steps"
    for certificates, claim in [
        ([one], f"{every}the one epoch"),
        ([one, two], f"{every}each of the 2 epochs"),
        ([one, two, part], f"{every}each of the 2 whole epochs{stopped}"),
        ([part], "none of the 10 records was applied twice in the one epoch, stopped after 2 steps"),
    ]:
        assert JobSummary({**facts, "certificates": certificates})._claim() == claim


GOOD = {"epoch": 0, "steps": 3, "records": 10, "digest": ledger.digest_of_all(10), "tally_min": 1, "tally_max": 1}
WHOLE = PlannedRecords(10, ledger.digest_of_all(10), True)
PART = PlannedRecords(8, ledger.digest(np.arange(8)), False)
WRONG = (GOOD["digest"] + 1) & ledger.MASK


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"records": 9}, "9 records were applied, planned were 10"),
        ({"records": 11}, "11 records were applied, planned were 10"),
        ({"steps": 2}, "2 steps were applied, the epoch has 3"),
        ({"steps": 4}, "4 steps were applied, the epoch has 3"),
        ({"digest": WRONG}, f"the digest of the applied records is {WRONG:06x}, not {GOOD['digest']:06x}"),
        ({"tally_min": 0}, "records were applied 0 to 1 times"),
        ({"tally_max": 2}, "records were applied 1 to 2 times"),
        ({"tally_min": 0, "tally_max": 2}, "records were applied 0 to 2 times"),
        ({"tally_min": 2, "tally_max": 2}, "records were applied 2 to 2 times"),
        ({"tally_min": 0, "tally_max": 0}, "records were applied 0 to 0 times"),
        ({"tally_min": -1, "tally_max": 2}, "records were applied 0 to 2 times"),
    ],
    ids=str,
)
def test_each_figure_of_a_certificate_alone_tells_that_an_epoch_was_not_applied_exactly_once(changes, fault):
    assert find_certificate_faults(GOOD, steps=3, planned=WHOLE) == []
    assert find_certificate_faults({**GOOD, **changes}, steps=3, planned=WHOLE) == [fault]


def test_an_epoch_without_a_tally_is_judged_by_its_sums():
    plain = {**GOOD, "tally_min": -1, "tally_max": -1}
    assert find_certificate_faults(plain, steps=3, planned=WHOLE) == []
    assert len(find_certificate_faults({**plain, "records": 9, "digest": WRONG}, steps=3, planned=WHOLE)) == 2


@pytest.mark.parametrize("fewest", [-1, 0, 1])
def test_in_a_part_of_an_epoch_records_may_be_applied_no_time_but_never_twice(fewest):
    part = {**GOOD, "steps": 2, "records": 8, "digest": PART.digest, "tally_min": fewest}
    assert find_certificate_faults(part, steps=2, planned=PART) == []
    assert find_certificate_faults({**part, "tally_max": 2}, steps=2, planned=PART) == [
        f"records were applied {max(fewest, 0)} to 2 times"
    ]


def test_what_a_certificate_leaves_out_is_taken_off_the_planned_digest_modulo_its_bits():
    out = next(one for one in range(10) if ledger.digest(np.array([one])) > WHOLE.digest)
    kept = np.setdiff1d(np.arange(10), [out])
    named = {**GOOD, "records": 9, "digest": ledger.digest(kept), "set_aside": [out]}
    planned = PlannedRecords(10, WHOLE.digest, True, (out,))
    assert find_certificate_faults(named, steps=3, planned=planned, set_aside={out}) == []
    twice = {**named, "tally_max": 2}
    assert find_certificate_faults(twice, steps=3, planned=planned, set_aside={out}) == [
        "records were applied 1 to 2 times"
    ]


def test_the_digest_of_a_part_of_an_epoch_is_within_its_bits_however_many_records_it_has():
    many, batch = 3000, 8
    job = dataclasses.replace(JOB, global_batch=batch)
    ids = permutation.record_at(np.arange(250 * batch), seed=job.seed, epoch=0, num_records=many)
    found = plan_records(job, many, epoch=0, steps=250, named=ids[:2].tolist())
    assert found == PlannedRecords(2000, ledger.digest(ids), False, tuple(sorted(ids[:2].tolist())))


def test_a_certificate_that_is_signed_anew_after_the_job_went_back_takes_the_place_of_the_first():
    books = account(signed(0, low=0))
    assert books.find_faults(JOB)[0] == "epoch 0: records were applied 0 to 1 times"
    report = books.enter_report(pb.Progress(ref="v", certificates=[signed(0), signed(1), signed(2)]))
    assert [(kind, body["epoch"]) for kind, body in report.rows] == [("EPOCH", 0), ("EPOCH", 1), ("EPOCH", 2)]
    assert books.find_faults(JOB) == []
    assert books.enter_report(pb.Progress(ref="w", certificates=[signed(1)])).rows == [], "the same again is no news"


def applied(*steps: int, digest: int = 7, **fields) -> pb.Progress:
    """The report of a worker that has applied `steps`."""
    told = [pb.Applied(step=step, generation=1, records=4, digest=digest, workers=2, **fields) for step in steps]
    return pb.Progress(ref="w", applied=told)


def logged(books: JobProgress, report: pb.Progress) -> list[int]:
    return [body["step"] for kind, body in books.enter_report(report).rows if kind == "COMMIT"]


def test_steps_enter_the_log_in_order_and_without_a_gap():
    books = account()
    assert [logged(books, applied(*steps)) for steps in ((1,), (0, 1), (3,), (1, 2, 3))] == [[], [0, 1], [], [2, 3]]


def test_a_log_that_is_behind_the_survivors_goes_on_at_their_step_and_one_ahead_of_them_goes_back():
    books = account()
    assert logged(books, applied(0, 1, 2)) == [0, 1, 2]
    books.truncate(5)
    assert books.logged == 3, "it is no further than what was reported"
    books.reconstruct(5)
    assert (logged(books, applied(3, 4)), logged(books, applied(5))) == ([], [5])
    books.truncate(4)
    books.reconstruct(4)
    assert logged(books, applied(4, digest=8)) == [4], "done again, perhaps with other records"


def test_a_step_that_was_taken_back_is_compared_with_no_later_report():
    books = account()
    books.enter_report(applied(0, 1, 2, 3))
    books.truncate(2)
    books.reconstruct(4)
    assert [books.enter_report(applied(step, digest=8)).fault for step in (1, 2, 3)] == [
        "two workers report different records for step 1", "", "",
    ]  # fmt: skip


def test_an_evaluation_of_the_surviving_state_itself_stays():
    books = account(evaluations=[evaluation(3), evaluation(5, stop=True), evaluation(6, stop=True)])
    books.truncate(5)
    assert ([found["step"] for found in books.list_evaluations()], books.last_step) == ([3, 5], 5)


def test_of_two_stops_the_first_one_counts_and_of_two_best_the_last():
    books = account(evaluations=[evaluation(7, stop=True), evaluation(3, best=True), evaluation(5, best=True)])
    assert (books.last_step, books.find_best()["step"]) == (7, 5)
    books.enter_report(pb.Progress(ref="w", evaluations=[evaluation(6, stop=True)]))
    assert books.last_step == 6
    facts = books.summarize(JOB, State(workers=2, incarnations={0: 2, 1: 3}))
    assert (facts["workers_started"], facts["stopped_early"]) == (5, True)
    assert account().summarize(JOB, State(workers=2))["stopped_early"] is False


@pytest.mark.parametrize("seen", [(RECORDS, 10), (11, 9), (9, 9)])
def test_a_worker_that_sees_other_records_or_another_number_of_steps_is_found_out(seen):
    assert (
        account().accept_facts(*seen, 0)[0].startswith(f"a worker sees {seen[0]} records ({seen[1]} steps), the others")
    )


def test_a_master_that_comes_back_judges_as_the_one_before(tmp_path):
    books = JobProgress()
    rows = [
        *books.accept_facts(RECORDS, STEPS * JOB.epochs, 4, (5, 5))[1],
        ("VIEW", {"generation": 1, "reason": "begun"}),
    ]
    books.begin_regroup(1, "begun")
    for report in (
        applied(0, 1, gap_ms=80.0),
        pb.Progress(ref="w", certificates=[signed(0, out=(3,), low=0)], evaluations=[evaluation(1, best=True)]),
        applied(2, gap_ms=30.0),
    ):
        rows += books.enter_report(report).rows
    back = JobProgress(rows)
    for fact in ("num_records", "total_steps", "shard_records", "blocks", "logged", "loss", "digests", "certificates",
                 "evaluations", "regroups", "_formed"):  # fmt: skip
        assert getattr(back, fact) == getattr(books, fact), fact
    assert (back.find_faults(JOB, {3: "odd"}), back.find_best()) == (
        books.find_faults(JOB, {3: "odd"}),
        books.find_best(),
    )
    assert back.regroups[1] == {"generation": 1, "reason": "begun", "gap_ms": 80.0, "workers": 2}
    assert back.certificates[0]["set_aside"] == [3]


def test_the_rate_counts_the_records_between_the_first_report_and_the_last():
    books = JobProgress()
    for step, now in enumerate((10.0, 11.0, 13.0)):
        books.enter_report(applied(step), now)
    assert books.records_per_s(13.0) == pytest.approx(8 / 3)


NOTHING = {
    "num_records": 0, "total_steps": 0, "shard_records": 0, "blocks": (), "logged": 0, "loss": 0.0, "rates": (-1, ()),
    "digests": {}, "certificates": {}, "evaluations": {}, "regroups": {}, "_formed": set(), "records_applied": 0,
    "reading_s": 0.0, "steps_s": 0.0,
}  # fmt: skip
ROW = {"step": 4, "generation": 2, "records": 8, "digest": 9, "loss": 0.25, "workers": 3, "gap_ms": 70.0, "at_ns": 5}
VIEWED = ("VIEW", {"generation": 2, "reason": "begun"})


def known_of(books: JobProgress) -> dict:
    """All that an account knows but for the pace of the last seconds."""
    return {name: value for name, value in vars(books).items() if name != "recent"}


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([], {}),
        ([("FACTS", {"num_records": 10, "total_steps": 9, "shard_records": 4, "blocks": [5, 5]})],
         {"num_records": 10, "total_steps": 9, "shard_records": 4, "blocks": (5, 5)}),
        ([("FACTS", {"num_records": 10, "total_steps": 9, "shard_records": 0})], {"num_records": 10, "total_steps": 9}),
        ([("COMMIT", ROW)], {"logged": 5, "loss": 0.25, "digests": {4: 9}}),
        ([VIEWED], {"regroups": {2: {"generation": 2, "reason": "begun", "gap_ms": 0.0, "workers": 0}}}),
        ([VIEWED, ("COMMIT", ROW)],
         {"logged": 5, "loss": 0.25, "digests": {4: 9},
          "regroups": {2: {"generation": 2, "reason": "begun", "gap_ms": 70.0, "workers": 3}}}),
        ([VIEWED, ("FORMED", {"generation": 2, "step": 4, "gap_ms": 80.0, "workers": 2})],
         {"_formed": {2}, "regroups": {2: {"generation": 2, "reason": "begun", "gap_ms": 80.0, "workers": 2}}}),
        ([VIEWED, ("FORMED", {"generation": 2, "step": 4, "gap_ms": 80.0, "workers": 2}), ("COMMIT", ROW)],
         {"_formed": {2}, "logged": 5, "loss": 0.25, "digests": {4: 9},
          "regroups": {2: {"generation": 2, "reason": "begun", "gap_ms": 80.0, "workers": 3}}}),
        ([("FORMED", {"generation": 3, "step": 4, "gap_ms": 80.0, "workers": 2})], {"_formed": {3}}),
        ([("COMMIT", ROW), ("COMMIT", {**ROW, "step": 5, "digest": 1, "loss": 0.5}), ("TRUNCATE", {"steps": 5})],
         {"logged": 5, "loss": 0.5, "digests": {4: 9}}),
        ([("EPOCH", {"epoch": 1, "steps": 3})], {"certificates": {1: {"epoch": 1, "steps": 3}}}),
        ([("EVAL", {"step": 7, "loss": 0.5})], {"evaluations": {7: {"step": 7, "loss": 0.5}}}),
        ([("START", {"ref": "worker-0.0"}), ("CKPT", {"step": 2, "path": "/c"})], {}),
    ],
    ids=lambda found: "+".join(kind for kind, _ in found) if isinstance(found, list) else "",
)  # fmt: skip
def test_each_row_of_the_journal_changes_what_it_is_about_and_nothing_else(rows, changes):
    assert known_of(JobProgress(rows)) == {**NOTHING, **changes}


def test_digests_are_remembered_of_the_newest_steps_only(monkeypatch):
    monkeypatch.setattr("trueline.train.master.progress.REMEMBERED", 3)
    books = account()
    books.enter_report(applied(*range(5)))
    assert books.digests == {2: 7, 3: 7, 4: 7}


def test_a_report_of_steps_is_entered_written_and_told_whole():
    books = JobProgress([VIEWED])
    books.total_steps = 9
    one = pb.Applied(
        step=0, generation=2, records=8, digest=9, loss=0.25, workers=3, gap_ms=70.0, at_ns=5, rates=[10.0, 20.25],
        shares=[3, 5], data_ms=1000.0, compute_ms=2000.0, wait_ms=300.0, commit_ms=40.0, redone=2,
    )  # fmt: skip
    two = pb.Applied(step=1, generation=2, records=8, digest=8, loss=0.125, workers=3, data_ms=500.0)
    row = {**ROW, "step": 0}
    next_row = {**row, "step": 1, "digest": 8, "loss": 0.125, "gap_ms": 0.0, "at_ns": 0}
    found = books.enter_report(pb.Progress(ref="w", applied=[one, two]), now=4.0)
    assert found.rows == [
        ("COMMIT", row),
        ("FORMED", {"generation": 2, "step": 0, "gap_ms": 70.0, "workers": 3}),
        ("COMMIT", next_row),
    ]
    assert found.events == [
        ("step.applied", {"total": 9, **row, "rates": "[10.0, 20.2]", "data_ms": 1000.0, "compute_ms": 2000.0,
                          "wait_ms": 300.0, "commit_ms": 40.0, "redone": 2, "shares": "[3, 5]"}),
        ("step.applied", {"total": 9, **next_row, "rates": "[]", "data_ms": 500.0, "compute_ms": 0.0, "wait_ms": 0.0,
                          "commit_ms": 0.0, "redone": 0}),
    ]  # fmt: skip
    assert found.fault == ""
    assert known_of(books) == {
        **NOTHING, "total_steps": 9, "logged": 2, "loss": 0.125, "rates": (2, (10.0, 20.25)), "digests": {0: 9, 1: 8},
        "regroups": {2: {"generation": 2, "reason": "begun", "gap_ms": 70.0, "workers": 3}}, "_formed": {2},
        "records_applied": 16, "reading_s": 1.5, "steps_s": pytest.approx(3.84),
    }  # fmt: skip
    assert list(books.recent) == [(4.0, 8), (4.0, 8)]


def test_the_first_step_of_a_generation_that_was_published_is_marked_and_later_ones_with_a_gap():
    books = JobProgress([VIEWED])
    marked = []
    for step, generation, gap_ms in ((0, 2, 0.0), (1, 2, 0.0), (2, 2, 50.0), (3, 7, 60.0), (4, 7, 0.0)):
        one = pb.Applied(step=step, generation=generation, records=4, digest=7, workers=2, gap_ms=gap_ms)
        rows = books.enter_report(pb.Progress(ref="w", applied=[one])).rows
        marked += [body for kind, body in rows if kind == "FORMED"]
    assert marked == [
        {"generation": 2, "step": 0, "gap_ms": 0.0, "workers": 2},
        {"generation": 2, "step": 2, "gap_ms": 50.0, "workers": 2},
    ]


def test_certificates_and_evaluations_are_written_and_told_whole():
    plain, named = signed(0), signed(1, out=(3, 7), low=0)
    named.set_aside_of.extend((5, 6))
    found = JobProgress().enter_report(
        pb.Progress(ref="w", certificates=[plain, named], evaluations=[evaluation(3, best=True), evaluation(4)])
    )
    whole = {"epoch": 0, "steps": 3, "records": 10, "digest": plain.digest, "tally_min": 1, "tally_max": 1}
    part = {"epoch": 1, "steps": 3, "records": 8, "digest": named.digest, "tally_min": 0, "tally_max": 1}
    best = {"step": 3, "records": 50, "loss": 0.5, "metrics": '{"accuracy": 0.9}', "best": True, "stop": False}
    assert found.rows == [
        ("EPOCH", whole), ("EPOCH", {**part, "set_aside": [3, 7], "set_aside_of": [5, 6]}),
        ("EVAL", best), ("EVAL", {**best, "step": 4, "best": False}),
    ]  # fmt: skip
    assert found.events == [
        ("epoch.certified", {**whole, "set_aside": "[]"}),
        ("epoch.certified", {**part, "set_aside": "[3, 7]", "set_aside_of": "[5, 6]"}),
        ("evaluation.done", best), ("evaluation.done", {**best, "step": 4, "best": False}),
    ]  # fmt: skip


def test_the_summary_of_a_job_in_which_nothing_has_happened_is_whole():
    assert JobProgress().summarize(JOB, State(workers=2)) == {
        "name": "x", "epochs": 3, "steps": 0, "records": 0, "global_batch": 4, "workers_started": 0, "generations": 0,
        "regroups": [], "certificates": [], "checkpoint": "", "evaluations": [], "best": None, "reading_s": 0.0,
        "steps_s": 0.0, "stopped_early": False, "set_aside": [], "quarantined": [],
    }  # fmt: skip


def test_the_summary_of_a_job_says_all_that_happened_in_order():
    books = account(signed(1), signed(0), evaluations=[evaluation(6, stop=True), evaluation(3, best=True)])
    books.evaluations[6]["metrics"] = ""
    for generation in (1, 2, 3):
        books.begin_regroup(generation, f"reason {generation}")
    books.enter_report(pb.Progress(ref="w", applied=[
        pb.Applied(step=0, generation=1, workers=2, data_ms=250.0, compute_ms=1000.0),
        pb.Applied(step=1, generation=3, workers=1, gap_ms=70.0),
    ]))  # fmt: skip
    state = State(
        workers=3, generation=3, incarnations={0: 2, 1: 3}, checkpoint="/job/step-6", set_aside={7: "odd", 4: "even"},
        places={4: "record 4 of x"}, quarantined={2: "died", 1: "failed"},
    )  # fmt: skip
    told = {"records": 50, "loss": 0.5}
    assert books.summarize(JOB, state) == {
        "name": "x", "epochs": 3, "steps": 6, "records": 10, "global_batch": 4, "workers_started": 5, "generations": 3,
        "regroups": [
            {"generation": 1, "reason": "reason 1", "gap_ms": 0.0, "workers": 2},
            {"generation": 3, "reason": "reason 3", "gap_ms": 70.0, "workers": 1},
        ],
        "certificates": [books.certificates[0], books.certificates[1]],
        "checkpoint": "/job/step-6",
        "evaluations": [
            {"step": 3, **told, "metrics": {"accuracy": 0.9}, "best": True, "stop": False},
            {"step": 6, **told, "metrics": {}, "best": False, "stop": True},
        ],
        "best": {"step": 3, "loss": 0.5, "metrics": {"accuracy": 0.9}},
        "reading_s": 0.25, "steps_s": 1.25, "stopped_early": True,
        "set_aside": [
            {"record": 4, "where": "record 4 of x", "why": "even"}, {"record": 7, "where": "", "why": "odd"},
        ],
        "quarantined": [{"slot": 1, "why": "failed"}, {"slot": 2, "why": "died"}],
    }  # fmt: skip


def test_the_faults_of_all_epochs_are_named_in_order():
    assert account().find_faults(JOB) == [f"epoch {epoch} has no certificate" for epoch in range(3)]
    books = account(signed(0), signed(2, low=0))
    assert books.find_faults(JOB) == ["epoch 1 has no certificate", "epoch 2: records were applied 0 to 1 times"]
    assert JobProgress().find_faults(JOB) == [], "no step was planned"


@pytest.mark.parametrize(
    ("reports", "now", "rate"),
    [
        ([], 5.0, 0.0),
        ([(1.0, 40)], 5.0, 4.0),
        ([(1.0, 40)], 11.0, 4.0),
        ([(1.0, 40)], 11.1, 0.0),
        ([(1.0, 40), (3.0, 60)], 5.0, 15.0),
        ([(1.0, 40), (3.0, 60), (4.0, 20)], 5.0, 20.0),
        ([(1.0, 40), (3.0, 60), (4.0, 20)], 11.5, 20.0 / 8.5),
        ([(1.0, 40), (1.0, 60)], 1.0, 600.0),
        ([(1.0, 40), (1.05, 60)], 1.05, 600.0),
        ([(1.0, 40), (1.5, 60)], 1.5, 120.0),
    ],
    ids=str,
)
def test_the_rate_is_that_of_the_reports_of_the_last_ten_seconds(reports, now, rate):
    books = JobProgress()
    for step, (at, records) in enumerate(reports):
        books.enter_report(pb.Progress(ref="w", applied=[pb.Applied(step=step, records=records)]), at)
    assert books.records_per_s(now) == pytest.approx(rate)


def test_the_facts_of_the_first_worker_are_written_and_compared_with_those_of_the_others():
    books = JobProgress()
    assert books.accept_facts(10, 9, 4, (5, 5)) == (
        "", [("FACTS", {"num_records": 10, "total_steps": 9, "shard_records": 4, "blocks": [5, 5]})],
    )  # fmt: skip
    assert books.accept_facts(10, 9, 4, (5, 5)) == ("", [])
    assert books.accept_facts(11, 9, 4, (5, 5)) == ("a worker sees 11 records (9 steps), the others 10 (9 steps)", [])
    assert books.accept_facts(10, 9, 0, (5, 5)) == (
        "a worker takes steps whole, the others in shards of 4 records: "
        "its model differs or its trial of a forward failed", [],
    )  # fmt: skip
    assert books.accept_facts(10, 9, 4, (4, 6)) == (
        "a worker finds the records in other blocks (2 blocks, the others 2): "
        "its files differ, or were rewritten", [],
    )  # fmt: skip
    assert books.accept_facts(10, 9, 4)[0] != "", "no blocks are other blocks"
    bare = JobProgress()
    assert bare.accept_facts(10, 9, 0) == ("", [("FACTS", {"num_records": 10, "total_steps": 9, "shard_records": 0})])
    assert bare.accept_facts(10, 9, 0) == ("", [])


def test_the_part_of_an_epoch_of_more_than_a_million_records_is_added_up_in_pieces():
    job = dataclasses.replace(JOB, global_batch=1000)
    plan = plan_records(job, 2_500_000, IN_ORDER, epoch=0, steps=2200, named=[2_300_000, 1_500_000, 2_150_000, 5])
    assert plan == PlannedRecords(2_200_000, ledger.digest(np.arange(2_200_000)), False, (5, 1_500_000, 2_150_000))
    assert plan_records(job, 2000, epoch=0, steps=2, named=[7, 3]) == PlannedRecords(
        2000, ledger.digest_of_all(2000), True, (7, 3)
    )


def test_what_stood_at_a_position_counts_only_where_records_are_said_to_be_drawn():
    kept = np.setdiff1d(np.arange(10), [3])
    named = {**GOOD, "records": 9, "digest": ledger.digest(kept), "set_aside": [3], "set_aside_of": [5]}
    planned = PlannedRecords(10, WHOLE.digest, True, (3,))
    said = ["1 records were left out and 1 are named in their places"]
    assert find_certificate_faults(named, steps=3, planned=planned, set_aside={5}) == said
    assert find_certificate_faults(named, steps=3, planned=planned, set_aside={5}, drawn=True) == []
    assert find_certificate_faults(named, steps=3, planned=planned, drawn=True) == [
        "record 5 was left out and is not set aside"
    ]


def test_all_faults_of_a_certificate_are_named_in_order():
    bad = {**GOOD, "steps": 4, "records": 7, "digest": WRONG, "tally_min": 0, "tally_max": 2, "set_aside": [3, 7]}
    kept = ledger.digest(np.setdiff1d(np.arange(10), [3, 7]))
    assert find_certificate_faults(bad, steps=3, planned=PlannedRecords(10, WHOLE.digest, True, (3, 7))) == [
        "record 3 was left out and is not set aside",
        "record 7 was left out and is not set aside",
        "7 records were applied and 2 set aside, planned were 10",
        "4 steps were applied, the epoch has 3",
        f"the digest of the applied records is {WRONG:06x}, not {kept:06x}",
        "records were applied 0 to 2 times",
    ]
