"""What is new in a batch is found, whichever way is the quick one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trueline.data.source import Batch
from trueline.train.step import features

USUAL_INPUTS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
USUAL_LABELS = torch.tensor([0, 1, 4])


def find_new(columns: list[features.Column], inputs: torch.Tensor, labels: torch.Tensor) -> features.News | None:
    return features.find_new(columns, Batch(inputs, labels), len(inputs))


def usual_columns() -> list[features.Column]:
    looks = features.Looks()
    looks.add(Batch(USUAL_INPUTS, USUAL_LABELS), 3)
    return looks.columns()


def changed(values: torch.Tensor, place: tuple[int, ...], to: float) -> torch.Tensor:
    new = values.clone()
    new[place] = to
    return new


def test_a_batch_like_those_that_were_looked_at_has_nothing_new() -> None:
    columns = usual_columns()
    assert {(number, kind) for number, kind, _ in columns} == {(0, "zeros"), (0, "nans"), (1, "lowest"), (1, "value")}
    assert find_new(columns, USUAL_INPUTS.flip(0) + 0.5, USUAL_LABELS.flip(0)) is None


@pytest.mark.parametrize(
    ("kind", "values", "inputs", "labels"),
    [
        ("zeros", [1.0], changed(USUAL_INPUTS, (1, 1), 0.0), USUAL_LABELS),
        ("nans", [1.0], changed(USUAL_INPUTS, (1, 0), np.nan), USUAL_LABELS),
        ("lowest", [-2.0], USUAL_INPUTS, changed(USUAL_LABELS, (1,), -2)),
        ("value", [3.0], USUAL_INPUTS, changed(USUAL_LABELS, (1,), 3)),
    ],
)
def test_what_no_record_had_is_found_with_its_place(
    kind: str, values: list[float], inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    found = find_new(usual_columns(), inputs, labels)
    assert found is not None
    assert (found.column[1], found.places.tolist(), found.values) == (kind, [1], values)


def test_a_column_whose_one_value_is_not_zero_is_compared_with_it() -> None:
    """All records that were looked at have one zero, and a label that is missing."""
    looks = features.Looks()
    looks.add(Batch(changed(USUAL_INPUTS, (slice(None), 0), 0.0), torch.full((3, 1), np.nan)), 3)
    columns = looks.columns()
    labels = torch.full((3, 1), np.nan)
    assert find_new(columns, changed(USUAL_INPUTS, (slice(None), 1), 0.0), labels) is None
    every = find_new(columns, USUAL_INPUTS, labels)
    assert every is not None
    two = changed(changed(USUAL_INPUTS, (slice(None), 0), 0.0), (2, 1), 0.0)
    found = find_new(columns, two, labels)
    assert found is not None
    assert (found.column[1], found.places.tolist(), found.values) == ("zeros", [2], [2.0])
