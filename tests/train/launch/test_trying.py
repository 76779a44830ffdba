"""The launcher says how the loss is tried before the first step, at most once in five seconds."""

import pytest

from trueline.train import job_dir
from trueline.train.job_dir import JobDir
from trueline.train.launch import trying


@pytest.fixture
def watch(tmp_path, monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr(trying.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("TRUELINE_JOB", str(tmp_path))
    monkeypatch.setenv("TRUELINE_REF", "worker-0.0")
    found = trying.TrialWatch(JobDir(tmp_path), lambda name, **fields: told.append((name, *fields.values())))

    def look(at):
        now[0] = at
        found.look()
        return told

    return found, look


def test_a_trial_that_takes_long_is_told_by_what_is_tried(watch):
    _, look = watch
    job_dir.note_trial("whole and in parts")
    assert look(4.0) == []
    assert look(6.0) == [("job.trying", "whole and in parts", 6.0)]
    assert len(look(60.0)) == 1, "the same again says nothing new"
    job_dir.note_trial("in double precision")
    assert look(61.0)[1:] == [("job.trying", "in double precision", 61.0)]


def test_nothing_is_told_before_a_trial_and_after_the_first_group_has_formed(watch):
    found, look = watch
    assert look(10.0) == []
    job_dir.note_trial("whole and in parts")
    found.hear("worker.started")
    found.hear("view.published")
    assert look(20.0) == []


def test_only_the_first_worker_of_a_job_says_what_it_tries(watch, monkeypatch, tmp_path):
    _, look = watch
    monkeypatch.setenv("TRUELINE_REF", "worker-1.0")
    job_dir.note_trial("beside that of the first worker")
    monkeypatch.delenv("TRUELINE_JOB")
    job_dir.note_trial("alone")
    assert look(10.0) == []
    assert list(tmp_path.iterdir()) == []
