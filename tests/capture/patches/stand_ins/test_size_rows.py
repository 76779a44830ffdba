"""Sums and folds over the rows of a tensor stay functions of their number while a model is traced."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.stand_ins.size_rows import SizeRows, accumulate, add_up, reduce

X = torch.linspace(-2, 2, 30).reshape(5, 2, 3)
ROWS = SizeRows(X, 0)


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum(x.unbind(1)) / x.shape[1] + sum(x.transpose(0, 1), 0.5)


class Runs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = list(itertools.accumulate(x.unbind(1)))
        most = itertools.accumulate(torch.unbind(x, dim=1), torch.maximum)
        return torch.stack(rows, 1) + torch.stack(list(most), dim=1)[:, : len(rows)]


class Folds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        most = functools.reduce(torch.maximum, x.unbind(1))
        return most + functools.reduce(operator.add, x.transpose(0, 1)) - functools.reduce(torch.min, x.unbind(1)[1:])


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.unbind(1)
        return torch.cat(list(reversed(rows)), dim=-1) * 2 + rows[0].sum() + rows[-1].sum()


@pytest.mark.parametrize("kind", [Sums, Runs, Folds, Joined])
def test_a_fold_over_the_steps_is_one_operator_for_every_length(kind: type[nn.Module]) -> None:
    eager = EagerSession(kind().eval(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    for length in (7, 9, 12):
        x = torch.randn(5, length, 4).numpy()
        assert np.allclose(program.run({"x": x})["output"], eager.run({"x": x})["output"], rtol=1e-5, atol=1e-6)


class Packed(nn.Module):
    """Records in the order of their lengths, packed by a list of these, as in many repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ordered, order = lengths.sort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(x[order], ordered.tolist(), batch_first=True)
        _, last = self.rnn(packed)
        return last[-1][order.argsort()] + max(ordered.tolist()) + sum(ordered.tolist())


def test_a_list_of_lengths_is_a_tensor_again_where_records_are_packed() -> None:
    torch.manual_seed(0)
    example = {"x": torch.randn(3, 9, 4), "lengths": torch.tensor([4, 9, 2])}
    eager = EagerSession(Packed().eval(), example, dynamic_shapes={"x": {1: "length"}})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    for lengths in ([5], [1, 7, 7, 2, 3]):
        given = {"x": torch.randn(len(lengths), 7, 4).numpy(), "lengths": np.array(lengths)}
        assert np.allclose(program.run(given)["output"], eager.run(given)["output"], atol=1e-6)


def test_records_are_added_up_as_python_adds_them() -> None:
    class Records(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - sum(x) / len(x)

    eager = EagerSession(Records().eval(), torch.randn(3, 4))
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    for count in (1, 2, 9):
        x = torch.randn(count, 4).numpy()
        assert np.allclose(program.run({"x": x})["output"], eager.run({"x": x})["output"], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int8, torch.bool])
def test_sums_have_the_dtype_and_the_values_of_pythons(dtype: torch.dtype) -> None:
    rows = (X * 40).to(dtype)
    own, plain = add_up(SizeRows(rows, 0)), sum(rows)
    assert own.dtype is plain.dtype
    assert torch.allclose(own.double(), plain.double())
    assert add_up([1, 2], 3) == 6


@pytest.mark.parametrize("function", [operator.add, torch.mul, torch.maximum, torch.min])
def test_folds_by_known_functions_have_pythons_values(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert torch.allclose(reduce(function, ROWS), functools.reduce(function, X), atol=1e-6)
    assert torch.allclose(reduce(function, ROWS, X[0] + 1), functools.reduce(function, X, X[0] + 1), atol=1e-6)
    running = torch.stack(list(itertools.accumulate(X, function)))
    assert torch.allclose(accumulate(ROWS, function).join(0, stacked=True), running, atol=1e-6)


def test_any_other_function_takes_one_row_after_the_other() -> None:
    def mix(one: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(one + other)

    assert torch.equal(reduce(mix, ROWS), functools.reduce(mix, X))
    assert torch.equal(torch.stack(list(accumulate(ROWS, mix))), torch.stack(list(itertools.accumulate(X, mix))))
    assert [row.tolist() for row in ROWS[::-1]] == [row.tolist() for row in reversed([*X])]
    assert ROWS[1:3].join(1, stacked=False).shape == (2, 6)
