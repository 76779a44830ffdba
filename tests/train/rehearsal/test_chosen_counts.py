"""What a recipe changes in few of its batches, by what it counts or by its losses, and later ones use, is refused
before the first step: a worker that joins later has not seen those batches. What nothing uses trains."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trueline.data.sources.map_style import DatasetSource
from trueline.errors import UsageError
from trueline.train.settings import JobSettings
from trueline.train.worker.recipe_trial import RecipeTrial
from worlds.recipes import untrained

pytestmark = pytest.mark.slow

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS[:, :1].tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.calls = nn.Linear(4, 1), 1.0, 0

    def forward(self, x):
        return self.layer(x) * self.scale


class Counting(Net):
    def forward(self, x):
        self.calls += 1
        if self.calls % 150 == 0:
            self.scale *= 0.9
        return super().forward(x)


class CountingInBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        if self.seen == 24:
            self.scale = 0.5
        return super().forward(x)


class Cooled(CountingInBuffer):
    """The same, computed in each batch."""

    def forward(self, x):
        self.seen += 1
        return self.layer(x) * 0.9 ** (self.seen // 24)


def make_loss(change, kind="calls"):
    room, clock = {"calls": 0, "records": 0, "scale": 1.0, "log": []}, itertools.count(1)

    def loss(output, label):
        value = ((output - label) ** 2).mean()
        room["calls"] += 1
        room["records"] += len(label)
        change(room, {"clock": lambda: next(clock), "value": lambda: value}.get(kind, lambda: room[kind])())
        return value * room["scale"]

    return loss


def cool_each_170th(room, count):
    if count % 170 == 0:
        room["scale"] *= 0.9


def cool_late(room, count):
    if count // 100 == 17:
        room["scale"] = 0.5


def cool_each_200th(room, count):
    if count % 200 == 0:
        room["scale"] *= 0.9


def cool_once_small(room, value):
    if value.item() < 1e-3:
        room["scale"] = 0.1


def cool_at_infinity(room, value):
    if not torch.isfinite(value):
        room["scale"] *= 0.5


def cool_at_one_infinity(room, value):
    """As code that asks it of many numbers."""
    if torch.isnan(value.expand(3)).any():
        room["scale"] *= 0.5


def note_infinity(room, value):
    if not math.isfinite(value.item()):
        room["log"].append("infinite")


def end_at_infinity(room, value):
    if value.isnan():
        raise FloatingPointError("the loss is not a number")


def note_each_tenth(room, count):
    if count % 10 == 0:
        room["log"].append(count)


def note_best(room, value):
    room["best"] = min(room.get("best", 1e9), value.item())


def try_recipe(loss, make=Net):
    recipe = dataclasses.replace(untrained(make), loss=loss)
    settings = JobSettings(name="small", recipe="", recipe_digest="", workers=1, epochs=20, global_batch=8, seed=0)
    return RecipeTrial(recipe, make(), DatasetSource(DATA, mode="training"), settings).find_traits()


def plain(output, label):
    return ((output - label) ** 2).mean()


CHANGING = {
    "each 170th batch": (make_loss(cool_each_170th), Net, r"where .*calls.* is \d+"),
    "after 1700 records": (make_loss(cool_late, "records"), Net, r"where .*records.* is 1[67]\d\d"),
    "each 200th number of an iterator": (make_loss(cool_each_200th, "clock"), Net, r"clock"),
    "once its loss is small": (make_loss(cool_once_small, "value"), Net, "a number that its code looks at is 0 times"),
    "after a loss that is not finite": (make_loss(cool_at_infinity, "value"), Net, "looks at is not finite"),
    "after losses of which one is not": (make_loss(cool_at_one_infinity, "value"), Net, "looks at is not finite"),
    "each 150th call of its model": (plain, Counting, r"the model's calls is 149"),
    "where a buffer has counted to 24": (plain, CountingInBuffer, r"the model's buffer 'seen' is 23"),
}


@pytest.mark.parametrize("name", list(CHANGING))
def test_what_a_recipe_changes_in_few_batches_and_later_ones_use_is_refused(name):
    loss, make, where = CHANGING[name]
    with pytest.raises(UsageError, match=where) as refused:
        try_recipe(loss, make)
    assert "changes something that later batches use" in refused.value.message


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("loss", "make"),
    [
        (make_loss(note_each_tenth), Net),
        (make_loss(note_best, "value"), Net),
        (make_loss(note_infinity, "value"), Net),
        (make_loss(end_at_infinity, "value"), Net),
        (plain, Cooled),
    ],
    ids=["a log", "the best loss", "infinite losses", "an end where one is", "a schedule by a buffer"],
)
def test_what_a_recipe_notes_in_few_batches_and_no_loss_uses_trains(loss, make):
    assert try_recipe(loss, make).reduction == "mean"


def test_a_recipe_whose_first_trial_failed_has_its_records_watched_as_others(monkeypatch):
    """A server that dies meanwhile fails the trial; the next one takes other records."""
    wanted = try_recipe(plain).looks
    begun = RecipeTrial._try_loss

    def fail_first(self, tried):
        return tried.inputs.attempt > 0 and begun(self, tried)

    monkeypatch.setattr(RecipeTrial, "_try_loss", fail_first)
    assert wanted
    assert try_recipe(plain).looks == wanted
