"""A derived model that would not be trained in time is a row that says so; its job continues with more time."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

import trueline
from trueline.capture.time_limit import OutOfTime
from trueline.compress import ordering
from trueline.compress.derive import bundles
from trueline.compress.derive.training import Deadline, TrainingPace, train_in_time
from trueline.compress.method import CompressMethod
from trueline.errors import BudgetMissed
from trueline.train.launch.jobs import read_job
from worlds import compressible


def run_pace(ends: float, seconds_each: float, total: int) -> tuple[int, str]:
    """How many steps a job of `total` applies, and why it is halted."""
    now = [0.0]
    pace = TrainingPace(Deadline(ends, lambda: now[0]))
    for step in range(total):
        now[0] += seconds_each
        why = pace.judge(step, total)
        if why:
            return step + 1, why
    return total, ""


def test_a_training_that_ends_in_time_is_left_alone() -> None:
    assert run_pace(100.0, 0.9, 100) == (100, "")
    assert run_pace(math.inf, 1e6, 100) == (100, "")


def test_a_training_that_is_a_little_late_is_halted_when_the_rest_would_take_half_as_long_again() -> None:
    steps, why = run_pace(100.0, 1.2, 100)
    assert (steps, why) == (50, "after 50 of 100 steps it wanted 1 min more, of 0.67 min that were left")


def test_a_training_that_becomes_late_in_its_last_steps_is_halted_at_the_limit() -> None:
    now = [0.0]
    pace = TrainingPace(Deadline(100.0, lambda: now[0]))
    for step in range(98):
        now[0] = step + 1.0
        assert pace.judge(step, 100) == ""
    now[0] = 103.0
    assert pace.judge(98, 100) == "the time was over after 99 of 100 steps"


def test_a_training_that_is_far_too_slow_is_halted_once_its_pace_is_known() -> None:
    steps, why = run_pace(100.0, 10.0, 100)
    assert steps == 4
    assert why == "after 4 of 100 steps it wanted 16 min more, of 1 min that were left"


def test_a_slow_start_is_not_taken_for_the_pace() -> None:
    now = [0.0]
    pace = TrainingPace(Deadline(100.0, lambda: now[0]))
    now[0] = 40.0  # imports, the first batch
    assert pace.judge(0, 100) == ""
    now[0] = 40.5
    assert pace.judge(1, 100) == ""


def test_a_step_after_the_last_one_is_not_waited_for() -> None:
    now = [0.0]
    pace = TrainingPace(Deadline(10.0, lambda: now[0]))
    now[0] = 11.0
    assert pace.judge(9, 10) == ""
    assert pace.judge(8, 10) == "the time was over after 9 of 10 steps"


def test_what_has_no_time_to_begin_is_a_row_and_so_is_what_follows_it(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    out = tmp_path / "small.bundle"
    with pytest.raises(BudgetMissed, match="no candidate that was named could be made") as missed:
        trueline.compress(
            trained.bundle.path, prune="linear=0.5", qat=True, quantize=["static"], minutes=1e-5, out=out,
            checkpoint=trained.recipe.with_name("weights.safetensors"),
        )  # fmt: skip
    assert not out.exists()
    told = json.loads((tmp_path / "small.bundle.search" / "report.json").read_text())
    rows = {row["name"]: row for row in told["candidates"] if row["verdict"] == "left out"}
    assert rows["prune:linear=0.5"]["why"].startswith("not trained: the time was over before its job began")
    assert "more --minutes continues it" in rows["prune:linear=0.5"]["why"]
    assert rows["prune:linear=0.5 > qat"]["why"] == "it begins with prune:linear=0.5, which was not trained in time"
    assert "left out" in missed.value.message


def test_beside_a_model_that_was_not_trained_in_time_the_best_of_the_others_is_sealed(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halt(recipe: Path, job: Path, deadline: Deadline, workers: str) -> Path:
        raise OutOfTime("not trained to its end: the time was over after 3 of 16 steps", hint="more --minutes")

    monkeypatch.setattr(bundles, "train_in_time", halt)
    monkeypatch.setattr(ordering, "list_usual", lambda program, target: [CompressMethod("dynamic", ("u8",))])
    found = trueline.compress(
        trained.bundle.path, qat=True, budget="accuracy=3%", target="size", minutes=5, out=tmp_path / "small.bundle",
        checkpoint=trained.recipe.with_name("weights.safetensors"),
    )  # fmt: skip
    assert found.row.name == "dynamic:u8"
    [row] = [row for row in found.rows if row.verdict == "left out"]
    assert row.why == "not trained to its end: the time was over after 3 of 16 steps; more --minutes"
    assert not [row for row in found.rows if row.name.startswith("qat +")]
    assert "left out" in found.as_text()


def test_by_hand_nothing_else_is_sealed_in_its_place(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halt(recipe: Path, job: Path, deadline: Deadline, workers: str) -> Path:
        raise OutOfTime("not trained to its end", hint="more --minutes")

    monkeypatch.setattr(bundles, "train_in_time", halt)
    for asked in ({"quantize": ["dynamic"]}, {}):
        with pytest.raises(BudgetMissed):
            trueline.compress(
                trained.bundle.path, qat=True, minutes=5, out=tmp_path / "small.bundle",
                checkpoint=trained.recipe.with_name("weights.safetensors"), **asked,
            )  # fmt: skip
        assert not (tmp_path / "small.bundle").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_job_that_was_halted_at_the_limit_continues_and_one_that_has_ended_is_found(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(compressible.BRIEF_RECIPE.replace("epochs = 1", "epochs = 100"))  # a halt is not at once
    ticks = itertools.count()
    job = tmp_path / "job"
    with pytest.raises(OutOfTime, match=r"not trained to its end: .*after \d+ of 1600 steps"):
        train_in_time(recipe, job, Deadline(12.0, lambda: float(next(ticks))), "1")
    halted = read_job(job)
    assert halted.state == "stopped"
    assert 0 < halted.checkpoint < 1600
    checkpoint = train_in_time(recipe, job, Deadline(), "1")
    assert read_job(job).step == 1600
    over = Deadline(0.0, lambda: 1.0)
    assert train_in_time(recipe, job, over, "1") == checkpoint  # a kill before the capture loses nothing
    with pytest.raises(OutOfTime, match="before its job began"):
        train_in_time(recipe, tmp_path / "other", over, "1")


@pytest.mark.jobs
def test_a_student_that_has_changed_begins_a_search_anew(trained: compressible.Compressible, tmp_path: Path) -> None:
    student, out = tmp_path / "student.py", tmp_path / "small.bundle"
    rows = tmp_path / "small.bundle.search" / "rows.jsonl"

    def search() -> None:
        with pytest.raises(BudgetMissed):
            trueline.compress(trained.bundle.path, distill=student, minutes=1e-5, out=out)

    student.write_text(compressible.BRIEF_RECIPE)
    search()
    rows.touch()
    search()
    assert rows.exists()  # the same
    student.write_text(compressible.BRIEF_RECIPE.replace("lr=0.01", "lr=0.02"))
    search()
    assert not rows.exists()
