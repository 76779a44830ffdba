"""Small helpers of the tests that run whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from worlds import TESTS
from worlds.waiting import until

TINY, MEASURED = (TESTS / "train" / "recipes" / name for name in ("tiny.py", "measured.py"))
RECORDS, STEPS = 240, 48


class JobGate:
    """Holds the jobs that a test starts from now on, of `tiny` and of recipes with its loss, back from their step
    `first` on: each step takes a quarter of a second until `open` is called. What a test does to a job while the gate
    is shut comes before the job's end, whatever the machine's speed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, first: int = 20) -> None:
        self._file = folder / "gate-is-open"
        monkeypatch.setenv("TINY_GATE", f"{first}:{self._file}")

    def open(self, *_: object) -> None:
        self._file.touch()

    def open_at(self, *heard: tuple[str, str]) -> Callable[[str, dict[str, Any]], None]:
        """A listener that opens the gate once each of these has been an event: its name, and its worker."""
        left = set(heard)

        def listen(name: str, fields: dict[str, Any]) -> None:
            left.discard((name, fields.get("worker", "")))
            if not left:
                self.open()

        return listen


def find_agent(launcher: int) -> psutil.Process:
    """The agent that this process has started; waits for it."""

    def look() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(launcher).children():
            with suppress(psutil.Error):  # it has ended meanwhile
                if "trueline.engine.local.agent" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    (agent,) = until(look, f"process {launcher} has an agent")
    return agent


def seen_counts(path: Path) -> list[float]:
    """How often each record was applied, as the model's own parameter counted it: the distinct counts."""
    state = checkpoint.read(path).state["model"]
    return sorted(set(state["seen"].round(decimals=6).tolist()))


def checkpoint_of(recipe: Path, folder: Path, *, seed: int = 1) -> Path:
    """A checkpoint of step 3 that holds the recipe's model as `seed` makes it."""
    torch.manual_seed(seed)
    state = {"model": load_recipe(recipe).model().state_dict()}
    return Path(checkpoint.write(folder, step=3, state=state, facts={}))


def plain_loop(recipe, steps: int) -> dict[str, torch.Tensor]:
    """The same steps in one process without Trueline's loop: the expected result of any number of workers."""
    from trueline.train.step.plan import JobPlan
    from trueline.train.worker.measure import call_model

    torch.manual_seed(recipe.defaults.seed)
    model = recipe.model().train()
    optimizer = recipe.optimizer(model.parameters())
    source = recipe.source("training")
    plan = JobPlan(
        num_records=source.num_records,
        global_batch=recipe.defaults.global_batch,
        epochs=recipe.defaults.epochs,
        seed=recipe.defaults.seed,
    )
    for step in range(steps):
        batch = source.read(plan.records(step))
        optimizer.zero_grad()
        recipe.loss(call_model(model, batch.inputs), batch.labels).backward()
        optimizer.step()
    return model.state_dict()
