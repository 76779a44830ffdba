"""Small helpers of the tests that run whole jobs."""

from __future__ import annotations

from pathlib import Path

import torch

from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from worlds import TESTS

TINY, MEASURED = (TESTS / "train" / "recipes" / name for name in ("tiny.py", "measured.py"))
RECORDS, STEPS = 240, 48


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
