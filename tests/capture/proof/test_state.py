"""A model that depends on more than its inputs is refused, wherever it keeps that; one that only counts, logs or caches
is not."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.model.python_state import Memento, Recall, find_changed, take_snapshot
from trueline.capture.model.reach import attributes
from trueline.capture.proof import determinism
from trueline.capture.proof.determinism import Unsteady
from trueline.capture.proof.observe import hidden_state, observe
from trueline.capture.proof.probes import make_probes
from worlds import stateful_models as guilty
from worlds.stateful_models import GUILTY
from worlds.steady_models import INNOCENT

NO_LINE = {"CachedDraw"}
"""Its cache is one of functools, which no line of the model writes."""


def examine(kind: type[nn.Module]) -> Unsteady | None:
    """What capture finds before it emits a program."""
    torch.manual_seed(0)
    random.seed(0)
    eager = EagerSession(kind().eval(), torch.randn(3, 4))
    found = determinism.check_twice(eager) or determinism.check_rare(eager)
    if found is not None:
        return found
    observations = observe(eager, make_probes(eager.example, signature=eager.calling.presumed))
    hidden = hidden_state(observations)
    return determinism.find_cause(eager, hidden) if hidden else determinism.check_order(eager, observations)


@pytest.mark.parametrize("name", GUILTY)
def test_a_model_that_depends_on_more_than_its_inputs_is_refused_with_a_line_of_its_file(name: str) -> None:
    found = examine(GUILTY[name])
    assert found is not None
    assert name in NO_LINE or (found.place is not None and found.place.file == guilty.__file__)
    assert "torch.where" not in found.hint


@pytest.mark.parametrize("name", INNOCENT)
def test_a_model_that_counts_logs_or_caches_is_none_the_less_a_function_of_its_inputs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(determinism, "MANY", 100)
    found = examine(INNOCENT[name])
    assert found is None, found


def test_a_count_is_named_with_its_path_and_the_line_that_decides_by_it() -> None:
    found = examine(guilty.AfterAMillion)
    assert found is not None
    assert "keeps a state in the Python attribute n: it answers differently" in found.why
    assert found.place is not None
    assert "self.n" in found.place.source


class Keeps(nn.Module):
    """One value of each kind that is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Any] = {"a": [1, 2], "b": (1, {"c": 2})}
        self.shared = self.table["a"]
        self.rng = random.Random(1)
        self.tensor = torch.zeros(3)
        self.turns = iter([1, 2, 3])
        self.slotted = guilty.Slotted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def change(module: Keeps) -> None:
    module.table["a"].append(3)
    module.table["b"][1]["c"] = 9
    module.rng.random()
    module.tensor += 1
    next(module.turns)
    module.slotted.n = 5
    module.table["new"] = 1


def test_what_a_model_kept_is_put_back_and_what_two_parts_share_they_share_again() -> None:
    module = Keeps()
    memento, before = Memento(module), take_snapshot(module)
    change(module)
    changed = find_changed(before, take_snapshot(module))
    assert set(changed) == {"table", "shared", "rng", "tensor", "turns", "slotted._n"}
    memento.restore()
    assert find_changed(before, take_snapshot(module)) == ()
    assert module.shared is module.table["a"] == [1, 2]
    assert next(module.turns) == 1


def test_after_a_look_back_the_model_keeps_what_it_kept_before_it() -> None:
    module = Keeps()
    recall = Recall(module)
    change(module)
    now = take_snapshot(module)
    with recall.as_before():
        assert module.table == {"a": [1, 2], "b": (1, {"c": 2})}
        change(module)
    assert find_changed(now, take_snapshot(module)) == ()


def test_a_tensor_is_what_its_numbers_are() -> None:
    module = Keeps()
    before = take_snapshot(module)
    module.tensor = torch.zeros(3)
    assert find_changed(before, take_snapshot(module)) == ()
    module.tensor[1] = 1
    assert find_changed(before, take_snapshot(module)) == ("tensor",)


def test_the_environment_and_the_clocks_are_as_they_were_after_an_examination(tmp_path: Path) -> None:
    import datetime
    import time

    before = time.time, datetime.datetime, random.random, dict(os.environ)
    for kind in (guilty.Environment, guilty.WallClock, guilty.HourOfTheDay, guilty.SharedRandom):
        assert examine(kind) is not None
    assert (time.time, datetime.datetime, random.random, dict(os.environ)) == before


def test_no_path_is_used_twice() -> None:
    paths = [kept.path for kept in attributes(Keeps()) if kept.kind != "inside"]
    assert len(paths) == len(set(paths))
