"""Whole numbers beyond 2**31 and 2**53: ONNX Runtime compares, adds and multiplies them as torch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.errors import CaptureError
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow

OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "limits": lambda x: x.clamp(-4, 3),
    "a lower limit": lambda x: x.clamp(min=0),
    "an upper limit": lambda x: x.clamp(max=5),
    "limits that cross": lambda x: x.clamp(5, 2),
    "the larger": lambda x: torch.maximum(x, x.flip(1)),
    "the smaller": lambda x: torch.minimum(x, x.flip(1)),
    "nothing below zero": torch.relu,
    "the sign": torch.sign,
    "a sum of each row": lambda x: x.sum(1),
    "a sum of all": lambda x: x.sum(),
    "a sum that keeps its dimension": lambda x: x.sum((0, 1), keepdim=True),
    "a sum in 32 bits": lambda x: x.sum(1, dtype=torch.int32),
    "a product of each row": lambda x: x.prod(1),
    "a product that keeps its dimension": lambda x: x.prod(1, keepdim=True),
    "the largest of each row": lambda x: x.amax(1),
    "the smallest of each row": lambda x: x.amin(1),
    "the largest in groups": lambda x: x[:, :16].reshape(-1, 4, 4).amax(1),
    "the smallest of each column": lambda x: x.amin(0),
    "the largest of all": lambda x: x.max(),
    "the smallest that keeps its dimensions": lambda x: x.amin((0, -1), keepdim=True),
    "the largest with its place": lambda x: x.max(1).values,
    "the most frequent of each row": lambda x: x[:, torch.arange(40) % 13].mode(1).values,
    "a count": lambda x: (x > 0).sum(1),
    "zero to its power": lambda x: 0 ** x.abs() + 0 ** (x % 3).int(),
    "none of them zero": lambda x: (x != 0).prod(1),
    "how many at first are above zero": lambda x: (x > 0).int().cumprod(1).sum(1),
}


class Each(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [operator(x) for operator in OPERATORS.values()]


def numbers(rows: int) -> torch.Tensor:
    """Those around powers of two, of either sign, in rows of 17: a runtime computes four or eight at a time."""
    powers = [sign * 2**power + more for power in range(62) for sign in (1, -1) for more in (-1, 0, 1)]
    ends = [-(2**63), 2**63 - 1, 0]
    return torch.tensor(np.random.default_rng(0).choice([*powers, *ends], (rows, 17)))


def test_large_whole_numbers_are_answered_as_torch_answers(tmp_path: Path) -> None:
    eager = EagerSession(Each().eval(), numbers(3))
    exported = torch_export.export(eager.module, eager.calling)
    program = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    inputs = {"x": numbers(200).numpy()}
    found = program.run(inputs)
    for what, (name, expected) in zip(OPERATORS, eager.run(inputs).items(), strict=True):
        np.testing.assert_array_equal(found[name], expected, err_msg=what, strict=True)


POWERS = (0, 1, 2, 3, 4, 7, 64)


class ToAPower(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x ** (x % 5)


class OfNumbers(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        of_two = 2 ** (x % 70) + 2 ** (x % 40).int()
        kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        each = torch.tensor([0, 1, 5, 2]) + torch.zeros(17, 1, dtype=torch.int64)
        return [
            of_two,
            x.unsqueeze(-1) ** each,
            x[:, :1] ** torch.ones(3, dtype=torch.int64),
            *(x.to(kind) ** power for kind in kinds for power in POWERS),
        ]


def test_a_power_of_whole_numbers_is_no_onnx_but_of_two_or_to_numbers_of_the_code(tmp_path: Path) -> None:
    eager = EagerSession(ToAPower().eval(), numbers(3))
    with pytest.raises(CaptureError, match="raises whole numbers to a power in double precision"):
        emit.emit(torch_export.export(eager.module, eager.calling), tmp_path / "to")
    eager = EagerSession(OfNumbers().eval(), numbers(3))
    exported = torch_export.export(eager.module, eager.calling)
    inputs = {"x": numbers(200).numpy()}
    found = open_session("onnx", emit.emit(exported, tmp_path), exported.signature).run(inputs)
    for name, expected in eager.run(inputs).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name, strict=True)


class OfEachColumn(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.prod(0) + x[:1]


def test_a_product_of_a_free_number_of_whole_numbers_is_no_onnx(tmp_path: Path) -> None:
    eager = EagerSession(OfEachColumn().eval(), numbers(3))
    with pytest.raises(CaptureError, match="multiplies whole numbers along a dimension in double precision"):
        emit.emit(torch_export.export(eager.module, eager.calling), tmp_path)
