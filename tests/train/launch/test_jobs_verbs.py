"""Promises to operators: a job survives the terminal, is found, told of, ended and resumed through its folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trueline import errors
from trueline.checkpoint import checkpoint
from trueline.cli import app
from trueline.cli.jobs.logs import log_of, read_lines
from trueline.cli.options import checkpoint_path
from trueline.train import api
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir
from trueline.train.launch import jobs
from trueline.train.launch.launcher import detach
from trueline.train.master.journal import Journal
from trueline.train.settings import Fault
from worlds.jobs import STEPS, TINY, JobGate, seen_counts
from worlds.waiting import until, until_ended

pytestmark = pytest.mark.jobs


def said_by(capsys, *arguments) -> str:
    assert app.run([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def family(job: Path) -> list[psutil.Process]:
    launcher = psutil.Process(JobDir(job).read_launch().pid)
    return [launcher, *launcher.children(recursive=True)]


def test_a_detached_job_outlives_its_command_is_scaled_halted_after_a_checkpoint_and_resumed_exactly(
    tmp_path, capsys, monkeypatch
):
    job, gate = tmp_path / "job", JobGate(tmp_path, monkeypatch, first=50)
    options = [
        "--workers",
        "2",
        "--epochs",
        "300",
        "--checkpoint-every",
        "9999",
        "--job",
        str(job),
        "--detach",
        "--json",
    ]
    command = [sys.executable, "-m", "trueline", "train", str(TINY), *options]
    told = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    assert json.loads(told.stdout) == {"job": str(job), "pid": JobDir(job).read_launch().pid}
    until(lambda: jobs.read_job(job).step > 45, "the job takes steps")
    assert jobs.read_job(job).state == "running"
    assert "3 workers from now on" in said_by(capsys, "scale", job, 3)
    until(lambda: len(jobs.status(job)["members"]) == 3 and jobs.status(job)["generation"] > 1, "the job has 3 workers")
    assert "worker-2.0" in said_by(capsys, "status", job)
    with pytest.raises(errors.UsageError, match="fewer than the job's minimum of 1"):
        jobs.scale(job, 0)
    with pytest.raises(errors.UsageError, match="is running"):
        api.prepare_resume(job)
    running = family(job)
    left = json.loads(said_by(capsys, "halt", job, "--json"))
    until_ended(one.pid for one in running)
    assert (left["state"], left["why"]) == ("stopped", "trueline halt")
    assert left["checkpoint"] > 45  # nobody but `halt` asked for one
    assert (left["lost"], left["step"]) == (0, left["checkpoint"])
    assert "Ctrl-C" not in (job / "logs" / "launcher.log").read_text()
    gate.open()
    result = api.launch(api.prepare_resume(job, workers=2))
    assert seen_counts(result.checkpoint) == [300.0]
    assert jobs.read_job(job).state == "finished"
    assert f"job  finished  2400/2400  -        {jobs.read_job(job).loss:.4g}" in said_by(
        capsys, "jobs", "--runs", tmp_path
    )


def test_a_job_whose_processes_are_all_told_to_end_at_once_says_the_step_of_its_checkpoint(tmp_path, monkeypatch):
    """As a scheduler cancels a job: master and agent die of it, workers leave, and the launcher asks the master's
    successor for the checkpoint of the last step, while a regular one is written after every step."""
    job = tmp_path / "job"
    JobGate(tmp_path, monkeypatch, first=5)
    options = ["--workers", "2", "--epochs", "4000", "--checkpoint-every", "1", "--job", str(job), "--detach"]
    subprocess.run([sys.executable, "-m", "trueline", "train", str(TINY), *options], check=True, start_new_session=True)
    until(lambda: jobs.read_job(job).checkpoint > 5, "the job takes steps")
    running = family(job)
    for one in running:
        one.send_signal(signal.SIGTERM)
    until_ended(one.pid for one in running)
    ended = jobs.read_job(job)
    assert (ended.state, ended.why) == ("stopped", "the launcher got SIGTERM")
    assert (ended.step, ended.checkpoint) == (ended.checkpoint, checkpoint.latest(job / "checkpoints").step)
    applied = [json.loads(line) for line in JobDir(job).events.read_text().splitlines()]
    applied = [one["fields"]["step"] + 1 for one in applied if one["name"] == "step.applied"]
    assert ended.checkpoint == max(applied), "no step is done again"


def test_a_job_that_waits_for_its_least_number_of_workers_is_halted_with_all_that_was_applied(tmp_path, monkeypatch):
    """The replacement of the worker that dies never gets as far as its model."""
    recipe = recipe_with(
        tmp_path, "if os.environ.get('TRUELINE_REF', '').endswith('.1'):", "    Path(os.environ['NEVER']).read_text()"
    )
    os.mkfifo(tmp_path / "never")
    monkeypatch.setenv("NEVER", str(tmp_path / "never"))
    faults = [Fault(step=8, slot=1)]
    job = api.prepare(
        recipe, workers="2:2", epochs=4000, checkpoint_every=9999, faults=faults, job_dir=tmp_path / "job"
    )
    pid = detach(job)
    until(lambda: "worker-1.1" in (jobs.status(job) or {}).get("pending", ()), "one worker is left")
    running = family(job)
    left = jobs.halt(job)
    until_ended([pid, *(one.pid for one in running)])
    assert (left.state, left.checkpoint, left.step) == ("stopped", 8, 8)


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_foreground_job_that_is_told_to_end_leaves_nothing_and_says_why(tmp_path, kill, monkeypatch):
    job = tmp_path / "job"
    JobGate(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "trueline", "train", str(TINY), "--epochs", "4000", "--job", str(job)]
    as_usual = signal.signal(kill, signal.SIG_DFL)  # whoever runs the tests may ignore it, under nohup for one
    shell = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(kill, as_usual)
    try:
        until(lambda: (job / "job.json").exists() and jobs.read_job(job).step > 5, "the job takes steps")
        running = family(job)
        shell.send_signal(kill)
        said = shell.communicate(timeout=100)[1]
    finally:
        shell.kill()
    until_ended(one.pid for one in running)
    assert (
        f"error: the job was stopped: the launcher got {kill.name}\nhint: continue with `trueline resume {job}`" in said
    )
    assert (jobs.read_job(job).state, jobs.read_job(job).why) == ("stopped", f"the launcher got {kill.name}")
    assert not (job / "secret").exists()


def test_a_job_whose_launcher_was_killed_is_dead_and_can_be_resumed(tmp_path, capsys, monkeypatch):
    JobGate(tmp_path, monkeypatch, first=40)
    job = api.prepare(TINY, workers=1, epochs=4000, checkpoint_every=20, job_dir=tmp_path / "job")
    pid = detach(job)
    until(lambda: jobs.read_job(job).checkpoint >= 20, "the job has a checkpoint")
    running = family(job)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until_ended(one.pid for one in running)
    assert jobs.read_job(job).state == "dead"
    assert f"continue it with: trueline resume {job}" in said_by(capsys, "status", job)
    with pytest.raises(errors.UsageError, match="is not running: it is dead"):
        jobs.scale(job, 2)
    assert api.prepare_resume(job) == job


def test_a_launch_that_cannot_begin_points_to_its_log(tmp_path):
    job = api.prepare(TINY, job_dir=tmp_path / "job")
    (job / "job.json").write_text("no json")
    with pytest.raises(errors.TrainError, match="ended before it began") as caught:
        detach(job)
    assert "logs/launcher.log" in caught.value.hint


def test_two_launchers_of_one_job_are_one_too_many(tmp_path):
    lock = JobDir(tmp_path).hold()
    assert JobDir(tmp_path).is_held()
    with pytest.raises(errors.UsageError, match="is running"):
        JobDir(tmp_path).hold()
    os.close(lock)
    assert not JobDir(tmp_path).is_held()


def recipe_with(tmp_path, *lines_of_it) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(TINY.read_text() + "\n".join(lines_of_it))
    return path


def test_what_is_asked_for_wins_over_the_recipe_and_the_recipe_over_what_is_usual(tmp_path):
    recipe = recipe_with(tmp_path, "clip_norm = 1", "ema = 0.9", "precision = 'bf16'")
    job = job_settings.load(api.prepare(recipe, job_dir=tmp_path / "job", ema=0.5, workers="2:4", keep=7))
    assert (job.clip_norm, job.ema, job.precision, job.epochs, job.keep) == (1.0, 0.5, "bf16", 6, 7)
    assert (job.min_workers, job.workers, job.lease_s, job.name) == (2, 4, 3.0, "job")


def test_bit_for_bit_means_one_thread_whoever_shares_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    threads = [
        job_settings.load(api.prepare(TINY, workers=n, bitwise=bitwise, job_dir=tmp_path / f"{n}{bitwise}")).threads
        for n, bitwise in ((1, True), (4, True), (1, None), (4, None))
    ]
    assert threads == [1, 1, 8, 2]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"epochs": 0}, "epochs is 0, expected at least 1"),
        ({"epochs": "3"}, "Expected `int`, got `str` - at `$.epochs`"),
        ({"ema": 1.0}, "ema is 1.0, expected at least 0 and below 1"),
        ({"precision": "fp8"}, "Invalid enum value 'fp8' - at `$.precision`"),
        ({"monitor": "-accuracy"}, "the recipe has no such metric"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"microbatch": 4}, "there is no setting 'microbatch'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_there_is_a_folder(tmp_path, wanted, words):
    with pytest.raises(errors.UsageError) as caught:
        api.prepare(TINY, job_dir=tmp_path / "job", **wanted)
    assert words in str(caught.value)
    assert not (tmp_path / "job").exists()


def test_a_resumed_job_keeps_what_decides_its_result_and_may_change_the_rest(tmp_path):
    job = api.prepare(TINY, job_dir=tmp_path / "job", micro_batch=5, workers=2)
    for name, value in {"epochs": 7, "micro_batch": 6, "bitwise": True, "precision": "bf16", "ema": 0.5}.items():
        with pytest.raises(errors.UsageError, match=f"another one: {name} was"):
            api.prepare_resume(job, **{name: value})
    api.prepare_resume(job, checkpoint_every=3, compile=True)
    again = job_settings.load(api.prepare_resume(job, keep=1, workers="2:5"))
    assert (again.micro_batch, again.checkpoint_every, again.compile, again.keep) == (5, 3, True, 1)
    assert (again.min_workers, again.workers) == (2, 5)


def test_a_changed_script_is_another_job(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text("print('one')")
    job = api.prepare_script(script, ["--lr", "0.1"], job_dir=tmp_path / "job")
    assert job_settings.load(job).script == (str(script), "--lr", "0.1")
    script.write_text("print('two')")
    with pytest.raises(errors.UsageError, match="was changed since the job"):
        api.prepare_resume(job)


def test_a_job_is_found_by_name_or_path_and_a_misspelt_one_gets_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = api.prepare(TINY)
    assert job == tmp_path / "runs" / "tiny-1"
    assert jobs.find_job("tiny-1") == jobs.find_job(job) == jobs.find_job("runs/tiny-1") == job
    with pytest.raises(errors.UsageError, match=r"no job 'tny-1' \(in runs: tiny-1\)") as caught:
        jobs.find_job("tny-1")
    assert caught.value.hint == "did you mean 'tiny-1'?"


def test_steps_that_were_taken_back_are_not_counted(tmp_path):
    job = api.prepare(TINY, job_dir=tmp_path / "job")
    assert (jobs.read_job(job).state, jobs.read_job(job).step) == ("prepared", 0)
    journal = Journal(job / "journal.sqlite")
    journal.append(("COMMIT", {"step": 11, "loss": 0.5}), ("CKPT", {"step": 8}), ("TRUNCATE", {"steps": 9}))
    assert (jobs.read_job(job).step, jobs.read_job(job).checkpoint, jobs.read_job(job).loss) == (9, 8, 0.5)
    journal.append(("COMMIT", {"step": 9, "loss": 0.4}))
    assert (jobs.read_job(job).step, jobs.read_job(job).loss) == (10, 0.4)
    journal.close()


def test_the_story_of_a_job_is_told_in_words_with_the_time_of_day(tmp_path, capsys):
    job = api.prepare(TINY, job_dir=tmp_path / "job")
    JobDir(job).record("job.started", job="tiny", workers=2, epochs=6)
    for step in range(STEPS):
        JobDir(job).record("step.applied", step=step, total=STEPS, loss=0.5, records=30, workers=2, at_ns=step * 10**8)
    JobDir(job).record("worker.quarantined", slot=1, why="killed by SIGSEGV 3 times")
    with (job / "events.jsonl").open("a") as file:
        file.write('{"torn')
    told = [line.split(" ", 1)[1] for line in said_by(capsys, "logs", job).splitlines()]
    assert told[0] == "  job tiny: 2 workers, 6 epochs"
    assert told[-2] == "training 48/48 epoch=6/6 loss=0.5 workers=2 records_per_s=300"
    assert told[-1] == "  worker 1 is in quarantine: killed by SIGSEGV 3 times"
    assert 10 <= sum(line.startswith("training") for line in told) <= 13


def test_a_log_is_followed_while_somebody_may_write_and_read_to_its_end(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("one\ntw")

    def going_on():
        if log.read_text().endswith("tw"):
            with log.open("a") as file:
                file.write("o\nthree\n")
            return True
        return False

    assert list(read_lines(log, going_on)) == ["one\n", "two\n", "three\n"]
    assert list(read_lines(tmp_path / "absent", lambda: False)) == []


def test_the_log_of_a_worker_is_that_of_its_newest_life_if_nobody_says_which(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("master", "worker-1.0", "worker-1.10", "worker-1.9"):
        (tmp_path / "logs" / f"{name}.log").touch()
    found = [log_of(JobDir(tmp_path), which).name for which in ("master", "worker-1.0", "worker-1", "1", "events")]
    assert found == ["master.log", "worker-1.0.log", "worker-1.10.log", "worker-1.10.log", "events.jsonl"]
    with pytest.raises(errors.UsageError, match="has no log of 'mastr'") as caught:
        log_of(JobDir(tmp_path), "mastr")
    assert caught.value.hint == "did you mean 'master'?"


def test_a_place_for_checkpoints_that_cannot_be_used_is_refused_before_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    for place, kind in ((tmp_path / "file" / "x", errors.StorageError), ("zz://host/x", errors.StorageError)):
        with pytest.raises(kind):
            api.prepare(TINY, job_dir=tmp_path / "job", checkpoints=str(place))
    (tmp_path / "taken" / "step-00000046").mkdir(parents=True)
    with pytest.raises(errors.UsageError, match="holds checkpoints already, of step 46"):
        api.prepare(TINY, job_dir=tmp_path / "job", checkpoints=str(tmp_path / "taken"))
    assert not (tmp_path / "job").exists()


def test_a_kill_of_a_worker_that_the_job_does_not_have_is_refused(tmp_path):
    with pytest.raises(errors.UsageError, match="there is no worker 2 to kill: 2 workers, numbered from 0"):
        api.prepare(TINY, workers=2, faults=[job_settings.Fault(step=1, slot=2)], job_dir=tmp_path / "job")
    with pytest.raises(errors.UsageError, match="there is no worker 2 to kill: 2 workers, numbered from 0"):
        api.prepare_script(__file__, workers=2, faults=[job_settings.Fault(step=1, slot=2)], job_dir=tmp_path / "job")


def test_a_job_that_monitors_is_its_best_checkpoint_and_another_one_its_last(tmp_path):
    for name, wanted in (("plain", {}), ("monitored", {"monitor": "loss"})):
        job = api.prepare(TINY, job_dir=tmp_path / name, **wanted)
        for step, evaluations in ((4, []), (8, [{"step": 4, "best": True}, {"step": 8, "best": False}])):
            last = checkpoint.write(job / "checkpoints", step=step, state={}, facts={"evaluations": evaluations})
        result = api.TrainResult(checkpoint=last, job_dir=job, summary=api.JobSummary({"best": {"step": 4}}))
        assert result.chosen.name == ("step-00000004" if wanted else "step-00000008")
        assert checkpoint_path(str(job)) == result.chosen
