"""Learners are submitted, and again when their submission comes to nothing."""

from trueline.engine.cluster.contract import SubmissionReport, SubmissionState
from trueline.engine.cluster.decide import JOIN_S, SETTLE_S, YIELD_S
from trueline.train.learners.hosts import (
    MOST_FAILURES,
    CancelLearner,
    GiveUp,
    LearnerEntry,
    SubmitLearner,
    enter_joined,
    enter_lost,
    gives_way,
    review,
)


def report(role: str, state: str, reason: str = "") -> dict[str, SubmissionReport]:
    return {role: SubmissionReport(name=f"x.1.{role}", state=SubmissionState(state), reason=reason)}


def test_each_learner_is_submitted_once_and_has_the_schedulers_reason():
    entries = [LearnerEntry(2), LearnerEntry(3)]
    assert review(entries, {}, 0.0) == [SubmitLearner(2, "learner-2"), SubmitLearner(3, "learner-3")]
    assert review(entries, report("learner-2", "queued", "no room"), 1.0) == []
    assert entries[0].reason == "no room"


def test_a_lost_learner_is_submitted_under_another_name():
    entry = LearnerEntry(2)
    review([entry], {}, 0.0)
    enter_joined(entry)
    assert review([entry], {}, 99.0) == []
    assert enter_lost(entry, "its host is gone", 99.0) == "learner-2"
    assert review([entry], {}, 100.0) == [SubmitLearner(2, "learner-2-2")]


def test_a_learner_that_goes_before_it_is_ready_waits_longer_each_time():
    entry = LearnerEntry(2)
    for failures in range(MOST_FAILURES):
        now = 100.0 * failures
        review([entry], {}, now)
        enter_lost(entry, "its host is gone", now)
        assert entry.retry_at - now == 2.0**failures
    assert review([entry], {}, 999.0) == [GiveUp("learner 2 cannot be started: its host is gone")]


def test_submissions_that_end_before_they_join_are_tried_later_each_time_and_then_given_up():
    entry, now, waits = LearnerEntry(2), 0.0, []
    for _ in range(MOST_FAILURES):
        (submitted,) = review([entry], {}, now)
        ended = now
        now += SETTLE_S
        actions = review([entry], report(submitted.role, "ended", "exit code 1"), now)
        while not actions:
            now += 0.5
            actions = review([entry], {}, now)
            if entry.role:
                waits.append(now - ended)
                entry.role = ""
    assert actions == [GiveUp("learner 2 cannot be started: exit code 1")]
    assert waits == sorted(waits)


def test_a_learner_that_runs_without_joining_is_cancelled():
    entry = LearnerEntry(2)
    review([entry], {}, 0.0)
    assert review([entry], report("learner-2", "running"), 1.0) == []
    (cancelled,) = review([entry], report("learner-2", "running"), 2.0 + JOIN_S)
    assert cancelled == CancelLearner("learner-2", f"it did not join within {JOIN_S:.0f} s")


def test_a_scheduler_may_list_a_submission_some_seconds_late():
    entry = LearnerEntry(2)
    review([entry], {}, 0.0)
    assert review([entry], {}, SETTLE_S / 2) == []
    assert entry.failures == 0
    review([entry], {}, 2 * SETTLE_S)
    assert entry.failures == 1


def test_a_launch_gives_way_after_a_while_if_a_learner_waits_for_room_and_not_if_all_have_it():
    entries = [LearnerEntry(2), LearnerEntry(3)]
    review(entries, {}, 0.0)
    review(entries, report("learner-2", "running") | report("learner-3", "queued", "no room"), 1.0)
    assert not gives_way(entries, waited_s=YIELD_S, name="a-1", number=1)
    assert gives_way(entries, waited_s=2 * YIELD_S + 1, name="a-1", number=1)
    review(entries, report("learner-2", "running") | report("learner-3", "running"), 2.0)
    assert not gives_way(entries, waited_s=1e9, name="a-1", number=1)
    enter_joined(entries[0])
    assert not gives_way(entries[:1], waited_s=1e9, name="a-1", number=1)
