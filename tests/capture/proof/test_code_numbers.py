"""Sizes are tried around the numbers that the user's code computes, which are written nowhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture import code_numbers
from trueline.capture.api import capture
from trueline.capture.code_numbers import numbers_of
from worlds import recipes

BUDGET = 22_801.5


class Pages(nn.Module):
    """Records one by one, in reverse where their number fills pages."""

    def forward(self, x: Tensor) -> Tensor:
        group = int(math.sqrt(BUDGET))
        rows = [row / row.norm() for row in x]
        if len(rows) % group == 0:
            rows = rows[::-1]
        return torch.stack(rows)


class Grid(nn.Module):
    """The same of a product of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.stride = 19, [7, 8]

    def forward(self, x: Tensor) -> Tensor:
        rows = [row / row.norm() for row in x]
        if len(rows) == self.window * self.stride[1]:
            rows = rows[::-1]
        return torch.stack(rows)


class Eager:
    """A model that is called with its example."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.example = module, {"x": torch.randn(3, 4)}

    def run(self, inputs: dict[str, Any]) -> Any:
        return self.module(*inputs.values())


@pytest.mark.parametrize(("kind", "number"), [(Pages, 151), (Grid, 152)])
def test_a_number_that_the_code_computes_is_found(kind: type[nn.Module], number: int) -> None:
    module = kind()
    assert number in numbers_of(Eager(module), [])  # type: ignore[arg-type]


class Powers(nn.Module):
    """Numbers without an end, divisions by nothing, and a property that must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.none, self.calls = 9, 0, 0

    @property
    def cells(self) -> int:
        self.calls += 1
        return 77

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1_000:
            return x * (self.base**self.base**self.base + 1 // self.none + self.cells + (self.base << 90_000))
        return x


def test_nothing_of_the_users_runs_and_no_number_grows_without_end() -> None:
    module = Powers()
    assert 77 not in numbers_of(Eager(module), [])  # type: ignore[arg-type]
    assert module.calls == 0


class Holds(nn.Module):
    """More numbers than are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = list(range(20, 60))

    def forward(self, x: Tensor) -> Tensor:
        return x * (3 * 300 + 5 * 500)


def test_computed_numbers_take_no_place_of_those_that_the_code_holds() -> None:
    found = numbers_of(Eager(Holds()), [])  # type: ignore[arg-type]
    assert 900 in found[code_numbers.NUMBERS :]
    assert set(range(20, 30)) <= set(found[: code_numbers.NUMBERS])


@pytest.mark.slow
def test_a_claim_ends_before_a_page_whose_size_is_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = capture(recipes.untrained(Pages, examples=lambda: torch.randn(3, 4)), None, tmp_path / "b").path
    assert open_bundle(path).signature.dims["batch"].max == 150
