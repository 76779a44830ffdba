"""Promises of hybrid jobs: whatever dies, each record counts once in the tables and once in the dense parameters."""

import threading
from pathlib import Path

import pytest
import torch

from trueline import events
from trueline.batch.evaluate import evaluate
from trueline.checkpoint import checkpoint
from trueline.errors import JobStopped, RecipeError
from trueline.train.api import train
from trueline.train.launch import jobs
from trueline.train.settings import Fault
from worlds.counted import ENDLESS, LaunchedJob, count_uneven, count_wrong
from worlds.gates import StepGate
from worlds.scaler import Scaler

pytestmark = pytest.mark.jobs
RECIPE = Path(__file__).parent / "recipes" / "hybrid.py"


def run(job_dir, *strikes, **settings):
    with StepGate(job_dir, *strikes):
        return train(RECIPE, job_dir=job_dir, strategy="hybrid", **settings)


def read_state(result):
    return checkpoint.read(result.checkpoint).state["model"]


def lost_or_repeated(result, epochs=2):
    """Records that the tables do not have `epochs` times; the certificates have counted those of the dense part."""
    assert result.summary.exactly_once
    return count_wrong(result, epochs)


def expect_equal(actual, expected, names=("classify.weight", "items.ids", "items.rows")):
    actual, expected = read_state(actual), read_state(expected)
    for name in names:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_step_is_the_synchronous_one_of_the_servers_for_any_number_of_workers(tmp_path):
    plain = train(RECIPE, job_dir=tmp_path / "ps", strategy="ps", staleness=0, workers=1)
    found = run(tmp_path / "hybrid", workers=3, servers=2)
    assert lost_or_repeated(found) == 0
    expect_equal(found, plain)


def test_the_norm_of_all_gradients_of_a_step_is_clipped_for_any_number_of_workers_whoever_dies(tmp_path):
    """One worker of the servers' strategy has the whole gradient; a norm of 0.02 is exceeded in every step."""
    recipe = RECIPE.with_name("served.py")
    plain = train(recipe, job_dir=tmp_path / "ps", strategy="ps", staleness=0, workers=1, clip_norm=0.02)
    strikes = [(9, "server-1"), (30, "master")]
    with StepGate(tmp_path / "job", *strikes):
        found = train(recipe, job_dir=tmp_path / "job", strategy="hybrid", workers=3, servers=2, clip_norm=0.02)
    names = ("score.weight", "items.ids", "items.rows")
    expect_equal(found, plain, names)
    free = train(recipe, job_dir=tmp_path / "free", strategy="ps", staleness=0, workers=1)
    with pytest.raises(AssertionError):
        expect_equal(found, free, names)


def test_workers_servers_and_the_master_die_and_each_record_counts_once(tmp_path):
    strikes = [(5, "worker-0"), (15, "server-1"), (25, "master"), (40, "server-0"), (50, "worker-1"), (60, "master")]
    assert lost_or_repeated(run(tmp_path / "job", *strikes, workers=2, servers=2)) == 0


def test_a_server_that_dies_while_the_master_is_away_is_started_by_the_next_one(tmp_path):
    strikes = [(10, "server-1"), (30, "master"), (30, "server-1")]
    assert lost_or_repeated(run(tmp_path / "job", *strikes, workers=2, servers=2)) == 0


@pytest.mark.parametrize("phase", ["backward", "allreduced", "applied"])
def test_a_worker_dies_in_any_part_of_a_step_and_each_record_counts_once(tmp_path, phase):
    faults = [Fault(step=step, slot=slot, incarnation=-1, phase=phase) for slot, step in enumerate((9, 30))]
    saved = (20, "checkpoint.saved")  # the other one may die before the first is back, and no state would be left
    found = run(tmp_path / "job", saved, workers=2, servers=2, faults=faults, checkpoint_every=8)
    assert lost_or_repeated(found) == 0


def test_all_workers_die_and_the_tables_go_back_to_the_checkpoint_with_them(tmp_path):
    faults = [Fault(step=30, slot=0, incarnation=-1, phase="backward")]
    saved = (20, "checkpoint.saved")
    found = run(tmp_path / "job", saved, workers=1, servers=2, faults=faults, checkpoint_every=12)
    assert lost_or_repeated(found) == 0
    expect_equal(found, run(tmp_path / "undisturbed", workers=1, servers=1))


def test_a_job_that_lost_every_process_goes_on_from_its_checkpoint(tmp_path):
    launched = LaunchedJob(RECIPE, tmp_path / "job", strategy="hybrid", workers=2, servers=2, checkpoint_every=12)

    def strike():
        launched.wait_for("checkpoint.saved")
        launched.kill_all()

    with StepGate(launched.folder, (20, strike)):
        launched.run()
    assert lost_or_repeated(train(RECIPE, job_dir=launched.folder, resume=True, workers=1)) == 0


def test_a_job_is_evaluated_while_it_trains_as_its_checkpoint_is_afterwards(tmp_path):
    """In bfloat16, by three workers; the rows that an evaluation looks up leave nothing in the next step."""
    recipe = RECIPE.with_name("served.py")
    found = train(
        recipe,
        job_dir=tmp_path / "job",
        strategy="hybrid",
        workers=3,
        servers=2,
        evaluate_every=16,
        precision="bf16",
        monitor="loss",
        patience=9,
    )
    assert found.chosen == checkpoint.best(tmp_path / "job" / "checkpoints")
    evaluations = checkpoint.read_manifest(found.checkpoint)["evaluations"]
    assert [one["step"] for one in evaluations] == [16, 32, 48, 64, 80]
    assert found.summary.exactly_once
    after = evaluate(recipe, found.checkpoint)
    assert evaluations[-1]["loss"] == pytest.approx(after.loss, rel=2e-2)
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]


def test_averages_of_dense_parameters_and_rows_are_evaluated_and_kept_for_any_number_of_workers(tmp_path):
    """A server dies and a worker joins on the way; what the job's evaluation found is that of its checkpoint."""
    recipe = RECIPE.with_name("served.py")
    settings = {"strategy": "hybrid", "ema": 0.95, "evaluate_every": 40}
    one = train(recipe, job_dir=tmp_path / "one", workers=1, servers=1, **settings)
    with StepGate(tmp_path / "job", (15, "server-0"), (30, "worker-1")):
        found = train(recipe, job_dir=tmp_path / "job", workers=2, servers=2, **settings)
    average, expected = (checkpoint.read(each.checkpoint).state["ema"] for each in (found, one))
    for name in ("score.weight", "items.ids", "items.rows"):
        torch.testing.assert_close(average[name], expected[name], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(average["items.rows"], read_state(found)["items.rows"], atol=1e-3)
    last = checkpoint.read_manifest(found.checkpoint)["evaluations"][-1]
    assert last["loss"] == pytest.approx(evaluate(recipe, found.checkpoint).loss, rel=1e-4)


def test_a_model_without_tables_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no table for the servers"):
        train(RECIPE.with_name("dense.py"), job_dir=tmp_path / "dense", strategy="hybrid", workers=1)


class Conductor:
    """Of pairs of workers and a function: calls it, in a thread, once a group of that size has applied 20 steps."""

    def __init__(self, *asked):
        self.asked, self.workers, self.steps = list(asked), 0, 0

    def __call__(self, name, fields):
        if name == "view.published":
            self.workers, self.steps = fields["workers"], 0
        elif name == "step.applied":
            self.steps += 1
        if self.asked and self.steps >= 20 and self.workers == self.asked[0][0]:
            _, ask = self.asked.pop(0)
            threading.Thread(target=ask, daemon=True).start()


def conduct(job, *asked, **settings):
    """Trains until the last of these functions has halted the job; returns its newest checkpoint."""
    conductor = Conductor(*asked)
    with events.listening(conductor), pytest.raises(JobStopped):
        train(RECIPE, job_dir=job, **settings)
    assert not conductor.asked
    return checkpoint.latest(job / "checkpoints")


def test_workers_come_and_go_and_a_halted_job_continues_with_other_numbers_of_them(tmp_path):
    job = tmp_path / "job"

    def halt():
        jobs.halt(job)

    halted = conduct(
        job, (2, lambda: jobs.scale(job, 3)), (3, lambda: jobs.scale(job, 1)), (1, halt),
        strategy="hybrid", workers=2, servers=2, epochs=ENDLESS, checkpoint_every=1000,
    )  # fmt: skip
    assert count_uneven(halted) == 0
    resumed = conduct(job, (3, halt), resume=True, workers=3)
    assert resumed.step > halted.step
    assert count_uneven(resumed) == 0


def test_a_halted_job_goes_on_with_another_number_of_servers(tmp_path):
    job = tmp_path / "job"
    conduct(job, (1, lambda: jobs.halt(job)), strategy="hybrid", workers=1, servers=2, epochs=ENDLESS,
            checkpoint_every=1000)  # fmt: skip
    resumed = threading.Event()

    def note(name, fields):
        if name == "servers.scaled" and not resumed.is_set():
            resumed.set()
            threading.Thread(target=jobs.halt, args=[job], daemon=True).start()

    with events.listening(note), pytest.raises(JobStopped):
        train(RECIPE, job_dir=job, resume=True, servers=3)
    assert len(list((job / "ps" / "cuts").glob("step-*/server-2.part"))) == 1
    assert count_uneven(checkpoint.latest(job / "checkpoints")) == 0


@pytest.mark.parametrize("victim", ["", "master", "server-0", "worker-1"])
def test_servers_are_added_and_taken_while_training_goes_on_whoever_dies_meanwhile(tmp_path, victim):
    job = tmp_path / "job"
    scaler = Scaler(job, [5, 2], victim)
    with events.listening(scaler), pytest.raises(JobStopped):
        train(RECIPE, job_dir=job, strategy="hybrid", workers=2, servers=3, epochs=ENDLESS, checkpoint_every=50)
    assert (scaler.reached, len(scaler.killed)) == (2, 2 if victim else 0)
    assert count_uneven(checkpoint.latest(job / "checkpoints")) == 0


@pytest.mark.parametrize("every", [1, 7])
def test_servers_are_added_and_taken_between_checkpoints_however_often_these_are_due(tmp_path, every):
    job = tmp_path / "job"
    scaler = Scaler(job, [5, 2], "")
    with events.listening(scaler), pytest.raises(JobStopped):
        train(RECIPE, job_dir=job, strategy="hybrid", workers=2, servers=3, epochs=ENDLESS, checkpoint_every=every)
    assert scaler.reached == 2


def test_the_steps_of_a_job_whose_servers_change_are_those_of_one_that_keeps_them(tmp_path):
    """The job is halted when its servers are three, at whatever step; another one has a checkpoint of that step."""
    recipe, job, plain, saved = RECIPE.with_name("served.py"), tmp_path / "job", tmp_path / "plain", dict[int, str]()

    def call(act, folder, **wanted):
        threading.Thread(target=act, args=[folder], kwargs=wanted, daemon=True).start()

    def change(name, fields):
        if name == "step.applied" and fields["step"] == 20:
            call(jobs.scale, job, servers=3)
        if name == "servers.scaled":
            call(jobs.halt, job)

    def keep(name, fields):
        if name == "checkpoint.saved" and not saved:
            saved[fields["step"]] = fields["path"]
            call(jobs.halt, plain)

    settings = {"strategy": "hybrid", "epochs": ENDLESS, "clip_norm": 0.02}
    with events.listening(change), pytest.raises(JobStopped):
        train(recipe, job_dir=job, workers=2, servers=1, checkpoint_every=10**6, **settings)
    found = checkpoint.latest(job / "checkpoints")
    with events.listening(keep), pytest.raises(JobStopped):
        train(recipe, job_dir=plain, workers=1, servers=1, checkpoint_every=found.step, **settings)
    expected = checkpoint.read(saved[found.step])
    for name in ("score.weight", "items.ids", "items.rows"):
        torch.testing.assert_close(found.state["model"][name], expected.state["model"][name], rtol=1e-3, atol=1e-4)
