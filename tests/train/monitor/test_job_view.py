"""Promises of what the live page is drawn from."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from trueline.train.monitor import prometheus
from trueline.train.monitor.charts import MAX_SPANS, Lanes, Point, Recent, StepCurves
from trueline.train.monitor.job_view import MAX_EVENTS, MAX_MEASURED, JobView
from worlds import job_events

FACTS = {"name": "digits-1", "epochs": 10}


def board_of(events):
    view = JobView(FACTS)
    for event in events:
        view.apply(*event)
    return view


def step(number, **fields):
    known = {"step": number, "total": 100, "loss": 1.0, "workers": 2, "records": 8, "generation": 1, "gap_ms": 0.0}
    return "step.applied", known | fields


@given(st.integers(1, 700), st.integers(2, 16))
def test_a_curve_stays_small_and_loses_no_step_record_or_extreme(num, capacity):
    series, chance = StepCurves(capacity), random.Random(num)
    losses = [chance.random() for _ in range(num)]
    for number, loss in enumerate(losses):
        series.add(Point(step=number, at=number, loss=loss, records=3, seconds=1.0))
    points = series.points
    assert len(points) <= capacity
    assert sum(point.num for point in points) == num
    assert sum(point.records for point in points) == 3 * num
    assert math.isclose(sum(point.loss for point in points), sum(losses))
    assert (min(point.low for point in points), max(point.high for point in points)) == (min(losses), max(losses))
    assert all(a.step + a.num == b.step for a, b in itertools.pairwise(points))


def test_a_step_that_comes_again_replaces_what_followed_it():
    view = board_of([(*step(number, loss=float(number)), number) for number in range(10)])
    view.apply("log.truncated", {"steps": 6, "why": "x"}, 11)
    assert (view.step, [point.step for point in view.series.points]) == (6, [0, 1, 2, 3, 4, 5])
    view.apply(*step(4, loss=40.0), 12)
    assert view.series.columns()["loss"] == [0.0, 1.0, 2.0, 3.0, 40.0]


def test_learning_rate_and_gradient_norm_are_a_bounded_curve_that_goes_back_with_the_job():
    many = [step(at, learning_rate=0.1, gradient_norm=2.0) if at % 2 == 0 else step(at) for at in range(4000)]
    view = board_of([(*event, at) for at, event in enumerate(many)])
    measured = view.state(4000.0)["measured"]
    assert 256 <= len(measured) <= MAX_MEASURED
    assert measured[0][1:] == (0, 0.1, 2.0)
    view.apply(*step(100, learning_rate=0.2, gradient_norm=math.inf), 4001)
    assert view.measured[-1][1:] == (100, 0.2, None)
    assert max(one[1] for one in view.measured[:-1]) < 100


def test_the_memory_of_the_workers_is_known_and_no_line_of_the_list():
    view = board_of([("workers.measured", {"memory": '{"worker-0.0": 1048576}'}, 1.0)])
    state = view.state(1.0)
    assert (state["memory"], state["events"]) == ({"worker-0.0": 1 << 20}, [])


def test_the_same_events_give_the_same_board_so_a_restarted_master_shows_the_whole_history():
    events = list(job_events.storm(total=400, deaths=6))
    assert board_of(events).state(1e9) == board_of(events).state(1e9)
    json.dumps(board_of(events).state(1e9), allow_nan=False)


def test_a_storm_is_counted_and_its_picture_stays_small():
    view = board_of(job_events.storm(total=6000, deaths=600, workers=3))
    assert sum(view.deaths.values()) == 600
    assert view.gaps_s.count > 1000
    state = view.state(view.last_at)
    assert all(len(lane["spans"]) <= MAX_SPANS for lane in state["lanes"])
    assert sum(span[5] for lane in state["lanes"] for span in lane["spans"]) == 600
    assert len(state["events"]) == MAX_EVENTS
    assert len(json.dumps(state)) < 150_000
    assert state["set_aside"] == [[1717, f"{job_events.PLACE}: ValueError: image has 3 bytes, expected 64"]]
    assert [lane["slot"] for lane in state["lanes"] if lane["quarantined"]]


def test_a_death_that_is_told_twice_counts_once():
    view = board_of([("worker.started", {"worker": "worker-0.0"}, 1), ("worker.joined", {"worker": "worker-0.0"}, 2)])
    view.apply("worker.killed", {"worker": "worker-0.0", "why": "silent for 3.1 s"}, 5)
    view.apply("worker.lost", {"worker": "worker-0.0", "why": "killed by SIGKILL"}, 6)
    assert view.deaths == {"silent": 1}
    assert view.lanes.by_slot["worker", 0].spans[0].row() == ["worker-0.0", 1, 2, 5, "died", 1, "silent for 3.1 s"]


def test_who_leaves_as_planned_is_not_dead_and_stays_until_the_next_view():
    lanes = Lanes()
    for slot in range(2):
        lanes.mark_ready(f"worker-{slot}.0", 1.0)
    lanes.mark_leaving("worker-1.0")
    assert len(lanes.living()) == 2
    lanes.apply_view(3.0)
    gone = lanes.by_slot["worker", 1].spans[0]
    assert (gone.end, gone.how, gone.deaths) == (3.0, "left", 0)


def test_a_job_that_is_made_smaller_lets_its_highest_slots_go_without_a_death():
    view = board_of([("worker.joined", {"worker": f"worker-{slot}.0"}, 1) for slot in range(3)])
    view.apply("job.scaled", {"workers": 2, "before": 3, "why": "asked for"}, 2)
    view.apply("view.published", {"generation": 2, "workers": 2, "why": "worker-2.0 leaves"}, 3)
    assert [span.ref for span in view.lanes.living()] == ["worker-0.0", "worker-1.0"]
    view.apply("worker.lost", {"worker": "worker-2.0", "why": "exit code 0"}, 4)
    view.apply("worker.lost", {"worker": "worker-1.0", "why": "exit code 0"}, 5)
    assert [lane.spans[0].how for lane in view.lanes.by_slot.values()] == ["", "left", "left"]
    assert (view.deaths.total(), view.facts["workers"]) == (0, 2)
    assert not any(name == "worker.lost" for _, name, *_ in view.lines)


def test_a_worker_whose_end_nobody_saw_ends_with_the_last_step_before_its_successor():
    view = board_of([("worker.started", {"worker": "worker-0.0"}, 1), (*step(0), 4)])
    view.apply("worker.started", {"worker": "worker-0.1"}, 900)
    assert [(span.end, span.how) for span in view.lanes.by_slot["worker", 0].spans] == [(4, "unseen"), (None, "")]


def test_steps_that_a_master_hears_of_late_stand_where_the_workers_clocks_put_them():
    view = board_of([(*step(number, at_ns=int((50 + number) * 1e9)), 1000.0 + number) for number in range(3)])
    for number in range(3, 100):  # the master was away and hears all of them at once
        view.apply(*step(number, at_ns=int((50 + number) * 1e9)), 1100.0)
    assert view.series.columns()["at"] == [1000.0 + number for number in range(100)]
    assert view.series.columns()["rate"][1:] == [8.0] * 99
    view.apply(*step(100, at_ns=int(3e9)), 5000.0)  # resumed after a reboot: that clock began anew
    view.apply(*step(101, at_ns=int(4e9)), 5001.0)
    assert view.series.columns()["at"][-2:] == [5000.0, 5001.0]


def test_who_has_a_successor_does_not_come_back():
    lanes = Lanes()
    for ref in ("worker-0.0", "worker-0.1", "worker-0.0", "worker-0.1"):  # started twice, then seen running
        lanes.start(ref, 2.0, 1.0)
    assert [(span.ref, span.how) for span in lanes.by_slot["worker", 0].spans] == [
        ("worker-0.0", "unseen"),
        ("worker-0.1", ""),
    ]


def test_a_regroup_keeps_its_gap_and_its_reason():
    view = board_of([("view.published", {"generation": 4, "workers": 2, "why": "worker-1.0 is gone"}, 10)])
    assert view.phase == "regrouping"
    view.apply(*step(7, generation=4, gap_ms=62.0), 10.06)
    view.apply(*step(8, generation=4, gap_ms=62.0), 10.1)  # told again by another worker
    (regroup,) = view.regroups
    assert (regroup["gap_ms"], regroup["until"], regroup["why"]) == (62.0, 10.06, "worker-1.0 is gone")
    assert (view.phase, view.gaps_s.count, view.gaps_s.cumulative()[2]) == ("training", 1, ("0.1", 1))


def test_a_gap_that_the_reporting_joiner_does_not_know_is_the_time_since_the_step_before():
    view = board_of([(*step(0), 10), ("view.published", {"generation": 2, "workers": 3, "why": "one joins"}, 10.02)])
    view.apply(*step(1, generation=2), 10.08)
    view.apply("view.published", {"generation": 3, "workers": 3, "why": "resumed"}, 9000.0)
    view.apply(*step(2, generation=3), 9001.0)
    assert [regroup["gap_ms"] for regroup in view.regroups] == [80.0, 0.0]


def test_a_loss_that_is_no_number_is_named_and_does_not_break_the_page():
    view = board_of([(*step(0), 1), (*step(1, loss=math.nan), 2), (*step(2, loss=None), 3)])
    state = view.state(3)
    assert (state["not_finite"], state["loss"], state["series"]["loss"]) == (1, None, [1.0, None, None])
    json.dumps(state, allow_nan=False)


def test_a_slot_that_crashes_again_and_again_is_two_lines_with_their_counts():
    crashes = [
        event
        for life in range(5)
        for event in (
            ("worker.started", {"worker": f"worker-1.{life}"}, life),
            ("worker.lost", {"worker": f"worker-1.{life}", "why": "exit code 3"}, life + 0.5),
        )
    ]
    view = board_of([("job.scaled", {"before": 1, "workers": 2, "why": "asked"}, 0), *crashes])
    assert [line[2:] for line in view.lines] == [
        ["from 1 to 2 workers: asked", "", 1],
        ["worker-1.4 starts", "", 5],
        ["worker-1.4 died: exit code 3", "bad", 5],
    ]


def test_an_event_of_another_version_becomes_a_line_and_never_an_error():
    view = board_of(
        [("worker.lost", {}, 1), ("step.applied", {"step": "x"}, 2), ("moon.landed", {"craft": "eagle"}, 3)]
    )
    view.apply("evaluation.done", {"step": 1, "loss": 1.0, "metrics": "[1]"}, 4)
    view.apply("worker.lost", {"worker": "nobody", "why": "y"}, 5)
    assert [text for _, _, text, *_ in view.lines] == ["worker.lost", "moon.landed craft=eagle", "nobody died: y"]


@pytest.mark.parametrize(
    ("name", "fields", "phase"),
    [
        ("job.finished", {}, "finished"),
        ("job.failed", {"why": "state lost", "hint": "look"}, "failed"),
        ("job.stopping", {"why": "state lost"}, "stopped"),
        ("launcher.ended", {"outcome": "failed", "why": "state lost"}, "failed"),
        ("launcher.ended", {"outcome": "stopped", "why": "state lost"}, "stopped"),
    ],
    ids=str,
)
def test_a_page_says_of_an_end_what_it_was(name, fields, phase):
    view = board_of([(*step(0), 1), (name, fields, 2)])
    assert (view.phase, view.ended, view.why) == (phase, True, fields.get("why", ""))


def test_the_end_stays_the_end_until_the_job_is_resumed():
    view = board_of(job_events.failure())
    last = view.last_at
    view.apply("job.stopping", {"why": "the launcher ends"}, last + 1)
    view.apply("launcher.ended", {"outcome": "failed", "why": ""}, last + 2)
    assert view.last_at == last
    assert (view.phase, view.hint) == ("failed", "mend the recipe, then continue with --resume")
    assert view.lanes.living() == []
    view.apply("worker.started", {"worker": "worker-0.1"}, view.last_at + 60)
    assert (view.phase, view.why) == ("starting", "")


def test_a_rate_is_of_the_last_ten_seconds_and_goes_to_nothing_when_nothing_comes():
    recent = Recent()
    for tick in range(1000):
        recent.add(tick * 0.1, 100 if tick < 500 else 50)
    records, steps = recent.rates(100.0)
    assert math.isclose(records, 500, rel_tol=0.03)
    assert math.isclose(steps, 10, rel_tol=0.03)
    assert recent.rates(120.0) == (0.0, 0.0)


def test_prometheus_reads_the_same_numbers():
    view = board_of(job_events.storm(total=400, deaths=9))
    text = prometheus.render(view, view.last_at).decode()
    assert len({family.name for family in text_string_to_metric_families(text)}) > 15
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["trueline_job_step"]) == float(values["trueline_job_steps_applied_total"]) == 400
    assert float(values["trueline_job_records_applied_total"]) == 400 * 64
    assert sum(float(value) for name, value in values.items() if name.startswith("trueline_job_deaths_total")) == 9
    assert float(values['trueline_job_regroup_gap_seconds_bucket{le="+Inf"}']) == view.gaps_s.count > 10
    assert float(values['trueline_job_evaluation{metric="accuracy"}']) == view.evaluations[-1]["metrics"]["accuracy"]
    assert values["trueline_job_records_set_aside"] == values["trueline_job_quarantined_slots"] == "1.0"
    assert values['trueline_job_phase{phase="finished"}'] == "1.0"


def test_a_joiner_shows_how_much_of_its_state_has_come_until_all_has():
    ref = {"worker": "worker-1.1"}
    view = board_of([("worker.started", ref, 1), ("worker.joined", ref, 2)])
    for name, fields, does in (
        ("worker.receiving", {"does": "receiving state: 1.2 of 3.6 GB"}, "receiving state: 1.2 of 3.6 GB"),
        ("worker.received", {}, ""),
        ("worker.receiving", {"does": "receiving state: 0.1 of 3.6 GB"}, "receiving state: 0.1 of 3.6 GB"),
        ("worker.lost", {"why": "killed by SIGKILL"}, ""),
    ):
        view.apply(name, {**ref, **fields}, 3)
        assert [lane["does"] for lane in view.state(3.0)["lanes"]] == [does]
    assert not [line for line in view.lines if "receiv" in line[1]], "no line for each of its heartbeats"


def test_a_slot_in_quarantine_is_told_with_its_reason_until_it_is_tried_again():
    fields = {"slot": 1, "worker": "worker-1.3", "why": "died", "times": 1, "retry_s": 30.0}
    view = board_of([("worker.quarantined", fields, 1)])
    assert [lane["quarantined"] for lane in view.state(1.0)["lanes"]] == ["died"]
    assert view.lines[-1][2:4] == ["worker 1 is in quarantine, and is tried again in 30 s: died", "bad"]
    view.apply("worker.retried", {"slot": 1, "times": 1}, 31)
    view.apply("worker.started", {"worker": "worker-1.4"}, 31)
    assert [lane["quarantined"] for lane in view.state(31.0)["lanes"]] == [""]


def test_parameter_servers_have_lanes_of_their_own_and_their_last_measures():
    view = JobView({"workers": 1})
    for at, ref in enumerate(("server-0.0", "worker-0.0")):
        view.apply("worker.started", {"worker": ref}, at)
    view.apply("worker.lost", {"worker": "server-0.0", "why": "killed by SIGKILL"}, 3)
    view.apply("worker.started", {"worker": "server-0.1"}, 4)
    view.apply("servers.measured", {"servers": json.dumps([{"ref": "server-0.1", "rows": 3}])}, 5)
    view.apply("worker.running", {"worker": "saver-0.8", "pid": 3}, 5)
    view.apply("job.scaled", {"workers": 0, "before": 1, "why": ""}, 6)
    state = view.state(7)
    assert [(lane["role"], lane["slot"], len(lane["spans"])) for lane in state["lanes"]] == [
        ("worker", 0, 1),
        ("server", 0, 2),
    ]
    assert state["servers"] == [{"ref": "server-0.1", "rows": 3}]
    assert {span.ref: span.leaving for span in view.lanes.living()} == {"worker-0.0": True, "server-0.1": False}


def test_hosts_are_shown_as_the_master_described_them_last_and_are_no_line_of_the_log():
    view = JobView({"workers": 1})
    for how in ("here", "away"):
        view.apply("hosts.measured", {"hosts": json.dumps([{"host": "a"}, {"host": "b", "state": how}])}, 1)
    state = view.state(2)
    assert [host.get("state") for host in state["hosts"]] == [None, "away"]
    assert list(view.lines) == []


def test_the_line_of_a_job_that_left_records_out_is_bad_and_its_counts_are_words():
    events = [
        ("job.started", {"job": "j", "workers": 2, "epochs": 1}, 1),
        ("view.published", {"generation": 2, "workers": 1, "why": "worker-1.0 is gone"}, 2),
    ]
    whole = board_of([*events, ("job.finished", {}, 3)])
    assert [(line[2], line[3]) for line in whole.lines] == [
        ("the job starts: 2 workers, 1 epoch", ""),
        ("generation 2: 1 worker (worker-1.0 is gone)", ""),
        ("the job is finished", "good"),
    ]
    aside = ("record.set_aside", {"record": 77, "where": "a.csv", "why": "torn"}, 2)
    assert [line[2:4] for line in board_of([*events, aside, ("job.finished", {}, 3)]).lines][-1] == [
        "the job is finished without 1 record",
        "bad",
    ]
