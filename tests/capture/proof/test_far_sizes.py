"""How long a call at a far size will take is predicted from the smaller ones."""

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import far_sizes
from trueline.capture.proof.far_sizes import FarAnswer, FarSizes
from trueline.capture.size_limits import find_range


class Table(nn.Module):
    """Of 100 records."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.table(torch.arange(x.shape[0])))


def costing(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> FarSizes:
    """The table of a model whose calls take so long, by their records: those at the next smaller one of them."""
    call = FarSizes._call

    def slowly(self: FarSizes, sizes: dict[str, int], *given: object, **named: object) -> FarAnswer:
        answer = call(self, sizes, *given, **named)  # type: ignore[arg-type]
        assert answer is not None
        taken = seconds[max(one for one in seconds if one <= sizes["batch"])]
        self.allowance("batch").charge(taken)
        return FarAnswer(seen=answer.seen, edges=answer.edges, cost=(taken, 0), measured=answer.measured)

    monkeypatch.setattr(FarSizes, "_call", slowly)
    return FarSizes(EagerSession(Table(), torch.randn(5, 4)))


def test_a_constant_part_of_a_calls_cost_leaves_no_far_size_out(monkeypatch: pytest.MonkeyPatch) -> None:
    far = costing(monkeypatch, {1: 0.02, 6: 0.003})
    assert find_range(far, far.eager.calling.presumed, "batch") == (1, 100)


def test_sizes_whose_calls_would_take_too_long_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    far = costing(monkeypatch, {1: 0.04, 6: 0.09})
    assert find_range(far, far.eager.calling.presumed, "batch") == (1, None)


def test_an_end_that_there_is_no_time_to_find_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    far = costing(monkeypatch, {1: 0.02, 128: 0.5})
    assert find_range(far, far.eager.calling.presumed, "batch") == (1, 64)


@pytest.mark.parametrize(
    ("before", "last", "expected"),
    [
        ((5, 0.04), (5, 0.04), 0.4),
        ((5, 0.04), (10, 0.03), 0.03),
        ((5, 0.02), (10, 0.03), 0.11),
        ((5, 0.02), (10, 0.08), 2.0),
        ((5, 0.001), (10, 0.004), 0.028),
    ],
)
def test_cost_grows_by_a_power_of_the_size_or_linearly_beside_a_constant(
    before: tuple[int, float], last: tuple[int, float], expected: float
) -> None:
    assert far_sizes._extrapolate(before, last, 50) == pytest.approx(expected)


def test_tensors_are_measured_again_only_at_sizes_that_are_a_quarter_larger() -> None:
    far = FarSizes(EagerSession(nn.Linear(4, 4), torch.randn(5, 4)))
    claim = far.eager.calling.presumed
    answers = [far.ask(claim, "batch", {"batch": size}) for size in (64, 70, 80, 81)]
    measured = [(answer.measured, answer.cost[1]) for answer in answers if answer is not None]
    assert measured == [(True, 64 * 16), (False, 70 * 16), (False, 80 * 16), (True, 81 * 16)]
    small = far.ask(claim, "batch", {"batch": 81}, how=far_sizes.SMALL)
    assert small is not None
    assert not small.measured
