"""Whether gradients are finite is seen wherever in a bucket one is not, and a large sum is no alarm."""

import pytest
import torch

from trueline.parallel.finite import are_finite, describe_infinite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", range(3))
def test_one_number_in_a_bucket_is_seen(bad: float, place: int) -> None:
    bucket = torch.ones(12)
    gradients = [bucket[at : at + 4].view(2, 2) for at in (0, 4, 8)]
    assert are_finite(gradients)
    gradients[place][1, 0] = bad
    assert not are_finite(gradients)


def test_numbers_whose_sum_overflows_and_memory_of_others_are_no_alarm() -> None:
    assert are_finite([torch.full((8,), 3e38), torch.full((8,), 6e4, dtype=torch.float16), torch.empty(0)])
    room = torch.full((8,), float("nan"))
    room[:4] = 1.0
    assert are_finite([room[:4]])
    assert are_finite([torch.ones(3, dtype=torch.complex64), torch.eye(3).to_sparse()])
    assert not are_finite([(torch.eye(3) / 0.0).nan_to_num(0.0, float("inf")).to_sparse()])


def test_the_parameter_whose_gradient_is_not_finite_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    gradients = [torch.zeros_like(value) for value in model.parameters()]
    assert describe_infinite(model, [*gradients[:3], None]) == ""
    gradients[2][0, 1] = float("nan")
    assert describe_infinite(model, gradients) == "its gradient of 1.weight is not finite"
