"""How long a call at a far size will take is predicted from the smaller ones."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.bundle.describe import range_text
from trueline.capture import size_walk
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import far_sizes
from trueline.capture.proof.far_sizes import FarAnswer, FarSizes
from trueline.capture.size_limits import find_range
from worlds import recipes
from worlds.cases import few


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


class Positions(nn.Module):
    """Of a hundred steps at most, which no guard of an export says."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(100, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.positions(torch.arange(x.shape[1]))
        return found


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dear_s", "claimed"),
    few(
        [
            (Plain, 20.0, "batch from 1 up, no bound; length from 1 up, no bound"),
            (Plain, 0.0, "batch from 1 to 256 (probed so far); length from 1 to 10 (probed so far)"),
            (Positions, 20.0, "batch from 1 up, no bound; length from 1 to 100"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_model_whose_calls_take_all_the_time_is_claimed_without_a_bound_after_one_far_call_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type[nn.Module], dear_s: float, claimed: str
) -> None:
    for name, value in {"FREE_S": 0.0, "CHEAP_CALLS": 0, "DEAR_S": dear_s}.items():
        monkeypatch.setattr(far_sizes, name, value)
    recipe = recipes.untrained(model, examples=lambda: iter([torch.randn(3, 5, 4), torch.randn(2, 8, 4)]))
    capture(recipe, None, tmp_path / "b", formats=["torch_export"])
    assert range_text(open_bundle(tmp_path / "b").signature) == claimed


@pytest.mark.jobs
@pytest.mark.slow
def test_of_the_dearest_models_the_one_far_call_has_fewer_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(far_sizes, "FREE_S", 0.0), (far_sizes, "CHEAP_CALLS", 0), (size_walk, "DEAREST_S", 0.0)]
    for module, name, value in sizes:
        monkeypatch.setattr(module, name, value)
    asked: list[int] = []
    call = FarSizes._call
    monkeypatch.setattr(FarSizes, "_call", lambda far, at, *given, **named: (
        asked.append(at["batch"]) or call(far, at, *given, **named)  # type: ignore[func-returns-value]
    ))  # fmt: skip
    recipe = recipes.untrained(Plain, examples=lambda: iter([torch.randn(3, 5, 4), torch.randn(2, 5, 4)]))
    capture(recipe, None, tmp_path / "b", formats=["torch_export"])
    assert range_text(open_bundle(tmp_path / "b").signature) == "batch from 1 up, no bound"
    assert max(asked) == 16
