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


class Numbers:
    """Records 0 to 39; a label is whether the number is even."""

    num_records = 40

    def read(self, indices):
        numbers = torch.from_numpy(indices.astype("float32"))[:, None]
        return Batch(numbers, (numbers[:, 0] % 2 == 0).long())


def try_metric(function):
    recipe = SimpleNamespace(loss=lambda outputs, _: outputs.mean(), metrics=lambda: {"rate": function})
    measure.expect_no_memory(measure.make_measure(recipe, torch.nn.Identity(), Numbers()), Numbers.num_records)


def test_a_metric_that_counts_what_it_was_given_before_is_refused_as_workers_measure_other_records():
    """It would choose another best checkpoint, or stop at another step, for another number of workers."""
    seen = []

    def average(outputs, labels):
        seen.extend((outputs[:, 0] > 11).tolist())
        return sum(seen) / len(seen)

    with pytest.raises(errors.RecipeError, match=r"metric rate of records 0 to 5 .* is 0, and 0") as no:
        try_metric(average)
    assert "keep nothing" in no.value.hint


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, _: outputs[:, 0] > 11,
        lambda outputs, _: outputs.mean(),
        lambda outputs, _: torch.rand(len(outputs)),
        lambda outputs, _: outputs.mean() * float("nan"),
    ],
)
def test_metrics_of_their_records_are_measured_also_those_that_draw(function):
    try_metric(function)


def test_records_that_cannot_be_measured_are_left_to_the_evaluation():
    def fail(outputs, _):
        raise OSError("record 3 is gone")

    try_metric(fail)
