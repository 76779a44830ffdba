"""What fails again and again is found, set aside and reported; nothing else is lost for it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trueline import errors, events
from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds import TESTS
from worlds.jobs import TINY, JobGate, seen_counts

pytestmark = pytest.mark.jobs

POISONED = TESTS / "train" / "recipes" / "poisoned.py"
DRAWN = TESTS / "train" / "recipes" / "drawn.py"
BAD = 17


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        ("read", 1),
        ("read", 3),
        ("forward", 3),
        ("loss", 3),
        ("nan", 1),
        ("nan", 3),
        ("gradient", 3),
        ("crash", 3),
    ],  # alone a crash takes the state
)
def test_a_poison_record_is_set_aside_and_every_other_is_trained_once(tmp_path, monkeypatch, how, workers):
    """A crash may take all that hold the state, one after the other: by then a checkpoint is written."""
    monkeypatch.setenv("POISON", how)
    monkeypatch.setenv("CRASHES_AFTER", str(tmp_path / "saved"))
    with events.listening(lambda name, _: (tmp_path / "saved").touch() if name == "checkpoint.saved" else None):
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


def two_files(folder: Path) -> Path:
    """What `drawn` reads: 240 records in a.parquet and b.parquet, numbered through."""
    values = np.random.default_rng(0).standard_normal((240, 8))
    for name, start, stop in (("a", 0, 100), ("b", 100, 240)):
        rows = values[start:stop]
        columns = {"id": np.arange(start, stop), "label": (rows[:, 0] > 0).astype(np.int64)}
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(rows.ravel(), 8), **columns})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)
    return folder


@pytest.mark.parametrize(
    ("kind", "how", "workers"),
    [("mixed", "feed", 3), ("weighted", "feed", 1), ("weighted", "feed", 3), ("bucketed", "feed", 3),
     ("weighted", "crash", 3)],
)  # fmt: skip
def test_a_poison_record_is_left_out_wherever_it_would_be_drawn_and_every_other_draw_is_trained_once(
    tmp_path, monkeypatch, kind, how, workers
):
    for name, value in {"DRAWN_FILES": str(two_files(tmp_path)), "DRAWN": kind, "DRAWN_HOW": how}.items():
        monkeypatch.setenv(name, value)
    bad = 112
    result = train(DRAWN, workers=workers, job_dir=tmp_path / "job", checkpoint_every=1, max_failures=6)
    facts = result.summary.facts
    (aside,) = facts["set_aside"]
    part = ", part 2 of 2" if kind == "mixed" else ""
    assert (aside["record"], aside["where"]) == (bad, f"record 12 of {tmp_path}/b.parquet#0{part}")
    assert f"set aside: record 112 (record 12 of {tmp_path}/b.parquet#0{part})" in result.summary.as_text()

    order = load_recipe(DRAWN).source("training").order
    seen: Counter[int] = Counter()
    for epoch, certificate in enumerate(facts["certificates"]):
        draws = order.at(np.arange(240), epoch=epoch)
        out = np.flatnonzero(draws == bad).tolist()
        assert certificate["set_aside"] == out
        assert (certificate.get("set_aside_of") or out) == [bad] * len(out)
        assert certificate["records"] + len(out) == 240
        for start in range(0, 240, 30):
            step = draws[start : start + 30]
            kept = step[step != bad].tolist()
            for record in kept:
                seen[record] += 30 / len(kept)  # the mean of a short step counts each of its records for more
    assert sum(len(one["set_aside"]) for one in facts["certificates"]) > 1, "drawn more often than it was tried"
    counted = checkpoint.read(result.checkpoint).state["model"]["seen"]
    np.testing.assert_allclose(counted, [seen[record] for record in range(240)], atol=1e-9)
    assert result.summary.exactly_once
    assert "but the draws of 1 that failed wherever it went" in result.summary.as_text()


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


class Quarantines:
    """Opens the gate at the first quarantine: what was started until then, and every quarantine. A job that takes its
    time afterwards may try the slot again."""

    def __init__(self, gate: JobGate) -> None:
        self.gate, self.started, self.found = gate, 0, []

    def __call__(self, name: str, fields: dict) -> None:
        if name == "worker.started" and not self.found:
            self.started += 1
        if name == "worker.quarantined":
            self.found.append((fields["slot"], fields["why"]))
            self.gate.open()


def test_a_slot_whose_workers_fail_again_and_again_is_put_in_quarantine_and_the_others_finish(tmp_path, monkeypatch):
    monkeypatch.setenv("POISON", "frail")
    heard = Quarantines(JobGate(tmp_path, monkeypatch))
    with events.listening(heard):
        result = train(POISONED, workers="1:3", job_dir=tmp_path / "job", max_failures=1, epochs=40)
    slot, why = heard.found[0]
    assert (slot, why.endswith("all others 0 times; last: exit code 3")) == (2, True)
    assert {slot for slot, _ in heard.found} == {2}
    assert heard.started < 8
    assert result.summary.exactly_once


def test_a_slot_whose_workers_die_before_a_step_is_put_in_quarantine_and_the_others_finish(tmp_path, monkeypatch):
    faults = [Fault(step=0, slot=2, incarnation=life, phase="entering") for life in range(3)]
    heard = Quarantines(JobGate(tmp_path, monkeypatch))
    with events.listening(heard):
        result = train(TINY, workers="1:3", job_dir=tmp_path / "job", faults=faults, epochs=40)
    assert seen_counts(result.checkpoint) == [40.0]
    assert {slot for slot, _ in heard.found} == {2}
