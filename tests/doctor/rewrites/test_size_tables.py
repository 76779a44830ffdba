"""What Python looks up by a size comes from a table, and what it selects by one is a tensor of places."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import survey

pytestmark = pytest.mark.slow
X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
SCALES = {f"length-{length}": 1.0 + length / 10 for length in range(1, 40)}


def sum_of_digits(number: int) -> int:
    return sum(map(int, str(number)))


class ByIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [length / 7 for length in range(1, 30)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[x.shape[1] - 1]


class ByText(nn.Module):
    """A text key, a branch on membership, and a function of the file."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        key = f"length-{n}"
        y = x * SCALES.get(key, 0.5)
        if n in (7, 9) or str(n).endswith("3"):
            y = y + 1
        return y * sum_of_digits(n)


class Selected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, [2 * i for i in range(x.shape[1] // 2) if i % 3 != 1 or not i]].sum(1)


def healed(model: nn.Module, *fresh: Tensor) -> tuple[str, nn.Module]:
    """The diff of the rewrite, which answers as the model does on `fresh`, and the edited model."""
    eager = EagerSession(copy.deepcopy(model).eval(), X, dynamic_shapes={"x": {1: "length"}})
    done = survey(model.eval(), calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    edited = patch_module(model, done.texts)
    for one in fresh:
        torch.testing.assert_close(edited(one), model(one))
    return row.rewrite.diff, edited


def test_a_number_of_a_list_is_taken_from_a_table_that_ends_where_the_list_does() -> None:
    diff, edited = healed(ByIndex(), torch.randn(2, 1, 4), torch.randn(1, 29, 4))
    assert "for at in range(30)" in diff
    with pytest.raises(IndexError):
        edited(torch.randn(1, 30, 4))


def test_texts_and_functions_of_a_size_are_tables_and_their_names_are_gone() -> None:
    diff, _ = healed(ByText(), *(torch.randn(2, size, 4) for size in (1, 3, 7, 9, 13, 60)))
    assert diff.count("torch.tensor([") == 3
    assert '-        key = f"length-{n}"' in diff
    assert "+        key" not in diff


def test_places_that_a_filter_selects_are_a_masked_range() -> None:
    diff, _ = healed(Selected(), *(torch.randn(2, size, 4) for size in (1, 2, 4, 9, 16)))
    assert "torch.arange(x.shape[1] // 2)" in diff
