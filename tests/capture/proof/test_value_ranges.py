"""The ranges of values that a model answers are found, and claimed only where they hold for every place and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle.values import Values
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import limits, value_ranges

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 5, 0], [3, 9, 4], [7, 2, 1]])
AT = torch.tensor([1, 3, 0, 7, 2])


class Table(nn.Module):
    def __init__(self, rows: int = 20, offset: int = 0) -> None:
        super().__init__()
        self.table, self.offset = nn.Embedding(rows, 4), offset

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.table(ids + self.offset)
        return found


class Wraps(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.arange(20.0)[ids]


class Edges(nn.Module):
    """torch does not check the indices of a sparse tensor, and writes where they lead."""

    def forward(self, at: Tensor) -> Tensor:
        near = torch.sparse_coo_tensor(torch.stack([at, at]), torch.ones(len(at)), (5, 5)).coalesce()
        return torch.sparse.mm(near, torch.eye(5))


class Picks(nn.Module):
    """An index into a dimension whose size is free."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return x.gather(1, at[:, None])


class Lengths(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        if (at > x.shape[1]).any():
            raise ValueError("longer than its record")
        return (x * (torch.arange(x.shape[1])[None] < at[:, None])).sum(1)


class Kinds(nn.Module):
    def forward(self, at: Tensor) -> Tensor:
        return nn.functional.one_hot(at, 8).float()


class Roots(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.min() < 0:
            raise ValueError("negative")
        return x.sqrt()


class Sums(nn.Module):
    """Whether a value is refused depends on another one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        found: Tensor = self.table(at + x[:, 0].abs().long())
        return found


class First(nn.Module):
    """Only the first value of a record is an index."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.arange(20.0).index_select(0, ids[:, 0]) + ids[:, 1]


class Counts(nn.Module):
    """As much memory as the largest value says."""

    def forward(self, at: Tensor) -> Tensor:
        return torch.bincount(at).sum().expand(len(at))


class Bags(nn.Module):
    """Offsets have to rise from 0; the range of ids is their own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 4)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        found: Tensor = self.bag(ids, at)
        return found


def found(module: nn.Module, *examples: Any, **dims: Any) -> dict[str, Values]:
    eager = EagerSession(module.eval(), examples[0], others=examples[1:], **dims)
    return value_ranges.settle(eager, eager.calling.presumed).values


@pytest.mark.parametrize(
    ("module", "example", "values"),
    [
        (Table(), IDS, {"ids": Values(low=0, high=19)}),
        (Table(), IDS.int(), {"ids": Values(low=0, high=19)}),
        (Table(30000), IDS, {"ids": Values(low=0, high=29999)}),
        (Table(offset=5), IDS, {"ids": Values(low=-5, high=14)}),
        (Wraps(), IDS, {"ids": Values(low=-20, high=19)}),
        (Picks(), (X, AT), {"at": Values(low=0, high=7)}),
        (Kinds(), AT, {"at": Values(low=0, high=7)}),
        (Roots(), X.abs(), {"x": Values(low=0.0)}),
        (Sums(), (X, AT), {}),
        (First(), IDS, {}),
        (Bags(), (IDS.flatten(), torch.tensor([0, 2, 5])), {"ids": Values(low=0, high=29)}),
        (nn.ReLU(), X, {}),
    ],
)
def test_the_range_is_what_the_model_answers(module: nn.Module, example: Any, values: dict[str, Values]) -> None:
    assert found(module, example) == values


@pytest.mark.parametrize(
    ("module", "values"), [(Picks(), Values(low=0, high=-1, size="length")), (Lengths(), Values(high=0, size="length"))]
)
def test_a_range_that_ends_at_a_size_moves_with_it(module: nn.Module, values: Values) -> None:
    long = torch.randn(3, 11), torch.tensor([10, 3, 0])
    assert found(module, (X, AT), long, dynamic_shapes={"x": {1: "length"}}) == {"at": values}


@pytest.mark.slow
def test_a_count_that_would_take_all_memory_ends_the_range_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES", (2**26,))
    values = found(Counts(), AT)["at"]
    assert values.low == 0
    assert values.high is not None
    assert 2**18 < values.high < 2**26


def test_the_search_ends_in_its_time_with_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_ranges, "BUDGET_S", -1.0)
    monkeypatch.setattr(value_ranges, "CHEAP_CALLS", 0)
    assert found(Table(), IDS) == {"ids": Values(low=0, high=9)}  # what two of its records show


def test_floats_are_searched_in_their_order() -> None:
    kinds: list[Any] = [np.float16, np.float32, np.float64]
    for kind in kinds:
        for number in (0.0, 1.5, -1.5, 1e-7, -65504.0):
            held = float(kind(number))
            at = value_ranges._ordinal(held, np.dtype(kind))
            assert value_ranges._from_ordinal(at, np.dtype(kind)) == held
            assert value_ranges._from_ordinal(at + 1, np.dtype(kind)) > held


def test_the_size_of_a_table_is_tried_before_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = EagerSession(Table(16_000).eval(), IDS)
    calls: list[Any] = []
    run = EagerSession.run
    monkeypatch.setattr(EagerSession, "run", lambda self, inputs: (calls.append(1), run(self, inputs))[1])
    assert value_ranges.settle(eager, eager.calling.presumed).values == {"ids": Values(low=0, high=15_999)}
    assert len(calls) < 40


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_an_index_beyond_a_sparse_tensor_is_outside_the_range_and_ends_no_process() -> None:
    eager = EagerSession(Edges().eval(), torch.tensor([1, 3, 0, 2]))
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    found = value_ranges.settle(eager, eager.signature)
    assert (found.inputs[0].values.low, found.inputs[0].values.high) == (0, 4)
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        eager.run({"at": np.array([1, 3, 0, 9])})
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
