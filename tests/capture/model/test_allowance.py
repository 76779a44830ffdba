"""What a search may cost: cheap calls are counted, so that a busy machine does not end it earlier."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.model.allowance import CHEAP_S, Allowance
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import check_rare
from trueline.capture.proof.value_sweep import make_sweep, time_call
from trueline.capture.sum_limits import find_limits
from worlds import recipes


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which each call takes twenty times as long."""
    for clock in ("thread_time", "process_time"):
        known = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda known=known: 20 * known())


def spend(allowance: Allowance, seconds: float) -> int:
    """How many calls of so many seconds are allowed, up to a hundred."""
    for made in range(100):
        if not allowance.allows():
            return made
        allowance.charge(seconds)
    return 100


def test_cheap_calls_are_counted_once_the_time_is_over() -> None:
    assert spend(Allowance(0.0, 40), CHEAP_S) == 40


def test_dear_calls_end_with_the_time() -> None:
    assert spend(Allowance(0.05, 40), 0.02) == 3


def test_a_call_that_was_interrupted_ends_no_search() -> None:
    allowance = Allowance(0.0, 40)
    for seconds in (0.001, 0.5, 0.001):
        allowance.charge(seconds)
    assert allowance.allows()
    for _ in range(3):
        allowance.charge(0.5)
    assert not allowance.allows()


def test_a_call_that_will_be_dear_needs_its_time_and_one_that_will_be_cheap_does_not() -> None:
    allowance = Allowance(1.0, 40)
    allowance.charge(0.6)
    assert [allowance.allows(seconds) for seconds in (0.3, 0.5, CHEAP_S)] == [True, False, True]
    assert [allowance.allows(seconds, share=0.5) for seconds in (0.3, CHEAP_S)] == [False, True]


def test_calls_are_made_one_by_one_until_they_are_too_many() -> None:
    made = []
    calls = (made.append(number) or number for number in itertools.count())  # type: ignore[func-returns-value]
    assert list(Allowance(0.0, 3).charge_each(calls)) == [0, 1, 2] == made
    assert list(Allowance(9.0, 0).charge_each(range(4))) == [0, 1, 2, 3]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x.shape[0], x.shape[1]) == (93, 1871) else x


class Positions(nn.Module):
    """A cache and new tokens, which share a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 3)

    def forward(self, past: Tensor, new: Tensor) -> Tensor:
        places = torch.arange(past.shape[1] + new.shape[1])
        return torch.cat([past, new], 1) + self.table(places)


class Seldom(nn.Module):
    """A call in three hundred is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.cycle(range(300))

    def forward(self, x: Tensor) -> Tensor:
        return x + (next(self.calls) == 299)


@pytest.mark.slow
def test_a_slow_machine_tries_the_pairs_of_sizes_that_a_fast_one_tries(slow_machine: None, tmp_path: Path) -> None:
    shapes = {"x": {1: "length"}}
    capture(
        recipes.untrained(Pair, examples=lambda: torch.randn(3, 5, 4), dynamic_shapes=lambda: shapes),
        None,
        tmp_path / "b",
    )
    assert not open_bundle(tmp_path / "b").signature.allows({"batch": 93, "length": 1871})


def test_a_slow_machine_finds_the_limit_on_a_sum_of_sizes(slow_machine: None) -> None:
    given = {"past": torch.randn(2, 5, 3), "new": torch.randn(2, 4, 3)}
    eager = EagerSession(Positions(), given, dynamic_shapes={"past": {1: "past"}, "new": {1: "new"}})
    assert set(find_limits(eager, eager.calling.presumed).values()) == {64}


def test_a_slow_machine_calls_a_model_as_often(slow_machine: None) -> None:
    assert check_rare(EagerSession(Seldom(), torch.ones(2, 3))) is not None


def test_a_slow_machine_sweeps_values_as_a_fast_one(slow_machine: None) -> None:
    eager = EagerSession(nn.Linear(4, 3), torch.randn(3, 4))
    sweep = make_sweep(eager, eager.calling.presumed, time_call(eager))
    assert max(float(np.abs(probe.inputs["input"]).max()) for probe in sweep) > 1000
