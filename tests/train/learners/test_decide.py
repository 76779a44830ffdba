"""What the master of a group of learners does, when they end, fail, die and are halted."""

from trueline.train.learners.decide import (
    DRAIN_S,
    HALT_S,
    MOST_RESTARTS,
    RESTART_S,
    SETTLE_S,
    EndJob,
    Group,
    Learner,
    LearnerFault,
    Phase,
    StartGroup,
    StopGroup,
    decide,
    enter_end,
    enter_fault,
    enter_loss,
)


def make(learners: int = 2) -> Group:
    """A group whose learners run."""
    group = Group({number: Learner(number) for number in range(1, learners + 1)})
    assert decide(group, 0.0) == []
    connect(group)
    assert decide(group, 0.0) == [StartGroup(1)]
    return group


def connect(group: Group) -> None:
    for one in group.learners.values():
        one.connected = True


def end(group: Group, number: int, code: int, now: float) -> None:
    enter_end(group, number, group.generation, code, now)


def end_all(group: Group, code: int, now: float) -> None:
    for number, one in group.learners.items():
        if one.running:
            end(group, number, code, now)


def test_no_learner_starts_before_all_are_there():
    group = Group({number: Learner(number) for number in (1, 2)})
    group.learners[1].connected = True
    assert decide(group, 0.0) == []
    group.learners[2].connected = True
    assert decide(group, 1.0) == [StartGroup(1)]


def test_the_job_is_done_with_learner_1_and_the_ones_that_sleep_are_stopped():
    group = make(3)
    end(group, 3, 0, 1.0)
    assert decide(group, 1.0) == []
    end(group, 1, 0, 2.0)
    assert decide(group, 2.0) == []  # learner 2 may end by itself
    (stop,) = decide(group, 2.0 + DRAIN_S)
    assert isinstance(stop, StopGroup)
    end_all(group, 143, 9.0)
    assert decide(group, 9.0) == [EndJob("finished", "")]
    assert decide(group, 10.0) == []


def test_learners_that_end_by_themselves_are_not_waited_for():
    group = make()
    end_all(group, 0, 1.0)
    assert isinstance(decide(group, 1.0)[0], StopGroup)
    assert decide(group, 1.0) == [EndJob("finished", "")]


def test_an_error_of_a_script_fails_the_job_with_its_code():
    group = make()
    end(group, 2, 3, 1.0)
    assert decide(group, 1.0) == []  # the cause may be the death of another, which is known later
    assert decide(group, 1.0 + SETTLE_S) == [StopGroup(RESTART_S, "learner 2: exit code 3", ending=True)]
    end_all(group, 143, 4.0)
    assert decide(group, 4.0) == [EndJob("failed", "learner 2: exit code 3", 3)]


def test_a_death_starts_all_again_although_the_survivor_failed_first():
    group = make()
    end(group, 1, 1, 1.0)  # gloo: connection closed by peer
    end(group, 2, 137, 1.5)
    (stop,) = decide(group, 1.0 + SETTLE_S)
    assert stop == StopGroup(RESTART_S, "learner 2: signal 9", ending=False)
    assert decide(group, 4.0) == [StartGroup(2)]
    assert all(one.fault is None for one in group.learners.values())


def test_a_lost_host_starts_all_again_once_its_learner_is_back():
    group = make()
    enter_loss(group, 2, "its host is gone", 1.0)
    (stop,) = decide(group, 1.0 + SETTLE_S)
    assert not stop.ending
    end_all(group, 143, 4.0)
    assert decide(group, 4.0) == []
    assert group.phase is Phase.GATHERING
    group.learners[2].connected = True
    assert decide(group, 9.0) == [StartGroup(2)]


def test_a_learner_whose_member_died_has_failed_although_its_command_ended_well():
    group = make()
    enter_fault(group, 1, 1, LearnerFault(1.0, "its process 7 left its process group without an end", died=True))
    end(group, 1, 0, 1.1)
    (stop,) = decide(group, 1.0 + SETTLE_S)
    assert not stop.ending


def test_what_comes_from_an_earlier_start_counts_no_more():
    group = make()
    end(group, 2, 137, 1.0)
    decide(group, 4.0)
    end_all(group, 143, 4.0)
    decide(group, 4.0)
    assert group.generation == 2
    enter_end(group, 1, 1, 9, 5.0)
    enter_fault(group, 1, 1, LearnerFault(5.0, "late", died=True))
    assert decide(group, 50.0) == []


def test_deaths_in_a_row_wait_longer_and_at_last_fail_the_job():
    group, now, waits = make(), 0.0, []
    for _ in range(MOST_RESTARTS):
        end(group, 2, 137, now)
        now += SETTLE_S
        (stop,) = decide(group, now)
        assert not stop.ending
        end_all(group, 143, now)
        began = now
        while not decide(group, now):
            now += 0.5
        waits.append(now - began)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.0, 8.0)
    end(group, 2, 137, now)
    (stop,) = decide(group, now + SETTLE_S)
    assert stop.ending
    end_all(group, 143, now)
    (ended,) = decide(group, now + SETTLE_S)
    assert ended.outcome == "failed"
    assert "death 6 within 10 minutes" in ended.why


def test_a_death_long_after_the_others_is_one_of_its_own():
    group, now = make(), 0.0
    for _ in range(3 * MOST_RESTARTS):
        now += 700.0
        end(group, 2, 137, now)
        assert not decide(group, now + SETTLE_S)[0].ending
        end_all(group, 143, now + 3)
        assert decide(group, now + 3) == [StartGroup(group.generation)]


def test_a_halt_gives_the_scripts_time_and_is_no_failure():
    group = make()
    group.halting = "trueline halt"
    assert decide(group, 1.0) == [StopGroup(HALT_S, "trueline halt", ending=True)]
    end_all(group, 143, 2.0)
    assert decide(group, 2.0) == [EndJob("stopped", "trueline halt")]


def test_a_halt_before_all_are_there_ends_at_once():
    group = Group({1: Learner(1), 2: Learner(2)}, halting="trueline halt")
    assert decide(group, 0.0) == [EndJob("stopped", "trueline halt")]


def test_a_halt_while_all_start_again_starts_nothing():
    group = make()
    end(group, 2, 137, 0.0)
    decide(group, SETTLE_S)
    group.halting = "trueline halt"
    end_all(group, 143, 3.0)
    assert decide(group, 3.0) == [EndJob("stopped", "trueline halt")]
