"""What fails again and again is found, set aside and reported; nothing else is lost for it."""

from pathlib import Path

import pytest
from job_worlds import TINY, seen_counts

from trueline import errors, events
from trueline.state import checkpoint
from trueline.train.api import train
from trueline.train.settings import Fault

pytestmark = pytest.mark.jobs

POISONED = Path(__file__).parent / "recipes" / "poisoned.py"
BAD = 17


@pytest.mark.parametrize(
    ("how", "workers"),
    [("read", 1), ("read", 3), ("forward", 3), ("nan", 1), ("nan", 3), ("crash", 3)],  # alone a crash takes the state
)
def test_a_poison_record_is_set_aside_and_every_other_is_trained_once(tmp_path, monkeypatch, how, workers):
    monkeypatch.setenv("POISON", how)
    result = train(POISONED, workers=workers, job_dir=tmp_path / "job", checkpoint_every=1, max_failures=6)
    seen = checkpoint.read(result.checkpoint).state["model"]["seen"].round(decimals=6).tolist()
    assert seen[BAD] == 0
    # The mean of a step of 29 records counts each of them 30/29 times as much as one of 30 does.
    assert all(3.0 <= count <= 3 * 30 / 29 + 1e-6 for count in seen[:BAD] + seen[BAD + 1 :])
    assert [found["record"] for found in result.summary.facts["set_aside"]] == [BAD]
    assert result.summary.exactly_once
    assert "but 1 that failed wherever it went" in result.summary.as_text()


def test_a_record_that_kills_the_process_that_reads_it_ahead_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setenv("POISON", "decode")
    result = train(POISONED, workers=3, job_dir=tmp_path / "job", checkpoint_every=1, max_failures=6, readers=2)
    assert [found["record"] for found in result.summary.facts["set_aside"]] == [BAD]
    assert result.summary.exactly_once


def test_a_job_that_may_set_nothing_aside_ends_and_names_the_record(tmp_path, monkeypatch):
    monkeypatch.setenv("POISON", "read")
    with pytest.raises(errors.TrainError, match="17"):
        train(POISONED, workers=2, job_dir=tmp_path / "job", set_aside=0)


def test_a_worker_that_computes_for_ever_while_all_others_wait_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("POISON", "spin")
    lost = []
    with events.listening(lambda name, fields: lost.append(fields["why"]) if name == "worker.killed" else None):
        result = train(POISONED, workers=2, job_dir=tmp_path / "job")
    assert [why for why in lost if "worker-1.0" in why or "comput" in why]
    assert result.summary.exactly_once


def test_a_slot_whose_workers_die_before_a_step_is_put_in_quarantine_and_the_others_finish(tmp_path):
    faults = [Fault(step=0, slot=2, incarnation=life, phase="entering") for life in range(3)]
    result = train(TINY, workers="1:3", job_dir=tmp_path / "job", faults=faults, epochs=40)
    assert seen_counts(result.checkpoint) == [40.0]
    assert [found["slot"] for found in result.summary.facts["quarantined"]] == [2]
