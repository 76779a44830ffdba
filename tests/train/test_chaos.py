"""Random kills in a whole job: `make chaos`. TRUELINE_CHAOS_SEED chooses other kills."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from trueline import events
from trueline.recipe.load import load_recipe
from trueline.state import checkpoint
from trueline.train.api import train
from trueline.train.settings import Fault

RECIPE = Path(__file__).parent / "recipes" / "counting.py"
KILLS = 20
EPOCHS = 40
STEPS = EPOCHS * 18
PHASES = ("before", "backward", "allreduced", "applied")


def random_kills(seed: int) -> list[Fault]:
    """`KILLS` kills at random steps, slots and phases; a slot's n-th kill meets its n-th incarnation.

    Every slot dies once in each round of three, in random order, so that no slot looks like one that cannot start.
    """
    dice = random.Random(seed)
    steps = sorted(dice.randrange(1, STEPS // 2) for _ in range(KILLS))
    slots = [slot for _ in range(KILLS // 3 + 1) for slot in dice.sample(range(3), 3)]
    return [
        Fault(step=step, slot=slot, incarnation=slots[:index].count(slot), phase=dice.choice(PHASES))
        for index, (step, slot) in enumerate(zip(steps, slots[:KILLS], strict=True))
    ]


def final(job_dir: Path, name: str, faults: list[Fault], workers: str) -> tuple[dict, int, float]:
    """Trains; returns the model's last state, how many workers died, and the loss over all records."""
    lost = []

    def listen(event: str, fields: dict) -> None:
        if event == "worker.lost":
            lost.append(fields["why"])

    with events.listening(listen):
        result = train(RECIPE, workers=workers, epochs=EPOCHS, job_dir=job_dir / name, faults=faults)
    assert result.summary.exactly_once
    recipe = load_recipe(RECIPE)
    model = checkpoint.load_model(recipe, result.checkpoint)
    batch = recipe.source("training").read(np.arange(1440))
    scans, ids = batch.inputs
    return model.state_dict(), len(lost), cross_entropy(model(scans, ids)[0], batch.labels).item()


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_twenty_random_kills_lose_no_record_repeat_none_and_leave_the_loss_as_it_was(tmp_path):
    seed = int(os.environ.get("TRUELINE_CHAOS_SEED", "20"))
    calm, deaths, calm_loss = final(tmp_path, "calm", [], "2")
    assert deaths == 0
    stormy, deaths, stormy_loss = final(tmp_path, "storm", random_kills(seed), "2:3")
    print(f"\nseed {seed}: {deaths} kills, final loss {stormy_loss!r}, undisturbed {calm_loss!r}")
    assert deaths >= KILLS
    for state in (calm, stormy):
        assert torch.equal(state["seen"].round(decimals=6), torch.full((1440,), float(EPOCHS), dtype=torch.float64))
    assert stormy_loss == pytest.approx(calm_loss, rel=1e-9)
    for name, parameter in calm.items():
        torch.testing.assert_close(stormy[name], parameter, rtol=1e-8, atol=1e-10)
