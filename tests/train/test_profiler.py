"""`--profile` writes a trace of the named steps of one worker, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trueline.errors import UsageError
from trueline.train.profiler import StepProfiler
from trueline.train.settings import parse_steps


def train(profiler: StepProfiler, *, leads: bool = True, steps: int = 6) -> None:
    model = torch.nn.Linear(4, 2)
    for step in range(steps):
        profiler.begin(step, leads=leads)
        model(torch.ones(3, 4)).sum().backward()
    profiler.close()


@pytest.mark.parametrize(
    ("steps", "file"), [(range(2, 4), "steps-2-3.json"), (range(4, 99), "steps-4-5.json"), (range(1), "steps-0-0.json")]
)
def test_the_trace_has_the_operators_of_the_named_steps_alone(tmp_path: Path, steps: range, file: str) -> None:
    train(StepProfiler(steps, tmp_path / "traces"))
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [file]
    found = json.loads((tmp_path / "traces" / file).read_text())["traceEvents"]
    traced = len([step for step in range(6) if step in steps])
    assert sum(one.get("name") == "aten::linear" for one in found) == traced


@pytest.mark.parametrize(("steps", "leads"), [(range(0), True), (range(2, 4), False), (range(9, 12), True)])
def test_a_worker_that_does_not_lead_or_has_no_such_step_writes_nothing(
    tmp_path: Path, steps: range, leads: bool
) -> None:
    train(StepProfiler(steps, tmp_path / "traces"), leads=leads)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["x", "3:3", "5:2", "-1", "1:", ":4", "1:2:3"])
def test_what_names_no_steps_is_refused_before_the_job(text: str) -> None:
    with pytest.raises(UsageError, match="names no steps"):
        parse_steps(text)


def test_a_process_that_trains_alone_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUELINE_JOB", raising=False)
    profiler = StepProfiler.of_job()
    profiler.begin(0, leads=True)
    profiler.close()
