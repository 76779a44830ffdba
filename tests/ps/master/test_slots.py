"""The master starts what is missing, waits longer for what fails again, and gives up what never works."""

from trueline.ps.master.slots import Slots


def test_a_dead_process_is_replaced_by_the_next_incarnation_at_once_and_then_after_a_pause():
    roster = Slots("server", 2)
    assert roster.start_due(0.0) == ["server-0.0", "server-1.0"]
    assert roster.note_death("server-1.0", 1.0)
    assert roster.start_due(1.0) == ["server-1.1"]
    roster.note_death("server-1.1", 2.0)
    assert roster.start_due(2.1) == []
    assert roster.start_due(2.6) == ["server-1.2"]
    assert roster.started == 4


def test_a_death_that_is_told_twice_or_late_counts_once():
    roster = Slots("worker", 1)
    roster.start_due(0.0)
    assert roster.note_death("worker-0.0", 1.0)
    assert not roster.note_death("worker-0.0", 1.0)
    roster.start_due(1.0)
    assert not roster.note_death("worker-0.0", 2.0)
    assert roster.alive == ["worker-0.1"]


def test_a_slot_whose_processes_die_before_they_do_anything_is_hopeless_and_progress_forgives():
    roster = Slots("worker", 1, most_failures=3)
    for number in range(2):
        roster.start_due(99.0 * number)
        roster.note_death(roster.alive[0], 99.0 * number)
    assert roster.hopeless == -1
    roster.start_due(500.0)
    roster.note_progress(roster.alive[0])
    for number in range(6, 9):
        roster.start_due(99.0 * number)
        roster.note_death(roster.alive[0], 99.0 * number)
    assert roster.hopeless == 0


def test_what_runs_is_adopted_and_what_the_job_no_longer_has_is_surplus():
    roster = Slots("worker", 2)
    for ref in ("worker-0.3", "worker-1.0", "worker-2.5"):
        roster.adopt(ref)
    assert roster.start_due(0.0) == []
    assert roster.surplus == ["worker-2.5"]
    roster.note_death("worker-0.3", 0.0)
    assert roster.start_due(0.0) == ["worker-0.4"]
