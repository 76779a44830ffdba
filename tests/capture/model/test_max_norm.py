"""A table with `max_norm` is shortened before the capture, unless something else reads it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.api import capture
from trueline.capture.model.max_norm import shorten_rows
from trueline.errors import NotProven
from worlds.recipes import untrained


class Words(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4, max_norm=0.5, **options)  # type: ignore[arg-type]
        self.bag = nn.EmbeddingBag(20, 3, max_norm=1.0)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids).sum(1), self.bag(ids)


class Tied(Words):
    """Its scores depend on which rows were looked up before."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids).sum(1) @ self.table.weight.T, self.bag(ids)


IDS = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"norm_type": 1.0}, {"padding_idx": 0}])
def test_a_shortened_table_answers_as_the_one_that_shortens_at_each_call(options: dict[str, object]) -> None:
    model = Words(**options)
    before = copy.deepcopy(model)
    shorten_rows(model, [IDS])
    assert model.table.max_norm is None
    for ids in (IDS, torch.arange(20).reshape(4, 5), torch.zeros(2, 1, dtype=torch.int64)):
        for one, other in zip(model(ids), copy.deepcopy(before)(ids), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_model_with_such_tables_is_proven(tmp_path: Path) -> None:
    done = capture(untrained(lambda: Words().eval(), name="words", examples=lambda: IDS), None, tmp_path / "b")
    assert [one.verdict for one in done.programs] == ["proven", "proven"]


@pytest.mark.slow
def test_a_table_that_has_another_reader_stays_and_the_model_is_refused(tmp_path: Path) -> None:
    model = Tied()
    shorten_rows(model, [IDS])
    assert model.table.max_norm == 0.5
    with pytest.raises(NotProven, match="changes itself when it is first called"):
        capture(untrained(lambda: Tied().eval(), name="tied", examples=lambda: IDS), None, tmp_path / "b")


def test_a_parameter_that_two_modules_hold_is_left_as_it_is() -> None:
    model = Words()
    model.other = nn.Embedding(20, 4, _weight=model.table.weight)
    model.other.weight = model.table.weight
    shorten_rows(model, [IDS])
    assert model.table.max_norm == 0.5
