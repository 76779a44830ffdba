"""An answer that hides a change on the example shows it on other inputs: a row of a table, a place, a sign."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture.proof.test_state import examine_eager
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import check_rare
from worlds.cases import few


def is_elsewhere() -> bool:
    return threading.current_thread() is not threading.main_thread()


READERS: dict[str, Callable[[], Any]] = {
    "a thread": is_elsewhere,
    "a variable": lambda: "NO_SUCH_VARIABLE" in os.environ,
    "a clock": lambda: time.time() > 4e9,
    "a hash": lambda: hash("salt") % 7 == 8,
    "a limit": lambda: sys.getrecursionlimit() == 54_321,
    "a setting of torch": torch.is_anomaly_enabled,
    "a draw": lambda: torch.rand(()) < 1e-6,
}


class Looks(nn.Module):
    """Its answers are rows of a table; each record of the example gets the same row from a number and its double."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.rows = nn.Embedding(200, 4)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        if self.read():
            x = x * 2
        return self.rows((x.mean(1) * 2).long().clamp(-99, 99) + 100)  # type: ignore[no-any-return]


class Counts(Looks):
    """The same at one call in many."""

    def __init__(self) -> None:
        super().__init__(lambda: self.calls == 123_456)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def eager_of(model: nn.Module) -> EagerSession:
    torch.manual_seed(0)
    return EagerSession(model.eval(), torch.tensor([[0.1, 0.2], [-0.1, 0.0], [0.05, 0.1]]))


@pytest.mark.jobs
@pytest.mark.parametrize(
    "read", few([pytest.param(read, id=name) for name, read in READERS.items()], 1, pytest.mark.jobs)
)
def test_what_is_read_outside_is_refused_though_the_answer_to_the_example_hides_it(read: Callable[[], Any]) -> None:
    assert check_rare(eager_of(Looks(read))) is None
    found = examine_eager(eager_of(Looks(read)))
    assert found is not None
    assert "something beside its inputs" in found.why or "draws random numbers" in found.why


def test_a_counter_is_refused_though_the_answer_to_the_example_hides_it() -> None:
    assert check_rare(eager_of(Counts())) is None
    found = examine_eager(eager_of(Counts()))
    assert found is not None
    assert "keeps a state" in found.why


@pytest.mark.jobs
def test_what_is_read_for_a_log_alone_stays() -> None:
    seconds = itertools.count()
    assert examine_eager(eager_of(Looks(lambda: print(next(seconds), time.time())))) is None  # type: ignore[func-returns-value]


class Years(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (time.localtime().tm_year > 2200)


def test_a_year_far_ahead_that_changes_the_answer_is_refused() -> None:
    found = check_rare(eager_of(Years()))
    assert found is not None
    assert "at another time" in found.why
