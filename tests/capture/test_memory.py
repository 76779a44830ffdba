"""A capture takes a few times the memory of the weights: of the model, of one opened program, and of what each makes
of them while it is written or opened."""

import pytest
from bench.zoo.large import measured


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("name", "formats"), [("linear", 2), ("gated", 1), ("convolution", 2)])
def test_a_capture_of_forty_million_parameters_takes_at_most_four_times_their_memory(name: str, formats: int) -> None:
    found = measured(name, 40)
    assert len(found["proven"]) == formats
    assert found["peak_over_weights"] <= 4


@pytest.mark.slow
@pytest.mark.long
def test_answers_as_large_as_a_table_take_their_memory_once_more() -> None:
    found = measured("tied", 40)
    assert len(found["proven"]) == 2
    assert found["peak_over_weights"] <= 5
