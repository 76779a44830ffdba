"""What a loop or a recipe changes for later batches once it has counted far enough is refused before the first step,
wherever it keeps the count: many batches are tried. What nothing uses trains."""

from __future__ import annotations

import array
import contextvars
import ctypes
import dataclasses
import itertools
import os
import random
import sqlite3
import time

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trueline.data.sources.map_style import DatasetSource
from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import fork
from trueline.train.rehearsal.steps import many_batches
from trueline.train.settings import JobSettings
from trueline.train.worker.recipe_trial import RecipeTrial
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow

INPUTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
EACH, EPOCHS = 500, 300


def train(count, *, width=8, epochs=EPOCHS, after=lambda optimizer: False, model_of=nn.Sequential):
    """A loop whose loss has a scale, which is halved in each batch in which `count()` is a multiple of EACH; up to its
    second step. Returns that step."""
    torch.manual_seed(0)
    model = model_of(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = [1.0]
    job = Elastic(model, optimizer, TensorDataset(INPUTS, LABELS), global_batch=12, epochs=epochs)
    for batch in job:
        if not batch.trial and batch.step == 1:
            return batch.step
        if count() % EACH == EACH - 1:
            scale[0] *= 0.5
        job.step(nn.functional.cross_entropy(model(batch.inputs) / scale[0], batch.labels))
        if after(optimizer):
            return 0
    return None


def count_in_database():
    room = sqlite3.connect(":memory:")
    room.execute("create table seen(n int)")
    room.execute("insert into seen values (0)")

    def count():
        room.execute("update seen set n = n + 1")
        return room.execute("select n from seen").fetchone()[0]

    return count


def count_in_array():
    seen = array.array("q", [0])

    def count():
        seen[0] += 1
        return seen[0]

    return count


def count_in_memory_of_c():
    seen = ctypes.c_long(0)

    def count():
        seen.value += 1
        return seen.value

    return count


def count_in_string():
    seen = [""]

    def count():
        seen[0] += "."
        return len(seen[0])

    return count


def count_in_environment():
    os.environ["SEEN"] = "0"

    def count():
        os.environ["SEEN"] = str(int(os.environ["SEEN"]) + 1)
        return int(os.environ["SEEN"])

    return count


def count_in_method():
    return itertools.accumulate(itertools.repeat(1)).__next__


def count_by_chance():
    drawn = random.Random(3)
    return lambda: drawn.randrange(EACH)


KINDS = [count_in_database, count_in_array, count_in_memory_of_c, count_in_string, count_in_environment,
         count_in_method, count_by_chance]  # fmt: skip


@pytest.mark.jobs
@pytest.mark.parametrize("kind", few(KINDS, 1, pytest.mark.jobs))
def test_a_count_that_a_loop_keeps_where_nothing_looks_is_refused_if_it_changes_later_batches(kind):
    with pytest.raises(UsageError, match=r"within \d+ batches the loop changes something that later") as why:
        train(kind())
    assert "batch.step" in why.value.hint


@pytest.mark.jobs
def test_a_count_of_batches_beyond_those_with_the_model_is_reached_with_its_outputs(monkeypatch):
    """A model that takes 2 ms has no time for as many."""
    monkeypatch.setattr(many_batches, "MOST_S", 0.3)

    class Slow(nn.Sequential):
        def forward(self, inputs):
            until = time.process_time() + 0.002
            while time.process_time() < until:
                pass
            return super().forward(inputs)

    with pytest.raises(UsageError, match=r"within \d{3} batches"):
        train(count_in_array(), model_of=Slow)


@pytest.mark.jobs
def test_a_loop_that_counts_for_nothing_trains_and_its_own_objects_have_seen_no_batch():
    seen = array.array("q", [0])

    def count():
        seen[0] += 1
        return 0

    assert train(count) == 1
    assert seen[0] == 1, "its first step"


@pytest.mark.jobs
def test_a_loop_that_ends_itself_in_the_trial_trains_and_an_event_says_what_was_not_tried(monkeypatch):
    told = []
    monkeypatch.setattr(fork.events, "emit", lambda name, **fields: told.append((name, fields.get("why", ""))))
    seen = array.array("q", [0])

    def end(_):
        seen[0] += 1
        return seen[0] >= 400

    assert train(lambda: 0, after=end) == 1
    assert ("loop.untried", "what it does in many batches: it ended, took too long, or its loss drifts") in told


@pytest.mark.jobs
def test_parameters_that_a_loop_changes_after_many_batches_are_named():
    seen = array.array("q", [0])

    def clamp(optimizer):
        seen[0] += 1
        if seen[0] % EACH == 0:
            optimizer.param_groups[0]["params"][0].data.clamp_(-0.1, 0.1)
        return False

    with pytest.raises(UsageError, match=r"within 5\d\d batches the loop changes parameters itself"):
        train(lambda: 0, after=clamp)


@pytest.mark.jobs
def test_a_loop_whose_own_steps_halve_the_rate_after_many_batches_is_refused():
    seen = array.array("q", [0])

    def cool(optimizer):
        seen[0] += 1
        if seen[0] % EACH == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        return False

    with pytest.raises(UsageError, match=r"within 5\d\d batches .* the optimizer's numbers are"):
        train(lambda: 0, after=cool)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


@pytest.mark.parametrize("matters", [True, False])
def test_a_recipe_that_counts_where_nothing_looks_is_refused_if_later_batches_have_another_loss(matters):
    seen, scale = array.array("q", [0]), [1.0]

    def loss(outputs, labels):
        seen[0] += 1
        if seen[0] % EACH == 0 and matters:
            scale[0] *= 0.5
        return ((outputs - labels) ** 2).mean() * scale[0]

    data = TensorDataset(INPUTS, INPUTS[:, :1].tanh())
    recipe = dataclasses.replace(untrained(Net), loss=loss)
    settings = JobSettings(name="small", recipe="", recipe_digest="", workers=1, epochs=EPOCHS, global_batch=12, seed=0)
    trial = RecipeTrial(recipe, recipe.model(), DatasetSource(data, mode="training"), settings)
    if matters:
        with pytest.raises(UsageError, match=r"within 5\d\d batches the recipe changes"):
            trial.find_traits()
    else:
        trial.find_traits()


CONTEXT = contextvars.ContextVar("seen", default=0)


@pytest.mark.jobs
def test_a_count_in_a_variable_of_a_context_is_tried_however_far_it_counts():
    def count():
        CONTEXT.set(CONTEXT.get() + 1)
        return CONTEXT.get()

    with pytest.raises(UsageError, match=r"CONTEXT's value is \d+ the loop changes"):
        train(count)
