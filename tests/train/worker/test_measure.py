"""Promises of the sums of loss and metrics over records."""

from types import SimpleNamespace

import pytest
import torch

from trueline import errors
from trueline.data.source import Batch
from trueline.train.worker import measure


@pytest.mark.parametrize(
    ("found", "total"), [([1.0, 2.0, 3.0], 6.0), (2.0, 6.0), ([[1.0, 3.0], [2.0, 4.0], [5.0, 5.0]], 10.0)], ids=str
)
def test_a_value_for_each_record_or_their_mean_makes_the_same_sum(found, total):
    assert measure.sum_values("loss", found, 3) == total


def test_another_number_of_values_than_records_is_refused():
    with pytest.raises(errors.RecipeError, match=r"'loss' returned \[2\] values for 3 records"):
        measure.sum_values("loss", [1.0, 2.0], 3)


class Drawing:
    """Records that are drawn anew at each reading."""

    num_records = 8

    def read(self, indices):
        return Batch(torch.rand(len(indices), 1), None)


def test_what_an_evaluation_draws_is_of_its_chunk_and_leaves_the_generators_alone():
    recipe = SimpleNamespace(loss=lambda outputs, labels: outputs.mean(), metrics=None)
    compute = measure.make_measure(recipe, torch.nn.Identity(), Drawing())
    torch.manual_seed(1)
    found = [compute(start, start + 4)["loss"] for start in (0, 4, 0)]
    assert (found[0] == found[2], found[0] == found[1]) == (True, False)
    drawn = torch.rand(1).item()
    torch.manual_seed(1)
    assert torch.rand(1).item() == drawn
