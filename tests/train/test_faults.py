"""Promises of injected faults and of a job's settings that a script decides."""

import dataclasses
import json
import signal

import pytest

from trueline.errors import UsageError
from trueline.train import api, settings
from trueline.train import faults as injected
from trueline.train.faults import Faults
from trueline.train.link.local_client import LocalLink
from trueline.train.settings import Fault, JobSettings
from trueline.wire import train_pb2 as pb

JOB = JobSettings(name="job", recipe="", recipe_digest="d", workers=1, epochs=0, global_batch=0, seed=0)


@pytest.fixture
def struck(monkeypatch, tmp_path):
    """The signals that a worker sent to itself."""
    found = []
    monkeypatch.setattr(injected.os, "kill", lambda pid, number: found.append(number))
    monkeypatch.setenv("TRUELINE_JOB", str(tmp_path))
    return found


def test_a_fault_strikes_its_slot_and_incarnation_once_at_its_phase_and_not_before_its_step(struck):
    fault = Fault(step=3, slot=1, incarnation=0, phase="applied", signal=9)
    for ref in ("worker-0.0", "worker-1.1"):
        Faults((fault,), ref).at("applied", 9)
    mine = Faults((fault,), "worker-1.0")
    mine.at("applied", 2)
    mine.at("before", 3)
    assert struck == []
    mine.at("applied", 5)  # the first chance after its step
    mine.at("applied", 6)
    assert struck == [signal.SIGKILL]


def test_a_fault_of_any_incarnation_strikes_once_in_the_job_and_says_where(struck, tmp_path):
    fault = Fault(step=3, slot=1, incarnation=-1, phase="before", signal=19)
    for ref in ("worker-1.0", "worker-1.1"):
        Faults((Fault(step=9, slot=0), fault), ref).at("before", 4)
    assert struck == [signal.SIGSTOP]
    told = json.loads((tmp_path / "faults" / "1").read_text())
    assert (told["worker"], told["step"], told["phase"], told["signal"]) == ("worker-1.0", 4, "before", 19)


def test_without_faults_nothing_happens(struck):
    Faults((), "no ref at all").at("before", 0)
    assert struck == []


def test_the_first_script_says_what_a_step_is_and_another_that_says_otherwise_is_refused(tmp_path):
    settings.save(JOB, tmp_path)
    said = {"epochs": 3, "global_batch": 8, "seed": 5}
    assert settings.settle(tmp_path, **said) == settings.load(tmp_path) == dataclasses.replace(JOB, **said)
    assert settings.settle(tmp_path, **said).epochs == 3
    for name in said:
        with pytest.raises(UsageError, match=f"made an Elastic with {name}=7, and the job began with {said[name]}"):
            settings.settle(tmp_path, **{**said, name: 7})
    assert settings.load(tmp_path).seed == 5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"schema": 2}, "settings that this version does not know: schema"),
        ({"quorum": 3, "lanes": 1}, "does not know: lanes, quorum"),
        ({"faults": [{"step": 1, "slot": 0, "delay_s": 2}]}, "unknown field `delay_s`"),
    ],
)
def test_a_job_with_settings_of_a_newer_version_is_refused_wherever_it_is_loaded(tmp_path, more, words):
    settings.save(JOB, tmp_path)
    file = tmp_path / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    for load in (settings.load, api.prepare_resume):
        with pytest.raises(UsageError, match=words) as refused:
            load(tmp_path)
        assert "checkpoints can still be evaluated" in refused.value.hint


def test_alone_one_vote_sets_a_record_aside_for_good_and_cuts_the_group():
    line = LocalLink()
    line.join(pb.Hello(store="a:1", num_records=4, total_steps=2))
    for record in (7, 3, 7):
        line.suspect(0, record, "odd", "")
    view = line.view
    assert (list(view.set_aside), view.generation, view.cut_below) == ([3, 7], 4, 4)
    assert (line.wait_view(3, 0.0), line.wait_view(4, 0.0)) == (view, None)
