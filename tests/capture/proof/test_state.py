"""A model that depends on more than its inputs is refused, wherever it keeps that; one that only counts, logs or caches
is not."""

from __future__ import annotations

import functools
import itertools
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
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

NO_LINE = {"CachedDraw", "MethodsOfADict", "ScriptedPart"}
"""What they keep is in a cache of functools, behind a method of C, or in a script: no line of the model writes it."""


def examine(kind: type[nn.Module]) -> Unsteady | None:
    """What capture finds before it emits a program."""
    torch.manual_seed(0)
    random.seed(0)
    return examine_eager(EagerSession(kind().eval(), torch.randn(3, 4)))


def examine_eager(eager: EagerSession) -> Unsteady | None:
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


@pytest.mark.jobs
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


class DrawsBytes(guilty.Base):
    """Counts its calls too, which is no reason for its answers."""

    def start(self) -> None:
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if secrets.token_bytes(1) == b"\0" else self.lin(x)


class DrawsFromItsOwn(guilty.Base):
    def start(self) -> None:
        self.dice = random.Random(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dice.random() == 0 else self.lin(x)


class MeasuresTime(guilty.Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + time.perf_counter()


class CountsAndDraws(guilty.Base):
    """Its identifiers are drawn, and its count alone changes the answer."""

    def start(self) -> None:
        self.calls, self.name = 0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.name = uuid.uuid4().hex
        return self.lin(x) * self.calls


def struck_at(call: int, draw: Callable[..., Any], strike: Any) -> Callable[..., Any]:
    """`draw`, with `strike` for what it draws at the `call`-th call."""
    calls = itertools.count(1)
    return lambda *args: strike if next(calls) == call else draw(*args)


RARE = bytes.fromhex("00000000000000000000000000000030")
"""From these a UUID is made whose number is a multiple of 200."""


@pytest.mark.parametrize("call", [1, 2, 3, 40])
def test_a_chance_that_strikes_early_is_named_as_a_draw_with_its_line(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uuid.UUID(bytes=RARE, version=4).int % 200 == 0
    eager = EagerSession(guilty.Unique().eval(), torch.randn(3, 4))
    monkeypatch.setattr(os, "urandom", struck_at(call, lambda count: bytes(range(count)), RARE))
    found = determinism.check_twice(eager) or determinism.check_rare(eager)
    assert found is not None
    assert (found.hint, found.place and "uuid4" in found.place.source) == (determinism.OUTSIDE_HINT, True), found


@pytest.mark.parametrize(
    ("kind", "word", "hint"),
    [
        (DrawsBytes, "token_bytes", determinism.OUTSIDE_HINT),
        (DrawsFromItsOwn, "dice", determinism.OUTSIDE_HINT),
        (MeasuresTime, "perf_counter", determinism.ELSEWHERE_HINT),
        (CountsAndDraws, "self.calls", determinism.ATTRIBUTE_HINT),
    ],
)
def test_of_answers_that_differ_the_cause_is_named_and_no_bystander(
    kind: type[nn.Module], word: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kind().eval()
    eager = EagerSession(module, torch.randn(3, 4))
    monkeypatch.setattr(time, "perf_counter", functools.partial(next, itertools.count(1.0)))
    monkeypatch.setattr(random, "_urandom", struck_at(2, lambda count: b"\1" * count, b"\0"))
    if isinstance(module, DrawsFromItsOwn):
        monkeypatch.setattr(module.dice, "random", struck_at(2, lambda: random.Random.random(module.dice), 0.0))
    found = determinism.check_twice(eager)
    assert found is not None
    assert (found.hint, found.place and word in found.place.source) == (hint, True), found


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
