"""Promises of what may be asked of a job, what a resumed one has to keep, and from where it goes on."""

import dataclasses
import math
import os

import pytest
import torch

from trueline import files
from trueline.checkpoint import checkpoint
from trueline.errors import UsageError
from trueline.train import api, settings
from trueline.train.job_dir import JobDir
from trueline.train.master.journal import Journal, apply_row
from trueline.train.master.progress import JobProgress
from trueline.train.membership.state import State
from trueline.train.settings import JobSettings, parse_workers

JOB = JobSettings(name="job", recipe="r.py", recipe_digest="d", workers=3, epochs=4, global_batch=8, seed=1)


@pytest.mark.parametrize(("text", "bounds"), [("3", (1, 3)), ("1", (1, 1)), ("2:8", (2, 8)), ("2:2", (2, 2))])
def test_a_number_of_workers_is_a_number_or_a_range(text, bounds):
    assert parse_workers(text) == bounds


@pytest.mark.parametrize("text", ["0", "-1", "3:2", "0:3", "a", "", "2:", ":3", "1.5"])
def test_what_is_no_number_of_workers_is_refused(text):
    with pytest.raises(UsageError, match="is no number of workers"):
        parse_workers(text)


LEAST = {"epochs": 1, "global_batch": 1, "keep": 1, "max_failures": 1, "lease_s": 1, "seed": 0, "micro_batch": 0,
         "clip_norm": 0, "ema": 0, "evaluate_every": 0, "patience": 0, "readers": 0, "checkpoint_every": 0,
         "set_aside": 0, "page_port": 0}  # fmt: skip


@pytest.mark.parametrize("name", LEAST)
def test_each_setting_has_a_least_value_that_it_may_have(name):
    least = LEAST[name]
    assert getattr(settings.apply_overrides(JOB, {name: least}, cores=4), name) == least
    with pytest.raises(UsageError, match=f"{name} is {least - 1}.*, expected at least {least}"):
        settings.apply_overrides(JOB, {name: least - 1}, cores=4)


def test_settings_that_cannot_be_are_refused_in_words():
    for name, value, words in (
        ("page_port", 65536, "at most 65535"), ("ema", 1.0, "below 1"), ("monitor", "f1", "no such metric"),
        ("clip_norm", math.nan, "a finite number"), ("lease_s", math.inf, "a finite number"),
        ("seed", "x", "wrong kind"), ("colour", 1, "no setting 'colour'"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            settings.apply_overrides(JOB, {name: value}, cores=4)
    assert settings.apply_overrides(JOB, {"page_port": 65535, "ema": 0.999, "seed": None}, cores=4).seed == 1
    for monitor in ("loss", "-loss", "f1", "-f1"):
        assert settings.apply_overrides(JOB, {"monitor": monitor}, cores=4, metrics={"f1": None}).monitor == monitor


@pytest.mark.parametrize(("cores", "bitwise", "threads"), [(8, False, 2), (2, False, 1), (8, True, 1), (3, False, 1)])
def test_workers_share_the_cores_and_bit_for_bit_takes_one_thread(cores, bitwise, threads):
    assert settings.apply_overrides(JOB, {"bitwise": bitwise}, cores=cores).threads == threads


CHANGES = {"epochs": 5, "global_batch": 9, "seed": 2, "micro_batch": 2, "shuffle": "windows", "bitwise": True,
           "precision": "bf16", "clip_norm": 1.0, "ema": 0.5}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_what_is_computed_cannot_change_in_a_resumed_job(name):
    with pytest.raises(UsageError, match=f"is another one: {name} was {getattr(JOB, name)}"):
        settings.refuse_changes(JOB, dataclasses.replace(JOB, **{name: CHANGES[name]}), "x")


def test_what_decides_nothing_of_the_result_may_change_in_a_resumed_job_and_its_recipe_may_not():
    other = {
        "workers": 9, "min_workers": 2, "checkpoint_every": 5, "keep": 9, "readers": 2, "lease_s": 9.0, "set_aside": 0,
        "autoscale": True, "patience": 3, "monitor": "loss", "device": "cpu", "threads": 4,
    }  # fmt: skip
    settings.refuse_changes(JOB, dataclasses.replace(JOB, **other), "x")
    with pytest.raises(UsageError, match=r"the recipe r\.py was changed since the job in x began"):
        settings.refuse_changes(JOB, dataclasses.replace(JOB, recipe_digest="e"), "x")


@pytest.fixture
def job_dir(tmp_path):
    """A job of a script that has applied nine steps."""
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    job = dataclasses.replace(JOB, recipe="", script=(str(script),), recipe_digest=files.sha256_file(script))
    settings.save(job, tmp_path)
    journal = Journal(tmp_path / "journal.sqlite")
    steps = [{"step": step, "generation": 1, "records": 8, "digest": step, "loss": 0.5, "workers": 1, "gap_ms": 0.0}
             for step in range(9)]  # fmt: skip
    view = {"generation": 1, "members": ["worker-0.0"], "cut_below": 1, "reason": "x"}
    journal.append(("VIEW", view), *(("COMMIT", step) for step in steps), ("CKPT", {"step": 9, "path": "/gone"}))
    journal.close()
    return tmp_path


def saved(job_dir, *steps):
    for step in steps:
        checkpoint.write(job_dir / "checkpoints", step=step, state={"w": torch.ones(3)}, facts={})


def known(job_dir):
    """What a master of the job finds in its journal."""
    state, account, journal = State(workers=3), JobProgress(), Journal(job_dir / "journal.sqlite")
    for kind, body in journal.rows():
        apply_row(state, kind, body, 0.0)
        account.apply(kind, body)
    journal.close()
    return state, account


def test_a_resumed_job_goes_on_from_its_newest_checkpoint_that_verifies(job_dir):
    saved(job_dir, 3, 6, 9)
    torn = job_dir / "checkpoints" / "step-00000009" / checkpoint.TENSORS
    torn.write_bytes(torn.read_bytes()[:-1])
    (job_dir / "checkpoints" / f"{files.PARTIAL}dead").mkdir()
    assert api.prepare_resume(job_dir) == job_dir
    state, _ = known(job_dir)
    assert (state.checkpoint_step, state.checkpoint) == (6, str(job_dir / "checkpoints" / "step-00000006"))
    assert not list((job_dir / "checkpoints").glob(f"{files.PARTIAL}*"))


def test_a_resumed_job_without_a_checkpoint_begins_from_its_first_step(job_dir):
    api.prepare_resume(job_dir)
    state, account = known(job_dir)
    assert (state.checkpoint, state.checkpoint_step, state.committed, account.logged) == ("", -1, 0, 0)


def test_a_resumed_job_has_the_workers_that_are_asked_for_now(job_dir):
    api.prepare_resume(job_dir, workers="2:5", checkpoint_every=7)
    found = settings.load(job_dir)
    assert (found.min_workers, found.workers, found.checkpoint_every, found.epochs) == (2, 5, 7, 4)
    api.prepare_resume(job_dir)
    assert (settings.load(job_dir).min_workers, settings.load(job_dir).workers) == (2, 5)


def test_a_job_that_runs_has_finished_or_would_be_another_one_is_not_resumed_and_left_as_it_is(job_dir):
    def refused(words, **how):
        before = (job_dir / "job.json").read_bytes(), known(job_dir)[0]
        with pytest.raises(UsageError, match=words):
            api.prepare_resume(job_dir, **how)
        assert ((job_dir / "job.json").read_bytes(), known(job_dir)[0]) == before

    refused("is another one: seed was 1", seed=2)
    held = JobDir(job_dir).hold()
    refused("is running")
    os.close(held)
    (job_dir / "summary.json").write_text("{}")
    refused("has finished already")
    (job_dir / "summary.json").unlink()
    (job_dir / "train.py").write_text("other\n")
    refused("was changed since the job")


def test_a_new_job_is_for_its_user_alone_and_a_folder_that_is_there_keeps_its_mode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        shared = tmp_path / "shared"
        shared.mkdir(mode=0o770)
        folders = [api._new(JOB, None), api._new(JOB, tmp_path / "named" / "job"), api._new(JOB, shared)]
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700, 0o770]
